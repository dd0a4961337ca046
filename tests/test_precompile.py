"""What compiles is run once beforehand, in processes of its own; what fails there is met again in the run."""

import threading
from dataclasses import replace

import pytest

from fake_backends import LocalWorker, candidate, case
from harness.precompile import compiling, precompile
from harness.worker import WorkerCrash


class Recorder:
    """Makes workers in this process, and keeps what each was asked to run."""

    def __init__(self):
        self.made, self.ran, self.opened, self.closed = [], [], [], 0

    def __call__(self, name, environment):
        recorder, worker = self, LocalWorker(name)
        self.made.append((name, environment))
        ask = worker.ask

        def asked(method, **arguments):
            answer = ask(method, **arguments)
            if method == "open":
                recorder.opened.append((worker, arguments["key"]))
            if method == "result":
                recorder.ran.append((name, arguments["key"], len(answer)))
            return answer

        def closed():
            recorder.closed += 1

        worker.ask, worker.close = asked, closed
        return worker


def test_every_batch_of_what_compiles_runs_once_and_nothing_else():
    torches = [candidate(name, "torch") for name in ("torch", "torch-compile", "torch-graph")]
    cases = [
        case(
            *(replace(one, environment={"TF32": "0"}) for one in torches),
            candidate("onnxruntime", "onnxruntime"),
            candidate("mlx-folded", "mlx"),
        ),
        case(candidate("mlx-folded", "mlx-direct"), candidate("mlx", "mlx-tf32"), name="direct"),
    ]
    recorder = Recorder()
    done = precompile(cases, threads=3, processes=2, make_worker=recorder)
    assert done == {"cells": 4, "failed": 0}
    assert sorted((name, key.split("/")[2], size) for name, key, size in recorder.ran) == [
        ("mlx", "mlx-folded", 1),
        ("mlx", "mlx-folded", 4),
        ("torch", "torch-compile", 1),
        ("torch", "torch-compile", 4),
    ]
    assert sorted(name for name, _ in recorder.made) == ["mlx", "torch"]
    assert all(environment["OMP_NUM_THREADS"] == "3" for _, environment in recorder.made)
    assert all(environment["TORCHINDUCTOR_COMPILE_THREADS"] == "1" for _, environment in recorder.made)
    assert dict(recorder.made)["torch"]["TF32"] == "0", "another TF32 than the run's compiles other kernels"
    assert len(recorder.opened) == 2 and recorder.closed == 2


def test_the_processes_are_shared_and_no_more_than_the_cells():
    recorder = Recorder()
    some = case(candidate("mlx", "mlx"), batch_sizes=(1, 2, 3, 4))
    precompile([some, case(candidate("torch-compile", "torch"), name="b", batch_sizes=(1,))], 0, 7, recorder)
    # up to four of seven for each of the two; a quick process may leave another nothing to do
    assert [name for name, _ in recorder.made].count("torch") == 1
    assert 1 <= [name for name, _ in recorder.made].count("mlx") <= 4
    assert recorder.closed == len(recorder.made)


def test_small_batches_are_compiled_first():
    cells = compiling([case(candidate("mlx", "mlx"), candidate("mlx-block", "mlx"), batch_sizes=(16, 1))])
    assert [cell.batch_size for cell in cells["mlx"]] == [1, 1, 16, 16]


@pytest.mark.parametrize("how", ["refuse", "raise_after", "crash_after"])
def test_what_fails_is_counted_and_left_to_the_run(how):
    factory = "fake_backends:refuse" if how == "refuse" else "fake_backends:make"
    bad = candidate("mlx", "mlx", factory, **({} if how == "refuse" else {how: 0}))
    recorder = Recorder()
    done = precompile([case(bad, candidate("mlx-block", "mlx"))], processes=1, make_worker=recorder)
    assert done == {"cells": 4, "failed": 2}
    assert sorted(size for *_, size in recorder.ran) == [1, 4]
    assert len(recorder.made) == (3 if how == "crash_after" else 1)
    assert recorder.closed == len(recorder.made)


def test_a_process_that_cannot_start_is_a_failure_and_no_more():
    def refuse(name, environment):
        raise OSError("Too many open files")

    assert precompile([case(candidate("mlx", "mlx"))], processes=1, make_worker=refuse) == {
        "cells": 2,
        "failed": 2,
    }


def test_an_interruption_ends_what_was_begun_and_starts_no_more(capsys):
    recorder, stopped = Recorder(), threading.Event()
    cases = [
        case(candidate("mlx", "mlx", stop_after=0), batch_sizes=(1,)),
        case(candidate("torch-compile", "torch"), name="b", batch_sizes=tuple(range(1, 40))),
    ]

    def make(name, environment):
        worker = recorder(name, environment)
        ask = worker.ask

        def asked(method, **arguments):
            if name == "torch" and method == "result" and recorder.ran:
                stopped.wait(10)  # until the other was interrupted
            try:
                return ask(method, **arguments)
            except KeyboardInterrupt:
                threading.Timer(0.2, stopped.set).start()
                raise

        worker.ask = asked
        return worker

    with pytest.raises(KeyboardInterrupt):
        precompile(cases, processes=2, make_worker=make)
    assert len(recorder.ran) < 5 and recorder.closed == len(recorder.made)
    assert "waiting for what compiles" in capsys.readouterr().err


def test_without_anything_that_compiles_no_process_starts():
    def refuse(name, environment):
        raise WorkerCrash(name)

    done = precompile([case(candidate("torch", "torch"))], make_worker=refuse)
    assert done == {"cells": 0, "failed": 0}
