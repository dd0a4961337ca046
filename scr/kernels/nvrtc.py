"""Kernel texts compiled by NVRTC into cubins that MLX launches, kept on disk.

MLX compiles a CUDA text itself (`mx.fast.cuda_kernel`), but puts two seconds of its own headers before each,
keeps nothing of it on disk, and does not know how many threads a launch has: a kernel that needs more
registers than the GPU has for them is not launched, without a word. Here a text takes 0.1 to 0.8 seconds,
once; where it needs too many registers it is compiled again with `__launch_bounds__`; and MLX gets the result
through `mx.fast.precompiled_cuda_kernel`.

NVRTC is a part of what MLX's CUDA build needs; the headers for halves come with CUDA's Python packages or
with the toolkit. Where either is missing, or with CUDA_COMPILER=mlx in the environment, MLX compiles.
"""

import ctypes
import functools
import hashlib
import os
import re
import tempfile
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from harness import nvidia
from harness.present import present
from kernels import host

if TYPE_CHECKING:
    from kernels.launcher import Kernel, Template

SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
HEADER = "cuda_fp16.h"  # a folder that has it has what the texts include
INCLUDES = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"
TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.int32: "int",
    mx.uint32: "unsigned int",
}
# Of CUdevice_attribute:
REGISTERS, MULTIPROCESSORS, COMPUTE_MAJOR, COMPUTE_MINOR, SHARED_BYTES = 12, 16, 75, 76, 97
REGISTERS_AT_ONCE = 256  # are given to a warp
WARPS_AT_ONCE = 4  # of a group: one on each of a multiprocessor's four parts, which have the registers
MOST_THREADS = 1024  # of a group


@functools.cache
def library() -> ctypes.CDLL | None:
    """NVRTC: the one that MLX's CUDA build has loaded, else of Python packages, else the system's."""
    for loaded in SONAMES:
        try:
            return ctypes.CDLL(loaded, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except (OSError, AttributeError):  # not loaded, or a system without that mode
            continue
    for name in (*nvidia.libraries("libnvrtc"), *SONAMES, "libnvrtc.so"):
        try:
            if isinstance(name, Path):  # it looks for its other half on the system's paths only
                for other in name.parent.glob("libnvrtc-builtins.so.*"):
                    ctypes.CDLL(str(other))
            return ctypes.CDLL(str(name))
        except OSError:
            continue
    return None


@functools.cache
def include_folder() -> Path | None:
    """The folder with CUDA's headers, or None."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    for home in (*nvidia.packages(), *homes, Path("/usr/local/cuda")):
        if (home / "include" / HEADER).is_file():
            return home / "include"
    return None


@functools.cache
def headers() -> str:
    """What stands for the version of CUDA's headers: a digest of one."""
    return hashlib.sha256((present(include_folder()) / HEADER).read_bytes()).hexdigest()[:16]


def available() -> bool:
    """Whether texts can be compiled here."""
    return library() is not None and include_folder() is not None


def chosen() -> bool:
    """Whether this module compiles, and not MLX."""
    return os.environ.get("CUDA_COMPILER") != "mlx" and available()


def compiler() -> str:
    """What compiles CUDA texts here, for records."""
    return f"NVRTC {version()}" if chosen() else "MLX"


@functools.cache
def attribute(number: int) -> int:
    """An attribute of the first CUDA device, asked of the driver since MLX does not tell.

    Raises OSError without a driver, RuntimeError without a device.
    """
    driver, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    driver.cuInit(0)
    if driver.cuDeviceGetAttribute(ctypes.byref(value), number, 0) != 0:
        raise RuntimeError(f"the CUDA driver does not tell the device's attribute {number}")
    return value.value


def architecture() -> str:
    """What to compile for: sm_90 for compute capability 9.0."""
    return f"sm_{attribute(COMPUTE_MAJOR)}{attribute(COMPUTE_MINOR)}"


class CudaKernel:
    """A kernel of the cuda target, called as MLX's kernel object is.

    source: header and body as the compiler gets them. A call compiles, or finds on disk, the cubin for its
    template, threads and types; raises RuntimeError with NVRTC's first error.
    """

    def __init__(self, kernel: "Kernel", source: tuple[str, str], dynamic_bytes: int) -> None:
        self.kernel, self.source, self.dynamic_bytes = kernel, source, dynamic_bytes
        self.shaped = [name for name in kernel.inputs if re.search(rf"\b{name}_shape\b", source[1])]
        self.built: dict[Any, tuple[str, bytes]] = {}

    def __call__(
        self,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        stream: Any = None,
    ) -> list[mx.array]:
        """One launch, lazy; the grid counts threads."""
        shapes = [
            array.shape for name, array in zip(self.kernel.inputs, inputs, strict=True) if name in self.shaped
        ]
        types = tuple(array.dtype for array in inputs), tuple(output_dtypes)
        key = tuple(template), threadgroup, types, tuple(map(len, shapes))
        if key not in self.built:
            self.built[key] = self._build(key[0], threadgroup, types, key[3])
        name, cubin = self.built[key]
        return mx.fast.precompiled_cuda_kernel(
            name=name,
            compiled_source=cubin,
            inputs=list(inputs),
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            scalars=[size for shape in shapes for size in shape],
            grid=grid,
            threadgroup=threadgroup,
            shared_memory=self.dynamic_bytes,
            ensure_row_contiguous=True,
            stream=stream,
        )

    def _build(
        self, template: "Template", threadgroup: tuple[int, ...], types: Any, ranks: Any
    ) -> tuple[str, bytes]:
        """The name of the function for one set of constants, and its cubin."""
        text = translation_unit(self.kernel, self.source, template, types, self.shaped, ranks)
        arch, threads = architecture(), prod(threadgroup)
        key = f"{arch} {version()} {headers()} {threads} {self.dynamic_bytes}\n{text}"
        name = f"{self.kernel.name}_{hashlib.sha256(key.encode()).hexdigest()[:20]}"
        path = host.cache_folder() / f"{name}.cubin"
        if not path.exists():
            cubin = compile_to_fit(text.replace(NAME, name), arch, threads, attribute(REGISTERS))
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                built = Path(folder) / path.name
                built.write_bytes(cubin)
                os.replace(built, path)
        return name, path.read_bytes()


NAME = "KERNEL_NAME"  # stands for the function's name, which holds a hash of the rest
FUNCTION = 'extern "C" __global__ void'


def translation_unit(
    kernel: "Kernel",
    source: tuple[str, str],
    template: "Template",
    types: tuple[Sequence[mx.Dtype], Sequence[mx.Dtype]],
    shaped: Sequence[str],
    ranks: Sequence[int],
) -> str:
    """The complete text of one instance. Parameters: inputs, outputs, then the sizes of `shaped` inputs."""
    header, body = source
    parameters = [f"const {TYPES[t]}* {name}" for name, t in zip(kernel.inputs, types[0], strict=True)]
    parameters += [f"{TYPES[t]}* {name}" for name, t in zip(kernel.outputs, types[1], strict=True)]
    sizes = {name: [f"{name}_size{i}" for i in range(rank)] for name, rank in zip(shaped, ranks, strict=True)}
    parameters += [f"int {size}" for names in sizes.values() for size in names]
    constants = [_constant(name, value) for name, value in template]
    constants += [f"const int {name}_shape[] = {{{', '.join(names)}}};" for name, names in sizes.items()]
    lines = [INCLUDES + header, f"{FUNCTION} {NAME}({', '.join(parameters)}) {{", *constants, body, "}"]
    return "\n".join(lines) + "\n"


def _constant(name: str, value: Any) -> str:
    """A template argument as a declaration."""
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"constexpr int {name} = {value};"
    return f"using {name} = {TYPES[value]};"


@functools.cache
def version() -> str:
    """NVRTC's version, on which a cubin depends."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compile_to_fit(text: str, arch: str, threads: int, limit: int) -> bytes:
    """`text`, of one kernel, as a cubin for `arch` whose `threads` need at most `limit` registers.

    Raises RuntimeError where they cannot.
    """
    cubin, registers = compile_text(text, arch)
    if registers is None or registers_of(threads, registers) > limit:
        bound = min(MOST_THREADS, -(-threads // (32 * WARPS_AT_ONCE)) * 32 * WARPS_AT_ONCE)
        cubin, registers = compile_text(
            text.replace(FUNCTION, f"{FUNCTION} __launch_bounds__({bound})"), arch
        )
        if threads > MOST_THREADS or (registers and registers_of(threads, registers) > limit):
            raise RuntimeError(f"{threads} threads of this kernel need more registers than {arch} has")
    return cubin


def registers_of(threads: int, registers: int) -> int:
    """What a group of `threads` takes: registers by REGISTERS_AT_ONCE, warps by WARPS_AT_ONCE."""
    warps = -(-threads // (32 * WARPS_AT_ONCE)) * WARPS_AT_ONCE
    return warps * -(-32 * registers // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE


def compile_text(text: str, arch: str) -> tuple[bytes, int | None]:
    """`text`, of one kernel, as a cubin for `arch`, and the registers of a thread, if NVRTC tells.

    Raises RuntimeError with the first error.
    """
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    _nvrtc("nvrtcCreateProgram", ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    try:
        flags = [f"--gpu-architecture={arch}", f"--include-path={include_folder()}", "--std=c++17"]
        flags.append("--ptxas-options=-v")  # tells the registers
        array = (ctypes.c_char_p * len(flags))(*map(str.encode, flags))
        try:
            _nvrtc("nvrtcCompileProgram", program, len(flags), array)
        except RuntimeError as error:
            lines = [line for line in log(program).splitlines() if "error" in line]
            raise RuntimeError(f"NVRTC does not compile the kernel: {(lines or [str(error)])[0]}") from error
        _nvrtc("nvrtcGetCUBINSize", program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        _nvrtc("nvrtcGetCUBIN", program, cubin)
        used = re.search(r"Used (\d+) registers", log(program))
        return cubin.raw, int(used[1]) if used else None
    finally:
        _nvrtc("nvrtcDestroyProgram", ctypes.byref(program))


def log(program: ctypes.c_void_p) -> str:
    """What NVRTC said of a program."""
    size = ctypes.c_size_t()
    _nvrtc("nvrtcGetProgramLogSize", program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    _nvrtc("nvrtcGetProgramLog", program, text)
    return text.value.decode(errors="replace")


def _nvrtc(name: str, *arguments: Any) -> None:
    """Call NVRTC. Raises RuntimeError with the status."""
    status = getattr(present(library()), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} gave status {status}")
