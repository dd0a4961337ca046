"""Numbers in prose that come from a run: marked in the Markdown, recomputed from the run's files.

A claim is a pair of HTML comments, invisible when rendered, around the text that a query gives:

    at batch 128 it takes <!--= time output/cpu/per_trial.npz mlx-block 128 -->14.1 ms<!--/-->

    time FILE BACKEND BATCH [column=value …]            P50 of a cell; kind=latency unless given
    speedup FILE BACKEND BASELINE BATCH [column=value …]  ratio of two cells of one run: 1.83×
    verdict FILE BACKEND BASELINE BATCH [column=value …]  the same with its interval and its verdict in words
    json FILE KEY.KEY… FORMAT                           an entry of a .json or .json.gz file, by str.format
    count FILE KEY.KEY… [field=value …]                 entries of a JSON list whose fields read so
    mean FILE KEY.KEY… FIELD FORMAT [field=value …]     mean of a field over them
    gain FILE FIELD BEFORE AFTER                        least FIELD of some entries ÷ that of others: 1.46×
    given REASON …                                      a number that no run produced, and where it comes from

FILE is relative to the repository; BEFORE and AFTER read KEY.KEY…?field=value&field=value, and a field may be
dotted too. A measured-looking number outside a claim is a fault too.
"""

import functools
import gzip
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import statistics
from harness.cli import Fault
from harness.paths import ROOT
from harness.record import COLUMNS, Record, load

CLAIM = re.compile(r"<!--= (?P<query>[^\n]+?) -->(?P<text>.*?)<!--/-->")
# What a reader would take for a measured figure: a number with the unit of a time, a rate or a ratio.
MEASURED = re.compile(r"\d[\d.,]*\s?(?:×(?!\s?\d)|%|ms\b|µs\b|[GT]FLOP/s|[GT]B/s|images/s|mJ\b)")
CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)\n]*\)", re.DOTALL)  # code, and the targets of links


@dataclass(frozen=True)
class Mismatch:
    """A claim that its query does not give, or a measured number without one (`expected` is empty)."""

    line: int
    text: str
    query: str
    expected: str

    def __str__(self) -> str:
        if not self.query:
            return f"line {self.line}: {self.text!r} looks measured and has no claim around it"
        return f"line {self.line}: says {self.text!r}, the run says {self.expected!r} ({self.query})"


def check(markdown: str) -> list[Mismatch]:
    """Every claim of a text that does not hold, and every measured-looking number outside claims and code."""
    found = []
    for match in CLAIM.finditer(markdown):
        expected = evaluate(match["query"], match["text"])
        if match["text"] != expected:
            found.append(Mismatch(_line(markdown, match.start()), match["text"], match["query"], expected))
    bare = CLAIM.sub(lambda m: _blank(m[0]), CODE.sub(lambda m: _blank(m[0]), markdown))
    for match in MEASURED.finditer(bare):
        found.append(Mismatch(_line(markdown, match.start()), match[0], "", ""))
    return found


def update(markdown: str) -> str:
    """The text with every claim set to what its query gives."""

    def current(match: re.Match) -> str:
        return f"<!--= {match['query']} -->{evaluate(match['query'], match['text'])}<!--/-->"

    return CLAIM.sub(current, markdown)


def evaluate(query: str, text: str = "") -> str:
    """What a query gives; `text` is what stands there now. Raises Fault where it cannot say."""
    kind, *words = query.split()
    if kind == "given":
        if not words:
            raise Fault(f"the claim {text!r} is given without a reason; say where the number comes from.")
        return text
    if kind not in QUERIES:
        raise Fault(f"the claim {query!r} begins with {kind!r}; known are {', '.join(QUERIES)} and given.")
    try:
        return QUERIES[kind](*words)
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise Fault(f"the claim {query!r} cannot be computed: {error}.") from error


def time(file: str, backend: str, batch: str, *labels: str) -> str:
    """P50 of a cell, with three significant digits, in ms or, below 0.1 ms, in µs."""
    p50 = _sample(file, backend, batch, labels).p50
    return f"{_digits(p50 * 1e3)} µs" if p50 < 0.1 else f"{_digits(p50)} ms"


def speedup(file: str, backend: str, baseline: str, batch: str, *labels: str) -> str:
    """How many times faster `backend` is than `baseline`."""
    return f"{_digits(_comparison(file, backend, baseline, batch, labels).ratio)}×"


def verdict(file: str, backend: str, baseline: str, batch: str, *labels: str) -> str:
    """The ratio with its interval and its verdict."""
    found = _comparison(file, backend, baseline, batch, labels)
    if found.low is None or found.high is None:
        return f"{_digits(found.ratio)}× (too few rounds for an interval: {found.verdict})"
    return f"{_digits(found.ratio)}× ({_digits(found.low)}–{_digits(found.high)}: {found.verdict})"


def json_entry(file: str, path: str, form: str) -> str:
    """The entry at dotted `path`, list positions as numbers, formatted by `form` such as {:.2f}_%."""
    return form.replace("_", " ").format(_entry(file, path))


def count(file: str, path: str, *filters: str) -> str:
    """How many entries of the list at `path` there are, of those whose fields read as the filters say."""
    return str(len(_entries(file, path, filters)))


def mean(file: str, path: str, field: str, form: str, *filters: str) -> str:
    """Mean of `field` over those entries."""
    values = [entry[field] for entry in _entries(file, path, filters)]
    if not values:
        raise ValueError("no entry fits")
    return form.replace("_", " ").format(sum(values) / len(values))


def gain(file: str, field: str, before: str, after: str) -> str:
    """The least `field` of the entries that `before` selects over the least of `after`."""
    least = []
    for selector in (before, after):
        path, _, filters = selector.partition("?")
        entries = _entries(file, path, tuple(filters.split("&")) if filters else ())
        values = [entry[field] for entry in entries if field in entry]
        if not values:
            raise ValueError(f"no entry of {selector} has {field}")
        least.append(min(values))
    return f"{_digits(least[0] / least[1])}×"


QUERIES: dict[str, Callable[..., str]] = {
    "time": time,
    "speedup": speedup,
    "verdict": verdict,
    "json": json_entry,
    "count": count,
    "mean": mean,
    "gain": gain,
}


def _entry(file: str, path: str) -> Any:
    """The entry of a JSON file at dotted `path`, in which _ may stand for a space of a key."""
    return _at(_json(file), path)


def _at(value: Any, path: str) -> Any:
    """What lies at dotted `path` of a JSON value."""
    for key in path.split("."):
        if isinstance(value, list):
            value = value[int(key)]
        else:
            value = value[key if key in value else key.replace("_", " ")]
    return value


def _entries(file: str, path: str, filters: tuple[str, ...]) -> list[dict]:
    """The entries of the list at `path` whose fields, as text, are what the filters field=value say."""
    wanted = [one.partition("=") for one in filters]
    return [entry for entry in _entry(file, path) if all(str(_at(entry, k)) == v for k, _, v in wanted)]


def _comparison(
    file: str, backend: str, baseline: str, batch: str, labels: tuple[str, ...]
) -> statistics.Comparison:
    return statistics.speedup(_sample(file, backend, batch, labels), _sample(file, baseline, batch, labels))


def _sample(file: str, backend: str, batch: str, labels: tuple[str, ...]) -> statistics.Sample:
    chosen: dict[str, object] = {"kind": "latency", "backend": backend, "batch_size": int(batch)}
    for label in labels:
        column, _, value = label.partition("=")
        if column not in COLUMNS or COLUMNS[column] is not str:
            raise Fault(f"{label!r} is no text column of a record with a value.")
        chosen[column] = value.replace("_", " ") if column == "case" else value
    rows = _record(file).rows
    found = statistics.sample(rows, **chosen)
    if found is None:
        raise Fault(f"{file} has no rows with {chosen}.")
    for column in ("study", "case", "dtype"):
        values = set(rows[(rows["backend"] == backend) & (rows["batch_size"] == int(batch))][column])
        if column not in chosen and len(values) > 1:
            raise Fault(f"{file} has several {column}s for {backend} at batch {batch}; say which.")
    return found


@functools.cache
def _record(file: str) -> Record:
    return load(ROOT / file)


@functools.cache
def _json(file: str) -> dict:
    path = ROOT / file
    if not path.is_file():
        raise Fault(f"{file} does not exist.")
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)


def _digits(value: float) -> str:
    """Three significant digits without an exponent."""
    text = f"{value:#.3g}"
    return f"{value:.0f}" if "e" in text else text.rstrip(".")


def _blank(text: str) -> str:
    """Spaces in place of `text`, line breaks kept, so that positions stay what they were."""
    return re.sub(r"[^\n]", " ", text)


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def documents() -> list[Path]:
    """The texts whose numbers are checked."""
    return [path for path in (ROOT / "README.md", ROOT / "conclusions" / "README.md") if path.is_file()]
