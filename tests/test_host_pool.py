"""The host's thread pool: every group of every step runs once, after the step before, on any threads."""

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from math import prod

import numpy as np
import pytest

pytest.importorskip("mlx.core")
from kernels import host

needs_compiler = pytest.mark.skipif(host.compiler() is None, reason="no C++ compiler")

# Buffers: this step's counts per group, how many of its groups have run, the same of the step before and how
# many it has, and where a group that came too early says so. Shape: groups along x and y.
COUNT = """
#include <atomic>
#include <cstdint>
typedef const int32_t* Shape;
extern "C" void run_group(void* const* buffers, const Shape* shapes, uint32_t x, uint32_t y, uint32_t z) {
  auto at = [&](int i) { return static_cast<std::atomic<int32_t>*>(buffers[i]); };
  if (at(2)->load() != at(3)->load()) ++*at(4);
  ++at(0)[x + shapes[0][0] * (y + shapes[0][1] * z)];
  ++*at(1);
}
"""


class Chain:
    """Steps with the given groups, and what they count."""

    def __init__(self, groups):
        function = ctypes.CDLL(str(host.build(COUNT, "count"))).run_group
        address = ctypes.cast(function, ctypes.c_void_p).value
        self.counts = [np.zeros(prod(g), np.int32) for g in groups]
        self.done = np.zeros(len(groups) + 1, np.int32)  # the first is that of no step
        self.totals = np.array([0, *map(prod, groups)], np.int32)
        self.early = np.zeros(1, np.int32)
        steps, self.alive = [], [function]
        for i, size in enumerate(groups):
            parts = self.counts[i], self.done[i + 1 :], self.done[i:], self.totals[i:], self.early
            buffers = (ctypes.c_void_p * 5)(*(part.ctypes.data for part in parts))
            shape = np.array(size, np.int32)
            shapes = (ctypes.c_void_p * 1)(shape.ctypes.data)
            steps.append(host.Step(address, ctypes.addressof(buffers), ctypes.addressof(shapes), size))
            self.alive += [buffers, shape, shapes]
        self.table = (host.Step * len(steps))(*steps)

    def run(self, threads):
        """Run and check."""
        for counts in (*self.counts, self.done):
            counts[:] = 0
        host.run_table(self.table, threads)
        assert self.early[0] == 0, "a group ran before the step before was over"
        assert all((counts == 1).all() for counts in self.counts), "a group ran never or twice"


@needs_compiler
def test_every_group_runs_once_and_in_its_turn():
    sizes = [(1, 1, 1), (2, 1, 1), (7, 1, 1), (3, 2, 5), (1, 33, 1), (129, 1, 3)]
    chain, long = Chain(sizes), Chain(sizes * 300)
    for threads in (2, 1, 5, 8, 3, 1, 2):
        for _ in range(20):
            chain.run(threads)
        long.run(threads)
        time.sleep(0.005)  # until the threads sleep


@needs_compiler
def test_callers_take_turns():
    def many(threads):
        chain = Chain([(5, 1, 1), (1, 1, 1), (16, 1, 1)])
        for _ in range(300):
            chain.run(threads)

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(many, threads) for threads in (1, 2, 4)]:
            done.result()


def test_the_number_of_threads_is_checked(monkeypatch):
    monkeypatch.setenv("HOST_THREADS", "3")
    assert host.default_threads() == 3
    for wrong in ("0", "-1", "two", "1.5", "100000"):
        monkeypatch.setenv("HOST_THREADS", wrong)
        with pytest.raises(ValueError, match=f"HOST_THREADS is '{wrong}', not a number of threads"):
            host.default_threads()
        if host.compiler():
            assert host.unavailable().startswith(f"HOST_THREADS is '{wrong}'")
