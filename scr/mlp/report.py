"""The study's report, plots and tables, from the stored record and traces alone."""

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from harness import plots
from harness.measure import limited
from harness.paths import write_atomic
from harness.present import present
from harness.record import Record
from harness.sections import machine_table
from harness.statistics import NOISY_CV_PERCENT
from harness.tables import count, markdown_table, percent, significant, verdict_cell, words
from mlp import claims, predictions, timeline, traces
from mlp.view import View

TITLES = {
    1: "matmul + add: overhead against arithmetic",
    2: "nn.Linear: one kernel",
    3: "A ReLU MLP: launches, graphs, backward",
    4: "GeGLU: five kernels, four, three",
    5: "Two layers in one kernel",
    6: "What may be merged",
    7: "Mistakes",
}
# The cases of each experiment whose timelines are drawn: of these places among those whose names start so.
DRAWN: dict[int, tuple[str, tuple[int, ...]]] = {
    1: ("matmul+add", (0, 1)),  # overhead-bound and compute-bound
    2: ("linear", (0,)),
    3: ("mlp", (0, 1)),  # forward and training step
    4: ("geglu ", (0,)),
    5: ("two layers", (0, -1)),  # narrow and wide
    6: ("gate+up", (0,)),
    7: ("graph break", (0,)),
}


def build(record: Record, output: Path, markdown: Path) -> None:
    """Write the plots to `output`/plots and the report to `markdown`.

    What was observed is read from the stored traces again, so that a better reading needs no new run.
    """
    for cell in record.cells:
        observe(cell, output / "traces")
    view = View(record)
    plots.register(dict.fromkeys(cell["backend"] for cell in record.cells))
    for old in (output / "plots").glob("timeline_*.png"):
        old.unlink()  # of an earlier run with other cases
    pictures = {number: draw(view, number, output) for number in TITLES if view.cases(number)}
    widths = draw_widths(view, output / "plots" / "two_layers.png")
    folder = Path(os.path.relpath(output, markdown.parent)).as_posix()
    parts = [
        "# From nn.Linear to a fused MLP",
        introduction(view),
        "## Claims and verdicts\n\n" + claims_table(view),
        "## What changed, what stayed the same\n\n" + changes(view),
    ]
    for number in pictures:
        parts.append(f"## {number}. {TITLES[number]}\n\n" + experiment(view, number))
        if number == 5 and widths:
            parts.append(f"![Two layers over widths]({folder}/plots/two_layers.png)")
        for picture, case in pictures[number].items():
            parts.append(f"![Timelines of {case}]({folder}/plots/{picture})")
    parts += [
        "## Predictions that did not hold\n\n" + refuted(view),
        "## Not run here\n\n" + left_out(view),
        "## The run\n\n" + machine_table(record) + "\n\n" + precision(view) + doubts(view),
        files(folder),
    ]
    write_atomic(markdown, "\n\n".join(part for part in parts if part) + "\n")


def observe(cell: dict[str, Any], folder: Path) -> None:
    """Read a cell's figures and its verdict from its trace, where there is one."""
    path = folder / cell.get("trace", "")
    if not path.is_file():
        return
    summary = traces.summarize(traces.read(path))
    cell["observed"] = asdict(summary)
    if "verdict" in cell:
        cell["verdict"], cell["difference"] = predictions.compare(cell["prediction"], summary.kernels)


def introduction(view: View) -> str:
    """What was done and how to read it."""
    facts = view.record.environment
    done = [cell for cell in view.record.cells if "verdict" in cell]
    held = sum(cell["verdict"] == "confirmed" for cell in done)
    device = (facts.get("gpu") or {}).get("name") if view.device != "cpu" else facts["chip"]
    return (
        f"Run on {device} ({view.device}). Every way of running every case was predicted first (kernels by "
        "kind, bytes, operations, the least time), then profiled (one step of waiting, one of warm-up, three "
        f"counted), then timed against the others in random order. Of {count(len(done), 'prediction')} of "
        f"kernels {held} held; the rest is explained below or said to be open. Ratios say how many times "
        "faster a way is than its baseline, with the 95 % interval over rounds; within ±2 % counts as "
        "equivalent. The floor is the time that the predicted operations and bytes need at the rates "
        "measured in this run.\n\n"
        "The columns: *operators* are PyTorch operators called on the CPU, *launches* kernels launched one "
        "by one, *graph launches* replays of captured kernels, *outside kernels* the share of the profiled "
        "steps in which no kernel ran (the profiler's own time is in it); memory sets and copies are listed, "
        "but are no kernels. *P50* and its *variation* (coefficient of variation over all rounds) are wall "
        "times with a synchronise per call; *device ms* is the time per call of a full queue, a dash "
        "where calls last too long to queue them; *of the floor* is floor over device time, or over P50; "
        "*first call* is cold, compiling included."
    )


def claims_table(view: View) -> str:
    """All claims with verdicts."""
    rows = [
        {
            "claim": claim.claim,
            "test": claim.test,
            "observed": claim.observed,
            "verdict": f"**{claim.verdict}**",
        }
        for claim in claims.all_claims(view)
    ]
    return markdown_table(rows, left=("test", "observed", "verdict"))


def changes(view: View) -> str:
    """The article's closing table, filled from the traces: eager against compiled."""
    rows = []
    for number in TITLES:
        for case, dtype in view.cases(number):
            cells = view.pair(case, "torch", "torch-compile", dtype)
            if cells is None:
                continue
            eager, compiled = (cell["observed"] for cell in cells)
            gemms = [
                {
                    name: n
                    for name, n in seen["names"].items()
                    if traces.is_gemm(name) or name in traces.PRODUCTS
                }
                for seen in (eager, compiled)
            ]
            rows.append(
                {
                    "case": f"{case}, {dtype}",
                    "kernels": f"{_kernels(eager)} → {_kernels(compiled)}",
                    "GEMM kernels": "the same" if gemms[0] == gemms[1] else _gemm_change(*gemms),
                    "other kernels": f"{_others(eager)} → {_others(compiled)}",
                    "operators": f"{eager['operators']:g} → {compiled['operators']:g}",
                    "wall": verdict_cell(view.ratio(case, "torch-compile", "torch", dtype)),
                    "device": verdict_cell(view.ratio(case, "torch-compile", "torch", dtype, "device")),
                }
            )
    note = (
        "Eager → compiled, per step; the ratios say how many times faster compiled is. Operators are PyTorch "
        "operators called on the CPU, nested ones too."
    )
    table = markdown_table(rows, left=("kernels", "GEMM kernels", "other kernels", "wall", "device"))
    return "\n\n".join(part for part in (table, note, clocks(view)) if part)


def clocks(view: View) -> str:
    """In how many cases compiling is faster by each clock, where both were read."""
    both = []
    for case, dtype in dict.fromkeys((c["case"], c["dtype"]) for c in view.record.cells):
        pair = [view.ratio(case, "torch-compile", "torch", dtype, kind) for kind in ("device", "latency")]
        verdicts = [comparison.verdict for comparison in pair if comparison is not None]
        if len(verdicts) == 2:
            both.append(verdicts)
    if not both:
        return ""
    device, wall = ([verdicts[i] for verdicts in both].count("faster") for i in (0, 1))
    slower = [verdicts[1] for verdicts in both].count("slower")
    text = (
        f"By the device's clock compiled code is faster in {device} of {len(both)} cases; by the wall it is "
        f"faster in {wall} and slower in {slower}"
    )
    return f"{text}. {issuing(view)}".strip()


def issuing(view: View) -> str:
    """How long a call takes to return, compiled against eager: what the wall sees and the device does not."""
    differences, waits = [], 0
    for case, dtype in dict.fromkeys((c["case"], c["dtype"]) for c in view.record.cells):
        cells = view.pair(case, "torch-compile", "torch", dtype)
        clocks = ("python", "device")
        times = [[view.p50(cell, kind) for kind in clocks] for cell in cells] if cells else []
        known = [[time for time in row if time is not None] for row in times]
        if not known or min(map(len, known)) < len(clocks):
            continue
        (compiled, device), (eager, _) = known
        differences.append(1e3 * (compiled - eager))
        waits += compiled > device
    if not differences:
        return ""
    return (
        f"Why: until a call returns, compiled takes {significant(float(np.median(differences)))} µs longer "
        f"than eager (median of {len(differences)} cases; guards and wrappers in Python). In {waits} of them "
        "a compiled call takes longer to return than its kernels to run, so that the device waits for the "
        "CPU; in the others the first kernel only starts later."
    )


def _kernels(observed: dict[str, Any]) -> str:
    """Number of kernels, without memory copies and sets."""
    return f"{sum(n for kind, n in observed['kernels'].items() if not kind.startswith('mem')):g}"


def _others(observed: dict[str, Any]) -> str:
    """Kernels that are no products, by kind."""
    kinds = [
        f"{n:g} {kind}" for kind, n in observed["kernels"].items() if kind != "gemm" and "mem" not in kind
    ]
    return words(kinds) or "none"


def _gemm_change(before: dict[str, float], after: dict[str, float]) -> str:
    """In words how the set of GEMM kernels changed."""
    if sum(before.values()) == sum(after.values()):
        return "as many, other names"
    return f"{sum(before.values()):g} → {sum(after.values()):g}"


def experiment(view: View, number: int) -> str:
    """Predictions, times and notes of one experiment."""
    notes = {
        1: (cold,),
        2: (names,),
        3: (graph_kinds,),
        4: (fused_times, halves, shapes, parameters, liger),
        5: (two_layers,),
        6: (merges,),
        7: (mistakes,),
    }
    parts = [prediction_table(view, number), time_table(view, number)]
    parts += [note(view) for note in notes.get(number, ())]
    return "\n\n".join(part for part in parts if part)


def prediction_table(view: View, number: int) -> str:
    """Prediction, observation and verdict of every way."""
    rows = []
    for cell in view.cells(experiment=number):
        seen = cell["observed"]
        predicted = cell.get("prediction", {}).get("kernels", {})
        rows.append(
            {
                "case": f"{cell['case']}, {cell['dtype']}",
                "way": cell["backend"],
                "predicted": words([f"{n:g} {kind}" for kind, n in predicted.items()]),
                "observed": words([f"{n:g} {kind}" for kind, n in seen["kernels"].items()]),
                "launches": f"{seen['launches']:g}" if seen["device"] == "gpu" else None,
                "graph launches": f"{seen['graph_launches']:g}" if seen["device"] == "gpu" else None,
                "operators": f"{seen['operators']:g}",
                "outside kernels": percent(100 * seen["idle_share"]),
                "verdict": cell.get("verdict"),
            }
        )
    return markdown_table(rows, left=("way", "predicted", "observed", "verdict"))


def time_table(view: View, number: int) -> str:
    """Times of every way, and the ratio to the first of its case."""
    rows = []
    for case, dtype in view.cases(number):
        ways = [cell for cell in view.cells(case=case, dtype=dtype) if "observed" in cell]
        base = ways[0]["backend"]
        for cell in ways:
            p50, device = view.p50(cell), view.p50(cell, "device")
            floor = cell.get("prediction", {}).get("floor_ms")
            clock = "device" if device else "latency"
            rows.append(
                {
                    "case": f"{case}, {dtype}",
                    "way": cell["backend"],
                    "P50 ms": significant(p50),
                    "variation": percent(view.cv(cell)),
                    "device ms": significant(device),
                    "floor ms": significant(floor),
                    "of the floor": percent(100 * floor / (device or p50)) if floor and p50 else None,
                    "wall, × faster": verdict_cell(_against(view, cell, base, "latency")),
                    "device, × faster": verdict_cell(_against(view, cell, base, clock)) if device else None,
                    "compile s": significant(cell.get("compile_s"), 2),
                    "first call ms": significant(cell["first_ms"]),
                    "state": cell["state"] if cell["state"] != "steady" else None,
                }
            )
    return markdown_table(rows, left=("way", "wall, × faster", "device, × faster"))


def _against(view: View, cell: dict[str, Any], base: str, kind: str) -> Any:
    """The ratio of a cell to the first way of its case; None for that way itself."""
    if cell["backend"] == base:
        return None
    return view.ratio(cell["case"], cell["backend"], base, cell["dtype"], kind)


def cold(view: View) -> str:
    """Cold against warm calls."""
    lines = []
    for cell in view.cells(experiment=1, backend="torch"):
        p50 = view.p50(cell)
        if p50:
            lines.append(
                f"{cell['case']}: first call {significant(cell['first_ms'])} ms, second "
                f"{significant(cell['second_ms'])} ms, warm {significant(p50)} ms"
            )
    return f"Cold and warm: {'; '.join(lines)}." if lines else ""


def names(view: View) -> str:
    """Kernel names of experiment 2 with what they say."""
    rows = []
    for cell in view.cells(experiment=2):
        for name, launches in cell["observed"]["names"].items():
            decoded = traces.decode_gemm(name) if traces.is_gemm(name) and view.device == "cuda" else None
            rows.append(
                {
                    "way": cell["backend"],
                    "kernel": f"`{name if len(name) < 90 else short_name(name)}`",
                    "per step": f"{launches:g}",
                    "µs per step": significant(cell["observed"]["kernel_us"].get(name)),
                    "layout": decoded and decoded.layout,
                    "tile": decoded and decoded.tile,
                }
            )
    return markdown_table(rows, left=("kernel", "layout", "tile"))


def shapes(view: View) -> str:
    """What changing rows cost, by policy."""
    rows = []
    for entry in view.findings.get("shape changes", []):
        times = entry.get("first_call_s")
        rows.append(
            {
                "rows change": entry["policy"],
                "graphs": entry.get("graphs"),
                "first call per shape, s": times and ", ".join(str(significant(t, 2)) for t in times),
                "together, s": times and significant(sum(times)),
                "why not": entry.get("reason"),
            }
        )
    return markdown_table(rows, left=("first call per shape, s", "why not"))


def graph_kinds(view: View) -> str:
    """What is left of the calls under reduce-overhead, beside a graph that is only replayed."""
    lines = []
    for cell in view.cells(experiment=3, backend="torch-compile-overhead"):
        other = view.cell(cell["case"], "torch-graph", cell["dtype"])
        times = [view.p50(c, "python") for c in (cell, other) if c]
        known = [1e3 * time for time in times if time]
        if "observed" in cell and len(known) == 2:
            lines.append(
                f"{cell['dtype']}: {significant(known[0])} µs until a call under reduce-overhead returns "
                f"({significant(cell['observed']['guard_us'])} µs of it guard look-up in the trace), "
                f"{significant(known[1])} µs for a captured graph"
            )
    return (
        f"One graph launch is not one cost: {'; '.join(lines)}. The difference is Python around the replay "
        "and a copy of the input."
        if lines
        else ""
    )


PUBLISHED_US = {"torch-compile": 89.4, "liger": 92.8}  # the fused kernel on an A100 80 GB


def fused_times(view: View) -> str:
    """The fused point-wise kernel of each way in the MLP's traces and alone, beside the published times."""
    name = view.case_names(lambda n: n.startswith("geglu ") and "product" not in n)[0]
    alone = view.case_names(lambda n: n.startswith("geglu product"))
    rows = []
    for way in ("torch-compile", "triton", "liger"):
        cell, apart = view.cell(name, way), view.cell(alone[0], way) if alone else None
        if cell is None:
            continue
        fused = [us for kernel, us in cell["observed"]["kernel_us"].items() if traces.is_fused(kernel)]
        device = view.p50(apart, "device") if apart else None
        rows.append(
            {
                "fused kernel of": way,
                "in the MLP's trace, µs": significant(sum(fused)),
                "alone, device µs": significant(1e3 * device) if device else None,
                "published, A100, µs": PUBLISHED_US.get(way) if view.device == "cuda" else None,
            }
        )
    return markdown_table(rows) if len(rows) > 1 else ""


def mistakes(view: View) -> str:
    """The other mistakes of the list, where their figures are."""
    parts = [claims.no_synchronise(view), claims.graph_break(view), claims.dynamic_shapes(view)]
    return "\n".join(f"- {part.claim}: {part.observed} ({part.verdict})." for part in parts)


def halves(view: View) -> str:
    """What eager's point-wise kernels cost on the halves of a merged projection."""
    name = view.case_names(lambda n: n.startswith("geglu ") and "product" not in n)[0]
    cells = view.pair(name, "torch", "torch-merged")
    if cells is None:
        return ""
    apart, together = (
        sum(
            total
            for kernel, total in cell["observed"]["kernel_us"].items()
            if not traces.is_gemm(kernel) and kernel not in traces.PRODUCTS and "mem" not in kernel.lower()
        )
        for cell in cells
    )
    text = (
        f"In the traces of {name}, eager GELU and multiplication take {significant(apart)} µs on the outputs "
        f"of two projections and {significant(together)} µs on the two halves of one"
    )
    if together > 1.2 * apart:
        return text + (
            ": the rows of a half are strided, for which PyTorch takes slower kernels, so merging alone can "
            f"cost more than it saves.{_fused_halves(view, name)}"
        )
    return text + "."


def _fused_halves(view: View, name: str) -> str:
    """The same comparison for our fused kernel, where it ran."""
    cells = view.pair(name, "triton", "triton-merged")
    if cells is None:
        return ""
    apart, together = (cell["observed"]["kernel_us"]["geglu_kernel"] for cell in cells)
    return f" Our fused kernel takes {significant(apart)} and {significant(together)} µs."


def parameters(view: View) -> str:
    """Fixed launch parameters against tuned ones."""
    found = view.findings.get("launch parameters", [])
    lines = []
    for rows in dict.fromkeys(entry["rows"] for entry in found):
        tried = [entry for entry in found if entry["rows"] == rows]
        fixed = next(entry for entry in tried if entry["fixed"])
        best = min(tried, key=lambda entry: entry["us"])
        lines.append(
            f"at {rows:,} rows the fixed choice (block {fixed['block']}, {fixed['warps']} warps) takes "
            f"{significant(fixed['us'])} µs, the best of {len(tried)} (block {best['block']}, "
            f"{best['warps']} warps) {significant(best['us'])} µs"
        )
    return f"Launch parameters of our GeGLU kernel: {'; '.join(lines)}." if lines else ""


def liger(view: View) -> str:
    """Where Liger's kernel comes from."""
    package = f"liger-kernel {view.record.environment.get('liger') or ''}".strip()
    return (
        f"Liger's kernel is that of the package {package}. The other published route, "
        '`kernels.get_kernel("kernels-community/liger_kernels")`, fetches a build from the Hugging Face Hub '
        "when the program runs; it is not used here, so that a run needs no network."
    )


def two_layers(view: View) -> str:
    """Where the fused two-layer kernel wins and where it loses, and why."""
    gains = {}
    for name in view.case_names(lambda n: n.startswith("two layers ") and n.split()[-1].isdigit()):
        found = view.gain(name, "triton", "torch-compile")
        if found:
            gains[int(name.split()[-1])] = found
    if not gains:
        return "The fused kernel was not timed here: it needs an NVIDIA GPU. The tests check its results."
    won = [width for width, (gain, _) in gains.items() if gain.verdict == "faster"]
    lost = [width for width, (gain, _) in gains.items() if gain.verdict == "slower"]
    by_wall = [width for width, (_, clock) in gains.items() if clock == "latency"]
    text = f"Against compile, by device time{f' (at {words(by_wall)} by the wall)' if by_wall else ''}, the "
    text += f"fused kernel wins at widths {words(won) or 'none'} and loses at {words(lost) or 'none'}. "
    widest = max((width for width in gains if width not in by_wall), default=max(gains))
    clock = gains[widest][1]
    cells = present(view.pair(f"two layers {widest}", "triton", "torch-compile"))
    flops = [cell["prediction"]["flops"] for cell in cells]
    ours, theirs = (
        count / present(view.p50(cell, clock)) / 1e9 for count, cell in zip(flops, cells, strict=True)
    )
    return text + (
        f"At width {widest} it does {significant(flops[0] / flops[1], 2)} × the operations, since every tile "
        f"of output columns computes the hidden layer again, and reaches {significant(ours)} TFLOP/s of them "
        f"against {significant(theirs)}: with 128 rows it has few programs, each of them long. The kernel as "
        "printed was not timed: one program per tile and no loop over the inputs, so beyond 64 it reads the "
        "first 64 inputs and writes the first 64 outputs (at width 1024 a sixteenth), and in fp16 it "
        "multiplies fp32 by fp16, which Triton refuses."
    )


def merges(view: View) -> str:
    """Errors of the legal merges and of the counterexample."""
    rows = [
        {
            "merge": entry["name"],
            "what the pass did": words(entry.get("merges", [])) or "refuses: an activation stands between",
            "error merged": f"{entry['error']:.2g}",
            "error unmerged": f"{entry['error_unmerged']:.2g}" if "error_unmerged" in entry else None,
            "within rounding": "yes" if entry["legal"] else "no",
        }
        for entry in view.findings.get("merges", [])
    ]
    note = "Errors are relative to the largest output, against float64."
    return markdown_table(rows, left=("what the pass did",)) + "\n\n" + note if rows else ""


def refuted(view: View) -> str:
    """Every refuted prediction with an explanation, or as open; alike ones together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for cell in view.record.cells:
        if cell.get("verdict") == "refuted":
            key = (explain(cell) or "**open**", cell["difference"])
            groups.setdefault(key, []).append(f"{cell['case']} {cell['dtype']} {cell['backend']}")
    lines = [f"- {difference}: {why} ({'; '.join(where)})" for (why, difference), where in groups.items()]
    return "\n".join(lines) or "Every prediction of kernels held."


def explain(cell: dict[str, Any]) -> str | None:
    """Why a prediction of kernels failed, where the trace says it; None: open."""
    seen, expected = cell["observed"], cell["prediction"]["kernels"]
    reasons = []
    unexplained = {
        kind: seen["kernels"].get(kind, 0) - expected.get(kind, 0)
        for kind in set(expected) | set(seen["kernels"]) - {"memcpy", "memset"}
    }
    copies = unexplained.get("copy", 0)
    if seen["device"] == "cpu" and copies and copies == seen["names"].get("aten::addmm", 0):
        reasons.append("on a CPU addmm first copies the bias into the result, then adds the product to it")
        unexplained["copy"] = 0
    if unexplained.get("gemm helper", 0) > 0:
        found = [traces.GEMM_HELPER.search(name.lower()) for name in seen["names"]]
        helpers = sorted({match.group() for match in found if match})
        reasons.append(f"the library helps a product with kernels of its own: {_code(helpers)}")
        unexplained["gemm helper"] = 0
    if seen["graph_launches"] and cell["backend"] == "torch-compile-overhead" and copies == 1:
        reasons.append("before the replay the input is copied into the graph's own buffer")
        unexplained["copy"] = 0
    if "rmsnorm" in cell["case"] and cell["backend"] == "torch" and unexplained.get("norm", 0) == -1:
        parts = [name for name in seen["names"] if name not in ("aten::addmm", "aten::copy_")]
        reasons.append(
            f"eager RMSNorm has no kernel of its own here; norm and activation run as {', '.join(parts)}"
        )
        unexplained |= dict.fromkeys(("norm", "pointwise", "reduction", "copy"), 0)
    if cell["training"] and unexplained.get("fused", 0):
        kernels = [name for name in seen["names"] if "fused" in name]
        reasons.append(
            "Inductor divides the backward otherwise: " + ", ".join(f"`{name}`" for name in kernels)
        )
        unexplained["fused"] = 0
    return "; ".join(reasons) if reasons and not any(unexplained.values()) else None


def short_name(name: str) -> str:
    """A kernel's name without namespaces, template arguments and parameters, at most 60 characters."""
    name = re.sub(r"^void |<.*|\(.*", "", name.replace("(anonymous namespace)::", ""))
    name = name.rsplit("::", 1)[-1]
    return name if len(name) <= 60 else name[:57] + "…"


def _code(names: list[str]) -> str:
    """Names in words, as code."""
    return words([f"`{name}`" for name in names])


def left_out(view: View) -> str:
    """What this device could not be asked, and ways without numbers."""
    lines = [f"- {text}" for text in view.record.environment["left_out"]]
    reasons: dict[str, set[str]] = {}
    for case, dtype in dict.fromkeys((c["case"], c["dtype"]) for c in view.record.cells):
        cells = view.cells(case=case, dtype=dtype)
        if len({c["reason"] for c in cells}) == 1 and cells[0]["state"] == "dropped":
            lines.append(
                f"- {case}, {dtype}: every way, plain eager among them, differs from the reference alike, so "
                f"the check itself is at fault and no time is given ({cells[0]['reason']})"
            )
            continue
        for cell in cells:
            if cell["state"] in ("unavailable", "dropped"):
                reasons.setdefault(cell["reason"], set()).add(cell["backend"])
    lines += [f"- {words(sorted(ways))}: {reason}" for reason, ways in reasons.items()]
    return "\n".join(lines) or "Everything was run."


def precision(view: View) -> str:
    """How float32 products were computed."""
    facts = view.record.environment["precision"]
    return (
        f"TF32 was {'on' if facts['tf32'] else 'off'} (float32 matmul precision "
        f"{facts['float32_matmul_precision']}). "
        f"{count(len(view.record.checks), 'result')} checked against float64, "
        f"{sum(not check['passed'] for check in view.record.checks)} wrong."
    )


def doubts(view: View) -> str:
    """What makes the times doubtful, as a list below the machine; empty where nothing does."""
    found = [*(view.record.environment.get("warnings") or []), *limited(view.record)]
    timed = [cell for cell in view.record.cells if view.p50(cell)]
    noisy = sum((view.cv(cell) or 0) > NOISY_CV_PERCENT for cell in timed)
    drifting = sum(cell["state"] == "drifting" for cell in timed)
    few = sum(cell["state"] == "few" for cell in timed)
    if noisy:
        found.append(
            f"{noisy} of {count(len(timed), 'timed cell')} scattered by more than {NOISY_CV_PERCENT:.0f} % "
            "(coefficient of variation); their intervals say what can still be told."
        )
    if drifting:
        found.append(f"{count(drifting, 'cell')} drifted over the run.")
    if few:
        found.append(f"{count(few, 'cell')} had time for fewer than 20 trials.")
    return "\n\n" + "\n".join(f"- {text}" for text in found) if found else ""


def files(folder: str) -> str:
    """Where the raw material is and how to open it."""
    return (
        f"Raw trials: [per_trial.npz]({folder}/per_trial.npz). Traces: [traces]({folder}/traces), one per "
        "way; open one in https://ui.perfetto.dev or chrome://tracing (both read .json.gz). The pictures "
        "show the last profiled step; under a profiler every operator is slower."
    )


def draw(view: View, number: int, output: Path) -> dict[str, str]:
    """Draw the timelines of an experiment's chosen cases; returns file names with the cases drawn."""
    start, places = DRAWN[number]
    cases = [(case, dtype) for case, dtype in view.cases(number) if case.startswith(start)]
    drawn: dict[str, str] = {}
    for case, dtype in dict.fromkeys(cases[place] for place in places if -len(cases) <= place < len(cases)):
        found = {}
        for cell in view.cells(case=case, dtype=dtype):
            path = output / "traces" / cell.get("trace", "")
            if path.is_file():
                found[f"{case}, {dtype}: {cell['backend']}"] = traces.read(path)
        if found:
            name = (
                f"timeline_{number}{'abc'[len(drawn)]}.png" if len(places) > 1 else f"timeline_{number}.png"
            )
            timeline.save(found, output / "plots" / name)
            drawn[name] = f"{case}, {dtype}"
    return drawn


def draw_widths(view: View, path: Path) -> bool:
    """Draw the two-layer case over widths; False where there is less than two of them."""
    curves: dict[str, dict[int, float]] = {}
    for name in view.case_names(lambda n: n.startswith("two layers ") and n.split()[-1].isdigit()):
        for cell in view.cells(case=name):
            p50 = view.p50(cell, "device") or view.p50(cell)
            if p50:
                curves.setdefault(cell["backend"], {})[int(name.split()[-1])] = p50
    if not curves or max(map(len, curves.values())) < 2:
        return False
    with plots.style():
        figure = plots.new_figure(3.0)
        axes = figure.subplots()
        plots.draw_lines(axes, curves)
        plots.plain_log_axis(axes, "x", sorted({width for points in curves.values() for width in points}))
        plots.plain_log_axis(axes, "y")
        axes.set_xlabel("width")
        # A call of milliseconds leaves no time for the device's clock; by the wall it is hardly longer.
        axes.set_ylabel("device ms, P50 (wall from 1 ms on)" if view.device == "cuda" else "wall ms, P50")
        figure.legend(handles=plots.legend_lines(curves), loc="outside upper center", ncols=4)
        plots.save(figure, path)
    return True
