"""One framework in one process: the child that holds backends and reads the clock, and its handle.

The parent (`harness.measure`) starts a `Worker` per framework, asks one at a time, and never imports a
framework itself. In the child a `Session` builds backends, warms them up and times bursts; between requests
it sleeps in a read. A reply is sent only when the framework's threads are asleep too (`settle`), so that a
spinning thread pool cannot slow the framework that is measured next; what CPU time was used while waiting
is counted all the same and stored.

What a backend is: see `Backend`. What a burst times: see `BURST_KINDS` and `time_burst`.
"""

import gc
import importlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from harness.cli import Fault
from harness.energy import Counter, idle_watts, joules_per_call, open_counter
from harness.gpu_trace import Trace, busy_ms, open_trace

Clock = Callable[[], float]


class Backend:
    """One way of running one case. Subclasses are made by a factory inside a worker.

    A factory raises Fault when the backend cannot run here; the sentence becomes the reason in the report.
    `run` and `synchronize` are what "latency" times; everything below them has a default.
    """

    name: str
    target: str  # cpu, mps, cuda, metal, host
    traced = False  # the device's time comes from the GPU's trace, after everything else is timed

    def prepare(self, batch: Any) -> None:
        """Put `batch` (what the case's `inputs` gave) where `run` reads it, and wait until it is there."""
        raise NotImplementedError

    def run(self) -> None:
        """Call one forward on the prepared batch and keep its output; may return before it is computed."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait until every output kept since the last synchronize or discard is computed."""

    def launch(self) -> None:
        """Like `run`, and also start the device on it, for frameworks where `run` only describes the work."""
        self.run()

    def discard(self) -> None:
        """Forget outputs that were never waited for, in the cheapest honest way."""
        self.synchronize()

    def result(self) -> np.ndarray:
        """The last output as a NumPy array, in the layout of the case's reference."""
        raise NotImplementedError

    def device_ms(self) -> float | None:
        """Milliseconds the device needs per forward, or None where the platform has no such clock."""
        return None

    def reset_peak(self) -> None:
        """Start a new peak of device memory."""

    def peak_memory_mb(self) -> float | None:
        """Peak device memory since `reset_peak` in MB; None where the process's own memory is the answer."""
        return None

    def facts(self) -> dict[str, Any]:
        """JSON-able facts for the cell: launches counted on the graph, compile mode, layout."""
        return {}


# A core and a GPU that slept are slow for some milliseconds: after one uncounted forward of 0.1 ms, the next
# six took 20 to 40 % longer than in a steady loop.
RAMP_S = 0.005


def wake(backend: Backend, clock: Clock) -> None:
    """Forwards that are not counted: one, and more until RAMP_S have passed."""
    begin = clock()
    while True:
        backend.run()
        backend.synchronize()
        if clock() - begin >= RAMP_S:
            return


# One burst may time several kinds, in this order, on the same warm backend.
BURST_KINDS = ("latency", "throughput", "python", "device")


def time_burst(
    backend: Backend, counts: dict[str, int], in_flight: int, clock: Clock, origin: float, check: bool = False
) -> tuple[list[tuple[str, float, float]], np.ndarray | None]:
    """Time `counts[kind]` trials per kind on a prepared backend, after calls that are not counted (`wake`).

    Returns (kind, start in seconds since `origin`, milliseconds per forward) per trial and, with `check`, the
    output of the last latency trial. The garbage collector is off meanwhile: its moment would be luck.
    """
    trials = []

    def note(kind: str, start: float, forwards: int = 1) -> None:
        trials.append((kind, start - origin, (clock() - start) * 1e3 / forwards))

    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        wake(backend, clock)
        for _ in range(counts.get("latency", 0)):
            start = clock()
            backend.run()
            backend.synchronize()
            note("latency", start)
        output = backend.result() if check else None
        for _ in range(counts.get("throughput", 0)):
            start = clock()
            for _ in range(in_flight):
                backend.launch()
            backend.synchronize()
            note("throughput", start, in_flight)
        for _ in range(counts.get("python", 0)):
            start = clock()
            backend.run()
            note("python", start)
            backend.discard()
        for _ in range(counts.get("device", 0)):
            start = clock()
            value = backend.device_ms()
            if value is not None:
                trials.append(("device", start - origin, value))
    finally:
        if collecting:
            gc.enable()
    return trials, output


def warm_up(backend: Backend, at_least: int, seconds: float, clock: Clock) -> dict[str, Any]:
    """Call a prepared backend until its running median is steady; returns what the cell records.

    At least `at_least` calls, then on until the medians of the last two windows (ten calls or fewer) agree
    within 2 %, at most four times `at_least`; a backend so slow that this would exceed `seconds` after its
    first call, which may compile, stops there, after two at the earliest. `first_ms` and `second_ms` are
    the cold calls, `median_ms` and `return_ms` (until the call returns) the expectation from which the bursts
    are planned.
    """
    window = min(10, max(1, at_least // 2))
    total: list[float] = []
    returned: list[float] = []
    begin = None
    steady = False
    while not steady and len(total) < max(4 * at_least, 2):
        start = clock()
        backend.run()
        middle = clock()
        backend.synchronize()
        end = clock()
        total.append((end - start) * 1e3)
        returned.append((middle - start) * 1e3)
        if begin is None:
            begin = end
        elif end - begin + total[-1] / 1e3 > seconds:
            break
        if len(total) >= max(at_least, 2 * window):
            before, after = median(total[-2 * window : -window]), median(total[-window:])
            steady = abs(after - before) <= 0.02 * before
    settled = slice(len(total) // 2, None)
    return {
        "first_ms": total[0],
        "second_ms": total[1],
        "warmup_trials": len(total),
        "warmup_steady": steady,
        "median_ms": median(total[settled]),
        "return_ms": median(returned[settled]),
    }


class Session:
    """The child's side: every public method is a request that the parent may send."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self.backends: dict[str, Backend] = {}
        self.batches: dict[str, Any] = {}
        self.peak_mb = 0.0
        self.counter: Counter | None = None
        self.idle_watts = 0.0

    def import_module(self, module: str) -> float:
        """Import the framework; returns the seconds it took. Raises Fault when it is not installed."""
        start = self.clock()
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise Fault(f"{(error.name or module).split('.')[0]} is not installed") from error
        except ImportError as error:
            raise Fault(f"{module} cannot be imported: {_one_line(error)}") from error
        return self.clock() - start

    def call(self, function: str, arguments: dict[str, Any]) -> Any:
        """Call `function` ("module:name") with keyword `arguments`; its result must be picklable."""
        return resolve(function)(**arguments)

    def open(self, key: str, factory: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Build the backend `key`. Returns its target, facts and the seconds building took."""
        start = self.clock()
        backend = resolve(factory)(**arguments)
        self.backends[key] = backend
        gc.collect()
        gc.freeze()  # a framework's objects are many: each burst collects only what came after
        return {"target": backend.target, "build_s": self.clock() - start, "facts": backend.facts()}

    def batch(self, key: str, batch: Any) -> None:
        """Keep an input batch under `key` for later requests."""
        self.batches[key] = batch

    def result(self, key: str, batch: str) -> np.ndarray:
        """One forward of the backend on a batch, as an array."""
        backend = self.backends[key]
        backend.prepare(self.batches[batch])
        backend.run()
        backend.synchronize()
        return backend.result()

    def warm(self, key: str, batch: str, at_least: int, seconds: float) -> dict[str, Any]:
        """Warm the backend up on a batch: `warm_up`'s facts, the output and the peak memory."""
        backend = self.backends[key]
        backend.reset_peak()
        self.peak_mb = max(self.peak_mb, peak_rss_mb())
        _reset_peak_rss()
        backend.prepare(self.batches[batch])
        facts = warm_up(backend, at_least, seconds, self.clock)
        device_peak = backend.peak_memory_mb()
        facts["peak_memory_mb"] = peak_rss_mb() if device_peak is None else device_peak
        facts["has_device_clock"] = backend.device_ms() is not None
        facts["traced"] = backend.traced
        return facts | {"output": backend.result(), "facts": backend.facts()}

    def burst(
        self, key: str, batch: str, counts: dict[str, int], in_flight: int, origin: float, check: bool
    ) -> dict[str, Any]:
        """Time one burst, the input's transfer as a trial of its own; `check` asks for the last output."""
        backend = self.backends[key]
        start = self.clock()
        backend.prepare(self.batches[batch])
        transfer = ("transfer", start - origin, (self.clock() - start) * 1e3)
        trials, output = time_burst(backend, counts, in_flight, self.clock, origin, check)
        return {"trials": [transfer, *trials], "output": output}

    def energy(self, key: str, batch: str, seconds: float, in_flight: int) -> tuple[float, float] | None:
        """(joules per forward above idle, idle watts) of the GPU; None where it has no counter."""
        if self.counter is None:
            self.counter = open_counter()
            if self.counter is None:
                return None
            self.idle_watts = idle_watts(self.counter)
        backend = self.backends[key]
        backend.prepare(self.batches[batch])

        def flow() -> None:
            for _ in range(in_flight):
                backend.launch()
            backend.synchronize()

        flow()
        joules = joules_per_call(self.counter, flow, self.idle_watts, seconds) / in_flight
        return joules, self.idle_watts

    def trace_from_now(self) -> None:
        """Keep the GPU's trace on for the rest of this process. Raises Fault where it cannot be traced."""
        trace = open_trace()
        if not isinstance(trace, Trace):
            raise Fault(trace)
        trace.stay_on()

    def trace(self, key: str, batch: str, count: int, origin: float, check: bool = False) -> dict[str, Any]:
        """`count` forwards in the GPU's trace: (start in seconds since `origin`, busy milliseconds) of each.

        Also the kernels of the last one and, with `check`, its output. Raises Fault where the GPU cannot be
        traced.
        """
        trace = open_trace()
        if not isinstance(trace, Trace):
            raise Fault(trace)
        backend = self.backends[key]
        backend.prepare(self.batches[batch])

        def forward() -> None:
            backend.run()
            backend.synchronize()

        wake(backend, self.clock)
        trials, kernels = [], 0
        for _ in range(count):
            start = self.clock() - origin
            activities = trace.record(forward)
            kernels = sum(activity.name is not None for activity in activities)
            trials.append((start, busy_ms(activities)))
        return {"trials": trials, "kernels": kernels, "output": backend.result() if check else None}

    def status(self) -> dict[str, Any]:
        """Peak memory of this process in MB, over its whole life."""
        return {"peak_memory_mb": max(self.peak_mb, peak_rss_mb())}


def resolve(name: str) -> Callable[..., Any]:
    """The function that "module:name" names."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def peak_rss_mb() -> float:
    """Peak resident memory of this process in MB (10⁶ bytes).

    Linux: VmHWM, because a fresh child's ru_maxrss still holds its parent's peak. macOS: ru_maxrss, in bytes.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def _reset_peak_rss() -> None:
    """Let VmHWM start anew, where Linux allows it; elsewhere the peak stays that of the whole process."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def settle(limit_s: float = 1.0, step_s: float = 0.002) -> bool:
    """Wait until this process uses less than a tenth of one core in two steps; False if not in `limit_s`."""
    deadline = time.perf_counter() + limit_s
    quiet = 0
    while quiet < 2 and time.perf_counter() < deadline:
        wall, cpu = time.perf_counter(), time.process_time()
        time.sleep(step_s)
        asleep = time.process_time() - cpu < 0.1 * (time.perf_counter() - wall)
        quiet = quiet + 1 if asleep else 0
    return quiet == 2


def serve(descriptor: int) -> None:
    """The child's main loop: answer requests from `descriptor` until the parent hangs up."""
    connection = Connection(descriptor)
    session = Session()
    idle_cpu, idle_wall, unsettled = 0.0, 0.0, 0
    mark = (time.process_time(), time.perf_counter())
    while True:
        try:
            method, arguments = connection.recv()
        except (EOFError, ConnectionError):
            return
        idle_cpu += time.process_time() - mark[0]
        idle_wall += time.perf_counter() - mark[1]
        try:
            value = getattr(session, method)(**arguments)
            if method == "status":
                value |= {"idle_cpu_percent": 100 * idle_cpu / idle_wall, "unsettled_bursts": unsettled}
            reply = ("ok", value)
        except Fault as fault:
            reply = ("fault", str(fault))
        except Exception as error:  # a backend may raise anything; it must cost only that backend
            reply = ("error", _one_line(error))
        if not settle():
            unsettled += 1
        connection.send(reply)
        mark = (time.process_time(), time.perf_counter())


def _one_line(error: BaseException) -> str:
    """An exception as one line: its type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class WorkerCrash(Exception):
    """The worker process ended, or did not answer in time; the message says how."""


class WorkerError(Exception):
    """A request raised in the worker, which lives on; the message is the exception in one line."""


class Worker:
    """The parent's handle on one worker process.

    `ask(method, **arguments)` calls the `Session` method there and waits. Raises Fault (the backend cannot
    run here), WorkerError (it failed) or WorkerCrash (the process is gone). The child ignores Ctrl-C, so that
    the parent can end a run in order, and ends when the parent does.
    """

    def __init__(self, name: str, environment: dict[str, str], timeout_s: float = 1800.0) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.waiting = False  # for an answer; stays so when Ctrl-C cuts the wait short
        self.messages = tempfile.TemporaryFile()
        self.connection, child = Pipe()
        paths = [entry for entry in sys.path if entry]
        program = f"import sys; sys.path[:0] = {paths!r}; from harness.worker import serve; "
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the child inherits it for good
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program + f"serve({child.fileno()})"],
                pass_fds=[child.fileno()],
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=self.messages,
                stderr=self.messages,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        child.close()

    def ask(self, method: str, **arguments: Any) -> Any:
        """Call a `Session` method in the worker."""
        try:
            self.waiting = True
            self.connection.send((method, arguments))
            if not self.connection.poll(self.timeout_s):
                self.process.kill()
                raise WorkerCrash(f"no answer from the {self.name} worker in {self.timeout_s:.0f} s")
            status, value = self.connection.recv()
            self.waiting = False
        except (EOFError, ConnectionError) as error:
            raise WorkerCrash(self._last_words()) from error
        if status == "fault":
            raise Fault(value)
        if status == "error":
            raise WorkerError(value)
        return value

    def close(self) -> None:
        """End the process; a worker in the middle of a request is killed."""
        self.connection.close()
        try:
            self.process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.messages.close()

    def _last_words(self) -> str:
        """How a worker that hung up ended, with the last line it printed."""
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return f"the {self.name} worker hung up"
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        self.messages.seek(0)
        lines = self.messages.read().decode(errors="replace").strip().splitlines()
        return f"the {self.name} worker ended with {how}" + (f": {lines[-1].strip()}" if lines else "")
