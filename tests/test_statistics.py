"""Percentiles, ratio, verdict and drift: by hand, and calibrated on synthetic latencies."""

import numpy as np
import pandas as pd
import pytest

from harness.statistics import (
    CALIBRATION,
    Sample,
    block_length,
    common_course,
    contradict,
    cv_percent,
    draw_rounds,
    drift,
    percentile,
    resampled_medians,
    sample,
    speedup,
    student_t,
    summarise,
    verdict,
)


def make_sample(latency_ms, kind="latency"):
    """A sample from (rounds, trials per round)."""
    latency_ms = np.asarray(latency_ms, dtype=float)
    rounds, burst = latency_ms.shape
    return Sample(kind, np.repeat(np.arange(rounds), burst), latency_ms.ravel())


def test_percentiles_by_hand_and_only_where_there_are_enough_trials():
    one_to_20 = np.arange(1.0, 21.0)
    assert percentile(one_to_20, 50) == 10.5
    assert percentile(one_to_20, 95) == pytest.approx(19.05)  # position 0.95 · 19 = 18.05 from 1
    assert percentile(one_to_20[:19], 95) is None
    assert percentile(np.arange(200.0), 99) == pytest.approx(197.01)
    assert percentile(np.arange(199.0), 99) is None
    assert percentile(np.array([3.0]), 50) == 3.0


def test_coefficient_of_variation_by_hand():
    assert cv_percent(np.array([9.0, 10.0, 11.0])) == pytest.approx(10.0)  # deviation 1, mean 10
    assert not summarise(np.array([9.0, 10.0, 11.0])).noisy
    assert summarise(np.array([8.9, 10.0, 11.1])).noisy
    assert cv_percent(np.array([5.0])) is None


def test_summary_of_three_trials_has_no_tail():
    summary = summarise(np.array([4.0, 2.0, 3.0]))
    assert (summary.trials, summary.p50, summary.mean, summary.least) == (3, 3.0, 3.0, 2.0)
    assert summary.p95 is None and summary.p99 is None
    with pytest.raises(ValueError):
        summarise(np.array([]))


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.7062), (2, 4.3027), (4, 2.7764), (9, 2.2622), (30, 2.0423), (1e6, 1.96)]
)
def test_student_t_against_the_printed_table(freedom, expected):
    assert student_t(freedom) == pytest.approx(expected, abs=2e-3)


def test_resampled_medians_are_medians_of_the_repeated_trials():
    values, ids = np.array([5.0, 1.0, 4.0, 2.0, 9.0]), np.array([0, 0, 1, 2, 2])
    counts = np.array([[1, 1, 1], [2, 0, 1], [0, 3, 0], [0, 0, 3]])
    expected = [np.median(np.repeat(values, row[ids])) for row in counts]
    assert resampled_medians(values, ids, counts).tolist() == expected == [4.0, 3.5, 4.0, 5.5]


def test_rounds_are_drawn_in_blocks():
    assert [block_length(n) for n in (3, 9, 10, 20, 40, 200)] == [1, 1, 2, 3, 3, 6]
    draws = draw_rounds(20, 500, np.random.default_rng(0))
    assert (draws.sum(axis=1) == 20).all()
    assert np.abs(draws.mean(axis=0) - 1).max() < 0.2
    neighbours = np.corrcoef(draws[:, 4], draws[:, 5])[0, 1]
    assert neighbours > 0.5  # two of three blocks that hold round 4 hold round 5


def test_common_course_follows_both_and_no_single_round():
    ramp = np.linspace(0, 1, 10)
    ids = np.arange(10)
    course = common_course([ramp, ramp + 1], [ids, ids], 10)
    assert course[2:-2] == pytest.approx(ramp[2:-2] + 0.5)
    spike = np.zeros(10)
    spike[4] = 5
    assert not common_course([spike, spike], [ids, ids], 10).any()


def test_ratio_of_constant_times_is_exact():
    result = speedup(make_sample(np.full((5, 2), 2.0)), make_sample(np.full((5, 2), 3.0)))
    assert (result.ratio, result.low, result.high) == pytest.approx((1.5, 1.5, 1.5))
    assert (result.verdict, result.rounds) == ("faster", 5)


def test_swapping_the_two_swaps_ratio_and_verdict():
    random = np.random.default_rng(3)
    fast, slow = make_sample(random.normal(10, 0.2, (12, 4))), make_sample(random.normal(12, 0.2, (12, 4)))
    one, other = speedup(fast, slow), speedup(slow, fast)
    assert (one.verdict, other.verdict) == ("faster", "slower")
    assert one.ratio == pytest.approx(1 / other.ratio)
    assert (one.low, one.high) == pytest.approx((1 / other.high, 1 / other.low))
    assert speedup(fast, slow) == one  # seeded


def test_only_common_rounds_count():
    baseline = make_sample(np.full((6, 1), 4.0))
    late = Sample("latency", np.array([3, 4, 5, 9]), np.array([2.0, 2.0, 2.0, 77.0]))
    result = speedup(late, baseline)
    assert (result.ratio, result.rounds) == (pytest.approx(2.0), 3)


def test_too_few_rounds_give_a_ratio_without_interval():
    result = speedup(make_sample([[1.0], [1.0]]), make_sample([[9.0], [9.0]]))
    assert (result.ratio, result.low, result.high) == (pytest.approx(9.0), None, None)
    assert result.verdict == "undecided"
    apart = Sample("latency", np.array([7, 8]), np.array([1.0, 1.0]))
    assert speedup(apart, make_sample([[9.0], [9.0]])).rounds == 0


def test_ratio_across_clocks_is_refused():
    with pytest.raises(ValueError, match="across clocks"):
        speedup(make_sample([[1.0]] * 5, kind="device"), make_sample([[1.0]] * 5))


def test_sample_takes_the_rows_asked_for_and_one_clock():
    rows = pd.DataFrame(
        {
            "backend": ["a", "b", "a", "a"],
            "kind": ["latency", "latency", "latency", "device"],
            "round": [1, 0, 0, 0],
            "sequence": [3, 1, 0, 4],
            "latency_ms": [5.0, 6.0, 7.0, 8.0],
        }
    )
    chosen = sample(rows, backend="a", kind="latency")
    assert (chosen.round.tolist(), chosen.latency_ms.tolist()) == ([0, 1], [7.0, 5.0])
    assert sample(rows, backend="c") is None
    with pytest.raises(ValueError, match="different clocks"):
        sample(rows, backend="a")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.021, 1.2, "faster"),
        (1.019, 1.2, "undecided"),
        (0.99, 1.019, "equivalent"),
        (0.981, 1.0, "equivalent"),
        (0.9, 0.98, "slower"),
        (0.9, 0.985, "undecided"),
        (0.9, 1.1, "undecided"),
    ],
)
def test_verdict_by_where_the_interval_lies(low, high, expected):
    assert verdict(low, high) == expected


def test_what_contradicts():
    assert contradict("faster", "slower") and contradict("faster", "equivalent")
    assert not contradict("faster", "faster") and not contradict("slower", "undecided")


# Calibration. Each makes (rounds, trials per round) of two backends whose medians are equal.

RANDOM_MODE = 0.3  # share of slow trials in the bimodal shapes, which are 1.3 times slower


def _noise(random, shape, size=0.03):
    return np.exp(size * random.standard_normal(shape))


def normal(random, shape):
    return [_noise(random, shape, 0.05) for _ in range(2)]


def heavy_tailed(random, shape):
    return [1 + 0.05 * random.pareto(1.5, shape) for _ in range(2)]


def drifting_together(random, shape):
    ramp = np.linspace(1, 1.2, shape[0])[:, None]
    return [_noise(random, shape) * ramp for _ in range(2)]


def drifting_apart(random, shape):
    ramp = np.exp(np.linspace(-0.05, 0.05, shape[0]))[:, None]
    return [_noise(random, shape) * ramp, _noise(random, shape) / ramp]


def bimodal_trials(random, shape):
    return [_noise(random, shape) * np.where(random.random(shape) < RANDOM_MODE, 1.3, 1) for _ in range(2)]


def bimodal_bursts(random, shape):
    modes = [np.where(random.random((shape[0], 1)) < RANDOM_MODE, 1.3, 1) for _ in range(2)]
    return [_noise(random, shape) * mode for mode in modes]


def bimodal_rounds(random, shape):
    mode = np.where(random.random((shape[0], 1)) < 0.4, 1.3, 1)
    return [_noise(random, shape) * mode for _ in range(2)]


def heavy_against_normal(random, shape):
    median = 1 + 0.05 * (2 ** (1 / 1.5) - 1)
    return [(1 + 0.05 * random.pareto(1.5, shape)) / median, _noise(random, shape)]


SHAPES = (
    normal,
    heavy_tailed,
    drifting_together,
    drifting_apart,
    bimodal_trials,
    bimodal_bursts,
    bimodal_rounds,
    heavy_against_normal,
)
DESIGNS = ((10, 1), (10, 2), (20, 1), (20, 3), (20, 10))  # rounds × trials: 10 to 200 trials


def calibrate(shape, design, ratio, repeats, seed=0):
    """Shares of intervals that hold the true ratio, and of each verdict."""
    random = np.random.default_rng([seed, SHAPES.index(shape), *design])
    covered, verdicts = 0, []
    for _ in range(repeats):
        backend, baseline = shape(random, design)
        result = speedup(make_sample(backend), make_sample(baseline * ratio), resamples=499)
        covered += result.low <= ratio <= result.high
        verdicts.append(result.verdict)
    return covered / repeats, {name: verdicts.count(name) / repeats for name in set(verdicts)}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)
def test_intervals_cover_and_verdicts_are_rarely_false(shape):
    repeats = 160
    coverage, wrong = [], []
    for design in DESIGNS:
        covered, verdicts = calibrate(shape, design, ratio=1.0, repeats=repeats)
        coverage.append(covered)
        wrong.append(verdicts.get("faster", 0) + verdicts.get("slower", 0))
    assert np.mean(coverage) >= 0.93, coverage
    assert 100 * np.mean(coverage) >= CALIBRATION["least_coverage_percent"] - 1, coverage
    assert 100 * np.mean(wrong) <= CALIBRATION["most_false_percent"] + 1, wrong
    assert min(coverage) >= 0.90, coverage  # 160 repeats of a true 95 % scatter by 1.7 %
    assert max(wrong) <= 0.05, wrong


def test_at_the_edge_of_the_band_verdicts_are_right_or_open():
    for shape in (normal, bimodal_trials):
        _, verdicts = calibrate(shape, (20, 3), ratio=1.02, repeats=200)
        wrong = verdicts.get("slower", 0) + verdicts.get("faster", 0) + verdicts.get("equivalent", 0)
        assert wrong <= 0.06


def test_a_real_difference_is_found():
    for shape in (normal, heavy_tailed, drifting_together, bimodal_rounds):
        covered, verdicts = calibrate(shape, (20, 10), ratio=1.1, repeats=100)
        assert verdicts == {"faster": 1.0}
        assert covered >= 0.88
    assert calibrate(normal, (20, 10), ratio=1.0, repeats=100)[1]["equivalent"] >= 0.5


def make_course(random, shape, size=0.03):
    rounds, burst = shape
    noise = _noise(random, shape, size) * np.where(random.random(shape) < 0.05, 1.5, 1)
    start = np.arange(rounds * burst, dtype=float)
    return np.repeat(np.arange(rounds), burst), start, 10 * noise.ravel()


def test_drift_by_hand():
    ids = np.arange(8)
    step = np.array([1.0, 1.0, 1.0, 1.0, 1.2, 1.2, 1.2, 1.2])
    found = drift(ids, ids.astype(float), step + 1e-3 * ids)
    assert found.percent == pytest.approx(100 * (1.2065 / 1.0005 - 1))
    assert found.flagged
    assert drift(ids[:5], ids[:5].astype(float), step[:5]).percent is None
    late_first = drift(ids, -ids.astype(float), step + 1e-3 * ids)
    assert late_first.percent < 0 and late_first.flagged


@pytest.mark.parametrize("shape", [(10, 3), (20, 1), (20, 10)])
def test_noise_is_rarely_called_drift_and_a_slow_down_halfway_is(shape):
    random = np.random.default_rng(5)
    rounds = shape[0]
    flagged = {"noise": 0, "step": 0, "ramp": 0}
    repeats = 200
    for _ in range(repeats):
        ids, start, noise = make_course(random, shape)
        flagged["noise"] += drift(ids, start, noise).flagged
        flagged["step"] += drift(ids, start, noise * np.where(ids >= rounds // 2, 1.15, 1)).flagged
        flagged["ramp"] += drift(ids, start, noise * (1 + 0.2 * ids / rounds)).flagged
    assert flagged["noise"] <= 0.05 * repeats
    assert flagged["step"] >= 0.8 * repeats
    assert flagged["ramp"] >= 0.8 * repeats
