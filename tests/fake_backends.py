"""Backends, a clock and a worker without frameworks, for the tests of the measurement logic."""

import os
import sys
import threading
import time
from typing import ClassVar

import numpy as np

from harness.cli import Fault
from harness.measure import Candidate, Case
from harness.worker import Backend, Session, WorkerCrash, WorkerError


class FakeClock:
    """Time passes only when a backend says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


CLOCK = FakeClock()


class FakeBackend(Backend):
    """y = 2·x, at a price in fake seconds; a log of (backend, batch size) for every prepare."""

    target = "cpu"
    log: ClassVar[list] = []

    def __init__(self, name, seconds=0.001, first=1.0, wait=0.0, error=0.0, slower_from=None, **rest):
        self.name, self.seconds, self.first, self.wait, self.error = name, seconds, first, wait, error
        self.slower_from, self.stop_after, self.crash_after = slower_from, None, None
        self.wrong_after, self.raise_after = None, None
        for key, value in rest.items():
            setattr(self, key, value)
        self.calls, self.pending = 0, 0

    def prepare(self, batch):
        self.x, self.cold = batch, True
        FakeBackend.log.append((self.name, len(batch)))

    def run(self):
        self.calls += 1
        if self.stop_after is not None and self.calls > self.stop_after:
            raise KeyboardInterrupt
        if self.raise_after is not None and self.calls > self.raise_after:
            raise RuntimeError("out of memory\nsecond line")
        if self.crash_after is not None and self.calls > self.crash_after:
            raise WorkerCrash("the fake worker ended with SIGSEGV")
        factor = self.first if self.cold else 1.0
        if self.slower_from is not None and CLOCK.now > self.slower_from:
            factor *= 1.2
        self.cold = False
        CLOCK.now += self.seconds * factor * len(self.x)
        self.pending += 1
        self.y = 2 * self.x
        if self.wrong_after is None or self.calls > self.wrong_after:
            self.y = self.y + self.error * (np.arange(self.y.size).reshape(self.y.shape) == self.y.size - 1)

    def synchronize(self):
        CLOCK.now += self.wait * self.pending
        self.pending = 0

    def discard(self):
        self.pending = 0

    def result(self):
        return self.y

    def facts(self):
        return {"launches_counted": 7}


def make(**arguments):
    """A FakeBackend."""
    return FakeBackend(**arguments)


def refuse(**_):
    """A factory whose backend cannot run here."""
    raise Fault("this machine has no such GPU")


class LocalWorker:
    """A worker in this process, under the fake clock."""

    def __init__(self, name):
        self.name, self.session, self.waiting = name, Session(CLOCK), False

    def ask(self, method, **arguments):
        """As Worker.ask."""
        try:
            return getattr(self.session, method)(**arguments)
        except (Fault, WorkerCrash):
            raise
        except Exception as error:
            raise WorkerError(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error

    def close(self):
        """Nothing to end."""


def inputs(batch_size):
    """A batch whose length is the batch size."""
    return np.arange(1.0, 3.0 * batch_size + 1).reshape(batch_size, 3)


def candidate(name, worker="one", factory="fake_backends:make", **arguments):
    """A candidate that runs a FakeBackend."""
    return Candidate(name, worker, factory, {"name": name} | arguments, module="json")


def case(*candidates, batch_sizes=(1, 4), **changes):
    """A case of FakeBackends with a right reference."""
    fields = {"study": "fake", "name": "doubling", "inputs": inputs, "batch_sizes": batch_sizes}
    fields |= {"candidates": candidates, "reference": candidate("reference", "reference")}
    return Case(**(fields | changes))


class RealBackend(Backend):
    """For real worker processes: sleeps, and may end the process or leave a thread spinning."""

    target = "cpu"

    def __init__(self, name="", crash_after=None, spin_s=0.0):
        self.crash_after, self.spin_s, self.calls = crash_after, spin_s, 0

    def prepare(self, batch):
        self.x = batch

    def run(self):
        self.calls += 1
        if self.crash_after is not None and self.calls > self.crash_after:
            os.abort()
        time.sleep(0.0005)
        if self.spin_s:
            threading.Thread(target=self.spin).start()

    def spin(self):
        end = time.perf_counter() + self.spin_s
        while time.perf_counter() < end:
            pass

    def result(self):
        return 2 * self.x


def make_real(**arguments):
    """A RealBackend."""
    return RealBackend(**arguments)


def limits():
    """What a probe returns."""
    return [{"name": "copy", "value": 1.0}]


def crash():
    """A probe that takes its worker with it."""
    raise WorkerCrash("the fake worker ended with SIGSEGV")


def allocate(megabytes):
    """Touch memory and let it go."""
    np.ones(megabytes * 125_000).sum()


def environment_variable(name):
    """The value of an environment variable in the worker."""
    return os.environ.get(name)


def is_imported(module):
    """Whether the worker has imported a module."""
    return module in sys.modules


def sleep_forever():
    """A request that does not return by itself."""
    time.sleep(3600)
