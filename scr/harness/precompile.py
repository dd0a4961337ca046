"""Run what compiles once before a run, in parallel, so that its kernels are on disk when it is timed.

MLX on CUDA and torch.compile need seconds for a kernel or a network, one after the other and while the run
waits. Both keep the result on disk, as our own kernels are kept. Here processes of their own, one per core
and 16 at most, build every backend that compiles and run it once on each of its batches; the outputs are
thrown away, and what fails is counted, and fails again where it matters. What the run then stores as first
calls are those of a second start on this machine, and its report says so.
"""

import queue
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from harness import machine
from harness.measure import Case, Cell, progress, thread_variables
from harness.worker import Worker, WorkerCrash

MOST = 16  # processes: each holds a framework, and on CUDA a part of the GPU's memory
# How the names of backends begin that compile when they first run, and keep it on disk: MLX not on Metal.
COMPILING = ("torch-compile",) if sys.platform == "darwin" else ("mlx", "torch-compile")
# MLX's kernels are the same with TF32 and without CUDA graphs: what the worker "mlx" compiles serves all.
SAME_KERNELS = "mlx-"
ONE_EACH = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # else every process starts one more per core

Jobs = queue.SimpleQueue[Cell]


def compiling(cases: Sequence[Case]) -> dict[str, list[Cell]]:
    """The cells to run, by the worker that runs them, small batches first: what those need, all need."""
    cells = [Cell(case, one, size) for case in cases for one in case.candidates for size in case.batch_sizes]
    found: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.batch_size):
        worker = cell.candidate.worker
        if cell.candidate.name.startswith(COMPILING) and not worker.startswith(SAME_KERNELS):
            found.setdefault(worker, []).append(cell)
    return found


def precompile(
    cases: Sequence[Case],
    threads: int = 0,
    processes: int | None = None,
    make_worker: Callable[[str, dict[str, str]], Any] = Worker,
) -> dict[str, int]:
    """Run each of those cells once, in about `processes` (None: one per core), which the workers share.

    `threads`: CPU threads of every framework, as in the run. Returns how many `cells` there were, and how
    many `failed`. After Ctrl-C what compiles is let finish, which can take a minute.
    """
    cells = compiling(cases)
    total = sum(map(len, cells.values()))
    if not cells:
        return {"cells": 0, "failed": 0}
    each = -(-(processes or min(MOST, machine.cores())) // len(cells))
    variables = {c.worker: c.environment for case in cases for c in case.candidates}
    bar = progress("compiling", total)
    queues: list[Jobs] = []
    with ThreadPoolExecutor(each * len(cells)) as pool:
        try:
            running = []
            for name, some in cells.items():
                jobs: Jobs = queue.SimpleQueue()
                for cell in some:
                    jobs.put(cell)
                queues.append(jobs)
                environment = thread_variables(threads) | variables[name] | ONE_EACH
                for _ in range(min(each, len(some))):
                    running.append(pool.submit(_serve, jobs, name, environment, make_worker, bar.update))
            return {"cells": total, "failed": sum(one.result() for one in running)}
        except KeyboardInterrupt:
            print("interrupted; waiting for what compiles", file=sys.stderr)
            raise
        finally:
            for jobs in queues:
                while _next(jobs):
                    pass
            bar.close()


def _next(jobs: Jobs) -> Cell | None:
    """The next cell, or None."""
    try:
        return jobs.get_nowait()
    except queue.Empty:
        return None


def _serve(
    jobs: Jobs,
    name: str,
    environment: dict[str, str],
    make_worker: Callable[[str, dict[str, str]], Any],
    done: Callable[[], Any],
) -> int:
    """One process, or one after the other where they crash, that runs cells until there are none.

    Returns how many failed.
    """
    worker: Any = None
    opened: set[str] = set()
    failed = 0
    try:
        while cell := _next(jobs):
            try:
                if worker is None:
                    worker, opened = make_worker(name, environment), set()
                if cell.key not in opened:
                    made = cell.candidate
                    worker.ask("open", key=cell.key, factory=made.factory, arguments=made.arguments)
                    opened.add(cell.key)
                worker.ask("batch", key="batch", batch=cell.case.inputs(cell.batch_size))
                worker.ask("result", key=cell.key, batch="batch")
            except Exception as error:  # whatever it is, the run meets it again and says it
                failed += 1
                if isinstance(error, WorkerCrash):
                    worker.close()
                    worker = None
            done()
    finally:
        if worker is not None:
            worker.close()
    return failed
