"""One kernel text, three compilers: how a text becomes a launch on Metal, CUDA or the CPU.

A kernel is a body file (`NAME.metal`, the body of a function for `mx.fast.metal_kernel`) plus the header
files it lists. The text stays in a subset of the Metal Shading Language that the two other compilers accept
behind a prelude. `launch` runs one kernel, `chain` several that feed each other.

    target   compiler                                      a threadgroup is
    metal    Apple's, through mx.fast.metal_kernel         a threadgroup
    cuda     NVRTC, by mx.fast.cuda_kernel or nvrtc.py     a block
    host     the system's C++ compiler, see host.py        one thread running plain loops
"""

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from kernels import host, nvrtc

FOLDER = Path(__file__).parent
TARGETS = ("metal", "cuda", "host")
STATIC_SHARED_BYTES = 48 * 1024  # CUDA's limit for shared memory declared in the text
MOST_SHARED_BYTES = 227 * 1024  # of any NVIDIA GPU so far
METAL_THREADGROUP_BYTES = 32 * 1024  # the limit of every Apple GPU
MAX_THREADS = 2**31 - 1  # along one axis of a grid, which MLX takes as an int

Template = tuple[tuple[str, int | bool | mx.Dtype], ...]


class Unavailable(RuntimeError):
    """A target or a way of running that this machine or this place in the code lacks; says which and why."""


@dataclass(frozen=True)
class Kernel:
    """A kernel text: `NAME.metal` after the files in `headers`; arrays are passed in the order given."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    headers: tuple[str, ...] = ()

    @functools.cached_property
    def header(self) -> str:
        """What comes before the kernel function, without the target's prelude."""
        return "\n".join((FOLDER / name).read_text() for name in self.headers)

    @functools.cached_property
    def body(self) -> str:
        """The body of the kernel function."""
        return (FOLDER / f"{self.name}.metal").read_text()


@dataclass(frozen=True)
class Output:
    """Stands for an output of an earlier call of a chain: output `index` of call number `call`."""

    call: int
    index: int = 0


@dataclass(frozen=True)
class Call:
    """One launch: `groups` threadgroups of `group_size` threads each (on the host, of one thread).

    `inputs` are arrays, or `Output`s of earlier calls of the same chain. `template` gives the constants and
    types of the text. `threadgroup_bytes` is what the text's scratch array needs.
    """

    kernel: Kernel
    inputs: tuple[mx.array | Output, ...]
    template: Template
    groups: tuple[int, int, int]
    group_size: tuple[int, int, int]
    output_shapes: tuple[tuple[int, ...], ...]
    output_dtypes: tuple[mx.Dtype, ...]
    threadgroup_bytes: int = field(default=0)


def default_target() -> str:
    """The target that belongs to MLX's default device."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "host"
    return "metal" if mx.metal.is_available() else "cuda"


def unavailable(target: str) -> str | None:
    """Why `target` cannot run here, in one sentence, or None if it can."""
    if target == "host":
        return host.unavailable()
    if target == "metal":
        return None if mx.metal.is_available() else "this machine has no Metal GPU"
    if target == "cuda":
        available = mx.cuda.is_available()
        return None if available else "MLX sees no NVIDIA GPU (its CUDA build is mlx[cuda13])"
    raise ValueError(f"unknown target {target!r}: one of {', '.join(TARGETS)}")


def launch(call: Call, target: str | None = None) -> list[mx.array]:
    """Run one kernel; returns its outputs. Lazy on a GPU; done when it returns on the host."""
    return chain([call], target)


def chain(calls: Sequence[Call], target: str | None = None, threads: int | None = None) -> list[mx.array]:
    """Run kernels that feed each other; returns the outputs of the last one.

    On a GPU these are `len(calls)` lazy launches; on the host one foreign call on `threads` threads
    (None: all cores) that runs them all. Raises Unavailable where the target is missing, or inside
    `mx.compile` on the host, whose kernels lie outside MLX's graph.
    """
    target = target or default_target()
    reason = unavailable(target)
    if reason:
        raise Unavailable(f"the {target} target cannot run: {reason}")
    if target == "host":
        return _chain_on_host(calls, threads)
    results: list[list[mx.array]] = []
    for call in calls:
        results.append(gpu_kernel(call, target)(**gpu_arguments(call, target, results)))
    return results[-1]


def gpu_arguments(call: Call, target: str, results: Sequence[Sequence[mx.array]] = ()) -> dict:
    """The keyword arguments of MLX's kernel object for `call`. The grid counts threads.

    Raises ValueError for a launch that is too large for `target`.
    """
    grid = tuple(g * s for g, s in zip(call.groups, call.group_size, strict=True))
    if max(grid) > MAX_THREADS:
        raise ValueError(
            f"{call.kernel.name} needs {max(grid):,} threads, more than one launch takes; split the batch"
        )
    if not fits(call, target):
        raise ValueError(
            f"{call.kernel.name} needs {call.threadgroup_bytes:,} bytes of threadgroup memory, more than "
            "this GPU has for a group; take a smaller tiling"
        )
    return {
        "inputs": [results[i.call][i.index] if isinstance(i, Output) else i for i in call.inputs],
        "template": list(call.template),
        "grid": grid,
        "threadgroup": call.group_size,
        "output_shapes": list(call.output_shapes),
        "output_dtypes": list(call.output_dtypes),
        "stream": mx.gpu,
    }


def fits(call: Call, target: str) -> bool:
    """Whether a group of `call` may have the threadgroup memory it needs on "metal" or "cuda"."""
    if target == "metal":
        return call.threadgroup_bytes <= METAL_THREADGROUP_BYTES
    return call.threadgroup_bytes <= max(STATIC_SHARED_BYTES, _most_shared_bytes())


def _most_shared_bytes() -> int:
    """What a group may have on the first CUDA device: 64 KB on Turing, 99 to 227 KB on later ones."""
    try:
        return nvrtc.attribute(nvrtc.SHARED_BYTES)
    except (OSError, RuntimeError):  # no driver or no device: the call is only looked at
        return MOST_SHARED_BYTES


def gpu_kernel(call: Call, target: str) -> Callable[..., list[mx.array]]:
    """The kernel object for `call` on "metal" or "cuda": MLX's, or one that is called alike."""
    dynamic = call.threadgroup_bytes if call.threadgroup_bytes > STATIC_SHARED_BYTES else 0
    return _gpu_kernel(call.kernel, target, dynamic)


@functools.cache
def _gpu_kernel(kernel: Kernel, target: str, dynamic_bytes: int) -> Callable[..., list[mx.array]]:
    """Build the kernel object. The name carries a hash of the text, since MLX keeps names only."""
    header, body = source(kernel, target, dynamic_bytes > 0)
    if target == "cuda" and nvrtc.chosen():
        return nvrtc.CudaKernel(kernel, (header, body), dynamic_bytes)
    name = f"{kernel.name}_{hashlib.sha256((header + body).encode()).hexdigest()[:10]}"
    common: dict[str, Any] = {
        "name": name,
        "input_names": list(kernel.inputs),
        "output_names": list(kernel.outputs),
    }
    made = (
        mx.fast.metal_kernel(source=body, header=header, **common)
        if target == "metal"
        else mx.fast.cuda_kernel(source=body, header=header, shared_memory=dynamic_bytes, **common)
    )
    return cast(Callable[..., list[mx.array]], made)  # MLX's hint is object


@functools.cache
def source(kernel: Kernel, target: str, dynamic_threadgroup_memory: bool = False) -> tuple[str, str]:
    """The header (prelude included) and the body of `kernel` as the compiler of `target` gets them."""
    prelude = (FOLDER / f"prelude_{target}.h").read_text()
    if target == "metal":
        return prelude + kernel.header, kernel.body
    if dynamic_threadgroup_memory:
        prelude = "#define DYNAMIC_THREADGROUP_MEMORY\n" + prelude
    return prelude + without_address_spaces(kernel.header), without_address_spaces(kernel.body)


def without_address_spaces(text: str) -> str:
    """`text` without the words device, constant and threadgroup, which C++ and CUDA pointers do not take."""
    return re.sub(r"\b(device|constant|threadgroup) ", "", text)


def _chain_on_host(calls: Sequence[Call], threads: int | None) -> list[mx.array]:
    """Evaluate the inputs, give each call's outputs memory, run all calls in one foreign call."""
    given = [array for call in calls for array in call.inputs if not isinstance(array, Output)]
    try:
        mx.eval(given)
    except (ValueError, RuntimeError) as error:
        raise Unavailable(
            "host kernels lie outside MLX's graph, so they cannot run inside mx.compile or another transform"
        ) from error
    results: list[list[mx.array]] = []
    steps = []
    for call in calls:
        inputs = [results[i.call][i.index] if isinstance(i, Output) else i for i in call.inputs]
        outputs = [host.empty(s, d) for s, d in zip(call.output_shapes, call.output_dtypes, strict=True)]
        results.append(outputs)
        function = host.function(call.kernel, source(call.kernel, "host"), inputs, outputs, call.template)
        steps.append(host.step(function, inputs, outputs, call.groups))
    host.run(steps, threads)
    return results[-1]
