"""The report's plots, each laid out from one group of a record."""

from collections.abc import Callable
from typing import Any

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from harness import ceilings, costs, ladder, plots, published
from harness.analysis import PEERS, PLAIN, Group, groups
from harness.statistics import P99_FROM

MOST_PANELS = 8
PUBLISHED_SIGN = Line2D(
    [], [], marker="D", color="white", mec=plots.PUBLISHED, mew=1.1, linestyle="none", label=published.LABEL
)
PUBLISHED_LINE = Line2D(
    [], [], marker="o", mfc="white", color="#555555", linestyle="--", linewidth=1, label=published.LABEL
)


def timeline(group: Group) -> Figure:
    """Every trial over the time of the run, a panel per batch size."""
    sizes = group.batch_sizes[:MOST_PANELS]
    legend = [
        *plots.legend_patches(group.backends),
        Line2D([], [], color="#555555", label="rolling mean of 21"),
    ]
    figure, panels = plots.panels_figure(
        [f"batch {n}" for n in sizes], columns=2, height=2.1, legend=legend, legend_columns=5
    )
    rows = group.rows[group.rows["kind"] == "latency"]
    for axes, size in zip(panels, sizes, strict=True):
        here = rows[rows["batch_size"] == size]
        trials = {
            name: (part["start_s"].to_numpy(), part["latency_ms"].to_numpy())
            for name in group.backends
            if len(part := here[here["backend"] == name])
        }
        plots.draw_timeline(axes, trials)
    figure.supxlabel("seconds since the run began", fontsize=9)
    figure.supylabel("latency, ms per forward", fontsize=9)
    return figure


def cdf(group: Group) -> Figure:
    """Cumulative distributions, a panel per batch size."""
    sizes = group.batch_sizes[:MOST_PANELS]
    signs = [
        Line2D([], [], marker=sign, color="#555555", linestyle="none", label=label)
        for sign, label in (("o", "P50"), ("s", "P95"), ("D", f"P99 (from {P99_FROM} trials)"))
    ]
    figure, panels = plots.panels_figure(
        [f"batch {n}" for n in sizes],
        height=2.2,
        legend=[*plots.legend_patches(group.backends), *signs],
        legend_columns=5,
    )
    for axes, size in zip(panels, sizes, strict=True):
        latency, marks = {}, {}
        for name in group.backends:
            trials, summary = group.sample(name, size), group.summary(name, size)
            if trials is not None and summary is not None:
                latency[name] = trials.latency_ms
                marks[name] = (summary.p50, summary.p95, summary.p99)
        plots.draw_cdf(axes, latency, marks)
    figure.supxlabel("latency relative to the backend's median", fontsize=9)
    figure.supylabel("share of trials, %", fontsize=9)
    return figure


def violins(group: Group) -> Figure:
    """Shapes of the distributions around their medians, a panel per batch size."""
    sizes = group.batch_sizes[:MOST_PANELS]
    figure, panels = plots.panels_figure(
        [f"batch {n}" for n in sizes], columns=2, height=0.75 + 0.24 * len(group.backends)
    )
    for axes, size in zip(panels, sizes, strict=True):
        trials = {name: group.sample(name, size) for name in group.backends}
        plots.draw_violins(axes, {name: t.latency_ms for name, t in trials.items() if t is not None})
    figure.supxlabel(
        "latency relative to the backend's median (from the 1st to the 97th percentile)", fontsize=9
    )
    return figure


def bars(group: Group) -> Figure:
    """P50 with whiskers to P95, a panel per batch size, published figures beside."""
    sizes = group.batch_sizes[:MOST_PANELS]
    shown = [name for name in group.backends if name in published.P50_MS] if group.is_published else []
    legend = [Line2D([], [], color="black", marker="|", linewidth=1, label="P95")]
    figure, panels = plots.panels_figure(
        [f"batch {n}" for n in sizes],
        columns=2,
        height=0.75 + 0.22 * len(group.backends),
        legend=[*legend, PUBLISHED_SIGN] if shown else legend,
    )
    for axes, size in zip(panels, sizes, strict=True):
        found = {name: group.summary(name, size) for name in group.backends}
        summaries = {name: summary for name, summary in found.items() if summary is not None}
        plots.draw_bars(
            axes,
            {name: summary.p50 for name, summary in summaries.items()},
            {name: summary.p95 for name, summary in summaries.items()},
            {name: published.P50_MS[name][size] for name in shown if size in published.BATCH_SIZES},
        )
    figure.supxlabel("P50 latency, ms per forward", fontsize=9)
    return figure


def speedups(group: Group) -> Figure | None:
    """Speedup over the peer and over the best that needs no kernel of one's own; None for one backend."""
    if len(group.backends) < 2:
        return None
    baselines = [name for name in (group.first_of(PEERS), *article_and_honest(group)) if name]
    baselines = list(dict.fromkeys(baselines))[:2] or group.backends[:1]
    legend: list[Artist] = [*plots.legend_lines(group.backends)]
    if group.is_network:
        legend.append(PUBLISHED_LINE)
    legend.append(Patch(color="#999999", alpha=0.35, label="±2 %: equivalent"))
    figure, panels = plots.panels_figure(
        [f"× faster than {name}" for name in baselines],
        columns=2,
        height=3.3,
        legend=legend,
        legend_columns=5,
    )
    for axes, baseline in zip(panels, baselines, strict=True):
        ratios, known = {}, {}
        for name in group.backends:
            found = {size: group.speedup(name, baseline, size) for size in group.batch_sizes}
            points = {size: (c.ratio, c.low, c.high) for size, c in found.items() if c is not None}
            if name != baseline and points:
                ratios[name] = points
            if name != baseline and group.is_published:
                values = published.speedups(name, baseline)
                if values and name in ratios:
                    known[name] = values
        plots.draw_ratios(axes, ratios, known)
    panels[0].set_ylabel("ratio of medians, with 95 % interval")
    return figure


def scaling(group: Group) -> Figure | None:
    """Throughput and scaling efficiency over batch size; None where no backend ran at two sizes."""
    efficiencies = _curves(group, group.scaling_percent)
    if not any(efficiencies.values()):
        return None
    legend = plots.legend_lines(group.backends)
    if group.is_network:
        legend.append(PUBLISHED_LINE)
    figure, (left, right) = plots.panels_figure(
        ["throughput", "P50 at the smallest batch ÷ P50"],
        columns=2,
        height=3.2,
        legend=legend,
        legend_columns=5,
    )
    sizes = group.batch_sizes
    plots.draw_lines(left, _curves(group, group.throughput))
    plots.draw_lines(right, efficiencies)
    if group.is_published:
        names = [name for name in published.P50_MS if name in group.backends]
        known = {name: {n: ms for n, ms in published.P50_MS[name].items() if n in sizes} for name in names}
        first = published.BATCH_SIZES[0]
        plots.draw_lines(
            left, {name: {n: 1e3 * n / ms for n, ms in curve.items()} for name, curve in known.items()}, True
        )
        if first in sizes:
            efficiency = {
                name: {n: 100 * curve[first] / ms for n, ms in curve.items()} for name, curve in known.items()
            }
            plots.draw_lines(right, efficiency, True)
    for axes in (left, right):
        plots.batch_axis(axes, sizes)
        axes.margins(y=0.08)
        axes.set_yscale("log")
        axes.autoscale_view()
        plots.plain_log_axis(axes, "y")
    left.set_ylabel("images per second at P50")
    right.set_ylabel("scaling efficiency, %")
    return figure


def roofline(group: Group) -> Figure | None:
    """Measured ceilings and each backend's points; None without ceilings or costs."""
    limits = group.record.environment.get("ceilings") or []
    devices = {ceilings.device_of(c["target"]) for c in group.cells.values() if c["target"]}
    device = next((d for d in ("metal", "cuda", "cpu") if d in devices), None)
    rate = ceilings.rate(limits, group.dtype, device) if device else None
    rate = rate or (ceilings.rate(limits, "float32", device) if device else None)
    copies = {
        e["bytes"]: max(e["value"], 0)
        for e in sorted(limits, key=lambda e: e.get("value", 0))
        if e["name"] == "copy" and "value" in e and ceilings.device_of(e["target"]) == device
    }
    if not rate or not copies:
        return None
    points = {}
    for name in group.backends:
        found = [(group.cost(name, n), group.p50(name, n)) for n in group.batch_sizes]
        line = [(c["intensity"], c["flops"] / ms / 1e6) for c, ms in found if ms and c.get("intensity")]
        if line:
            points[name] = line
    if not points:
        return None
    large, best = max(copies), max(copies, key=lambda nbytes: copies[nbytes])
    roofs = [large, best] if copies[best] > 1.2 * copies[large] else [large]
    sheet = group.record.environment.get("datasheet")
    legend = plots.legend_lines(points)
    for nbytes, look in zip(roofs, plots.ROOF_LINES, strict=False):
        label = f"measured: {copies[nbytes]:,.0f} GB/s at {_binary(nbytes)}, {rate:,.0f} GFLOP/s"
        legend.append(Line2D([], [], color="black", label=label, **look))
    if sheet:
        label = f"datasheet: {sheet['gb_s']:,.0f} GB/s, {1e3 * sheet['fp32_tflop_s']:,.0f} GFLOP/s"
        legend.append(Line2D([], [], label=label, **plots.DATASHEET_LINE))
    figure, (axes,) = plots.panels_figure(
        [f"roofline, {device}, {group.dtype}"], columns=1, height=4.2, legend=legend, legend_columns=4
    )
    plots.draw_roofline(
        axes,
        rate,
        [copies[nbytes] for nbytes in roofs],
        points,
        datasheet=(1e3 * sheet["fp32_tflop_s"], sheet["gb_s"]) if sheet else None,
    )
    return figure


def waterfall(group: Group) -> Figure | None:
    """The ladder, a panel per batch size; None with fewer than two rungs."""
    sizes = [size for size in group.batch_sizes if ladder.steps(group, size)][:MOST_PANELS]
    if not sizes:
        return None
    legend = [
        Patch(facecolor=plots.SAVES, label="saves"),
        Patch(facecolor=plots.COSTS, hatch="////", edgecolor="white", label="costs"),
        Patch(facecolor=plots.OPEN, label="equivalent or undecided"),
        Line2D([], [], color="black", linewidth=1.2, label="95 % interval of the step"),
    ]
    figure, panels = plots.panels_figure(
        [f"batch {n}" for n in sizes],
        columns=2,
        height=0.75 + 0.24 * len(ladder.rungs(group)),
        legend=legend,
    )
    for axes, size in zip(panels, sizes, strict=True):
        steps = ladder.steps(group, size)
        start = steps[0].base
        bars_: list[dict[str, Any]] = [
            {"name": start, "from_ms": None, "to_ms": group.p50(start, size), "low_ms": None, "high_ms": None}
        ]
        for step in steps:
            low, high = step.after_interval_ms or (None, None)
            bars_.append(
                {"name": step.rung, "from_ms": step.before_ms, "to_ms": step.after_ms}
                | {"low_ms": low, "high_ms": high, "verdict": step.comparison.verdict}
            )
        plots.draw_waterfall(axes, bars_)
    figure.supxlabel("P50 latency, ms per forward; wide bar: what the step changed", fontsize=9)
    return figure


def layer_shares(parts: dict[str, Group]) -> Figure | None:
    """Share of time by kind of layer, per backend, beside the share of multiply-accumulates.

    parts: kind of layer -> its group; None where there is none.
    """
    if not parts:
        return None
    first = next(iter(parts.values()))
    bars_ = {"multiply-accumulates": {kind: 100 * share for kind, share in costs.mac_shares().items()}}
    for backend in first.backends:
        for size in first.batch_sizes:
            times = {kind: group.p50(backend, size) for kind, group in parts.items()}
            total = sum(value or 0 for value in times.values())
            if total:
                name = f"{backend}, batch {size}"
                bars_[name] = {kind: 100 * value / total for kind, value in times.items() if value}
    kinds = list(dict.fromkeys(kind for shares in bars_.values() for kind in shares))
    colours = dict(zip(kinds, plots.PARTS, strict=False))
    figure, (axes,) = plots.panels_figure(
        ["share by kind of layer"],
        columns=1,
        height=0.9 + 0.32 * len(bars_),
        legend=[Patch(color=colours[kind], label=kind) for kind in kinds],
        legend_columns=6,
    )
    plots.draw_shares(axes, bars_, colours)
    axes.set_xlabel("%")
    return figure


FIGURES: dict[str, tuple[Callable[[Group], Figure | None], str]] = {
    "p50_bars": (bars, "P50 with whiskers to P95"),
    "speedup": (speedups, "Speedup with 95 % intervals"),
    "scaling": (scaling, "Throughput and scaling efficiency"),
    "ladder": (waterfall, "The ladder: what each step changed"),
    "roofline": (roofline, "Roofline with measured ceilings"),
    "layers": (lambda group: layer_shares(_parts(group)), "Share of time by kind of layer"),
    "timeline": (timeline, "Every trial over the run"),
    "cdf": (cdf, "Distributions with P50, P95, P99"),
    "violins": (violins, "Shapes of the distributions"),
}


def article_and_honest(group: Group) -> list[str]:
    """The baselines for our kernels: the best without one, and the network as written."""
    return [name for name in (group.first_of(PLAIN), "mlx") if name in group.backends]


def _parts(group: Group) -> dict[str, Group]:
    """The groups that time the network's layers by kind, in the record of a group of the same dtype."""
    found = [other for other in groups(group.record) if other.study == "layers"]
    kinds = {other.case: other for other in found if other.dtype == group.dtype}
    order = [*costs.mac_shares(), *kinds]
    return {kind: kinds[kind] for kind in sorted(kinds, key=order.index)}


def _curves(group: Group, value: Callable[[str, int], float | None]) -> dict[str, dict[int, float]]:
    """Backend -> batch -> value, where there is one."""
    curves = {name: {n: value(name, n) for n in group.batch_sizes} for name in group.backends}
    return {name: {n: v for n, v in curve.items() if v is not None} for name, curve in curves.items()}


def _binary(nbytes: int) -> str:
    """A working set with a binary prefix: 32 KB, 128 MB."""
    for size, prefix in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if nbytes >= size:
            return f"{nbytes / size:g} {prefix}B"
    return f"{nbytes} B"
