"""Statistics of timings: percentiles, the ratio of two backends with interval and verdict, drift.

    from harness.statistics import sample, speedup, summarise

    cell = {"study": "mnist", "case": "network", "batch_size": 16, "dtype": "float32", "kind": "latency"}
    torch, mlx = (sample(record.rows, backend=name, **cell) for name in ("torch", "mlx"))
    summarise(mlx.latency_ms).p95      # None below 20 trials: print a dash
    speedup(mlx, baseline=torch)       # Comparison(ratio=1.31, low=1.27, high=1.36, verdict="faster", …)

The interval of a ratio. The estimate is the ratio of the two medians over the rounds that both took part in,
after the course that both have in common (heat, a busy neighbour), a running median over a fifth of the
rounds, is taken out of both. Without such a course it is P50 ÷ P50. Its standard error comes from a
bootstrap that draws rounds, with all their trials and for both backends together: trials of one burst
resemble each other, and what disturbs a round disturbs both. Rounds are drawn in blocks of R^(1/3)
neighbours (moving-block bootstrap: Künsch 1989, Annals of Statistics 17; its length: Hall, Horowitz and Jing
1995, Biometrika 82), since neighbouring rounds resemble each other too. The interval is estimate ± Student's
t × standard error with R ÷ block length - 1 degrees of freedom, on the log scale.

Chosen by simulation (tests/test_statistics.py repeats the comparison that counts) against the t interval and
the percentile, BCa-like and studentised bootstraps of the mean or the trimmed mean of log ratios per round:
those are narrower for normal noise, but where two backends are noisy in different ways the mean of log
ratios is not the ratio of medians, and coverage of the ratio falls to 0–90 %. Plain percentile intervals
cover 81–92 % at 5 to 10 rounds. Known weakness: where one backend wanders by itself from round to round
(first-order autocorrelation 0.6), coverage is 86–90 %.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

P95_FROM = 20  # trials; a percentile of fewer is decided by one or two of them
P99_FROM = 200
NOISY_CV_PERCENT = 10.0
BAND_PERCENT = 2.0  # ratios within ±2 % count as equivalent
CONFIDENCE = 0.95
LEAST_ROUNDS = 3  # for an interval
RESAMPLES = 999
SEED = 42

DRIFT_PERCENT = 5.0  # smaller trends are not called drift
DRIFT_ROUNDS = 6  # with fewer, no order of rounds is unlikely enough
DRIFT_Z = 2.576  # two-sided 1 %

# What the method does on synthetic latencies with known ratio: the shapes and designs of
# tests/test_statistics.py, 1,500 repeats each. The test checks that a shorter repetition agrees.
CALIBRATION = {
    "least_coverage_percent": 95.3,
    "mean_coverage_percent": 97.6,
    "most_false_percent": 2.3,
    "mean_false_percent": 0.3,
}

VERDICTS = ("faster", "slower", "equivalent", "undecided")


@dataclass(frozen=True)
class Summary:
    """Figures of one cell, in milliseconds per forward; None where there are too few trials."""

    trials: int
    p50: float
    p95: float | None
    p99: float | None
    mean: float
    least: float
    cv_percent: float | None  # 100 × sample standard deviation ÷ mean

    @property
    def noisy(self) -> bool:
        """Whether the coefficient of variation exceeds NOISY_CV_PERCENT."""
        return self.cv_percent is not None and self.cv_percent > NOISY_CV_PERCENT


@dataclass(frozen=True)
class Sample:
    """The trials of one cell by one clock. round, latency_ms: (trials,), in order of measurement."""

    kind: str
    round: np.ndarray
    latency_ms: np.ndarray
    label: str = ""

    @property
    def p50(self) -> float:
        """The median in milliseconds."""
        return float(np.median(self.latency_ms))


@dataclass(frozen=True)
class Comparison:
    """How many times faster a backend is than its baseline: median of the baseline ÷ median of the backend.

    `low` and `high` bound the 95 % interval; None with fewer than LEAST_ROUNDS common rounds.
    """

    ratio: float
    low: float | None
    high: float | None
    verdict: str  # of VERDICTS, about the backend
    rounds: int


@dataclass(frozen=True)
class Drift:
    """A trend over a run. `percent`: median of the last quarter of rounds over that of the first, minus 1."""

    percent: float | None  # None with fewer than DRIFT_ROUNDS rounds
    significant: bool  # by a rank test for ramps or for steps, each at 1 %
    flagged: bool  # significant and at least DRIFT_PERCENT


def percentile(latency_ms: np.ndarray, percent: float) -> float | None:
    """The percentile by linear interpolation; None for P95 below 20 trials and for P99 below 200."""
    needed = P99_FROM if percent > 95 else P95_FROM if percent > 75 else 1
    return float(np.percentile(latency_ms, percent)) if len(latency_ms) >= needed else None


def cv_percent(latency_ms: np.ndarray) -> float | None:
    """Coefficient of variation: sample standard deviation ÷ mean, in percent. None below two trials."""
    if len(latency_ms) < 2:
        return None
    return float(100 * np.std(latency_ms, ddof=1) / np.mean(latency_ms))


def summarise(latency_ms: np.ndarray) -> Summary:
    """The figures of one cell. latency_ms: (trials,), at least one."""
    latency_ms = np.asarray(latency_ms, dtype=float)
    if not len(latency_ms):
        raise ValueError("no trials to summarise")
    return Summary(
        trials=len(latency_ms),
        p50=float(np.median(latency_ms)),
        p95=percentile(latency_ms, 95),
        p99=percentile(latency_ms, 99),
        mean=float(np.mean(latency_ms)),
        least=float(np.min(latency_ms)),
        cv_percent=cv_percent(latency_ms),
    )


def sample(rows: pd.DataFrame, **labels: Any) -> Sample | None:
    """The rows of a record whose columns equal `labels`, as one sample; None if there are none.

    Raises ValueError when they are of several kinds: times by different clocks are never pooled.
    """
    chosen = np.ones(len(rows), dtype=bool)
    for column, value in labels.items():
        chosen &= (rows[column] == value).to_numpy()
    rows = rows[chosen]
    if not len(rows):
        return None
    kinds = sorted(set(rows["kind"]))
    if len(kinds) > 1:
        raise ValueError(f"times by different clocks ({', '.join(kinds)}) cannot be pooled")
    rows = rows.sort_values("sequence", kind="stable")
    label = " · ".join(str(value) for column, value in labels.items() if column != "kind")
    return Sample(kinds[0], rows["round"].to_numpy(), rows["latency_ms"].to_numpy(), label)


def speedup(
    backend: Sample, baseline: Sample, paired: bool = True, seed: int = SEED, resamples: int = RESAMPLES
) -> Comparison:
    """Compare `backend` with `baseline`: ratio, 95 % interval, verdict; see the module's docstring.

    `paired=False` is for samples of two runs, which share no rounds: rounds are drawn apart for each, all
    trials count, and the degrees of freedom are those of the run with fewer rounds (conservative).
    Raises ValueError for a ratio across clocks.
    """
    if backend.kind != baseline.kind:
        raise ValueError(
            f"a ratio across clocks is meaningless: {backend.label or 'backend'} is {backend.kind} time, "
            f"{baseline.label or 'baseline'} is {baseline.kind} time"
        )
    random = np.random.default_rng(seed)
    logs = [np.log(np.maximum(side.latency_ms, 1e-9)) for side in (baseline, backend)]
    ids = [side.round for side in (baseline, backend)]
    if paired and (common := np.intersect1d(baseline.round, backend.round)).size:
        keep = [np.isin(side, common) for side in ids]
        logs = [side[kept] for side, kept in zip(logs, keep, strict=True)]
        ids = [np.searchsorted(common, side[kept]) for side, kept in zip(ids, keep, strict=True)]
        counts = [len(common)]
        course = common_course(logs, ids, len(common))
        logs = [side - course[rounds] for side, rounds in zip(logs, ids, strict=True)]
        draws = draw_rounds(len(common), resamples, random)
        drawn = [draws, draws]
    elif paired:
        return Comparison(baseline.p50 / backend.p50, None, None, "undecided", 0)
    else:
        ids = [np.unique(side, return_inverse=True)[1] for side in ids]
        counts = [int(side.max()) + 1 for side in ids]
        drawn = [draw_rounds(count, resamples, random) for count in counts]
    rounds = min(counts)
    estimate = float(np.median(logs[0]) - np.median(logs[1]))
    if rounds < LEAST_ROUNDS:
        return Comparison(float(np.exp(estimate)), None, None, "undecided", rounds)
    over, under = (resampled_medians(*side) for side in zip(logs, ids, drawn, strict=True))
    freedom = rounds / block_length(rounds) - 1
    half = student_t(freedom) * float(np.std(over - under, ddof=1))
    low, high = np.exp(estimate - half), np.exp(estimate + half)
    return Comparison(float(np.exp(estimate)), float(low), float(high), verdict(low, high), rounds)


def verdict(low: float, high: float, band_percent: float = BAND_PERCENT) -> str:
    """What an interval of "times faster" says: faster or slower outside the band, equivalent inside it.

    The band is 1/1.02 … 1.02, symmetric on the log scale, so that swapping the two swaps the verdict.
    """
    edge = 1 + band_percent / 100
    if low > edge:
        return "faster"
    if high < 1 / edge:
        return "slower"
    return "equivalent" if 1 / edge < low and high < edge else "undecided"


def contradict(first: str, second: str) -> bool:
    """Whether two verdicts on the same cell cannot both be right; "undecided" contradicts nothing."""
    return first != second and "undecided" not in (first, second)


def drift(round_: np.ndarray, start_s: np.ndarray, latency_ms: np.ndarray) -> Drift:
    """The trend over a run, from the medians per round in order of time. All: (trials,).

    The size compares the last quarter of the rounds with the first, which says the same of a ramp (three
    quarters of it) and of a step (all of it), where a fitted slope hides a step. It is significant if a rank
    test says so at 1 %, two-sided: Mann and Kendall's, which sees ramps, or Mann and Whitney's between the
    halves, which sees steps. Under their null any order of the rounds is equally likely,
    whatever the shape of the noise.
    """
    ids, inverse = np.unique(round_, return_inverse=True)
    if len(ids) < DRIFT_ROUNDS:
        return Drift(None, False, False)
    medians = np.array([np.median(latency_ms[inverse == i]) for i in range(len(ids))])
    times = np.array([np.mean(start_s[inverse == i]) for i in range(len(ids))])
    medians = medians[np.argsort(times)]
    n, quarter = len(ids), max(1, len(ids) // 4)
    percent = float(100 * (np.median(medians[-quarter:]) / np.median(medians[:quarter]) - 1))
    first, second = np.triu_indices(n, k=1)
    sign = np.sign(medians[second] - medians[first])
    kendall = max(0, abs(sign.sum()) - 1) / np.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    half = n // 2
    across = (first < half) & (second >= half)
    whitney = abs(sign[across].sum()) / 2 / np.sqrt(half * (n - half) * (n + 1) / 12)
    significant = bool(max(kendall, whitney) > DRIFT_Z)
    return Drift(percent, significant, significant and abs(percent) >= DRIFT_PERCENT)


def block_length(rounds: int) -> int:
    """Rounds per block: R^(1/3), but 1 below ten rounds, where blocks leave too few degrees of freedom."""
    return round(rounds ** (1 / 3)) if rounds >= 10 else 1


def draw_rounds(rounds: int, resamples: int, random: np.random.Generator) -> np.ndarray:
    """How often each resample holds each round, drawn in circular blocks: (resamples, rounds)."""
    length = block_length(rounds)
    starts = random.integers(0, rounds, (resamples, -(-rounds // length)))
    drawn = (starts[:, :, None] + np.arange(length)) % rounds
    drawn = drawn.reshape(resamples, -1)[:, :rounds]
    flat = drawn + rounds * np.arange(resamples)[:, None]
    return np.bincount(flat.ravel(), minlength=resamples * rounds).reshape(resamples, rounds)


def resampled_medians(values: np.ndarray, ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The median of every resample: trial i is there counts[:, ids[i]] times. Returns (resamples,).

    values, ids: (trials,); counts: (resamples, rounds). Rounds may hold different numbers of trials.
    """
    order = np.argsort(values, kind="stable")
    values = values[order]
    reached = np.cumsum(counts[:, ids[order]], axis=1)  # (resamples, trials)
    half = reached[:, -1:] / 2
    lower = np.argmax(reached >= half, axis=1)
    upper = np.argmax(reached > half, axis=1)
    return (values[lower] + values[upper]) / 2


def common_course(logs: list[np.ndarray], ids: list[np.ndarray], rounds: int) -> np.ndarray:
    """What both sides do together over the rounds: a running median of their mean log. Returns (rounds,).

    Wide enough (a fifth of the rounds, five at least) that it follows no single round's noise.
    """
    mean = np.mean(
        [[np.median(side[at == i]) for i in range(rounds)] for side, at in zip(logs, ids, strict=True)],
        axis=0,
    )
    reach = max(5, rounds // 5) // 2
    padded = np.pad(mean, reach, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1), axis=1)


def student_t(freedom: float, confidence: float = CONFIDENCE) -> float:
    """The two-sided quantile of Student's t distribution, for any real number of degrees of freedom > 0.

    With t = √ν tan θ the density becomes cos^(ν-1) θ, which is summed over a grid.
    """
    theta = np.linspace(0, np.pi / 2, 20001)
    middle = (theta[1:] + theta[:-1]) / 2
    mass = np.concatenate([[0], np.cumsum(np.cos(middle) ** (freedom - 1))])
    return float(np.sqrt(freedom) * np.tan(np.interp(confidence, mass / mass[-1], theta)))
