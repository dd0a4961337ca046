"""A trace as a picture: CPU lane above the runtime's and the GPU's, so that gaps and waiting show."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from harness import plots
from mlp import traces

COLOURS = {
    "gemm": "#0072B2",
    "fused": "#D55E00",
    "pointwise": "#009E73",
    "reduction": "#CC79A7",
    "norm": "#E69F00",
    "gemm helper": "#56B4E9",
    "copy": "#999933",
    "memcpy": "#777777",
    "memset": "#777777",
    "other": "#bbbbbb",
    "operator": "#dddddd",
    "launch": "#332288",
    "synchronise": "#AA4499",
}


def draw(axes: Axes, trace: traces.Trace) -> set[str]:
    """Draw the last step of a trace; returns the kinds drawn. The x axis is µs since the step's start."""
    step = trace.steps[-1]
    kernels = {id(span): kind for kind, span in traces.cpu_kernels(trace)}
    on_gpu = bool(trace.lane("gpu"))
    drawn = set()
    for span in trace.spans:
        if span is step or span.end < step.start or span.start < step.start:
            continue
        parts = []  # (row, kind); a top-level operator that computes is in both CPU rows
        if span.lane == "gpu":
            parts.append((0, traces.kernel_kind(span)))
        elif span.lane == "runtime":
            parts.append((1, "synchronise" if "ynchronize" in span.name else "launch"))
        elif id(span) in kernels and not on_gpu:
            parts.append((1, kernels[id(span)]))
        # A backward pass runs in a thread of its own, where no step is around it.
        if span.lane == "cpu" and (span.parent is step or (not span.parent and span.category == "cpu_op")):
            parts.append((2, "operator"))
        for row, kind in parts:
            kind = kind if kind in COLOURS else "other"
            drawn.add(kind)
            # An edge keeps neighbours apart.
            axes.broken_barh(
                [(span.start - step.start, span.duration)],
                (row + 0.12, 0.76),
                facecolor=COLOURS[kind],
                edgecolor="white" if kind != "operator" else "#aaaaaa",
                linewidth=0.3,
            )
    rows = {0: "GPU", 1: "launches", 2: "operators"} if on_gpu else {1: "computing", 2: "operators"}
    axes.set_yticks([row + 0.5 for row in rows], rows.values())
    axes.set_ylim(min(rows), 3)
    axes.grid(False, axis="y")
    return drawn


def save(found: Mapping[str, traces.Trace], path: Path) -> None:
    """One panel per trace, the last profiled step of each."""
    with plots.style():
        figure, panels = plots.panels_figure(list(found), columns=1, height=1.15)
        drawn: set[str] = set()
        for axes, trace in zip(panels, found.values(), strict=True):
            drawn |= draw(axes, trace)
        longest = max(trace.window()[1] - trace.steps[-1].start for trace in found.values())
        for axes in panels:  # one scale, so that lengths compare
            axes.set_xlim(0, longest)
        panels[-1].set_xlabel("µs in the step")
        figure.legend(
            handles=[Patch(color=COLOURS[kind], label=kind) for kind in COLOURS if kind in drawn],
            loc="outside upper center",
            ncols=7,
        )
        plots.save(figure, path)
