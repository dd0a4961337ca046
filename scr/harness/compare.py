"""Compare runs: ratio, interval and verdict per cell, and where the verdicts of two runs disagree."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.analysis import Group, check_record, groups
from harness.cli import Fault
from harness.paths import shown
from harness.present import present
from harness.record import Record, load
from harness.statistics import Comparison, Sample, contradict, cv_percent, speedup
from harness.tables import count, markdown_table, milliseconds, ratio, verdict_cell


@dataclass(frozen=True)
class Change:
    """A cell in two runs. `comparison` says how many times faster it is in the second."""

    study: str
    case: str
    dtype: str
    backend: str
    batch_size: int
    before_ms: float
    after_ms: float
    comparison: Comparison

    @property
    def label(self) -> str:
        """The cell in words."""
        return f"{self.case}, {self.dtype}, {self.backend}, batch {self.batch_size}"

    def regressed(self, percent_: float) -> bool:
        """Whether the second run is slower by more than `percent_`, with its whole interval."""
        limit = 1 / (1 + percent_ / 100)
        high = self.comparison.high
        return self.comparison.ratio < limit if high is None else high < limit


def load_complete(path: Path) -> Record:
    """Load a record for a comparison. Raises Fault for a file that is damaged, foreign or partial."""
    record = load(path)
    try:
        check_record(record)
    except Fault as fault:
        raise Fault(f"{shown(path)} cannot be compared: {fault}") from fault
    if not record.environment.get("complete", True):
        raise Fault(f"{shown(path)} is of an interrupted run and cannot be compared; run it to its end.")
    return record


def paired_groups(first: Record, second: Record) -> list[tuple[Group, Group | None]]:
    """Every group of the first run with the second's of the same study, case and dtype, if there is one."""
    others = {(g.study, g.case, g.dtype): g for g in groups(second)}
    return [(group, others.get((group.study, group.case, group.dtype))) for group in groups(first)]


def paired_cells(first: Record, second: Record) -> Iterator[tuple[Group, str, int, Sample, Sample]]:
    """Every cell that both runs measured: group, backend, batch size and the trials of either run."""
    for group, other in paired_groups(first, second):
        if other is None:
            continue
        for size in group.batch_sizes:
            for backend in group.backends:
                one, two = group.sample(backend, size), other.sample(backend, size)
                if one is not None and two is not None:
                    yield group, backend, size, one, two


def changes(before: Record, after: Record) -> list[Change]:
    """Every cell that both runs measured. Rounds of two runs do not pair."""
    found = []
    for group, backend, size, old, new in paired_cells(before, after):
        key = (group.study, group.case, group.dtype, backend, size)
        found.append(Change(*key, old.p50, new.p50, speedup(new, old, paired=False)))
    return found


def lost_cells(before: Record, after: Record) -> list[str]:
    """Cells of the first run that the second lacks."""
    found = []
    for group, other in paired_groups(before, after):
        for backend in group.backends:
            for size in group.batch_sizes:
                if group.p50(backend, size) is not None and (
                    other is None or other.p50(backend, size) is None
                ):
                    found.append(f"{group.case}, {group.dtype}, {backend}, batch {size}")
    return found


def comparison_text(paths: list[Path], records: list[Record], fail_percent: float | None) -> tuple[str, bool]:
    """The comparison of the first run with each other one as Markdown, and whether anything regressed.

    With `fail_percent`, a cell regresses that is slower by more, and one that is missing: it may have failed.
    """
    first, regressed = records[0], False
    parts = ["# Comparison", _machines(paths, records)]
    for path, record in zip(paths[1:], records[1:], strict=True):
        found = changes(first, record)
        if not found:
            raise Fault(f"{shown(paths[0])} and {shown(path)} have no cell in common.")
        parts.append(f"## {shown(path)} against {shown(paths[0])}")
        parts.append(
            markdown_table(
                [
                    {"case": f"{c.case}, {c.dtype}", "batch": c.batch_size, "backend": c.backend}
                    | {"before ms": milliseconds(c.before_ms), "after ms": milliseconds(c.after_ms)}
                    | {"× before": verdict_cell(c.comparison)}
                    for c in found
                ],
                left=["backend"],
            )
        )
        parts.append(
            "Ratio > 1: the later file is faster. The interval holds the scatter within each run; what "
            "differs from start to start of a process (memory layout, clock, neighbours) comes on top."
        )
        parts.append(_disagreements(first, record))
        lost = lost_cells(first, record)
        parts.append(_listed(f"{count(len(lost), 'cell')} of the first file missing", lost))
        pauses = [r.settings.get("pause") or 0 for r in (first, record)]
        if bool(pauses[0]) != bool(pauses[1]):
            parts.append(pause_verdict(*((first, record) if pauses[1] else (record, first))))
        if fail_percent is not None:
            slow = [c for c in found if c.regressed(fail_percent)]
            regressed = regressed or bool(slow or lost)
            parts.append(_regressions(slow, fail_percent))
    return "\n\n".join(part for part in parts if part) + "\n", regressed


def contradictions(first: Record, second: Record) -> tuple[list[str], int]:
    """Pairs of backends that two runs decide in ways that cannot both be right, and how many were asked."""
    found, asked = [], 0
    for group, other in paired_groups(first, second):
        if other is None:
            continue
        for size in group.batch_sizes:
            here = [b for b in group.backends if group.p50(b, size) and other.p50(b, size)]
            for i, baseline in enumerate(here):
                for backend in here[i + 1 :]:
                    one, two = (present(run.speedup(backend, baseline, size)) for run in (group, other))
                    asked += 1
                    if contradict(one.verdict, two.verdict):
                        found.append(
                            f"{group.case}, {group.dtype}, batch {size}: {backend} against {baseline} is "
                            f"{verdict_cell(one)} in the first, {verdict_cell(two)} in the second"
                        )
    return found, asked


def pause_verdict(continuous: Record, paused: Record) -> str:
    """Whether pauses for cool-down make latencies quieter or faster: does throttling explain the noise?

    Compares coefficients of variation and medians of cells that have 20 trials or more in both runs.
    """
    seconds = paused.settings.get("pause") or 0
    pairs = []
    for *_, hot, cool in paired_cells(continuous, paused):
        if min(len(hot.round), len(cool.round)) >= 20:
            before, after = (present(cv_percent(run.latency_ms)) for run in (hot, cool))
            pairs.append((before, after, speedup(cool, hot, paired=False)))
    if not pairs:
        return "A run with pauses exists, but shares no cell of 20 trials with this one."
    ratios = np.array([cool / hot for hot, cool, _ in pairs if hot])
    quieter = int((ratios < 0.8).sum())
    louder = int((ratios > 1.25).sum())
    compared = [one for _, _, one in pairs]
    faster = sum(one.verdict == "faster" for one in compared)
    slower = sum(one.verdict == "slower" for one in compared)
    hot_drift, cool_drift = (
        sum(cell.get("state") == "drifting" for cell in record.cells) for record in (continuous, paused)
    )
    median = float(np.median(ratios))
    if median < 0.8 and quieter > 2 * louder and faster > slower:
        verdict = "Throttling explains much of the noise here, as the article says."
    elif median > 0.8 and faster <= max(1, len(pairs) // 10):
        verdict = "Throttling does not explain the noise here, contrary to what the article says of its own."
    else:
        verdict = "Whether throttling explains the noise stays open here."
    return (
        f"The article explains its noise by throttling. With a pause of {seconds:g} s before each burst "
        f"the coefficient of variation is {ratio(median)} times that of the continuous run (median over "
        f"{count(len(pairs), 'cell')}): {quieter} quieter by a fifth or more, {louder} noisier by a "
        f"quarter or more. P50 with pauses is faster in {faster} and slower in {slower} of them; "
        f"{hot_drift} cells drifted without pauses, {cool_drift} with. {verdict}"
    )


def _machines(paths: list[Path], records: list[Record]) -> str:
    """Which file is from which machine and when."""
    rows = []
    for path, record in zip(paths, records, strict=True):
        facts = record.environment
        rows.append(
            {
                "file": shown(path),
                "chip": facts["chip"],
                "system": facts["os"],
                "started": facts.get("started"),
            }
            | {"commit": (facts.get("commit") or "")[:12] or None}
            | {"versions": ", ".join(f"{n} {v}" for n, v in facts["versions"].items())}
        )
    text = markdown_table(rows, left=["chip", "system", "versions"])
    chips = {(record.environment["chip"], str(record.environment.get("gpu"))) for record in records}
    if len(chips) > 1:
        text += "\n\nThe runs are from different machines: the ratios compare machines, not code."
    return text


def _disagreements(first: Record, second: Record) -> str:
    """The contradicting verdicts in words."""
    found, asked = contradictions(first, second)
    if not asked:
        return ""
    title = f"Verdicts between backends that contradict each other: {len(found)} of {count(asked, 'pair')}"
    return _listed(title, found) or f"{title}."


def _regressions(slow: list[Change], fail_percent: float) -> str:
    """The cells that got slower than allowed."""
    if not slow:
        return f"No cell is slower by more than {fail_percent:g} %."
    lines = [f"{c.label}: {verdict_cell(c.comparison)}" for c in slow]
    return _listed(f"{count(len(slow), 'cell')} slower by more than {fail_percent:g} %", lines)


def _listed(title: str, lines: list[str]) -> str:
    """A title and a line for each; nothing where there are none."""
    return f"{title}:\n\n" + "\n".join(f"- {line}" for line in lines) if lines else ""
