"""Questions to a record of this study: cells, samples, ratios. No framework."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness.record import Record
from harness.statistics import Comparison, Sample, sample, speedup, summarise


@dataclass(frozen=True)
class View:
    """A record, asked by case and way."""

    record: Record

    @property
    def device(self) -> str:
        """The device of the run: cpu, cuda or mps."""
        return self.record.environment["device"]

    @property
    def findings(self) -> dict[str, Any]:
        """What was found out besides times."""
        return self.record.environment["findings"]

    def cells(self, **labels: Any) -> list[dict[str, Any]]:
        """Cells whose entries equal `labels`, in order."""
        return [c for c in self.record.cells if all(c.get(name) == value for name, value in labels.items())]

    def cell(self, case: str, backend: str, dtype: str | None = None) -> dict[str, Any] | None:
        """The cell of a way, if it ran here; of the first dtype unless one is named."""
        found = [c for c in self.cells(case=case, backend=backend) if dtype in (None, c["dtype"])]
        return next((c for c in found if "observed" in c), None)

    def pair(
        self, case: str, first: str, second: str, dtype: str | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The cells of two ways of a case; None unless both ran here."""
        one, other = self.cell(case, first, dtype), self.cell(case, second, dtype)
        return None if one is None or other is None else (one, other)

    def cases(self, experiment: int) -> list[tuple[str, str]]:
        """(case, dtype) of an experiment, in order."""
        return list(dict.fromkeys((c["case"], c["dtype"]) for c in self.cells(experiment=experiment)))

    def case_names(self, test: Callable[[str], bool]) -> list[str]:
        """Names of cases that pass a test, in order."""
        return [name for name in dict.fromkeys(c["case"] for c in self.record.cells) if test(name)]

    def sample(self, cell: dict[str, Any], kind: str) -> Sample | None:
        """The trials of a cell by one clock; None without any."""
        labels = {name: cell[name] for name in ("case", "backend", "batch_size", "dtype")}
        return sample(self.record.rows, kind=kind, **labels)

    def p50(self, cell: dict[str, Any], kind: str = "latency") -> float | None:
        """The median in ms."""
        found = self.sample(cell, kind)
        return found.p50 if found else None

    def cv(self, cell: dict[str, Any]) -> float | None:
        """Coefficient of variation of the wall times, percent."""
        found = self.sample(cell, "latency")
        return summarise(found.latency_ms).cv_percent if found else None

    def ratio(
        self, case: str, backend: str, baseline: str, dtype: str | None = None, kind: str = "latency"
    ) -> Comparison | None:
        """How many times faster a way is than another of the same case; None where one did not run."""
        cells = self.pair(case, backend, baseline, dtype)
        if cells is None:
            return None
        new, old = (self.sample(cell, kind) for cell in cells)
        return None if new is None or old is None else speedup(new, old)

    def gain(
        self, case: str, backend: str, baseline: str, dtype: str | None = None
    ) -> tuple[Comparison, str] | None:
        """`ratio` by the clock that tells kernels apart, and that clock.

        The device's where both ways have its times, else the wall's: a GPU has none for CPU cases, and calls
        that last long leave no time for it.
        """
        for kind in ("device", "latency"):
            found = self.ratio(case, backend, baseline, dtype, kind)
            if found is not None:
                return found, kind
        return None
