"""Read torch.profiler's Chrome traces: what ran, how often, for how long, and when the device was idle.

A trace holds complete events ("ph": "X") of several categories. This module knows three lanes:

    cpu      operators and annotations, nested by time within a thread
    runtime  calls into the CUDA runtime or driver, nested in the operators that make them
    gpu      kernels, memory copies and memory sets, by stream

Nested events share time, so an operator's own cost is its *self* time: its duration less its children's.
On a GPU lane the busy time is the union of the intervals, so that two streams at once count once. On a CPU,
where no kernel is launched, an operator that computes (rather than one that only makes a view or wraps
another) is counted as a kernel, and so is each C++ kernel of Inductor (`cpp_fused_…`).

Traces are stored small (`.json.gz`) and without anything that names the machine. Open one in
https://ui.perfetto.dev or chrome://tracing.
"""

import gzip
import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.cli import Fault
from harness.paths import shown, write_atomic

LANES = {
    "cpu_op": "cpu",
    "user_annotation": "cpu",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
    "kernel": "gpu",
    "gpu_memcpy": "gpu",
    "gpu_memset": "gpu",
}

# What is kept of an event's arguments; the rest is large, or repeats the event.
ARGUMENTS = ("correlation", "External id", "stream", "grid", "block", "registers per thread", "Input Dims")

# Operators that touch no data: they describe memory or reserve it.
FREE = frozenset(
    "aten::" + name
    for name in (
        "t transpose as_strided view reshape _unsafe_view expand permute select slice narrow chunk split "
        "unsqueeze squeeze alias detach empty empty_like empty_strided resolve_conj resolve_neg result_type "
        "resize_ set_ unbind split_with_sizes flatten numel stride size is_pinned lift_fresh view_as "
        "_reshape_alias broadcast_tensors expand_as unflatten unsafe_chunk unsafe_split"
    ).split()
)

# Matrix products. They compute themselves, whatever they call besides (on a CPU a copy of the bias).
PRODUCTS = frozenset(
    "aten::mm aten::addmm aten::bmm aten::baddbmm aten::addmv aten::mv aten::_addmm_activation "
    "mkldnn::_linear_pointwise mkl::_mkl_linear aten::mkldnn_linear".split()
)

LAUNCHES = re.compile(r"^(cudaLaunchKernel|cuLaunchKernel|cudaLaunchKernelExC|cuLaunchKernelEx)")
GRAPH_LAUNCHES = re.compile(r"^(cudaGraphLaunch|cuGraphLaunch)")


@dataclass
class Span:
    """One event. Times in µs since the trace's first event."""

    name: str
    lane: str  # cpu, runtime, gpu
    category: str
    thread: str  # within its lane: thread or stream
    start: float
    duration: float
    self_time: float = 0.0
    parent: "Span | None" = field(default=None, repr=False)
    arguments: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def end(self) -> float:
        """Where the interval ends, µs."""
        return self.start + self.duration


@dataclass
class Trace:
    """The spans of a trace by start time, and the profiled steps among them."""

    spans: list[Span]
    steps: list[Span]

    def lane(self, name: str) -> list[Span]:
        """The spans of one lane."""
        return [span for span in self.spans if span.lane == name]

    def window(self) -> tuple[float, float]:
        """From the first step's start to the end of the last step or of the device's last work, µs."""
        start = min(span.start for span in self.steps)
        return start, max([span.end for span in self.steps] + [span.end for span in self.lane("gpu")])


@dataclass(frozen=True)
class Summary:
    """A trace in figures, per step. Times in µs; kinds are those of `kernel_kind` and `operator_kind`."""

    device: str  # "gpu" where the trace has device work, else "cpu"
    steps: int
    kernels: dict[str, float]
    names: dict[str, float]  # kernel name -> launches per step
    kernel_us: dict[str, float]  # kernel name -> time per step
    operators: float  # CPU operators called
    launches: float  # kernel launches asked for one by one
    graph_launches: float
    copies: float  # memory copies and sets
    busy_us: float  # the device's, or the kernels' self time on a CPU
    step_us: float
    idle_share: float  # of the window, on a GPU; on a CPU the share of time outside kernels
    guard_us: float  # looking up the compiled code, in compiled calls
    empty_operators: list[str]  # operators that launched nothing and copied nothing

    @property
    def kernel_count(self) -> float:
        """Kernels per step, all kinds, without memory copies and sets."""
        return sum(count for kind, count in self.kernels.items() if kind not in ("memcpy", "memset"))


def slim(document: dict[str, Any]) -> dict[str, Any]:
    """A Chrome trace reduced to what this module reads, without anything that names the machine."""
    events = []
    origin = min((e["ts"] for e in document["traceEvents"] if e.get("ph") == "X"), default=0.0)
    threads: dict[str, int] = {}
    for event in document["traceEvents"]:
        lane = LANES.get(event.get("cat", ""))
        if event.get("ph") != "X" or lane is None:
            continue
        arguments = event.get("args", {})
        kept = {name: arguments[name] for name in ARGUMENTS if arguments.get(name) not in (None, "", [])}
        if lane == "gpu":
            thread = f"stream {arguments.get('stream', event['tid'])}"
        else:
            thread = "thread " + str(threads.setdefault(str(event["tid"]), len(threads)))
        events.append(
            {"ph": "X", "cat": event["cat"], "name": event["name"], "pid": "gpu" if lane == "gpu" else "cpu"}
            | {"tid": thread, "ts": round(event["ts"] - origin, 3), "dur": round(event.get("dur", 0.0), 3)}
            | {"args": kept}
        )
    return {"displayTimeUnit": "ms", "traceEvents": events}


def store(exported: Path, path: Path) -> None:
    """Write the trace that the profiler exported as a slim `.json.gz`, the same bytes for the same events."""
    text = json.dumps(slim(json.loads(exported.read_text())), separators=(",", ":"))
    write_atomic(path, gzip.compress(text.encode(), mtime=0))


def read(path: Path | str) -> Trace:
    """Read a stored or exported trace. Raises Fault for a file that is missing, damaged or no trace."""
    path = Path(path)
    try:
        data = path.read_bytes()
        document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        events = slim(document)["traceEvents"]
    except FileNotFoundError as error:
        raise Fault(f"the trace {shown(path)} does not exist; a run of the study writes it.") from error
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Fault(f"{shown(path)} is no Chrome trace ({error}); run the study again.") from error
    return from_events(events)


def from_events(events: list[dict[str, Any]]) -> Trace:
    """The trace of slim events. Raises Fault when it has no profiled step."""
    spans = [
        Span(e["name"], LANES[e["cat"]], e["cat"], e["tid"], e["ts"], e["dur"], arguments=e["args"])
        for e in events
    ]
    spans.sort(key=lambda span: (span.start, -span.duration))
    _nest([span for span in spans if span.lane != "gpu"])
    for span in spans:
        if span.lane == "gpu":
            span.self_time = span.duration
    steps = [span for span in spans if span.lane == "cpu" and span.name.startswith("ProfilerStep#")]
    if not steps:
        raise Fault("the trace holds no profiled step (ProfilerStep#…); it was not written by this study.")
    return Trace(spans, steps)


def _nest(spans: list[Span]) -> None:
    """Find every CPU span's parent and self time; `spans` are sorted by start, longest first."""
    open_spans: dict[str, list[Span]] = {}
    for span in spans:
        span.self_time = span.duration
        stack = open_spans.setdefault(span.thread, [])
        while stack and stack[-1].end <= span.start:
            stack.pop()
        if stack:
            span.parent = stack[-1]
            # Rounding can let a child end a hair after its parent; only the shared part is the child's.
            stack[-1].self_time -= min(span.end, stack[-1].end) - span.start
        stack.append(span)


def union_us(intervals: list[tuple[float, float]]) -> float:
    """Length of the union of intervals (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def gaps(trace: Trace) -> list[tuple[float, float]]:
    """Intervals (start, end) in the window in which the GPU does nothing."""
    start, end = trace.window()
    found, reached = [], start
    for span in sorted(trace.lane("gpu"), key=lambda span: span.start):
        if span.start > reached:
            found.append((reached, span.start))
        reached = max(reached, span.end)
    return [*found, (reached, end)] if end > reached else found


def kernel_kind(span: Span) -> str:
    """What a GPU span does, told from its category and name."""
    if span.category != "kernel":
        return "memcpy" if span.category == "gpu_memcpy" else "memset"
    name = span.name.lower()
    if GEMM_HELPER.search(name):
        return "gemm helper"
    if is_gemm(span.name):
        return "gemm"
    if is_fused(span.name):
        return "fused"
    if "layer_norm" in name or "layernorm" in name or "rms_norm" in name:
        return "norm"
    if "reduce" in name:
        return "reduction"
    if "multi_tensor_apply" in name and "copy" in name:
        return "copy"
    if "elementwise" in name or "catarray" in name:
        return "copy" if "copy" in name or "catarray" in name else "pointwise"
    return "other"


GEMM_NAME = re.compile(
    r"gemm|nvjet|cutlass|cublas|gemv|sm\d+_xmma|matmul|triton_tem|two_layer|dot_kernel", flags=re.IGNORECASE
)


# What cuBLAS launches around a product: scaling the result first, adding split parts, adding the bias.
GEMM_HELPER = re.compile(r"splitkreduce|split_k_kernel|scal_kernel|cublaslt::epilogue")


def is_gemm(name: str) -> bool:
    """Whether a kernel name is a matrix product's: cuBLAS, CUTLASS, or the two-layer kernel of this study."""
    return bool(GEMM_NAME.search(name)) and not GEMM_HELPER.search(name.lower())


def is_fused(name: str) -> bool:
    """Whether a kernel name is a fused point-wise kernel's: Inductor's (Triton or C++), ours or Liger's."""
    name = name.lower()
    inductor = name.startswith("triton_") and not name.startswith("triton_tem")
    return inductor or "geglu" in name or "cpp_fused" in name


def operator_kind(span: Span) -> str | None:
    """What a CPU operator computes, or None where it only wraps, annotates, or describes memory."""
    if span.category != "cpu_op":
        return None
    name = span.name
    if name in PRODUCTS:
        return "gemm"
    if "cpp_fused" in name:
        return "fused"
    if not name.startswith(("aten::", "mkldnn::")) or name in FREE:
        return None
    if "norm" in name:
        return "norm"
    if name in ("aten::copy_", "aten::cat", "aten::_foreach_copy_"):
        return "copy"
    if name in ("aten::fill_", "aten::zero_"):
        return "memset"
    return "reduction" if name in ("aten::sum", "aten::mean") else "pointwise"


def cpu_kernels(trace: Trace) -> list[tuple[str, Span]]:
    """(kind, operator) for CPU operators that compute: some always, others when nothing inside does."""
    computing = [(kind, span) for span in trace.lane("cpu") if (kind := operator_kind(span))]
    always = PRODUCTS | {"aten::sum"}
    wrappers = set()
    for _, span in computing:
        parent = span.parent
        while parent is not None:
            wrappers.add(id(parent))
            parent = parent.parent
    return [(kind, span) for kind, span in computing if span.name in always or id(span) not in wrappers]


def summarize(trace: Trace) -> Summary:
    """The figures of a trace per step."""
    steps = len(trace.steps)
    device = trace.lane("gpu")
    start, end = trace.window()
    kernels = [(kernel_kind(span), span) for span in device] if device else cpu_kernels(trace)
    # On a CPU a product's children (the copy of a bias) are kernels of their own: self time counts each once.
    computing = {id(span) for _, span in kernels}
    times: dict[str, float] = defaultdict(float)
    for _, span in kernels:
        times[span.name] += span.duration if device else _own_time(span, trace, computing)
    busy = union_us([(span.start, span.end) for span in device]) if device else sum(times.values())
    counted = [(kind, span) for kind, span in kernels if kind not in ("memcpy", "memset")]
    runtime = trace.lane("runtime")
    operators = [span for span in trace.lane("cpu") if span.category == "cpu_op" and "::" in span.name]
    lookups = [span.duration for span in trace.lane("cpu") if span.name == "TorchDynamo Cache Lookup"]
    return Summary(
        device="gpu" if device else "cpu",
        steps=steps,
        kernels=_per_step(Counter(kind for kind, _ in kernels), steps),
        names=_per_step(Counter(span.name for _, span in counted), steps),
        kernel_us={name: total / steps for name, total in times.items()},
        operators=len(operators) / steps,
        launches=sum(bool(LAUNCHES.match(span.name)) for span in runtime) / steps,
        graph_launches=sum(bool(GRAPH_LAUNCHES.match(span.name)) for span in runtime) / steps,
        copies=(len(kernels) - len(counted)) / steps,
        busy_us=busy / steps,
        step_us=(end - start) / steps,
        idle_share=1 - busy / (end - start),
        guard_us=sum(lookups) / steps,
        empty_operators=_empty_operators(trace, computing),
    )


def _own_time(span: Span, trace: Trace, computing: set[int]) -> float:
    """A CPU kernel's duration less that of the kernels inside it, so that none is counted twice, µs."""
    inside = [
        (other.start, min(other.end, span.end))
        for other in trace.spans
        if id(other) in computing and other is not span and _is_inside(other, span)
    ]
    return span.duration - union_us(inside)


def _is_inside(span: Span, ancestor: Span) -> bool:
    """Whether `ancestor` is among the spans around `span`."""
    while span.parent is not None:
        span = span.parent
        if span is ancestor:
            return True
    return False


def _per_step(counts: Counter, steps: int) -> dict[str, float]:
    """Counts divided by the steps, the most frequent first; whole numbers stay whole."""
    return {name: count / steps if count % steps else count // steps for name, count in counts.most_common()}


def _empty_operators(trace: Trace, computing: set[int]) -> list[str]:
    """Names of operators inside which nothing was launched, in any of their calls; sorted."""
    working = set()
    for span in trace.spans:
        launches = span.lane == "runtime" and (LAUNCHES.match(span.name) or "emcpy" in span.name)
        if launches or (span.lane == "cpu" and id(span) in computing):
            at: Span | None = span
            while at is not None:
                working.add(at.name)
                at = at.parent
    names = {span.name for span in trace.lane("cpu") if span.name.startswith("aten::")}
    return sorted(names - working)


@dataclass(frozen=True)
class GemmName:
    """What a GEMM kernel's name says; None where it does not carry it."""

    layout: (
        str | None
    )  # such as "tn": whether the first and the second matrix are transposed, as BLAS sees them
    tile: str | None  # rows × columns × depth of a thread block's tile, as far as named
    family: str


def decode_gemm(name: str) -> GemmName:
    """Layout, tile and family of a GEMM kernel from its name (cuBLAS, CUTLASS, xmma and nvjet spellings)."""
    family = next(
        (word for word in ("nvjet", "cutlass", "xmma", "gemv", "gemm") if word in name.lower()), "unknown"
    )
    if family == "nvjet":
        # nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT: types, tile, depth × stages, cluster, …, layouts A B C.
        tile = re.search(r"_(\d+x\d+)_(\d+)x\d+_", name)
        layout = re.search(r"_([NT]{2})[NT]?$", name)
        return GemmName(
            layout[1].lower() if layout else None, f"{tile[1]}x{tile[2]}" if tile else None, family
        )
    layout = re.search(r"_([nt])_?([nt])(?=_|$|>|\d)", name, flags=re.IGNORECASE) or re.search(
        r"_([NT])([NT])_kernel", name
    )
    tile = re.search(r"tilesize(\d+x\d+x\d+)", name) or re.search(r"_(\d+x\d+)(?:_(\d+)x\d+)?(?:_|$|>)", name)
    shape = None
    if tile:
        depth = tile[2] if tile.lastindex and tile.lastindex > 1 else None
        shape = f"{tile[1]}x{depth}" if depth else tile[1]
    return GemmName(f"{layout[1]}{layout[2]}".lower() if layout else None, shape, family)
