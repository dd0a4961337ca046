"""The claims that the articles make about batches, each with its test here, what was observed and a verdict.

A verdict is confirmed, refuted or partly (some of the tests confirm it), or says what is missing. A latency
counts as flat within `analysis.FREE`, a knee as predicted within `analysis.AGREE`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from batch.analysis import AGREE, FREE, Curve, Study
from batch.cases import CHOSEN, EXPERTS, MLP_WIDTHS, routes
from batch.study import device_case
from harness.statistics import Comparison
from harness.tables import markdown_table, percent, ratio, span, words

SMALL_WIDTH = 256  # an MLP up to this width counts as a small network
SMALL_SHARE = 0.2  # attention's share of a decoder block up to which it counts as small

Answer = tuple[str, list[bool]]  # what was observed, and whether each test confirms the claim


def claims_table(study: Study) -> str:
    """All claims with verdicts, as a table."""
    return markdown_table(
        [
            {"claim": claim, "test": test, "observed": observed or "not measured here", "verdict": said}
            for claim, test, answer in CLAIMS
            for observed, held in [answer(study)]
            for said in [f"**{verdict(held)}**"]
        ],
        left=("test", "observed", "verdict"),
    )


def verdict(held: Sequence[bool]) -> str:
    """One verdict on a claim from its tests."""
    if not held:
        return "not tested here"
    return "confirmed" if all(held) else "partly" if any(held) else "refuted"


def label(curve: Curve) -> str:
    """A curve in few words: the way, and the clock of a GPU's."""
    clock = {"latency": ", wall", "device": ", device"}[curve.kind] if curve.target != "cpu" else ""
    return f"{curve.work.name} ({curve.backend}{clock})"


def knees(study: Study) -> Answer:
    """Every knee of the width sweep against the model's."""
    agreements = [curve.agreement for curve in study.best("mlp") if curve.agreement is not None]
    held = [1 / AGREE <= agreement <= AGREE for agreement in agreements]
    if not held:
        return "", []
    return f"{sum(held)} of {len(held)}; measured ÷ model {span(min(agreements), max(agreements))}", held


def flat_to_three(study: Study) -> Answer:
    """ResNet-50 on a GPU by the wall."""
    curves = [curve for curve in study.of("resnet", kind="latency") if study.on_gpu and curve.at(3)]
    growths = [float(max(curve[2], curve[3]) / curve[1]) for curve in curves]
    said = [f"{label(curve)}: {ratio(g)} ×" for curve, g in zip(curves, growths, strict=True)]
    return "; ".join(said) if study.on_gpu else "needs a GPU", [growth <= FREE for growth in growths]


def indifferent(study: Study) -> Answer:
    """MLPs of small width, eager by the wall and the best way; our network where its record was there."""
    said, held = [], []
    # Eager by the wall, as the claim will have been seen, beside the best way and clock (the same on a CPU).
    both = {
        (curve.work.name, curve.backend, curve.kind): curve
        for curve in [*study.of("mlp", "latency", "torch"), *study.best("mlp")]
    }
    for curve in both.values():
        batches = [batch for batch in curve.batches if batch <= 512]
        if curve.work.sizes["width"] > SMALL_WIDTH or 512 not in batches:
            continue
        growths = [float(curve[batch] / curve[1]) for batch in batches]
        held.append(max(growths) <= FREE)
        worst = batches[int(np.argmax(growths))]
        said.append(
            f"{label(curve)}: {ratio(growths[-1])} ×, at most {ratio(max(growths))} × (batch {worst})"
        )
    points: dict[tuple[str, str], dict[int, float]] = {}
    for cell in study.environment["network"]["cells"]:
        points.setdefault((cell["backend"], cell["dtype"]), {})[cell["batch_size"]] = cell["p50_ms"]
    growths = [max(p.values()) / p[min(p)] for p in points.values() if max(p) >= 512 and min(p) == 1]
    if growths:
        held += [growth <= FREE for growth in growths]
        said.append(f"our network, {len(growths)} ways: {span(min(growths), max(growths))} ×")
    return "; ".join(said), held


def device_rows(study: Study) -> list[dict[str, Any]]:
    """Width, CPU and GPU seconds at batch 1, and how many times faster each way on the GPU is."""
    found = []
    for width in MLP_WIDTHS:
        case = device_case(width)
        times: dict[str, Any] = {
            backend: study.median(case, "float32", backend, "latency", 1)
            for backend in ("torch-cpu", "torch", "torch-graph")
        }
        if times["torch-cpu"] and times["torch"]:
            gains = {f"{way} gain": study.speedup(case, way, "torch-cpu") for way in ("torch", "torch-graph")}
            found.append({"width": width, **times, **gains})
    return found


def ahead_from(rows: list[dict[str, Any]], backend: str) -> int | None:
    """The width from which on a way on the GPU is faster, by its intervals; None for no width."""
    gains: list[Comparison | None] = [row[f"{backend} gain"] for row in rows]
    faster = [gain is not None and gain.verdict == "faster" for gain in gains]
    return next((row["width"] for at, row in enumerate(rows) if all(faster[at:])), None)


def worth_a_gpu(study: Study) -> Answer:
    """Confirmed by a way that loses at some width and wins at all wider ones."""
    rows = device_rows(study)
    said, held = [], []
    for backend in ("torch", "torch-graph"):
        if any(row[backend] for row in rows):
            first = ahead_from(rows, backend)
            held.append(first is not None and first > rows[0]["width"])
            said.append(f"`{backend}`: " + (f"from width {first}" if first else "at no width"))
    return words(said) if study.on_gpu else "needs a GPU beside the CPU", held


def attention_shares(study: Study) -> list[dict[str, Any]]:
    """Share of attention in the decoder block, measured and by the model, per context and batch."""
    curves = {curve.work.sizes["context"]: curve for curve in study.best("decoder")}
    if 0 not in curves:
        return []
    found = []
    for context, curve in sorted(curves.items()):
        if not context:
            continue
        for index, batch in enumerate(curve.batches):
            bare = curves[0].at(batch)
            if bare is None:
                continue
            share = 1 - bare / curve.seconds[index]
            by_model = None
            if curve.predictions and curves[0].predictions:
                place = curves[0].batches.index(batch)
                by_model = 1 - curves[0].predictions[place].total_s / curve.predictions[index].total_s
            found.append(
                {"context": context, "batch": batch, "share": share, "model": by_model, "curve": curve}
            )
    return found


def small_attention(study: Study) -> Answer:
    """Per context the largest share over the batches."""
    most: dict[int, float] = {}
    for entry in attention_shares(study):
        most[entry["context"]] = max(most.get(entry["context"], 0.0), entry["share"])
    said = [f"context {context:,}: up to {percent(100 * share)}" for context, share in most.items()]
    return "; ".join(said), [share < SMALL_SHARE for share in most.values()]


def expert_knees(study: Study) -> Answer:
    """Every routing's knee against the model's, which reads each expert's weights once per its tokens."""
    curves = [curve for curve in study.best("experts") if curve.agreement is not None]
    agreements = [float(curve.agreement or 0) for curve in curves]
    said = [
        f"{curve.work.sizes['routing']}: measured ÷ model {ratio(a)}"
        for curve, a in zip(curves, agreements, strict=True)
    ]
    return "; ".join(said), [1 / AGREE <= agreement <= AGREE for agreement in agreements]


def skew_ratios(study: Study) -> dict[int, float]:
    """Skewed ÷ balanced time by tokens, from as many tokens as experts on.

    Below that the two differ in how many experts they use, which is not what skew means.
    """
    curves = {curve.work.sizes["routing"]: curve for curve in study.best("experts")}
    if not {"balanced", "skewed"} <= set(curves):
        return {}
    balanced, skewed = curves["balanced"], curves["skewed"]
    batches = [batch for batch in balanced.batches if batch >= EXPERTS and batch in skewed.batches]
    return {batch: float(skewed[batch] / balanced[batch]) for batch in batches}


def skew_costs(study: Study) -> Answer:
    """On one device, where the experts run one after another."""
    ratios = skew_ratios(study)
    if not ratios:
        return "", []
    middle = float(np.median(list(ratios.values())))
    slower = [value > FREE for value in ratios.values()]
    last = max(ratios)
    most = max(len(tokens) for tokens in routes("skewed", last, EXPERTS, CHOSEN)) * EXPERTS / CHOSEN / last
    return (
        f"median {ratio(middle)} ×, slower by more than {100 * (FREE - 1):.0f} % at {sum(slower)} of "
        f"{len(slower)} sizes; fullest expert {ratio(most)} × the mean (computed)"
    ), slower


CLAIMS: tuple[tuple[str, str, Callable[[Study], Answer]], ...] = (
    (
        "the ridge batch, from bytes, FLOPs and launches, is where latency starts to rise",
        f"fitted knee of the width sweep within a factor {AGREE:g} of the model's",
        knees,
    ),
    (
        "latency is flat for batches 1–3 on a GPU",
        f"ResNet-50, batches 2 and 3 within {100 * (FREE - 1):.0f} % of batch 1",
        flat_to_three,
    ),
    (
        "small networks do not care about batch from 1 to 512",
        f"MLPs up to width {SMALL_WIDTH}: batch 512 over batch 1, no batch between slower by more than "
        f"{100 * (FREE - 1):.0f} %",
        indifferent,
    ),
    (
        "a GPU is worth it at batch 1 only above some width",
        "CPU against GPU in the same rounds, faster by the interval",
        worth_a_gpu,
    ),
    (
        "with a KV cache attention's share stays small",
        f"time beyond the block without attention below {percent(100 * SMALL_SHARE)} at every batch",
        small_attention,
    ),
    (
        "in a mixture of experts the knee moves with tokens per expert, B·k/E",
        f"fitted knee within a factor {AGREE:g} of the model's, which counts them",
        expert_knees,
    ),
    (
        "skewed routing costs",
        f"skewed over balanced, from {EXPERTS} tokens on",
        skew_costs,
    ),
)
