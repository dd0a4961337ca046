"""Run the kernel cases on real hardware and report the largest error of each; or write the MSL texts.

    python tests/kernels/check.py --target metal       (make check-metal; send back what it prints)
    python tests/kernels/check.py --target cuda        (make check-cuda; minutes: it compiles 150 kernels)
    python tests/kernels/check.py --target host        (make check-host; a minute)
    python tests/kernels/check.py --write-msl output/msl      (make msl; any machine, seconds)

The cases are those that the tests run emulated (kernel_cases.py), plus the trained network at every fusion
level that launches kernels, against float64. TF32 is off. Written to --out: checks.json and checks.txt. On a
Mac with Xcode's tools each text is also compiled by Apple's compiler; on a Mac in a virtual machine, whose
GPU computes wrong, that is all. Exits with 1 if anything fails.
"""

import os
import sys
from pathlib import Path

os.environ["MLX_ENABLE_TF32"] = "0"  # read when MLX is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scr"))

import functools
import json
import multiprocessing
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from kernel_cases import CASES, TARGETS, exact
from msl_text import Launch, Text, metal_device
from tqdm import tqdm

import kernels
import mlx_model
import mnist_data
import torch_model
from harness import machine, tolerances
from harness.cli import Fault, parse_settings, run_command
from harness.paths import CHECKPOINT, DATA, OUTPUT, shown, write_atomic
from kernels import nvrtc

LEVELS = ("fused", "fused-folded", "block", "network")
# What MLX puts before a kernel, as far as the texts rely on it.
MLX_NAMES = "#include <metal_stdlib>\ntypedef half float16_t;\ntypedef bfloat bfloat16_t;\n"
APPLE_COMPILER = ("xcrun", "-sdk", "macosx", "metal", "-std=metal3.1", "-Wall", "-c")


@dataclass(frozen=True)
class Settings:
    """What to check, and where to write."""

    target: str | None = field(default=None, metadata={"help": "run the cases here", "choices": TARGETS})
    out: Path | None = field(default=None, metadata={"help": "folder for checks.json and checks.txt"})
    write_msl: Path | None = field(default=None, metadata={"help": "write the MSL of every kernel here"})
    jobs: int = field(default=1, metadata={"help": "processes that share the work (NVRTC compiles slowly)"})


@dataclass(frozen=True)
class Result:
    """One comparison: the error is relative to the largest |reference|; `problem` is None if it passed."""

    kernel: str
    label: str
    dtype: str
    error: float | None
    problem: str | None


def generated_texts() -> dict[str, Text]:
    """The MSL text of every kernel instance that the cases launch on Metal, by name; nothing is run.

    Raises Fault if two texts share a name: MLX would run the first for both.
    """
    texts: dict[str, Text] = {}

    def collect(launch: Launch) -> list[mx.array]:
        if texts.setdefault(launch.text.name, launch.text) != launch.text:
            raise Fault(f"two kernels that differ are both named {launch.text.name}")
        return [mx.zeros(shape, launch.output_dtypes[n]) for n, shape in launch.output_shapes.items()]

    with metal_device(collect):
        for case in CASES:
            if "metal" in case.targets:
                case.call("metal")
    return texts


def write_texts(folder: Path, texts: dict[str, Text]) -> None:
    """One .metal file per text, complete as MLX compiles it but for MLX's own header."""
    for name, text in texts.items():
        write_atomic(folder / f"{name}.metal", text.complete)


def apple_compiler_missing() -> str | None:
    """Why Apple's compiler cannot run here, None if it can: xcrun is there without it too."""
    try:
        run = subprocess.run([*APPLE_COMPILER[:4], "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{APPLE_COMPILER[0]} cannot run ({error.strerror})"
    return (run.stderr.strip() or "xcrun metal fails") if run.returncode else None


def compile_with_xcode(texts: dict[str, Text]) -> Iterator[Result]:
    """Compile each text with Apple's compiler, which needs no GPU."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.metal"
        for name, text in tqdm(texts.items(), "xcrun metal", leave=False):
            file.write_text(MLX_NAMES + text.complete)
            run = subprocess.run(
                [*APPLE_COMPILER, file, "-o", os.devnull], capture_output=True, text=True, check=False
            )
            yield Result("xcrun metal", name, "", None, run.stderr.strip() if run.returncode else None)


def tasks(target: str) -> list[tuple[str, int | str, str]]:
    """What there is to check on `target`: (target, number of the case, "") or (target, level, dtype)."""
    cases = [(target, number, "") for number, case in enumerate(CASES) if target in case.targets]
    networks = [(target, level, dtype) for level in LEVELS for dtype in ("float32", "float16")]
    return cases + networks


def run_tasks(target: str, jobs: int) -> list[Result]:
    """Run everything, in the order of `tasks`."""
    given = tasks(target)
    if jobs == 1:
        return [run_task(task) for task in tqdm(given, target, leave=False)]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        return list(tqdm(pool.imap(run_task, given), target, len(given), leave=False))


def run_task(task: tuple[str, int | str, str]) -> Result:
    """Run one of `tasks`."""
    target, what, dtype = task
    if isinstance(what, str):
        return run_network(target, what, dtype)
    case = CASES[what]
    return compared(case.kernel, case.label, case.dtype, lambda: case.call(target), case.reference)


def run_network(target: str, level: str, dtype: str) -> Result:
    """The trained network's logits on 64 digits at a fusion level that launches kernels, against float64."""
    try:
        batch, logits, source = network_reference()
    except Fault as fault:  # no checkpoint or no digits: the cases count all the same
        return Result(f"mlx-{level}", "trained network", dtype, None, f"not checked: {fault}")

    def call() -> mx.array:
        return mlx_model.get_model(level, dtype=getattr(mx, dtype), target=target)(mx.array(batch))

    return compared(f"mlx-{level}", f"trained network, 64 of {source}", dtype, call, lambda: logits)


@functools.cache
def network_reference() -> tuple[np.ndarray, np.ndarray, str]:
    """64 digits (N, 28, 28, 1), the trained network's float64 logits for them, and where they are from."""
    import torch

    images, _, source = mnist_data.test_digits(DATA)
    x = mnist_data.normalise(images[:64])  # (64, 1, 28, 28)
    with torch.inference_mode():
        logits = torch_model.load_model(CHECKPOINT).double()(torch.from_numpy(x).double()).numpy()
    return np.moveaxis(x, 1, -1), logits, source


def compared(
    kernel: str, label: str, dtype: str, call: Callable[[], mx.array], reference: Callable[[], np.ndarray]
) -> Result:
    """Run and compare; whatever goes wrong is a result, so that one kernel does not hide the others."""
    try:
        result = exact(call())
    except Exception as error:
        return Result(kernel, label, dtype, None, f"{type(error).__name__}: {error}")
    comparison = tolerances.compare(result, reference(), dtype)
    return Result(kernel, label, dtype, comparison["relative_error"], comparison["problem"])


def report(results: list[Result], target: str, facts: dict) -> str:
    """The results as text: the machine, the largest error per kernel and dtype, what failed, each case."""
    gpu = (facts["gpu"] or {}).get("name", "no GPU")
    failed = [result for result in results if result.problem]
    lines = [
        f"kernel checks on {target}: {len(results) - len(failed)} of {len(results)} passed",
        f"{facts['chip']}, {gpu}, {facts['os']}, MLX {facts['versions'].get('mlx')}, TF32 off",
        "",
        "errors are relative to the largest value of the reference",
        f"{'kernel':<18}{'dtype':<10}{'cases':>5}{'largest error':>15}{'allowed':>9}",
    ]
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.kernel, result.dtype), []).append(result)
    for (kernel, dtype), members in groups.items():
        errors = [member.error for member in members if member.error is not None]
        largest = f"{max(errors):.1e}" if errors else "–"
        allowed = f"{tolerances.TOLERANCES[dtype]:.0e}" if dtype else "–"
        verdict = "  FAILED" if any(member.problem for member in members) else ""
        lines.append(f"{kernel:<18}{dtype:<10}{len(members):>5}{largest:>15}{allowed:>9}{verdict}")
    for result in failed:
        lines += ["", f"FAILED {result.kernel} {result.label} {result.dtype}", result.problem[:4000]]
    lines += ["", "each case:"]
    for result in results:
        error = "–" if result.error is None else f"{result.error:.1e}"
        lines.append(f"{error:>8}  {result.kernel} {result.label} {result.dtype}".rstrip())
    return "\n".join(lines) + "\n"


def check(target: str, out: Path, jobs: int) -> bool:
    """Run all checks on `target`, print the report and write it to `out`; True if all passed."""
    reason = kernels.unavailable(target)
    if reason:
        raise Fault(f"the {target} target cannot run here: {reason}")
    facts = machine.describe(sys.argv)  # before the cases load the machine
    if target == "cuda":
        facts["compiler"] = nvrtc.compiler()
    virtual = target == "metal" and "paravirtual" in mx.device_info()["device_name"].lower()
    results = [] if virtual else run_tasks(target, jobs)
    notes = []
    if virtual:
        notes.append("The GPU is a virtual machine's, which may give wrong results: no case was run.")
    missing = apple_compiler_missing() if target == "metal" else None
    if missing:
        notes.append(f"No text was compiled by Apple's compiler: {missing}")
    elif target == "metal":
        results += compile_with_xcode(generated_texts())
    if not results:
        raise Fault("nothing can be checked on a virtual machine's GPU without Xcode's tools; install them.")
    text = "\n".join([*notes, report(results, target, facts)])
    content = {"target": target, "tf32": False, "environment": facts}
    content["results"] = [vars(result) for result in results]
    write_atomic(out / "checks.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    write_atomic(out / "checks.txt", text)
    print(text.partition("\neach case:")[0])
    print(f"wrote {shown(out / 'checks.txt')} and {shown(out / 'checks.json')}")
    return all(result.problem is None for result in results)


def main(arguments: list[str] | None = None) -> int:
    """Check, write texts, or both."""
    settings = parse_settings(Settings, __doc__, arguments)
    if settings.write_msl is None and settings.target is None:
        raise Fault("nothing to do: give --target or --write-msl")
    if settings.write_msl is not None:
        texts = generated_texts()
        write_texts(settings.write_msl, texts)
        print(f"wrote {len(texts)} texts to {shown(settings.write_msl)}")
    if settings.target is None:
        return 0
    return (
        0 if check(settings.target, settings.out or OUTPUT / "checks" / settings.target, settings.jobs) else 1
    )


if __name__ == "__main__":
    run_command(main)
