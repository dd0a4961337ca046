"""Every kernel of scr/kernels/ as a Mac would compile it, emulated under sanitizers, against float64."""

import numpy as np
import pytest
from kernel_cases import CASES, Case
from kernel_checks import check_launch, check_reference
from msl_emulator import unavailable
from msl_text import metal_device

from kernels import launcher

needs_clang = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


@needs_clang
@pytest.mark.parametrize("case", [c for c in CASES if "metal" in c.targets], ids=str)
def test_case_emulated(case: Case):
    with metal_device(check_launch):
        result = case.call("metal")
    check_reference(np.array(result.astype(launcher.mx.float32)), case.reference(), case.dtype)
