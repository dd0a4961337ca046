"""Energy of an NVIDIA GPU from its own counter, through the driver's NVML library. Needs no package."""

import ctypes
import os
import time
from collections.abc import Callable

Counter = Callable[[], float]  # joules since the driver was loaded


def open_counter(library: ctypes.CDLL | None = None) -> Counter | None:
    """The energy counter of the first visible GPU; None without NVML, a GPU, or a counter in it.

    nvmlDeviceGetTotalEnergyConsumption counts millijoules of the whole board (Volta and later).
    """
    try:
        nvml = library or ctypes.CDLL("libnvidia-ml.so.1")
        handle = ctypes.c_void_p()
        if nvml.nvmlInit_v2() or _find(nvml, ctypes.byref(handle)):
            return None
    except (OSError, AttributeError):
        return None

    def joules() -> float:
        value = ctypes.c_ulonglong()
        status = nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(value))
        if status:
            raise RuntimeError(f"NVML gave status {status} for the energy counter")
        return value.value / 1e3

    try:
        joules()
    except RuntimeError:
        return None
    return joules


def _find(nvml: ctypes.CDLL, handle: object) -> int:
    """Ask NVML for the first GPU that CUDA_VISIBLE_DEVICES (an index or a UUID) leaves; its status."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
    if first.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(first)), handle)
    return nvml.nvmlDeviceGetHandleByUUID(first.encode(), handle)


def idle_watts(counter: Counter, seconds: float = 1.0) -> float:
    """The GPU's power while this process waits."""
    return _watts(counter, lambda: time.sleep(seconds))[0]


def joules_per_call(counter: Counter, call: Callable[[], None], idle: float, seconds: float) -> float:
    """Energy above idle per call, from as many calls as `seconds` hold. `call` waits for the device."""
    calls = 0

    def work() -> None:
        nonlocal calls
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            call()
            calls += 1

    watts, elapsed = _watts(counter, work)
    return max(0.0, watts - idle) * elapsed / calls


def _watts(counter: Counter, work: Callable[[], None]) -> tuple[float, float]:
    """(mean power, seconds) while `work` runs, from one change of the counter to another.

    The counter moves every 20 to 100 ms only: beginning and end are taken where it moves.
    """
    begin, start = _edge(counter)
    work()
    end, stop = _edge(counter)
    return (end - begin) / (stop - start), stop - start


def _edge(counter: Counter, limit_s: float = 0.5) -> tuple[float, float]:
    """The counter's next value and the moment it came; the present ones where it stands still."""
    first, deadline = counter(), time.perf_counter() + limit_s
    while (value := counter()) == first and time.perf_counter() < deadline:
        time.sleep(0.001)
    return value, time.perf_counter()
