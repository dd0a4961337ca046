"""Our Triton kernels against float64, interpreted on the CPU: right results, no statement about speed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.tolerances import compare

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (there is none for macOS)"
)


@pytest.fixture(scope="module")
def found():
    # A process of its own: Triton decides at its import whether kernels are interpreted.
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parent / "scr")}
    done = subprocess.run(
        [sys.executable, str(HERE / "mlp_triton_checks.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("kernel", ["geglu", "two layers", "empty", "refuses"])
def test_kernels_agree_with_float64(found, kernel):
    chosen = {name: check for name, check in found.items() if name.startswith(kernel)}
    assert len(chosen) >= {"geglu": 55, "two layers": 10, "empty": 1, "refuses": 5}[kernel]
    wrong = {name: check.get("problem") for name, check in chosen.items() if not check["passed"]}
    assert not wrong


def test_the_check_sees_a_kernel_that_reads_only_its_first_block():
    torch.manual_seed(5)
    x, w = torch.randn(16, 256), torch.randn(256, 256) / 16
    truth = torch.relu(x.double() @ w.double().T)
    first_block = torch.relu(x[:, :64] @ w[:, :64].T)
    assert not compare(first_block.numpy(), truth.numpy(), "float16")["passed"]
