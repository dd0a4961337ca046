"""The fused kernel's parts: each is what it says, and the text is the kernel's own but for one line."""

import numpy as np
import pytest

from harness import ablation, tolerances
from harness.ablation import CASES, DEPTHWISE, FOLDED, NORMS, RSQRT
from harness.backends import Options
from harness.cli import Fault
from harness.worker import resolve

pytest.importorskip("torch")
pytest.importorskip("mlx.core")
kernels = pytest.importorskip("kernels")


def output(spec, batch):
    try:
        backend = resolve(spec.factory)(**spec.arguments)
    except Fault as fault:
        pytest.skip(str(fault))
    backend.prepare(batch)
    backend.run()
    backend.synchronize()
    return backend.result()


@pytest.mark.parametrize("name", CASES)
def test_each_part_against_float64(name):
    cases = ablation.cases(("mlx-fused",), Options(""), (2,))
    (case,) = [one for one in cases if one.name == name]
    batch = case.inputs(2)
    right = output(case.reference, batch)
    assert right.dtype == np.float64 and right.size == 2 * sum(layer.outputs for layer in DEPTHWISE)
    check = tolerances.compare(output(case.candidates[0], batch), right, "float32")
    assert check["passed"], check["problem"]


def test_the_parts_differ_where_they_should():
    outputs = {
        name: output(case.reference, case.inputs(1))
        for name, case in zip(CASES, ablation.cases(("mlx-fused",), Options(""), (1,)), strict=True)
    }
    assert np.allclose(outputs["+ statistics per pixel"], outputs["+ folded"])
    assert not np.allclose(outputs["depthwise alone"], outputs["+ folded"], atol=0.1)
    assert np.array_equal(outputs["+ ReLU"], np.maximum(outputs["+ folded"], 0))
    assert (outputs["+ folded"] < 0).mean() > 0.1


@pytest.mark.parametrize("target", RSQRT)
@pytest.mark.parametrize("norm", NORMS)
def test_a_variant_changes_one_line(norm, target):
    from kernels.depthwise import KERNEL

    changed = ablation.variant(KERNEL, norm, target).body.splitlines()
    lines = KERNEL.body.splitlines()
    assert len(changed) == len(lines)
    differing = [old for old, new in zip(lines, changed, strict=True) if old != new]
    assert [line.strip() for line in differing] == ([] if norm == "folded" else [FOLDED])


def test_only_with_the_fused_kernel():
    assert ablation.cases(("torch", "mlx"), Options(""), (1,)) == []
    assert [case.name for case in ablation.cases(("mlx-fused",), Options(""), (1,))] == list(CASES)
