"""Plots: one look, one colour per backend everywhere, PNGs that come out the same byte for byte.

    from harness import plots

    figure = plots.panels_figure(["batch 1", "batch 16"], height=2.4)   # also: plots.new_figure
    plots.draw_cdf(axes, {"torch": samples, "mlx": samples})
    plots.save(figure, plots_dir / "cdf.png")

The functions `draw_…` fill one axes from plain data and know no record. Figures are 8.3 inches wide, which a
README shows at about 830 pixels. No pyplot, so no global state; nothing about the date or the versions goes
into a file.
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.typing import LineStyleType

from harness.paths import write_atomic
from harness.tables import milliseconds

WIDTH = 8.3  # inches
DPI = 150

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # shipped with matplotlib: the same glyphs on every machine
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.labelsize": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "figure.dpi": DPI,
    "savefig.dpi": DPI,
}

# Colour and marker of every backend. PyTorch is blue, MLX green to yellow, our kernels brown to purple.
# Within these families the colours were searched for the largest least difference (CIELAB) as seen with all
# cones, without red and without green ones. The marker is the second sign.
BACKENDS = {
    "torch": ("#0077FF", "o"),
    "torch-channels-last": ("#70ACFF", "s"),
    "torch-compile": ("#180CD2", "^"),
    "torch-compile-overhead": ("#0F038B", "<"),
    "torch-graph": ("#3F94A8", "v"),
    "torch-graph-channels-last": ("#030631", ">"),
    "onnxruntime": ("#080808", "P"),
    "mlx": ("#A7C772", "o"),
    "mlx-compile": ("#C3BD07", "^"),
    "mlx-folded": ("#54D2B2", "s"),
    "mlx-fused": ("#9E6C02", "D"),
    "mlx-fused-compile": ("#734550", "v"),
    "mlx-block": ("#731E04", "X"),
    "mlx-block-32kb": ("#9D7156", "p"),
    "mlx-network": ("#6E187D", "*"),
}
OTHERS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#332288", "#999933", "#444444")
OTHER_MARKERS = "os^DvP*Xh"

LOG_FROM = 30.0  # bars whose lengths differ by more than this factor get a logarithmic axis

SAVES, COSTS, OPEN = "#0072B2", "#D55E00", "#bbbbbb"  # a step that pays, one that does not, one undecided
PUBLISHED = "#000000"
PARTS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#BBBBBB", "#D55E00", "#F0E442")
ROOF_LINES: tuple[dict[str, Any], ...] = (
    {"linewidth": 1.8, "linestyle": "-"},
    {"linewidth": 1.1, "linestyle": "-."},
)
DATASHEET_LINE: dict[str, Any] = {"color": "#777777", "linewidth": 0.9, "linestyle": ":"}


def colour(name: str) -> str:
    """The colour of a backend. A name that is not in BACKENDS always gets the same one of OTHERS."""
    return BACKENDS[_base(name)][0] if _base(name) in BACKENDS else OTHERS[_hash(name) % len(OTHERS)]


def marker(name: str) -> str:
    """The marker of a backend."""
    known = BACKENDS.get(_base(name))
    return known[1] if known else OTHER_MARKERS[_hash(name) // len(OTHERS) % len(OTHER_MARKERS)]


def register(names: Iterable[str]) -> None:
    """Give a study's own backends colours that differ among them, in this order; known names keep theirs."""
    new = [name for name in names if name not in BACKENDS]
    for i, name in enumerate(new):
        BACKENDS[name] = (OTHERS[i % len(OTHERS)], OTHER_MARKERS[i % len(OTHER_MARKERS)])


def _base(name: str) -> str:
    """The backend that "torch-again" is once more: both are drawn alike."""
    return name.removesuffix("-again")


def _hash(name: str) -> int:
    """A number that is the same in every process, unlike hash()."""
    return sum((i + 1) * byte for i, byte in enumerate(name.encode()))


def new_figure(height: float = 3.6, **options: Any) -> Figure:
    """An empty figure, WIDTH × `height` inches; draw inside `with plots.style():`."""
    return Figure(figsize=(WIDTH, height), layout="constrained", **options)


def style() -> Any:
    """A context in which figures have this module's look."""
    return mpl.rc_context(STYLE)


def panels_figure(
    titles: Sequence[str],
    columns: int = 3,
    height: float = 2.3,
    legend: Sequence[Any] = (),
    legend_columns: int = 4,
    **options: Any,
) -> tuple[Figure, list[Axes]]:
    """A figure of small panels, one per title, `height` inches per row, with one legend above them.

    Panels that are left over in the last row are not drawn. `options` go to Figure.subplots.
    """
    columns = min(columns, len(titles))
    rows = -(-len(titles) // columns)
    legend_height = 0.25 + 0.21 * -(-len(legend) // legend_columns) if legend else 0
    figure = new_figure(rows * height + legend_height)
    grid = figure.subplots(rows, columns, squeeze=False, **options).ravel()
    for axes, title in zip(grid, titles, strict=False):
        axes.set_title(title, loc="left")
    for axes in grid[len(titles) :]:
        axes.remove()
    if legend:
        figure.legend(handles=list(legend), loc="outside upper center", ncols=legend_columns)
    return figure, list(grid[: len(titles)])


def legend_lines(names: Iterable[str], line: LineStyleType = "-") -> list[Line2D]:
    """Legend entries of backends: line and marker."""
    return [Line2D([], [], color=colour(n), marker=marker(n), linestyle=line, label=n) for n in names]


def legend_patches(names: Iterable[str]) -> list[Patch]:
    """Legend entries of backends: filled boxes."""
    return [Patch(color=colour(name), label=name) for name in names]


def figure_bytes(figure: Figure) -> bytes:
    """The figure as PNG, without date and version, so that the same data give the same bytes."""
    buffer = io.BytesIO()
    with style():
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Write the figure as PNG, atomically."""
    write_atomic(path, figure_bytes(figure))


def plain_log_axis(axes: Axes, which: str, ticks: Sequence[float] | None = None) -> None:
    """Make the x or y axis logarithmic with plain numbers (0.5, 20, 1,000) at `ticks` or at 1-2-5 steps."""
    getattr(axes, f"set_{which}scale")("log")
    axis = getattr(axes, f"{which}axis")
    if ticks is None:
        ticks = steps_125(*getattr(axes, f"get_{which}lim")())
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def steps_125(low: float, high: float, most: int = 7) -> list[float]:
    """Numbers 1, 2, 5 × 10ⁿ within [low, high]; fewer per decade where that gives more than `most`."""
    exponents = range(int(np.floor(np.log10(low))) - 1, int(np.ceil(np.log10(high))) + 1)
    for mantissas in ((1, 2, 5), (1, 3), (1,)):
        found = [m * 10.0**e for e in exponents for m in mantissas]
        found = [value for value in found if low * 0.999 <= value <= high * 1.001]
        if len(found) <= most:
            return found
    return found[:: -(-len(found) // most)]


def short(value: float) -> str:
    """A number as an axis label: 0.05, 3, 20, 1,000, 50k, 2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scale = 1e3 if letter == "k" else size
            return f"{value / scale:g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def batch_axis(axes: Axes, batch_sizes: Iterable[int]) -> None:
    """A logarithmic x axis of batch sizes, labelled at the measured ones."""
    sizes = sorted(set(batch_sizes))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if len(sizes) > 1:
        axes.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.3)
    axes.set_xlabel("batch size")


def rolling_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of each value and its neighbours, `window` // 2 on each side, fewer at the ends."""
    reach, n = window // 2, len(values)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    first = np.maximum(np.arange(n) - reach, 0)
    last = np.minimum(np.arange(n) + reach + 1, n)
    return (sums[last] - sums[first]) / (last - first)


def draw_timeline(axes: Axes, trials: Mapping[str, tuple[np.ndarray, np.ndarray]], window: int = 21) -> None:
    """Every trial and a rolling mean. trials: name -> (start in s, latency in ms), each (trials,)."""
    for name, (start_s, latency_ms) in trials.items():
        order = np.argsort(start_s, kind="stable")
        start_s, latency_ms = np.asarray(start_s)[order], np.asarray(latency_ms)[order]
        axes.plot(start_s, latency_ms, ".", color=colour(name), alpha=0.5, markersize=3.5, mew=0)
        axes.plot(start_s, rolling_mean(latency_ms, window), color=colour(name), linewidth=0.9)
    plain_log_axis(axes, "y")


def draw_cdf(axes: Axes, latency_ms: Mapping[str, np.ndarray], marks: Mapping[str, Any]) -> None:
    """Share of trials below a latency, which is drawn relative to the median, so that tails can be compared.

    `marks`: name -> the (P50, P95, P99) in ms to mark, None where there are too few trials. The axis reaches
    from the first percentile to one and a half times the farthest P95.
    """
    nearest, farthest = -1.0, 1.0
    for name, values in latency_ms.items():
        median = np.median(values)
        values = _relative(values, median)
        farthest = max(farthest, *(1.5 * _relative(v, median) for v in marks[name][:2] if v is not None))
        nearest = min(nearest, 1.3 * np.percentile(values, 1))
        values = np.sort(values)
        share = np.arange(1, len(values) + 1) / len(values)
        axes.step(values, 100 * share, where="post", color=colour(name))
        for value, percent, sign in zip(marks[name], (50, 95, 99), "osD", strict=True):
            if value is not None:
                x = _relative(value, median)
                axes.plot(x, percent, sign, color=colour(name), mec="white", mew=0.6, markersize=6)
    axes.set_xlim(nearest, farthest)
    _percent_axis(axes)
    axes.set_ylim(-3, 103)
    axes.set_yticks([0, 25, 50, 75, 95])


def draw_violins(axes: Axes, latency_ms: Mapping[str, np.ndarray]) -> None:
    """The distribution of each backend's latency relative to its median (the bar); single trials if few."""
    names = list(latency_ms)
    for row, name in enumerate(names):
        values = _relative(latency_ms[name], np.median(latency_ms[name]))
        if len(values) >= 20 and np.ptp(values) > 0:
            # A single outlier would stretch the shape into a line; the timeline shows them all.
            low, high = np.percentile(values, [1, 97])
            inner = values[(values >= low) & (values <= high)]
            if np.ptp(inner) > 0:
                drawn = axes.violinplot(
                    [inner], [row], orientation="horizontal", widths=0.85, points=200, showextrema=False
                )
                (body,) = cast(Sequence[PolyCollection], drawn["bodies"])  # matplotlib's hint is Collection
                body.set(facecolor=colour(name), alpha=0.75, linewidth=0)
        else:
            axes.plot(values, np.full(len(values), row), marker(name), color=colour(name), markersize=4)
        axes.plot([0, 0], [row - 0.35, row + 0.35], color="black", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    _percent_axis(axes)


def _relative(values: Any, median: float) -> Any:
    """Percent above the median."""
    return 100 * (values / median - 1)


def _percent_axis(axes: Axes) -> None:
    """An x axis of signed percentages with few ticks."""
    axes.xaxis.set_major_locator(mpl.ticker.MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: signed_percent(value)))


def signed_percent(value: float) -> str:
    """A change with its sign, as text in plots: +5 %, −12 %, 0 %."""
    text = f"{value:+.0f}"
    return "0 %" if text in ("+0", "-0") else text.replace("-", "−") + " %"


def draw_bars(
    axes: Axes,
    p50_ms: Mapping[str, float],
    p95_ms: Mapping[str, float | None],
    published_ms: Mapping[str, float] | None = None,
) -> None:
    """Horizontal bars of P50 with whiskers to P95; black diamonds where a figure was published."""
    names = list(p50_ms)
    published = {name: value for name, value in (published_ms or {}).items() if name in p50_ms}
    ends = {name: max(p50_ms[name], p95_ms.get(name) or 0) for name in names}
    _bar_axis(axes, [*p50_ms.values(), *ends.values(), *published.values()])
    for row, name in enumerate(names):
        end = ends[name]
        axes.barh(row, p50_ms[name], height=0.72, color=colour(name))
        if (p95 := p95_ms.get(name)) is not None:
            axes.plot([p50_ms[name], p95], [row, row], color="black", linewidth=1)
            axes.plot([p95, p95], [row - 0.18, row + 0.18], color="black", linewidth=1)
        if name in published:
            axes.plot(published[name], row, "D", color="white", mec=PUBLISHED, mew=1.1, markersize=5)
            # A figure would lie under the text behind the bar: the text moves behind the figure.
            if -0.02 < _along(axes, published[name]) - _along(axes, end) < 0.17:
                end = max(end, published[name])
        axes.annotate(
            milliseconds(p50_ms[name]),
            (end, row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(False, axis="y")


def _along(axes: Axes, x: float) -> float:
    """Where a value lies along the x axis, from 0 to 1."""
    return float(axes.transAxes.inverted().transform(axes.transData.transform((x, 0)))[0])


def _bar_axis(axes: Axes, values: Sequence[float], room: float = 0.22) -> None:
    """The x axis of horizontal bars with text behind them: from zero, or logarithmic over a wide range."""
    low, high = min(values), max(values)
    if high <= LOG_FROM * low:
        axes.set_xlim(0, high * (1 + room))
        axes.xaxis.set_major_locator(mpl.ticker.MaxNLocator(4))
        return
    low /= 2.5
    axes.set_xlim(low, high * (high / low) ** room)
    plain_log_axis(axes, "x", steps_125(low, high, most=5))
    axes.set_xlabel("log axis", fontsize=8, labelpad=1)


def draw_ratios(
    axes: Axes,
    ratios: Mapping[str, Mapping[int, tuple[float, float | None, float | None]]],
    published: Mapping[str, Mapping[int, float]] | None = None,
    band_percent: float = 2.0,
) -> None:
    """Ratios over batch size with their intervals, on a log axis with the band of equivalence shaded.

    ratios: name -> batch -> (ratio, low, high); published: name -> batch -> ratio, hollow and dashed.
    """
    sizes = sorted({size for points in ratios.values() for size in points})
    everything = [v for points in ratios.values() for three in points.values() for v in three if v]
    for i, (name, points) in enumerate(ratios.items()):
        x = np.array(sorted(points), dtype=float)
        y = np.array([points[int(size)][0] for size in x])
        low = np.array([points[int(s)][1] or points[int(s)][0] for s in x])
        high = np.array([points[int(s)][2] or points[int(s)][0] for s in x])
        # Side by side within half a doubling, so that intervals stay apart.
        x = x * 2 ** (0.5 * (i / max(1, len(ratios) - 1) - 0.5))
        axes.plot(x, y, marker=marker(name), color=colour(name))
        axes.errorbar(
            x, y, yerr=[y - low, high - y], fmt="none", color=colour(name), capsize=2.5, linewidth=1.2
        )
    for name, known in (published or {}).items():
        at = [size for size in sorted(known) if size in sizes]
        values = [known[size] for size in at]
        everything += values
        look: dict[str, Any] = {"mfc": "white", "color": colour(name), "linewidth": 1, "alpha": 0.9}
        axes.plot(at, values, "--", marker=marker(name), **look)
    edge = 1 + band_percent / 100
    axes.axhspan(1 / edge, edge, color="#999999", alpha=0.35, linewidth=0)
    batch_axis(axes, sizes)
    axes.set_ylim(min([*everything, 0.9]) / 1.15, max([*everything, 1.1]) * 1.15)
    plain_log_axis(axes, "y")


def draw_lines(axes: Axes, curves: Mapping[str, Mapping[int, float]], dashed: bool = False) -> None:
    """Values over batch size. curves: name -> batch -> value. Dashed lines have hollow markers."""
    for name, points in curves.items():
        x = sorted(points)
        axes.plot(
            x,
            [points[size] for size in x],
            "--" if dashed else "-",
            marker=marker(name),
            mfc="white" if dashed else colour(name),
            color=colour(name),
            linewidth=1 if dashed else 1.6,
        )


def draw_roofline(
    axes: Axes,
    peak_gflop_s: float,
    bandwidths: Sequence[float],
    points: Mapping[str, Sequence[tuple[float, float]]],
    datasheet: tuple[float, float] | None = None,
) -> None:
    """GFLOP/s over FLOP/byte: measured ceilings, each backend's points joined in the given order.

    peak_gflop_s: measured multiply-add rate; bandwidths: GB/s, memory first, drawn in ROOF_LINES' styles;
    points: name -> [(FLOP/byte, GFLOP/s)]; datasheet: (GFLOP/s, GB/s), a thin second line.
    """
    everything = [point for line in points.values() for point in line]
    ridges = [peak_gflop_s / speed for speed in bandwidths]
    left = min([x for x, _ in everything] + ridges) / 3
    right = max([x for x, _ in everything] + ridges) * 4
    x = np.geomspace(left, right, 400)
    for speed, look in zip(bandwidths, ROOF_LINES, strict=False):
        axes.plot(x, np.minimum(peak_gflop_s, speed * x), color="black", **look)
    if datasheet:
        sheet = np.minimum(datasheet[0], datasheet[1] * x)
        axes.plot(x, sheet, **DATASHEET_LINE)
    for name, line in points.items():
        xs, ys = zip(*line, strict=True)
        axes.plot(xs, ys, marker=marker(name), color=colour(name), linewidth=1, markersize=5.5)
    top = max([peak_gflop_s, *((datasheet[0],) if datasheet else ()), *(y for _, y in everything)])
    axes.set_xlim(left, right)
    axes.set_ylim(min([y for _, y in everything] + [bandwidths[0] * left]) / 2, top * 2.2)
    plain_log_axis(axes, "x")
    plain_log_axis(axes, "y")
    axes.set_xlabel("arithmetic intensity, FLOP/byte (least traffic, weights included)")
    axes.set_ylabel("GFLOP/s")


def draw_waterfall(axes: Axes, steps: Sequence[Mapping[str, Any]]) -> None:
    """A ladder of steps, downwards. The first bar is the start; each other spans what its step changed.

    steps: dicts with name, from_ms, to_ms, low_ms and high_ms (of to_ms; None without interval), verdict. A
    step that saves is blue, one that costs is vermilion and hatched, an open or equivalent one grey.
    """
    far = max(max(step["from_ms"] or 0, step["to_ms"]) for step in steps)
    for row, step in enumerate(steps):
        start, end = step["from_ms"], step["to_ms"]
        if start is None:
            axes.barh(row, end, height=0.66, color=colour(step["name"]))
        else:
            look = {"faster": (SAVES, ""), "slower": (COSTS, "////")}.get(step["verdict"], (OPEN, ""))
            axes.barh(row, end, height=0.2, color=colour(step["name"]))
            axes.barh(
                row,
                abs(end - start),
                left=min(start, end),
                height=0.66,
                color=look[0],
                hatch=look[1],
                edgecolor="white",
                linewidth=0.5,
            )
        if step["low_ms"] is not None:
            axes.plot([step["low_ms"], step["high_ms"]], [row, row], color="black", linewidth=1.2)
            for bound in (step["low_ms"], step["high_ms"]):
                axes.plot([bound] * 2, [row - 0.15, row + 0.15], color="black", linewidth=1.2)
        text = milliseconds(end)
        if start is not None:
            text += f" ({signed_percent(100 * (end / start - 1))})"
        axes.annotate(
            text,
            (max(start or 0, end, step["high_ms"] or 0), row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(steps)), [step["name"] for step in steps])
    axes.set_ylim(len(steps) - 0.4, -0.6)
    axes.grid(False, axis="y")
    bounds = [v for step in steps for v in (step["to_ms"], step["high_ms"]) if v]
    _bar_axis(axes, [*bounds, far], room=0.4)


def draw_shares(axes: Axes, shares: Mapping[str, Mapping[str, float]], colours: Mapping[str, str]) -> None:
    """Stacked horizontal bars of shares in percent. shares: bar -> part -> percent."""
    for row, parts in enumerate(shares.values()):
        left = 0.0
        for part, percent in parts.items():
            axes.barh(row, percent, left=left, height=0.7, color=colours[part], edgecolor="white")
            if percent >= 6:
                axes.text(left + percent / 2, row, f"{percent:.0f}", ha="center", va="center", fontsize=8)
            left += percent
    axes.set_yticks(range(len(shares)), list(shares))
    axes.set_ylim(len(shares) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.grid(False, axis="y")
