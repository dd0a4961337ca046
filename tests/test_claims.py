"""Claims: what a text says of a run is recomputed from the run, and nothing measured goes unmarked."""

import gzip
import json

import pytest

from harness import claims
from harness.cli import Fault
from harness.record import Record, rows_from, save

SEEDS = [
    {"accuracy": 0.99612, "recipe": "best"},
    {"accuracy": 0.99700, "recipe": "best"},
    {"recipe": "default"},
]
TRIED = [{"us": us, "tiling": {"run": run}} for us, run in ((5.0, 1), (4.0, 1), (2.5, 7), (2.0, 14))]
TRIED.append({"tiling": {"run": 7}})  # refused, so without a time


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A repository with one run: `fast` takes 2 ms and `slow` 5 ms at batch 4, six rounds of three trials."""
    rows = []
    for round_ in range(6):
        for backend, latency in (("fast", 2.0), ("slow", 5.0)):
            for trial in range(3):
                row = {"study": "mnist", "case": "network", "backend": backend, "target": "cpu"}
                row |= {"batch_size": 4, "dtype": "float32", "kind": "latency", "round": round_}
                row |= {"trial": 3 * round_ + trial, "sequence": len(rows), "start_s": 0.1 * len(rows)}
                rows.append(row | {"latency_ms": latency + 0.001 * trial})
    save(Record(rows_from(rows)), tmp_path / "run.npz")
    (tmp_path / "facts.json").write_text(json.dumps({"seeds": SEEDS}))
    (tmp_path / "facts.json.gz").write_bytes(
        gzip.compress(json.dumps({"some chain": {"us": 17.94}, "tried": TRIED}).encode())
    )
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    claims._record.cache_clear()
    claims._json.cache_clear()
    yield tmp_path
    claims._record.cache_clear()
    claims._json.cache_clear()


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("time run.npz fast 4", "2.00 ms"),
        ("speedup run.npz fast slow 4", "2.50×"),
        ("verdict run.npz slow fast 4", "0.400× (0.400–0.400: slower)"),
        ("json facts.json seeds.0.accuracy {:.2%}", "99.61%"),
        ("json facts.json.gz some_chain.us {:.1f}_µs", "17.9 µs"),
        ("count facts.json seeds recipe=best", "2"),
        ("mean facts.json seeds accuracy {:.2%} recipe=best", "99.66%"),
        ("gain facts.json.gz us tried?tiling.run=1 tried?tiling.run=7", "1.60×"),
        ("gain facts.json.gz us tried?tiling.run=1 tried", "2.00×"),
        ("given the article", "2.89×"),
    ],
)
def test_a_true_claim_passes_and_a_changed_digit_fails(root, query, text):
    assert claims.check(f"It is <!--= {query} -->{text}<!--/-->, as seen.") == []
    if not query.startswith("given"):
        changed = "7" + text[1:]
        (mismatch,) = claims.check(f"Line\nIt is <!--= {query} -->{changed}<!--/-->.")
        assert mismatch.line == 2 and mismatch.expected == text
        assert claims.update(f"<!--= {query} -->{changed}<!--/-->") == f"<!--= {query} -->{text}<!--/-->"


@pytest.mark.parametrize("text", ["12 ms", "1.8×", "40 %", "3 µs", "84 GFLOP/s", "4.2 TB/s"])
def test_a_measured_number_outside_a_claim_is_found(text):
    (mismatch,) = claims.check(f"a\nb {text} c")
    assert mismatch.line == 2 and text.split()[0] in mismatch.text


def test_code_links_and_plain_numbers_are_left_alone():
    assert claims.check("`12 ms` and [x](a/1.8×.png), batch 128 of 16\n```\n40 %\n```\n") == []


@pytest.mark.parametrize(
    "query",
    [
        "time run.npz nobody 4",
        "time missing.npz fast 4",
        "time run.npz fast",
        "wish run.npz fast 4",
        "given",
        "json facts.json seeds.7.accuracy {}",
        "mean facts.json seeds accuracy {} recipe=none",
        "time run.npz fast 4 latency_ms=3",
        "gain facts.json.gz us tried?tiling.run=1 tried?tiling.run=2",
    ],
)
def test_a_query_that_cannot_be_answered_is_a_fault(root, query):
    with pytest.raises(Fault):
        claims.evaluate(query, "1 ms")


def test_the_repository_s_own_texts_hold():
    assert claims.documents(), "README.md is missing"
    for path in claims.documents():
        assert [str(mismatch) for mismatch in claims.check(path.read_text())] == []
