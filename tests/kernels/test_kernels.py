"""Every kernel of scr/kernels/ as a Mac would compile it, emulated under sanitizers, against float64."""

import importlib
import pkgutil

import pytest
from check import generated_texts
from kernel_cases import CASES, Case, exact
from kernel_checks import check_launch, check_reference
from msl_emulator import unavailable
from msl_text import metal_device

import kernels
from kernels.launcher import FOLDER, Kernel

needs_clang = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


@needs_clang
@pytest.mark.parametrize("case", [c for c in CASES if "metal" in c.targets], ids=str)
def test_case_emulated(case: Case):
    with metal_device(check_launch):
        result = case.call("metal")
    check_reference(exact(result), case.reference(), case.dtype)


def defined_kernels() -> set[Kernel]:
    modules = [importlib.import_module(f"kernels.{m.name}") for m in pkgutil.iter_modules(kernels.__path__)]
    return {value for module in modules for value in vars(module).values() if isinstance(value, Kernel)}


def test_every_kernel_text_has_cases():
    defined = defined_kernels()
    bodies, headers = {k.name for k in defined}, {name for k in defined for name in k.headers}
    texts = {path.name for path in FOLDER.glob("*.metal")}
    assert texts == {f"{name}.metal" for name in bodies} | headers, (
        "a text that no kernel uses, or none at all"
    )
    assert bodies <= {case.kernel for case in CASES}, "a kernel without cases"


def test_no_two_texts_share_a_name():
    texts = generated_texts()  # raises if two that differ do
    assert len({text.complete for text in texts.values()}) == len(texts) > 50
