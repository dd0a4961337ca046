"""Numbers out of the study's record: measured curves, predicted ones beside them, and their knees.

Everything is computed from the record; nothing is measured here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from batch.cases import Work
from batch.knee import Knee, fit, fit_trials, saturation
from batch.roofline import (
    BYTES,
    Limits,
    Prediction,
    affine,
    predict,
    ridge_batch,
)
from harness.present import present
from harness.record import Record
from harness.statistics import Comparison, sample, speedup

FREE = 1.1  # a batch is free while latency stays within this factor of batch 1
FULL_RATE = 0.8  # share of the ceiling from which on a curve is said to show its arithmetic
DEARER = 1.25  # a batch is called dearer than a larger one from this factor on
AGREE = 1.5  # a knee is called predicted within this factor


@dataclass
class Curve:
    """One case by one backend and one clock: measured latencies, and the least ones by the model."""

    work: Work
    backend: str
    kind: str  # latency (wall time) or device
    target: str
    batches: list[int]
    trials: list[np.ndarray]  # seconds, one array per batch
    limits: Limits | None  # None where the machine's limits could not be measured

    @property
    def known_limits(self) -> Limits:
        """The limits of a curve that has predictions."""
        return present(self.limits)

    @cached_property
    def seconds(self) -> np.ndarray:
        """Median per batch."""
        return np.array([np.median(values) for values in self.trials])

    @cached_property
    def predictions(self) -> list[Prediction]:
        """The model per batch; empty without limits."""
        return (
            [predict(self.work.layers(batch), self.limits) for batch in self.batches] if self.limits else []
        )

    @cached_property
    def predicted_seconds(self) -> np.ndarray:
        """The model's latency per batch."""
        return np.array([prediction.total_s for prediction in self.predictions])

    @cached_property
    def knee(self) -> Knee | None:
        """The fitted knee with its interval; None below four batches."""
        return fit_trials(self.batches, self.trials) if len(self.batches) >= 4 else None

    @cached_property
    def predicted_knee(self) -> Knee | None:
        """The knee of the predicted curve by the same fit at the same batches."""
        return (
            fit(self.batches, self.predicted_seconds) if self.predictions and len(self.batches) >= 4 else None
        )

    @property
    def agreement(self) -> float | None:
        """Measured over predicted knee; None unless both curves show one."""
        if self.knee and self.predicted_knee and self.knee.state == self.predicted_knee.state == "knee":
            return self.knee.batch / self.predicted_knee.batch
        return None

    @property
    def gain(self) -> float:
        """Largest throughput over that of the smallest batch."""
        throughput = np.array(self.batches) / self.seconds
        return float(throughput.max() / throughput[0])

    @property
    def saturated(self) -> tuple[int, float]:
        """(smallest batch with 90 % of the largest throughput, its latency in seconds)."""
        batch, seconds, _ = saturation(self.batches, self.seconds)
        return batch, seconds

    @cached_property
    def free(self) -> int:
        """The last batch before latency first leaves FREE × that of the smallest batch, noise allowed for."""
        return self.free_from(self.batches[0])

    def free_from(self, batch: int) -> int:
        """The last batch before latency first leaves FREE × that of `batch`.

        It has left where the median is above, and the whole 90 % interval of the ratio too.
        """
        start = self.batches.index(batch)
        for place in range(start + 1, len(self.batches)):
            if least_ratio(self.trials[place], self.trials[start]) > FREE:
                return self.batches[place - 1]
        return self.batches[-1]

    @cached_property
    def dearer(self) -> list[tuple[int, int, float]]:
        """(batch, a larger batch, ratio) where the smaller one takes longer by more than DEARER.

        The larger batch is the fastest of those behind. Only where the 90 % interval of the ratio stays above
        FREE.
        """
        found = []
        for place, batch in enumerate(self.batches[:-1]):
            best = place + 1 + int(np.argmin(self.seconds[place + 1 :]))
            factor = float(self.seconds[place] / self.seconds[best])
            if factor > DEARER and least_ratio(self.trials[place], self.trials[best]) > FREE:
                found.append((batch, self.batches[best], factor))
        return found

    @property
    def rate_share(self) -> float:
        """FLOP rate of the fastest batch ÷ that of the limits."""
        rates = [self.work.flops(b) / s for b, s in zip(self.batches, self.seconds, strict=True)]
        return max(rates) / self.known_limits.flop_rate

    @property
    def exponent(self) -> float:
        """Slope between the first and the last batch on log-log axes: 1 is proportional."""
        return math.log(self.seconds[-1] / self.seconds[0]) / math.log(self.batches[-1] / self.batches[0])

    def __getitem__(self, batch: int) -> float:
        """Median seconds at a batch that was measured."""
        return float(self.seconds[self.batches.index(batch)])

    def at(self, batch: int) -> float | None:
        """Median seconds at a batch, None where it was not measured."""
        return self[batch] if batch in self.batches else None


@dataclass(frozen=True)
class Reached:
    """A rate of a case that exceeds the ceiling for it. `what`: "FLOP rate" or "bandwidth"."""

    what: str
    value: float  # FLOP/s or bytes/s
    work: Work
    batch: int
    working_set: float  # bytes


class Study:
    """The record, read for reports."""

    def __init__(self, record: Record) -> None:
        self.environment = record.environment
        self.settings = record.settings
        self.cells = record.cells
        self.checks = record.checks
        self.place: dict[str, Any] = record.environment["place"]
        self.works = [Work.restore(stored) for stored in record.environment["works"].values()]
        rows = record.rows[record.rows["kind"].isin(("latency", "device"))]
        self.groups: dict[tuple[Any, ...], pd.DataFrame] = dict(
            iter(rows.groupby(["case", "dtype", "backend", "kind"]))
        )
        self.reached = self.reached_limits()
        self.bandwidths = bandwidths(
            record.environment["ceilings"],
            self.place["device"],
            [(limit.working_set, limit.value) for limit in self.reached if limit.what == "bandwidth"],
        )
        self.curves = [
            self.curve(work, backend, kind)
            for work in self.works
            for backend in ("torch", "torch-graph")
            for kind in ("latency", "device")
            if (work.name, work.dtype, backend, kind) in self.groups
        ]

    @property
    def on_gpu(self) -> bool:
        """Whether the cases ran on a GPU."""
        return self.place["device"] != "cpu"

    def curve(self, work: Work, backend: str, kind: str) -> Curve:
        """The curve of a work whose rows are there.

        Batches too slow for the device's clock have their wall time in a curve of device times: they last
        milliseconds, the call microseconds.
        """
        group = self.groups[work.name, work.dtype, backend, kind]
        whole = self.groups[work.name, work.dtype, backend, "latency"]
        by_batch = {batch: rows for rows_of in (whole, group) for batch, rows in batches_of(rows_of)}
        batches = sorted(by_batch)
        return Curve(
            work=work,
            backend=backend,
            kind=kind,
            target=str(group["target"].iloc[0]),
            batches=batches,
            trials=[by_batch[batch]["latency_ms"].to_numpy() / 1e3 for batch in batches],
            limits=self.limits(backend, kind, work.dtype),
        )

    def reached_limits(self) -> list["Reached"]:
        """What the MLPs reached beyond the ceilings, measured before them: a limit that is exceeded is none.

        Per dtype the highest FLOP rate, and the bandwidths at which a single row read the weights.
        """
        found = []
        ceilings, device = self.environment["ceilings"], self.place["device"]
        copies = bandwidths(ceilings, device)
        best: dict[str, Reached] = {}
        for (case, dtype, _, _), group in self.groups.items():
            work = next((w for w in self.works if (w.name, w.dtype, w.kind) == (case, dtype, "mlp")), None)
            if work is None or work.family == "floor":
                continue
            for batch, rows in batches_of(group):
                seconds = rows["latency_ms"].median() / 1e3
                rate = work.flops(batch) / seconds
                if rate > max(
                    flop_rate(ceilings, device, dtype) or math.inf, getattr(best.get(dtype), "value", 0)
                ):
                    best[dtype] = Reached("FLOP rate", rate, work, batch, work.bytes(batch))
                if batch == 1 and copies:
                    read = work.bytes(1) / seconds
                    if read > Limits(1.0, copies).bandwidth_at(work.bytes(1)):
                        found.append(Reached("bandwidth", read, work, 1, work.bytes(1)))
        return [*best.values(), *found]

    def flop_rate(self, dtype: str) -> float | None:
        """FLOP/s of the largest matrix product of the ceilings, or what an MLP reached beyond it; None where
        it was not measured.
        """
        beyond = [r.value for r in self.reached if r.what == "FLOP rate" and r.work.dtype == dtype]
        return max(beyond, default=flop_rate(self.environment["ceilings"], self.place["device"], dtype))

    def limits(self, backend: str, kind: str, dtype: str) -> Limits | None:
        """The model's constants for a backend and a clock: ceilings, and call and launch from the floor
        cases.
        """
        rate = self.flop_rate(dtype)
        floors = [
            (sum(layer.launches for layer in work.layers(1)), self.groups[key]["latency_ms"].median() / 1e3)
            for work in self.works
            if work.family == "floor" and (key := (work.name, dtype, backend, kind)) in self.groups
        ]
        if rate is None or not self.bandwidths or not floors:
            return None
        call, launch = affine([count for count, _ in floors], [seconds for _, seconds in floors])
        return Limits(rate, self.bandwidths, call, launch)

    def of(self, family: str, kind: str | None = None, backend: str | None = None) -> list[Curve]:
        """The curves of a family, by kind and backend where they are given."""
        return [
            curve
            for curve in self.curves
            if curve.work.family == family
            and (kind is None or curve.kind == kind)
            and (backend is None or curve.backend == backend)
        ]

    def best(self, family: str) -> list[Curve]:
        """One curve per case: the device time of the graph where there is one, else its wall time, else
        eager.
        """
        found: dict[tuple[str, str], Curve] = {}
        order = {("torch-graph", "device"): 3, ("torch-graph", "latency"): 2, ("torch", "latency"): 1}
        for curve in self.of(family):
            key = (curve.work.name, curve.work.dtype)
            rank = order.get((curve.backend, curve.kind), 0)
            if rank and (key not in found or rank > order[found[key].backend, found[key].kind]):
                found[key] = curve
        return list(found.values())

    def ridge(self, curve: Curve, batch: int = 1) -> float:
        """B* of a curve's dtype with the bandwidth at its working set; NaN without limits."""
        if curve.limits is None:
            return math.nan
        bandwidth = curve.limits.bandwidth_at(curve.work.bytes(batch))
        return ridge_batch(curve.limits.flop_rate, bandwidth, BYTES[curve.work.dtype])

    @cached_property
    def rows_paid(self) -> dict[str, tuple[float, int]]:
        """The term that the model lacks, per dtype: (rows, width at which they were measured).

        A product of a few rows and a weight matrix may take as long as one of many, because the routine works
        in tiles of rows, or copies the weights into another order first. At the widest MLP that reaches the
        full rate it is measured as the rows whose arithmetic at the full rate lasts as long as the
        batches from 2 up to the ridge (median).
        """
        found = {}
        for dtype in {work.dtype for work in self.works}:
            curves = [c for c in self.best("mlp") if c.work.dtype == dtype and c.predictions]
            curves = [c for c in curves if c.predictions[0].bound == "memory" and c.rate_share >= FULL_RATE]
            for curve in sorted(curves, key=lambda c: c.work.sizes["width"]):
                per_row = curve.work.flops(1) / curve.known_limits.flop_rate
                ridge = self.ridge(curve)
                rows = [
                    seconds / per_row
                    for batch, seconds in zip(curve.batches, curve.seconds, strict=True)
                    if 2 <= batch <= ridge
                ]
                if len(rows) >= 2:
                    found[dtype] = (float(np.median(rows)), curve.work.sizes["width"])
        return found

    @cached_property
    def shortest(self) -> dict[str, tuple[float, int]]:
        """The other term that the model lacks, per dtype: (seconds, width at which they were measured).

        The kernel of a matrix product takes its time however small the matrices are, more than that of the
        floor cases. It is measured at the narrowest MLP that the model has bound by launches, over the
        batches from 2 up that it has so bound (median), as what the layers that are no products leave of
        the time; only where it is longer than a launch by a quarter.
        """
        found = {}
        for dtype in {work.dtype for work in self.works}:
            curves = [c for c in self.best("mlp") if c.work.dtype == dtype and c.predictions]
            curves = [c for c in curves if c.predictions[0].bound == "launch" and c.known_limits.launch_s > 0]
            if not curves:
                continue
            curve = min(curves, key=lambda c: c.work.sizes["width"])
            limits, layers = curve.known_limits, curve.work.layers(1)
            products = [layer for layer in layers if layer.flops]
            others = limits.call_s + limits.launch_s * (len(layers) - len(products))
            cells = zip(curve.batches, curve.seconds, curve.predictions, strict=True)
            times = [
                (seconds - others) / len(products)
                for batch, seconds, model in cells
                if batch >= 2 and model.bound == "launch"
            ]
            if len(times) >= 2 and np.median(times) > 1.25 * limits.launch_s:
                found[dtype] = (float(np.median(times)), curve.work.sizes["width"])
        return found

    def measured_terms(self, dtype: str) -> tuple[int, ...]:
        """The widths at which the missing terms of a dtype were measured."""
        terms = (self.rows_paid, self.shortest)
        return tuple(term[dtype][1] for term in terms if dtype in term)

    def corrected_knee(self, curve: Curve) -> Knee | None:
        """The predicted knee if every product of two rows or more pays for `rows_paid` and lasts at least
        `shortest`; None without either.
        """
        if not self.measured_terms(curve.work.dtype) or not curve.predictions or len(curve.batches) < 4:
            return None
        rows, _ = self.rows_paid.get(curve.work.dtype, (0.0, 0))
        shortest, _ = self.shortest.get(curve.work.dtype, (0.0, 0))
        limits = curve.known_limits
        launches = shortest / limits.launch_s if shortest else 0.0
        seconds = []
        for batch in curve.batches:
            layers = curve.work.layers(batch)
            if batch > 1:
                layers = [
                    replace(
                        layer,
                        flops=layer.flops * max(1.0, rows / batch),
                        launches=max(layer.launches, launches),
                    )
                    if layer.flops
                    else layer
                    for layer in layers
                ]
            seconds.append(predict(layers, limits).total_s)
        return fit(curve.batches, seconds)

    def speedup(self, case: str, backend: str, baseline: str, dtype: str = "float32") -> Comparison | None:
        """How many times faster a way is at batch 1 by the wall; None where one has no rows."""
        groups = [self.groups.get((case, dtype, way, "latency")) for way in (backend, baseline)]
        samples = [sample(group, batch_size=1) for group in groups if group is not None]
        new, old = samples if len(samples) == 2 else (None, None)
        return None if new is None or old is None else speedup(new, old)

    def median(self, case: str, dtype: str, backend: str, kind: str, batch: int) -> float | None:
        """Median seconds of one cell, None where it has no rows."""
        group = self.groups.get((case, dtype, backend, kind))
        if group is None or not (chosen := group["batch_size"] == batch).any():
            return None
        return float(group.loc[chosen, "latency_ms"].median()) / 1e3


def least_ratio(slow: np.ndarray, fast: np.ndarray, draws: int = 400) -> float:
    """Lower end of the 90 % interval of the ratio of two medians, by a bootstrap over the trials of both."""
    generator = np.random.default_rng(0)
    medians = [np.median(generator.choice(side, (draws, len(side))), axis=1) for side in (slow, fast)]
    return float(np.percentile(medians[0] / medians[1], 5))


def batches_of(rows: pd.DataFrame) -> list[tuple[int, pd.DataFrame]]:
    """The rows of each batch size, rising."""
    return [(batch, rows[rows["batch_size"] == batch]) for batch in sorted(map(int, set(rows["batch_size"])))]


def bandwidths(
    ceilings: list[dict[str, Any]], device: str, reached: Sequence[tuple[float, float]] = ()
) -> tuple[tuple[float, float], ...]:
    """(working set in bytes, bytes/s) on a device, sizes rising, never rising with the size.

    A small copy on a GPU is paced by its launches, and a cache is no slower than what lies behind it: so a
    size gets the best rate seen at it or at any larger one.
    """
    found: dict[float, float] = {}
    for entry in ceilings:
        if entry["name"] == "copy" and entry.get("value") and entry["target"] == device:
            size = float(entry["bytes"])
            found[size] = max(found.get(size, 0.0), entry["value"] * 1e9)
    for size, rate in reached:
        found[size] = max(found.get(size, 0.0), rate)
    sizes = sorted(found)
    best = np.maximum.accumulate([found[size] for size in reversed(sizes)])[::-1]
    return tuple((size, float(rate)) for size, rate in zip(sizes, best, strict=True))


def flop_rate(ceilings: list[dict[str, Any]], device: str, dtype: str) -> float | None:
    """FLOP/s of the fastest large matrix product on a device, None where none was measured."""
    found = [
        entry.get("best", entry["value"]) * 1e9
        for entry in ceilings
        if entry["name"] == "fma"
        and entry.get("value")
        and entry["target"] == device
        and entry["dtype"] == dtype
    ]
    return max(found, default=None)


@dataclass(frozen=True)
class Missing:
    """Why a measured knee lies elsewhere than the predicted one, as two measured factors.

    The knee is flat ÷ rise, so measured over predicted knee is `flat` ÷ `rise`.
    """

    flat: float  # measured ÷ predicted latency of the flat piece
    rise: float  # measured ÷ predicted latency per item of the rising piece


def missing(curve: Curve) -> Missing | None:
    """The two factors, None unless both curves show a knee."""
    if curve.agreement is None:
        return None
    measured, model = present(curve.knee), present(curve.predicted_knee)
    return Missing(measured.flat / model.flat, measured.rise / model.rise)
