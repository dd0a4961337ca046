"""How long an NVIDIA GPU was busy, from the trace that the driver keeps of kernels and copies (CUPTI).

Times are the GPU's own, so that they hold for any framework, launch by launch or from a captured graph, and
hold neither Python nor the gaps in which the GPU waits to be told. CUPTI comes with PyTorch and with CUDA's
toolkit; nothing is installed for it. A process that has traced may launch more slowly afterwards: trace last.

Formats: NVIDIA's cupti_activity.h; the fields read here have kept their places since CUDA 9.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from harness import nvidia

KERNEL, MEMCPY, MEMSET = 10, 1, 2  # CUpti_ActivityKind; 10 is CONCURRENT_KERNEL, which does not serialise
KERNELS = (KERNEL, 3)  # what a kernel's record may say
FORCED = 1  # CUPTI_ACTIVITY_FLAG_FLUSH_FORCED
START, END, NAME = 16, 24, 104  # offsets in bytes in a record; the name is a kernel's
BUFFER_BYTES = 1 << 20

_Requested = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
)
_Completed = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)


@dataclass(frozen=True)
class Activity:
    """A kernel, copy or fill on the GPU; times in nanoseconds of the GPU's clock. `name` of kernels only."""

    start: int
    end: int
    name: str | None


def find_library() -> ctypes.CDLL | None:
    """CUPTI as installed with NVIDIA's Python packages or with the system; None where there is none."""
    for name in (*map(str, nvidia.libraries("libcupti")), "libcupti.so.13", "libcupti.so.12", "libcupti.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@functools.cache
def open_trace() -> "Trace | str":
    """The one trace of this process; where there is none, the reason."""
    library = find_library()
    if library is None:
        return "CUPTI, which keeps the GPU's trace, is not installed"
    try:
        return Trace(library)
    except (RuntimeError, AttributeError) as error:
        return f"the GPU cannot be traced: {error}"


class Trace:
    """CUPTI's activity trace in this process, off except in `record`; one per process, as CUPTI asks.

    Raises RuntimeError with CUPTI's status where it cannot be used.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.cupti = library
        self.found: list[Activity] = []
        self.dropped = 0  # records that CUPTI had no room for
        self.stays_on = False
        self.buffers: dict[int, ctypes.Array] = {}  # by address, while CUPTI holds them
        # The library keeps these pointers: they must live as long as it does.
        self.callbacks = _Requested(self._give), _Completed(self._take)
        self._call("cuptiActivityRegisterCallbacks", *self.callbacks)

    def record(self, work: Callable[[], object]) -> list[Activity]:
        """What the GPU did in `work`, which must wait for it, in the order of the beginnings."""
        if self.stays_on:
            self._flush()  # what came before
        self.found, self.dropped = [], 0
        enabled: list[int] = []
        try:
            if not self.stays_on:
                self._enable(enabled)
            work()
            self._flush()
        finally:
            for kind in enabled:
                self._call("cuptiActivityDisable", ctypes.c_uint32(kind))
        if self.dropped:
            raise RuntimeError(f"the trace lost {self.dropped} records")
        return sorted(self.found, key=lambda activity: activity.start)

    def stay_on(self) -> None:
        """Trace without a pause from now on, for a process that does nothing else.

        CUPTI has had faults with CUDA graphs that were built before it was first on (PyTorch's issue 75504):
        a process that calls this before it builds its first graph does not do that.
        """
        if not self.stays_on:
            self._enable([])
            self.stays_on = True

    def _enable(self, enabled: list[int]) -> None:
        """Turn every kind on, and note it in `enabled`."""
        for kind in (KERNEL, MEMCPY, MEMSET):
            self._call("cuptiActivityEnable", ctypes.c_uint32(kind))
            enabled.append(kind)

    def _flush(self) -> None:
        """Take the records that CUPTI still has."""
        self._call("cuptiActivityFlushAll", ctypes.c_uint32(FORCED))

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self.cupti, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} gave status {status}")

    def _give(self, buffer: object, size: object, most_records: object) -> None:
        """CUPTI asks for memory; as many records as fit."""
        memory = ctypes.create_string_buffer(BUFFER_BYTES)  # aligned to 16 bytes by the allocator
        address = ctypes.addressof(memory)
        self.buffers[address] = memory
        buffer[0], size[0], most_records[0] = address, BUFFER_BYTES, 0  # type: ignore[index]

    def _take(self, context: int, stream: int, buffer: int, size: int, valid: int) -> None:
        """CUPTI gives the memory back, with records in it."""
        lost = ctypes.c_size_t()
        self.cupti.cuptiActivityGetNumDroppedRecords(
            ctypes.c_void_p(context), ctypes.c_uint32(stream), ctypes.byref(lost)
        )
        self.dropped += lost.value
        self.found += list(self._records(buffer, valid))
        self.buffers.pop(buffer, None)

    def _records(self, buffer: int, valid: int) -> Iterator[Activity]:
        place = ctypes.c_void_p(0)
        following = self.cupti.cuptiActivityGetNextRecord
        while following(ctypes.c_void_p(buffer), ctypes.c_size_t(valid), ctypes.byref(place)) == 0:
            address = place.value or 0
            kind = ctypes.c_uint32.from_address(address).value
            if kind in (*KERNELS, MEMCPY, MEMSET):
                start, end = (ctypes.c_uint64.from_address(address + at).value for at in (START, END))
                name = ctypes.c_char_p.from_address(address + NAME).value if kind in KERNELS else None
                yield Activity(start, end, name.decode(errors="replace") if name else None)


def busy_ms(activities: list[Activity]) -> float:
    """Milliseconds in which at least one of `activities` ran."""
    busy, reached = 0, 0
    for activity in sorted(activities, key=lambda activity: activity.start):
        busy += max(0, activity.end - max(activity.start, reached))
        reached = max(reached, activity.end)
    return busy / 1e6
