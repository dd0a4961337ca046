"""Comparing stored runs: changes, contradictions, pauses, exit statuses, refusals by name."""

import subprocess
import sys

import numpy as np
import pytest

from harness.cli import Fault
from harness.compare import changes, contradictions, load_complete, lost_cells, pause_verdict
from harness.paths import ROOT
from harness.record import save
from synthetic_record import make_record

PAIR = {"backends": ("torch", "mlx"), "batch_sizes": (1, 16)}


def run(*arguments):
    """scr/report.py as a user runs it, from another folder."""
    command = [sys.executable, str(ROOT / "scr" / "report.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd="/")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three stored runs: one, the same again, and one in which mlx is 20 % slower."""
    folder = tmp_path_factory.mktemp("runs")
    save(make_record(**PAIR, seed=1), folder / "one.npz")
    save(make_record(**PAIR, seed=2), folder / "same.npz")
    save(make_record(**PAIR, seed=3, scale={"mlx": 1.2}), folder / "slow.npz")
    return folder


def test_changes_are_found_and_equal_runs_are_equal():
    one, same = make_record(**PAIR, seed=1), make_record(**PAIR, seed=2)
    assert {c.comparison.verdict for c in changes(one, same)} <= {"equivalent", "undecided"}
    slow = {c.backend: c for c in changes(one, make_record(**PAIR, seed=3, scale={"mlx": 1.2}))}
    assert slow["mlx"].comparison.verdict == "slower" and slow["torch"].comparison.verdict != "slower"
    assert slow["mlx"].comparison.ratio == pytest.approx(1 / 1.2, rel=0.02)
    assert slow["mlx"].regressed(5) and slow["mlx"].regressed(15)
    assert not slow["mlx"].regressed(25) and not slow["torch"].regressed(5)


def test_a_cell_that_is_gone_is_named():
    one, less = make_record(**PAIR), make_record(backends=("torch",), batch_sizes=(1,))
    assert lost_cells(one, less) == [
        "network, float32, torch, batch 16",
        "network, float32, mlx, batch 1",
        "network, float32, mlx, batch 16",
    ]


def test_contradicting_verdicts_are_listed():
    one = make_record(**PAIR, seed=1)
    assert contradictions(one, make_record(**PAIR, seed=2)) == ([], 2)
    turned = make_record(**PAIR, seed=3, scale={"mlx": 0.01})
    found, asked = contradictions(one, turned)
    assert (len(found), asked) == (2, 2)
    assert "mlx against torch" in found[0] and "slower in the first" in found[0]


def test_the_command_prints_ratio_interval_and_verdict(runs):
    done = run("--compare", runs / "one.npz", runs / "same.npz", "--fail-on-regression", 5)
    assert (done.returncode, done.stderr) == (0, "")
    assert "contradict each other: 0 of 2 pairs" in done.stdout
    assert "No cell is slower by more than 5 %" in done.stdout


def test_a_regression_sets_the_exit_status(runs, tmp_path):
    arguments = ("--compare", runs / "one.npz", runs / "slow.npz")
    done = run(*arguments, "--fail-on-regression", 5, "--to", tmp_path / "comparison.md")
    assert done.returncode == 1
    assert "2 cells slower by more than 5 %" in done.stdout
    assert (tmp_path / "comparison.md").read_text().startswith("# Comparison")
    assert run(*arguments).returncode == 0
    assert run(*arguments, "--fail-on-regression", 40).returncode == 0


def test_a_lost_cell_is_a_regression(runs, tmp_path):
    save(make_record(backends=("torch", "onnxruntime"), batch_sizes=(1, 16), seed=4), tmp_path / "less.npz")
    arguments = ("--compare", runs / "one.npz", tmp_path / "less.npz")
    done = run(*arguments, "--fail-on-regression", 40)
    assert done.returncode == 1 and "No cell is slower by more than 40 %" in done.stdout
    lost = "- network, float32, mlx, batch 1\n- network, float32, mlx, batch 16\n"
    assert f"2 cells of the first file missing:\n\n{lost}" in done.stdout
    assert run(*arguments).returncode == 0
    arguments = ("--compare", tmp_path / "less.npz", tmp_path / "less.npz", "--fail-on-regression", 40)
    assert run(*arguments).returncode == 0, "what only the later file has is no loss"


def test_files_are_refused_by_what_is_wrong(runs, tmp_path):
    whole = (runs / "one.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.npz").write_text("not an archive")
    np.savez(tmp_path / "foreign.npz", weights=np.zeros(3))
    np.savez(tmp_path / "pickled.npz", schema_version=np.array([{"a": 1}], dtype=object))
    with np.load(runs / "one.npz") as file:
        np.savez(tmp_path / "typed.npz", **dict(file) | {"latency_ms": file["backend"]})
    partial = make_record(**PAIR)
    partial.environment["complete"] = False
    save(partial, tmp_path / "part.npz")
    for name, reason in (
        ("cut", "damaged"),
        ("text", "pickled objects or is no .npz|damaged or no .npz"),
        ("foreign", "schema version none"),
        ("pickled", "pickled objects"),
        ("typed", r"wrong type \(latency_ms\)"),
        ("part", "interrupted run"),
        ("absent", "does not exist"),
    ):
        with pytest.raises(Fault, match=reason):
            load_complete(tmp_path / f"{name}.npz")
    done = run("--compare", runs / "one.npz", tmp_path / "part.npz")
    assert done.returncode == 2
    assert done.stderr.startswith("error: part.npz is of an interrupted run") and done.stderr.count("\n") == 1


def test_bad_options_are_one_sentence(runs, tmp_path):
    for arguments in (
        ("--compare", runs / "one.npz"),
        ("--fail-on-regression", 5),
        ("--compare", runs / "one.npz", runs / "same.npz", "--fail-on-regression", -1),
        ("--tag", "no-such-run"),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert done.stderr.startswith("error: ")
    other = make_record(backends=("onnxruntime",), batch_sizes=(128,))
    save(other, tmp_path / "other.npz")
    assert "no cell in common" in run("--compare", runs / "one.npz", tmp_path / "other.npz").stderr


def test_pauses_that_quiet_the_run_support_the_article_and_others_do_not():
    hot = make_record(**PAIR, noise=0.1, scale={"torch": 1.2, "mlx": 1.2})
    cool = make_record(**PAIR, noise=0.005, pause=2.0, seed=9)
    for record in (hot, cool):  # the generator's outliers would hide the noise that is compared
        chosen = record.rows.groupby(["backend", "batch_size", "kind"])["latency_ms"]
        record.rows["latency_ms"] = np.minimum(record.rows["latency_ms"], chosen.transform("median") * 1.2)
    assert "Throttling explains much of the noise here" in pause_verdict(hot, cool)
    alike = pause_verdict(make_record(**PAIR, seed=1), make_record(**PAIR, seed=2, pause=2.0))
    assert "Throttling does not explain the noise here" in alike and "pause of 2 s" in alike
    short = make_record(**PAIR, trials=5, pause=1.0)
    assert "shares no cell of 20 trials" in pause_verdict(make_record(**PAIR), short)


def test_pauses_are_compared_when_one_of_the_runs_paused(runs, tmp_path):
    save(make_record(**PAIR, seed=5, pause=1.0), tmp_path / "paused.npz")
    assert "With a pause of 1 s" in run("--compare", runs / "one.npz", tmp_path / "paused.npz").stdout
    assert "pause of" not in run("--compare", runs / "one.npz", runs / "same.npz").stdout
