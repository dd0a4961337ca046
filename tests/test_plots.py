"""Plots: one colour per backend, plain axes, the same bytes for the same data."""

import io
import itertools

import numpy as np
import pytest
from matplotlib.image import imread

from harness import analysis, figures, plots
from harness.backends import BACKENDS
from synthetic_record import make_record


@pytest.fixture(scope="module")
def group():
    return analysis.groups(make_record(backends=("torch", "mlx", "mlx-fused", "mlx-network"), trials=40))[0]


# Linear RGB as seen with all cones, and without green or red ones (Viénot, Brettel and Mollon 1999).
SEEN = {
    "all cones": np.eye(3),
    "no green": np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]]),
    "no red": np.array([[0.10889, 0.89111, 0], [0.10889, 0.89111, 0], [0.00447, -0.00447, 1]]),
}


def linear(colour):
    """Linear RGB of "#RRGGBB"."""
    return np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]) ** 2.2


def cielab(rgb):
    """CIELAB of linear RGB."""
    matrix = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = matrix @ np.clip(rgb, 0, 1) / (0.9505, 1, 1.089)
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_every_backend_has_a_colour_and_a_sign_of_its_own():
    assert set(BACKENDS) <= set(plots.BACKENDS)
    looks = [(plots.colour(name), plots.marker(name)) for name in BACKENDS]
    assert len(set(looks)) == len(looks)
    assert len({colour for colour, _ in looks}) == len(looks)


@pytest.mark.parametrize("sight", SEEN)
def test_colours_differ_to_every_eye_and_stand_out_from_white(sight):
    seen = {name: cielab(SEEN[sight] @ linear(plots.colour(name))) for name in BACKENDS}
    for one, other in itertools.combinations(seen, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 20, (one, other)
    assert max(lightness for lightness, _, _ in seen.values()) < 82


def test_other_names_keep_their_colour_and_registered_ones_differ():
    assert plots.colour("some study's backend") == plots.colour("some study's backend")
    assert plots.colour("torch-again") == plots.colour("torch")
    names = ["eager", "concatenated", "graph"]
    plots.register(names)
    assert len({plots.colour(name) for name in names}) == 3
    plots.register(["torch"])
    assert plots.colour("torch") == "#0077FF"


def test_rolling_mean_by_hand():
    assert plots.rolling_mean(np.array([1.0, 2.0, 3.0, 4.0]), 3).tolist() == [1.5, 2.0, 3.0, 3.5]
    assert plots.rolling_mean(np.array([1.0, 5.0]), 20).tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.05, "0.05"), (3, "3"), (1000, "1,000"), (20000, "20k"), (2e6, "2M"), (0.5, "0.5")],
)
def test_axis_labels(value, text):
    assert plots.short(value) == text


def test_ticks_are_plain_numbers_within_the_range():
    assert plots.steps_125(0.9, 11) == [1, 2, 5, 10]
    assert len(plots.steps_125(0.001, 1e6)) <= 7
    assert plots.signed_percent(-0.2) == "0 %" and plots.signed_percent(-12.4) == "−12 %"


@pytest.mark.parametrize("name", figures.FIGURES)
def test_figures_have_titles_units_and_repeat_byte_for_byte(name, group):
    draw = figures.FIGURES[name][0]
    pictures = []
    for _ in range(2):
        with plots.style():
            figure = draw(group)
        if figure is None:
            assert name == "layers"  # not in this record
            return
        pictures.append(plots.figure_bytes(figure))
    assert pictures[0] == pictures[1]
    for word in (b"Software", b"matplotlib", b"tEXt", b"tIME"):
        assert word not in pictures[0]
    assert all(axes.get_title(loc="left") for axes in figure.axes)
    labels = [text.get_text() for text in figure.texts]
    labels += [
        getattr(figure, name).get_text() for name in ("_supxlabel", "_supylabel") if getattr(figure, name)
    ]
    labels += [axes.get_xlabel() + axes.get_ylabel() for axes in figure.axes]
    assert any(unit in " ".join(labels) for unit in ("ms", "%", "per second", "FLOP", "relative", "ratio"))


def test_a_figure_is_as_wide_as_a_readme(group):
    with plots.style():
        figure = figures.bars(group)
    pixels = imread(io.BytesIO(plots.figure_bytes(figure)))
    assert pixels.shape[1] == round(plots.WIDTH * plots.DPI)
    assert pixels[..., :3].min() < 0.2 and pixels[..., :3].max() == 1.0


def test_published_figures_are_drawn_where_they_exist(group):
    with plots.style():
        figure = figures.bars(group)
    diamonds = [line for axes in figure.axes for line in axes.lines if line.get_marker() == "D"]
    values = sorted(round(float(line.get_xdata()[0]), 3) for line in diamonds)
    assert 2.947 in values and 126.967 in values
    assert len(values) == 3 * 4  # three published backends at batches 1, 16, 128, 512


def test_a_step_that_costs_is_drawn_as_one():
    with plots.style():
        _, (axes,) = plots.panels_figure(["x"])
        steps = [
            {"name": "mlx", "from_ms": None, "to_ms": 4.0, "low_ms": None, "high_ms": None},
            {"name": "mlx-block", "from_ms": 4.0, "to_ms": 1.0, "low_ms": 0.9, "high_ms": 1.1}
            | {"verdict": "faster"},
            {"name": "mlx-network", "from_ms": 1.0, "to_ms": 2.0, "low_ms": 1.9, "high_ms": 2.1}
            | {"verdict": "slower"},
        ]
        plots.draw_waterfall(axes, steps)
    hatched = [bar for bar in axes.patches if bar.get_hatch()]
    assert len(hatched) == 1
    assert (hatched[0].get_x(), hatched[0].get_width()) == (1.0, 1.0)
    assert any("+100 %" in text.get_text() for text in axes.texts)


def test_layers_are_drawn_beside_multiply_accumulates():
    record = make_record(backends=("torch",), batch_sizes=(16,), trials=20)
    for kind in ("depthwise", "pointwise"):
        more = make_record(backends=("torch",), batch_sizes=(16,), trials=20, study="layers", case=kind)
        record.rows = type(record.rows)(
            {name: [*record.rows[name], *more.rows[name]] for name in record.rows.columns}
        )
        record.cells += more.cells
    with plots.style():
        figure = figures.FIGURES["layers"][0](analysis.groups(record)[0])
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["multiply-accumulates", "torch, batch 16"]
