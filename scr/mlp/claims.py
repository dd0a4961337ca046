"""The claims that the articles make, each with its test here, the figure observed and a verdict from it.

A verdict is one of VERDICTS. "not tested here" always says what is missing.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.statistics import Comparison
from harness.tables import interval, percent, ratio, significant, span, words
from mlp.traces import decode_gemm, is_gemm
from mlp.view import View

VERDICTS = ("confirmed", "refuted", "partly", "undecided", "not tested here")
MISSING = "not tested here"
NEEDS_NVIDIA = "needs an NVIDIA GPU"

COMPILING_S = 0.05  # a first call that lasts longer compiled something; Triton takes 0.1 s and more

Answer = tuple[Sequence[str], str]  # what was observed, in parts, and the verdict


@dataclass(frozen=True)
class Claim:
    """A claim and what this run says of it."""

    claim: str
    test: str
    observed: str
    verdict: str


@dataclass(frozen=True)
class Tested:
    """A claim with its test in words and in code; called with a view it gives the Claim."""

    claim: str
    test: str
    answer: Callable[[View], Answer]
    otherwise: str  # what is said where nothing was observed
    on_kernels: bool  # about kernels, which a trace without device activity cannot decide

    def __call__(self, view: View) -> Claim:
        """What the run says of the claim."""
        if self.on_kernels and view.device == "mps":
            return Claim(self.claim, self.test, "torch.profiler records no Metal kernels", MISSING)
        observed, verdict = self.answer(view)
        return Claim(self.claim, self.test, "; ".join(observed) or self.otherwise, verdict)


CLAIMS: list[Tested] = []  # in the order of the report


def tested(
    claim: str, test: str, otherwise: str = "", on_kernels: bool = False
) -> Callable[[Callable[[View], Answer]], Tested]:
    """Make a claim's test of the function that answers it, and append it to CLAIMS."""

    def register(answer: Callable[[View], Answer]) -> Tested:
        CLAIMS.append(Tested(claim, test, answer, otherwise, on_kernels))
        return CLAIMS[-1]

    return register


def all_claims(view: View) -> list[Claim]:
    """Every claim, in the order of the report."""
    return [test(view) for test in CLAIMS]


def within(comparison: Comparison | None, low: float, high: float) -> str:
    """Verdict on "the ratio lies between low and high" from an interval."""
    if comparison is None:
        return MISSING
    if comparison.low is None or comparison.high is None:
        return "undecided"
    if comparison.high < low or comparison.low > high:
        return "refuted"
    return "confirmed" if low <= comparison.low and comparison.high <= high else "undecided"


def shown(comparison: Comparison | None) -> str:
    """A ratio with its interval, or that there is none."""
    return "not timed" if comparison is None else f"{interval(comparison)} ×"


def overall(verdicts: Iterable[str]) -> str:
    """One verdict for several tests of a claim.

    Theirs if they agree; refuted if one refutes it and none confirms it; partly if some confirm it.
    """
    found = {verdict for verdict in verdicts if verdict != MISSING}
    if len(found) <= 1:
        return found.pop() if found else MISSING
    return "partly" if "confirmed" in found or "partly" in found else "refuted"


Pair = tuple[str, str, str, str]  # what it is called, case, way, baseline


def all_within(view: View, pairs: Iterable[Pair], low: float, high: float) -> Answer:
    """The answer to "every ratio lies between low and high", of those that were timed.

    Says first how many lie where, then each ratio by the clock of `View.gain`, then what the wall makes of
    those that the device's clock told.
    """
    parts, verdicts, walls = [], [], []
    tally = {"inside": 0, "above": 0, "below": 0, "undecided": 0}
    for name, case, backend, baseline in pairs:
        found = view.gain(case, backend, baseline)
        if found is None:
            continue
        gain, clock = found
        verdict = within(gain, low, high)
        below = gain.high is not None and gain.high < low
        tally[{"confirmed": "inside", "refuted": "below" if below else "above"}.get(verdict, verdict)] += 1
        wall = view.ratio(case, backend, baseline)
        if clock == "device" and wall is not None:
            walls.append(wall.ratio)
        parts.append(
            f"{name}: {shown(gain)}" + (" (wall)" if clock != "device" and view.device == "cuda" else "")
        )
        verdicts.append(verdict)
    if len(parts) > 1:
        parts.insert(0, f"of {len(parts)}: " + words([f"{n} {where}" for where, n in tally.items() if n]))
    if walls:
        parts.append(f"by the wall {span(min(walls), max(walls))} ×")
    return parts, overall(verdicts)


def kinds(kernels: dict[str, float]) -> str:
    """Kernels by kind in words."""
    return words([f"{count:g} {kind}" for kind, count in kernels.items()])


def launched(cell: dict[str, Any]) -> float:
    """Kernels of a cell's trace, without copies and fills."""
    return sum(count for kind, count in cell["observed"]["kernels"].items() if not kind.startswith("mem"))


@tested(
    "matmul + add is overhead-bound at 64² and compute-bound at 4096² (published: 2.3 ms on the CPU for "
    "23 µs of kernels; 4.9 ms for 4.5 ms)",
    "floor (measured rates) ÷ P50: below 25 % counts as overhead-bound, above 50 % as compute-bound",
)
def bounds(view: View) -> Answer:
    """The small case far from its floor, the large one near it."""
    shares = []
    for name in view.case_names(lambda n: n.startswith("matmul+add")):
        cell = view.cell(name, "torch")
        p50 = view.p50(cell) if cell else None
        if cell and p50:
            shares.append((name, 100 * cell["prediction"]["floor_ms"] / p50))
    verdict = MISSING
    if len(shares) > 1:
        small, large = shares[0][1], shares[-1][1]
        verdict = "confirmed" if small < 25 and large > 50 else "partly" if small < large / 2 else "refuted"
    return [f"{name}: {percent(share)} of its time is the roofline floor" for name, share in shares], verdict


@tested(
    "nn.Linear with bias is one GEMM kernel, `aten::t` launches nothing, compiling keeps the kernel",
    "kernels in the traces",
    on_kernels=True,
)
def one_kernel(view: View) -> Answer:
    """The bias is in the epilogue."""
    parts, verdicts = [], []
    for name in view.case_names(lambda n: n.startswith("linear")):
        for backend in ("torch", "torch-compile"):
            cell = view.cell(name, backend)
            if cell and "verdict" in cell:
                empty = "aten::t" in cell["observed"]["empty_operators"]
                said = f"{backend}: {kinds(cell['observed']['kernels'])}"
                parts.append(said + (", `aten::t` launches nothing" if empty else ""))
                verdicts.append(cell["verdict"])
    return parts, overall(verdicts)


@tested(
    "MLP 3×1024, batch 128: launches are 33–40 % of the time",
    "idle share of the trace; share of the wall time that graph replay removes",
    on_kernels=True,
)
def launch_share(view: View) -> Answer:
    """By graph replay, since the idle share of a trace holds the profiler's own time too."""
    parts, verdicts = [], []
    for cell in view.cells(backend="torch", experiment=3, training=False):
        text = (
            f"{cell['dtype']}: {percent(100 * cell['observed']['idle_share'])} outside kernels in the trace"
        )
        gain = view.ratio(cell["case"], "torch-graph", "torch", cell["dtype"])
        if gain and gain.low and gain.high:
            share, low, high = (1 - 1 / value for value in (gain.ratio, gain.low, gain.high))
            verdicts.append(within(Comparison(share, low, high, "", 0), 0.33, 0.40))
            text += f"; replaying a graph removes {percent(100 * share)} [{100 * low:.0f}, {100 * high:.0f}]"
            text += f" of the wall time: {verdicts[-1]}"
        parts.append(text)
    return parts if verdicts else [*parts, "graph replay needs an NVIDIA GPU"], overall(verdicts)


@tested(
    '`torch.compile(mode="reduce-overhead")` gives 2.5×, with one or two kernels',
    "ratio to eager; kernels and graph launches in the trace (2.5 ± 10 % counts)",
    otherwise=NEEDS_NVIDIA,
    on_kernels=True,
)
def reduce_overhead(view: View) -> Answer:
    """Graphs remove gaps, not kernels."""
    parts, verdicts = [], []
    for cell in view.cells(backend="torch-compile-overhead", experiment=3):
        gain = view.ratio(cell["case"], "torch-compile-overhead", "torch", cell["dtype"])
        kernels, graphs = launched(cell), cell["observed"]["graph_launches"]
        parts.append(f"{cell['dtype']}: {shown(gain)}, {kernels:g} kernels, {graphs:g} graph launch")
        verdicts += ["confirmed" if kernels <= 2 else "refuted", within(gain, 2.25, 2.75)]
    return parts, overall(verdicts)


@tested(
    "3 layers give 6 kernels forward and 12 with backward; elsewhere 40 calls per step",
    "kernels and operators in the traces of a forward and of a training step",
    on_kernels=True,
)
def kernel_counts(view: View) -> Answer:
    """The step's kernels less the forward's are the backward's. The claims exclude each other."""
    parts, verdicts = [], []
    for step in view.cells(backend="torch", experiment=3, training=True):
        forward = view.cell(step["case"].removesuffix(" training step"), "torch", step["dtype"])
        if forward is None:
            continue
        first, all_ = launched(forward), launched(step)
        parts.append(
            f"{step['dtype']}: {first:g} forward, {all_:g} in all, so {all_ - first:g} backward; "
            f"{step['observed']['operators']:g} operators called per step"
        )
        verdicts.append("confirmed" if (first, all_) == (6, 12) else "partly" if first == 6 else "refuted")
    return parts, overall(verdicts)


@tested(
    "compile fuses the forward only, unless max-autotune",
    "fused kernels of the backward in a default-mode trace",
    on_kernels=True,
)
def backward_fused(view: View) -> Answer:
    """A fused kernel that names the backward or a sum refutes it."""
    parts, verdicts = [], []
    for cell in view.cells(backend="torch-compile", experiment=3, training=True):
        names = [n for n in cell["observed"]["names"] if "fused" in n and ("backward" in n or "sum" in n)]
        said = f"{cell['dtype']}: {len(names)} fused backward kernels"
        parts.append(said + (f", `{names[0]}`" if names else ""))
        verdicts.append("refuted" if names else "confirmed")
    return parts, overall(verdicts)


@tested(
    "GeGLU MLP: 5 kernels eager, 4 compiled (the same GEMMs and one fused kernel), 4 with Liger",
    "kernels in the traces",
    on_kernels=True,
)
def geglu_counts(view: View) -> Answer:
    """Of the published sizes."""
    parts, verdicts = [], []
    for name in view.case_names(lambda n: n.startswith("geglu ") and "product" not in n)[:1]:
        for backend in ("torch", "torch-compile", "triton", "liger"):
            cell = view.cell(name, backend)
            if cell:
                parts.append(f"{backend}: {kinds(cell['observed']['kernels'])}")
                verdicts.append(cell.get("verdict", MISSING))
    return parts, overall(verdicts)


@tested(
    "A hand-written fused kernel matches the compiled one (not slower by more than 2 %)",
    "device time of our Triton GeGLU against compile's",
    otherwise=NEEDS_NVIDIA,
)
def our_kernel(view: View) -> Answer:
    """Alone and in the MLP."""
    names = view.case_names(lambda n: n.startswith("geglu"))[:2]
    return all_within(view, [(n, n, "triton", "torch-compile") for n in names], 0.98, float("inf"))


@tested(
    "Three chained Linear layers can be fused by concatenating their weights, 20–30 % faster",
    "float64 counterexample, three layers with ReLU; the legal form is the next claim",
)
def concatenation(view: View) -> Answer:
    """Across activations the result is another one."""
    counter = next((m for m in view.findings.get("merges", []) if not m["legal"]), None)
    if counter is None:
        return [], MISSING
    said = (
        f"across activations the result is wrong by {ratio(counter['error'])} × its largest value "
        f"(concatenated: {ratio(counter['error_concatenated'])} ×)"
    )
    return [said], "refuted" if counter["error"] > 0.05 else "undecided"


@tested(
    "The legal form, projections of one input in one GEMM, gives 20–30 %",
    "merged against separate projections, device time on a GPU (1.2 to 1.3 counts)",
)
def legal_gain(view: View) -> Answer:
    """Eager, compiled and with our kernel."""
    pairs = (
        ("torch-merged", "torch"),
        ("torch-merged-compile", "torch-compile"),
        ("triton-merged", "triton"),
    )
    names = view.case_names(
        lambda n: n in ("q+k+v", "gate+up") or (n.startswith("geglu ") and "product" not in n)
    )
    chosen = [
        (f"{name}, {merged} to {apart}", name, merged, apart) for name in names for merged, apart in pairs
    ]
    return all_within(view, chosen, 1.2, 1.3)


@tested(
    "A GEMM of equal FLOPs runs 10 % faster as the down projection than as the up projection",
    "both alone, same rows, device time on a GPU (1.05 to 1.15 counts)",
    otherwise="not run",
)
def projections(view: View) -> Answer:
    """With the rate and the tile of each."""
    for name in view.case_names(lambda n: n.startswith("projections")):
        found = view.gain(name, "down", "up")
        if found is None:
            continue
        gain, kind = found
        parts = [shown(gain)]
        for backend in ("up", "down"):
            cell = view.cell(name, backend)
            p50 = view.p50(cell, kind) if cell else None
            if cell and p50:
                decoded = [decode_gemm(kernel) for kernel in cell["observed"]["names"] if is_gemm(kernel)]
                tile = f", tile {decoded[0].tile}" if decoded and decoded[0].tile else ""
                rate = cell["prediction"]["flops"] / p50 / 1e9
                parts.append(f"{backend} {significant(rate)} TFLOP/s{tile}")
        return parts, within(gain, 1.05, 1.15)
    return [], MISSING


@tested(
    "The layout of a GEMM shows in its kernel name (`_tn_`, `_nn_`)",
    "names of all GEMM kernels in the traces, decoded",
    otherwise=NEEDS_NVIDIA,
)
def layouts(view: View) -> Answer:
    """In all names, or in some."""
    if view.device != "cuda":
        return [], MISSING
    names = {n for c in view.record.cells for n in c.get("observed", {}).get("names", {}) if is_gemm(n)}
    decoded = {n: decode_gemm(n).layout for n in names if "two_layer" not in n}
    known = sorted(n for n, layout in decoded.items() if layout)
    example = f", such as `{known[0]}` ({decoded[known[0]]})" if known else ""
    verdict = "confirmed" if len(known) == len(decoded) else "partly" if known else "refuted"
    return [f"{len(known)} of {len(decoded)} names carry it{example}"], verdict


@tested(
    "A fused two-layer Triton kernel is 5–10 % faster than compile",
    "device time of our kernel against compile's (the printed one is wrong beyond one tile)",
    otherwise=NEEDS_NVIDIA,
)
def two_layer_kernel(view: View) -> Answer:
    """At every width."""
    names = view.case_names(lambda n: n.startswith("two layers ") and n.split()[-1].isdigit())
    pairs = [(f"width {n.split()[-1]}", n, "triton", "torch-compile") for n in names]
    return all_within(view, pairs, 1.05, 1.10)


@tested(
    "Fusing norm + activation + Linear gives another 15 %",
    "compiled against eager, device time on a GPU (1.10 to 1.20 counts)",
)
def norms(view: View) -> Answer:
    """LayerNorm and RMSNorm, with ReLU, GELU and SiLU."""
    names = view.case_names(lambda n: n.endswith("+linear"))
    pairs = [(n.removesuffix("+linear"), n, "torch-compile", "torch") for n in names]
    return all_within(view, pairs, 1.10, 1.20)


@tested(
    "LayerNorm is hard to fuse", "whether compile makes one kernel of norm and activation", on_kernels=True
)
def layernorm_fuses(view: View) -> Answer:
    """One fused kernel and none of its parts beside it refutes it."""
    parts, verdicts = [], []
    for name in view.case_names(lambda n: n.startswith("layernorm") and n.endswith("+linear")):
        cell = view.cell(name, "torch-compile")
        if cell:
            kernels = cell["observed"]["kernels"]
            alone = kernels.get("fused", 0) == 1 and not {"norm", "pointwise", "reduction"} & set(kernels)
            parts.append(f"{name.removesuffix('+linear')}: {kernels.get('fused', 0):g} fused kernel")
            verdicts.append("refuted" if alone else "confirmed")
    return parts, overall(verdicts)


@tested(
    "Compiling costs guards and recompilations; a hand-written kernel does not recompile",
    "compile seconds, guard time, graphs compiled over changing rows; a hand-written kernel's longest first "
    "call with a new shape (Triton compiles outside Dynamo's count)",
)
def compile_costs(view: View) -> Answer:
    """Seconds to compile, microseconds per call, graphs per shape; half the claim without our kernel."""
    compiled = [c for c in view.record.cells if c.get("compile_s")]
    guards = sorted(c["observed"]["guard_us"] for c in compiled if c["observed"]["guard_us"])
    seconds = sorted(c["compile_s"] for c in compiled)
    parts = []
    if seconds:
        middle, largest = significant(seconds[len(seconds) // 2]), significant(seconds[-1])
        parts.append(f"{len(seconds)} compilations, median {middle} s, largest {largest} s")
    if guards:
        middle = significant(guards[len(guards) // 2])
        parts.append(f"guard look-up {middle} µs per call in the traces (median)")
    changes = [entry for entry in view.findings.get("shape changes", []) if "graphs" in entry]
    parts += [
        f"{entry['policy']}: {entry['graphs']} graphs for {len(entry['rows'])} shapes" for entry in changes
    ]
    longest = [(e["policy"], max(e["first_call_s"])) for e in changes if e["policy"] in ("triton", "liger")]
    parts += [f"{policy}: no first call over {significant(1e3 * most)} ms" for policy, most in longest]
    recompiled = any(entry["graphs"] > 1 for entry in changes)
    if not guards or not changes:
        return parts, MISSING
    if not recompiled or any(most > COMPILING_S for _, most in longest):
        return parts, "refuted"
    return parts, "confirmed" if longest else "partly"


@tested("Changing shapes recompile; `mark_dynamic` avoids it", "graphs compiled over the same shapes")
def dynamic_shapes(view: View) -> Answer:
    """Fewer graphs with the mark."""
    graphs = {e["policy"]: e["graphs"] for e in view.findings.get("shape changes", []) if "graphs" in e}
    static, marked = graphs.get("torch-compile, dynamic=False"), graphs.get("torch-compile, mark_dynamic")
    verdict = MISSING if static is None or marked is None else "confirmed" if marked < static else "refuted"
    return [f"{policy}: {count}" for policy, count in graphs.items() if "compile" in policy], verdict


@tested(
    "Timing without a synchronise gives false figures",
    "time until the call returns, beside the time until it is done",
)
def no_synchronise(view: View) -> Answer:
    """The call returns in less than half the time."""
    parts, factors = [], []
    for name in view.case_names(lambda n: n.startswith("matmul+add")):
        cell = view.cell(name, "torch")
        false, true = (view.p50(cell, kind) for kind in ("python", "latency")) if cell else (None, None)
        if false and true:
            factors.append(true / false)
            parts.append(f"{name}: {significant(false)} ms instead of {significant(true)} ms")
    if view.device == "cpu":
        return [*parts, "a CPU call returns when it is done"], MISSING
    return parts, MISSING if not factors else "confirmed" if max(factors) > 2 else "refuted"


@tested(
    "A graph break makes two graphs and costs time",
    "graphs compiled; ratio of wall times to the unbroken module",
    otherwise="not run",
)
def graph_break(view: View) -> Answer:
    """Both halves of the claim, or one."""
    broken, whole = (view.cell("graph break", n) for n in ("torch-compile-broken", "torch-compile"))
    gain = view.ratio("graph break", "torch-compile-broken", "torch-compile")
    if not broken or not whole or gain is None:
        return [], MISSING
    two = broken["graphs"] == whole["graphs"] + 1
    slower = gain.high is not None and gain.high < 1
    verdict = "confirmed" if two and slower else "partly" if two else "refuted"
    return [f"{broken['graphs']} graphs instead of {whole['graphs']}", shown(gain)], verdict


@tested("PyTorch 2.8 is a 2026 release", "its release notes; nothing to measure")
def release(view: View) -> Answer:
    """It is older."""
    version = view.record.environment["versions"].get("torch", "unknown")
    return [f"it was public in 2025; this run used {version}"], "refuted"
