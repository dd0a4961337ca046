"""Markdown from data: tables, numbers, lists in words. Knows nothing of benchmarks; every study uses it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

import numpy as np

from harness.statistics import Comparison

DASH = "–"


def markdown_table(rows: Sequence[Mapping[str, Any]], left: Iterable[str] = ()) -> str:
    """A Markdown table of dicts; columns in the order of first appearance; None and absent values as dashes.

    Numbers and short figures align right, except the first column and those named in `left`. A column that
    is empty in every row is left out. Returns "" for no rows.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [c for c in names if any(row.get(c) not in (None, "", DASH) for row in rows)]
    if not columns:
        return ""
    left = {columns[0], *left}
    lines = ["| " + " | ".join(columns) + " |"]
    lines.append("|" + "|".join("---" if name in left else "---:" for name in columns) + "|")
    for row in rows:
        cells = [DASH if row.get(name) is None else str(row[name]) for name in columns]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def significant(value: float | None, digits: int = 3) -> str | None:
    """A number with so many significant digits, at most two decimals lost to trailing zeros: 0.0123, 12.3."""
    if value is None or not np.isfinite(value):
        return None
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - int(np.floor(np.log10(abs(value)))))
    return f"{value:,.{decimals}f}"


def milliseconds(value: float) -> str:
    """A time in ms with three significant digits: 0.0123, 1.23, 123, 1,234."""
    if value >= 100:
        return f"{value:,.0f}"
    digits = 2 if value == 0 else max(0, 2 - int(np.floor(np.log10(abs(value)))))
    return f"{value:.{digits}f}"


@overload
def percent(value: float) -> str: ...
@overload
def percent(value: None) -> None: ...
@overload
def percent(value: float | None) -> str | None: ...
def percent(value: float | None) -> str | None:
    """A percentage without decimals from 10 on, with one below, with two below 1; 0 % for zero."""
    if value is None:
        return None
    if value == 0:
        return "0 %"
    size = abs(value)
    return f"{value:.0f} %" if size >= 9.95 else f"{value:.1f} %" if size >= 0.95 else f"{value:.2f} %"


@overload
def ratio(value: float) -> str: ...
@overload
def ratio(value: None) -> None: ...
@overload
def ratio(value: float | None) -> str | None: ...
def ratio(value: float | None) -> str | None:
    """A ratio: three significant digits below 0.1, two decimals below 10, one below 100."""
    if value is None:
        return None
    if abs(value) < 0.0995:
        return significant(value)
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}" if abs(value) < 99.95 else f"{value:,.0f}"


def interval(comparison: Comparison) -> str:
    """A ratio with its interval, 1.31 [1.27, 1.36], or with "no interval"."""
    if comparison.low is None:
        return f"{ratio(comparison.ratio)} (no interval)"
    return f"{ratio(comparison.ratio)} [{ratio(comparison.low)}, {ratio(comparison.high)}]"


def verdict_cell(comparison: Comparison | None) -> str | None:
    """A table cell, 1.31 [1.27, 1.36] faster: no ratio without interval and verdict."""
    return None if comparison is None else f"{interval(comparison)} {comparison.verdict}"


def words(items: Sequence[Any], last: str = "and") -> str:
    """A list in words: 1, 2 and 3."""
    items = [str(item) for item in items]
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} {last} {items[-1]}" if items else ""


def count(number: int, thing: str, things: str = "") -> str:
    """A number of things: 1 cell, 3 cells."""
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


def span(low: float, high: float) -> str:
    """Two ratios as a span: 1.2–3.4, or 1.2 where they look the same."""
    return ratio(low) if ratio(low) == ratio(high) else f"{ratio(low)}–{ratio(high)}"


def quantity(value: float, unit: str) -> str:
    """A value with three digits and a decimal prefix before its unit: 8.30 MB."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{significant(value / size)} {prefix}{unit}"
    return f"{significant(value)} {unit}"
