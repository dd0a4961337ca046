"""The host target: a kernel text compiled by the system's C++ compiler and called on the arrays' memory.

Libraries are cached under `.cache/` beside this file (or the user's temporary folder where that is not
writable) by a key of text, compiler and processor, and written atomically. `CXX` picks the compiler.
"""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, cast

import mlx.core as mx
import numpy as np

from harness.present import present

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

    from kernels.launcher import Kernel, Template

FOLDER = Path(__file__).parent
COMPILERS = ("clang++", *(f"clang++-{version}" for version in range(21, 13, -1)), "g++", "c++")
MAX_THREADS = 1024  # more is a mistake
CACHE_LINE = 64  # bytes, and the width of the widest vector
POINTER_TYPES = {
    "float32": "float",
    "float16": "half",
    "bfloat16": "bfloat",
    "int32": "int",
    "uint32": "uint",
}
NUMPY_TYPES: dict[mx.Dtype, type[np.generic]] = {mx.float32: np.float32, mx.float16: np.float16}
Array = mx.array | np.ndarray


class Step(ctypes.Structure):
    """One launch of a chain, as `run_chain` of host_pool.cpp reads it."""

    _fields_ = (
        ("run", ctypes.c_void_p),
        ("buffers", ctypes.c_void_p),
        ("shapes", ctypes.c_void_p),
        ("groups", ctypes.c_uint32 * 3),
    )


@functools.cache
def compiler() -> str | None:
    """The C++ compiler's path: `CXX`, else the first of COMPILERS that is installed."""
    for name in (os.environ.get("CXX"), *COMPILERS):
        path = shutil.which(name) if name else None
        if path:
            return path
    return None


def _compiler() -> str:
    """The compiler where there is one, as `unavailable` has been asked."""
    return present(compiler())


def unavailable() -> str | None:
    """Why the host target cannot run, or None."""
    if compiler() is None:
        return "no C++ compiler found (clang++ or g++ on the PATH, or CXX)"
    try:
        default_threads()
    except ValueError as error:
        return str(error)
    return None


@functools.cache
def flags() -> tuple[str, ...]:
    """Compiler flags. Fused multiply-adds are wanted; nothing that changes results beyond rounding is."""
    apple_silicon = platform.system() == "Darwin" and platform.machine() == "arm64"
    native = "-mcpu=native" if apple_silicon else "-march=native"
    return (
        "-std=c++20",
        "-O3",
        native,
        "-ffp-contract=fast",
        "-fno-math-errno",
        "-fPIC",
        "-shared",
        "-pthread",
    )


@functools.cache
def vector_width() -> int:
    """Floats in a `vf` of prelude_host.h: what the compiler, asked for this processor, defines decides."""
    command = [_compiler(), *flags(), "-dM", "-E", "-x", "c++", os.devnull]
    macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return 16 if "__AVX512F__" in macros else 8


@functools.cache
def identity() -> str:
    """What a compiled library depends on besides its text: compiler, flags, processor."""
    version = subprocess.run([_compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    cpu = platform.processor() + platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu += "".join(sorted(set(re.findall(r"^(?:flags|Features|model name).*", info.read_text(), re.M))))
    return "\n".join((version, *flags(), cpu))


def build(text: str, name: str) -> Path:
    """Compile `text` into a shared library, unless the cache has it; returns its path.

    Raises RuntimeError with the compiler's first error.
    """
    key = hashlib.sha256((identity() + text).encode()).hexdigest()[:20]
    library = cache_folder() / f"{name}-{key}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        unit = Path(folder) / f"{name}.cpp"
        unit.write_text(text)
        run = subprocess.run(
            [_compiler(), *flags(), "-o", built, unit], capture_output=True, text=True, check=False
        )
        if run.returncode != 0:
            errors = [line for line in run.stderr.splitlines() if "error" in line] or [run.stderr]
            raise RuntimeError(f"{Path(_compiler()).name} does not compile the kernel {name}: {errors[0]}")
        os.replace(built, library)
    return library


@functools.cache
def cache_folder() -> Path:
    """The folder of compiled libraries."""
    folder = FOLDER / ".cache"
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:  # a folder of this user's own, the same for every process
        folder = Path(tempfile.gettempdir()) / f"kernels-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid == os.getuid():
            return folder
        return Path(tempfile.mkdtemp(prefix="kernels-"))


def function(
    kernel: "Kernel",
    source: tuple[str, str],
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    template: "Template",
) -> int:
    """The address of the compiled kernel for arrays of these types and this template."""
    types = tuple(str(a.dtype).removeprefix("mlx.core.") for a in (*inputs, *outputs))
    return _function(kernel, source, types, template)


@functools.cache
def _function(kernel: "Kernel", source: tuple[str, str], types: tuple[str, ...], template: "Template") -> int:
    text = translation_unit(kernel, source, types, template)
    library = ctypes.CDLL(str(build(text, kernel.name)))
    return present(ctypes.cast(library.run_group, ctypes.c_void_p).value)


def translation_unit(
    kernel: "Kernel", source: tuple[str, str], types: Sequence[str], template: "Template"
) -> str:
    """The C++ text around a kernel body: its arguments, its template constants, and one thread per group."""
    header, body = source
    parameters, arguments = [], []
    for index, (name, kind) in enumerate(zip((*kernel.inputs, *kernel.outputs), types, strict=True)):
        const = "const " if index < len(kernel.inputs) else ""
        pointer = f"{const}{POINTER_TYPES[kind]}*"
        parameters.append(f"{pointer} __restrict__ {name}")
        arguments.append(f"static_cast<{pointer}>(buffers[{index}])")
        if const and re.search(rf"\b{name}_shape\b", body):
            parameters.append(f"const int* {name}_shape")
            arguments.append(f"shapes[{index}]")
    constants = []
    for name, value in template:
        if isinstance(value, mx.Dtype):
            constants.append(f"using {name} = {POINTER_TYPES[str(value).removeprefix('mlx.core.')]};")
        else:
            constants.append(
                f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {int(value)};"
            )
    return f"""{header}
static void group({", ".join(parameters)}, const uint3 threadgroup_position_in_grid) {{
  {" ".join(constants)}
  constexpr uint3 thread_position_in_threadgroup{{0, 0, 0}}, threads_per_threadgroup{{1, 1, 1}};
  (void)thread_position_in_threadgroup, (void)threads_per_threadgroup;
{body}
}}
extern "C" void run_group(void* const* buffers, const int* const* shapes, uint x, uint y, uint z) {{
  (void)shapes;
  group({", ".join(arguments)}, uint3{{x, y, z}});
}}
"""


def step(
    function: int, inputs: Sequence[Array], outputs: Sequence[Array], groups: tuple[int, int, int]
) -> tuple[Step, tuple]:
    """A launch of a compiled function on evaluated arrays, and what must stay alive while it runs."""
    places = [address(array) for array in (*inputs, *outputs)]
    shapes = [(ctypes.c_int32 * array.ndim)(*array.shape) for array in inputs]
    buffers = (ctypes.c_void_p * len(places))(*(start for start, _ in places))
    shape_table = (ctypes.c_void_p * max(1, len(shapes)))(*map(ctypes.addressof, shapes))
    record = Step(function, ctypes.addressof(buffers), ctypes.addressof(shape_table), groups)
    return record, (places, shapes, buffers, shape_table)


def memory(array: Array) -> np.ndarray:
    """The memory of an evaluated array as a row-contiguous NumPy view, bfloat16 as its bits.

    An array that is not row-contiguous is copied, as MLX does for its own custom kernels.
    """
    if isinstance(array, mx.array) and array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.ascontiguousarray(array)


def address(array: Array) -> tuple[int, object]:
    """Where an evaluated array's memory, row-contiguous, begins, and what must stay alive meanwhile.

    As `memory(array).ctypes.data`, without NumPy's objects where none is needed.
    """
    try:
        start = ctypes.c_char.from_buffer(cast("Buffer", array))  # MLX's hints do not tell that it is one
    except (TypeError, ValueError, BufferError):  # not contiguous, or not a type that Python knows
        view = memory(array)
        return view.ctypes.data, view
    return ctypes.addressof(start), start


def aligned(shape: Sequence[int], dtype: np.dtype | type[np.generic]) -> np.ndarray:
    """Zeros that begin with a cache line, so that no vector lies across two. MLX's arrays do not."""
    kind = np.dtype(dtype)
    size = prod(shape) * kind.itemsize
    room = np.zeros(size + CACHE_LINE, np.uint8)
    start = -room.ctypes.data % CACHE_LINE
    return room[start : start + size].view(kind).reshape(shape)


def empty(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """An evaluated MLX array to write to, of any values. `mx.zeros` would wait for one of MLX's threads."""
    if dtype in NUMPY_TYPES:
        return mx.array(np.empty(shape, NUMPY_TYPES[dtype]))
    array = mx.zeros(shape, dtype)
    mx.eval(array)
    return array


@functools.cache
def _pool() -> Callable[..., None]:
    """The thread pool's `run_chain`."""
    run_chain = ctypes.CDLL(str(build((FOLDER / "host_pool.cpp").read_text(), "host_pool"))).run_chain
    run_chain.argtypes, run_chain.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int), None
    return run_chain


def run(steps: Sequence[tuple[Step, tuple]], threads: int | None = None) -> None:
    """Run the steps in order, the groups of each on `threads` threads (None: the process's cores)."""
    run_table((Step * len(steps))(*(record for record, _ in steps)), threads or default_threads())


def run_table(table: ctypes.Array, threads: int) -> None:
    """Run an array of `Step`s in order on `threads` threads."""
    _pool()(ctypes.addressof(table), len(table), threads)


def default_threads() -> int:
    """The number of cores this process may use, or `HOST_THREADS` where it is set.

    Raises ValueError for a HOST_THREADS that is no number of threads.
    """
    given = os.environ.get("HOST_THREADS")
    if given:
        if not given.isdecimal() or not 1 <= int(given) <= MAX_THREADS:
            raise ValueError(f"HOST_THREADS is {given!r}, not a number of threads from 1 to {MAX_THREADS}")
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
