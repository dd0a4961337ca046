"""Layers by kind: complete, on the right inputs, the same in both frameworks."""

import numpy as np
import pytest

from harness import costs, layers, tolerances
from harness.backends import Options
from harness.worker import resolve

torch = pytest.importorskip("torch")
mx = pytest.importorskip("mlx.core")


def images(batch_size):
    return np.random.default_rng(batch_size).normal(size=(batch_size, 1, 28, 28)).astype(np.float32)


def built(kind, checkpoint):
    case = layers.cases(("torch", "mlx", "mlx-fused"), Options(checkpoint, device="cpu"), images, (2,))
    (case,) = [one for one in case if one.name == kind]
    specs = (*case.candidates, case.reference)
    backends = [resolve(spec.factory)(**spec.arguments) for spec in specs]
    for backend in backends:
        backend.prepare(images(2))
        backend.run()
        backend.synchronize()
    return backends


@pytest.mark.parametrize("kind", layers.KINDS)
def test_both_frameworks_give_the_reference(kind, checkpoint):
    torch_backend, mlx_backend, reference = built(kind, checkpoint)
    right = reference.result()
    assert right.dtype == np.float64
    for backend in (torch_backend, mlx_backend):
        check = tolerances.compare(backend.result(), right, "float32")
        assert check["passed"], check["problem"]


def test_the_kinds_together_are_the_network(checkpoint):
    counted = {kind: built(kind, checkpoint)[1].facts()["launches_counted"] for kind in layers.KINDS}
    modelled = {kind: 0 for kind in layers.KINDS}
    for launch in costs.launches("mlx"):
        modelled[launch.kind] += 1
    assert counted == modelled and sum(counted.values()) == 93
    operators = {kind: len(built(kind, checkpoint)[0].steps) for kind in layers.KINDS}
    assert sum(operators.values()) == 36, "PyTorch's 37 operators, pooling and linear as one step here"


def test_the_last_step_gives_the_networks_logits(checkpoint):
    torch_backend, _, reference = built("head", checkpoint)
    with torch.inference_mode():
        logits = reference.model(reference.x).numpy()
    assert np.allclose(reference.result(), logits)
    assert np.allclose(torch_backend.result(), logits, atol=1e-4)


def test_only_backends_with_the_network_as_written():
    assert layers.cases(("mlx-fused", "onnxruntime"), Options("a.pth"), images, (1,)) == []
