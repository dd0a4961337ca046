"""Four small sound kernels, and edits that plant one bug in them: the tests of the checks themselves."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from kernel_checks import check_launch, check_reference
from msl_text import metal_device

PRELUDE = """#include <metal_stdlib>
using namespace metal;
"""


@dataclass(frozen=True)
class Toy:
    """A kernel from x (n,) and p to y (n,): its text, its launch, and what it computes in float64."""

    name: str
    text: str
    reference: Callable[[np.ndarray, np.ndarray], np.ndarray]
    n: int = 100
    threads: int = 32
    parameters: int = 3
    grid: int | None = None  # None: n
    header: str = ""

    def check(self) -> None:
        """Run all checks; raise Failed with the first that fails."""
        rng = np.random.default_rng(0)
        x, p = rng.normal(size=self.n).astype(np.float32), rng.normal(size=self.parameters).astype(np.float32)
        with metal_device(check_launch):
            kernel = mx.fast.metal_kernel(
                name=f"toy_{self.name}",
                input_names=["x", "p"],
                output_names=["y"],
                header=PRELUDE + self.header,
                source=self.text,
            )
            (y,) = kernel(
                inputs=[mx.array(x), mx.array(p)],
                template=[("T", mx.float32)],
                grid=(self.grid or self.n, 1, 1),
                threadgroup=(self.threads, 1, 1),
                output_shapes=[(self.n,)],
                output_dtypes=[mx.float32],
            )
        reference = self.reference(x.astype(np.float64), p.astype(np.float64))
        check_reference(np.array(y), reference, "float32")


# One thread per element; the last group is partial. p has fewer than 8 values, so it is `constant`.
SCALE = Toy(
    "scale",
    header="""inline float product(const constant float* values, float x) { return values[0] * x; }
""",
    text="""const uint i = thread_position_in_grid.x, n = x_shape[0];
const device T* from = x;
if (i < n) {
  y[i] = T(metal::max(product(p, from[i]), 0.0f));
}
""",
    reference=lambda x, p: np.maximum(p[0] * x, 0),
)

# Three taps with a zero of padding on either side, the grid rounded up to whole groups.
TAPS = Toy(
    "taps",
    grid=128,
    text="""const uint n = x_shape[0];
for (uint i = thread_position_in_grid.x; i < n; i += threads_per_grid.x) {
  float sum = 0.0f;
  for (uint k = 0; k < 3; ++k)
    if (i + k >= 1 && i + k <= n) sum = metal::fma(p[k], x[i + k - 1], sum);
  y[i] = T(sum);
}
""",
    reference=lambda x, p: np.convolve(x, p[::-1], "same"),
)

# Each group loads parameters into threadgroup memory, twice the same; a thread uses its left neighbour's.
SHARED = Toy(
    "shared",
    n=128,
    parameters=32,
    text="""threadgroup float tile[32];
const uint lid = thread_position_in_threadgroup.x, n = threads_per_grid.x;
for (uint round = 0; round < 2; ++round) {
  tile[lid] = p[lid];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint i = thread_position_in_grid.x / 2 + round * n / 2;
  const float value = x[i] * tile[lid == 0 ? 0 : lid - 1];
  if (thread_position_in_grid.x % 2 == 0) y[i] = T(value);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
""",
    reference=lambda x, p: x * np.tile(p[np.maximum(np.arange(0, 32, 2) - 1, 0)], 8),
)

# Four elements per thread as one vector.
VECTOR = Toy(
    "vector",
    n=128,
    grid=32,
    parameters=8,
    text="""const uint i = thread_position_in_grid.x;
const float4 scale = float4(p[0], p[1], p[2], p[3]);
const float4 value = *reinterpret_cast<const device float4*>(x + 4 * i) * scale;
float sum = 0.0f;
for (uint k = 0; k < 4; ++k) sum += value[k];
*reinterpret_cast<device float4*>(y + 4 * i) = value + sum;
""",
    reference=lambda x, p: (v := x.reshape(-1, 4) * p[:4], (v + v.sum(1, keepdims=True)).reshape(-1))[1],
)

TOYS = (SCALE, TAPS, SHARED, VECTOR)


@dataclass(frozen=True)
class Bug:
    """`old` becomes `new` in the text, or the launch changes as `launch` says; `check` fails, none before."""

    title: str
    check: str
    toy: Toy
    old: str = ""
    new: str = ""
    launch: tuple[tuple[str, int], ...] = ()
    message: str = ""  # a regular expression that the failure's message must match


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
LOAD, USE = f"tile[lid] = p[lid];\n  {BARRIER}", f"y[i] = T(value);\n  {BARRIER}"

BUGS = (
    Bug("out-of-bounds read", "address", SCALE, "from[i])", "from[i + 1])", message="heap-buffer-overflow"),
    Bug("out-of-bounds write", "address", SCALE, "y[i] =", "y[i + 1] =", message="heap-buffer-overflow"),
    Bug("write past threadgroup memory", "address", SHARED, "tile[lid] =", "(tile + 1)[lid] ="),
    Bug(
        "index past a threadgroup array", "undefined", SHARED, "tile[32]", "tile[31]", message="out of bounds"
    ),
    Bug(
        "misaligned vector read", "undefined", VECTOR, "(x + 4 * i)", "(x + 4 * i + 1)", message="misaligned"
    ),
    Bug("vector element out of range", "undefined", VECTOR, "k < 4", "k < 5", message="out of bounds"),
    Bug("signed overflow in an index", "undefined", TAPS, "y[i] =", "y[int(i) * 0x7fffffff % 1 + i] ="),
    Bug("uninitialised accumulator", "uninitialised", TAPS, "float sum = 0.0f;", "float sum;"),
    Bug("uninitialised threadgroup memory", "uninitialised", SHARED, "tile[lid] =", "if (lid) tile[lid] ="),
    Bug("unwritten output", "unwritten", SCALE, "i < n", "i + 1 < n", message=r"1 elements of y, .*\(99,\)"),
    Bug("grid counted in groups", "unwritten", SCALE, launch=(("grid", 4),), message="96 elements"),
    Bug("padding off by one", "reference", TAPS, "i + k >= 1", "i + k >= 2"),
    Bug("missing first barrier", "order", SHARED, LOAD, "tile[lid] = p[lid];", message="reverse"),
    Bug("missing last barrier", "race", SHARED, USE, "y[i] = T(value);", message="threadgroup memory"),
    Bug("barrier of the wrong memory", "race", SHARED, "mem_flags::mem_threadgroup", "mem_flags::mem_device"),
    Bug(
        "race between groups",
        "race",
        SHARED,
        "threadgroup float tile[32];",
        "threadgroup float tile[32]; y[0] = x[0] * p[0];",
        message="device memory",
    ),
    Bug(
        "divergent barrier",
        "barrier",
        SHARED,
        LOAD,
        f"tile[lid] = p[lid];\n  if (lid > 0) {BARRIER}",
        message=r"thread \(0, 0, 0\) waits at line 19, thread \(1, 0, 0\) waits at line 15",
    ),
    Bug("return before a barrier", "barrier", SHARED, "tile[lid] =", "if (lid) return; tile[lid] ="),
    Bug(
        "too much threadgroup memory", "threadgroup-memory", SHARED, "tile[32]", "tile[8193]", message="32772"
    ),
    Bug("small array as device pointer", "address-space", SCALE, "(p, from", "(x, from"),
    Bug("threadgroup pointer to device", "address-space", SCALE, "device T* from", "threadgroup T* from"),
    Bug("write to a const input", "syntax", SCALE, "y[i] =", "x[i] =", message="read-only"),
    Bug("mixed types in max", "syntax", SCALE, "0.0f", "0", message="ambiguous"),
    Bug("double", "syntax", SCALE, "const uint i", "double d = 0; const uint i", message="poisoned"),
    Bug("standard library", "syntax", SCALE, "metal::max", "std::max", message="poisoned"),
    Bug("goto", "syntax", SCALE, "const uint i", "goto end; end: const uint i", message="poisoned"),
    Bug("if constexpr", "syntax", SCALE, "if (i", "if constexpr (i"),
    Bug("word outside the shim", "syntax", SCALE, "metal::max", "metal::fmax3"),
    Bug("pointer without address space", "lint", SCALE, "if (i", "T value = 0; T* q = &value; if (i"),
    Bug("C-style pointer cast", "lint", SCALE, "= x;", "= (const device T*)x;", message="cast"),
    Bug("lambda", "lint", SCALE, "if (i", "auto f = [&](float v) { return v; }; if (i", message="lambda"),
)
