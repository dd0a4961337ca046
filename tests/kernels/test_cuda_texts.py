"""Every kernel text through NVRTC, without a GPU: it compiles, fits, and gets the arguments it declares."""

import re
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from cuda_texts import DEVICE, cuda_device, zeros
from kernel_cases import CASES

import kernels
import mlx_model
from kernels import host, launcher, nvrtc

pytestmark = pytest.mark.skipif(not nvrtc.available(), reason="no NVRTC, or no headers for it")
REGISTERS = DEVICE[nvrtc.REGISTERS]


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty folder for cubins."""
    monkeypatch.setattr(host, "cache_folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def compiled(monkeypatch):
    """The texts that are handed to the compiler, which is not run: (text, architecture, threads)."""
    asked = []

    def note(text, arch, threads, limit):
        asked.append((text, arch, threads))
        return b"a cubin"

    monkeypatch.setattr(nvrtc, "compile_to_fit", note)
    return asked


def default_launches():
    """Runs every default launch of the network: all levels, batches and types."""
    weights = mx.zeros((mlx_model.SHAPE.packed_size,))
    for dtype in (mx.float32, mx.float16):
        for level in mlx_model.LAUNCH_LEVELS:
            network = mlx_model.FusedNetwork(level, weights, "cuda")
            for batch in (1, 4, 16, 64, 256, 4096):
                network(mx.zeros((batch, 28, 28, 1), dtype))


def parameters(text):
    """The parameters of the kernel function in a complete text, as (type, name)."""
    (inside,) = re.findall(r'extern "C" __global__ void \w+\((.*?)\) \{', text)
    return [tuple(parameter.rsplit(" ", 1)) for parameter in inside.split(", ")]


def test_every_case_gets_the_arguments_that_its_text_declares(cache, compiled):
    launches = []

    def run(**arguments):
        launches.append(arguments)
        return zeros(**arguments)

    with cuda_device(run):
        for case in CASES:
            if "cuda" in case.targets:
                mx.eval(case.call("cuda"))
    texts = {re.search(r"__global__ void (\w+)\(", text)[1]: (text, threads) for text, _, threads in compiled}
    assert len(launches) > 200 and len(texts) > 60
    for launch in launches:
        text, threads = texts[launch["name"]]
        declared = parameters(text)
        pointers = [kind for kind, _ in declared if kind.endswith("*")]
        arrays = [a.dtype for a in launch["inputs"]] + list(launch["output_dtypes"])
        assert [kind.removeprefix("const ") for kind in pointers] == [f"{nvrtc.TYPES[t]}*" for t in arrays]
        assert [kind for kind, _ in declared[len(pointers) :]] == ["int"] * len(launch["scalars"])
        shapes = [
            a.shape
            for a, (_, name) in zip(launch["inputs"], declared, strict=False)
            if f"{name}_shape" in text
        ]
        assert launch["scalars"] == [size for shape in shapes for size in shape]
        assert threads == np.prod(launch["threadgroup"]) and launch["ensure_row_contiguous"]
        dynamic = "#define DYNAMIC_THREADGROUP_MEMORY" in text
        assert (launch["shared_memory"] > launcher.STATIC_SHARED_BYTES) == dynamic


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
def test_default_launches_compile_and_fit_on_every_architecture(cache, compiled, arch):
    with cuda_device(zeros):
        default_launches()
    units = list(dict.fromkeys(compiled))
    assert len(units) > 30
    with ThreadPoolExecutor() as pool:  # NVRTC runs outside Python's lock
        found = list(pool.map(lambda unit: nvrtc.compile_text(unit[0], arch), units))
    for (cubin, registers), (text, _, threads) in zip(found, units, strict=True):
        assert cubin.startswith(b"\x7fELF")
        assert nvrtc.registers_of(threads, registers) <= REGISTERS, parameters(text)


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_every_case_compiles(cache, compiled, arch):
    with cuda_device(zeros):
        for case in CASES:
            if "cuda" in case.targets:
                mx.eval(case.call("cuda"))
    units = list(dict.fromkeys(compiled))
    with ThreadPoolExecutor() as pool:
        cubins = list(pool.map(lambda unit: ORIGINAL(unit[0], arch, unit[2], REGISTERS), units))
    assert all(cubin.startswith(b"\x7fELF") for cubin in cubins)


ORIGINAL = nvrtc.compile_to_fit
GREEDY = f"""{nvrtc.INCLUDES}
{nvrtc.FUNCTION} greedy(const float* x, float* y) {{
  float values[200];
  #pragma unroll
  for (int i = 0; i < 200; ++i) values[i] = x[i * blockDim.x + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 200; ++i) y[i * blockDim.x + threadIdx.x] = values[199 - i] * values[i];
}}
"""


def test_a_kernel_that_needs_too_many_registers_is_compiled_to_fit(monkeypatch):
    tried = []
    original = nvrtc.compile_text

    def compile_text(text, arch):
        cubin, registers = original(text, arch)
        tried.append((text, registers))
        return cubin, registers

    monkeypatch.setattr(nvrtc, "compile_text", compile_text)
    nvrtc.compile_to_fit(GREEDY, "sm_90", 512, REGISTERS)
    (first, greedy), (second, bounded) = tried
    assert nvrtc.registers_of(512, greedy) > REGISTERS >= nvrtc.registers_of(512, bounded)
    assert "__launch_bounds__(512)" in second and "__launch_bounds__" not in first
    tried.clear()
    nvrtc.compile_to_fit(GREEDY, "sm_90", 64, REGISTERS)
    assert len(tried) == 1, "compiled twice for no reason"


def test_registers_are_given_to_whole_warps_by_the_256():
    assert nvrtc.registers_of(32, 8) == nvrtc.registers_of(128, 8) == 4 * 256
    assert nvrtc.registers_of(129, 8) == 8 * 256
    assert nvrtc.registers_of(384, 155) == 12 * 32 * 160  # of an H200's 65,536
    # 11 warps: one of the four parts has three, whose registers are then a quarter's share and more
    assert nvrtc.registers_of(352, 169) > REGISTERS >= nvrtc.registers_of(352, 168)


def test_a_kernel_that_cannot_fit_is_refused(monkeypatch):
    with pytest.raises(RuntimeError, match="2048 threads of this kernel need more registers than sm_90 has"):
        nvrtc.compile_to_fit(GREEDY, "sm_90", 2048, REGISTERS)
    monkeypatch.setattr(nvrtc, "compile_text", lambda text, arch: (text, None))
    text = nvrtc.compile_to_fit(GREEDY, "sm_90", 352, REGISTERS)
    assert "__launch_bounds__(384)" in text, "where NVRTC does not tell, the compiler is told"


def test_an_error_names_the_line():
    with pytest.raises(
        RuntimeError, match=r"NVRTC does not compile the kernel: kernel\.cu\(\d+\): error: .*nothing"
    ):
        nvrtc.compile_text(f"{nvrtc.FUNCTION} k() {{ nothing(); }}", "sm_90")


def test_a_cubin_is_compiled_once_and_found_on_disk(cache, monkeypatch):
    compilations = []

    def note(text, arch, threads, limit):
        compilations.append(text)
        return ORIGINAL(text, arch, threads, limit)

    monkeypatch.setattr(nvrtc, "compile_to_fit", note)
    names = []

    def run(**arguments):
        names.append(arguments["name"])
        assert arguments["compiled_source"].startswith(b"\x7fELF")
        return zeros(**arguments)

    def square(size, dtype=mx.float32):
        return kernels.square(mx.zeros((size,), dtype), "cuda")

    for _ in range(2):  # two processes, as far as memory goes
        with cuda_device(run):
            square(5)
            square(7)
            square(5, mx.float16)
    assert len(compilations) == 2 and len(set(names)) == 2 and len(list(cache.iterdir())) == 2
    with cuda_device(run, major=8, minor=6):
        square(5)
    assert len(compilations) == 3 and len(set(names)) == 3, "another GPU needs another cubin"


def test_mlx_compiles_where_it_is_asked_to():
    with cuda_device(zeros, compiler="mlx"), pytest.raises(RuntimeError, match="No CUDA back-end"):
        kernels.square(mx.zeros((5,)), "cuda")


def test_a_gpu_with_little_shared_memory_spreads_the_network(cache, compiled, monkeypatch):
    launches = []

    def run(**arguments):
        launches.append(arguments)
        return zeros(**arguments)

    monkeypatch.setitem(DEVICE, nvrtc.SHARED_BYTES, 64 * 1024)  # Turing
    weights = mx.zeros((mlx_model.SHAPE.packed_size,))
    with cuda_device(run):
        for level in mlx_model.LAUNCH_LEVELS:
            network = mlx_model.FusedNetwork(level, weights, "cuda")
            for batch in (1, 64, 4096):
                mx.eval(network(mx.zeros((batch, 28, 28, 1))))
    assert all(launch["shared_memory"] <= 64 * 1024 for launch in launches)
    spread = [launch for launch in launches if launch["name"].startswith("network_spread")]
    assert len(spread) == 3
    with cuda_device(run), pytest.raises(ValueError, match="more than this GPU has"):
        kernels.network(mx.zeros((64, 28, 28, 1)), weights, mlx_model.SHAPE, target="cuda")
