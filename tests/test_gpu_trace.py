"""The GPU's trace, read from buffers as CUPTI fills them; the layout of its records is NVIDIA's header's."""

import ctypes
import importlib.util
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from harness import gpu_trace
from harness.gpu_trace import Activity, Trace, busy_ms

KERNEL, MEMCPY, OVERHEAD = 10, 1, 17


def test_busy_is_the_time_with_at_least_one_activity():
    assert busy_ms([]) == 0.0
    apart = [Activity(0, 1_000_000, "a"), Activity(3_000_000, 3_500_000, "b")]
    assert busy_ms(apart) == pytest.approx(1.5)
    within, overlapping = Activity(100_000, 200_000, None), Activity(500_000, 1_250_000, "c")
    assert busy_ms([*apart, within, overlapping]) == pytest.approx(1.75)


class FakeCupti:
    """Answers as CUPTI does: asks for a buffer, puts records into it, gives it back on a flush."""

    def __init__(self, status=0):
        self.status, self.enabled, self.records, self.names = status, set(), [], []
        self.lost, self.refused = 0, None  # records dropped, a kind that cannot be traced

    def cuptiActivityRegisterCallbacks(self, give, take):
        self.give, self.take = give, take
        return self.status

    def cuptiActivityEnable(self, kind):
        if kind.value == self.refused:
            return 7
        self.enabled.add(kind.value)
        return 0

    def cuptiActivityDisable(self, kind):
        self.enabled.discard(kind.value)
        return 0

    def happens(self, kind, start, end, name=b"kernel"):
        """The GPU does something: kept only while its kind is traced."""
        if kind in self.enabled or kind == OVERHEAD:
            text = ctypes.create_string_buffer(name)
            self.names.append(text)
            address = ctypes.addressof(text) if kind == KERNEL else 0
            self.records.append(struct.pack("<I12xQQ72xQ", kind, start, end, address))

    def cuptiActivityFlushAll(self, flag):
        buffer, size, most = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t(7)
        self.give(ctypes.pointer(buffer), ctypes.pointer(size), ctypes.pointer(most))
        assert size.value >= 1 << 16 and most.value == 0
        content = b"".join(self.records)
        ctypes.memmove(buffer, content, len(content))
        self.left = [buffer.value + 112 * i for i in range(len(self.records))]
        self.records = []
        self.take(None, 0, buffer.value, size.value, len(content))
        return 0

    def cuptiActivityGetNumDroppedRecords(self, context, stream, lost):
        lost._obj.value = self.lost
        return 0

    def cuptiActivityGetNextRecord(self, buffer, valid, place):
        if not self.left:
            return 9  # CUPTI_ERROR_MAX_LIMIT_REACHED
        assert 0 <= self.left[0] - buffer.value < valid.value
        place._obj.value = self.left.pop(0)
        return 0


def test_a_trace_holds_what_the_gpu_did_meanwhile_in_order():
    cupti = FakeCupti()
    trace = Trace(cupti)
    cupti.happens(KERNEL, 1, 2)  # before

    def work():
        cupti.happens(KERNEL, 50, 70, b"second")
        cupti.happens(KERNEL, 10, 30, b"first")
        cupti.happens(OVERHEAD, 0, 90)
        cupti.happens(MEMCPY, 80, 85)

    assert trace.record(work) == [
        Activity(10, 30, "first"),
        Activity(50, 70, "second"),
        Activity(80, 85, None),
    ]
    assert not cupti.enabled and not trace.buffers, "left on, or memory kept"
    assert trace.record(lambda: None) == []


def test_a_trace_that_stays_on_holds_only_what_the_gpu_did_meanwhile():
    cupti = FakeCupti()
    trace = Trace(cupti)
    trace.stay_on()
    trace.stay_on()
    for number in range(2):
        cupti.happens(KERNEL, 1, 2, b"before")
        found = trace.record(lambda: cupti.happens(KERNEL, 5, 6, b"meanwhile"))
        assert found == [Activity(5, 6, "meanwhile")], number
        assert cupti.enabled == {KERNEL, MEMCPY, gpu_trace.MEMSET}, "it was turned off"


def test_work_that_fails_leaves_the_trace_off():
    cupti = FakeCupti()
    trace = Trace(cupti)
    with pytest.raises(ZeroDivisionError):
        trace.record(lambda: 1 / 0)
    assert not cupti.enabled


def test_lost_records_are_no_shorter_time():
    cupti = FakeCupti()
    trace = Trace(cupti)
    cupti.lost = 3
    with pytest.raises(RuntimeError, match="the trace lost 3 records"):
        trace.record(lambda: cupti.happens(KERNEL, 1, 2))
    cupti.lost = 0
    assert len(trace.record(lambda: cupti.happens(KERNEL, 1, 2))) == 1


def test_a_kind_that_cannot_be_traced_leaves_the_others_off():
    cupti = FakeCupti()
    trace = Trace(cupti)
    cupti.refused = MEMCPY
    with pytest.raises(RuntimeError, match="cuptiActivityEnable gave status 7"):
        trace.record(lambda: None)
    assert not cupti.enabled


def test_the_trace_of_a_process_is_opened_once(monkeypatch):
    gpu_trace.open_trace.cache_clear()
    monkeypatch.setattr(gpu_trace, "find_library", FakeCupti)
    assert isinstance(gpu_trace.open_trace(), Trace) and gpu_trace.open_trace() is gpu_trace.open_trace()
    for library, reason in (
        (lambda: None, "CUPTI, which"),
        (lambda: FakeCupti(35), "cannot be traced: .* 35"),
    ):
        gpu_trace.open_trace.cache_clear()
        monkeypatch.setattr(gpu_trace, "find_library", library)
        assert re.search(reason, gpu_trace.open_trace())
    gpu_trace.open_trace.cache_clear()


def test_a_refusal_names_the_call_and_the_status():
    with pytest.raises(RuntimeError, match="cuptiActivityRegisterCallbacks gave status 35"):
        Trace(FakeCupti(status=35))


def header_folder():
    """Where a package of this environment has NVIDIA's header."""
    found = importlib.util.find_spec("triton")
    root = Path(found.origin).parent / "backends/nvidia/include" if found and found.origin else None
    return root if root and (root / "cupti_activity.h").is_file() else None


@pytest.mark.skipif(header_folder() is None, reason="no package here brings cupti_activity.h")
@pytest.mark.skipif(not (shutil.which("cc") or shutil.which("clang-19")), reason="no C compiler")
def test_records_are_laid_out_as_the_header_says(tmp_path):
    program = """
        #include <stddef.h>
        #include <stdio.h>
        #include <cupti_activity.h>
        #define SHOW(type, field) printf("%zu ", offsetof(type, field))
        int main(void) {
          SHOW(CUpti_ActivityKernel9, start); SHOW(CUpti_ActivityKernel9, end);
          SHOW(CUpti_ActivityKernel9, name);
          SHOW(CUpti_ActivityMemcpy5, start); SHOW(CUpti_ActivityMemcpy5, end);
          SHOW(CUpti_ActivityMemset4, start); SHOW(CUpti_ActivityMemset4, end);
          printf("%d %d %d", CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                 CUPTI_ACTIVITY_KIND_MEMSET);
        }
    """
    (tmp_path / "layout.c").write_text(program)
    compiler = shutil.which("cc") or shutil.which("clang-19")
    arguments = [
        compiler,
        "-I",
        str(header_folder()),
        str(tmp_path / "layout.c"),
        "-o",
        str(tmp_path / "layout"),
    ]
    subprocess.run(arguments, check=True, capture_output=True)
    numbers = [int(n) for n in subprocess.run([tmp_path / "layout"], capture_output=True).stdout.split()]
    start, end = gpu_trace.START, gpu_trace.END
    kinds = [gpu_trace.KERNEL, gpu_trace.MEMCPY, gpu_trace.MEMSET]
    assert numbers == [start, end, gpu_trace.NAME, start, end, start, end, *kinds]
