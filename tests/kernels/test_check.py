"""The command that checks kernels on real hardware: what it writes, and that a failure is never lost."""

import check
import mlx.core as mx
import numpy as np
import pytest
from kernel_cases import CASES

import kernels
from harness.cli import Fault

FACTS = {"chip": "chip", "gpu": None, "os": "macOS 26.1", "versions": {"mlx": "0.32.4"}}


def test_without_a_task_the_command_says_so():
    with pytest.raises(Fault, match="give --target or --write-msl"):
        check.main([])


@pytest.mark.skipif(kernels.unavailable("cuda") is None, reason="needs a machine without CUDA")
def test_missing_target_is_a_fault_and_writes_nothing(tmp_path):
    with pytest.raises(Fault, match="cuda target cannot run here"):
        check.check("cuda", tmp_path, jobs=1)
    assert not list(tmp_path.iterdir())


def test_texts_are_written_as_mlx_compiles_them(tmp_path):
    assert check.main(["--write-msl", str(tmp_path)]) == 0
    texts = list(tmp_path.glob("*.metal"))
    assert {name for name in ("square", "dw_bn_relu", "block", "stem_block", "head", "network")} <= {
        text.name.removeprefix("custom_kernel_").rpartition("__")[0].rpartition("_")[0] for text in texts
    }
    for text in texts:
        content = text.read_text()
        assert "[[buffer(0)]]" in content
        assert content.count("template [[host_name(") == 1


@pytest.mark.skipif(kernels.unavailable("host") is not None, reason=str(kernels.unavailable("host")))
def test_a_wrong_result_and_a_crash_are_both_reported():
    case = next(case for case in CASES if case.kernel == "square")

    def crash() -> mx.array:
        raise RuntimeError("the compiler's message")

    results = [
        check.compared("square", "right", "float32", lambda: case.call("host"), case.reference),
        check.compared("square", "wrong", "float32", lambda: case.call("host") + 1, case.reference),
        check.compared("square", "nan", "float32", lambda: mx.array([np.nan]), case.reference),
        check.compared("square", "crash", "float32", crash, case.reference),
    ]
    assert [result.problem is None for result in results] == [True, False, False, False]
    text = check.report(results, "host", FACTS)
    assert text.startswith("kernel checks on host: 1 of 4 passed")
    assert "macOS 26.1, MLX 0.32.4, TF32 off" in text
    assert "the compiler's message" in text
    assert text.count("FAILED square") == 3
