"""Where a curve of latency against batch bends: a flat piece, then a piece proportional to the batch, fitted.

    knee = fit(batches, medians)            # batch sizes rising, latencies in any unit
    knee = fit_trials(batches, trials)      # several trials per batch: with an interval

The knee is where the two pieces meet on log-log axes, that is the batch whose proportional cost equals the
cost of the flat piece. The slope of the second piece is 1, not fitted: latencies that add a constant and a
proportional cost bend slowly, and a free slope then moves the knee down by a factor of two or more. A knee
need not be a measured batch, and none is claimed where the curve shows no flat piece or no rising one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Floats = Sequence[float] | np.ndarray

FLAT = 1.25  # a curve whose largest over smallest latency is below this shows no rising piece
DRAWS = 200
INTERVAL = 90  # percent


@dataclass(frozen=True)
class Knee:
    """A fit. `state`: "knee", "beyond" (flat to the last batch) or "before" (rising from the first).

    Where the state is not "knee", `batch` is the last or the first batch: a bound, not an estimate.
    """

    state: str
    batch: float
    low: float  # of the interval, NaN where none was computed
    high: float
    flat: float  # latency of the flat piece, in the unit of the data
    rise: float  # latency per item of the rising piece; NaN where none is seen

    def at(self, batch: float) -> float:
        """The fitted latency."""
        return self.flat if math.isnan(self.rise) else max(self.flat, self.rise * batch)


def fit(batches: Sequence[float], latencies: Floats) -> Knee:
    """Fit log latency = log flat + max(0, log batch - log knee) by least squares, without an interval.

    Needs four batches at least (ValueError). The knee is searched on a fine grid between the first and the
    last batch; the flat latency then has a closed form.
    """
    x, y = np.log(np.asarray(batches, float)), np.log(np.asarray(latencies, float))
    if len(x) < 4 or not (np.diff(x) > 0).all():
        raise ValueError("a knee needs four or more batch sizes, rising")
    nan = math.nan
    if math.exp(y.max() - y.min()) < FLAT:
        return Knee("beyond", float(batches[-1]), nan, nan, math.exp(y.mean()), nan)
    grid = np.linspace(x[0], x[-1], 40 * (len(x) - 1) + 1)
    ramps = np.maximum(0.0, x[None, :] - grid[:, None])
    flats = (y - ramps).mean(axis=1)
    errors = ((flats[:, None] + ramps - y) ** 2).sum(axis=1)
    best = int(np.argmin(errors))
    knee, flat = math.exp(grid[best]), math.exp(flats[best])
    if best == 0:
        return Knee("before", float(batches[0]), nan, nan, flat, flat / knee)
    if knee >= batches[-2]:  # a single point right of it shows no rising piece
        return Knee("beyond", float(batches[-1]), nan, nan, flat, nan)
    return Knee("knee", knee, nan, nan, flat, flat / knee)


def fit_trials(batches: Sequence[float], trials: Sequence[Floats], seed: int = 0) -> Knee:
    """Fit the medians of `trials` (one sequence per batch) with a bootstrap interval of INTERVAL percent.

    Each draw resamples the trials of every batch, and adds a resampled residual of the fit, enlarged for the
    two fitted numbers: a real curve bends and steps where the two pieces do not, and trial noise alone would
    give an interval that is far too narrow. A draw without a knee counts with its bound.
    """
    medians = [float(np.median(values)) for values in trials]
    found = fit(batches, medians)
    if found.state != "knee":
        return found
    generator = np.random.default_rng(seed)
    fitted = np.log([found.at(batch) for batch in batches])
    residuals = (np.log(medians) - fitted) * math.sqrt(len(batches) / (len(batches) - 2))
    curves = fitted + generator.choice(residuals, (DRAWS, len(batches)))
    for column, (values, median) in enumerate(zip(trials, medians, strict=True)):
        drawn = generator.choice(np.asarray(values, float), (DRAWS, len(values)))
        curves[:, column] += np.log(np.median(drawn, axis=1) / median)
    draws = [fit(batches, np.exp(curve)).batch for curve in curves]
    low, high = np.percentile(draws, [50 - INTERVAL / 2, 50 + INTERVAL / 2])
    return Knee("knee", found.batch, float(low), float(high), found.flat, found.rise)


def saturation(batches: Sequence[int], latencies: Floats, share: float = 0.9) -> tuple[int, float, float]:
    """The smallest batch whose throughput is at least `share` of the largest measured.

    Returns (batch, its latency, the largest throughput in items per unit of latency).
    """
    throughput = np.asarray(batches, float) / np.asarray(latencies, float)
    index = int(np.argmax(throughput >= share * throughput.max()))
    return int(batches[index]), float(latencies[index]), float(throughput.max())
