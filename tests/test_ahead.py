"""Compiling ahead of timing: the right texts, once each, in the cache, whatever fails, dies or is stopped."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time

import mlx.core as mx
import numpy as np
import pytest

import kernels
import mlx_model
from harness import ahead, tuning
from harness.paths import ROOT
from harness.worker import Worker
from kernels import host, networks, tilings

BLOCKS = mlx_model.SHAPE.blocks
needs_compiler = pytest.mark.skipif(
    host.compiler() is None, reason=f"no host target: {kernels.unavailable('host')}"
)
STEPS = [
    pytest.param(target, batch, block, marks=needs_compiler if target == "host" else ())
    for target in kernels.TARGETS
    for batch in (1, 16, 128, 512)
    for block in (None, *range(len(BLOCKS)))
    if (target, block) != ("cuda", None) or batch > kernels.SPREAD_BATCH  # the others have no candidates
]


@pytest.fixture
def multiprocessors(monkeypatch):
    """Those of a GPU that need not be here."""
    monkeypatch.setattr(networks, "multiprocessors", lambda: 132)


@pytest.mark.parametrize(("target", "batch", "block"), STEPS)
def test_a_job_launches_what_the_search_times(target, batch, block, multiprocessors):
    level = "network" if block is None else "block"
    weights = mx.zeros((mlx_model.SHAPE.packed_size,))
    candidates = tuning._candidates(tuning.Step(level, batch, block), target)
    launches = set()
    for tiling in candidates:
        setting = tuning._with((None,) * (1 if block is None else len(BLOCKS)), block, tiling)
        tunings = kernels.Tunings({(level, batch): setting})
        network = mlx_model.FusedNetwork(level, weights, target, tunings)
        timed = network.calls(batch, mx.float16)[block or 0]
        ours = ahead.launch(ahead.Job(tiling, block, "float16"), target)
        for field in ("kernel", "template", "group_size", "threadgroup_bytes", "output_dtypes"):
            assert getattr(ours, field) == getattr(timed, field), tiling
        assert ours.output_shapes[0] == (1, *timed.output_shapes[0][1:])
        launches.add((ours.kernel, ours.template, ours.group_size))
    assert len(launches) == len(candidates), "two candidates make the same launch"


def test_a_launch_is_compiled_once(multiprocessors, monkeypatch):
    monkeypatch.setattr(ahead.nvrtc, "chosen", lambda: True)
    candidates = tilings.network_candidates(BLOCKS, 128, "cuda")
    with ahead.Ahead("cuda") as compilers:
        assert len(compilers.jobs([*candidates, *candidates], None, "float32")) == len(candidates)
        assert compilers.jobs(candidates, None, "float32") == []
        assert len(compilers.jobs(candidates, None, "float16")) == len(candidates)


def test_nothing_is_compiled_ahead_where_mlx_keeps_nothing(multiprocessors, monkeypatch):
    monkeypatch.setattr(ahead.nvrtc, "chosen", lambda: False)
    with ahead.Ahead("cuda") as compilers:
        assert compilers.jobs(tilings.network_candidates(BLOCKS, 128, "cuda"), None, "float32") == []


def test_nothing_is_compiled_ahead_on_metal():
    with ahead.Ahead("metal") as compilers:
        assert compilers.jobs(tilings.network_candidates(BLOCKS, 16, "metal"), None, "float32") == []
        assert list(compilers.run([])) == [] and not compilers.idle


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A copy of scr/ with an empty cache, which processes started here import; returns its folder."""
    folder = tmp_path / "scr"
    shutil.copytree(ROOT / "scr", folder, ignore=shutil.ignore_patterns(".cache", "__pycache__"))
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setattr(host, "FOLDER", folder / "kernels")
    host.cache_folder.cache_clear()
    host._function.cache_clear()
    yield folder
    host.cache_folder.cache_clear()


def compiled(checkout):
    """The libraries of the network's launch in the cache."""
    return sorted((checkout / "kernels" / ".cache").glob("network-*.so"))


@needs_compiler
def test_a_search_times_what_is_compiled_and_passes_over_what_is_not(checkout, monkeypatch, capfd):
    default = tilings.default_network_tiling(BLOCKS, 20, "host")
    other = dataclasses.replace(default, pixels1=default.pixels1 - 1)
    broken = dataclasses.replace(default, pixels1=-1)  # an array of so many elements
    monkeypatch.setattr(tilings, "network_candidates", lambda *_: [default, broken, other])
    monkeypatch.setattr(tuning, "FOLDER", checkout.parent)
    before, forward = [], tuning._forward
    monkeypatch.setattr(
        tuning, "_forward", lambda *given: (before.append(compiled(checkout)), forward(*given))[1]
    )
    workers = []
    monkeypatch.setattr(ahead, "Worker", lambda *given: workers.append(Worker(*given)) or workers[-1])
    model = mlx_model.DepthwiseMNIST("network", mx.float32, "host").fold()
    images = np.random.default_rng(0).normal(size=(20, 28, 28, 1)).astype(np.float32)
    search = tuning.search(model, (20, 21), 4, False, images)
    step = next(search)
    assert (step.tried, step.wrong) == (3, 1)
    assert len(before[0]) == 2, "both that compile lie in the cache before the first is timed"
    assert compiled(checkout) == before[0], "timing compiled one again"
    assert 1 <= len(workers) <= min(ahead.MOST, 3)
    assert all(worker.process.poll() is None for worker in workers), "a failure costs no process"
    search.close()
    assert all(worker.process.poll() is not None for worker in workers)
    assert capfd.readouterr().err == ""


@needs_compiler
def test_a_process_that_dies_costs_its_job_only(capfd):
    default = tilings.default_network_tiling(BLOCKS, 1, "host")
    dead = Worker("compiler", {})
    dead.process.kill()
    with ahead.Ahead("host") as compilers:
        jobs = compilers.jobs([default], None, "float32")
        compilers.idle.append(dead)
        assert list(compilers.run(jobs)) == [None]
        assert compilers.idle == []
        assert "the compiler worker ended with SIGKILL, over NetworkTiling(" in capfd.readouterr().err
        assert list(compilers.run(jobs)) == [None]
        assert len(compilers.idle) == 1, "the next has a process again"


@needs_compiler
def test_ctrl_c_lets_what_compiles_finish_and_starts_no_more(checkout, checkpoint, tmp_path):
    log, compiler = tmp_path / "log", tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *network-*) echo >> {log};; esac\nexec {host.compiler()} "$@"\n'
    )
    compiler.chmod(0o755)
    words = ["--levels", "network", "--batch-sizes", "1", "--target", "host", "--checkpoint", str(checkpoint)]
    program = (
        "import tune; from harness import ahead; from harness.cli import run_command; "
        "ahead.MOST = 2; run_command(tune.main)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words, "--data-dir", str(tmp_path)],
        cwd=checkout,
        env=os.environ | {"CXX": str(compiler)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not log.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to compilers too
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, errors) == (130, "", "interrupted\n")
    begun = len(log.read_text().splitlines())
    assert 1 <= begun < len(tilings.network_candidates(BLOCKS, 1, "host"))
    assert len(compiled(checkout)) == begun, "what compiled was cut short"
    with pytest.raises(ProcessLookupError):  # nobody is left
        os.killpg(process.pid, 0)
