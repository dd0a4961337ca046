"""Callables as backends of the harness, and their compilation: what is special about PyTorch in this study.

One framework is timed here, so everything runs in one process (`Here` takes the worker's place): what was
profiled is what is timed, and nothing is compiled twice.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harness.cli import Fault
from harness.measure import Candidate
from harness.present import present
from harness.worker import Backend, Session, WorkerError

MOST_RESULTS = 4_000_000  # elements of a result that are compared; of larger ones every n-th row

_registered: dict[str, "FunctionBackend | Exception"] = {}
_serial = itertools.count()


def one_line(error: Exception) -> str:
    """An exception as one line: its type and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def wait(device: str) -> None:
    """Wait until the device has done everything asked of it."""
    if device == "cuda":
        torch.cuda.synchronize()
    elif device == "mps":
        torch.mps.synchronize()


class FunctionBackend(Backend):
    """A function of one tensor on a device.

    `module` owns the weights. With `training` a call is a forward and a backward pass. The result is the
    output, or with `gradient` the gradient of the first weight, through which every other gradient must have
    flowed. With `graph` the call is captured once and replayed.
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        module: nn.Module | None,
        device: str,
        dtype: torch.dtype,
        training: bool = False,
        graph: bool = False,
        gradient: bool = False,
    ) -> None:
        if graph and device != "cuda":
            raise Fault("CUDA graphs need an NVIDIA GPU")
        self.function, self.module, self.target, self.dtype = function, module, device, dtype
        self.training, self.graph, self.gradient = training, graph, gradient
        self.notes: dict[str, Any] = {}
        self.captured: tuple[torch.cuda.CUDAGraph, Tensor] | None = None
        self.output: Tensor | None = None
        self.batch: np.ndarray | None = None
        self.x: Tensor

    def prepare(self, batch: np.ndarray) -> None:
        """Put the rows on the device, rounded to the dtype; capture the graph at the first call.

        Rows that are there already stay: every burst prepares, and a large copy costs more than the burst.
        """
        if batch is self.batch:
            return
        self.batch = batch
        x = torch.from_numpy(batch).to(self.target, self.dtype)
        if self.graph and self.captured:
            self.x.copy_(x)
        else:
            self.x = x
        if self.training:
            generator = torch.Generator().manual_seed(7)
            self.slope = torch.randn(batch.shape, generator=generator).to(self.target, self.dtype)
        if self.graph and not self.captured:
            self._capture()
        wait(self.target)

    def _capture(self) -> None:
        """Record one call as a CUDA graph, after warm-up calls on a side stream as PyTorch asks for."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(side):
            for _ in range(3):
                self.function(self.x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            output = self.function(self.x)
        self.captured = graph, output

    def run(self) -> None:
        """One call; on a GPU it may return before it is computed."""
        if self.captured:
            self.captured[0].replay()
            self.output = self.captured[1]
        elif self.training:
            present(self.module).zero_grad(set_to_none=True)
            self.output = self.function(self.x)
            self.output.backward(self.slope)
        else:
            with torch.no_grad():
                self.output = self.function(self.x)

    def synchronize(self) -> None:
        """Wait for the device."""
        wait(self.target)

    def result(self) -> np.ndarray:
        """The output or the gradient of the first weight, thinned to at most MOST_RESULTS elements."""
        first = next(present(self.module).parameters()) if self.gradient else None
        output = present(self.output if first is None else first.grad)
        rows = output.detach().reshape(-1, output.shape[-1])
        step = -(-rows.numel() // MOST_RESULTS)
        # An odd step meets every position within a tile.
        thin = rows[:: step + 1 - step % 2]
        kind = torch.float64 if self.dtype == torch.float64 else torch.float32
        return thin.to("cpu", kind).numpy()

    def device_ms(self) -> float | None:
        """CUDA: events around eight calls that queue behind a spinning kernel, so that Python is left out."""
        if self.target != "cuda":
            return None
        calls = 8
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.run()
        wait(self.target)
        begin = time.perf_counter()
        self.run()
        returned = time.perf_counter() - begin
        wait(self.target)
        # About 2e9 cycles a second; half as much again as the calls need to be queued.
        torch.cuda._sleep(int(min(2e9 * 1.5 * calls * returned + 4e5, 2e8)))
        start.record()
        for _ in range(calls):
            self.run()
        end.record()
        wait(self.target)
        return start.elapsed_time(end) / calls

    def reset_peak(self) -> None:
        """Start a new peak of the CUDA allocator."""
        if self.target == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def peak_memory_mb(self) -> float | None:
        """Peak of the CUDA allocator; None elsewhere: this process holds every case's weights at once."""
        return torch.cuda.max_memory_allocated() / 1e6 if self.target == "cuda" else None

    def facts(self) -> dict[str, Any]:
        """What the study found out about this way of running the case."""
        return self.notes


def compiled(function: Callable[[Tensor], Tensor], **options: Any) -> Callable[[Tensor], Tensor]:
    """torch.compile of `function` with a code object of its own.

    Dynamo caches by code object: two modules of one class would otherwise share a cache, count as
    recompilations of each other, and look up each other's guards at every call.
    """

    def call(x: Tensor) -> Tensor:
        return function(x)

    call.__code__ = call.__code__.replace(co_name=f"call_{next(_serial)}")
    return torch.compile(call, **options)


def graphs_compiled() -> int:
    """How many graphs Dynamo has compiled in this process so far."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def register(key: str, backend: FunctionBackend | Exception) -> Candidate:
    """Let the harness find a backend (or what was raised instead of one) in this process, as a candidate."""
    _registered[key] = backend
    name = key.rsplit("/", 1)[1]
    return Candidate(name, "torch", "mlp.backends:registered", {"key": key})


def registered(key: str) -> FunctionBackend:
    """The factory that the harness calls. Raises what was registered: a Fault where it cannot run here."""
    backend = _registered[key]
    if isinstance(backend, Exception):
        raise backend
    return backend


class Here:
    """A worker that is this process: the same requests, answered by a `Session` of the harness."""

    waiting = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.session = Session()

    def ask(self, method: str, **arguments: Any) -> Any:
        """Call a `Session` method. Raises what a worker in another process would."""
        try:
            return getattr(self.session, method)(**arguments)
        except Fault:
            raise
        except Exception as error:  # a backend may raise anything; it costs only that backend
            raise WorkerError(one_line(error)) from error

    def close(self) -> None:
        """Nothing to end."""
