"""Every backend against the float64 reference, and what is special about each framework."""

import numpy as np
import pytest

from harness import tolerances
from harness.backends import (
    BACKENDS,
    DEFAULT,
    MetalDefaults,
    MlxBackend,
    MlxNetwork,
    Options,
    TorchBackend,
    TorchNetwork,
    candidate,
    count_launches,
    may_use_tf32,
    port_weights,
    reference,
    torch_device,
)
from harness.cli import Fault
from harness.worker import Worker, resolve, time_burst

torch = pytest.importorskip("torch")
mx = pytest.importorskip("mlx.core")
mlx_model = pytest.importorskip("mlx_model")


def images(batch_size):
    return np.random.default_rng(batch_size).normal(size=(batch_size, 1, 28, 28)).astype(np.float32)


def build(spec):
    return resolve(spec.factory)(**spec.arguments)


def output(backend, batch):
    backend.prepare(batch)
    backend.run()
    backend.synchronize()
    return backend.result()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "float32") for name in BACKENDS]
    + [(name, "float16") for name in BACKENDS if name != "torch-compile"],  # compiles for half a minute
)
def test_every_backend_gives_the_reference_logits(name, dtype, checkpoint):
    spec = candidate(name, Options(checkpoint, dtype=dtype, device="cpu", threads=2))
    if spec.framework == "onnxruntime":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (make setup PEERS=1)")
        pytest.importorskip("onnxscript", reason="onnxscript is not installed (make setup PEERS=1)")
    try:
        backend = build(spec)
    except Fault as fault:
        pytest.skip(f"{name} in {dtype}: {fault}")
    expected = build(reference(checkpoint))
    for batch_size in (2,) if "compile" in name and "torch" in name else (1, 3, 1):
        batch = images(batch_size)
        right = output(expected, batch)
        assert right.dtype == np.float64 and np.ptp(right) > 0.1
        check = tolerances.compare(output(backend, batch), right, dtype)
        assert check["passed"], check["problem"]


def test_a_wrong_weight_is_noticed(checkpoint):
    backend = build(candidate("torch", Options(checkpoint, device="cpu")))
    with torch.no_grad():
        backend.model.stages[1].dw.weight[:, 0, 1, 1] += 0.05
    right = output(build(reference(checkpoint)), images(3))
    check = tolerances.compare(output(backend, images(3)), right, "float32")
    assert not check["passed"] and "allowed 2e-05" in check["problem"]


@pytest.mark.parametrize("name", ["torch", "mlx", "mlx-fused", "mlx-network", "onnxruntime"])
def test_a_burst_leaves_the_last_output(name, checkpoint):
    if name == "onnxruntime":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (make setup PEERS=1)")
    try:
        backend = build(candidate(name, Options(checkpoint, device="cpu")))
    except Fault as fault:
        pytest.skip(f"{name}: {fault}")
    batch = images(2)
    backend.prepare(batch)
    counts = {"latency": 2, "throughput": 1, "python": 2, "device": 1}
    clock = iter(range(1000)).__next__
    trials, result = time_burst(backend, counts, 3, clock, 0.0, check=True)
    kinds = [kind for kind, _, _ in trials]
    assert kinds[:5] == ["latency", "latency", "throughput", "python", "python"]
    assert np.allclose(result, output(backend, batch))


def test_names_and_their_processes(checkpoint):
    workers = {name: candidate(name, Options(checkpoint)).worker for name in BACKENDS}
    assert set(DEFAULT) <= set(BACKENDS)
    assert set(workers.values()) == {"torch", "mlx", "onnxruntime"}
    assert reference(checkpoint).worker not in workers.values()
    with pytest.raises(Fault, match="unknown backend 'tensorflow'; known are torch, "):
        candidate("tensorflow", Options(checkpoint))


def test_tf32_has_processes_of_its_own(checkpoint):
    parity, default = (candidate("mlx", Options(checkpoint, tf32=tf32)) for tf32 in (False, True))
    assert parity.environment == {"MLX_ENABLE_TF32": "0"} and default.environment == {}
    assert parity.worker != default.worker
    assert may_use_tf32("torch-graph") and not may_use_tf32("mlx-fused")


def test_launching_without_graphs_has_a_process_of_its_own(checkpoint):
    usual, direct = (candidate("mlx-block", Options(checkpoint, direct=direct)) for direct in (False, True))
    assert direct.worker == "mlx-direct" != usual.worker
    assert direct.environment == usual.environment | {"MLX_USE_CUDA_GRAPHS": "0"}
    awake = candidate("mlx-block", Options(checkpoint, direct=True, awake=True))
    assert awake.worker == direct.worker and awake.arguments["awake"] and not direct.arguments["awake"]


def test_only_a_single_forward_is_waited_for_awake(checkpoint):
    model = mlx_model.get_model("layers", checkpoint)
    backend = MlxBackend(lambda: model, "float32", compiled=False, custom=False, target=None, awake=True)
    expected = output(build(candidate("mlx", Options(checkpoint))), images(2))
    assert np.allclose(output(backend, images(2)), expected, atol=1e-5)
    spin = backend.spins[2]
    assert spin.seen == 1
    for _ in range(2):
        backend.launch()
    backend.synchronize()
    assert spin.seen == 1, "it learned from two forwards at once"
    backend.run()
    backend.discard()
    backend.run()
    backend.synchronize()
    assert spin.seen == 2 and len(backend.outputs) == 1


def test_torch_runs_without_autograd(checkpoint):
    backend = build(candidate("torch", Options(checkpoint, device="cpu")))
    output(backend, images(1))
    assert backend.outputs[-1].is_inference() and not backend.outputs[-1].requires_grad


def test_channels_last_is_channels_last(checkpoint):
    backend = build(candidate("torch-channels-last", Options(checkpoint, device="cpu")))
    backend.prepare(images(2))
    weight = backend.model.stages[0].pw.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_compiled_code_never_becomes_eager_code_unnoticed():
    backend = TorchBackend(torch.nn.Identity(), device="cpu", variant="compile")
    assert torch._dynamo.config.recompile_limit > 1000
    backend.model = torch.compile(lambda x: x + len(x), backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        output(backend, images(1))
        with pytest.raises(Exception, match="recompile_limit"):
            output(backend, images(2))


def test_metals_tilings_fit_metal(checkpoint):
    for batch in (1, 16, 128, 512, 4096):
        tilings = MetalDefaults().pick("block", batch)
        assert len(tilings) == len(mlx_model.SHAPE.blocks)
        for tiling, shape in zip(tilings, mlx_model.SHAPE.blocks, strict=True):
            assert tiling.scratch_bytes(shape) <= 32 * 1024 and tiling.misfit(shape, 4) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without an NVIDIA GPU")
def test_what_needs_a_gpu_says_so(checkpoint):
    for name in ("torch-graph", "torch-graph-channels-last", "torch-compile-overhead"):
        with pytest.raises(Fault, match="CUDA graphs need an NVIDIA GPU"):
            build(candidate(name, Options(checkpoint)))
    with pytest.raises(Fault, match="Metal's tilings are compared with CUDA's on an NVIDIA GPU"):
        build(candidate("mlx-block-32kb", Options(checkpoint, target="host")))
    with pytest.raises(Fault, match="MLX launches without CUDA graphs only on an NVIDIA GPU"):
        build(candidate("mlx-folded", Options(checkpoint, direct=True)))
    with pytest.raises(Fault, match="PyTorch sees no cuda device here"):
        torch_device("cuda")


def test_compiling_without_a_compiler_says_so(checkpoint, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Fault, match="no-such-compiler is not installed"):
        build(candidate("torch-compile", Options(checkpoint, device="cpu")))


def test_a_storage_type_that_the_kernels_lack_says_so(checkpoint):
    with pytest.raises(Fault, match="the block kernels store float32 or float16, not bfloat16"):
        build(candidate("mlx-block", Options(checkpoint, dtype="bfloat16")))


def test_a_compiled_graph_cannot_hold_host_kernels(checkpoint):
    with pytest.raises(Fault, match="lie outside MLX's graph"):
        MlxNetwork(str(checkpoint), level="fused-folded", compiled=True, target="host")


def test_a_level_that_is_not_built_is_unavailable(checkpoint):
    with pytest.raises(Fault, match="'galaxy' is not built"):
        MlxNetwork(str(checkpoint), level="galaxy")


def test_mlx_describes_first_and_computes_later(checkpoint):
    backend = build(candidate("mlx", Options(checkpoint)))
    backend.prepare(images(1))
    backend.run()
    backend.run()
    assert len(backend.outputs) == 2
    backend.synchronize()
    assert len(backend.outputs) == 1
    backend.discard()
    assert not backend.outputs


def test_the_link_of_a_chain_changes_nothing(checkpoint):
    backend = build(candidate("mlx", Options(checkpoint)))
    backend.prepare(images(3))
    linked = backend.link(backend.x, mx.full((3, 10), 7.0))
    assert mx.array_equal(linked, backend.x).item()
    assert count_launches(backend.link(backend.x, mx.zeros((3, 10)))) == 1


@pytest.mark.skipif(mx.default_device().type != mx.DeviceType.cpu, reason="about MLX on the CPU")
def test_a_slope_is_the_cost_of_one_more_forward(checkpoint):
    backend = build(candidate("mlx", Options(checkpoint)))
    backend.prepare(images(1))
    assert backend.device_ms() is None, "the CPU has no clock of its own"
    backend._slope(backend.forward, 2)
    forward = min(backend._slope(backend.forward, 2) for _ in range(3))
    link = min(backend._slope(lambda x: mx.zeros((1, 10)), 20) for _ in range(3))
    assert forward > 10 * abs(link)


@pytest.mark.parametrize(
    ("level", "compiled", "count"),
    [
        ("layers", False, 93),
        ("layers", True, 23),
        ("folded", False, 38),
        ("folded", True, 23),
        ("fused", False, 65),
        ("fused-folded", True, 19),
    ],
)
def test_launches_are_counted_on_the_graph(level, compiled, count, checkpoint, monkeypatch):
    import kernels
    import mlx_model

    def stand_in(x, params, stride=1, *_):
        """One launch of the fused kernel's shape, for machines whose target lies outside the graph."""
        return mx.conv2d(x, mx.zeros((x.shape[3], 3, 3, 1)), stride, 1, groups=x.shape[3])

    monkeypatch.setattr(kernels, "dw_bn_relu", stand_in)
    model = mlx_model.get_model(level, checkpoint)
    x = mx.array(images(1).transpose(0, 2, 3, 1))
    mx.eval(model(x))  # weights that are still to be derived would count as well
    assert count_launches((mx.compile(model) if compiled else model)(x)) == count


@pytest.mark.parametrize("name", ["torch", "torch-channels-last"])
def test_operators_of_an_eager_forward_are_counted(name, checkpoint):
    backend = build(candidate(name, Options(checkpoint, device="cpu")))
    assert "launches_counted" not in backend.facts()
    right = output(backend, images(2))
    assert backend.facts()["launches_counted"] == 37
    assert np.array_equal(backend.result(), right), "counting leaves the output alone"


def test_counted_launches_are_facts_of_the_cell(checkpoint):
    backend = build(candidate("mlx-folded", Options(checkpoint)))
    assert "launches_counted" not in backend.facts(), "before the first forward, weights are not derived yet"
    output(backend, images(1))
    assert backend.facts()["launches_counted"] == 23
    assert isinstance(build(candidate("torch", Options(checkpoint, device="cpu"))), TorchNetwork)


def test_mlx_loads_its_weights_without_torch(checkpoint, tmp_path):
    weights = port_weights(checkpoint, tmp_path / "weights.safetensors")
    spec = candidate("mlx", Options(checkpoint, mlx_checkpoint=weights))
    assert np.allclose(
        output(build(spec), images(2)), output(build(candidate("mlx", Options(checkpoint))), images(2))
    )
    worker = Worker("test", {})
    try:
        worker.ask("open", key="a", factory=spec.factory, arguments=spec.arguments)
        assert not worker.ask("call", function="fake_backends:is_imported", arguments={"module": "torch"})
        assert worker.ask("call", function="fake_backends:is_imported", arguments={"module": "mlx.core"})
    finally:
        worker.close()


def test_weights_that_cannot_be_read_are_a_fault(tmp_path):
    path = tmp_path / "other.pth"
    torch.save({"weight": torch.zeros(3)}, path)
    with pytest.raises(Fault, match=r"other\.pth"):
        port_weights(path, tmp_path / "weights.safetensors")
