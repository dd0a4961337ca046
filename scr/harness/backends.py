"""The benchmark's backends: everything that is special about PyTorch, MLX or ONNX Runtime.

Each class is a `worker.Backend` and runs inside a worker process; frameworks are imported there, in the
functions that need them, so that the parent (which only reads the tables of names) imports none.

A batch is float32 images (N, C, H, W), the layout of PyTorch; `prepare` converts dtype and layout and puts
them on the device. A result is float32 logits (N, 10), or images in PyTorch's layout.
"""

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from harness import gpu_trace
from harness.cli import Fault
from harness.measure import Candidate
from harness.paths import shown
from harness.spin import Spin
from harness.worker import Backend, Worker, WorkerCrash, WorkerError

# What each backend is, for help texts and reports.
BACKENDS = {
    "torch": "PyTorch, eager",
    "torch-channels-last": "PyTorch, eager, channels_last memory format",
    "torch-compile": "PyTorch under torch.compile, default mode",
    "torch-compile-overhead": "torch.compile in mode reduce-overhead: its kernels in a CUDA graph",
    "torch-graph": "PyTorch, eager, replayed as a captured CUDA graph",
    "torch-graph-channels-last": "the same in channels_last memory format",
    "onnxruntime": "the same weights in ONNX Runtime, on the CPU",
    "mlx": "MLX as written",
    "mlx-compile": "MLX under mx.compile",
    "mlx-folded": "MLX with BatchNorm folded, under mx.compile: the honest baseline",
    "mlx-fused": "MLX with the fused depthwise + BatchNorm + ReLU kernel",
    "mlx-fused-compile": "the fused kernel, BatchNorm folded, under mx.compile around it",
    "mlx-block": "one fused launch per block and one for the head",
    "mlx-block-32kb": "the same on NVIDIA, with Metal's default tilings (32 KB of threadgroup memory)",
    "mlx-network": "the whole network in one launch",
}
NO_TF32 = {"MLX_ENABLE_TF32": "0"}  # MLX reads it at import; PyTorch's switches are set by its backends
DEFAULT = ("torch", "mlx", "mlx-fused")

_MLX = {  # backend: (fusion level, under mx.compile)
    "mlx": ("layers", False),
    "mlx-compile": ("layers", True),
    "mlx-folded": ("folded", True),
    "mlx-fused": ("fused", False),
    "mlx-fused-compile": ("fused-folded", True),
    "mlx-block": ("block", False),
    "mlx-block-32kb": ("block", False),
    "mlx-network": ("network", False),
}
NO_GRAPHS = {"MLX_USE_CUDA_GRAPHS": "0"}  # MLX reads it when it first launches
# Cases in which MLX launches without CUDA graphs: are they waited for awake? And the rungs timed in them.
DIRECT_CASES = {"network, direct": False, "network, direct, awake": True}
DIRECT_RUNGS = ("mlx-folded", "mlx-block", "mlx-network")


@dataclass(frozen=True)
class Options:
    """What all backends of a run have in common.

    `mlx_checkpoint` holds the weights of `checkpoint` as `port_weights` writes them, so that MLX's process
    needs no PyTorch. `device` is PyTorch's, `target` that of our kernels (None: MLX's device). With `tf32`,
    float32 may use TF32, the frameworks' default on NVIDIA. With `tuned`, kernels use the tilings that
    `tune.py` found for this machine, if it ran. With `direct`, MLX launches on CUDA without CUDA graphs; with
    `awake` too, a single forward is waited for with the thread awake (spin.py).
    """

    checkpoint: Path
    mlx_checkpoint: Path | None = None
    dtype: str = "float32"
    device: str = "auto"
    target: str | None = None
    threads: int = 0
    compile_mode: str = "default"
    tf32: bool = False
    tuned: bool = True
    direct: bool = False
    awake: bool = False


def candidate(name: str, options: Options) -> Candidate:
    """The backend `name` as the harness takes it. TF32 is set when a process starts: it has its own."""
    check_name(name)
    suffix, variables = ("-tf32", {}) if options.tf32 else ("", NO_TF32)
    common = {"checkpoint": str(options.checkpoint), "dtype": options.dtype}
    if name in _MLX:
        level, compiled = _MLX[name]
        weights = str(options.mlx_checkpoint or options.checkpoint)
        arguments = common | {"checkpoint": weights, "level": level, "compiled": compiled}
        arguments |= {"target": options.target, "tuned": options.tuned, "as_metal": name == "mlx-block-32kb"}
        worker = f"mlx{suffix}"
        if options.direct:
            worker, variables = f"mlx-direct{suffix}", variables | NO_GRAPHS
            arguments |= {"direct": True, "awake": options.awake}
        return Candidate(name, worker, "harness.backends:MlxNetwork", arguments, "mlx.core", variables)
    arguments = common | {"threads": options.threads}
    if name == "onnxruntime":
        return Candidate(name, name, "harness.backends:OnnxNetwork", arguments)
    overhead = name == "torch-compile-overhead"
    variant = "compile" if overhead else name.removeprefix("torch-")
    mode = "reduce-overhead" if overhead else options.compile_mode
    arguments |= {"device": options.device, "variant": variant, "compile_mode": mode, "tf32": options.tf32}
    return Candidate(name, f"torch{suffix}", "harness.backends:TorchNetwork", arguments, "torch", variables)


def may_use_tf32(name: str) -> bool:
    """Whether a backend's matrix products are the framework's own, in float32 on the device."""
    return name.startswith("torch") or name in ("mlx", "mlx-compile", "mlx-folded")


def check_name(name: str) -> None:
    """Raise Fault for a backend that does not exist."""
    if name not in BACKENDS:
        raise Fault(f"unknown backend {name!r}; known are {', '.join(BACKENDS)}, and all.")


def port_weights(checkpoint: Path, path: Path) -> Path:
    """Write the weights of a PyTorch checkpoint to `path` as MLX reads them alone. Raises Fault."""
    worker = Worker("weights", {})
    try:
        arguments = {"checkpoint": str(checkpoint), "path": str(path)}
        worker.ask("call", function="harness.backends:write_weights", arguments=arguments)
    except (WorkerError, WorkerCrash) as error:
        raise Fault(f"{shown(checkpoint)} could not be read for MLX: {error}.") from error
    finally:
        worker.close()
    return path


def write_weights(checkpoint: str, path: str) -> None:
    """In a process of its own: it needs both frameworks, and no backend is to share a process with both."""
    try:
        import mlx.core as mx

        import mlx_model
    except ImportError:
        return  # then no backend will want to read the file
    from torch_model import read_checkpoint

    layout = {"format_version": mlx_model.EXPORT_VERSION, "layout": mlx_model.EXPORT_LAYOUT}
    arrays = {name: mx.contiguous(a) for name, a in mlx_model.ported(read_checkpoint(checkpoint)).items()}
    mx.save_safetensors(path, arrays, layout)


def reference(checkpoint: Path) -> Candidate:
    """The float64 answer: PyTorch on the CPU, in a process of its own."""
    arguments = {"checkpoint": str(checkpoint), "dtype": "float64", "device": "cpu"}
    return Candidate("reference", "reference", "harness.backends:TorchNetwork", arguments, module="torch")


class TorchBackend(Backend):
    """A PyTorch module in eval mode, on images.

    `variant`: torch, channels-last, compile, graph or graph-channels-last.
    """

    def __init__(
        self,
        model: Any,
        dtype: str = "float32",
        device: str = "auto",
        threads: int = 0,
        variant: str = "torch",
        compile_mode: str = "default",
        tf32: bool = False,
    ) -> None:
        import torch

        self.torch = torch
        self.target = torch_device(device)
        self.traced = self.target == "cuda" and gpu_trace.find_library() is not None
        self.variant = variant
        self.graphed = variant.startswith("graph")
        graphs = self.graphed or (variant == "compile" and compile_mode == "reduce-overhead")
        if graphs and self.target != "cuda":
            raise Fault("CUDA graphs need an NVIDIA GPU")
        if variant == "compile" and self.target == "cpu":
            compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
            if shutil.which(compiler) is None:
                raise Fault(
                    f"torch.compile needs a C++ compiler for the CPU, and {compiler} is not installed"
                )
        if threads:
            torch.set_num_threads(threads)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        layout = torch.channels_last if variant.endswith("channels-last") else torch.contiguous_format
        self.form = {"device": self.target, "dtype": getattr(torch, dtype), "memory_format": layout}
        self.model = model.to(**self.form)
        self.compile_mode = compile_mode if variant == "compile" else None
        if (
            variant == "compile"
        ):  # once per batch size; past its limit PyTorch would go on in eager mode unasked
            torch._dynamo.config.recompile_limit = 10_000
            torch._dynamo.config.fail_on_recompile_limit_hit = True
            self.model = torch.compile(self.model, mode=compile_mode, dynamic=False)
        self.wait = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(
            self.target, lambda: None
        )
        self.outputs: list[Any] = []
        self.graphs: dict[int, tuple[Any, Any, Any]] = {}  # batch size -> graph, its input, its output

    def prepare(self, batch: np.ndarray) -> None:
        """Copy the images to the device; for a graph into its fixed input, capturing it once per size."""
        torch = self.torch
        with torch.inference_mode():
            self.x = torch.from_numpy(batch).to(**self.form)
            if self.graphed:
                if len(batch) not in self.graphs:
                    self.graphs[len(batch)] = self.capture()
                self.graph, x, self.graph_output = self.graphs[len(batch)]
                x.copy_(self.x)
        self.wait()

    def capture(self) -> tuple[Any, Any, Any]:
        """Capture one forward as a CUDA graph: (graph, input, output)."""
        torch = self.torch
        x = self.x.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries allocate their workspaces before the capture
            for _ in range(3):
                self.model(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self.model(x)
        return graph, x, output

    def run(self) -> None:
        """One forward, without autograd; on a GPU it may return early."""
        with self.torch.inference_mode():
            if self.graphed:
                self.graph.replay()
                self.outputs.append(self.graph_output)
            else:
                if self.compile_mode not in (
                    None,
                    "default",
                ):  # outputs of the last replay may be overwritten
                    self.torch.compiler.cudagraph_mark_step_begin()
                self.outputs.append(self.model(self.x))

    def synchronize(self) -> None:
        """Wait for the device."""
        self.wait()
        del self.outputs[:-1]

    def result(self) -> np.ndarray:
        """The last output; float64 only from a float64 network."""
        kind = self.torch.float64 if self.form["dtype"] == self.torch.float64 else self.torch.float32
        return self.outputs[-1].to("cpu", kind).numpy()

    def device_ms(self) -> float | None:
        """CUDA without a trace: events around one forward, which include the gaps between launches."""
        if self.target != "cuda" or self.traced:
            return None
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.wait()
        start.record()
        self.run()
        end.record()
        self.synchronize()
        return start.elapsed_time(end)

    def reset_peak(self) -> None:
        """Start a new peak of the CUDA allocator."""
        if self.target == "cuda":
            self.torch.cuda.reset_peak_memory_stats()

    def peak_memory_mb(self) -> float | None:
        """Peak of the CUDA allocator, what Metal's driver holds, or None on the CPU."""
        if self.target == "cuda":
            return self.torch.cuda.max_memory_allocated() / 1e6
        if self.target == "mps":
            return self.torch.mps.driver_allocated_memory() / 1e6
        return None

    def facts(self) -> dict[str, Any]:
        """Threads, TF32 and compile mode as they are in this process; the operators of an eager forward."""
        tf32 = self.torch.backends.cuda.matmul.allow_tf32 or self.torch.backends.cudnn.allow_tf32
        facts = {
            "threads": self.torch.get_num_threads(),
            "tf32": tf32 if self.target == "cuda" else None,
            "compile_mode": self.compile_mode,
        }
        if self.outputs and self.variant in ("torch", "channels-last"):
            last = self.outputs[-1:]
            facts |= {"launches_counted": count_operators(self.run), "launches_by": "operators dispatched"}
            self.outputs = last
        return facts


def count_operators(run: Callable[[], None]) -> int:
    """Operators that PyTorch dispatches in `run`, without those that only describe memory (views)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        """Counts what passes."""

        total = 0

        def __torch_dispatch__(
            self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None
        ) -> Any:
            self.total += not operator.is_view
            return operator(*arguments, **(keywords or {}))

    with Count() as count:
        run()
    return count.total


class TorchNetwork(TorchBackend):
    """DepthwiseMNIST in PyTorch."""

    def __init__(self, checkpoint: str, **arguments: Any) -> None:
        from torch_model import load_model

        super().__init__(load_model(checkpoint), **arguments)


def torch_device(device: str) -> str:
    """PyTorch's device type for `--device`: auto takes CUDA, then MPS, then the CPU."""
    import torch

    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        return next(name for name, present in there.items() if present)
    if not there[device]:
        raise Fault(f"PyTorch sees no {device} device here")
    return device


class MlxBackend(Backend):
    """An MLX module in eval mode, on images, on MLX's default device.

    `custom`: it runs our kernels, on `target`; there `compiled` needs kernels inside MLX's graph. `awake`: a
    single forward is waited for spinning (spin.py).
    """

    def __init__(
        self,
        make_model: Callable[[], Any],
        dtype: str,
        compiled: bool,
        custom: bool,
        target: str | None,
        awake: bool = False,
    ) -> None:
        import mlx.core as mx

        import kernels
        from kernels import nvrtc

        self.mx = mx
        self.dtype = getattr(mx, dtype)
        where = target or kernels.default_target()
        self.target = where if custom else mlx_device()
        if custom:
            reason = kernels.unavailable(where)
            if reason:
                raise Fault(reason)
            if compiled and where == "host":
                raise Fault("kernels on the host lie outside MLX's graph, which mx.compile needs")
        self.compiler = nvrtc.compiler() if custom and self.target == "cuda" else None
        self.model = make_model()
        self.forward = mx.compile(self.model) if compiled else self.model
        self.compiled = compiled
        self.counts_launches = not (custom and where == "host")  # those kernels lie outside the graph
        self.traced = mlx_device() == "cuda" and gpu_trace.find_library() is not None
        self.x: Any = None
        self.outputs: list[Any] = []
        self.awake = awake
        self.spins: dict[int, Spin] = {}  # by batch size
        self.pending, self.started = 0, 0.0  # forwards described and not waited for; when the last one began
        self.link_ms: dict[int, float] = {}
        # Costs one element-wise launch; exact, since 0·y is zero, and not foldable without knowing y.
        self.link = mx.compile(lambda x, y: x + 0 * y.reshape(len(y), -1)[:, :1, None, None])

    def prepare(self, batch: np.ndarray) -> None:
        """(N, C, H, W) float32 -> MLX's (N, H, W, C), in the storage type."""
        self.x = self.mx.array(batch.transpose(0, 2, 3, 1)).astype(self.dtype)
        self.mx.eval(self.x)
        if self.awake:
            self.spin = self.spins.setdefault(len(batch), Spin())

    def run(self) -> None:
        """Describe one forward; nothing is computed yet, but for kernels on the host."""
        self.pending += 1
        if self.awake:
            self.started = time.perf_counter()
        self.outputs.append(self.forward(self.x))

    def launch(self) -> None:
        """Describe one forward and start it."""
        self.run()
        self.mx.async_eval(self.outputs[-1])

    def synchronize(self) -> None:
        """Compute every output and wait."""
        if self.awake and self.pending == 1:
            last = self.outputs[-1]
            self.mx.async_eval(last)
            self.spin.wait(self.started, lambda: self.mx.eval(last))
        else:
            self.mx.eval(self.outputs)
        self.pending = 0
        del self.outputs[:-1]

    def discard(self) -> None:
        """Forget the outputs: what was only described costs nothing."""
        self.outputs.clear()
        self.pending = 0

    def result(self) -> np.ndarray:
        """The last output, in PyTorch's layout where it is images: (N, H, W, C) -> (N, C, H, W)."""
        output = np.array(self.outputs[-1].astype(self.mx.float32))
        return output.transpose(0, 3, 1, 2) if output.ndim == 4 else output

    def device_ms(self) -> float | None:
        """On a GPU without a trace: the slope between chains of K and 2K dependent forwards, less the links'.

        MLX has no event timer. In a chain, Python and launches of the next forward overlap the device's work;
        each forward's input depends on the last one's output through data, else forwards could overlap too.
        """
        if self.traced or self.mx.default_device().type != self.mx.DeviceType.gpu:
            return None
        size = len(self.x)
        if size not in self.link_ms:
            output = self.forward(self.x)
            self.mx.eval(output)
            self._slope(lambda x: output)  # compiles the link, which must not be timed
            self.link_ms[size] = median(self._slope(lambda x: output) for _ in range(5))
        return max(0.0, self._slope(self.forward) - self.link_ms[size])

    def _slope(self, step: Any, length: int = 8) -> float:
        """Milliseconds per link of a chain x -> link(x, step(x)), from chains of `length` and twice that."""
        times = []
        for count in (length, 2 * length):
            start = time.perf_counter()
            x = self.x
            for _ in range(count):
                x = self.link(x, step(x))
                self.mx.async_eval(x)
            self.mx.eval(x)
            times.append(time.perf_counter() - start)
        return 1e3 * (times[1] - times[0]) / length

    def reset_peak(self) -> None:
        """Start a new peak of MLX's allocator."""
        self.mx.reset_peak_memory()

    def peak_memory_mb(self) -> float | None:
        """Peak of MLX's allocator on a GPU; None on the CPU."""
        if self.mx.default_device().type == self.mx.DeviceType.gpu:
            return self.mx.get_peak_memory() / 1e6
        return None

    def facts(self) -> dict[str, Any]:
        """Whether the graph is compiled, TF32, and the launches of one forward, counted on its graph."""
        on_cuda = self.mx.default_device().type == self.mx.DeviceType.gpu and not self.mx.metal.is_available()
        facts: dict[str, Any] = {"compiled": self.compiled}
        facts |= {"compiler": self.compiler} if self.compiler else {}
        facts["tf32"] = os.environ.get("MLX_ENABLE_TF32", "1") != "0" if on_cuda else None
        if self.counts_launches and self.outputs:
            facts |= {"launches_counted": count_launches(self.forward(self.x)), "launches_by": "MLX graph"}
        return facts


class MlxNetwork(MlxBackend):
    """DepthwiseMNIST in MLX at a fusion level."""

    def __init__(
        self,
        checkpoint: str,
        dtype: str = "float32",
        level: str = "layers",
        compiled: bool = False,
        target: str | None = None,
        tuned: bool = True,
        as_metal: bool = False,
        direct: bool = False,
        awake: bool = False,
    ) -> None:
        import mlx.core as mx

        import kernels
        import mlx_model
        from harness import tuning

        if as_metal and (target or kernels.default_target()) != "cuda":
            raise Fault("Metal's tilings are compared with CUDA's on an NVIDIA GPU")
        if direct and mlx_device() != "cuda":
            raise Fault("MLX launches without CUDA graphs only on an NVIDIA GPU")
        if level not in mlx_model.LEVELS:
            raise Fault(f"the fusion level {level!r} is not built")
        if level in mlx_model.LAUNCH_LEVELS and dtype not in ("float32", "float16"):
            raise Fault(f"the {level} kernels store float32 or float16, not {dtype}")
        custom = level not in ("layers", "folded")

        self.tiles: str | None = (
            None  # "default", "tuned" or "Metal's", where the level has a choice of tilings
        )

        def make() -> Any:
            tunings: mlx_model.Tunings | None = None
            if as_metal:
                tunings, self.tiles = MetalDefaults(), "Metal's"
            elif level in mlx_model.LAUNCH_LEVELS:
                found = tuning.load(target or kernels.default_target()) if tuned else None
                tunings = found.tunings() if found and found.covers(level) else None
                self.tiles = "tuned" if tunings else "default"
            return mlx_model.get_model(
                level, checkpoint, getattr(mx, dtype), target if custom else None, tunings
            )

        super().__init__(make, dtype, compiled, custom, target, awake)

    def facts(self) -> dict[str, Any]:
        """As any MLX backend's; which tilings it runs with; whether block 3's launch computes the head."""
        facts = super().facts() | ({"tiles": self.tiles} if self.tiles else {})
        if self.model.level == "block" and self.x is not None:
            facts["head_inside"] = self.model.head_inside(len(self.x))
        return facts


class MetalDefaults:
    """In the place of `kernels.Tunings`: what `mlx-block` takes on Metal, to be timed elsewhere."""

    def pick(self, level: str, batch: int) -> tuple[Any, ...]:
        """Metal's default tiling of every block for `batch` images."""
        import mlx_model
        from kernels import tilings

        return tuple(tilings.default_tiling(shape, batch, "metal") for shape in mlx_model.SHAPE.blocks)


# Primitives of MLX's graph that only describe memory; every other one is a launch on a GPU.
VIEWS = {"AsStrided", "Broadcast", "BroadcastAxes", "Contiguous", "Copy", "ExpandDims", "Flatten", "Full"}
VIEWS |= {"Reshape", "Slice", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View"}


def count_launches(output: Any) -> int:
    """Launches on the graph of an MLX array that is not evaluated yet, whose weights are."""
    import mlx.core as mx

    text = io.StringIO()
    mx.export_to_dot(text, output)
    primitives = re.findall(r'label ="(\w+)", shape=rectangle', text.getvalue())
    return sum(name not in VIEWS for name in primitives)


def mlx_device() -> str:
    """Where MLX's own operations run: metal, cuda or cpu."""
    import mlx.core as mx

    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


class OnnxNetwork(Backend):
    """DepthwiseMNIST exported by PyTorch, in ONNX Runtime on the CPU with default session options."""

    target = "cpu"

    def __init__(self, checkpoint: str, dtype: str = "float32", threads: int = 0) -> None:
        import onnxruntime

        if dtype != "float32":
            raise Fault("ONNX Runtime's CPU provider is measured in float32 only")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(
            onnx_bytes(checkpoint), options, providers=["CPUExecutionProvider"]
        )

    def prepare(self, batch: np.ndarray) -> None:
        """ONNX Runtime reads NumPy's memory: nothing is copied."""
        self.x = np.ascontiguousarray(batch)

    def run(self) -> None:
        """One forward; done when it returns."""
        (self.output,) = self.session.run(None, {"images": self.x})

    def result(self) -> np.ndarray:
        """The last logits."""
        return self.output


def onnx_bytes(checkpoint: str) -> bytes:
    """The network with a free batch size as an ONNX file's bytes, written by PyTorch in another process."""
    program = (
        "import sys, torch, torch_model\n"
        "model = torch_model.load_model(sys.argv[1])\n"
        "torch.onnx.export(model, (torch.zeros(2, 1, 28, 28),), sys.argv[2], input_names=['images'],\n"
        "    dynamo=True, external_data=False, dynamic_shapes=({0: torch.export.Dim('batch')},))\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.onnx"
        done = subprocess.run(
            [sys.executable, "-c", program, checkpoint, str(path)],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1]
            if "ModuleNotFoundError" in last:
                raise Fault(f"exporting needs a package that is not installed ({last}); make setup PEERS=1")
            raise RuntimeError(f"export to ONNX failed: {last}")
        return path.read_bytes()
