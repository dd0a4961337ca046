"""The knee's fit on curves whose knee is known, sharp and soft, with noise of known size."""

import math

import numpy as np
import pytest

from batch.knee import fit, fit_trials, saturation

BATCHES = [2**n for n in range(11)]


def curve(knee: float, soft: bool = False) -> np.ndarray:
    batches = np.array(BATCHES, float)
    return 1 + batches / knee if soft else np.maximum(1, batches / knee)


@pytest.mark.parametrize("knee", [3.0, 24.0, 100.0])
def test_sharp_curve_without_noise(knee: float) -> None:
    found = fit(BATCHES, 2.5 * curve(knee))
    assert found.state == "knee"
    assert found.batch == pytest.approx(knee, rel=0.02)
    assert found.flat == pytest.approx(2.5, rel=0.01)
    assert found.rise == pytest.approx(2.5 / knee, rel=0.02)


@pytest.mark.parametrize("knee", [6.0, 24.0, 100.0])
def test_curve_that_adds_both_costs_bends_at_the_same_batch(knee: float) -> None:
    assert fit(BATCHES, curve(knee, soft=True)).batch == pytest.approx(knee, rel=0.25)


def test_curves_without_a_knee_claim_none() -> None:
    flat, rising = fit(BATCHES, np.full(11, 3.0)), fit(BATCHES, np.array(BATCHES) * 0.2)
    assert (flat.state, flat.batch) == ("beyond", 1024)
    assert math.isnan(flat.rise)
    assert (rising.state, rising.batch) == ("before", 1)
    assert rising.rise == pytest.approx(0.2)
    assert fit(BATCHES, curve(700)).state == "beyond"  # one rising point shows no piece


def test_too_few_or_unsorted_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="four"):
        fit([1, 2, 4], [1, 1, 2])
    with pytest.raises(ValueError, match="rising"):
        fit([1, 4, 2, 8], [1, 1, 2, 3])


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_interval_covers_the_true_knee(soft: bool, noise: float) -> None:
    # Each batch is off by as much as its trials scatter, as on a real machine.
    generator = np.random.default_rng(3)
    hits, estimates = 0, []
    for _ in range(25):
        level = curve(24, soft) * np.exp(generator.normal(0, noise, len(BATCHES)))
        found = fit_trials(BATCHES, [value * np.exp(generator.normal(0, noise, 20)) for value in level])
        hits += found.low <= 24 <= found.high
        estimates.append(found.batch)
    assert np.median(estimates) == pytest.approx(24, rel=0.1)
    assert hits >= 19  # 90 % nominal; 18 of 25 or fewer has a probability of 1 % at that


def test_more_noise_gives_a_wider_interval() -> None:
    widths = []
    for noise in (0.01, 0.1):
        generator = np.random.default_rng(5)
        level = curve(24) * np.exp(generator.normal(0, noise, len(BATCHES)))
        found = fit_trials(BATCHES, [value * np.exp(generator.normal(0, noise, 20)) for value in level])
        widths.append(math.log(found.high / found.low))
    assert widths[1] > 3 * widths[0]


def test_saturation_is_the_first_batch_with_nine_tenths_of_the_best_throughput() -> None:
    # Throughputs 1, 2, 3.7, 4, 3.9.
    batch, latency, best = saturation([1, 2, 4, 8, 16], [1, 1, 4 / 3.7, 2, 16 / 3.9])
    assert (batch, best) == (4, 4.0)
    assert latency == pytest.approx(1.081, abs=1e-3)
