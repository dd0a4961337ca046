"""The batching study's report, from its record alone: plots and conclusions/batching.md.

    from batch.report import build

    build(load(OUTPUT / "batching" / "per_trial.npz"), OUTPUT / "batching", CONCLUSIONS / "batching.md")

Knows no framework. Every number and every verdict is computed from the record; the same record gives the same
text.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from batch.analysis import AGREE, DEARER, FREE, Curve, Study, missing
from batch.cases import CHOSEN, EXPERTS, MLP_DEPTH, ROUTINGS, SKEW, routes
from batch.claims import (
    SMALL_SHARE,
    ahead_from,
    attention_shares,
    claims_table,
    device_rows,
    skew_ratios,
)
from batch.figures import FIGURES
from batch.knee import INTERVAL, Knee, fit_trials
from batch.roofline import (
    BYTES,
    cache_bytes,
    published,
    ridge_batch_convolution,
    ridge_batch_experts,
    ridge_batch_with_activations,
    ridge_batch_with_launch,
    tokens_per_expert,
)
from harness import plots
from harness.cli import Fault
from harness.measure import failed, limited, unavailable
from harness.paths import write_atomic
from harness.present import present
from harness.record import Record
from harness.sections import ceilings_table, machine_table
from harness.tables import (
    count,
    markdown_table,
    milliseconds,
    percent,
    quantity,
    ratio,
    significant,
    verdict_cell,
    words,
)

REQUIRED = ("place", "works", "network", "ceilings")


def build(record: Record, plots_dir: Path, markdown: Path) -> list[Path]:
    """Draw the plots into `plots_dir` and write the report; returns what was written.

    Raises Fault for a record of another study.
    """
    absent = [name for name in REQUIRED if name not in record.environment]
    if absent:
        raise Fault(f"the record lacks {', '.join(absent)}; it was not written by scr/batching.py.")
    study = Study(record)
    if not study.curves:
        raise Fault("the record holds no curve: nothing was measured to the end.")
    images: dict[str, Path] = {}
    for name, draw in FIGURES.items():
        with plots.style():
            figure = draw(study)
        if figure is not None:
            images[name] = plots_dir / f"{name}.png"
            plots.save(figure, images[name])
    for path in plots_dir.glob("*.png"):
        if path not in images.values():
            path.unlink()  # of an earlier run with other cases
    links = {name: os.path.relpath(path, markdown.parent) for name, path in images.items()}
    source = os.path.relpath(plots_dir / "per_trial.npz", markdown.parent)
    write_atomic(markdown, text(record, study, links, source))
    return [*images.values(), markdown]


def text(record: Record, study: Study, links: dict[str, str], source: str) -> str:
    """The report."""
    parts = [
        f"# What a batch costs: {study.place['name']}",
        f"Latency against batch, from [`per_trial.npz`]({source}) alone; `make batching` measures again. "
        f"{clock_note(study)}",
        "## In short",
        in_short(study),
        "## Claims and verdicts",
        claims_table(study),
        "## What batching bought",
        bought(study),
        image(links, "throughput", "Throughput over batch"),
        dearer(study),
        "## The model",
        model(study),
        "## MLPs: the width sweep",
        width_sweep(study),
        image(links, "widths", "Latency over batch for all widths"),
        image(links, "mlp", "Each width with the parts of its model"),
        "## ResNet-50",
        resnet(study),
        "## Our MNIST network",
        network(study),
        "## Single layers",
        single_layers(study),
        image(links, "layers", "Single layers over batch"),
        "## A decoder block with a KV cache",
        decoder(study),
        "## A mixture of experts",
        experts(study),
        image(links, "large", "ResNet-50, decoder block and experts over batch"),
        "## CPU or GPU at batch 1",
        devices(study),
        image(links, "devices", "CPU and GPU at batch 1"),
        "## CUDA graphs",
        graphs(study),
        "## The published figures",
        published_table(),
        "## How it was measured",
        method(record, study),
        machine_table(record),
        ceilings_table(record),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def image(links: dict[str, str], name: str, alternative: str) -> str:
    """A link to a plot, empty where it was not drawn."""
    return f"![{alternative}]({links[name]})" if name in links else ""


def clock_note(study: Study) -> str:
    """Which clock the tables use."""
    if any(curve.kind == "device" for curve in study.curves):
        return (
            "Unless a table says otherwise, times are device times of a replayed CUDA graph, forwards one "
            "behind the other (of batches that last long, wall times); wall times with a synchronise per "
            "forward are in the record too. TF32 is off: fp32 means fp32."
        )
    return "Times are wall times, each forward waited for."


def ms(seconds: float | None) -> str | None:
    """Milliseconds with three digits."""
    return None if seconds is None else milliseconds(1e3 * seconds)


def knee_text(knee: Knee | None) -> str | None:
    """A knee with its interval, or what was seen instead."""
    if knee is None:
        return None
    if knee.state == "beyond":
        return f"none up to {knee.batch:.0f}"
    if knee.state == "before":
        return "rises from batch 1"
    interval = "" if math.isnan(knee.low) else f" [{significant(knee.low, 2)}, {significant(knee.high, 2)}]"
    return f"{significant(knee.batch, 2)}{interval}"


def span_of(values: Sequence[float]) -> str:
    """The smallest and the largest of some numbers, 1.20 to 3.40, or one number if they look the same."""
    low, high = ratio(min(values)), ratio(max(values))
    return low if low == high else f"{low} to {high}"


def batch_text(value: float) -> str:
    """A ridge batch; "never" for infinity."""
    return DASH if math.isnan(value) else "never" if math.isinf(value) else present(significant(value, 3))


DASH = "–"


def in_short(study: Study) -> str:
    """The answers, one bullet each, computed."""
    bullets = [
        free_answer(study),
        dearer_answer(study),
        formula_answer(study),
        attention_answer(study),
        experts_answer(study),
        device_answer(study),
        graph_answer(study),
    ]
    return "\n".join(f"- {bullet}" for bullet in bullets if bullet)


def free_answer(study: Study) -> str:
    """Up to which batch a larger batch is free, per kind of case."""
    said = []
    for family, name in FAMILY_NAMES.items():
        curves = [curve for curve in study.best(family) if len(curve.batches) > 2]
        if not curves:
            continue
        free = [[curve.free for curve in curves], [curve.free_from(curve.batches[1]) for curve in curves]]
        spans = [f"{min(f)}" if min(f) == max(f) else f"{min(f)} to {max(f)}" for f in free]
        said.append(f"{spans[0]} for {name} (counted from batch 2 on {spans[1]})")
    return (
        f"A larger batch is free (latency within {100 * (FREE - 1):.0f} % of batch 1, as far as the trials "
        f"can tell) up to batch {'; '.join(said)}. A single row often runs by another routine than two."
        if said
        else ""
    )


def dearer(study: Study) -> str:
    """Cases in which a batch takes longer than a larger one."""
    rows = []
    for curve in dearer_curves(study):
        batch, larger, factor = max(curve.dearer, key=lambda entry: entry[2])
        eager = next(
            (c for c in study.of(curve.work.family, "latency", "torch") if c.work is curve.work), None
        )
        both = eager is not None and eager is not curve and {batch, larger} <= set(eager.batches)
        rows.append(
            {
                "case": curve.work.name,
                "dtype": curve.work.dtype,
                "dear batches": ", ".join(str(entry[0]) for entry in curve.dearer),
                "worst": batch,
                "ms": ms(curve[batch]),
                "larger batch": larger,
                "its ms": ms(curve[larger]),
                "times": f"{ratio(factor)}×",
                "the same, eager by the wall": f"{ratio(eager[batch] / eager[larger])}×"
                if both and eager is not None
                else None,
            }
        )
    if not rows:
        return ""
    hidden = (
        " Where eager by the wall shows nothing, its launches take longer still and hide it."
        if any(row["the same, eager by the wall"] for row in rows)
        else ""
    )
    return (
        f"Batches that take longer than a larger one, by a factor of {DEARER:g} or more: padding them to the "
        "larger one would be faster. The model knows nothing of it. The library chooses kernels by the "
        f"sizes, which would explain it; kernels were not traced in this study.{hidden}\n\n"
        + markdown_table(rows, left=["dtype", "dear batches"])
    )


def dearer_curves(study: Study) -> list[Curve]:
    """The cases with batches that are dearer than larger ones."""
    return [curve for family in FAMILY_NAMES for curve in study.best(family) if curve.dearer]


def dearer_answer(study: Study) -> str:
    """The worst of them."""
    curves = dearer_curves(study)
    if not curves:
        return ""
    worst = max(curves, key=lambda curve: max(entry[2] for entry in curve.dearer))
    batch, larger, factor = max(worst.dearer, key=lambda entry: entry[2])
    return (
        f"Latency does not only rise: {count(len(curves), 'case has', 'cases have')} batches that take "
        f"longer than a larger one; at worst {worst.work.name} ({worst.work.dtype}), where batch {batch} "
        f"takes {ratio(factor)} times batch {larger}."
    )


FAMILY_NAMES = {
    "mlp": "MLPs",
    "resnet": "ResNet-50",
    "layers": "single layers",
    "decoder": "the decoder block",
    "experts": "a mixture of experts",
}


def formula_answer(study: Study) -> str:
    """Whether the model predicts the knees of the width sweep."""
    agreements = [(curve, curve.agreement) for curve in study.best("mlp")]
    known = [(curve, agreement) for curve, agreement in agreements if agreement is not None]
    curves, ratios = [curve for curve, _ in known], [agreement for _, agreement in known]
    if not curves:
        return "No knee of the width sweep can be compared with a predicted one in this run."
    close = [curve for curve, agreement in known if 1 / AGREE <= agreement <= AGREE]
    verdict = (
        "predicts"
        if len(close) == len(curves)
        else "does not predict all of"
        if close
        else "does not predict"
    )
    sentence = (
        f"The model (weights, activations, launches, arithmetic) {verdict} the knees of the MLPs: "
        f"{len(close)} of {len(curves)} lie within a factor {AGREE:g}; measured over predicted is "
        f"{span_of(ratios)}, median {ratio(float(np.median(ratios)))}."
    )
    far = [curve for curve in curves if curve not in close]
    if far:
        factors = [missing(curve) for curve in far]
        flat, rise = (float(np.median([getattr(m, name) for m in factors])) for name in ("flat", "rise"))
        sentence += (
            f" Where it fails, the flat piece lasts {ratio(flat)} times as long as predicted (median) and "
            f"the rising one {ratio(rise)} times. {missing_term(study, curves, flat, rise)}"
        )
    return sentence


def missing_term(study: Study, curves: Sequence[Curve], flat: float, rise: float) -> str:
    """The term that the model lacks, measured at one width and tried at the others."""
    if max(flat, 1 / flat) < max(rise, 1 / rise):
        return f"The missing term is arithmetic, at {percent(100 / rise)} of the rate of a large product."
    explained = tried = 0
    said = []
    for dtype in sorted({*study.rows_paid, *study.shortest}):
        measured = study.measured_terms(dtype)
        others = [c for c in curves if c.work.dtype == dtype and c.work.sizes["width"] not in measured]
        ratios = [r for curve in others if (r := corrected_ratio(study, curve)) is not None]
        if not ratios:
            continue
        close = sum(1 / AGREE <= r <= AGREE for r in ratios)
        explained, tried = explained + close, tried + len(others)
        terms = "both terms" if len(measured) > 1 else "that term"
        said.append(
            f"in {dtype} {' and '.join(terms_of(study, dtype))}, and with {terms} {close} of {len(others)} "
            f"knees of the other widths lie within a factor {AGREE:g} (measured over predicted, where both "
            f"have one, {span_of(ratios)})"
        )
    if not said:
        return (
            "The missing term is in the flat piece; no width but the one that shows it can confirm its cause."
        )
    opening = "What is missing is" if explained == tried else "Part of what is missing is"
    return f"{opening} the price of a small product: {'; '.join(said)}."


def terms_of(study: Study, dtype: str) -> list[str]:
    """The missing terms of a dtype, each with its measured size and the width that showed it."""
    found = []
    if dtype in study.rows_paid:
        rows, width = study.rows_paid[dtype]
        found.append(
            f"one of 2 rows or more lasts as long as {rows:.0f} rows at the full rate (measured at width "
            f"{width:,})"
        )
    if dtype in study.shortest:
        seconds, width = study.shortest[dtype]
        found.append(f"none of them less than {significant(1e6 * seconds)} µs (measured at width {width:,})")
    return found


def corrected_ratio(study: Study, curve: Curve) -> float | None:
    """Measured knee over the one predicted with the missing term; None unless there are both."""
    measured, corrected = curve.knee, study.corrected_knee(curve)
    if measured is None or corrected is None or not measured.state == corrected.state == "knee":
        return None
    return measured.batch / corrected.batch


def within(value: float | None) -> str | None:
    """Whether a ratio lies within AGREE."""
    return None if value is None else "yes" if 1 / AGREE <= value <= AGREE else "**no**"


def bought(study: Study) -> str:
    """One row per case: what batching bought and what it cost."""
    rows = []
    for family in FAMILY_NAMES:
        for curve in study.best(family):
            if len(curve.batches) < 2:
                continue
            batch, seconds = curve.saturated
            rows.append(
                {
                    "case": curve.work.name,
                    "dtype": curve.work.dtype,
                    "batch 1, ms": ms(curve.seconds[0]),
                    "throughput gained": f"{ratio(curve.gain)}×",
                    "90 % of it at batch": batch,
                    "latency there, ms": ms(seconds),
                    "times batch 1": f"{ratio(seconds / curve.seconds[0])}×",
                    "free up to": curve.free,
                    "from 2 up to": curve.free_from(curve.batches[1]),
                    f"knee [{INTERVAL} %]": knee_text(curve.knee),
                    "knee of the model": knee_text(curve.predicted_knee),
                    "largest batch": curve.batches[-1],
                    "bound there by": curve.predictions[-1].bound if curve.predictions else None,
                }
            )
    note = (
        "Throughput gained is the largest throughput over that of batch 1. The batch with 90 % of the "
        "largest throughput is the one to take when latency matters at all; its latency is what it costs. "
        "Where it is the largest batch measured, throughput may still be rising. Free up to: the last batch "
        f"before latency first leaves {100 * (FREE - 1):.0f} % of that of batch 1, or of batch 2."
    )
    return f"{note}\n\n{markdown_table(rows, left=['dtype', 'bound there by'])}"


def model(study: Study) -> str:
    """The formula, and the constants that this machine puts into it."""
    rows = []
    for curve in study.of("mlp"):
        limits = curve.limits
        entry = {
            "backend": curve.backend,
            "clock": curve.kind,
            "dtype": curve.work.dtype,
            "call, µs": significant(1e6 * limits.call_s, 2) if limits else None,
            "each further launch, µs": significant(1e6 * limits.launch_s, 2) if limits else None,
            "FLOP/s": quantity(limits.flop_rate, "FLOP/s") if limits else None,
        }
        if entry not in rows:
            rows.append(entry)
    rates = markdown_table(
        [
            {"working set": quantity(size, "B"), "GB/s": significant(rate / 1e9)}
            for size, rate in study.bandwidths
        ]
    )
    cache = study.place.get("cache_bytes")
    where = (
        f"The last cache holds {quantity(cache, 'B')}: a working set below that stays in it from one forward "
        "to the next. A size gets the best rate seen at it or at any larger one, since a small copy is paced "
        "by its launch and a cache is no slower than what lies behind it; so rates of small sets are lower "
        "bounds of the cache's, not measurements of it."
        if cache
        else "The size of the last cache is not known here."
    )
    return (
        "A forward takes at least the call, and then per layer the longest of three times: its launches, "
        "its bytes (weights once, activations B times) at the bandwidth measured for a working set of the "
        "case's size, and its FLOPs at the rate of a large matrix product. The ridge batch of a linear "
        "layer is B* = bytes per parameter × FLOP/s ÷ (2 × bandwidth); with activations B* ÷ (1 − 2 "
        "B*/width), and at least so much that the arithmetic outlasts a launch. Call and launch come from "
        "MLPs of width 16 and depth 2, 8 and 32, measured between the other cases; the rest from the "
        "ceilings at the end.\n\n"
        + markdown_table(rows, left=["clock", "dtype"])
        + f"\n\n{beyond(study)}{where}\n\n{rates}"
    )


def beyond(study: Study) -> str:
    """What MLPs reached beyond the ceilings, as sentences and a space; empty for nothing."""
    said = [
        f"{quantity(limit.value, 'FLOP/s' if limit.what == 'FLOP rate' else 'B/s')} by {limit.work.name} "
        f"({limit.work.dtype}) at batch {limit.batch}"
        for limit in study.reached
    ]
    if not said:
        return ""
    return (
        f"Cases of this run went beyond the ceilings that were measured before it: {words(said)}. A limit "
        "that is exceeded is none, so the model takes these. "
    )


def width_sweep(study: Study) -> str:
    """Ridge batches by the formulas, knees of the model and of the measurement, and what is missing."""
    formulas, terms = [], []
    cache = study.place.get("cache_bytes")
    for curve in study.best("mlp"):
        if not curve.predictions:
            continue
        width, limits = curve.work.sizes["width"], curve.known_limits
        ridge = study.ridge(curve)
        activated = ridge_batch_with_activations(ridge, width, width)
        launched = ridge_batch_with_launch(activated, width, width, limits.flop_rate, limits.launch_s)
        first = curve.predictions[0]
        factors = missing(curve)
        label = {"width": width, "dtype": curve.work.dtype}
        formulas.append(
            label
            | {
                "weights": quantity(sum(layer.weight_bytes for layer in curve.work.layers(1)), "B"),
                "in cache": None if not cache else "yes" if first.working_set < cache else "no",
                "GB/s": significant(first.bandwidth / 1e9),
                "B*": batch_text(ridge),
                "with activations": batch_text(activated),
                "and launch": batch_text(launched),
                "knee of the model": knee_text(curve.predicted_knee),
                f"measured [{INTERVAL} %]": knee_text(curve.knee),
                "measured ÷ model": ratio(curve.agreement),
                f"within {AGREE:g}": within(curve.agreement),
            }
        )
        corrected = corrected_ratio(study, curve)
        terms.append(
            label
            | {
                "flat piece": f"{ratio(factors.flat)}×" if factors else None,
                "of it per layer, µs": significant(flat_per_layer(curve)),
                "a launch, µs": significant(1e6 * limits.launch_s, 2),
                "rising piece": f"{ratio(factors.rise)}×" if factors else None,
                "batch 2 ÷ 1": ratio(curve[2] / curve[1]) if {1, 2} <= set(curve.batches) else None,
                "best FLOP rate": percent(100 * curve.rate_share),
                "knee with the terms": knee_text(study.corrected_knee(curve)),
                "measured ÷ that": ratio(corrected),
                f"within {AGREE:g}": within(corrected),
            }
        )
    if not formulas:
        return "Not measured in this run, or the machine's limits were not."
    note = (
        "The knee of the model is read off the predicted curve by the same fit, at the same batches, as the "
        "measured one."
    )
    paid = "; ".join(
        f"in {dtype} {' and '.join(terms_of(study, dtype))}"
        for dtype in sorted({*study.rows_paid, *study.shortest})
    )
    second = (
        "What the model lacks. Flat and rising piece are measured over predicted latency of the two pieces "
        "of the fit; measured over predicted knee is the first divided by the second. The best FLOP rate is "
        "that of the fastest batch, relative to a large product; where it is low, a narrow product does not "
        "fill the device, and the rising piece lasts longer too. The terms: every product of two rows or "
        "more lasts at least as long as one of so many rows at the full rate, because the routine works in "
        "tiles of rows or reorders the weights first (median over the batches from 2 to B* of the widest MLP "
        "that reaches the full rate), and at least as long as the smallest takes (median over the batches "
        "from 2 up of the narrowest MLP bound by launches)"
        + (f": {paid}" if paid else "")
        + ". At the other widths they are a prediction. A single row is spared them: a matrix and a vector "
        "are multiplied by another routine."
    )
    parts = [markdown_table(formulas, left=["dtype", "in cache"]), note, second]
    return "\n\n".join([*parts, markdown_table(terms, left=["dtype"]), farthest(study)])


def flat_per_layer(curve: Curve) -> float | None:
    """Microseconds of the flat piece per linear layer, the call taken off; None without a knee."""
    if curve.knee is None or curve.knee.state == "before":
        return None
    return 1e6 * (curve.knee.flat - curve.known_limits.call_s) / curve.work.sizes["depth"]


def farthest(study: Study) -> str:
    """The MLP cell that lies farthest above the model."""
    cells = [
        (float(seconds / prediction.total_s), curve, batch)
        for curve in study.best("mlp")
        for batch, seconds, prediction in zip(curve.batches, curve.seconds, curve.predictions, strict=False)
    ]
    if not cells:
        return ""
    excess, curve, batch = max(cells, key=lambda cell: cell[0])
    return (
        f"Farthest above the model lies {curve.work.name} ({curve.work.dtype}) at batch {batch}: "
        f"{ratio(excess)} times its time."
    )


def resnet(study: Study) -> str:
    """Flat, then linear? Free for batches 1 to 3?"""
    curves = study.of("resnet", kind="latency")
    if not curves:
        return "Not measured in this run."
    sentences = []
    for curve in curves:
        shape = (
            f"`{curve.backend}` on {place_name(study)}: {ms(curve.seconds[0])} ms at batch 1, "
            f"{ms(curve.seconds[-1])} ms at batch {curve.batches[-1]}"
        )
        if len(curve.batches) > 1:
            near = "near-linear" if curve.exponent > 0.85 else "less than linear"
            shape += f"; latency grows as batch^{curve.exponent:.2f}, {near}"
        if curve.knee:
            shape += f"; fitted knee {knee_text(curve.knee)}, of the model {knee_text(curve.predicted_knee)}"
        if curve.at(3):
            growth = curve.at(3) / curve.seconds[0]
            verdict = "holds" if growth <= FREE else "does not hold"
            shape += (
                f'. "Flat for batches 1 to 3" {verdict} here: batch 3 takes {ratio(growth)} times batch 1'
            )
        sentences.append(shape + ".")
    points = markdown_table(
        [
            {"backend": curve.backend, "clock": curve.kind}
            | {f"batch {b}": ms(s) for b, s in zip(curve.batches, curve.seconds, strict=True)}
            for curve in study.of("resnet")
        ],
        left=["clock"],
    )
    model_note = (
        " The model counts every convolution, BatchNorm, ReLU and addition as a pass of its own, as eager "
        "PyTorch runs them."
    )
    return f"{' '.join(sentences)}{model_note}\n\nMilliseconds per forward:\n\n{points}"


def place_name(study: Study) -> str:
    """The device in a sentence."""
    return "the CPU" if not study.on_gpu else f"the {study.place['name']}"


def network(study: Study) -> str:
    """The benchmark's own network, from its own record."""
    found = study.environment["network"]
    if not found["cells"]:
        return f"No record of the benchmark was there when this study ran: {found.get('reason', '')}"
    groups: dict[tuple[str, str], dict[int, float]] = {}
    for cell in found["cells"]:
        groups.setdefault((cell["backend"], cell["dtype"]), {})[cell["batch_size"]] = cell["p50_ms"]
    rows = []
    growths = []
    for (backend, dtype), points in groups.items():
        batches = sorted(points)
        seconds = np.array([points[batch] for batch in batches])
        throughput = np.array(batches) / seconds
        enough = batches[int(np.argmax(throughput >= 0.9 * throughput.max()))]
        knee = fit_trials(batches, [[value] for value in seconds]) if len(batches) >= 4 else None
        growths.append(seconds[-1] / seconds[0])
        rows.append(
            {
                "backend": backend,
                "dtype": dtype,
                **{f"batch {batch}": milliseconds(points[batch]) for batch in batches},
                "throughput gained": f"{ratio(throughput.max() / throughput[0])}×",
                "90 % at batch": enough,
                "knee": knee_text(knee),
            }
        )
    last = max(cell["batch_size"] for cell in found["cells"])
    care = (
        f'"Small networks do not care about batch from 1 to 512": the largest batch ({last}) takes '
        f"{span_of(growths)} times as long as the smallest, so the claim "
        + ("holds here." if max(growths) <= FREE else "does not hold here.")
    )
    return f"P50 in ms, from `{found['source']}`.\n\n{markdown_table(rows, left=['dtype'])}\n\n{care}"


def single_layers(study: Study) -> str:
    """Convolutions against B* ÷ pixels, depthwise, pooling in pixels."""
    curves = study.best("layers")
    if not curves:
        return "Not measured in this run."
    rows = []
    for curve in curves:
        if not curve.predictions:
            continue
        ridge = study.ridge(curve)
        sizes = curve.work.sizes
        by_formula = None
        if curve.work.kind == "convolution" and sizes["groups"] == 1:
            by_formula = ridge_batch_convolution(ridge, sizes["side"], sizes["side"])
        elif curve.work.kind == "linear":
            by_formula = ridge
        first = curve.work.layers(1)[0]
        rows.append(
            {
                "layer": curve.work.name,
                "weights": quantity(first.weight_bytes, "B") if first.weight_bytes else None,
                "FLOP/byte at batch 1": significant(first.flops / first.bytes),
                "bound at batch 1 by": curve.predictions[0].bound,
                "B* ÷ pixels": significant(by_formula),
                "knee of the model": knee_text(curve.predicted_knee),
                f"measured [{INTERVAL} %]": knee_text(curve.knee),
                "grows as batch^": f"{curve.exponent:.2f}" if len(curve.batches) > 1 else None,
                "measured ÷ model at the largest batch": ratio(
                    float(curve.seconds[-1] / curve.predicted_seconds[-1])
                ),
            }
        )
    sentences = [
        "A convolution uses each weight once per output pixel, so its ridge is at B·H·W = B*: at the sizes "
        "of an image network that is below one image, and batching buys only fewer launches and fuller "
        "cores.",
        pooling(study),
    ]
    return markdown_table(rows, left=["bound at batch 1 by"]) + "\n\n" + " ".join(s for s in sentences if s)


def pooling(study: Study) -> str:
    """Whether pooling is linear in pixels where the model has it bound by memory, over side and batch."""
    cells = [
        (batch * curve.work.sizes["side"] ** 2, seconds, model.bound)
        for curve in study.best("layers")
        if curve.work.kind == "pool"
        for batch, seconds, model in zip(curve.batches, curve.seconds, curve.predictions, strict=False)
    ]
    slopes = {}
    for bound in ("launch", "memory"):
        points = [(pixels, seconds) for pixels, seconds, by in cells if by == bound]
        if len({pixels for pixels, _ in points}) >= 4:
            pixels, seconds = np.log(np.array(points)).T
            slopes[bound] = float(np.polyfit(pixels, seconds, 1)[0])
    if "memory" not in slopes:
        return ""
    linear = "is linear in pixels" if 0.85 <= slopes["memory"] <= 1.15 else "is not linear in pixels"
    below = f", as pixels^{slopes['launch']:.2f} where launches do" if "launch" in slopes else ""
    return (
        f"Pooling {linear} once there are enough of them: its time grows as pixels^{slopes['memory']:.2f} "
        f"where by the model memory bounds it{below}."
    )


def decoder(study: Study) -> str:
    """Attention's share and the cache's bytes, by context and batch."""
    shares = attention_shares(study)
    if not shares:
        return "Not measured in this run."
    rows = []
    for entry in shares:
        work = entry["curve"].work
        size = cache_bytes(entry["batch"], entry["context"], work.sizes["width"], BYTES[work.dtype])
        rows.append(
            {
                "context": f"{entry['context']:,}",
                "batch": entry["batch"],
                "block, ms": ms(entry["curve"].at(entry["batch"])),
                "cache per layer": quantity(size, "B"),
                "attention's share": percent(100 * entry["share"]),
                "by the model": percent(100 * entry["model"]) if entry["model"] is not None else None,
                "ms per token": ms(entry["curve"].at(entry["batch"]) / entry["batch"]),
            }
        )
    gains = [
        f"{ratio(curve.gain)}× without attention"
        if not context
        else f"{ratio(curve.gain)}× at context {context:,}"
        for context, curve in sorted((c.work.sizes["context"], c) for c in study.best("decoder"))
    ]
    return (
        "One decoder block, width 1,024, fp32, one new token per sequence. Attention's share is the time "
        "that the block takes beyond the same block without it. The projections' weights serve the whole "
        "batch; a cache serves its own sequence only, so attention gains nothing from a batch. Batching "
        f"bought {words(gains)}.\n\n{markdown_table(rows)}"
    )


def attention_answer(study: Study) -> str:
    """Whether attention's share stays small."""
    shares = attention_shares(study)
    if not shares:
        return ""
    least, most = min(shares, key=lambda e: e["share"]), max(shares, key=lambda e: e["share"])
    verdict = "stays small" if most["share"] < SMALL_SHARE else "does not stay small"
    return (
        f"With a KV cache attention's share {verdict}: {percent(100 * max(least['share'], 0))} of a decoder "
        f"block at context {least['context']:,}, batch {least['batch']}; {percent(100 * most['share'])} at "
        f"context {most['context']:,}, batch {most['batch']}."
    )


def experts(study: Study) -> str:
    """Tokens per expert, knees, and what skew costs."""
    curves = {curve.work.sizes["routing"]: curve for curve in study.best("experts")}
    if "balanced" not in curves:
        return "Not measured in this run."
    balanced = curves["balanced"]
    rows = []
    for batch in balanced.batches:
        row: dict[str, Any] = {
            "tokens": batch,
            "per expert, B·k/E": significant(tokens_per_expert(batch, CHOSEN, EXPERTS)),
        }
        for routing in ROUTINGS:
            if routing not in curves:
                continue
            loads = [len(tokens) for tokens in routes(routing, batch, EXPERTS, CHOSEN)]
            row[f"{routing}, ms"] = ms(curves[routing].at(batch))
            row[f"{routing}: experts used, largest load"] = f"{sum(map(bool, loads))}, {max(loads)}"
        rows.append(row)
    ridge = study.ridge(balanced, balanced.batches[-1])
    sentences = [
        f"{EXPERTS} experts of two layers, 1,024 → 2,048 → 1,024, each token to {CHOSEN} of them; the "
        "experts run one after another, and the routing is made before the clock runs. Skewed tokens "
        f"choose by Zipf weights of exponent {SKEW:g}.",
        f"The knee should move from B* = {batch_text(ridge)} to the B at which an expert sees so many "
        f"tokens, B*·E/k = {batch_text(ridge_batch_experts(ridge, CHOSEN, EXPERTS))}.",
        *(
            f"{routing.capitalize()}: fitted knee {knee_text(curve.knee)}, of the model "
            f"{knee_text(curve.predicted_knee)}."
            for routing, curve in curves.items()
        ),
        f"Below {EXPERTS // CHOSEN} tokens a larger balanced batch reads more weights, not the same ones: "
        "latency rises there for another reason than arithmetic.",
        skew_sentence(study),
    ]
    return " ".join(s for s in sentences if s) + "\n\n" + markdown_table(rows)


def skew_sentence(study: Study) -> str:
    """What skew costs here, and what it would cost where every expert has a device of its own."""
    ratios = skew_ratios(study)
    if not ratios:
        return ""
    least, last = min(ratios, key=lambda batch: ratios[batch]), max(ratios)
    largest = max(len(tokens) for tokens in routes("skewed", last, EXPERTS, CHOSEN))
    odd = (
        f" The least is at {least} tokens, one of the batches at which balanced routing itself is dear."
        if least
        in [entry[0] for c in study.best("experts") if "balanced" in c.work.name for entry in c.dearer]
        else ""
    )
    return (
        f"From {min(ratios)} tokens on skewed routing takes {span_of(list(ratios.values()))} times as long "
        f"as balanced (median {ratio(float(np.median(list(ratios.values()))))}).{odd} On one device the "
        "work is the same; with a device per expert the fullest would decide, "
        f"{ratio(largest / tokens_per_expert(last, CHOSEN, EXPERTS))} times the mean load at {last:,} tokens "
        "(computed, not run)."
    )


def experts_answer(study: Study) -> str:
    """Where the knee of the experts lies."""
    curves = {curve.work.sizes["routing"]: curve for curve in study.best("experts")}
    if "balanced" not in curves:
        return ""
    said = [
        f"{routing} {knee_text(curve.knee)} (model {knee_text(curve.predicted_knee)})"
        for routing, curve in curves.items()
    ]
    return (
        f"Mixture of experts ({EXPERTS} experts, {CHOSEN} per token), fitted knee in tokens: "
        f"{', '.join(said)}."
    )


def device_answer(study: Study) -> str:
    """From which width on a GPU is worth it at batch 1."""
    rows = device_rows(study)
    if not rows:
        return ""
    said = []
    for backend in ("torch", "torch-graph"):
        if not any(row[backend] for row in rows):
            continue
        first = ahead_from(rows, backend)
        said.append(f"from width {first} with `{backend}`" if first else f"at no width with `{backend}`")
    return f"At batch 1 the GPU beats the CPU beside it {words(said)}."


def devices(study: Study) -> str:
    """The table behind `device_answer`."""
    rows = device_rows(study)
    if not rows:
        if not study.on_gpu:
            return "The cases ran on the CPU; without a GPU beside it there is nothing to compare."
        return "Not measured in this run."
    table = markdown_table(
        [
            {
                "width": row["width"],
                "CPU, ms": ms(row["torch-cpu"]),
                "GPU eager, ms": ms(row["torch"]),
                "GPU graph, ms": ms(row["torch-graph"]),
                "GPU eager, × faster": verdict_cell(row["torch gain"]),
                "GPU graph, × faster": verdict_cell(row["torch-graph gain"]),
            }
            for row in rows
        ],
        left=("GPU eager, × faster", "GPU graph, × faster"),
    )
    threads = study.environment.get("threads")
    note = f"Wall time of an MLP of depth {MLP_DEPTH} at batch 1, the CPU with {threads} threads."
    return f"{note} {device_answer(study)}\n\n{table}"


def graph_gains(study: Study) -> list[dict[str, Any]]:
    """Eager over graph, wall time, at the smallest and the largest batch of every case."""
    rows = []
    for curve in study.curves:
        if curve.backend != "torch-graph" or curve.kind != "latency" or curve.work.family == "floor":
            continue
        eager = next(
            c for c in study.curves if c.work is curve.work and c.backend == "torch" and c.kind == "latency"
        )
        first, last = curve.batches[0], curve.batches[-1]
        if {first, last} <= set(eager.batches):
            rows.append(
                {
                    "case": curve.work.name,
                    "dtype": curve.work.dtype,
                    "first": eager[first] / curve[first],
                    "last": eager[last] / curve[last],
                    "last_batch": last,
                    "free": (eager.free, curve.free),
                }
            )
    return rows


def graph_answer(study: Study) -> str:
    """What graphs gain."""
    rows = graph_gains(study)
    if not rows:
        return ""
    first, last = [row["first"] for row in rows], [row["last"] for row in rows]
    return (
        f"A CUDA graph makes batch 1 {span_of(first)} times faster (median "
        f"{ratio(float(np.median(first)))}), the largest batch {span_of(last)} times (median "
        f"{ratio(float(np.median(last)))})."
    )


def graphs(study: Study) -> str:
    """The table behind `graph_answer`."""
    rows = graph_gains(study)
    if not rows:
        return f"CUDA graphs need an NVIDIA GPU; the cases ran on {place_name(study)}."
    table = markdown_table(
        [
            {
                "case": row["case"],
                "dtype": row["dtype"],
                "eager ÷ graph at batch 1": ratio(row["first"]),
                "at the largest batch": f"{ratio(row['last'])} ({row['last_batch']})",
                "free up to, eager": row["free"][0],
                "free up to, graph": row["free"][1],
            }
            for row in rows
        ],
        left=["dtype"],
    )
    return (
        "Wall times. Without a graph the launches of a small batch hide the rest, and hide also what a "
        f"larger batch costs: batches look free for longer.\n\n{table}"
    )


def published_table() -> str:
    """The published figures and their errors."""
    return "Recomputed by the functions that make the predictions above.\n\n" + markdown_table(
        [
            {"statement": row.statement, "printed": row.printed, "recomputed": row.recomputed, "": row.remark}
            for row in published()
        ],
        left=["printed", "recomputed", ""],
    )


def method(record: Record, study: Study) -> str:
    """How it was measured, what was left out and what failed."""
    trimmed = [
        f"{work.name} ({work.dtype})" + (f" from batch {work.trimmed[0]} on" if work.batches else "")
        for work in study.works
        if work.trimmed
    ]
    few = [cell for cell in record.cells if cell["state"] == "few"]
    drifting = [cell for cell in record.cells if cell["state"] == "drifting"]
    errors = [check["relative_error"] for check in record.checks if check["relative_error"] is not None]
    sentences = [
        "Cases, batches and backends are measured in rounds spread over the whole run, in random order, so "
        "that heat and neighbours meet all of them alike; medians are compared.",
        "The knee is the batch where a flat piece and a piece proportional to the batch meet on log-log "
        f"axes; its {INTERVAL} % interval draws trials and residuals anew.",
        "The outputs of the first items of every batch were compared with float64 on the CPU, before and "
        f"after timing: {count(len(record.checks), 'check')}, {sum(not c['passed'] for c in record.checks)} "
        "failed" + (f", largest relative error {max(errors):.1e}." if errors else "."),
        f"Left out because they are too large for this machine: {'; '.join(trimmed)}." if trimmed else "",
        f"{count(len(few), 'cell')} of {len(record.cells)} had fewer than 20 trials, "
        f"{count(len(drifting), 'cell')} drifted by more than 5 %.",
        *failed(record),
        *unavailable(record),
        *limited(record),
        *record.environment.get("warnings", []),
    ]
    return " ".join(sentence for sentence in sentences if sentence)
