"""A record, ready for questions: groups of cells, their samples and summaries, comparisons, what is missing.

    for group in groups(record):
        group.summary("mlx", 16).p50
        group.speedup("mlx-fused", "mlx", 16).verdict

A group is everything in a record that may be compared: one study, one case, one dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from harness.cli import Fault
from harness.record import Record
from harness.statistics import Comparison, Sample, Summary, sample, speedup, summarise

REQUIRED_ENVIRONMENT = ("chip", "os", "versions")
REQUIRED_CELL = ("study", "case", "backend", "target", "batch_size", "dtype", "state")

# Baselines in order of preference: what a user would run, and the best that costs no kernel of one's own.
PEERS = ("torch", "onnxruntime")
PLAIN = ("mlx-folded", "mlx-compile", "mlx")
OWN_KERNELS = ("mlx-fused", "mlx-fused-compile", "mlx-block", "mlx-network")

# A call that returns before this share of its time returned before its result was there.
RETURNS_EARLY = 0.5

MISSING_TERM_FROM = 2.0  # times the floor: from here on the report says what the floor leaves out


def check_record(record: Record) -> None:
    """Raise Fault, naming what is missing, unless the record has what every report needs."""
    absent = [name for name in REQUIRED_ENVIRONMENT if name not in record.environment]
    if absent:
        raise Fault(f"the record's environment lacks {', '.join(absent)}; it was not written by a benchmark.")
    absent = sorted({name for cell in record.cells for name in REQUIRED_CELL if name not in cell})
    if absent:
        raise Fault(f"the record's cells lack {', '.join(absent)}; it was not written by a benchmark.")
    if not (record.rows["kind"] == "latency").any():
        raise Fault("the record holds no latency: nothing was measured to the end.")


def machine_name(record: Record) -> str:
    """The GPU's name where backends ran on one, else the chip's."""
    gpu = (record.environment.get("gpu") or {}).get("name")
    on_gpu = any(cell["target"] in ("cuda", "metal", "mps") for cell in record.cells)
    return gpu if gpu and on_gpu else record.environment["chip"]


@dataclass
class Group:
    """The cells of one study, case and dtype."""

    record: Record
    study: str
    case: str
    dtype: str
    _samples: dict[Any, Sample | None] = field(default_factory=dict)
    _ratios: dict[Any, Comparison | None] = field(default_factory=dict)

    @property
    def is_network(self) -> bool:
        """Whether this is the network that the article is about."""
        return (self.study, self.case) == ("mnist", "network")

    @property
    def is_published(self) -> bool:
        """Whether the article's figures, in float32, are of this case."""
        return self.is_network and self.dtype == "float32"

    @cached_property
    def rows(self) -> Any:
        """The group's rows."""
        rows = self.record.rows
        chosen = (rows["study"] == self.study) & (rows["case"] == self.case) & (rows["dtype"] == self.dtype)
        return rows[chosen]

    @cached_property
    def cells(self) -> dict[tuple[str, int], dict[str, Any]]:
        """(backend, batch size) -> what the record says about the cell."""
        return {
            (cell["backend"], cell["batch_size"]): cell
            for cell in self.record.cells
            if (cell["study"], cell["case"], cell["dtype"]) == (self.study, self.case, self.dtype)
        }

    @cached_property
    def backends(self) -> list[str]:
        """Backends with latencies, in the order of the record's cells."""
        measured = set(self.rows.loc[self.rows["kind"] == "latency", "backend"])
        return [
            name for name in dict.fromkeys([n for n, _ in self.cells] + sorted(measured)) if name in measured
        ]

    @cached_property
    def batch_sizes(self) -> list[int]:
        """Batch sizes with latencies, rising."""
        return sorted({int(n) for n in self.rows.loc[self.rows["kind"] == "latency", "batch_size"]})

    def cell(self, backend: str, batch_size: int) -> dict[str, Any]:
        """What the record says about a cell; empty if nothing."""
        return self.cells.get((backend, batch_size), {})

    def sample(self, backend: str, batch_size: int, kind: str = "latency") -> Sample | None:
        """The trials of a cell by one clock; None if there are none."""
        key = (backend, batch_size, kind)
        if key not in self._samples:
            self._samples[key] = sample(self.rows, backend=backend, batch_size=batch_size, kind=kind)
        return self._samples[key]

    def summary(self, backend: str, batch_size: int, kind: str = "latency") -> Summary | None:
        """P50 and the rest of a cell; None if it has no trials."""
        trials = self.sample(backend, batch_size, kind)
        return None if trials is None else summarise(trials.latency_ms)

    def p50(self, backend: str, batch_size: int, kind: str = "latency") -> float | None:
        """The median in ms; None without trials."""
        trials = self.sample(backend, batch_size, kind)
        return None if trials is None else trials.p50

    def medians(self, backend: str) -> dict[int, float]:
        """Batch size -> P50 in ms, rising, where the backend was measured."""
        found = {size: self.p50(backend, size) for size in self.batch_sizes}
        return {size: p50 for size, p50 in found.items() if p50 is not None}

    def speedup(
        self, backend: str, baseline: str | None, batch_size: int, kind: str = "latency"
    ) -> Comparison | None:
        """How many times faster a backend is than a baseline; None where either was not measured."""
        key = (backend, baseline, batch_size, kind)
        if key not in self._ratios:
            ours = self.sample(backend, batch_size, kind)
            theirs = self.sample(baseline, batch_size, kind) if baseline else None
            self._ratios[key] = None if ours is None or theirs is None else speedup(ours, theirs)
        return self._ratios[key]

    def first_of(self, names: tuple[str, ...]) -> str | None:
        """The first of `names` that was measured."""
        return next((name for name in names if name in self.backends), None)

    def fastest(self, batch_size: int, among: tuple[str, ...] | None = None) -> str | None:
        """The backend with the smallest P50 at a batch size."""
        timed = self.ranking(batch_size, self.backends if among is None else among)
        return timed[0] if timed else None

    def ranking(self, batch_size: int, among: Sequence[str]) -> list[str]:
        """The backends of `among` that were measured at a batch size, the fastest first."""
        medians = {name: self.p50(name, batch_size) for name in among if name in self.backends}
        return [name for _, name in sorted((p50, name) for name, p50 in medians.items() if p50 is not None)]

    def throughput(self, backend: str, batch_size: int) -> float | None:
        """Images per second at P50: batch ÷ P50."""
        median = self.p50(backend, batch_size)
        return None if median is None else 1e3 * batch_size / median

    def scaling_percent(self, backend: str, batch_size: int) -> float | None:
        """Throughput at a batch ÷ (throughput at the backend's smallest batch × the ratio of the batches)."""
        here, medians = self.p50(backend, batch_size), self.medians(backend)
        if here is None or len(medians) < 2:
            return None
        return 100 * next(iter(medians.values())) / here

    def cost(self, backend: str, batch_size: int) -> dict[str, Any]:
        """The cost model's figures for a cell; empty if none were stored."""
        return self.cell(backend, batch_size).get("cost") or {}

    def floor_ms(self, backend: str, batch_size: int) -> float | None:
        """The predicted floor in ms."""
        return self.cost(backend, batch_size).get("floor_ms")

    @cached_property
    def straight_lines(self) -> dict[str, tuple[float, float]]:
        """Per backend (ms per forward, ms per image): the line through its medians at two or more batches.

        Least squares of relative errors with both terms held at zero or above.
        """
        found = {}
        for backend in self.backends:
            known = self.medians(backend)
            if len(known) < 2:
                continue
            sizes, medians = np.array(list(known)), np.array(list(known.values()))
            columns = np.stack([1 / medians, sizes / medians], axis=1)
            fixed, slope = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)[0]
            if fixed < 0:
                fixed, slope = 0.0, _alone(columns[:, 1])
            elif slope < 0:
                fixed, slope = _alone(columns[:, 0]), 0.0
            found[backend] = (float(fixed), float(slope))
        return found

    def missing_term(self, backend: str, batch_size: int) -> str | None:
        """What explains a time of more than MISSING_TERM_FROM floors; None where nothing is to explain.

        Looked for in this order: Python's own time before the call returns, where the work is only described
        meanwhile; device time alone above the floor; a part that does not depend on the batch; a part
        proportional to it, that is, kernels slower than the machine. A term must make up half of the gap.
        """
        median, floor = self.p50(backend, batch_size), self.floor_ms(backend, batch_size)
        if median is None or not floor or median <= MISSING_TERM_FROM * floor:
            return None
        gap = median - floor
        cost = self.cost(backend, batch_size)
        python = self.p50(backend, batch_size, "python")
        if python is not None and gap / 2 <= python < RETURNS_EARLY * median:
            return f"Python and graph building, {_ms(python)} ms"
        device = self.p50(backend, batch_size, "device")
        if device is not None:
            if device - floor >= gap / 2:
                return f"kernels slower than the limits: device time alone is {_ms(device)} ms"
            if median - device >= gap / 2:
                return f"launching and waiting: {_ms(median - device)} ms beyond device time"
        if backend not in self.straight_lines:
            return "unexplained"
        fixed, slope = self.straight_lines[backend]
        line = fixed + slope * batch_size
        if not 0.75 * median <= line <= 1.33 * median:
            return "unexplained"
        if fixed >= gap / 2:
            launches = cost.get("launches") or 0
            each = (
                f", {1e3 * fixed / launches:.0f} µs for each of {launches} launches" if launches > 1 else ""
            )
            return f"a fixed cost per forward, {_ms(fixed)} ms{each}"
        if slope * batch_size - floor >= gap / 2 and cost.get("flops"):
            rate = cost["flops"] / batch_size / slope / 1e6
            return f"slow kernels: time grows with the batch, at {_ms(rate)} GFLOP/s"
        return "unexplained"


def groups(record: Record) -> list[Group]:
    """The groups of a record that have latencies, in the order of its cells: rows come in random order."""
    names = ["study", "case", "dtype"]
    rows = record.rows[record.rows["kind"] == "latency"]
    timed = [tuple(map(str, key)) for key in rows[names].drop_duplicates().itertuples(index=False)]
    order = dict.fromkeys(tuple(cell[name] for name in names) for cell in record.cells)
    return [Group(record, *key) for key in dict.fromkeys([*order, *timed]) if key in timed]


def _alone(column: np.ndarray) -> float:
    """The factor of a single column that comes nearest to ones."""
    return float(column.sum() / (column @ column))


def _ms(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
