"""Run what compiles once before a run, in parallel, so that its kernels are on disk when it is timed.

MLX on CUDA compiles an element-wise kernel for up to 20 seconds and torch.compile a network for 3, one after
the other and while the run waits. Both keep the result on disk, as our own kernels are kept. Here processes
of their own, as many as the machine has cores, build every backend that compiles and run it once on each of
its batches; the outputs are thrown away, and what fails fails again where it counts. What the run then
stores as first calls are those of a second start on this machine, and its report says so.
"""

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from harness import machine
from harness.cli import Fault
from harness.measure import Case, Cell, progress, thread_variables
from harness.worker import Worker, WorkerCrash, WorkerError

COMPILING = ("mlx", "torch-compile")  # how the names of backends begin that compile when they first run
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
) -> None:
    """Run each of those cells once, in about `processes` (None: one per core), which the workers share.

    `threads`: CPU threads of every framework, as in the run. After Ctrl-C what compiles is let finish.
    """
    cells = compiling(cases)
    if not cells:
        return
    each = -(-(processes or machine.cores()) // len(cells))
    variables = {c.worker: c.environment for case in cases for c in case.candidates}
    bar = progress("compiling", sum(map(len, cells.values())))
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
            for one in running:
                one.result()
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
) -> None:
    """One process, or one after the other where they crash, that runs cells until there are none."""
    worker: Any = None
    opened: set[str] = set()
    try:
        while cell := _next(jobs):
            if worker is None:
                worker, opened = make_worker(name, environment), set()
            try:
                if cell.key not in opened:
                    made = cell.candidate
                    worker.ask("open", key=cell.key, factory=made.factory, arguments=made.arguments)
                    opened.add(cell.key)
                worker.ask("batch", key="batch", batch=cell.case.inputs(cell.batch_size))
                worker.ask("result", key=cell.key, batch="batch")
            except (Fault, WorkerError):
                pass  # the run meets it again and says it
            except WorkerCrash:
                worker.close()
                worker = None
            done()
    finally:
        if worker is not None:
            worker.close()
