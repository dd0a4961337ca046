"""The command: end to end on tiny settings, bad input, tags, Ctrl-C."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import benchmark
from harness import ceilings
from harness import record as records
from harness.cli import Fault, parse_settings
from harness.measure import MeasureSettings

torch = pytest.importorskip("torch")
pytest.importorskip("mlx.core")

SCR = Path(__file__).parents[1] / "scr"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Random weights, saved."""
    import torch_model

    torch.manual_seed(5)
    path = tmp_path_factory.mktemp("weights") / "random.pth"
    torch_model.save_checkpoint(torch_model.DepthwiseMNIST().state_dict(), path)
    return path


@pytest.fixture
def command(tmp_path, monkeypatch, checkpoint):
    """Run the command with its output folders under tmp_path; the report is written elsewhere's way."""

    def run(*arguments, report=None):
        monkeypatch.setattr(benchmark, "OUTPUT", tmp_path / "output")
        monkeypatch.setattr(benchmark, "CONCLUSIONS", tmp_path / "conclusions")
        monkeypatch.setattr(benchmark.ceilings, "probes", lambda *_: ())
        if report:
            monkeypatch.setattr(benchmark, "report", report)
        words = ["benchmark.py", "--checkpoint", str(checkpoint), "--data-dir", str(tmp_path), *arguments]
        monkeypatch.setattr(sys, "argv", words)
        return benchmark.main()

    run.folder = tmp_path
    return run


def measured(**environment):
    """A record of one forward."""
    row = {"study": "mnist", "case": "network", "backend": "torch", "target": "cpu", "batch_size": 1}
    row |= {"dtype": "float32", "kind": "latency", "round": 0, "trial": 0, "sequence": 0}
    return records.Record(records.rows_from([row | {"start_s": 0.0, "latency_ms": 1.0}]), environment)


def tiny(**changes):
    fields = {"batch_sizes": (1, 3), "trials": 4, "warmup": 1, "budget": 2.0, "rounds": 2}
    return benchmark.Settings(**(fields | changes))


TINY = "--no-layers --batch-sizes 1 3 --trials 4 --warmup 1 --budget 2 --rounds 2 --device cpu".split()


def test_end_to_end(command, capsys):
    assert command(*TINY) == 0
    output = command.folder / "output"
    record = records.load(output / "per_trial.npz")
    assert {cell["state"] for cell in record.cells} == {"few"}
    assert {cell["backend"] for cell in record.cells} == {"torch", "mlx", "mlx-fused"}
    assert set(record.rows.study) == {"mnist"} and set(record.rows.case) == {"network"}
    assert {"latency", "transfer", "cold"} <= set(record.rows.kind)
    assert len(record.checks) == 2 * 6 and all(check["passed"] for check in record.checks)
    launches = {cell["backend"]: cell["cost"]["launches"] for cell in record.cells}
    assert launches == {"torch": 37, "mlx": 93, "mlx-fused": 65}
    assert "5,000" in record.environment["inputs"] or "subset" in record.environment["inputs"].lower()
    assert record.settings["checkpoint"] == "random.pth", "no path of this machine is stored"
    assert (command.folder / "conclusions" / "benchmark_result.md").is_file()
    printed = capsys.readouterr()
    assert "wrote per_trial.npz" in printed.out
    header, *lines = printed.out.split("\n\n")[1].splitlines()
    assert header.split() == ["batch", "backend", "P50", "ms", "P95", "ms", "×", "torch"]
    assert len(lines) == 6 and sum(" mlx-fused " in line for line in lines) == 2
    assert [line.split()[0] for line in lines if " torch " in line] == ["1", "3"]
    assert not printed.err, "no progress bar where there is no terminal"


def test_inputs_are_the_first_digits_and_the_reference_is_float64(command, monkeypatch):
    seen = {}

    def fake(cases, settings, environment, probes, begin):
        seen["case"] = cases[0]
        return measured(seconds=0.0, ceilings=[])

    monkeypatch.setattr(benchmark, "run_study", fake)
    assert command(*TINY, report=lambda *_: None) == 0
    case = seen["case"]
    assert case.inputs(3).dtype == np.float32 and case.inputs(3).shape == (3, 1, 28, 28)
    assert np.array_equal(case.inputs(3)[:1], case.inputs(1))
    assert case.inputs(20_000).shape[0] == 20_000, "a batch larger than the set starts again"
    assert case.reference.arguments["dtype"] == "float64" and case.reference.arguments["device"] == "cpu"


@pytest.fixture
def one_forward_measured(monkeypatch):
    """Runs give records of one forward, each of another duration."""
    durations = iter(range(100))
    monkeypatch.setattr(benchmark, "measure", lambda settings: measured(seconds=next(durations)))


def test_a_tag_has_its_own_files_and_a_default_run_leaves_them(command, one_forward_measured):
    output = command.folder / "output"
    assert command("--tag", "m1-pro", report=lambda *_: None) == 0
    before = (output / "m1-pro" / "per_trial.npz").read_bytes()
    assert not (output / "per_trial.npz").exists()
    assert command(report=lambda *_: None) == 0
    assert (output / "m1-pro" / "per_trial.npz").read_bytes() == before
    assert records.load(output / "per_trial.npz").environment["seconds"] == 1


def test_a_quick_run_replaces_no_full_one(command, one_forward_measured):
    output, nothing = command.folder / "output", lambda *_: None
    command(report=nothing)
    before = (output / "per_trial.npz").read_bytes()
    seen = []
    command("--quick", report=lambda record, plots, markdown: seen.append((plots, markdown)))
    assert (output / "per_trial.npz").read_bytes() == before
    assert records.load(output / "quick" / "per_trial.npz").environment["seconds"] == 1
    root = command.folder
    assert seen == [(root / "output/quick/plots", root / "conclusions/quick/benchmark_result.md")]
    command("--quick", "--tag", "box", report=nothing)
    assert records.load(output / "box" / "per_trial.npz").environment["seconds"] == 2
    assert records.load(output / "quick" / "per_trial.npz").environment["seconds"] == 1


def test_the_report_goes_where_the_tag_says(command, one_forward_measured):
    seen = []
    command("--tag", "box", report=lambda record, plots, markdown: seen.append((plots, markdown)))
    root = command.folder
    assert seen == [(root / "output/box/plots", root / "conclusions/box/benchmark_result.md")]


def test_the_raw_record_is_written_before_the_report(command, one_forward_measured):
    def broken(*_):
        raise RuntimeError("no font")

    with pytest.raises(RuntimeError, match="no font"):
        command(report=broken)
    assert (command.folder / "output" / "per_trial.npz").exists()


def test_a_run_that_measured_nothing_says_why_and_leaves_the_old_files(command, monkeypatch, capsys):
    cell = {"case": "network", "backend": "mlx-block", "state": "unavailable", "reason": "no compiler"}
    empty = records.Record(records.empty_rows(), {"seconds": 1.0}, cells=[cell])
    monkeypatch.setattr(benchmark, "measure", lambda settings: empty)
    assert command(report=lambda *_: pytest.fail("nothing to report")) == 1
    assert "mlx-block (network) is unavailable: no compiler\nNothing" in capsys.readouterr().out
    assert not (command.folder / "output" / "per_trial.npz").exists()


def test_a_wrong_backend_makes_the_exit_status(command, monkeypatch, capsys):
    original = benchmark.backends.candidate

    def half_wrong(name, options):
        """PyTorch gets weights of another seed, so that its logits cannot be right."""
        if name == "torch":
            import torch_model

            torch.manual_seed(6)
            other = options.checkpoint.with_name("other.pth")
            torch_model.save_checkpoint(torch_model.DepthwiseMNIST().state_dict(), other)
            options = replace(options, checkpoint=other)
        return original(name, options)

    monkeypatch.setattr(benchmark.backends, "candidate", half_wrong)
    status = command(*TINY, "--backends", "torch", "mlx", report=lambda *_: None)
    assert status == 1
    assert "torch (network) was dropped: wrong result at batch 1" in capsys.readouterr().out
    record = records.load(command.folder / "output" / "per_trial.npz")
    assert set(record.rows.backend) == {"mlx"}


def test_backends_again_and_backends_that_cannot_run(command, capsys):
    if torch.cuda.is_available():
        pytest.skip("says what happens without an NVIDIA GPU")
    names = ["torch", "torch-graph", "mlx-fused-compile"]
    arguments = [*TINY, "--batch-sizes", "1", "--again", "--target", "host", "--backends", *names]
    assert command(*arguments, report=lambda *_: None) == 0
    record = records.load(command.folder / "output" / "per_trial.npz")
    assert set(record.rows.backend) == {"torch", "torch-again"}
    assert {cell["cost"]["launches"] for cell in record.cells if cell["state"] == "few"} == {37}
    printed = capsys.readouterr().out
    assert "torch-graph (network) is unavailable: CUDA graphs need an NVIDIA GPU" in printed
    assert "mlx-fused-compile (network) is unavailable: kernels on the host lie outside" in printed


def test_quick_changes_only_what_is_not_given():
    words = ["--quick", "--trials", "200", "--layers"]  # which are the defaults, and still what was asked for
    settings = parse_settings(benchmark.Settings, "", words, benchmark.QUICK)
    assert settings.trials == 200 and settings.layers
    assert (settings.batch_sizes, settings.rounds) == ((1, 16), 5)
    assert parse_settings(benchmark.Settings, "", [], benchmark.QUICK) == benchmark.Settings()


def test_what_is_named_twice_is_timed_once(checkpoint):
    settings = tiny(backends=("mlx", "torch", "mlx"), batch_sizes=(4, 1, 4), checkpoint=checkpoint)
    settings = benchmark.resolve(settings)
    assert settings.backends == ("mlx", "torch") and settings.batch_sizes == (4, 1)


def test_defaults_are_those_of_the_study():
    settings = benchmark.Settings()
    assert settings.backends == ("torch", "mlx", "mlx-fused")
    assert settings.batch_sizes == (1, 16, 64, 128, 256, 512)
    assert (settings.trials, settings.warmup) == (200, 30)
    assert isinstance(settings, MeasureSettings)


def test_all_means_all(checkpoint):
    settings = benchmark.resolve(benchmark.Settings(backends=("all",), checkpoint=checkpoint))
    assert settings.backends == tuple(benchmark.backends.BACKENDS)
    assert settings.threads >= 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backends": ("torch", "tensorflow")}, "unknown backend 'tensorflow'"),
        ({"batch_sizes": (1, 0)}, "must be positive"),
        ({"trials": 0}, "must be positive"),
        ({"budget": 0.0}, "must be positive"),
        ({"pause": -1.0}, "must not be negative"),
        ({"energy": -1.0}, "must not be negative"),
        ({"direct": True}, "--direct times mlx-folded, mlx-block, mlx-network; name one"),
        ({"limit": -1.0}, "must not be negative"),
        ({"tag": "../elsewhere"}, "names a folder"),
        ({"tag": "plots"}, "names a folder"),
        ({"checkpoint": Path("nowhere.pth")}, "nowhere.pth does not exist; `python scr/train_mnist.py`"),
    ],
)
def test_bad_input_is_one_sentence(changes, message, checkpoint):
    with pytest.raises(Fault, match=message.replace("(", r"\(")) as fault:
        benchmark.resolve(tiny(**({"checkpoint": checkpoint} | changes)))
    assert str(fault.value).count("\n") == 0


def test_a_checkpoint_of_another_network_is_a_fault(command, tmp_path):
    path = tmp_path / "other.pth"
    torch.save({"weight": torch.zeros(3)}, path)
    with pytest.raises(Fault, match=r"other\.pth"):
        command(*TINY, "--checkpoint", str(path))
    assert not (command.folder / "output" / "per_trial.npz").exists()


INTERRUPTED = """
import os, signal, sys
from pathlib import Path
import benchmark
from harness import measure
from harness.cli import run_command
benchmark.OUTPUT = benchmark.CONCLUSIONS = Path(sys.argv.pop(1))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
benchmark.ceilings.probes = lambda *_: ()
time, bursts = measure.Study.time, []
def time_and_interrupt(self, *arguments, **keywords):
    bursts.append(keywords)
    if len(bursts) == 3:  # a slow machine makes four
        os.killpg(os.getpgrp(), signal.SIGINT)  # as a terminal does: to the workers too
    time(self, *arguments, **keywords)
measure.Study.time = time_and_interrupt
run_command(benchmark.main)
"""


def test_ctrl_c_leaves_the_old_file_and_writes_a_partial_one(tmp_path, checkpoint):
    old = tmp_path / "per_trial.npz"
    old.write_bytes(b"the file of the last run")
    arguments = "--no-layers --backends torch --batch-sizes 1 --trials 100 --warmup 3 --rounds 50".split()
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path), "--checkpoint", str(checkpoint), *arguments],
        capture_output=True,
        text=True,
        cwd=SCR,
        start_new_session=True,
    )
    assert done.returncode == 130, done.stderr
    assert old.read_bytes() == b"the file of the last run"
    record = records.load(tmp_path / "per_trial.partial.npz")
    assert record.environment["complete"] is False
    assert 2 <= (record.rows.kind == "latency").sum() < 100
    assert "per_trial.partial.npz" in done.stdout
    assert "Traceback" not in done.stderr


def test_mlx_without_graphs_is_timed_in_the_networks_rounds(command, monkeypatch):
    seen = []

    def fake(cases, settings, environment, probes, begin):
        seen.extend(cases)
        return measured(seconds=0.0, ceilings=[])

    monkeypatch.setattr(benchmark, "run_study", fake)
    workers = [[p.worker for p in ceilings.probes(("mlx",), "cpu", 1, direct)] for direct in (False, True)]
    assert workers[1] == [*workers[0], "mlx-direct"] and "mlx-direct" not in workers[0]
    rungs = ("--backends", "torch", "mlx", "mlx-network", "mlx-block")
    assert command(*TINY, "--direct", *rungs, "--dtype", "float32", "float16", report=lambda *_: None) == 0
    direct = [case for case in seen if case.name != "network"]
    assert [(case.name, case.dtype) for case in direct] == [
        ("network, direct", "float32"),
        ("network, direct, awake", "float32"),
        ("network, direct", "float16"),
        ("network, direct, awake", "float16"),
    ]
    for case in direct:
        assert [one.name for one in case.candidates] == ["mlx-block", "mlx-network"]
        assert {one.arguments["dtype"] for one in case.candidates} == {case.dtype}
        assert case.shares_rounds == "network" and not case.energy
        assert all(one.arguments["awake"] == case.name.endswith("awake") for one in case.candidates)


@pytest.mark.parametrize("asked", [True, False])
def test_what_compiles_is_compiled_before_the_run_if_asked(command, monkeypatch, asked):
    order = []

    def compiled(cases, threads):
        order.append(([case.name for case in cases], threads))
        return {"cells": 3, "failed": 1}

    def fake(cases, settings, environment, probes, begin):
        order.append(environment.get("precompiled"))
        return measured(seconds=0.0, ceilings=[])

    monkeypatch.setattr(benchmark, "precompile", compiled)
    monkeypatch.setattr(benchmark, "run_study", fake)
    assert command(*TINY, "--threads", "2", *(["--precompile"] if asked else []), report=lambda *_: None) == 0
    assert order == [(["network"], 2), {"cells": 3, "failed": 1}] if asked else order == [None]


def test_storage_types_are_cases_of_their_own(command, monkeypatch):
    seen = {}

    def fake(cases, settings, environment, probes, begin):
        seen["cases"] = [(case.name, case.dtype, case.tolerance) for case in cases]
        seen["stored"] = [case.candidates[0].arguments["dtype"] for case in cases]
        return measured(seconds=0.0, ceilings=[])

    monkeypatch.setattr(benchmark, "run_study", fake)
    types = ("--dtype", "float32", "float16", "float32", "--tf32")
    assert command(*TINY, *types, report=lambda *_: None) == 0
    names = [("network", "float32", ""), ("network", "float16", ""), ("network, TF32", "float32", "tf32")]
    assert seen["cases"] == names
    assert seen["stored"] == ["float32", "float16", "float32"]
