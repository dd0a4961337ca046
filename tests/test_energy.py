"""Energy from a counter that moves in steps, and NVML's library played by a stand-in."""

import ctypes

import pytest

from harness import energy


class Board:
    """A GPU of `watts` at work and `idle` at rest whose counter moves every 50 ms of fake time."""

    def __init__(self, watts=300.0, idle=100.0):
        self.now, self.true, self.watts, self.idle = 0.0, 0.0, watts, idle

    def pass_time(self, seconds, working=False):
        for _ in range(round(seconds * 1e4)):
            self.now += 1e-4
            self.true += (self.watts if working else self.idle) * 1e-4
            if round(self.now * 1e4) % 500 == 0:
                self.shown = self.true

    shown = 0.0

    def counter(self):
        return self.shown


@pytest.fixture
def board(monkeypatch):
    board = Board()
    monkeypatch.setattr(energy.time, "perf_counter", lambda: board.now)
    monkeypatch.setattr(energy.time, "sleep", board.pass_time)
    return board


def test_idle_power(board):
    assert energy.idle_watts(board.counter) == pytest.approx(100, rel=0.01)


def test_energy_per_call_is_above_idle(board):
    def call():
        board.pass_time(0.01, working=True)

    found = energy.joules_per_call(board.counter, call, idle=100.0, seconds=2.0)
    assert found == pytest.approx(200 * 0.01, rel=0.06), "2 J above idle in 10 ms"


def test_a_call_that_costs_nothing_is_not_negative(board):
    assert energy.joules_per_call(board.counter, lambda: board.pass_time(0.01), 120.0, 1.0) == 0.0


class Nvml:
    """As the driver's library, with one GPU of a given counter."""

    def __init__(self, status=0):
        self.status, self.asked = status, None

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        self.asked = index.value
        return 0

    def nvmlDeviceGetHandleByUUID(self, name, handle):
        self.asked = name
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, value):
        value._obj.value = 12_345
        return self.status


def test_the_counter_reads_joules_of_the_visible_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    library = Nvml()
    assert energy.open_counter(library)() == pytest.approx(12.345)
    assert library.asked == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5f2c")
    energy.open_counter(library)
    assert library.asked == b"GPU-5f2c"


def test_no_counter_where_there_is_none(monkeypatch):
    assert energy.open_counter(Nvml(status=3)) is None

    def missing(name):
        raise OSError("no such library")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert energy.open_counter() is None
