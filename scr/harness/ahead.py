"""Compile the launches of candidate tilings before they are timed: in parallel, into the caches on disk.

    with Ahead("cuda") as ahead:
        jobs = ahead.jobs(tilings, block=0, dtype="float32")
        for _ in tqdm(ahead.run(jobs), total=len(jobs)):
            pass

A launch takes NVRTC or a C++ compiler a tenth of a second to several, on one core, and what is timed must
have the machine to itself. So before any is timed, a process on each core compiles others of them, and leaves
them where the process that times finds them: in the folder of kernels/host.py. Apple's compiler is quick, and
MLX keeps nothing on disk: on Metal nothing is compiled ahead, nor on CUDA where nvrtc.py cannot compile.
"""

import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from tqdm import tqdm

import kernels
import mlx_model
from harness import machine
from harness.cli import Fault
from harness.worker import Worker, WorkerCrash, WorkerError
from kernels import nvrtc
from kernels.launcher import STATIC_SHARED_BYTES

MOST = 16  # processes: each holds a framework, and on CUDA a part of the GPU's memory

AnyTiling = kernels.Tiling | kernels.NetworkTiling


@dataclass(frozen=True)
class Job:
    """A tiling of block number `block` of the network, or of the whole network's launch (None)."""

    tiling: AnyTiling
    block: int | None
    dtype: str


class Ahead:
    """The processes that compile. They start when they are first needed and live until `close`.

    They ignore Ctrl-C, as every worker does. What compiles when `close` is called is let finish.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        kept = target == "host" or (target == "cuda" and nvrtc.chosen())  # on disk
        self.most = min(MOST, machine.cores()) if kept else 0
        self.idle: list[Worker] = []
        self.threads = ThreadPoolExecutor(max(1, self.most))  # each waits for the answer of a process
        self.asked: set[Any] = set()  # the texts of all jobs so far

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def jobs(self, tilings: Iterable[AnyTiling], block: int | None, dtype: str) -> list[Job]:
        """One job for each text that these tilings make and that no earlier job made."""
        found: dict[Any, Job] = {}
        for tiling in tilings if self.most else ():
            job = Job(tiling, block, dtype)
            try:
                call = launch(job, self.target)
            except ValueError:  # does not fit; the process that times meets it again and decides
                continue
            text = call.kernel, call.template, call.group_size, call.threadgroup_bytes > STATIC_SHARED_BYTES
            if text not in self.asked:
                found.setdefault(text, job)
        self.asked.update(found)
        return list(found.values())

    def run(self, jobs: list[Job]) -> Iterator[None]:
        """Compile; yields once for each job that is done, whether or not it could be compiled."""
        for done in as_completed([self.threads.submit(self._compile, job) for job in jobs]):
            yield done.result()

    def _compile(self, job: Job) -> None:
        """Do a job in an idle process, or in a new one."""
        try:
            worker = self.idle.pop()
        except IndexError:
            worker = Worker("compiler", {})
        arguments = {"job": job, "target": self.target}
        try:
            worker.ask("call", function="harness.ahead:compile_launch", arguments=arguments)
        except WorkerCrash as crash:
            worker.close()
            tqdm.write(f"compiling ahead: {crash}, over {job.tiling}", file=sys.stderr)
            return
        except (WorkerError, Fault):
            pass  # the process that times meets it again and decides
        self.idle.append(worker)

    def close(self) -> None:
        """Wait for what compiles, drop what has not begun, and end the processes."""
        self.threads.shutdown(cancel_futures=True)
        while self.idle:
            self.idle.pop().close()


def compile_launch(job: Job, target: str) -> None:
    """Compile the launch of a job; on the host it runs too. Raises what the compiler raises."""
    kernels.chain([launch(job, target)], target, threads=1)


def launch(job: Job, target: str) -> kernels.Call:
    """The launch of a job on one image of zeros; its text is that of any batch.

    Raises ValueError for a tiling that does not fit.
    """
    shape, dtype = mlx_model.SHAPE, getattr(mx, job.dtype)
    weights, x = mx.zeros((shape.packed_size,)), mx.zeros((1, *mlx_model.IMAGE), dtype)
    if isinstance(job.tiling, kernels.NetworkTiling):
        return kernels.network_call(x, 1, dtype, weights, shape, target, job.tiling)
    tilings = [job.tiling if number == job.block else None for number in range(len(shape.blocks))]
    calls = kernels.block_calls(x, 1, dtype, kernels.weight_parts(weights, shape), shape, target, tilings)
    number = job.block or 0
    if number:
        x = mx.zeros(calls[number - 1].output_shapes[0], dtype)
    return replace(calls[number], inputs=(x, *calls[number].inputs[1:]))
