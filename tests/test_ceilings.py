"""Ceilings: the arithmetic of the probes on fake operations; and the real ones run and are plausible."""

import pytest

from harness import ceilings
from harness.ceilings import bandwidth, device_of, launch_ms, rate


class Priced:
    """Operations that cost what they are told on a clock that only they advance."""

    framework, target = "fake", "cpu"

    def __init__(self):
        self.now = 0.0

    def clock(self):
        return self.now

    def chain(self, count):
        self.now += 20e-6 + 2e-6 * count

    def copies(self, nbytes):
        def run(count):
            self.now += 1e-3 + count * nbytes / 50e9

        return run

    def products(self, size, dtype):
        def run(count):
            self.now += count * 2 * size**3 / (100e9 if dtype == "float32" else 5e9)

        return run


@pytest.fixture
def entries(monkeypatch):
    operations = Priced()
    monkeypatch.setattr(ceilings.time, "perf_counter", operations.clock)
    return list(ceilings._measure(operations))


def test_the_chain_leaves_out_what_is_paid_once(entries):
    assert launch_ms(entries, "fake") == pytest.approx((0.022, 0.002))


def test_copies_leave_out_what_is_paid_once(entries):
    copies = [entry for entry in entries if entry["name"] == "copy"]
    assert [entry["bytes"] for entry in copies] == list(ceilings.CPU_SETS)
    assert [entry["value"] for entry in copies] == pytest.approx([50.0] * len(copies))


def test_rates_and_the_size_they_were_taken_at(entries):
    assert rate(entries, "float32", "cpu") == pytest.approx(100)
    assert rate(entries, "float16", "cpu") == pytest.approx(5)
    sources = {entry["dtype"]: entry["source"] for entry in entries if entry["name"] == "fma"}
    assert sources == {"float32": "matmul 1024", "float16": "matmul 512"}
    assert all(entry["samples"] >= ceilings.SAMPLES for entry in entries)


def test_lookups():
    limits = [
        {"name": "fma", "framework": "torch", "target": "mps", "dtype": "float32", "value": 2000.0}
        | {"best": 2300.0},
        {"name": "fma", "framework": "mlx", "target": "metal", "dtype": "float32", "value": 2400.0},
        {"name": "fma", "framework": "host", "target": "host", "dtype": "float32", "value": 300.0},
        {"name": "fma", "framework": "host", "target": "host", "dtype": "float16", "reason": "no _Float16"},
        {"name": "copy", "framework": "mlx", "target": "metal", "bytes": 1000, "value": 10.0},
        {"name": "copy", "framework": "mlx", "target": "metal", "bytes": 100_000, "value": 80.0},
        {"name": "copy", "framework": "torch", "target": "mps", "bytes": 100_000, "value": 90.0},
        {"name": "copy", "framework": "mlx", "target": "metal", "bytes": 10_000_000, "value": 60.0},
        {"name": "launch_wait", "framework": "mlx", "target": "metal", "value": 0.1},
    ]
    assert rate(limits, "float32", "metal") == 2400.0
    assert rate(limits, "float32", "cpu") == 300.0
    assert rate(limits, "float16", "cpu") is None
    assert bandwidth(limits, 900_000, "metal") == 90.0  # nearest by ratio, the best of both frameworks
    assert bandwidth(limits, 1_100_000, "metal") == 60.0
    assert bandwidth(limits, 1, "metal") == 90.0, "short copies show less than the cache gives"
    assert bandwidth(limits, 1, "cuda") is None
    assert launch_ms(limits, "mlx") is None, "one of its two figures is missing"
    assert [device_of(target) for target in ("host", "mps", "cuda")] == ["cpu", "metal", "cuda"]


def test_which_probes_belong_to_which_backends():
    names = [probe.function for probe in ceilings.probes(("torch", "onnxruntime"), "auto", 2)]
    assert names == ["harness.ceilings:torch_ceilings"]
    assert len(ceilings.probes(("mlx-fused",), "auto", 2)) == 2


@pytest.mark.parametrize("framework", ["torch", "mlx", "host"])
def test_this_machine(framework, monkeypatch):
    module = {"torch": "torch", "mlx": "mlx.core", "host": "mlx.core"}[framework]
    pytest.importorskip(module)
    monkeypatch.setattr(ceilings, "SAMPLES", 1)
    monkeypatch.setattr(ceilings, "CPU_SETS", (2**20,))
    monkeypatch.setattr(ceilings, "MATMUL_SECONDS", 0.01)
    found = getattr(ceilings, f"{framework}_ceilings")()
    if framework == "host" and "reason" in found[0]:
        pytest.skip(f"host: {found[0]['reason']}")
    assert {entry["name"] for entry in found} >= {"launch_wait", "launch_chain", "fma"}
    for entry in found:
        assert "reason" in entry or entry["value"] >= 0
    wait = next(entry for entry in found if entry["name"] == "launch_wait")
    assert 1e-4 < wait["value"] < 50
    assert 0.5 < max(entry["value"] for entry in found if entry["name"] == "fma") < 1e6


def test_no_kernel_is_faster_than_the_peak():
    mx, kernels = pytest.importorskip("mlx.core"), pytest.importorskip("kernels")
    if kernels.unavailable("host"):
        pytest.skip(f"host: {kernels.unavailable('host')}")
    from kernels.blocks import block_call, packed_size

    shape = kernels.BlockShape(7, 7, 192, 192)
    weights = mx.random.normal((packed_size(shape),))
    x = mx.random.normal((128, 7, 7, 192))

    def calls(batch):
        return [block_call(kernels.ARGUMENT, batch, mx.float32, weights, shape, None, "host")]

    plan = kernels.make_plan(calls, 128, "host", threads=1)
    best = min(ceilings._seconds(lambda _: plan(x), 1) for _ in range(20))
    reached = 2 * 128 * 49 * 192 * (192 + 9) / best / 1e9
    peak = rate(ceilings.fma_ceilings(1), "float32", "cpu")
    assert reached <= peak, f"the product runs at {reached:.0f} GFLOP/s, above the peak of {peak:.0f}"


def test_a_missing_compiler_is_said(monkeypatch):
    kernels = pytest.importorskip("kernels")
    monkeypatch.setattr(kernels, "unavailable", lambda target: "no C++ compiler found")
    found = ceilings.host_ceilings()
    assert {entry["reason"] for entry in found} == {"no C++ compiler found"}
