"""The command that checks kernels on real hardware: what it writes, and that a failure is never lost."""

import check
import mlx.core as mx
import numpy as np
import pytest
from kernel_cases import CASES
from msl_text import Text

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


@pytest.fixture
def metal(monkeypatch):
    """A machine with Metal and one text; `name` is its GPU's. Nothing runs."""

    def machine_with(name, *compiler):
        passed = check.Result("square", "n 7", "float32", 1e-7, None)
        monkeypatch.setattr(check, "APPLE_COMPILER", compiler)
        monkeypatch.setattr(check.kernels, "unavailable", lambda target: None)
        monkeypatch.setattr(check.mx, "device_info", lambda: {"device_name": name})
        monkeypatch.setattr(check, "run_tasks", lambda target, jobs: [passed])
        monkeypatch.setattr(
            check, "generated_texts", lambda: {"square_1": Text("square_1", "the text", "", "", ())}
        )
        monkeypatch.setattr(check.machine, "describe", lambda _: FACTS)

    return machine_with


def test_without_apple_s_compiler_the_cases_count_and_the_report_says_so(metal, tmp_path):
    metal("Apple M1", "no-such-xcrun")
    assert check.check("metal", tmp_path, jobs=1)
    text = (tmp_path / "checks.txt").read_text()
    assert text.startswith("No text was compiled by Apple's compiler: no-such-xcrun cannot run")
    assert "1 of 1 passed" in text


def test_a_virtual_machine_s_gpu_runs_no_case(metal, tmp_path):
    metal("Apple Paravirtual device", "true")
    assert check.check("metal", tmp_path, jobs=1)
    text = (tmp_path / "checks.txt").read_text()
    assert text.startswith("The GPU is a virtual machine's") and "no case was run" in text
    assert "xcrun metal" in text and "square  " not in text
    metal("Apple Paravirtual device", "no-such-xcrun")
    with pytest.raises(Fault, match="without Xcode's tools"):
        check.check("metal", tmp_path, jobs=1)


def test_a_text_that_does_not_compile_fails_the_check(metal, tmp_path):
    compiler = tmp_path / "xcrun"
    compiler.write_text('#!/bin/sh\n[ "$4" = --version ] && exit\necho "error: no such type" >&2\nexit 1\n')
    compiler.chmod(0o755)
    metal("Apple M1", str(compiler), "-sdk", "macosx", "metal")
    assert not check.check("metal", tmp_path, jobs=1)
    assert "error: no such type" in (tmp_path / "checks.txt").read_text()
