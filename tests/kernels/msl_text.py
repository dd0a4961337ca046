"""The MSL text that MLX would compile on a Mac, and each launch of it, taken from MLX itself.

`metal_device(run)` puts a stand-in in the place of the Metal GPU: inside, `mx.fast.metal_kernel` works on any
machine, and each of its launches goes to `run` as a `Launch`. The text of a launch is what MLX prints when it
traces the call with `verbose=True`, real signature and template arguments included.
"""

import functools
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import mlx.core as mx
import numpy as np

from kernels import launcher

# MLX ends the text with an explicit instantiation by decltype, which clang rejects; nothing else is removed.
INSTANTIATION = re.compile(r"^template \[\[host_name\(.*?\)\]\] \[\[kernel\]\] decltype\((.*?)\) .*;\n", re.M)
SIGNATURE = re.compile(r"^\[\[kernel\]\] void (\w+)\(\n(.*?)\) \{$", re.M | re.S)
PARAMETER = re.compile(r"^\s*(.*?[\w*&]) (\w+) \[\[(\w+)(?:\((\d+)\))?\]\]$")


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel: `const device float* x [[buffer(0)]]`, or `uint3 … [[thread_…]]`."""

    type: str
    name: str
    attribute: str


@dataclass(frozen=True)
class Text:
    """A generated text: `source` is what clang gets, `instance` the kernel with its template arguments."""

    name: str
    complete: str
    source: str
    instance: str
    parameters: tuple[Parameter, ...]

    @property
    def buffers(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.attribute == "buffer")


@dataclass(frozen=True)
class Launch:
    """One dispatch: the text, and by buffer name the inputs, and the outputs as they are before it.

    Inputs are not evaluated yet. An output is None where Metal leaves its contents undefined.
    """

    text: Text
    inputs: dict[str, mx.array]
    outputs: dict[str, mx.array | None]
    output_shapes: dict[str, tuple[int, ...]]
    output_dtypes: dict[str, mx.Dtype]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]


def parse(printed: str) -> Text:
    """Read what MLX printed for one kernel."""
    complete = re.search(r"^```\n(.*)\n```$", printed, re.M | re.S)[1] + "\n"
    instantiation = INSTANTIATION.search(complete)
    source = INSTANTIATION.sub("", complete)
    name, parameters = SIGNATURE.search(source).groups()
    return Text(
        name,
        complete,
        source,
        instantiation[1] if instantiation else name,
        tuple(_parameter(line) for line in parameters.split(",\n")),
    )


def _parameter(line: str) -> Parameter:
    kind, name, attribute, _ = PARAMETER.match(line).groups()
    return Parameter(kind, name, attribute)


def to_numpy(array: mx.array) -> np.ndarray:
    """`array` in NumPy, row-contiguous; bfloat16, which NumPy lacks, as uint16."""
    return np.ascontiguousarray(np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array))


def from_numpy(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """The inverse of `to_numpy`."""
    return mx.array(array).view(dtype) if dtype == mx.bfloat16 else mx.array(array)


class StandIn:
    """What `mx.fast.metal_kernel` returns inside `metal_device`: a kernel whose launches go to `run`."""

    def __init__(self, run: Callable[[Launch], Sequence[mx.array]], real: Callable, **definition):
        if not definition.pop("ensure_row_contiguous", True):
            raise NotImplementedError("the stand-in hands kernels row-contiguous inputs only")
        self.run, self.definition = run, definition
        self.traced = functools.cache(functools.partial(_trace, real(**definition)))

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple] = (),
        init_value: float | None = None,
        verbose: bool = False,
        stream: object = None,
    ) -> list[mx.array]:
        inputs = [i if isinstance(i, mx.array) else mx.array(i) for i in inputs]
        # MLX's signature depends on an input's type and whether it is a scalar, small (< 8 values) or not.
        kinds = tuple((i.dtype, i.ndim if i.size < 8 else 8, min(i.size, 8)) for i in inputs)
        text = self.traced(kinds, tuple(output_dtypes), tuple(map(tuple, template)))
        arrays: dict[str, mx.array] = {}
        for name, value in zip(self.definition["input_names"], inputs, strict=True):
            strides = [int(np.prod(value.shape[i + 1 :])) for i in range(value.ndim)]
            arrays |= {name: value, f"{name}_shape": mx.array(value.shape, mx.int32)}
            arrays |= {f"{name}_strides": mx.array(strides, mx.int64), f"{name}_ndim": mx.array(value.ndim)}
        shapes = [tuple(shape) for shape in output_shapes]
        before = [
            None if init_value is None else mx.full(shape, init_value, dtype)
            for shape, dtype in zip(shapes, output_dtypes, strict=True)
        ]
        names = self.definition["output_names"]
        launch = Launch(
            text,
            {p.name: arrays[p.name] for p in text.buffers if p.name in arrays},
            dict(zip(names, before, strict=True)),
            dict(zip(names, shapes, strict=True)),
            dict(zip(names, output_dtypes, strict=True)),
            tuple(grid),
            tuple(threadgroup),
        )
        return list(self.run(launch))


def _trace(kernel: Callable, kinds: tuple, output_dtypes: tuple, template: tuple) -> Text:
    """The text MLX generates for inputs of these kinds."""
    inputs = [mx.zeros((8,) * (ndim > 0) if size == 8 else _small(ndim, size), d) for d, ndim, size in kinds]

    def call(*arrays: mx.array) -> list[mx.array]:
        return kernel(
            inputs=list(arrays),
            template=list(template),
            output_shapes=[(1,)] * len(output_dtypes),
            output_dtypes=list(output_dtypes),
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            verbose=True,
        )

    with tempfile.TemporaryDirectory() as folder, _captured_output() as printed:
        mx.export_function(os.path.join(folder, "kernel.mlxfn"), call, *inputs)
        return parse(printed())


def _small(ndim: int, size: int) -> tuple[int, ...]:
    """A shape of `ndim` axes that holds `size` values."""
    return (1,) * (ndim - 1) + (size,) if ndim else ()


@contextmanager
def _captured_output() -> Iterator[Callable[[], str]]:
    """What is written to file descriptor 1 inside the block; MLX prints past Python's sys.stdout."""
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        saved = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield lambda: os.pread(file.fileno(), 1 << 24, 0).decode()
        finally:
            os.dup2(saved, 1)
            os.close(saved)


@contextmanager
def metal_device(run: Callable[[Launch], Sequence[mx.array]]) -> Iterator[None]:
    """Inside the block every launch on the metal target is handed to `run`, which returns its outputs."""
    stand_in = functools.partial(StandIn, run, mx.fast.metal_kernel)
    launcher._gpu_kernel.cache_clear()
    try:
        with (
            mock.patch.object(mx.fast, "metal_kernel", stand_in),
            mock.patch.object(mx.metal, "is_available", lambda: True),
        ):
            yield
    finally:
        launcher._gpu_kernel.cache_clear()
