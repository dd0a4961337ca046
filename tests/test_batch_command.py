"""The command from its arguments to its files, on a few tiny cases measured for real."""

import re
from pathlib import Path

import numpy as np
import pytest

import batching
from batch import study
from batch.cases import Work, all_works
from harness.cli import Fault, parse_settings
from harness.record import load, rows_from, save

TINY = [
    *(Work(f"floor {d}×16", "floor", "mlp", {"width": 16, "depth": d}, (1,)) for d in (2, 8)),
    Work("MLP 8×128", "mlp", "mlp", {"width": 128, "depth": 8}, (1, 4, 16, 64)),
    Work("decoder without attention", "decoder", "decoder", {"width": 128, "context": 0}, (1, 2)),
    Work("decoder, context 32", "decoder", "decoder", {"width": 128, "context": 32}, (1, 2)),
    Work("MLP 8×8192", "mlp", "mlp", {"width": 8192, "depth": 8}, (), trimmed=(1, 2)),
]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(batching, "OUTPUT", tmp_path / "output")
    monkeypatch.setattr(batching, "CONCLUSIONS", tmp_path / "conclusions")
    monkeypatch.setattr(study, "all_works", lambda *_: TINY)
    monkeypatch.setattr(study, "probes", lambda *_: [])  # the ceilings take longer than all of this
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["scr/batching.py", *arguments])
    return batching.main()


def test_tiny_study_from_arguments_to_report(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--tag", "toy", "--device", "cpu", "--trials", "6", "--rounds", "3", "--warmup", "1"]
    assert run(monkeypatch, *arguments, "--budget", "0.05") == 0

    stored = load(folders / "output" / "toy" / "batching" / "per_trial.npz")
    cells = {(cell["case"], cell["batch_size"]): cell for cell in stored.cells}
    assert len(cells) == 2 + 4 + 2 + 2
    assert all(cell["state"] in ("few", "steady", "drifting") for cell in cells.values())
    assert set(stored.rows["kind"]) >= {"latency", "cold"}
    assert "transfer" not in set(stored.rows["kind"])
    assert (stored.rows["study"] == "batching").all()
    assert len(stored.checks) == 2 * len(cells)
    assert all(check["passed"] for check in stored.checks)
    assert stored.environment["network"]["cells"] == []

    report = folders / "conclusions" / "toy" / "batching.md"
    said = report.read_text()
    assert "| MLP 8×128 | float32 |" in said
    assert "MLP 8×8192 (float32)" in said  # left out, and named
    assert "0 failed" in said
    for link in re.findall(r"\]\(([^)]+)\)", said):
        assert (report.parent / link).is_file()
    assert str(folders) not in said

    report.unlink()
    assert run(monkeypatch, "--tag", "toy", "--rebuild") == 0
    assert report.read_text() == said

    # The benchmark runs later: its medians are taken in, once.
    network = folders / "output" / "toy" / "per_trial.npz"
    save(made_up_network(), network)
    assert run(monkeypatch, "--tag", "toy", "--rebuild") == 0
    network.unlink()
    assert run(monkeypatch, "--tag", "toy", "--rebuild") == 0
    assert "| torch | float32 | 2.00 |" in report.read_text()


def made_up_network(**environment: object):
    """A benchmark's record with one cell of three trials."""
    from harness.record import Record

    label = {"study": "mnist", "case": "network", "backend": "torch", "target": "cpu", "batch_size": 1}
    label |= {"dtype": "float32", "kind": "latency", "round": 0, "start_s": 0.0}
    rows = [label | {"trial": i, "sequence": i, "latency_ms": ms} for i, ms in enumerate((1.0, 2.0, 9.0))]
    return Record(rows_from(rows), environment)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--families", "mlp", "cats"], "unknown family 'cats'"),
        (["--tag", "../x"], "names a folder"),
        (["--trials", "0"], "must be positive"),
        (["--limit", "-1"], "must not be negative"),
        (["--rebuild"], "does not exist"),
    ],
)
def test_bad_input_is_one_sentence(
    folders: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    with pytest.raises(Fault, match=message):
        run(monkeypatch, *arguments)
    assert not (folders / "conclusions").exists()


def test_interrupt_keeps_the_old_record(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.measure import Interrupted

    path = folders / "output" / "batching" / "per_trial.npz"
    save(made_up_network(), path)
    old = path.read_bytes()

    def stop(*_: object) -> None:
        raise Interrupted(made_up_network())

    monkeypatch.setattr(batching, "measure", stop)
    assert run(monkeypatch) == 130
    assert path.read_bytes() == old
    assert np.array_equal(load(path.with_suffix(".partial.npz")).rows["latency_ms"], [1.0, 2.0, 9.0])


def test_a_quick_run_replaces_no_full_one(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folders / "output" / "batching" / "per_trial.npz"
    save(made_up_network(), path)
    old = path.read_bytes()
    written = []
    monkeypatch.setattr(batching, "measure", lambda *_: made_up_network(seconds=0.0))
    monkeypatch.setattr(batching, "report", lambda record, plots, markdown: written.append((plots, markdown)))
    assert run(monkeypatch, "--quick") == 0
    assert path.read_bytes() == old
    quick = folders / "output" / "quick" / "batching"
    assert (quick / "per_trial.npz").is_file()
    assert written == [(quick, folders / "conclusions" / "quick" / "batching.md")]


def test_quick_is_smaller_than_the_default() -> None:
    quick, full = (all_works("cpu", 16e9, flag) for flag in (True, False))
    assert max(work.flops(batch) for work in quick for batch in work.batches) < 3e10
    assert sum(len(work.batches) for work in quick) < 0.5 * sum(len(work.batches) for work in full)
    assert {work.family for work in quick} == {work.family for work in full}
    settings = parse_settings(study.Settings, "", ["--quick", "--trials", "40"], batching.QUICK)
    assert (settings.trials, settings.rounds) == (40, 4)
