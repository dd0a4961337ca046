"""What compiles is run once beforehand, in processes of its own; what fails there is met again in the run."""

import pytest

from fake_backends import LocalWorker, candidate, case
from harness.precompile import compiling, precompile
from harness.worker import WorkerCrash


class Recorder:
    """Makes workers in this process, and keeps what each was asked to run."""

    def __init__(self):
        self.made, self.ran, self.closed = [], [], 0

    def __call__(self, name, environment):
        recorder, worker = self, LocalWorker(name)
        self.made.append((name, environment))
        ask = worker.ask

        def asked(method, **arguments):
            answer = ask(method, **arguments)
            if method == "result":
                recorder.ran.append((name, arguments["key"], len(answer)))
            return answer

        def closed():
            recorder.closed += 1

        worker.ask, worker.close = asked, closed
        return worker


def test_every_batch_of_what_compiles_runs_once_and_nothing_else():
    cases = [
        case(
            candidate("torch", "torch"),
            candidate("torch-compile", "torch"),
            candidate("torch-graph", "torch"),
            candidate("onnxruntime", "onnxruntime"),
            candidate("mlx-folded", "mlx"),
        ),
        case(candidate("mlx-folded", "mlx-direct"), candidate("mlx", "mlx-tf32"), name="direct"),
    ]
    recorder = Recorder()
    precompile(cases, threads=3, processes=2, make_worker=recorder)
    assert sorted((name, key.split("/")[2], size) for name, key, size in recorder.ran) == [
        ("mlx", "mlx-folded", 1),
        ("mlx", "mlx-folded", 4),
        ("torch", "torch-compile", 1),
        ("torch", "torch-compile", 4),
    ]
    assert sorted(name for name, _ in recorder.made) == ["mlx", "torch"]
    assert all(environment["OMP_NUM_THREADS"] == "3" for _, environment in recorder.made)
    assert recorder.closed == len(recorder.made)


def test_small_batches_are_compiled_first():
    cells = compiling([case(candidate("mlx", "mlx"), candidate("mlx-block", "mlx"), batch_sizes=(16, 1))])
    assert [cell.batch_size for cell in cells["mlx"]] == [1, 1, 16, 16]


@pytest.mark.parametrize("how", ["refuse", "raise_after", "crash_after"])
def test_what_fails_is_left_to_the_run(how):
    factory = "fake_backends:refuse" if how == "refuse" else "fake_backends:make"
    bad = candidate("mlx", "mlx", factory, **({} if how == "refuse" else {how: 0}))
    recorder = Recorder()
    precompile([case(bad, candidate("mlx-block", "mlx"))], processes=1, make_worker=recorder)
    assert sorted(size for *_, size in recorder.ran) == [1, 4]
    assert len(recorder.made) == (3 if how == "crash_after" else 1)
    assert recorder.closed == len(recorder.made)


def test_an_interruption_ends_what_was_begun_and_starts_no_more():
    recorder = Recorder()
    stop = candidate("mlx", "mlx", stop_after=0)
    with pytest.raises(KeyboardInterrupt):
        precompile([case(stop, batch_sizes=(1, 2, 3))], processes=1, make_worker=recorder)
    assert recorder.ran == [] and recorder.closed == 1


def test_without_anything_that_compiles_no_process_starts():
    def refuse(name, environment):
        raise WorkerCrash(name)

    precompile([case(candidate("torch", "torch"))], make_worker=refuse)
