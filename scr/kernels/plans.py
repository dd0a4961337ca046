"""Chains of launches prepared once and run many times, on new values of their first input.

Building a chain costs Python more than the GPU needs to run it, and on the host more than a batch of one
takes. A plan does that work once per input shape; a call then only passes pointers.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from kernels import host
from kernels.launcher import (
    Call,
    Output,
    Unavailable,
    default_target,
    gpu_arguments,
    gpu_kernel,
    source,
    unavailable,
)

ARGUMENT = Output(-1)  # in a plan's calls: the array that the plan is called with
PREVIOUS = Output(-2)  # the plan's last result, so that its runs follow each other; at first, zeros
HOST_CHUNK = 16  # images whose activations, between two launches, stay in a CPU's last-level cache

Chain = Callable[[int], Sequence[Call]]
Place = tuple[Any, int, int]  # a launch's pointers, which of them, and the first image it sees


def make_plan(
    chain: Chain, batch: int, target: str | None = None, threads: int | None = None
) -> Callable[[mx.array], mx.array]:
    """A function that runs `chain(batch)` on its argument and returns the last call's first output.

    `chain(n)` gives the calls for n images, the first of which reads ARGUMENT. On a GPU the function is lazy;
    on the host it is one foreign call on `threads` threads (None: all cores), which takes a long chain
    through the batch in chunks that stay in cache. Raises Unavailable where
    the target is missing. Threads may share a plan.
    """
    target = target or default_target()
    reason = unavailable(target)
    if reason:
        raise Unavailable(f"the {target} target cannot run: {reason}")
    if target == "host":
        return _HostPlan(chain, batch, threads)
    return _gpu_plan(chain(batch), target)


def _gpu_plan(calls: Sequence[Call], target: str) -> Callable[[mx.array], mx.array]:
    """Launch after launch, traced once."""
    steps = []
    for call in calls:
        arguments = gpu_arguments(replace(call, inputs=()), target)
        steps.append((gpu_kernel(call, target), arguments, call.inputs))

    def forward(x: mx.array, previous: mx.array) -> mx.array:
        results = [[previous], [x]]  # of call number -2, -1, 0, …
        for kernel, arguments, inputs in steps:
            arguments["inputs"] = [
                results[i.call + 2][i.index] if isinstance(i, Output) else i for i in inputs
            ]
            results.append(kernel(**arguments))
        return results[-1][0]

    traced = mx.compile(forward)  # building a kernel's text costs Python more than some kernels run
    last = mx.zeros((8,), calls[-1].output_dtypes[0])
    if not any(i is PREVIOUS for call in calls for i in call.inputs):
        return lambda x: traced(x, last)

    one_at_a_time = threading.Lock()

    def run(x: mx.array) -> mx.array:
        nonlocal last
        with one_at_a_time:
            last = traced(x, last)
            return last

    return run


class _HostPlan:
    """A chain with its memory between launches allocated and its table of launches made."""

    def __init__(self, chain: Chain, batch: int, threads: int | None):
        calls = chain(batch)
        most_groups = max(prod(call.groups) for call in calls)
        self.batch, self.threads = batch, min(threads or host.default_threads(), most_groups)
        self.result = np.empty(calls[-1].output_shapes[0], host.NUMPY_TYPES[calls[-1].output_dtypes[0]])
        size = batch if len(calls) == 1 else HOST_CHUNK
        self.alive: list = []  # what the table points to
        self.steps: list[host.Step] = []
        self.arguments: list[Place] = []
        self.constants: dict[int, np.ndarray] = {}  # by the id of the array that they are a copy of
        results: list[Place] = []
        by_size: dict[int, tuple[Sequence[Call], list[list[np.ndarray]]]] = {}
        for first in range(0, batch, size):
            count = min(size, batch - first)
            if count not in by_size:
                chunk = chain(count)
                outputs = [
                    [
                        host.aligned(shape, host.NUMPY_TYPES[dtype])
                        for shape, dtype in zip(call.output_shapes, call.output_dtypes, strict=True)
                    ]
                    for call in chunk
                ]
                by_size[count] = (chunk, outputs)
            results.append(self._add(*by_size[count], first))
        self.alive.append(by_size)
        _point(results, self.result.ctypes.data, self.result.nbytes // batch)
        self.table = (host.Step * len(self.steps))(*self.steps)
        self.one_at_a_time = threading.Lock()  # a run sets the table's pointers and fills the plan's memory

    def _add(self, calls: Sequence[Call], outputs: list[list[np.ndarray]], first: int) -> Place:
        """Append the launches of the chunk from image number `first` on; returns where its result goes."""
        for number, call in enumerate(calls):
            stand_in = outputs[-1][0]  # for the argument, of the same type; each run sets its pointer
            inputs = [
                (stand_in if i is ARGUMENT else outputs[i.call][i.index]) if isinstance(i, Output) else i
                for i in call.inputs
            ]
            function = host.function(
                call.kernel, source(call.kernel, "host"), inputs, outputs[number], call.template
            )
            inputs = [self._constant(i) if isinstance(i, mx.array) else i for i in inputs]
            step, alive = host.step(function, inputs, outputs[number], call.groups)
            pointers = ctypes.cast(step.buffers, ctypes.POINTER(ctypes.c_void_p))
            self.alive.append(alive)
            self.steps.append(step)
            for index, given in enumerate(call.inputs):
                if given is ARGUMENT:
                    self.arguments.append((pointers, index, first))
        return pointers, len(inputs), first

    def _constant(self, array: mx.array) -> np.ndarray:
        """An aligned copy of an array that is the same in every run."""
        if id(array) not in self.constants:
            mx.eval(array)
            values = host.memory(array)
            copy = host.aligned(values.shape, values.dtype)
            copy[...] = values
            self.constants[id(array)] = copy
        return self.constants[id(array)]

    def __call__(self, x: mx.array) -> mx.array:
        """Run on x, whose first axis is the batch the plan was made for."""
        try:
            mx.eval(x)
        except (ValueError, RuntimeError) as error:
            raise Unavailable(
                "host kernels lie outside MLX's graph, so they cannot run inside mx.compile or a transform"
            ) from error
        address, _alive = host.address(x)
        with self.one_at_a_time:
            _point(self.arguments, address, x.nbytes // self.batch)
            host.run_table(self.table, self.threads)
            return mx.array(self.result)  # a copy


def _point(places: Sequence[Place], address: int, stride: int) -> None:
    """Let each place's pointer point at its first image in the memory at `address`."""
    for pointers, index, first in places:
        pointers[index] = address + first * stride
