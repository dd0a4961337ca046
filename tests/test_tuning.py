"""The search for tilings: it keeps only what is right and faster, stores it, resumes, and models use it."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest

import kernels
import mlx_model
from harness import ahead, tuning
from harness.cli import Fault
from kernels import tilings

pytestmark = pytest.mark.skipif(
    kernels.unavailable("host") is not None, reason=f"no host target: {kernels.unavailable('host')}"
)
DEFAULT = tilings.default_network_tiling(mlx_model.SHAPE.blocks, 2, "host")
OTHER = dataclasses.replace(DEFAULT, pixels1=DEFAULT.pixels1 - 1)
WRONG = dataclasses.replace(DEFAULT, pixels1=DEFAULT.pixels1 - 2)
IMAGES = np.random.default_rng(0).normal(size=(2, 28, 28, 1)).astype(np.float32)


@pytest.fixture
def search(monkeypatch, tmp_path):
    """A search of the network level over three candidates with made-up times; returns how to run it."""
    monkeypatch.setattr(ahead, "MOST", 0)  # they are compiled already, or soon: see test_ahead.py for more
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(tilings, "network_candidates", lambda *_: [DEFAULT, OTHER, WRONG])
    forward = tuning._forward
    random, timed = np.random.default_rng(1), []

    def made_up(launches, setting, x):
        run = forward(launches, setting, x)
        if setting[0] == WRONG:
            return spoilt(run)
        run.__dict__["ms"] = times[setting[0]]
        return run

    def burst(run):
        timed.append(run)
        return run.ms * random.normal(1, 0.005)

    def spoilt(run):
        return lambda: run() + 1

    times = {}
    monkeypatch.setattr(tuning, "_forward", made_up)
    monkeypatch.setattr(tuning, "_burst", burst)
    model = mlx_model.DepthwiseMNIST("network", mx.float32, "host").fold()

    def run(default_ms, other_ms, batches=(2,), resume=True, spoil=spoilt):
        nonlocal spoilt
        spoilt = spoil
        times.update({DEFAULT: default_ms, OTHER: other_ms})
        timed.clear()
        steps = list(tuning.search(model, batches, 12, resume, IMAGES))
        return steps, len(timed)

    return run


def test_a_faster_candidate_replaces_the_default_and_the_model_uses_it(search):
    (step,), _ = search(default_ms=1.0, other_ms=0.8)
    assert (step.verdict, step.tried, step.wrong) == ("faster", 3, 1)
    assert step.ratio == pytest.approx(1.25, rel=0.02)
    assert step.found() == OTHER
    tunings = tuning.load("host").tunings()
    model = mlx_model.DepthwiseMNIST("network", mx.float32, "host", tunings).fold()
    (call,) = model._launches.calls(2, mx.float32)
    assert dict(call.template)["TP1"] == OTHER.pixels1


def refuses(run):
    """Stands for a tiling whose kernel the device does not take."""

    def raises():
        raise RuntimeError("too many threads per threadgroup")

    return raises


def wrong_in_its_last_image(run):
    """Right on the first images, which are compared with the reference itself."""
    return lambda: mx.concatenate([run()[:-1], run()[-1:] + 1])


@pytest.mark.parametrize("spoil", [refuses, wrong_in_its_last_image])
def test_a_candidate_that_fails_or_spoils_any_image_counts_as_wrong(search, spoil):
    (step,), _ = search(default_ms=1.0, other_ms=0.8, batches=(10,), spoil=spoil)
    assert (step.tried, step.wrong) == (3, 1)
    assert step.found() == OTHER


def test_a_wrong_default_is_a_fault(search, monkeypatch):
    monkeypatch.setattr(tilings, "network_candidates", lambda *_: [WRONG, OTHER])
    with pytest.raises(Fault, match="default tiling of level network at batch 2"):
        search(default_ms=1.0, other_ms=0.8)


def test_noise_does_not_replace_the_default(search):
    (step,), _ = search(default_ms=1.0, other_ms=0.999)
    assert step.found() is None
    assert tuning.load("host").tunings().pick("network", 2) == (None,)


def test_an_interrupted_search_goes_on_where_it_stopped(search):
    search(default_ms=1.0, other_ms=0.8)
    steps, timed = search(default_ms=1.0, other_ms=0.8)
    assert timed == 0
    assert steps[0].found() == OTHER
    assert search(default_ms=1.0, other_ms=2.0, resume=False)[0][0].found() is None


def test_tilings_found_with_other_kernel_texts_are_not_used(search, monkeypatch):
    search(default_ms=1.0, other_ms=0.8)
    monkeypatch.setattr(tuning.machine, "kernel_hashes", lambda: {"block.metal": "changed"})
    assert tuning.load("host") is None


def test_a_damaged_file_counts_as_none(search):
    search(default_ms=1.0, other_ms=0.8)
    tuning.path("host").write_text("{")
    assert tuning.load("host") is None


def test_a_batch_takes_what_the_next_smaller_tuned_batch_found():
    tunings = kernels.Tunings({("network", 16): ("small",), ("network", 128): ("large",)})
    assert [tunings.pick("network", n)[0] for n in (1, 16, 127, 128, 999)] == [
        "small",
        "small",
        "small",
        "large",
        "large",
    ]
    assert tunings.pick("block", 16) is None


@pytest.mark.parametrize("target", ["host", "metal", "cuda"])
@pytest.mark.parametrize("batch", [1, 16, 128])
def test_candidates_fit_and_start_with_the_default(target, batch):
    for shape in mlx_model.SHAPE.blocks:
        found = tilings.block_candidates(shape, batch, target)
        assert found[0] == tilings.default_tiling(shape, batch, target)
        assert len(found) == len(set(found)) > 5
        assert not any(t.misfit(shape, tilings.vector_width(target)) for t in found)


def test_without_a_trace_the_wall_clock_decides(monkeypatch):
    monkeypatch.setattr(tuning.gpu_trace, "open_trace", lambda: "the GPU cannot be traced")
    assert tuning._clock("cuda") is tuning._burst and tuning._clock("host") is tuning._burst


def test_a_traced_burst_counts_the_gpus_time_alone(monkeypatch):
    class Trace(tuning.gpu_trace.Trace):
        """A GPU that is busy for 3 ns in every call."""

        def __init__(self):
            pass

        def record(self, work):
            before = len(calls)
            work()
            return [tuning.gpu_trace.Activity(10 * n, 10 * n + 3, "k") for n in range(len(calls) - before)]

    calls = []
    monkeypatch.setattr(tuning.gpu_trace, "open_trace", Trace)
    assert tuning._clock("cuda")(lambda: calls.append(1)) == pytest.approx(3e-6)
    assert len(calls) == tuning.TRACED + 1
