"""Compiles a generated MSL text with clang and runs it on the CPU, thread by thread, under sanitizers.

Builds lie under `.cache/` beside this file by a key of everything they depend on; delete it at will.
"""

import functools
import hashlib
import math
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from msl_text import Launch, Text, to_numpy

FOLDER = Path(__file__).parent
CACHE = FOLDER / ".cache"
COMPILER = "clang++-19"
TIMEOUT_S = 120
SCRATCH = "memory"  # the output that kernels use as scratch: what it holds afterwards means nothing

LANGUAGE = ("-x", "c++", "-std=c++14", f"-I{FOLDER / 'shim'}", "-Wno-unknown-attributes")
# Single-precision constants, and no intermediate result wider than its type, as in MSL.
NUMERICS = (
    "-ffp-contract=off",
    *("-Xclang", "-cl-single-precision-constant"),
    *("-Xclang", "-ffloat16-excess-precision=none"),
    *("-Xclang", "-fbfloat16-excess-precision=none"),
)
LIBRARY = ("-fPIC", "-shared", "-rtlib=compiler-rt", "-Wno-duplicate-decl-specifier")
SANITIZERS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-sanitize=vptr"),
    "memory": ("-fsanitize=memory", "-fsanitize-memory-track-origins"),
    "thread": ("-fsanitize=thread",),
}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:print_legend=0",
    "UBSAN_OPTIONS": "print_stacktrace=1:print_summary=1",
    # Reports that do not count are many and, with names looked up, slow.
    "TSAN_OPTIONS": "exitcode=0:history_size=2:symbolize=0",
}
WITH_NAMES = {"TSAN_OPTIONS": "exitcode=0:history_size=2"}
THREAD_ATTRIBUTES = re.findall(r"\b(thread\w+|dispatch\w+);", (FOLDER / "shim" / "emulator.h").read_text())

MEM_DEVICE, MEM_THREADGROUP = 1, 2


class Failed(Exception):
    """A check that a kernel fails: `check` names it, the message says what is wrong."""

    def __init__(self, check: str, message: str):
        super().__init__(f"{check}: {message}")
        self.check = check


@dataclass(frozen=True)
class Run:
    """One dispatch: the order in which threads run, and the mem_flags whose barriers order memory."""

    order: str = "forward"
    seed: int = 0
    synchronised: int = MEM_DEVICE | MEM_THREADGROUP


@functools.cache
def unavailable() -> str | None:
    """Why kernels cannot be emulated here, in one sentence, or None."""
    if not shutil.which(COMPILER):
        return f"{COMPILER} is not installed (Debian, Ubuntu: clang-19 and libclang-rt-19-dev)"
    probe = [COMPILER, "-fsanitize=address", "-x", "c++", "-", "-o", os.devnull]
    run = subprocess.run(probe, input="int main() {}", capture_output=True, text=True, check=False)
    return None if run.returncode == 0 else f"{COMPILER} lacks the sanitizers (libclang-rt-19-dev)"


@functools.cache
def _identity() -> str:
    """What every build depends on besides its text."""
    version = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout
    files = (FOLDER / "emulator.cpp", FOLDER / "shim" / "emulator.h", FOLDER / "shim" / "metal_stdlib")
    parts = (version, *LANGUAGE, *NUMERICS, str(SANITIZERS), Path(__file__).read_text())
    return "\n".join((*parts, *(file.read_text() for file in files)))


def clang(arguments: tuple[str, ...], text: str) -> subprocess.CompletedProcess:
    """Run the compiler on `text`."""
    return subprocess.run(
        [COMPILER, *arguments, "-"], input=text, capture_output=True, text=True, check=False, cwd=FOLDER
    )


@functools.cache
def expanded(text: Text) -> str:
    """`text.source` with its own macros expanded, comments gone and threadgroup variables marked."""
    run = clang((*LANGUAGE, "-E", "-DEXPAND"), f'#line 1 "{text.name}.metal"\n{text.source}')
    if run.returncode:
        raise Failed("syntax", run.stderr)
    lines = re.sub(r'^# (\d+) ("[^"]*").*$', r"#line \1 \2", run.stdout, flags=re.M)
    # A threadgroup variable, unlike a threadgroup pointer, has no * or & before its name. All are aligned.
    return "#include <metal_stdlib>\n" + re.sub(
        r"(?:\balignas\(\d+\)\s*)?\bthreadgroup\s+(\w+(?:\s*<[^<>;]*>)?)\s+(\w+)((?:\s*\[[^\]]*\])*)\s*;",
        r"THREADGROUP_VARIABLE(\1, \2, \3);",
        lines,
    )


def unit(text: Text) -> str:
    """The translation unit that runs `text`: the kernel, and the entry through which a thread runs it."""
    arguments = []
    for number, buffer in enumerate(text.buffers):
        pointer = buffer.type.replace("&", "*")
        of = "*" if buffer.type.endswith("&") else ""
        arguments.append(f"{of}static_cast<{pointer}>(buffers[{number}])")
    arguments += [f"at.{p.attribute}" for p in text.parameters if p.attribute != "buffer"]
    return (
        expanded(text)
        + 'extern "C" void emulated_kernel(void* const* buffers, const EmulatedThread& at) {\n'
        + f"  {text.instance}({', '.join(arguments)});\n}}\n"
    )


def build_kernel(text: Text, sanitizer: str) -> Path:
    """The shared library of `text` under `sanitizer`."""
    flags = (*LANGUAGE, *NUMERICS, *SANITIZERS[sanitizer], "-DEMULATE", "-O1", "-g", *LIBRARY)
    return _build(unit(text), f"{sanitizer}-", ".so", flags)


@functools.cache
def build_emulator(sanitizer: str) -> Path:
    """The program that runs such libraries. For ThreadSanitizer its own accesses must not be seen."""
    instrumented = SANITIZERS[sanitizer] if sanitizer != "thread" else ()
    common = ("-std=c++17", "-O1", "-g", f"-DUSE_{sanitizer.upper()}_SANITIZER", f"-I{FOLDER}")
    source = (FOLDER / "emulator.cpp").read_text()
    object_file = _build(source, f"emulator-{sanitizer}-", ".o", ("-x", "c++", "-c", *common, *instrumented))
    link = (*SANITIZERS[sanitizer], "-rdynamic", str(object_file), "-x", "c++")
    return _build("", f"emulator-{sanitizer}-", "", link)


def _build(text: str, prefix: str, suffix: str, flags: tuple[str, ...]) -> Path:
    """Compile `text` unless the cache has it; the result appears complete or not at all."""
    key = hashlib.sha256("\n".join((_identity(), *flags, text)).encode()).hexdigest()[:24]
    built = CACHE / f"{prefix}{key}{suffix}"
    if not built.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            partial = Path(folder) / "built"
            run = clang((*flags, "-o", str(partial)), text)
            if run.returncode:
                raise Failed("syntax", run.stderr)
            os.replace(partial, built)
    return built


def emulate(
    launch: Launch,
    sanitizer: str,
    runs: list[Run],
    ends: dict[str, np.ndarray] | None = None,
    groups: tuple[int, int] | None = None,
) -> list[list[np.ndarray]]:
    """Dispatch `launch` once per entry of `runs` (of different orders); returns the outputs of each.

    For launches too large to be held: `ends` gives the last values of inputs, the others being zero, and
    `groups` the first and the last group to run. Of an output over 1 GB the last MB is returned, flat.
    Raises Failed, naming the check that a sanitizer or the emulator found violated.
    """
    library, emulator = build_kernel(launch.text, sanitizer), build_emulator(sanitizer)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [f"{word} {' '.join(map(str, getattr(launch, word)))}" for word in ("grid", "threadgroup")]
        if groups:
            lines.append(f"groups {groups[0]} {groups[1]}")
        for buffer in launch.text.buffers:
            file = folder / buffer.name
            if buffer.name in launch.inputs:
                array = launch.inputs[buffer.name]
                given = ends[buffer.name] if ends and buffer.name in ends else to_numpy(array)
                given.tofile(file)
                lines.append(f"input {array.nbytes} {file}")
                continue
            before = launch.outputs[buffer.name]
            if before is not None:
                to_numpy(before).tofile(file)
            size = math.prod(launch.output_shapes[buffer.name]) * _numpy_type(launch, buffer.name).itemsize
            word = "scratch" if buffer.name == SCRATCH else "output"
            lines.append(f"{word} {size} {file} {'-' if before is None else file}")
        lines += [f"run {run.order} {run.seed} {run.synchronised}" for run in runs]
        (folder / "job").write_text("\n".join(lines) + "\n")
        command = [str(emulator), str(library), str(folder / "job")]
        try:
            _execute(command, OPTIONS)
        except Failed as failed:
            if failed.check == "race":
                _execute(command, OPTIONS | WITH_NAMES)
            raise
        return [[_read(launch, name, folder / f"{name}.{r.order}") for name in launch.outputs] for r in runs]


def _read(launch: Launch, name: str, file: Path) -> np.ndarray:
    """An output that the emulator has saved; flat where only its end was."""
    array, shape = np.fromfile(file, _numpy_type(launch, name)), launch.output_shapes[name]
    return array.reshape(shape) if array.size == math.prod(shape) else array


def _numpy_type(launch: Launch, name: str) -> np.dtype:
    dtype = launch.output_dtypes[name]
    return np.dtype(np.uint16 if dtype == mx.bfloat16 else str(dtype).removeprefix("mlx.core."))


def _execute(command: list[str], options: dict[str, str]) -> None:
    """Run the emulator and turn its verdict, or a sanitizer's, into `Failed`."""
    environment = {**os.environ, **options}
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=environment, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise Failed("time", f"the kernel has not ended after {TIMEOUT_S} s") from None
    report = re.sub(r"^.*WARNING: ASan doesn't fully.*\n|^Shadow bytes(.*\n)*", "", run.stderr, flags=re.M)
    last = run.stdout.rstrip().rpartition("\n")[2]
    if last == "PASS" and run.returncode == 0:
        return
    if last.startswith("FAIL "):
        _, check, message = last.split(" ", 2)
        raise Failed(check, f"{message}\n{report}".rstrip())
    summary = re.search(r"^SUMMARY: (\w+): (.*)$", run.stderr, re.M)
    if summary:
        checks = {
            "AddressSanitizer": "address",
            "UndefinedBehaviorSanitizer": "undefined",
            "MemorySanitizer": "uninitialised",
        }
        raise Failed(checks.get(summary[1], summary[1]), f"{summary[2]}\n{report}")
    raise Failed("crash", f"exit status {run.returncode}\n{report}")
