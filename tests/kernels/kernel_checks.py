"""All checks that a launch must pass before its results count, in the order in which they are made.

    syntax, address-space, lint    the text, without running it (msl_syntax.py)
    address, undefined             AddressSanitizer and UndefinedBehaviorSanitizer, in three thread orders
    barrier, threadgroup-memory    the emulator's own: all threads meet, at most 32 KB
    unwritten                      an output element that no thread has written
    uninitialised                  MemorySanitizer: a result that depends on memory nobody has written
    order                          the result depends on the order in which threads run
    race                           ThreadSanitizer: two threads meet in memory with no barrier between them
    reference                      the result differs from float64 by more than the dtype's tolerance

The first that fails is the verdict: what comes after it would only repeat the news.
"""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
from msl_emulator import (
    MEM_DEVICE,
    MEM_THREADGROUP,
    SANITIZERS,
    SCRATCH,
    Failed,
    Run,
    build_kernel,
    emulate,
    expanded,
)
from msl_syntax import check as check_syntax
from msl_text import Launch, from_numpy

from harness.tolerances import compare

UNWRITTEN = 0x7FFF  # what the emulator fills outputs with, two bytes at a time
ORDERS = [Run("forward"), Run("reverse"), Run("shuffled", seed=1)]


def check_launch(launch: Launch) -> list[mx.array]:
    """Run `launch` in every way; returns its outputs, or raises Failed with the first check that fails."""
    check_syntax(launch.text)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda sanitizer: build_kernel(launch.text, sanitizer), SANITIZERS))
    forward, *others = emulate(launch, "address", ORDERS)
    results = {n: a for n, a in zip(launch.outputs, forward, strict=True) if n != SCRATCH}
    for name, result in results.items():
        untouched = (result.view(np.uint16).reshape(*result.shape, -1) == UNWRITTEN).all(-1)
        if launch.outputs[name] is None and untouched.any():
            where = tuple(int(i) for i in np.argwhere(untouched)[0])
            raise Failed("unwritten", f"{int(untouched.sum())} elements of {name}, the first at {where}")
    emulate(launch, "memory", ORDERS[:1])
    for run, outputs in zip(ORDERS[1:], others, strict=True):
        for name, other in zip(launch.outputs, outputs, strict=True):
            if name in results and results[name].tobytes() != other.tobytes():
                raise Failed("order", f"{name} is another one when threads run in {run.order} order")
    check_races(launch)
    return [from_numpy(a, d) for a, d in zip(forward, launch.output_dtypes.values(), strict=True)]


def check_races(launch: Launch) -> None:
    """Failed if two threads meet in memory that no barrier between them orders."""
    spaces = [MEM_DEVICE] + [MEM_THREADGROUP] * ("THREADGROUP_VARIABLE" in expanded(launch.text))
    for space in spaces:
        emulate(launch, "thread", [Run(synchronised=space)])


def check_reference(result: np.ndarray, reference: np.ndarray, dtype: str) -> float:
    """The largest error relative to the largest |reference|; Failed if `dtype`'s tolerance is exceeded."""
    comparison = compare(result, reference, dtype)
    if comparison["problem"]:
        raise Failed("reference", comparison["problem"])
    return comparison["relative_error"]
