"""The study's plots: measured latency over batch, the model's least time under it, and the knees."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.typing import LineStyleType

from batch.analysis import Curve, Study
from batch.cases import MLP_DEPTH, MLP_WIDTHS
from batch.study import device_case
from harness import plots

PARTS: dict[str, tuple[str, LineStyleType]] = {
    "launch": ("#777777", ":"),
    "memory": ("#009E73", "--"),
    "compute": ("#D55E00", "-."),
}
SHADES = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#bdaa00", "#E69F00")


def axis_of_batches(axes: Axes, batches: Sequence[int]) -> None:
    """A batch axis whose labels do not run into each other."""
    plots.batch_axis(axes, batches)
    sizes = sorted(set(batches))
    axes.set_xticks(sizes[:: -(-len(sizes) // 7)])


def draw_curve(axes: Axes, curve: Curve) -> None:
    """Measured medians, the model in its parts, and the fitted knee with its interval."""
    milliseconds = 1e3 * curve.seconds
    if curve.predictions:
        for part, (colour, line) in PARTS.items():
            times = [1e3 * getattr(prediction, f"{part}_s") for prediction in curve.predictions]
            axes.plot(curve.batches, times, line, color=colour, linewidth=1)
        axes.plot(curve.batches, 1e3 * curve.predicted_seconds, color="black", linewidth=1)
    axes.plot(
        curve.batches, milliseconds, marker=plots.marker(curve.backend), color=plots.colour(curve.backend)
    )
    if curve.knee and curve.knee.state == "knee":
        axes.axvspan(curve.knee.low, curve.knee.high, color="#0072B2", alpha=0.12, linewidth=0)
        axes.axvline(curve.knee.batch, color="#0072B2", linewidth=0.8)
    if curve.predicted_knee and curve.predicted_knee.state == "knee":
        axes.axvline(curve.predicted_knee.batch, color="black", linewidth=0.8, linestyle=":")
    # Parts of the model far below everything measured would press the curve against the top.
    highest = max(milliseconds.max(), *(1e3 * curve.predicted_seconds), 0.0)
    axes.set_ylim(milliseconds.min() / 30, 1.5 * highest)
    plots.plain_log_axis(axes, "y")
    axis_of_batches(axes, curve.batches)


def legend(curves: Sequence[Curve]) -> list[Line2D]:
    """What the lines of `draw_curve` are."""
    names = list(dict.fromkeys(curve.backend for curve in curves))
    lines = plots.legend_lines(names)
    lines.append(Line2D([], [], color="black", linewidth=1, label="model"))
    lines += [
        Line2D([], [], color=colour, linestyle=line, linewidth=1, label=f"its {part}")
        for part, (colour, line) in PARTS.items()
    ]
    lines.append(Line2D([], [], color="#0072B2", linewidth=0.8, label="fitted knee, 90 % interval"))
    lines.append(Line2D([], [], color="black", linestyle=":", linewidth=0.8, label="knee of the model"))
    return lines


def panels(curves: Sequence[Curve], columns: int = 3) -> Figure | None:
    """One panel per curve; None for none."""
    curves = [curve for curve in curves if len(curve.batches) > 1]
    if not curves:
        return None
    titles = [title(curve) for curve in curves]
    figure, all_axes = plots.panels_figure(titles, columns, 2.3, legend(curves), legend_columns=4)
    for index, (axes, curve) in enumerate(zip(all_axes, curves, strict=True)):
        draw_curve(axes, curve)
        axes.set_ylabel("ms" if index % columns == 0 else "")
    return figure


def title(curve: Curve) -> str:
    """A panel's title: the case, and dtype and clock where they are not the usual ones."""
    notes = [curve.work.dtype] if curve.work.dtype != "float32" else []
    notes += ["wall time"] if curve.target != "cpu" and curve.kind == "latency" else []
    return ", ".join([curve.work.name, *notes])


def widths(study: Study) -> Figure | None:
    """All widths of the MLP on one pair of log-log axes, measured and modelled."""
    curves = [curve for curve in study.best("mlp") if curve.work.dtype == "float32"]
    if not curves:
        return None
    curves.sort(key=lambda curve: curve.work.sizes["width"])
    figure = plots.new_figure(4.2)
    axes = figure.subplots()
    for curve in curves:
        shade = SHADES[MLP_WIDTHS.index(curve.work.sizes["width"])]
        axes.plot(curve.batches, 1e3 * curve.seconds, "o-", color=shade, label=curve.work.name, markersize=4)
        if curve.predictions:
            axes.plot(curve.batches, 1e3 * curve.predicted_seconds, "--", color=shade, linewidth=1)
        if curve.knee and curve.knee.state == "knee":
            axes.plot(curve.knee.batch, 1e3 * curve.knee.flat, "D", color=shade, mec="black", markersize=7)
    handles, labels = axes.get_legend_handles_labels()
    handles.append(Line2D([], [], color="black", linestyle="--", linewidth=1))
    handles.append(Line2D([], [], color="white", marker="D", mec="black", markersize=7, linestyle=""))
    figure.legend(handles, [*labels, "model", "fitted knee"], loc="outside right upper")
    plots.plain_log_axis(axes, "y")
    axis_of_batches(axes, [batch for curve in curves for batch in curve.batches])
    axes.set_ylabel("ms per forward")
    return figure


def mlps(study: Study) -> Figure | None:
    """Every MLP with the parts of its model."""
    return panels(study.best("mlp"))


def layers(study: Study) -> Figure | None:
    """The single layers."""
    return panels(study.best("layers"))


def large(study: Study) -> Figure | None:
    """ResNet-50, the decoder block and the mixture of experts."""
    return panels([*study.best("resnet"), *study.best("decoder"), *study.best("experts")])


def devices(study: Study) -> Figure | None:
    """Latency at batch 1 over the width, on the CPU and on the GPU."""
    found: dict[str, dict[int, float]] = {}
    for width in MLP_WIDTHS:
        for backend in ("torch-cpu", "torch", "torch-graph"):
            seconds = study.median(device_case(width), "float32", backend, "latency", 1)
            if seconds is not None:
                found.setdefault(backend, {})[width] = 1e3 * seconds
    if not found:
        return None
    figure = plots.new_figure(3.0)
    axes = figure.subplots()
    for backend, points in found.items():
        axes.plot(
            list(points), list(points.values()), marker=plots.marker(backend), color=plots.colour(backend)
        )
    figure.legend(handles=plots.legend_lines(found), loc="outside right upper")
    plots.plain_log_axis(axes, "y")
    plots.batch_axis(axes, [width for points in found.values() for width in points])
    axes.set_xlabel(f"width of an MLP of depth {MLP_DEPTH}, batch 1")
    axes.set_ylabel("ms per forward")
    return figure


def throughput(study: Study) -> Figure | None:
    """Throughput over batch as a share of its maximum, one line per family's first cases."""
    curves = [
        curve for family in ("mlp", "resnet", "layers", "decoder", "experts") for curve in study.best(family)
    ]
    curves = [curve for curve in curves if len(curve.batches) > 2 and curve.work.dtype == "float32"]
    if not curves:
        return None
    figure = plots.new_figure(3.8)
    axes = figure.subplots()
    colours = dict(zip(("mlp", "resnet", "layers", "decoder", "experts"), plots.OTHERS, strict=False))
    for curve in curves:
        share = np.array(curve.batches) / curve.seconds
        axes.plot(
            curve.batches, 100 * share / share.max(), color=colours[curve.work.family], linewidth=1, alpha=0.8
        )
    axes.axhline(90, color="black", linewidth=0.8, linestyle=":")
    present = dict.fromkeys(curve.work.family for curve in curves)
    figure.legend(
        handles=[Line2D([], [], color=colours[family], label=family) for family in present],
        loc="outside right upper",
    )
    axis_of_batches(axes, [batch for curve in curves for batch in curve.batches])
    axes.set_ylabel("throughput, % of its maximum")
    axes.set_ylim(0, 105)
    return figure


FIGURES: dict[str, Callable[[Study], Figure | None]] = {
    "widths": widths,
    "mlp": mlps,
    "layers": layers,
    "large": large,
    "devices": devices,
    "throughput": throughput,
}
