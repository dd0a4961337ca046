"""The limits of this machine, measured in the run that is held against them.

Each function here is a probe for a worker (`measure.Probe`) and returns a list of entries:

    name          unit     what
    launch_wait   ms       one empty operation, launched and waited for
    launch_chain  ms       one more dependent operation in a chain that is waited for once
    copy          GB/s     bytes read + written ÷ time at a working set of `bytes` (both arrays)
    fma           GFLOP/s  2 × multiply-adds ÷ time, per `dtype`; `source` says by what

with `framework`, `target` (cpu, host, cuda, mps, metal), `value` (the median of `samples`) and `best`. What
cannot be measured is an entry with a `reason` instead of a value.
"""

import ctypes
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from typing import Any, Protocol

from harness.measure import Probe

SAMPLES = 7
WAKE_SECONDS = 0.1  # a GPU or a core that was idle is slow at first: one launch then costs twice as much
CPU_SETS = tuple(2**n for n in range(15, 28, 2))  # 32 KB to 128 MB: from the first cache to memory
GPU_SETS = tuple(2**n for n in range(16, 31, 2))  # 64 KB to 1 GB
HICCUPS = "the shorter of two runs took longer each time"
MATMUL_SECONDS = 0.15  # a matrix size is doubled until a product takes about this long


class Operations(Protocol):
    """What a framework must offer to be probed. Every method waits for what it started."""

    framework: str
    target: str

    def chain(self, count: int) -> None:
        """`count` dependent operations on one number."""

    def copies(self, nbytes: int) -> Callable[[int], None]:
        """A function of a count: so many dependent passes that read `nbytes` ÷ 2 and write as many."""

    def products(self, size: int, dtype: str) -> Callable[[int], None]:
        """A function of a count: so many dependent matrix products of size × size."""


def probes(backends: tuple[str, ...], device: str, threads: int, direct: bool = False) -> tuple[Probe, ...]:
    """The probes for a set of backends: PyTorch's where it runs, MLX's and the host's where MLX runs.

    `direct`: also what a launch costs MLX without CUDA graphs, in the worker "mlx-direct".
    """
    found = []
    if any(name.startswith("torch") for name in backends):
        arguments = {"device": device, "threads": threads}
        found.append(Probe("torch", "harness.ceilings:torch_ceilings", arguments))
    if any(name.startswith("mlx") for name in backends):
        found.append(Probe("mlx", "harness.ceilings:mlx_ceilings", module="mlx.core"))
        found.append(Probe("mlx", "harness.ceilings:host_ceilings", {"threads": threads}, module="mlx.core"))
    if direct:
        found.append(Probe("mlx-direct", "harness.ceilings:direct_ceilings", module="mlx.core"))
    return tuple(found)


def torch_ceilings(device: str = "auto", threads: int = 0) -> list[dict[str, Any]]:
    """PyTorch's entries on `device`."""
    return list(_measure(TorchOperations(device, threads)))


def mlx_ceilings() -> list[dict[str, Any]]:
    """MLX's entries on its default device."""
    return list(_measure(MlxOperations()))


def direct_ceilings() -> list[dict[str, Any]]:
    """What launches cost MLX on CUDA without CUDA graphs, in a process with `backends.NO_GRAPHS`."""
    operations = MlxOperations()
    label = {"framework": "mlx-direct", "target": operations.target}
    return list(_launches(operations, label)) if operations.target == "cuda" else []


def _launches(operations: Operations, label: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The prices of a launch, on a device that is awake."""
    start = time.perf_counter()
    while time.perf_counter() - start < WAKE_SECONDS:
        operations.chain(20)
    waits = [_seconds(operations.chain, 1) for _ in range(20 * SAMPLES)]
    yield _entry("launch_wait", label, "ms", [1e3 * s for s in waits], best=min)
    slopes = [_slope(operations.chain, 100) for _ in range(SAMPLES)]
    yield _entry("launch_chain", label, "ms", [1e3 * s for s in slopes], best=min)


def _measure(operations: Operations) -> Iterator[dict[str, Any]]:
    """All entries of one framework on one device."""
    label = {"framework": operations.framework, "target": operations.target}
    on_cpu = operations.target == "cpu"
    yield from _launches(operations, label)
    for nbytes in CPU_SETS if on_cpu else GPU_SETS:
        run = operations.copies(nbytes)
        run(2)
        count = max(2, min(200, 2**28 // nbytes))
        slopes = [_slope(run, count) for _ in range(SAMPLES)]
        rates = [nbytes / 1e9 / slope for slope in slopes if slope]  # 0: a hiccup in the shorter run
        where = label | {"bytes": nbytes}
        yield _entry("copy", where, "GB/s", rates) if rates else where | {"name": "copy", "reason": HICCUPS}
    for dtype in ("float32", "float16"):
        size, run = _product_size(operations, dtype)
        rates = [2e-9 * size**3 * 2 / _seconds(run, 2) for _ in range(SAMPLES)]
        yield _entry("fma", label | {"dtype": dtype, "source": f"matmul {size}"}, "GFLOP/s", rates)


def _product_size(operations: Operations, dtype: str) -> tuple[int, Callable[[int], None]]:
    """The largest power of two up to 8192 whose product stays within MATMUL_SECONDS, and the run of it."""
    size = 256
    while True:
        run = operations.products(size, dtype)
        run(1)
        if size >= 8192 or _seconds(run, 1) * 8 > MATMUL_SECONDS:
            return size, run
        size *= 2


def _seconds(run: Callable[[int], None], count: int) -> float:
    """Seconds that `run(count)` takes."""
    start = time.perf_counter()
    run(count)
    return time.perf_counter() - start


def _slope(run: Callable[[int], None], count: int) -> float:
    """Seconds per further item, from `count` and twice as many: what both pay once cancels out."""
    return max(0.0, _seconds(run, 2 * count) - _seconds(run, count)) / count


def _entry(
    name: str, label: dict[str, Any], unit: str, samples: list[float], best: Callable[..., float] = max
) -> dict[str, Any]:
    """One entry of the table in the module's docstring."""
    values = {"value": median(samples), "best": best(samples), "samples": len(samples)}
    return {"name": name, "unit": unit} | label | values


class TorchOperations:
    """PyTorch's side of `Operations`."""

    framework = "torch"

    def __init__(self, device: str, threads: int) -> None:
        import torch

        from harness.backends import torch_device

        self.torch = torch
        self.target = torch_device(device)
        if threads:
            torch.set_num_threads(threads)
        waits = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}
        self.wait = waits.get(self.target, lambda: None)

    def chain(self, count: int) -> None:
        """`count` additions."""
        with self.torch.inference_mode():
            x = self.torch.zeros(1, device=self.target)
            for _ in range(count):
                x = x + 1
            self.wait()

    def copies(self, nbytes: int) -> Callable[[int], None]:
        """Copies to and fro between two arrays."""
        a, b = (self.torch.zeros(nbytes // 8, device=self.target) for _ in range(2))

        def run(count: int) -> None:
            for i in range(count):
                (b.copy_(a) if i % 2 == 0 else a.copy_(b))
            self.wait()

        return run

    def products(self, size: int, dtype: str) -> Callable[[int], None]:
        """Products x ← x·w, with w scaled so that x keeps its size."""
        kind = getattr(self.torch, dtype)
        x, w = (self.torch.randn(size, size, device=self.target) for _ in range(2))
        x, w = x.to(kind), (w / size**0.5).to(kind)

        def run(count: int) -> None:
            y = x
            with self.torch.inference_mode():
                for _ in range(count):
                    y = y @ w
            self.wait()

        return run


class MlxOperations:
    """MLX's side of `Operations`."""

    framework = "mlx"

    def __init__(self) -> None:
        import mlx.core as mx

        from harness.backends import mlx_device

        self.mx = mx
        self.target = mlx_device()

    def chain(self, count: int) -> None:
        """`count` additions, evaluated together."""
        x = self.mx.zeros(1)
        for _ in range(count):
            x = x + 1
        self.mx.eval(x)

    def copies(self, nbytes: int) -> Callable[[int], None]:
        """Additions of one: MLX copies nothing that it can share, and an addition has a copy's traffic."""
        x = self.mx.zeros(nbytes // 8)
        self.mx.eval(x)

        def run(count: int) -> None:
            y = x
            for _ in range(count):
                y = y + 1
            self.mx.eval(y)

        return run

    def products(self, size: int, dtype: str) -> Callable[[int], None]:
        """Products x ← x·w, with w scaled so that x keeps its size."""
        kind = getattr(self.mx, dtype)
        x = self.mx.random.normal((size, size)).astype(kind)
        w = (self.mx.random.normal((size, size)) / size**0.5).astype(kind)
        self.mx.eval(x, w)

        def run(count: int) -> None:
            y = x
            for _ in range(count):
                y = y @ w
            self.mx.eval(y)

        return run


# Independent chains of multiply-adds in vectors of WIDTH bytes, enough of them to hide the latency of two
# units and few enough for 16 registers. A call runs `steps` steps of FMA_CHAINS vectors on each of `threads`
# threads and returns the seconds from when all had started to when the last was done. A compiler may halve
# wide vectors that it sees only inside a function; those of a function's signature it leaves whole.
FMA_LOOP = """
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>
using Clock = std::chrono::steady_clock;
template <class T, int WIDTH>
struct Lanes {
  typedef T vec __attribute__((vector_size(WIDTH)));
};
template <class vec>
static inline __attribute__((always_inline)) vec multiply_add(vec x, vec a, vec b) { return x * a + b; }
template <class T, int WIDTH>
static void loop(long steps, volatile T* values) {
  typedef typename Lanes<T, WIDTH>::vec vec;
  vec acc[FMA_CHAINS], a = vec{} + values[0], b = vec{} + values[1];
  for (int c = 0; c < FMA_CHAINS; c++) acc[c] = vec{} + T(c);
  for (long i = 0; i < steps; i++)
    for (int c = 0; c < FMA_CHAINS; c++) acc[c] = multiply_add<vec>(acc[c], a, b);
  for (int c = 1; c < FMA_CHAINS; c++) acc[0] += acc[c];
  values[2] = acc[0][0];
}
template <class T, int WIDTH>
static double run(int threads, long steps) {
  std::atomic<int> started{0};
  std::vector<Clock::time_point> begin(threads), end(threads);
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; t++)
    pool.emplace_back([&, t] {
      volatile T values[3] = {T(0.999f), T(0.001f), T(0)};
      ++started;
      while (started < threads) std::this_thread::yield();
      begin[t] = Clock::now();
      loop<T, WIDTH>(steps, values);
      end[t] = Clock::now();
    });
  for (auto& thread : pool) thread.join();
  const auto first = *std::min_element(begin.begin(), begin.end());
  return std::chrono::duration<double>(*std::max_element(end.begin(), end.end()) - first).count();
}
extern "C" double fma_float32_32(int threads, long steps) { return run<float, 32>(threads, steps); }
extern "C" double fma_float32_64(int threads, long steps) { return run<float, 64>(threads, steps); }
#ifdef __FLT16_MAX__
extern "C" double fma_float16_32(int threads, long steps) { return run<_Float16, 32>(threads, steps); }
extern "C" double fma_float16_64(int threads, long steps) { return run<_Float16, 64>(threads, steps); }
#endif
"""
FMA_CHAINS = 12
FMA_WARM_UP = 0.2  # seconds until clocks have settled
FMA_SAMPLE = 0.03  # seconds


def host_ceilings(threads: int = 0) -> list[dict[str, Any]]:
    """The host target's entries: what a launch costs there, and a compiled loop of multiply-adds."""
    import mlx.core as mx

    import kernels
    from kernels import host
    from kernels.depthwise import dw_bn_relu_call

    label = {"framework": "host", "target": "host"}
    reason = kernels.unavailable("host")
    if reason:
        return [label | {"name": name, "reason": reason} for name in ("launch_wait", "launch_chain", "fma")]
    count = threads or host.default_threads()
    params = mx.zeros((11, 8))
    x = mx.zeros((1, count, 1, 8))  # a group of almost no work for every thread
    call = dw_bn_relu_call(x, params, 1)
    plans: dict[int, Callable[[mx.array], mx.array]] = {}

    def chain(length: int) -> None:
        """`length` launches that feed each other, in one foreign call."""
        if length not in plans:
            sources = [kernels.ARGUMENT, *(kernels.Output(i) for i in range(length - 1))]
            calls = [replace(call, inputs=(one, params)) for one in sources]
            plans[length] = kernels.make_plan(lambda _: calls, 1, "host", count)
        plans[length](x)

    for length in (1, 8, 16):
        chain(length)
    waits = [1e3 * _seconds(chain, 1) for _ in range(20 * SAMPLES)]
    slopes = [1e3 * _slope(chain, 8) for _ in range(4 * SAMPLES)]
    return [
        _entry("launch_wait", label, "ms", waits, best=min),
        _entry("launch_chain", label, "ms", slopes, best=min),
        *fma_ceilings(count),
    ]


def fma_ceilings(threads: int) -> list[dict[str, Any]]:
    """What compiled loops of multiply-adds reach on `threads` threads, per dtype and width of vector."""
    from kernels import host

    label = {"name": "fma", "framework": "host", "target": "host"}
    library = ctypes.CDLL(str(host.build(f"#define FMA_CHAINS {FMA_CHAINS}\n{FMA_LOOP}", "fma_loop")))
    entries = []
    for dtype, width in (("float32", 32), ("float32", 64), ("float16", 32), ("float16", 64)):
        function = getattr(library, f"fma_{dtype}_{width}", None)
        if function is None:
            entries.append(label | {"dtype": dtype, "reason": "the compiler has no _Float16"})
            continue
        function.argtypes, function.restype = (ctypes.c_int, ctypes.c_long), ctypes.c_double
        steps = 100_000
        while function(threads, steps) < FMA_SAMPLE:
            steps *= 2
        for _ in range(round(FMA_WARM_UP / FMA_SAMPLE)):
            function(threads, steps)
        gflop = 2e-9 * FMA_CHAINS * width / (4 if dtype == "float32" else 2) * threads * steps
        rates = [gflop / function(threads, steps) for _ in range(3 * SAMPLES)]
        source = f"compiled loop, {8 * width}-bit vectors, {threads} threads"
        entries.append(_entry("fma", label | {"dtype": dtype, "source": source}, "GFLOP/s", rates))
    return entries


def rate(entries: list[dict[str, Any]], dtype: str, device: str) -> float | None:
    """The best sample of the multiply-adds of a dtype on a device (see `device_of`) in GFLOP/s, or None."""
    found = [e.get("best", e["value"]) for e in _of(entries, "fma", device) if e["dtype"] == dtype]
    return max(found, default=None)


def bandwidth(entries: list[dict[str, Any]], nbytes: float, device: str) -> float | None:
    """Copy bandwidth in GB/s at a working set of `nbytes`: the best measured at the nearest size or above.

    A smaller working set is never slower than a larger one, but its copies may be too short to show it.
    """
    found = _of(entries, "copy", device)
    if not found:
        return None
    nearest = min((e["bytes"] for e in found), key=lambda b: max(b / nbytes, nbytes / b))
    return max(e["value"] for e in found if e["bytes"] >= nearest)


def launch_ms(entries: list[dict[str, Any]], framework: str) -> tuple[float, float] | None:
    """(one launch and wait, each further dependent launch) of a framework in ms; None where not measured."""
    found = {e["name"]: e["value"] for e in entries if e["framework"] == framework and "value" in e}
    names = ("launch_wait", "launch_chain")
    return tuple(found[name] for name in names) if all(name in found for name in names) else None


def device_of(target: str) -> str:
    """The device behind a target: host is the CPU, PyTorch's mps and Metal are the same GPU."""
    return {"host": "cpu", "mps": "metal"}.get(target, target)


def _of(entries: list[dict[str, Any]], name: str, device: str) -> list[dict[str, Any]]:
    """The measured entries of a name on a device."""
    return [e for e in entries if e["name"] == name and "value" in e and device_of(e["target"]) == device]
