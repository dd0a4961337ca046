"""The report's sections: each takes groups of a record and gives Markdown, "" where there is nothing to say.

Sentences are computed; a figure that was not measured is left out or said to be missing, never guessed.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from harness import costs, ladder, machine, published, statistics
from harness.analysis import (
    MISSING_TERM_FROM,
    OWN_KERNELS,
    PEERS,
    PLAIN,
    RETURNS_EARLY,
    Group,
    groups,
    machine_name,
)
from harness.backends import DIRECT_CASES, DIRECT_RUNGS
from harness.ceilings import device_of
from harness.compare import contradictions
from harness.measure import NO_CLOCK, NOT_YET_TRACED, TOO_SLOW, limited
from harness.present import present
from harness.record import FALSE_CLOCK, GPU_TRACE, KINDS, Record
from harness.statistics import NOISY_CV_PERCENT, P95_FROM, speedup
from harness.tables import (
    count,
    interval,
    markdown_table,
    milliseconds,
    percent,
    quantity,
    ratio,
    significant,
    span,
    verdict_cell,
    words,
)
from harness.verdicts import by_verdict, compared

# Rungs of the cost model that no backend runs: what lies between two that are timed.
UNTIMED = {
    "mlx-folded-eager": " (not timed: folded, not compiled)",
    "mlx-six": " (not timed: block, stem stored)",
}
INTENSITIES = {  # of costs.depthwise_intensity, as a table names them
    "convolution": "convolution alone",
    "unfused": "three passes",
    "fused": "one pass",
    "folded": "one pass, BatchNorm folded",
}
IDLE_KNOWN_PERCENT = 5  # below, what is left after subtracting it says little
PREDICTED_BATCHES = (1, 128)
PREDICTED_RUNGS = ("mlx", "mlx-folded", "mlx-fused", "mlx-fused-compile", "mlx-block")


def machine_table(record: Record) -> str:
    """The machine, its state and the software, from the record's environment."""
    facts = record.environment
    gpu = facts.get("gpu") or {}
    cores = str(facts.get("cores", ""))
    if facts.get("performance_cores"):
        cores += f", {facts['performance_cores']} of them performance cores"
    graphics = gpu.get("name") and ", ".join(
        str(part)
        for part in (
            gpu["name"],
            f"{gpu['cores']} cores" if gpu.get("cores") else None,
            gpu.get("memory_total"),
            f"driver {gpu['driver_version']}" if gpu.get("driver_version") else None,
            f"power limit {gpu['power_limit']}" if gpu.get("power_limit") else None,
        )
        if part
    )
    power = facts.get("power") or {}
    mode = {True: ", low-power mode on", False: ", low-power mode off", None: ""}[power.get("low_power_mode")]
    commit = facts.get("commit")
    if commit:
        commit = f"`{commit[:12]}`" + (" with uncommitted changes in `scr/`" if facts.get("dirty") else "")
    tf32 = {name for c in record.cells if (name := c.get("tf32")) is not None}
    modes = {cell["compile_mode"] for cell in record.cells if cell.get("compile_mode")}
    settings = record.settings
    asked = [f"{k.replace('_', ' ')} {settings[k]}" for k in ("trials", "warmup", "rounds") if k in settings]
    asked += [f"budget {settings['budget']:g} s per cell"] if "budget" in settings else []
    asked += [f"pause {settings['pause']:g} s before each burst"] if settings.get("pause") else []
    asked += [f"at most {settings['limit']:g} s in all"] if settings.get("limit") else []
    asked += [f"seed {settings['seed']}"] if "seed" in settings else []
    rows = [
        ("chip", facts["chip"]),
        ("cores", cores),
        ("GPU", graphics),
        ("memory", f"{facts['memory_gb']:g} GB" if facts.get("memory_gb") else None),
        ("system", f"{facts['os']}, {facts.get('architecture', '')}".rstrip(", ")),
        ("power", f"{power['source']}{mode}" if power.get("source") else None),
        ("load average at the start", ", ".join(map(str, facts.get("load_average") or []))),
        (
            "versions",
            ", ".join(
                f"{name} {version}"
                for name, version in [("Python", facts.get("python")), *facts["versions"].items()]
                if version
            ),
        ),
        ("TF32", " and ".join(word for on, word in ((True, "on"), (False, "off")) if on in tf32)),
        ("our kernels' math mode", facts.get("math_mode")),
        ("torch.compile mode", words(sorted(modes))),
        ("threads per framework", facts.get("threads")),
        (
            "our CUDA texts compiled by",
            words(sorted({c["compiler"] for c in record.cells if c.get("compiler")})),
        ),
        ("our kernels' tiles", tiles(record)),
        ("inputs", facts.get("inputs")),
        ("measurement", ", ".join(asked)),
        ("command", f"`{facts['command']}`" if facts.get("command") else None),
        ("started", facts.get("started")),
        ("duration", f"{facts['seconds']:.0f} s" if facts.get("seconds") else None),
        ("commit", commit),
        (
            "kernel texts",
            ", ".join(f"{name} `{digest}`" for name, digest in (facts.get("kernel_hashes") or {}).items()),
        ),
    ]
    return markdown_table([{"": name, "this run": value} for name, value in rows if value], left=["this run"])


def tiles(record: Record) -> str | None:
    """Whether the kernels ran with default or tuned tiles; None where the record does not say."""
    known = {cell["tiles"] for cell in record.cells if cell.get("tiles")}
    if not known and record.environment.get("tiles"):
        known = {record.environment["tiles"]}
    return words(sorted(map(str, known))) if known else None


def warnings(record: Record, found_groups: Sequence[Group]) -> str:
    """What makes the numbers doubtful, as a list."""
    found = list(record.environment.get("warnings") or [])
    if not record.environment.get("complete", True):
        found.append("The run was interrupted: what is missing was not measured.")
    found += limited(record)
    if record.environment.get("dirty"):
        found.append("The code had uncommitted changes.")
    names: dict[str, list[str]] = {"drifting": [], "noisy": [], "restless": []}
    for group in found_groups:
        for backend in group.backends:
            for size in group.batch_sizes:
                cell, summary = group.cell(backend, size), group.summary(backend, size)
                if summary is None:
                    continue
                if cell.get("state") == "drifting":
                    names["drifting"].append(
                        f"{_where(group, backend, size)} ({cell['drift_percent']:+.0f} %)"
                    )
                if summary.noisy:
                    names["noisy"].append(_where(group, backend, size))
                if cell.get("warmup_steady") is False:
                    names["restless"].append(_where(group, backend, size))
    sentences = {
        "drifting": "drifted over the run (last quarter of the rounds against the first): heat, "
        "throttling or other work",
        "noisy": f"scattered by more than {NOISY_CV_PERCENT:.0f} % (coefficient of variation)",
        "restless": "had no steady median when the warm-up ended",
    }
    for key, sentence in sentences.items():
        if names[key]:
            found.append(f"{count(len(names[key]), 'cell')} {sentence}: {_some(names[key])}.")
    usual = (None, NO_CLOCK, TOO_SLOW, NOT_YET_TRACED, FALSE_CLOCK)
    untraced = [cell for cell in record.cells if (cell.get("left_out") or {}).get("device") not in usual]
    if untraced:
        names_of = words(list(dict.fromkeys(f"`{cell['backend']}`" for cell in untraced)))
        found.append(
            f"{count(len(untraced), 'cell')} of {names_of} could not be traced on the GPU and have no device "
            f"time; the first: {untraced[0]['left_out']['device']}."
        )
    for name, facts in (record.environment.get("workers") or {}).items():
        if facts.get("trace_failed"):
            found.append(
                f"While it was traced, the process `{name}` failed ({facts['trace_failed']}); its cells were "
                f"traced anew in {count(facts.get('retraces') or 0, 'other process', 'other processes')}."
            )
    unsettled = sum(w.get("unsettled_bursts") or 0 for w in record.environment.get("workers", {}).values())
    if unsettled:
        found.append(f"After {count(unsettled, 'request')} a waiting framework still used the processor.")
    return "\n".join(f"- {sentence}" for sentence in found)


def absent(record: Record) -> str:
    """Backends that were asked for and have no numbers, with the reasons."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for cell in record.cells:
        if cell["state"] in ("unavailable", "dropped"):
            text = f"{cell['state']}: {cell.get('reason') or 'no reason recorded'}"
            found.setdefault((cell["backend"], text), []).append(cell)
    lines = []
    for (backend, text), cells in found.items():
        batches: dict[str, set[int]] = {}
        for cell in cells:
            batches.setdefault(cell["case"], set()).add(cell["batch_size"])
        alike: dict[tuple[int, ...], list[str]] = {}
        for case, sizes in batches.items():
            alike.setdefault(tuple(sorted(sizes)), []).append(case)
        where = "; ".join(
            ("" if cases == ["network"] else f"{words(cases)}, ") + f"batch {words(list(sizes))}"
            for sizes, cases in alike.items()
        )
        lines.append(f"- `{backend}` ({where}) {text}")
    return "\n".join(lines)


def results(group: Group) -> str:
    """The article's table: P50, P95, CV, throughput, speedups, scaling efficiency, published P50."""
    return markdown_table(result_rows(group), left=["backend", "state"])


def result_rows(group: Group) -> list[dict[str, Any]]:
    """The rows of `results`, as text by column."""
    baselines = comparison_baselines(group)
    rows = []
    for size in group.batch_sizes:
        summaries = {name: group.summary(name, size) for name in group.backends}
        known_here = {name: summary for name, summary in summaries.items() if summary is not None}
        for backend, summary in known_here.items():
            cell = group.cell(backend, size)
            noise = percent(summary.cv_percent)
            row = {
                "batch": size if backend == next(iter(known_here)) else "",
                "backend": backend,
                "P50 ms": milliseconds(summary.p50),
                "P95 ms": None if summary.p95 is None else milliseconds(summary.p95),
                "CV": f"**{noise}** ⚠" if summary.noisy else noise,
                "images/s": f"{group.throughput(backend, size):,.0f}",
            }
            for baseline in baselines:
                compared = group.speedup(backend, baseline, size) if backend != baseline else None
                row[f"× {baseline}"] = "1" if backend == baseline else verdict_cell(compared)
            row["scaling"] = percent(group.scaling_percent(backend, size))
            row["trials"] = summary.trials
            row["state"] = _state(cell)
            row["mJ/image"] = _millijoules(group, backend, size)
            known = published.P50_MS.get(backend, {}).get(size) if group.is_published else None
            row[f"P50 ms, {published.LABEL}"] = None if known is None else milliseconds(known)
            rows.append(row)
    return rows


def comparison_baselines(group: Group) -> list[str]:
    """What backends are compared with: the peer, and the best that costs no kernel; else the first one."""
    found = [group.first_of(PEERS), group.first_of(PLAIN)]
    if "mlx" in group.backends and "mlx-fused" in group.backends:
        found.append("mlx")  # the article's own comparison
    return list(dict.fromkeys(name for name in found if name)) or group.backends[:1]


def results_note(group: Group) -> str:
    """How to read the table of results."""
    flops = quantity(costs.FLOPS, "FLOP") if group.is_network else None
    sentences = [
        f"P95 needs {P95_FROM} trials. ⚠ marks a coefficient of variation above {NOISY_CV_PERCENT:.0f} %. "
        "A column “× name” says how many times faster a backend is than that one: the ratio of medians "
        "over the rounds that both took part in, without the course that both have in common (so that it "
        "need not be the ratio of the P50 shown), with its 95 % interval and a verdict; "
        "*faster* and *slower* need the whole interval outside ±2 %, *equivalent* inside, "
        "anything else is *undecided*. Scaling efficiency is P50 at the backend's "
        "smallest batch ÷ P50 (from batch 1 on: throughput ÷ (batch × throughput at batch 1)): 100 % if a "
        "larger batch cost no more time.",
    ]
    if any(cell.get("joules_per_image") is not None for cell in group.cells.values()):
        sentences.append(
            "mJ/image is the energy of the whole board above idle; ≈ where that is less than "
            f"{IDLE_KNOWN_PERCENT} % of the idle power, which was measured once, for a second."
        )
    if flops:
        article = costs.article_flops()["total"]
        sentences.append(
            f"One image costs {flops} (convolutions and linear layer, 2 per multiply-accumulate; the "
            f"article counts {quantity(article, 'FLOP')} with BatchNorm, ReLU and additions); every rate "
            "uses this one count."
        )
    return " ".join(sentences)


def honest_baseline(group: Group) -> str:
    """What must be said in every report about baselines, and what the free steps gave here."""
    text = (
        "BatchNorm folding and `mx.compile` cost no custom kernel. The honest baseline for a custom "
        "kernel is therefore the network **folded and compiled** (`mlx-folded`), not only the network as "
        "written (`mlx`)."
    )
    found = compared(group, "mlx-folded", "mlx")
    if not found:
        return text + " This run did not measure both, so it cannot say what those two give."
    return text + f" Here it is, against the network as written, {by_verdict(found)}."


def prediction(group: Group) -> str:
    """Prediction beside measurement, percent of the floor, and the missing term where they differ."""
    rows, unexplained, far, beyond = [], 0, 0, []
    for size in group.batch_sizes:
        for backend in group.backends:
            cost, measured = group.cost(backend, size), group.p50(backend, size)
            if not cost or measured is None:
                continue
            floor, term = cost.get("floor_ms"), group.missing_term(backend, size)
            counted = group.cell(backend, size).get("launches_counted")
            launches = str(cost.get("launches"))
            if counted is not None and counted != cost.get("launches"):
                launches += f" ({counted} counted)"
            elif counted is not None:
                launches += " ✓"
            if floor and floor > 1.05 * measured:
                beyond.append(f"{backend} at batch {size}")
            far += term is not None
            unexplained += term == "unexplained"
            rows.append(
                {
                    "batch": size,
                    "backend": backend,
                    "FLOP/byte": significant(cost.get("intensity")),
                    "launches": launches,
                    "arithmetic ms": _ms(cost.get("arithmetic_ms")),
                    "bytes ms": _ms(cost.get("bytes_ms")),
                    "launch ms": _ms(cost.get("launch_ms")),
                    "floor ms": _ms(floor),
                    "measured ms": _ms(measured),
                    "of floor": percent(100 * floor / measured) if floor else None,
                    f"missing term (from {MISSING_TERM_FROM:g}×)": term,
                }
            )
    if not rows:
        return ""
    table = markdown_table(rows, left=["backend", f"missing term (from {MISSING_TERM_FROM:g}×)"])
    text = (
        "Floor = max(arithmetic, bytes) + launches × launch cost, from the ceilings measured in this run; "
        "a floor is what the hardware could do, not what is expected of a framework. “Of floor” is floor "
        f"÷ measured. ✓: the launches were also counted. {count(far, 'cell')} of {len(rows)} {_are(far)} "
        f"above {MISSING_TERM_FROM:g}× the floor"
        + (f", {unexplained} of them unexplained." if unexplained else ".")
    )
    if beyond:
        text += (
            f" Faster than its floor: {_some(beyond)}; there a measured ceiling is below what the machine "
            "can do (larger caches, more threads)."
        )
    return f"{text}\n\n{table}"


def ceilings_table(record: Record) -> str:
    """The machine's measured limits, with the datasheet's where one is known."""
    rows = []
    for entry in record.environment.get("ceilings") or []:
        what = {
            "launch_wait": "an empty operation, launched and waited for",
            "launch_chain": "one more dependent launch in a chain",
            "copy": f"copy, working set {quantity(entry.get('bytes', 0), 'B')}",
            "fma": f"multiply-adds, {entry.get('dtype', '')}",
        }.get(entry["name"], entry["name"])
        value = f"{significant(entry['value'])} {entry['unit']}" if "value" in entry else None
        rows.append(
            {
                "limit": what,
                "by": entry.get("source") or entry.get("framework"),
                "on": entry.get("target"),
                "measured": value or f"not measured: {entry.get('reason', 'no reason recorded')}",
            }
        )
    if not rows:
        return ""
    text = markdown_table(rows, left=["by", "on"])
    sheet = record.environment.get("datasheet")
    if sheet:
        text += (
            f"\n\nDatasheet-class figures: {sheet['fp32_tflop_s']:g} TFLOP/s, {sheet['gb_s']:g} GB/s, "
            f"ridge {sheet['ridge_flop_per_byte']:.0f} FLOP/byte (±10 %; the measured ceilings count)."
        )
    return text


def clocks(group: Group) -> str:
    """Each clock in a column of its own; ratios across columns are not formed."""
    kinds = [k for k in ("latency", "throughput", "device", "python", "transfer") if _has(group, k)]
    rows = []
    for size in group.batch_sizes:
        for backend in group.backends:
            if group.p50(backend, size) is None:
                continue
            row: dict[str, Any] = {"batch": size, "backend": backend}
            for kind in kinds:
                row[f"{kind} ms"] = _ms(group.p50(backend, size, kind))
            steady = group.p50(backend, size, "throughput")
            row["images/s at P50"] = f"{group.throughput(backend, size):,.0f}"
            row["images/s sustained"] = None if steady is None else f"{1e3 * size / steady:,.0f}"
            rows.append(row)
    meanings = "\n".join(f"- **{kind}**: {KINDS[kind]}" for kind in kinds)
    missing = [kind for kind in ("throughput", "device", "python", "transfer") if kind not in kinds]
    if missing:
        why = {r for c in group.cells.values() for k, r in (c.get("left_out") or {}).items() if k in missing}
        meanings += f"\n- not measured here: {words(missing)}" + (f" ({words(sorted(why))})" if why else "")
    false = [
        f"`{cell['backend']}` at batch {cell['batch_size']}"
        for cell in group.cells.values()
        if (cell.get("left_out") or {}).get("device") == FALSE_CLOCK
    ]
    if false:
        meanings += f"\n- without a device time, because {FALSE_CLOCK}: {words(false)}"
    if "device" in kinds and any(c.get("device_clock") == GPU_TRACE for c in group.cells.values()):
        meanings += (
            "\n- device times are the GPU's own, from its trace of kernels and copies (CUPTI): how long at "
            "least one ran, without the gaps in which it waits to be told"
        )
    elif "device" in kinds and any(name.startswith("mlx") for name in group.backends):
        meanings += (
            "\n- MLX has no timer: its device time is a slope between chains of forwards, and too low where "
            "Python and launches take longer than the device"
        )
    return (
        f"Medians, ms per forward. A ratio is only formed within a column.\n\n{meanings}\n\n"
        + markdown_table(rows, left=["backend"])
    )


def device_speedups(group: Group) -> str:
    """Speedups by the device clock alone."""
    if not _has(group, "device"):
        return ""
    sized = [
        (name, size)
        for name in group.backends
        for size in group.batch_sizes
        if group.p50(name, size, "device") is not None
    ]
    names = list(dict.fromkeys(name for name, _ in sized))
    baseline = next((n for n in ("torch-graph", "torch", "mlx-folded", "mlx") if n in names), None)
    if baseline is None or len(names) < 2:
        return ""
    rows = []
    for size in group.batch_sizes:
        row: dict[str, Any] = {"batch": size}
        for name in names:
            if name != baseline:
                row[f"{name}"] = verdict_cell(group.speedup(name, baseline, size, "device"))
        rows.append(row)
    return f"Device time, × {baseline}:\n\n" + markdown_table(rows, left=names)


def metal_default(group: Group) -> str:
    """What the tilings cost that fit Metal's 32 KB of threadgroup memory, where an NVIDIA GPU ran both."""
    own, other = "mlx-block", "mlx-block-32kb"
    rows = [
        {"batch": size}
        | {
            clock: verdict_cell(group.speedup(other, own, size, kind))
            for clock, kind in (("wall", "latency"), ("device", "device"))
            if group.p50(own, size, kind) is not None and group.p50(other, size, kind) is not None
        }
        for size in group.batch_sizes
        if group.p50(own, size) is not None and group.p50(other, size) is not None
    ]
    if not rows:
        return ""
    return (
        f"What Metal's 32 KB of threadgroup memory cost here: `{other}`, with the tilings that are Metal's "
        f"default, × `{own}`, with CUDA's. It is the best estimate there is of the loss on a Mac, where "
        "nothing was measured:\n\n" + markdown_table(rows, left=["wall", "device"])
    )


def launching(found: Sequence[Group]) -> str:
    """MLX's rungs by how MLX launches and waits: as it does by itself, without CUDA graphs, and awake."""
    by_case = {(group.case, group.dtype): group for group in found if group.study == "mnist"}
    direct, awake = DIRECT_CASES
    rows: list[dict[str, Any]] = []
    best: dict[tuple[str, int], tuple[float, str]] = {}  # (dtype, batch) -> the shortest P50 and its row
    for main in (group for group in found if group.is_network):
        groups = {case: by_case.get((case, main.dtype)) for case in (direct, awake)}
        if not any(groups.values()):
            continue
        for size, backend in itertools.product(main.batch_sizes, DIRECT_RUNGS):
            usual = main.sample(backend, size)
            samples = {case: group.sample(backend, size) for case, group in groups.items() if group}
            if usual is None or not any(samples.values()):
                continue
            device = [group.p50(backend, size, "device") for group in groups.values() if group]
            busy = next((ms for ms in reversed(device) if ms is not None), None)
            row: dict[str, Any] = {"batch": size, "dtype": main.dtype, "backend": backend}
            row |= {"device ms, direct": _ms(busy), "as MLX does ms": _ms(usual.p50)}
            before = usual
            for case, name in ((direct, "direct"), (awake, "awake")):
                sample = samples.get(case)
                row[f"{name} ms"] = sample and _ms(sample.p50)
                row[f"{name} ×"] = sample and verdict_cell(speedup(sample, before))
                before = sample or before
                if sample and sample.p50 < best.get((main.dtype, size), (np.inf, ""))[0]:
                    what = "" if busy is None else f", {_ms(sample.p50 - busy)} ms beyond the device's"
                    best[main.dtype, size] = sample.p50, f"`{backend}` {name}{what}"
            last = samples.get(awake)
            row["awake − device ms"] = None if last is None or busy is None else _ms(last.p50 - busy)
            rows.append(row)
    if not rows:
        return ""
    shortest = ", ".join(
        f"{_ms(ms)} ms at batch {size} ({what}{'' if dtype == 'float32' else ', ' + dtype})"
        for (dtype, size), (ms, what) in best.items()
    )
    return (
        "On NVIDIA MLX collects what it evaluates in a CUDA graph, and waits with its thread asleep, which "
        "takes tens of microseconds to wake. **direct**: without graphs (`MLX_USE_CUDA_GRAPHS=0`), compared "
        "with MLX as it is. **awake**: also without, and the thread spins for as long as three forwards "
        "in four take before it asks MLX to wait; compared with direct. What is left beyond the device's "
        "time is Python, MLX's launch, the wait, and where it sleeps or spins for longer than it must. "
        f"Shortest with either: {shortest}.\n\n"
        + markdown_table(rows, left=["dtype", "backend", "direct ×", "awake ×"])
    )


def lazy_trap(group: Group) -> str:
    """Time until the call returns beside the true time, where the two differ."""
    rows: list[dict[str, Any]] = []
    worst = (0.0, "", 0)  # false speedup, backend, batch size
    waiting = []
    for backend in group.backends:
        before = len(rows)
        for size in _ends(group):
            returned, true = group.p50(backend, size, "python"), group.p50(backend, size)
            if returned is None or true is None or returned > RETURNS_EARLY * true:
                continue
            rows.append(
                {"backend": backend, "batch": size, "call returned after ms": _ms(returned)}
                | {"result was there after ms": _ms(true), "false speedup": f"{ratio(true / returned)}×"}
            )
            worst = max(worst, (true / returned, backend, size))
        if len(rows) == before and any(group.p50(backend, n, "python") for n in _ends(group)):
            waiting.append(backend)
    if not rows and not waiting:
        return ""
    text = "A timer that stops when the call returns, without `mx.eval` or a device synchronise, "
    if rows:
        text += (
            f"would report {worst[1]} at batch {worst[2]} {ratio(worst[0])} times too fast on this machine. "
            "The column of ratios is the size of the error, not a speedup."
        )
    else:
        text += f"errs by less than {1 / RETURNS_EARLY:g} times for the backends measured here."
    if waiting:
        text += (
            f" {_code(waiting)} return after more than {percent(100 * RETURNS_EARLY)} of the true time, so "
            f"the trap is smaller than {1 / RETURNS_EARLY:g} times for them."
        )
    return f"{text}\n\n{markdown_table(rows)}" if rows else text


def cold_start(group: Group) -> str:
    """Import, build, first and second call, and peak memory, at the smallest and largest batch."""
    rows = []
    cold = group.rows[group.rows["kind"] == "cold"]
    for backend in group.backends:
        for size in _ends(group):
            part = cold[(cold["backend"] == backend) & (cold["batch_size"] == size)]
            times = dict(zip(part["trial"], part["latency_ms"], strict=True))
            cell = group.cell(backend, size)
            if not times:
                continue
            rows.append(
                {
                    "backend": backend,
                    "batch": size,
                    "import s": None if 0 not in times else significant(times[0] / 1e3, 2),
                    "build s": significant(cell.get("build_s"), 2),
                    "first call ms": _ms(times.get(1)),
                    "second call ms": _ms(times.get(2)),
                    "P50 ms": _ms(group.p50(backend, size)),
                    "peak memory MB": None
                    if cell.get("peak_memory_mb") is None
                    else f"{cell['peak_memory_mb']:,.0f}",
                }
            )
    if not rows:
        return ""
    text = markdown_table(rows)
    if group.record.settings.get("precompile"):
        facts = group.record.environment.get("precompiled") or {}
        known = "What compiles had been run before (`--precompile`): first calls found its kernels on disk"
        known += (
            f", but for {count(facts['failed'], 'cell')} that failed there." if facts.get("failed") else "."
        )
        text = f"{known}\n\n{text}"
    workers = group.record.environment.get("workers") or {}
    peaks = [
        {"worker process": name, "import s": significant(facts.get("import_s"), 2)}
        | {"peak memory MB": f"{facts['peak_memory_mb']:,.0f}"}
        for name, facts in workers.items()
        if facts.get("peak_memory_mb")
    ]
    return text + (f"\n\n{markdown_table(peaks)}" if peaks else "")


def correctness(record: Record) -> str:
    """The largest error of every backend against the float64 reference."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    order = {(c["case"], c["backend"], c["dtype"]): i for i, c in enumerate(record.cells)}
    for check in sorted(record.checks, key=lambda c: order.get((c["case"], c["backend"], c["dtype"]), -1)):
        key = (check["case"], check["backend"], check["dtype"])
        row = rows.setdefault(key, {"checks": 0, "failed": 0, "error": None, "check": check})
        row["checks"] += 1
        row["failed"] += not check["passed"]
        error = check.get("relative_error")
        if error is not None and (row["error"] is None or error > row["error"]):
            row |= {"error": error, "check": check}
    if not rows:
        return "No output was checked against a reference in this run."
    table = markdown_table(
        [
            {
                "case": case,
                "backend": backend,
                "dtype": dtype,
                "checks": row["checks"],
                "largest relative error": None if row["error"] is None else f"{row['error']:.1e}",
                "allowed": f"{row['check']['tolerance']:.0e}" if row["check"].get("tolerance") else None,
                "at batch": row["check"]["batch_size"],
                "verdict": "**wrong, dropped**" if row["failed"] else "passed",
            }
            for (case, backend, dtype), row in rows.items()
        ],
        left=["backend", "dtype", "verdict"],
    )
    failed = len({backend for (_, backend, _), row in rows.items() if row["failed"]})
    text = (
        "The output of the warm-up and the output of the last timed forward of every cell, against one "
        "float64 reference on the CPU; the error is the largest one, relative to the largest reference "
        "value. "
    )
    text += f"{count(failed, 'backend')} failed." if failed else "All passed."
    return f"{text}\n\n{table}"


def ladder_steps(group: Group) -> str:
    """What each rung saved, with interval and verdict, split by the cost model."""
    rows = []
    for size in group.batch_sizes:
        for step in ladder.steps(group, size):
            bounds = step.saved_interval_ms
            rows.append(
                {
                    "batch": size,
                    "step": f"{step.base} → {step.rung}",
                    "saved ms": _signed(step.saved_ms),
                    "95 % interval": f"[{_signed(bounds[0])}, {_signed(bounds[1])}]" if bounds else None,
                    "ratio": interval(step.comparison),
                    "this step": step.pays if step.pays != "costs" else "**costs**",
                }
                | {name: _signed(value) for name, value in step.model.items()}
            )
    if not rows:
        return ""
    changes = [f"- `{name}`: {text}" for name, text in ladder.CHANGES.items() if name in ladder.rungs(group)]
    costly = [f"{row['step']} at batch {row['batch']}" for row in rows if row["this step"] == "**costs**"]
    text = "Each rung against the one it is built on:\n\n" + "\n".join(changes) + "\n\n"
    text += f"Steps that cost time here: {_some(costly)}" if costly else "No step costs time by its verdict"
    text += ".\n\n"
    return (
        text
        + markdown_table(rows, left=["step", "this step"])
        + "\n\nThe last columns split the saving, in ms: what the cost model says the rungs differ "
        "by in launches, bytes and arithmetic, what Python's own time (measured) differs by, and the "
        "rest: kernels that run nearer to the machine's limits, or farther from them. Bytes and "
        "arithmetic overlap in time, so these are bounds, and the rest makes up for what they overstate."
    )


def winners(group: Group) -> str:
    """Which rung wins at which batch, and where two rungs change places."""
    among = ladder.rungs(group)
    if len(among) < 2:
        return ""
    rows = []
    for size, best, second, ahead in ladder.winners(group, among):
        overall = group.fastest(size)
        against = group.speedup(best, overall, size) if overall != best else None
        rows.append(
            {
                "batch": size,
                "fastest rung": f"`{best}`",
                "P50 ms": milliseconds(present(group.p50(best, size))),
                "next": f"`{second}`" if second else None,
                "× next": verdict_cell(ahead),
                "fastest of all": f"`{overall}`",
                "rung × fastest of all": verdict_cell(against) if against else "1",
            }
        )
    crossings = []
    for i, first in enumerate(among):
        for second in among[i + 1 :]:
            for before, after, winner in ladder.crossovers(group, first, second):
                loser = first if winner == second else second
                crossings.append(f"- `{winner}` overtakes `{loser}` between batch {before} and {after}")
    text = markdown_table(rows, left=["fastest rung", "next", "fastest of all"])
    if crossings:
        return f"{text}\n\nCrossovers between rungs (decided verdicts only):\n\n" + "\n".join(crossings)
    return f"{text}\n\nNo verdict says that two rungs change places between the batch sizes measured."


def headroom(group: Group) -> str:
    """The best peer's share of the measured multiply-add rate, which bounds what any program could gain."""
    limits = group.record.environment.get("ceilings") or []
    rows = []
    for size in group.batch_sizes:
        rung = group.fastest(size, OWN_KERNELS)
        device = device_of(group.cell(rung, size)["target"]) if rung else ""
        on_device = [n for n in group.backends if device_of(group.cell(n, size).get("target", "")) == device]
        peer = group.fastest(size, tuple(n for n in on_device if n.startswith(PEERS)))
        peak = costs.peak_rate(group.dtype, device, limits)
        if not rung or not peer or not peak:
            continue
        peer_percent, rung_percent = (
            costs.FLOPS * size / present(group.p50(name, size)) / 1e4 / peak for name in (peer, rung)
        )
        rows.append(
            {
                "batch": size,
                "best peer": f"`{peer}`",
                "GFLOP/s, best sample": significant(peak),
                "peer's share": percent(peer_percent),
                "at most × faster": ratio(100 / peer_percent),
                "best rung": f"`{rung}`",
                "rung's share": percent(rung_percent),
                "rung × peer": verdict_cell(group.speedup(rung, peer, size)),
            }
        )
    if not rows:
        return ""
    table = markdown_table(rows, left=["best peer", "best rung"])
    return (
        "The fastest peer's share of the best measured multiply-add rate bounds every gain over it: at p %, "
        f"no program that does the same arithmetic in {group.dtype} can be more than 100/p times faster."
        f"\n\n{table}"
    )


def launches(group: Group) -> str:
    """Launches of every backend: by the cost model, and counted where the platform allows."""
    rows = []
    for backend in group.backends:
        cells = [group.cell(backend, size) for size in group.batch_sizes]
        predicted = {(cell.get("cost") or {}).get("launches") for cell in cells} - {None}
        counted = {cell.get("launches_counted") for cell in cells} - {None}
        how = {cell.get("launches_by") for cell in cells} - {None}
        traced = {cell.get("kernels_traced") for cell in cells} - {None}
        if predicted or counted:
            rows.append(
                {
                    "backend": backend,
                    "launches by the model": words(sorted(predicted)) if predicted else None,
                    "counted": words(sorted(counted)) if counted else "not counted",
                    "how": words(sorted(how)) if counted and how else None,
                }
                | ({"kernels in the GPU's trace": words(sorted(traced))} if traced else {})
            )
    return markdown_table(rows, left=["how"])


def architecture() -> str:
    """What every rung launches and moves by the cost model alone, also rungs that no backend runs."""
    alike: dict[costs.Form, list[str]] = {}
    for rung, form in costs.RUNGS.items():
        alike.setdefault(form, []).append(rung)
    rows = []
    for rung, *others in alike.values():
        nbytes = costs.activation_bytes(rung)
        rows.append(
            {
                "rung": ", ".join([rung + UNTIMED.get(rung, ""), *others]),
                "launches": len(costs.launches(rung)),
                "activations per image": quantity(nbytes, "B"),
                "FLOP/byte at batch 1": ratio(costs.intensity(rung, 1)),
                "FLOP/byte at large batches": ratio(costs.FLOPS / nbytes),
            }
        )
    steps = []
    for block in costs.BLOCKS:
        found = costs.depthwise_intensity(block)
        row = {"depthwise step of": block} | {name: ratio(found[key]) for key, name in INTENSITIES.items()}
        steps.append(row | {"bytes saved": percent(100 * found["saved"])})
    return (
        "Computed, the same on every machine: float32, each input read once and each output written once. A "
        f"rung is bound by memory where its FLOP/byte lies below the machine's ridge point.\n\n"
        f"{markdown_table(rows)}\n\nThe depthwise convolution, the BatchNorm and the ReLU after it, in "
        f"FLOP/byte at batch 1; what fusing them saves:\n\n{markdown_table(steps)}"
    )


def layer_shares(found: Sequence[Group]) -> str:
    """Time by layer type beside multiply-accumulates: was depthwise the bottleneck?"""
    timed = [group for group in found if group.study == "layers"]
    if not timed:
        return ""
    macs = costs.mac_shares()
    order = [*macs, *(group.case for group in timed)]
    parts = {group.case: group for group in sorted(timed, key=lambda group: order.index(group.case))}
    rows, sentences = [], []
    first = timed[0]
    for backend in first.backends:
        for size in first.batch_sizes:
            medians = {case: group.p50(backend, size) for case, group in parts.items()}
            times = {case: value for case, value in medians.items() if value is not None}
            total = sum(times.values())
            if not total:
                continue
            for case, value in times.items():
                mac_share = 100 * macs.get(case, 0.0)
                rows.append(
                    {"backend": backend, "batch": size, "layers": case, "ms": _ms(value)}
                    | {"share of time": percent(100 * value / total)}
                    | {"share of multiply-accumulates": percent(mac_share)}
                )
            if "depthwise" in times:
                largest = max(times, key=lambda case: times[case])
                share = percent(100 * times["depthwise"] / total)
                sentences.append(
                    f"{backend}, batch {size}: depthwise takes {share} of the time"
                    + (", the largest part" if largest == "depthwise" else f"; the largest part is {largest}")
                )
    answer = "; ".join(sentences) or "depthwise was not measured, so this run cannot say"
    text = f"Was depthwise the bottleneck, as the article says? {answer}. Shares: of all kinds together"
    return f"{text}.\n\n{markdown_table(rows, left=['layers'])}"


def ablation(found: Sequence[Group]) -> str:
    """The article's “free” BatchNorm and ReLU: the depthwise kernel with one part more each time."""
    timed = [group for group in found if group.study == "ablation"]
    if len(timed) < 2:
        return ""
    paired = all(cell.get("shares_rounds") for group in timed for cell in group.cells.values())
    rows = []
    for backend in timed[0].backends:
        for size in timed[0].batch_sizes:
            all_samples = [(group.case, group.sample(backend, size)) for group in timed]
            samples = [(case, trials) for case, trials in all_samples if trials is not None]
            for (_, before), (case, trials) in zip([*samples[:1], *samples], samples, strict=False):
                row = {"backend": backend, "batch": size, "kernel": case, "P50 ms": _ms(trials.p50)}
                if trials is not samples[0][1]:
                    row["× first row"] = verdict_cell(speedup(trials, samples[0][1], paired=paired))
                    row["× row above"] = verdict_cell(speedup(trials, before, paired=paired))
                rows.append(row)
    return (
        "What the additions to the depthwise kernel cost, against the first row and against the row above: "
        "“+ folded” replaces the statistics per pixel, “+ ReLU” comes on top of it. Free means "
        "*equivalent*.\n\n" + markdown_table(rows, left=["kernel"])
    )


def other_cases(found: Sequence[Group]) -> str:
    """Cases beside the network: P50 and speedups of each."""
    texts = []
    for group in found:
        if group.study in ("layers", "ablation"):
            continue
        baselines = comparison_baselines(group)
        rows = []
        for size in group.batch_sizes:
            for backend in group.backends:
                summary = group.summary(backend, size)
                if summary is None:
                    continue
                row = {"batch": size, "backend": backend, "P50 ms": milliseconds(summary.p50)}
                row["P95 ms"] = None if summary.p95 is None else milliseconds(summary.p95)
                for baseline in baselines:
                    compared = group.speedup(backend, baseline, size) if backend != baseline else None
                    row[f"× {baseline}"] = "1" if backend == baseline else verdict_cell(compared)
                rows.append(row)
        texts.append(f"### {group.case}, {group.dtype}\n\n{markdown_table(rows, left=['backend'])}")
    return "\n\n".join(texts)


def precision(found: Sequence[Group]) -> str:
    """The network in other precisions (float16, TF32, …) against float32, and our best rung against those.

    Other precisions are other cases: their rounds do not pair.
    """
    full = next((group for group in found if group.is_network and group.dtype == "float32"), None)
    network = [g for g in found if g.study == "mnist" and g.case.startswith("network")]
    others = [g for g in network if g is not full and g.case not in DIRECT_CASES]
    if full is None or not others:
        return ""
    rows = []
    for other in others:
        name = other.case.partition(", ")[2] or other.dtype
        for size in other.batch_sizes:
            best = full.fastest(size, OWN_KERNELS)
            for backend in other.backends:
                ours, theirs = other.sample(backend, size), full.sample(backend, size)
                if ours is None:
                    continue
                row = {"batch": size, "backend": backend, "precision": name, "P50 ms": _ms(ours.p50)}
                row["float32 ms"] = None if theirs is None else _ms(theirs.p50)
                row["× its float32"] = theirs and verdict_cell(speedup(ours, theirs, paired=False))
                own, its = (group.sample(backend, size, "device") for group in (other, full))
                if own is not None and its is not None:
                    row["× its float32, device"] = verdict_cell(speedup(own, its, paired=False))
                if best and backend not in OWN_KERNELS:
                    compared = speedup(present(full.sample(best, size)), ours, paired=False)
                    row["our best rung in float32"] = f"`{best}`, × this: {verdict_cell(compared)}"
                rows.append(row)
    left = ["backend", "precision", "× its float32", "× its float32, device", "our best rung in float32"]
    return markdown_table(rows, left=left)


def apple_prediction() -> str:
    """What the cost model says about Apple's chips, beside what was published for one of them."""
    rows = []
    cells = [(rung, size) for size in PREDICTED_BATCHES for rung in PREDICTED_RUNGS]
    row: dict[str, str | None] = {"chip": f"**{published.MACHINE}, published**"}
    for rung, size in cells:
        known = published.P50_MS.get(rung, {}).get(size)
        row[f"{rung}, {size}"] = f"**{milliseconds(known)}**" if known else None
    rows.append(row)
    for chip in machine.APPLE_CHIPS:
        row = {"chip": chip}
        for rung, size in cells:
            row[f"{rung}, {size}"] = milliseconds(predict_apple(chip, rung, size))
        rows.append(row)
    near: list[tuple[str, int, float]] = []
    far: list[tuple[str, int, float]] = []
    for rung in ("mlx", "mlx-fused"):
        for size in published.BATCH_SIZES:
            off = published.P50_MS[rung][size] / predict_apple("M1", rung, size)
            (near if 1 / 1.25 <= off <= 1.25 else far).append((rung, size, off))
    text = (
        "**A prediction, not a measurement**: max(arithmetic, bytes) from datasheet figures (±10 %) plus "
        f"{1e3 * published.LAUNCH_MS:.0f} µs per launch, which is what the published M1 figures at batch 1 "
        "come to per launch. Newer chips, systems and versions of MLX may launch faster; then the small "
        "batches are overestimated. ms per forward, float32; column: rung, batch."
    )
    if near:
        text += f" Within 25 % of the published figure: {_some([f'{r} at batch {n}' for r, n, _ in near])}."
    if far:
        low, high = min(o for *_, o in far), max(o for *_, o in far)
        text += (
            f" In the other {len(far)} published cells the M1 took {span(low, high)} times the prediction: "
            "its kernels were far from the chip's limits, so part of the published gain of fusion is over "
            "a slow path, which a current MLX may not take."
        )
    return f"{text}\n\n{markdown_table(rows)}"


def predict_apple(chip: str, rung: str, batch_size: int, dtype: str = "float32") -> float:
    """Predicted ms per forward of a rung on an Apple chip (a key of machine.APPLE_CHIPS)."""
    _, tflops, bandwidth = machine.APPLE_CHIPS[chip]
    nbytes = costs.activation_bytes(rung, dtype) * batch_size + costs.weight_bytes(dtype)
    arithmetic_ms = costs.FLOPS * batch_size / tflops / 1e9
    bytes_ms = nbytes / bandwidth / 1e6
    return max(arithmetic_ms, bytes_ms) + len(costs.launches(rung)) * published.LAUNCH_MS


def reliability(record: Record, again: Record | None = None, second: Record | None = None) -> str:
    """How far verdicts can be trusted: on synthetic latencies, on equal backends, and in a second run."""
    known = statistics.CALIBRATION
    texts = [
        "Intervals come from a bootstrap over rounds (95 %, seeded); the method is in "
        "`scr/harness/statistics.py`. On synthetic latencies with known ratio (normal, heavy-tailed, "
        "drifting, bimodal; 10 to 200 trials in 10 or 20 rounds) they hold the true ratio in "
        f"{known['least_coverage_percent']:.1f} % of the repeats or more, "
        f"{known['mean_coverage_percent']:.1f} % on average; equal backends are called faster or slower in "
        f"{known['most_false_percent']:.1f} % or fewer, {known['mean_false_percent']:.1f} % on average "
        "(`tests/test_statistics.py` repeats this). Cells with fewer rounds, most of those marked *few*, are "
        "outside these tests."
    ]
    again = again or record
    rate = false_positives(again)
    if rate is None:
        texts.append(
            "No run of this machine with every backend under two names (`make aa`) is stored beside this one."
        )
    else:
        wrong, pairs, worst = rate
        text = (
            f"For real, on {machine_name(again)}: the same backend under two names was called faster or "
            f"slower in {wrong} of {count(pairs, 'comparison')} ({percent(100 * wrong / pairs)})"
        )
        texts.append(text + (f", the ratio farthest from 1 being {interval(worst)}." if wrong else "."))
    if second is not None:
        found, asked = contradictions(record, second)
        text = (
            f"A second run of {count(asked, 'pair')} of backends on {machine_name(second)} contradicts "
            f"{count(len(found), 'verdict')} of this one"
        )
        texts.append(text + (":\n\n" + "\n".join(f"- {one}" for one in found) if found else "."))
    return "\n\n".join(texts)


def base_name(backend: str) -> str:
    """The backend that "mlx-again" is once more; its own name for any other."""
    return backend.removesuffix("-again")


def false_positives(record: Record) -> tuple[int, int, statistics.Comparison] | None:
    """(false verdicts, comparisons, the most extreme comparison) of a run with NAME and NAME-again."""
    compared = [
        group.speedup(name, base_name(name), size)
        for group in groups(record)
        for name in group.backends
        if base_name(name) != name
        for size in group.batch_sizes
    ]
    found = [one for one in compared if one is not None and one.low is not None]
    if not found:
        return None
    wrong = [one for one in found if one.verdict in ("faster", "slower")]
    worst = max(found, key=lambda one: abs(np.log(one.ratio)))
    return len(wrong), len(found), worst


def _where(group: Group, backend: str, size: int) -> str:
    """A cell in words."""
    text = f"{backend} at batch {size}"
    return text if group.is_network and group.dtype == "float32" else f"{text} ({group.case}, {group.dtype})"


def _millijoules(group: Group, backend: str, size: int) -> str | None:
    """A cell's energy per image above idle in mJ, with ≈ where idle is not known well enough for it."""
    cell, steady = group.cell(backend, size), group.p50(backend, size, "throughput")
    joules, idle = cell.get("joules_per_image"), cell.get("idle_watts")
    if joules is None:
        return None
    watts = np.inf if steady is None else 1e3 * joules * size / steady
    sign = "≈ " if idle is not None and watts < IDLE_KNOWN_PERCENT / 100 * idle else ""
    return f"{sign}{significant(1e3 * joules)}"


def _some(names: Sequence[str], most: int = 6) -> str:
    """A list in words, cut after `most`."""
    if len(names) <= most:
        return words(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def _state(cell: dict[str, Any]) -> str | None:
    """The cell's state with the size of its drift."""
    if cell.get("state") == "drifting":
        return f"drifting {cell['drift_percent']:+.0f} %"
    return cell.get("state")


def _ends(group: Group) -> list[int]:
    """The smallest and the largest batch size."""
    return list(dict.fromkeys((group.batch_sizes[0], group.batch_sizes[-1])))


def _has(group: Group, kind: str) -> bool:
    """Whether any row of the group is of this kind."""
    return bool((group.rows["kind"] == kind).any())


def _ms(value: float | None) -> str | None:
    """A time in ms, or None."""
    return None if value is None else milliseconds(value)


def _signed(value: float | None) -> str | None:
    """A difference of times in ms, with its sign; below half a microsecond it is 0."""
    if value is None:
        return None
    if abs(value) < 5e-4:
        return "0"
    return f"{'−' if value < 0 else '+'}{milliseconds(abs(value))}"


def _code(names: Sequence[str]) -> str:
    """Names as code, in words."""
    return words([f"`{name}`" for name in names])


def _are(number: int) -> str:
    """Is or are."""
    return "is" if number == 1 else "are"
