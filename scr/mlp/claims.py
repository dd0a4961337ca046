"""The claims that the articles make, each with its test here, the figure observed and a verdict from it.

A verdict is one of VERDICTS. "not tested here" always says what is missing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from harness.statistics import Comparison
from harness.tables import interval, percent, ratio, significant, words
from mlp.traces import decode_gemm, is_gemm
from mlp.view import View

VERDICTS = ("confirmed", "refuted", "partly", "undecided", "not tested here")
MISSING = "not tested here"


@dataclass(frozen=True)
class Claim:
    """A claim and what this run says of it."""

    claim: str
    test: str
    observed: str
    verdict: str


def within(comparison: Comparison | None, low: float, high: float) -> str:
    """Verdict on "the ratio lies between low and high" from an interval."""
    if comparison is None:
        return MISSING
    if comparison.low is None:
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


def all_claims(view: View) -> list[Claim]:
    """Every claim, in the order of the experiments."""
    found = []
    for test in CLAIMS:
        claim = test(view)
        if view.device == "mps" and test in ON_KERNELS:
            claim = replace(claim, observed="torch.profiler records no Metal kernels", verdict=MISSING)
        found.append(claim)
    return found


def bounds(view: View) -> Claim:
    """matmul+add: overhead-bound when small, compute-bound when large."""
    shares = []
    for name in view.case_names(lambda n: n.startswith("matmul+add")):
        cell = view.cell(name, "torch")
        p50 = cell and view.p50(cell)
        if p50:
            shares.append((name, 100 * cell["prediction"]["floor_ms"] / p50))
    text = "; ".join(f"{name}: {percent(share)} of its time is the roofline floor" for name, share in shares)
    verdict = MISSING
    if len(shares) > 1:
        small, large = shares[0][1], shares[-1][1]
        verdict = "confirmed" if small < 25 and large > 50 else "partly" if small < large / 2 else "refuted"
    return Claim(
        "matmul + add is overhead-bound at 64² and compute-bound at 4096²",
        "floor (measured rates) ÷ P50",
        text,
        verdict,
    )


def one_kernel(view: View) -> Claim:
    """nn.Linear is one GEMM with the bias in its epilogue."""
    parts, verdicts = [], []
    for name in view.case_names(lambda n: n.startswith("linear")):
        for backend in ("torch", "torch-compile"):
            cell = view.cell(name, backend)
            if cell and "verdict" in cell:
                seen = cell["observed"]
                kernels = words([f"{count:g} {kind}" for kind, count in seen["kernels"].items()])
                empty = "aten::t" in seen["empty_operators"]
                parts.append(f"{backend}: {kernels}" + (", `aten::t` launches nothing" if empty else ""))
                verdicts.append(cell["verdict"])
    return Claim(
        "nn.Linear with bias is one GEMM kernel, `aten::t` launches nothing, compiling keeps the kernel",
        "kernels in the traces",
        "; ".join(parts),
        overall(verdicts),
    )


def launch_share(view: View) -> Claim:
    """Launches are 33–40 % of a small MLP's time."""
    parts, verdicts = [], []
    for cell in view.cells(backend="torch", experiment=3, training=False):
        idle = cell["observed"]["idle_share"]
        text = f"{cell['dtype']}: {percent(100 * idle)} outside kernels in the trace"
        gain = view.ratio(cell["case"], "torch-graph", "torch", cell["dtype"])
        if gain and gain.low:
            low, high = 100 * (1 - 1 / gain.low), 100 * (1 - 1 / gain.high)
            text += (
                f"; replaying a graph removes {percent(100 * (1 - 1 / gain.ratio))} [{low:.0f}, {high:.0f}]"
            )
            verdicts.append(within(Comparison(1 - 1 / gain.ratio, low / 100, high / 100, "", 0), 0.33, 0.40))
        parts.append(text)
    if not verdicts:
        parts.append("graph replay needs an NVIDIA GPU")
    return Claim(
        "MLP 3×1024, batch 128: launches are 33–40 % of the time",
        "idle share of the trace; share of the wall time that graph replay removes",
        "; ".join(parts),
        overall(verdicts),
    )


def reduce_overhead(view: View) -> Claim:
    """reduce-overhead gives 2.5× and one or two kernels."""
    parts, verdicts = [], []
    for cell in view.cells(backend="torch-compile-overhead", experiment=3):
        gain = view.ratio(cell["case"], "torch-compile-overhead", "torch", cell["dtype"])
        seen = cell["observed"]
        kernels = sum(count for kind, count in seen["kernels"].items() if not kind.startswith("mem"))
        parts.append(
            f"{cell['dtype']}: {shown(gain)}, {kernels:g} kernels, {seen['graph_launches']:g} graph launch"
        )
        verdicts += ["confirmed" if kernels <= 2 else "refuted", within(gain, 2.25, 2.75)]
    return Claim(
        '`torch.compile(mode="reduce-overhead")` gives 2.5×, with one or two kernels',
        "ratio to eager; kernels and graph launches in the trace (2.5 ± 10 % counts)",
        "; ".join(parts) or "needs an NVIDIA GPU",
        overall(verdicts),
    )


def kernel_counts(view: View) -> Claim:
    """3 layers give 6 kernels forward and 12 with backward."""
    parts, verdicts = [], []
    for step in view.cells(backend="torch", experiment=3, training=True):
        forward = view.cell(step["case"].removesuffix(" training step"), "torch", step["dtype"])
        counts = [
            sum(n for kind, n in cell["observed"]["kernels"].items() if not kind.startswith("mem"))
            for cell in (forward, step)
        ]
        parts.append(
            f"{step['dtype']}: {counts[0]:g} forward, {counts[1]:g} in all, "
            f"so {counts[1] - counts[0]:g} backward"
        )
        verdicts.append("confirmed" if counts[0] == 6 and counts[1] == 12 else "refuted")
    return Claim(
        "3 layers give 6 kernels forward and 12 with backward",
        "kernels in the traces of a forward and of a training step",
        "; ".join(parts),
        overall(verdicts),
    )


def backward_fused(view: View) -> Claim:
    """Compile fuses only the forward unless max-autotune."""
    parts, verdicts = [], []
    for cell in view.cells(backend="torch-compile", experiment=3, training=True):
        names = [n for n in cell["observed"]["names"] if "fused" in n and ("backward" in n or "sum" in n)]
        parts.append(
            f"{cell['dtype']}: {len(names)} fused backward kernels" + (f", `{names[0]}`" if names else "")
        )
        verdicts.append("refuted" if names else "confirmed")
    return Claim(
        "compile fuses the forward only, unless max-autotune",
        "fused kernels of the backward in a default-mode trace",
        "; ".join(parts),
        overall(verdicts),
    )


def geglu_counts(view: View) -> Claim:
    """GeGLU: 5 kernels eager, 4 compiled, 4 with Liger."""
    parts, verdicts = [], []
    for name in view.case_names(lambda n: n.startswith("geglu ") and "product" not in n)[:1]:
        for backend in ("torch", "torch-compile", "triton", "liger"):
            cell = view.cell(name, backend)
            if cell:
                kernels = words([f"{count:g} {kind}" for kind, count in cell["observed"]["kernels"].items()])
                parts.append(f"{backend}: {kernels}")
                verdicts.append(cell.get("verdict", MISSING))
    return Claim(
        "GeGLU MLP: 5 kernels eager, 4 compiled (the same GEMMs and one fused kernel), 4 with Liger",
        "kernels in the traces",
        "; ".join(parts),
        overall(verdicts),
    )


def our_kernel(view: View) -> Claim:
    """Our GeGLU kernel against compile's, alone and in the MLP."""
    found = []
    for name in view.case_names(lambda n: n.startswith("geglu"))[:2]:
        gain = view.ratio(name, "triton", "torch-compile", kind=view.clock(name))
        if gain:
            found.append((name, gain))
    verdict = overall(
        "undecided"
        if g.low is None
        else "refuted"
        if g.high < 0.98
        else "confirmed"
        if g.low > 0.98
        else "undecided"
        for _, g in found
    )
    return Claim(
        "A hand-written fused kernel matches the compiled one (not slower by more than 2 %)",
        "device time of our Triton GeGLU against compile's",
        "; ".join(f"{name}: {shown(gain)}" for name, gain in found) or "needs an NVIDIA GPU",
        verdict,
    )


def concatenation(view: View) -> Claim:
    """Three chained layers fused by concatenating weights, 20–30 % faster."""
    counter = next((m for m in view.findings.get("merges", []) if not m["legal"]), None)
    parts = []
    if counter:
        parts.append(
            f"across activations the result is wrong by {ratio(counter['error'])} × its largest value "
            f"(concatenated: {ratio(counter['error_concatenated'])} ×)"
        )
    verdict = MISSING if not counter else "refuted" if counter["error"] > 0.05 else "undecided"
    return Claim(
        "Three chained Linear layers can be fused by concatenating their weights, 20–30 % faster",
        "float64 counterexample, three layers with ReLU; the legal form is the next claim",
        "; ".join(parts),
        verdict,
    )


def legal_gain(view: View) -> Claim:
    """What the legal merges give, against 20–30 %."""
    pairs = (
        ("torch-merged", "torch"),
        ("torch-merged-compile", "torch-compile"),
        ("triton-merged", "triton"),
    )
    names = view.case_names(
        lambda n: n in ("q+k+v", "gate+up") or (n.startswith("geglu ") and "product" not in n)
    )
    found = [
        (f"{name}, {merged} to {apart}", gain)
        for name in names
        for merged, apart in pairs
        if (gain := view.ratio(name, merged, apart, kind=view.clock(name)))
    ]
    return Claim(
        "The legal form, projections of one input in one GEMM, gives 20–30 %",
        "merged against separate projections",
        "; ".join(f"{name}: {shown(gain)}" for name, gain in found),
        overall(within(gain, 1.2, 1.3) for _, gain in found),
    )


def two_layer_kernel(view: View) -> Claim:
    """A two-layer Triton kernel is 5–10 % faster than compile."""
    parts, verdicts = [], []
    for name in view.case_names(lambda n: n.startswith("two layers ") and n.split()[-1].isdigit()):
        gain = view.ratio(name, "triton", "torch-compile", kind=view.clock(name))
        if gain:
            parts.append(f"width {name.split()[-1]}: {shown(gain)}")
            verdicts.append(within(gain, 1.05, 1.10))
    return Claim(
        "A fused two-layer Triton kernel is 5–10 % faster than compile",
        "device time of our kernel against compile's (the printed one is wrong beyond one tile)",
        "; ".join(parts) or "needs an NVIDIA GPU",
        overall(verdicts),
    )


def projections(view: View) -> Claim:
    """Equal FLOPs: the down projection is 10 % faster than the up projection."""
    for name in view.case_names(lambda n: n.startswith("projections")):
        kind = view.clock(name)
        gain = view.ratio(name, "down", "up", kind=kind)
        if gain is None:
            continue
        tiles = []
        for backend in ("up", "down"):
            cell = view.cell(name, backend)
            p50 = view.p50(cell, kind)
            decoded = [decode_gemm(kernel) for kernel in cell["observed"]["names"] if is_gemm(kernel)]
            tile = f", tile {decoded[0].tile}" if decoded and decoded[0].tile else ""
            rate = cell["prediction"]["flops"] / p50 / 1e9
            tiles.append(f"{backend} {significant(rate)} TFLOP/s{tile}")
        return Claim(
            "A GEMM of equal FLOPs runs 10 % faster as the down projection than as the up projection",
            "both alone, same rows",
            f"{shown(gain)}; {'; '.join(tiles)}",
            within(gain, 1.05, 1.15),
        )
    return Claim("A GEMM of equal FLOPs runs 10 % faster as the down projection", "", "not run", MISSING)


def layouts(view: View) -> Claim:
    """The layout shows in the kernel name."""
    names = {n for c in view.record.cells for n in c.get("observed", {}).get("names", {}) if is_gemm(n)}
    names = {n for n in names if "two_layer" not in n}
    decoded = {n: decode_gemm(n) for n in names}
    known = [n for n, d in decoded.items() if d.layout]
    if view.device != "cuda":
        return Claim(
            "The layout of a GEMM shows in its kernel name (`_tn_`, `_nn_`)",
            "",
            "needs an NVIDIA GPU",
            MISSING,
        )
    example = f", such as `{sorted(known)[0]}` ({decoded[sorted(known)[0]].layout})" if known else ""
    verdict = "confirmed" if len(known) == len(names) else "partly" if known else "refuted"
    return Claim(
        "The layout of a GEMM shows in its kernel name (`_tn_`, `_nn_`)",
        "names of all GEMM kernels in the traces, decoded",
        f"{len(known)} of {len(names)} names carry it{example}",
        verdict,
    )


def compile_costs(view: View) -> Claim:
    """Compiling costs guards and recompilation."""
    compiled = [c for c in view.record.cells if c.get("compile_s")]
    guards = [c["observed"]["guard_us"] for c in compiled if c["observed"]["guard_us"]]
    seconds = sorted(c["compile_s"] for c in compiled)
    parts = []
    if seconds:
        middle = seconds[len(seconds) // 2]
        parts.append(
            f"{len(seconds)} compilations, median {significant(middle)} s, "
            f"largest {significant(seconds[-1])} s"
        )
    if guards:
        guards.sort()
        parts.append(
            f"guard look-up {significant(guards[len(guards) // 2])} µs per call in the traces (median)"
        )
    changes = [entry for entry in view.findings.get("shape changes", []) if "graphs" in entry]
    parts += [
        f"{entry['policy']}: {entry['graphs']} graphs for {len(entry['rows'])} shapes" for entry in changes
    ]
    eager = [entry["graphs"] for entry in changes if not entry["policy"].startswith("torch-compile")]
    recompiled = any(entry["graphs"] > 1 for entry in changes)
    verdict = (
        MISSING if not guards or not changes else "confirmed" if recompiled and not any(eager) else "refuted"
    )
    return Claim(
        "Compiling costs guards and recompilations; a hand-written kernel does not recompile",
        "compile seconds, guard time, graphs compiled over changing rows",
        "; ".join(parts),
        verdict,
    )


def dynamic_shapes(view: View) -> Claim:
    """mark_dynamic avoids recompilation."""
    graphs = {e["policy"]: e["graphs"] for e in view.findings.get("shape changes", []) if "graphs" in e}
    static, marked = graphs.get("torch-compile, dynamic=False"), graphs.get("torch-compile, mark_dynamic")
    verdict = MISSING if static is None or marked is None else "confirmed" if marked < static else "refuted"
    return Claim(
        "Changing shapes recompile; `mark_dynamic` avoids it",
        "graphs compiled over the same shapes",
        "; ".join(f"{policy}: {count}" for policy, count in graphs.items() if "compile" in policy),
        verdict,
    )


def no_synchronise(view: View) -> Claim:
    """Without a synchronise the time is false."""
    parts, factors = [], []
    for name in view.case_names(lambda n: n.startswith("matmul+add")):
        cell = view.cell(name, "torch")
        false, true = (view.p50(cell, kind) for kind in ("python", "latency")) if cell else (None, None)
        if false and true:
            factors.append(true / false)
            parts.append(f"{name}: {significant(false)} ms instead of {significant(true)} ms")
    verdict = (
        MISSING if view.device == "cpu" or not factors else "confirmed" if max(factors) > 2 else "refuted"
    )
    if view.device == "cpu":
        parts.append("a CPU call returns when it is done")
    return Claim(
        "Timing without a synchronise gives false figures",
        "time until the call returns, beside the time until it is done",
        "; ".join(parts),
        verdict,
    )


def graph_break(view: View) -> Claim:
    """A graph break costs."""
    broken, whole = (view.cell("graph break", n) for n in ("torch-compile-broken", "torch-compile"))
    gain = view.ratio("graph break", "torch-compile-broken", "torch-compile")
    if not broken or not whole or gain is None:
        return Claim("A graph break makes two graphs and costs time", "", "not run", MISSING)
    two = broken["graphs"] == whole["graphs"] + 1
    slower = gain.low is not None and gain.high < 1
    return Claim(
        "A graph break makes two graphs and costs time",
        "graphs compiled; ratio of wall times to the unbroken module",
        f"{broken['graphs']} graphs instead of {whole['graphs']}; {shown(gain)}",
        "confirmed" if two and slower else "partly" if two else "refuted",
    )


def norms(view: View) -> Claim:
    """Norm + activation + Linear fusion gives another 15 %."""
    found = [
        (name, view.ratio(name, "torch-compile", "torch", kind=view.clock(name)))
        for name in view.case_names(lambda n: n.endswith("+linear"))
    ]
    found = [(name, gain) for name, gain in found if gain]
    return Claim(
        "Fusing norm + activation + Linear gives another 15 % (1.10 to 1.20 counts)",
        "compiled against eager",
        "; ".join(f"{name.removesuffix('+linear')}: {shown(gain)}" for name, gain in found),
        overall(within(gain, 1.10, 1.20) for _, gain in found),
    )


def layernorm_fuses(view: View) -> Claim:
    """LayerNorm is hard to fuse."""
    parts, verdicts = [], []
    for name in view.case_names(lambda n: n.startswith("layernorm") and n.endswith("+linear")):
        cell = view.cell(name, "torch-compile")
        if cell:
            kernels = cell["observed"]["kernels"]
            alone = kernels.get("fused", 0) == 1 and not {"norm", "pointwise", "reduction"} & set(kernels)
            parts.append(f"{name.removesuffix('+linear')}: {kernels.get('fused', 0):g} fused kernel")
            verdicts.append("refuted" if alone else "confirmed")
    return Claim(
        "LayerNorm is hard to fuse",
        "whether compile makes one kernel of norm and activation",
        "; ".join(parts),
        overall(verdicts),
    )


def release(view: View) -> Claim:
    """PyTorch 2.8 is a 2026 release."""
    version = view.record.environment["versions"].get("torch", "unknown")
    return Claim(
        "PyTorch 2.8 is a 2026 release",
        "its release notes; nothing to measure",
        f"it was public in 2025; this run used {version}",
        "refuted",
    )


CLAIMS: tuple[Callable[[View], Claim], ...] = (
    bounds,
    one_kernel,
    launch_share,
    reduce_overhead,
    kernel_counts,
    backward_fused,
    geglu_counts,
    our_kernel,
    concatenation,
    legal_gain,
    projections,
    layouts,
    two_layer_kernel,
    norms,
    layernorm_fuses,
    compile_costs,
    dynamic_shapes,
    no_synchronise,
    graph_break,
    release,
)

# Claims about kernels, which a trace without device activity cannot decide.
ON_KERNELS = frozenset(
    (one_kernel, launch_share, reduce_overhead, kernel_counts, backward_fused, geglu_counts, layernorm_fuses)
)
