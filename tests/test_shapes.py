"""Blocks at other people's shapes: every backend against float64, and what the cases are."""

import numpy as np
import pytest

from harness import causal, shapes, tolerances
from harness.backends import Options
from harness.cli import Fault
from harness.shapes import Shape
from harness.worker import resolve

torch = pytest.importorskip("torch")
pytest.importorskip("mlx.core")

SMALL = (Shape(7, 32, 32, 1), Shape(9, 32, 64, 2), Shape(8, 64, 96, 1))


@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: shape.name)
@pytest.mark.parametrize(
    "name", ["torch", "torch-channels-last", "mlx", "mlx-folded", "mlx-fused", "mlx-block"]
)
def test_every_backend_gives_the_reference(name, shape):
    right, backend = (
        shapes.reference(shape),
        shapes.candidate(name, shape, Options("", device="cpu", threads=2)),
    )
    outputs = []
    for spec in (right, backend):
        try:
            built = resolve(spec.factory)(**spec.arguments)
        except Fault as fault:
            pytest.skip(f"{name}: {fault}")
        built.prepare(shapes.inputs(shape)(2))
        built.run()
        built.synchronize()
        outputs.append(built.result())
    side = -(-shape.side // shape.stride)
    assert outputs[0].shape == (2, shape.outputs, side, side) and outputs[0].std() > 0.1
    check = tolerances.compare(outputs[1], outputs[0], "float32")
    assert check["passed"], check["problem"]


def test_cases():
    found = shapes.cases(
        "mobilenet", ("torch", "mlx-folded", "mlx-block", "onnxruntime"), Options(""), (1, 16)
    )
    names = ["112×112×32", "56×56×128 stride 2", "28×28×256", "14×14×512", "7×7×1024"]
    assert [case.name for case in found] == names
    assert {case.study for case in found} == {"shapes"}
    assert [c.name for c in found[0].candidates] == ["torch", "mlx-folded", "mlx-block"]
    assert found[1].inputs(3).shape == (3, 128, 56, 56) and found[1].inputs(3).dtype == np.float32
    assert all(case.reference.worker == "reference" for case in found)
    with pytest.raises(Fault, match="unknown shapes 'resnet'; known are mobilenet, llm"):
        shapes.cases("resnet", ("torch",), Options(""), (1,))


def test_weights_are_far_from_trivial():
    found = shapes.weights(SMALL[1])
    assert {"skip.0.weight", "skip.1.running_var"} <= set(found)
    assert "skip.0.weight" not in shapes.weights(SMALL[0])
    assert found["bn1.running_var"].std() > 0.1 and found["bn2.running_mean"].std() > 0.1


@pytest.mark.parametrize("sequence", [causal.Sequence(1, 8), causal.Sequence(33, 40)], ids=lambda s: s.name)
@pytest.mark.parametrize("name", ["torch", "mlx", "mlx-compile", "mlx-fused"])
def test_every_backend_of_the_causal_layer_gives_the_reference(name, sequence):
    right = causal.reference(sequence)
    backend = causal.candidate(name, sequence, Options("", device="cpu", threads=2))
    outputs = []
    for spec in (right, backend):
        built = resolve(spec.factory)(**spec.arguments)
        built.prepare(causal.inputs(sequence)(2))
        built.run()
        built.synchronize()
        outputs.append(built.result())
    assert outputs[0].shape == (2, sequence.width, sequence.length, 1) and outputs[0].std() > 0.1
    check = tolerances.compare(outputs[1], outputs[0], "float32")
    assert check["passed"], check["problem"]


def test_causal_cases_cover_decoding_and_long_sequences():
    found = shapes.cases("llm", ("torch", "mlx-fused", "mlx-block"), Options(""), (1, 16))
    assert [c.name for c in found[0].candidates] == ["torch", "mlx-fused"]
    assert {case.name for case in found} >= {"1×512 causal", "4096×4096 causal"}
    assert found[1].inputs(1).shape == (1, 4096, 1, 1)
