"""What every kernel in scr/kernels/ is checked on: inputs, the call, and the answer in float64 by NumPy.

The same cases run everywhere: emulated (test_kernels.py), and by check.py on Metal, CUDA and the host. Sizes
straddle tiles and SIMD groups, channels go below a vector, statistics lie far from 0 and 1.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

import kernels
from kernels import BlockShape, Kernel, NetworkShape, NetworkTiling, Tiling, tilings
from kernels.blocks import block_head_call
from kernels.square import square_call

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
TARGETS = kernels.TARGETS
NETWORK = NetworkShape(
    (
        BlockShape(28, 28, 48, 96, 2, stem=True),
        BlockShape(14, 14, 96, 96, 1),
        BlockShape(14, 14, 96, 192, 2),
        BlockShape(7, 7, 192, 192, 1),
    ),
    classes=10,
)

Reference = Callable[[], np.ndarray]


@dataclass(frozen=True)
class Case:
    """One check of one kernel: `call(target)` must give `reference()` within the dtype's tolerance."""

    kernel: str  # NAME of scr/kernels/NAME.metal
    label: str
    dtype: str
    call: Callable[[str], mx.array]
    reference: Reference
    targets: Sequence[str] = TARGETS

    def __str__(self) -> str:
        return f"{self.kernel} {self.label} {self.dtype}"


def generator(*words: object) -> np.random.Generator:
    """Random numbers that belong to these words: the same on every machine and in any order of cases."""
    return np.random.default_rng(zlib.crc32(" ".join(map(str, words)).encode()))


def values(
    rng: np.random.Generator, shape: Sequence[int], dtype: str, layout: str = "contiguous"
) -> mx.array:
    """Normal values of `shape` and `dtype`; `layout` says how they lie in memory.

    "channels-first": a transposed view; "sliced": every other element of a larger array, from the second on.
    """
    array = rng.normal(size=shape).astype(np.float32)
    if layout == "channels-first":
        return mx.moveaxis(
            mx.array(np.ascontiguousarray(np.moveaxis(array, -1, 1))).astype(DTYPES[dtype]), 1, -1
        )
    if layout == "sliced":
        large = np.full([2 * n + 1 for n in shape], np.nan, np.float32)
        inner = tuple(slice(1, None, 2) for _ in shape)
        large[inner] = array
        return mx.array(large).astype(DTYPES[dtype])[inner]
    return mx.array(array).astype(DTYPES[dtype])


def exact(array: mx.array) -> np.ndarray:
    """The values of `array` in float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def floats(array: np.ndarray) -> mx.array:
    """`array` as float32."""
    return mx.array(array.astype(np.float32))


# ---- The mathematics, in float64 and NHWC ----


def depthwise(x: np.ndarray, taps: np.ndarray, stride: int = 1) -> np.ndarray:
    """Depthwise 3×3 convolution, padding 1. x (N, H, W, C), taps (9, C) -> (N, ⌈H/stride⌉, ⌈W/stride⌉, C)."""
    _, h, w, _ = x.shape
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return sum(padded[:, k // 3 :, k % 3 :][:, :h:stride, :w:stride] * tap for k, tap in enumerate(taps))


def relu(x: np.ndarray) -> np.ndarray:
    """max(x, 0)."""
    return np.maximum(x, 0)


@dataclass(frozen=True)
class BlockWeights:
    """Random folded weights of a block, of the sizes that `pack_block` takes, as float32 values."""

    shape: BlockShape
    parts: tuple[np.ndarray, ...]  # the stem's taps and bias, if any; taps, bias, matrix, output bias

    @classmethod
    def random(cls, shape: BlockShape, rng: np.random.Generator) -> "BlockWeights":
        c, k, n = shape.channels, shape.depth, shape.outputs
        sizes = [(9, c), (c,)] * (2 if shape.stem else 1) + [(k, n), (n,)]
        # Sums stay of order 1 from layer to layer; the biases do not shrink.
        scales = [size[0] ** -0.5 if len(size) == 2 else 1.0 for size in sizes]
        arrays = [rng.normal(scale=s, size=size) for s, size in zip(scales, sizes, strict=True)]
        return cls(shape, tuple(a.astype(np.float32) for a in arrays))

    def packed(self, target: str) -> mx.array:
        """What the kernel takes on `target`."""
        *stem, taps, bias, matrix, out_bias = map(mx.array, self.parts)
        return kernels.pack_block(self.shape, taps, bias, matrix, out_bias, tuple(stem) or None, target)

    def apply(self, x: np.ndarray) -> np.ndarray:
        """The block on x, in float64."""
        *stem, taps, bias, matrix, out_bias = (part.astype(np.float64) for part in self.parts)
        if stem:
            x = relu(depthwise(np.repeat(x, self.shape.channels, -1), stem[0]) + stem[1])
        rows = relu(depthwise(x, taps, self.shape.stride) + bias)
        if self.shape.projected:
            s = self.shape.stride
            return relu(np.concatenate([rows, x[:, ::s, ::s]], -1) @ matrix + out_bias)
        return relu(rows @ matrix + out_bias + x)


@dataclass(frozen=True)
class NetworkWeights:
    """Random folded weights of a whole network."""

    shape: NetworkShape
    blocks: tuple[BlockWeights, ...]
    fc: np.ndarray  # (classes, C)
    fc_bias: np.ndarray

    @classmethod
    def random(cls, shape: NetworkShape, rng: np.random.Generator) -> "NetworkWeights":
        last = shape.blocks[-1].outputs
        return cls(
            shape,
            tuple(BlockWeights.random(block, rng) for block in shape.blocks),
            rng.normal(scale=last**-0.5, size=(shape.classes, last)).astype(np.float32),
            rng.normal(size=shape.classes).astype(np.float32),
        )

    def packed(self, target: str) -> mx.array:
        """What the kernels take on `target`."""
        head = kernels.pack_head(mx.array(self.fc), mx.array(self.fc_bias))
        return mx.concatenate([*(block.packed(target) for block in self.blocks), head])

    def apply(self, x: np.ndarray) -> np.ndarray:
        """The network on x, in float64."""
        for block in self.blocks:
            x = block.apply(x)
        return x.mean((1, 2)) @ self.fc.astype(np.float64).T + self.fc_bias


# ---- The cases ----


def square_cases() -> Iterator[Case]:
    """Sizes around a group's 1024 values."""
    sizes = [(n,) for n in (1, 7, 31, 32, 33, 1023, 1024, 1025)] + [(3, 28, 28)]
    layouts = [(size, "contiguous") for size in sizes] + [((33, 7), "channels-first"), ((33, 7), "sliced")]
    for dtype in DTYPES:
        for size, layout in layouts:
            x = values(generator("square", size, dtype), size, dtype, layout)
            label = f"{'x'.join(map(str, size))} {layout}"
            yield Case("square", label, dtype, lambda t, x=x: kernels.square(x, t), lambda x=x: exact(x) ** 2)


@dataclass(frozen=True)
class EditedKernel(Kernel):
    """A kernel under another one's name, with `new` for `old` in its text."""

    old: str = ""
    new: str = ""

    @functools.cached_property
    def body(self) -> str:
        assert self.old in super().body
        return super().body.replace(self.old, self.new)


def name_cases() -> Iterator[Case]:
    """Two kernels of one name: no cache, ours, MLX's or on disk, may take the one for the other."""
    x = values(generator("same name"), (33,), "float32")
    other = EditedKernel("square", ("x",), ("y",), old="value * value", new="value * value + 1.0f")

    def call(target: str) -> mx.array:
        mx.eval(kernels.square(x, target))
        return kernels.launch(dataclasses.replace(square_call(x), kernel=other), target)[0]

    yield Case("square", "another text of this name", "float32", call, lambda: exact(x) ** 2 + 1)


DEPTHWISE_SIZES = (
    # (N, H, W, C)
    (1, 1, 1, 1),
    (3, 1, 7, 4),
    (1, 7, 1, 7),
    (3, 7, 7, 8),
    (1, 31, 33, 8),
    (1, 32, 31, 4),
    (1, 33, 32, 1),
    (3, 28, 28, 7),
    (1, 28, 28, 48),
    (1, 2, 3, 257),
)


def batchnorm_params(rng: np.random.Generator, c: int) -> mx.array:
    """(11, C) for `dw_bn_relu`, from BatchNorm statistics far from 0 and 1 and with scales of both signs."""
    mean, var = rng.uniform(-20, 20, c), 10 ** rng.uniform(-3, 2, c)
    gamma, beta = rng.uniform(-2, 2, c), rng.uniform(-5, 5, c)
    scale = gamma / np.sqrt(var + 1e-5)
    weight = floats(rng.normal(size=(c, 3, 3, 1)))
    return kernels.depthwise_params(weight, floats(scale), floats(beta - mean * scale))


def depthwise_cases() -> Iterator[Case]:
    """Every size with both strides; hostile layouts; without the ReLU."""
    forms = [(size, stride, "contiguous", True) for size in DEPTHWISE_SIZES for stride in (1, 2)]
    forms += [((3, 7, 5, 8), 2, layout, True) for layout in ("channels-first", "sliced")]
    forms += [((1, 7, 7, 4), 1, "contiguous", False)]
    for dtype in DTYPES:
        for size, stride, layout, with_relu in forms:
            rng = generator("dw_bn_relu", size, stride, dtype)
            x, params = values(rng, size, dtype, layout), batchnorm_params(rng, size[-1])

            def call(target: str, x=x, params=params, stride=stride, with_relu=with_relu) -> mx.array:
                return kernels.dw_bn_relu(x, params, stride, target, with_relu)

            def reference(x=x, params=params, stride=stride, with_relu=with_relu) -> np.ndarray:
                p = exact(params)
                y = depthwise(exact(x), p[:9], stride) * p[9] + p[10]
                return relu(y) if with_relu else y

            label = f"{'x'.join(map(str, size))} stride {stride} {layout}{'' if with_relu else ' no ReLU'}"
            yield Case("dw_bn_relu", label, dtype, call, reference)


def causal_conv_cases() -> Iterator[Case]:
    """(B, L, C) and taps around a group's 16 times and 256 channels; with and without the residual."""
    forms = [
        (size, taps, residual, "contiguous")
        for residual in (True, False)
        for size, taps in (
            ((1, 1, 1), 1),
            ((3, 7, 4), 4),
            ((1, 31, 7), 3),
            ((1, 33, 8), 4),
            ((3, 16, 48), 4),
            ((1, 17, 257), 2),
        )
    ]
    forms += [((3, 7, 5), 3, True, layout) for layout in ("channels-first", "sliced")]
    for dtype in DTYPES:
        for size, taps, residual, layout in forms:
            rng = generator("causal_conv1d", size, taps, dtype)
            x = values(rng, size, dtype, layout)
            params = floats(rng.normal(loc=1.0, size=(taps + 1, size[-1])))

            def call(target: str, x=x, params=params, residual=residual) -> mx.array:
                return kernels.causal_conv1d(x, params, residual, target)

            def reference(x=x, params=params, residual=residual) -> np.ndarray:
                x, p = exact(x), exact(params)
                padded = np.pad(x, ((0, 0), (len(p) - 2, 0), (0, 0)))
                y = sum(padded[:, k : k + x.shape[1]] * tap for k, tap in enumerate(p[:-1])) + p[-1]
                return y + x if residual else y

            label = f"{'x'.join(map(str, size))} {taps} taps {layout}{' residual' if residual else ''}"
            yield Case("causal_conv1d", label, dtype, call, reference)


SMALL_BLOCKS = (
    # Odd sides, one pixel, channels below the network's; 16 is the widest vector of any target.
    BlockShape(1, 1, 16, 16, 1),
    BlockShape(7, 5, 16, 32, 1),
    BlockShape(9, 7, 32, 16, 2),
    BlockShape(9, 7, 16, 32, 2, stem=True),
    BlockShape(5, 8, 16, 16, 1, stem=True),
)
RAGGED = (
    # Channels below a CPU's vector, strips that are no whole number of tiles, tilings with other switches.
    (BlockShape(3, 5, 4, 8, 1), Tiling(2, 2, 5, 4, 1, 4, False, 64, 4)),
    (BlockShape(5, 3, 8, 8, 1), Tiling(2, 1, 3, 4, 2, 2, True, 96, 0, staged=True)),
    # Tiles of pixels two at a time, with a last one that is not there; a residual; a stem.
    (BlockShape(7, 7, 8, 96, 1), Tiling(7, 1, 7, 7, 2, 4, False, 128, 4)),
    (BlockShape(5, 3, 16, 16, 1), Tiling(2, 1, 1, 4, 1, 2, True, 32, 4, staged=True)),
    (BlockShape(5, 8, 16, 16, 1, stem=True), Tiling(2, 1, 4, 5, 2, 4, False, 96, 0)),
)
# On CUDA 225 registers for each of 256 threads; 384 threads would be more than there are, and not launched.
LARGE_TILES = NetworkTiling(14, 13, 2, 7, 13, 1, 4, True, 256, 4, run0=7)
WITH_HEAD = Tiling(7, 1, 7, 13, 2, 8, False, 96, 4, head=True)
TWO_GROUPS = NetworkTiling(14, 13, 1, 7, 7, 1, 4, True, 384, 4, run0=7, steps2=8, ahead2=False, walk=2)


def describe(tiling: int | Tiling) -> str:
    """What a label says of a tiling, or of the batch whose default it is."""
    return f"as for batch {tiling}" if isinstance(tiling, int) else "ragged tiles"


def block_cases() -> Iterator[Case]:
    """The network's own blocks with the tilings for small and large batches, and small odd ones."""
    forms = [(shape, 1, batch, "float32", TARGETS) for shape in NETWORK.blocks for batch in (1, 16, 64)]
    forms += [(shape, 3, 64, "float16", TARGETS) for shape in NETWORK.blocks]
    forms += [(shape, 3, 1, dtype, TARGETS) for shape in SMALL_BLOCKS for dtype in ("float32", "float16")]
    forms += [(shape, 3, tiling, "float32", ("metal", "cuda")) for shape, tiling in RAGGED]
    forms += [(shape, 3, tiling, "float16", ("metal", "cuda")) for shape, tiling in RAGGED]
    for shape, n, tiling, dtype, targets in forms:
        rng = generator("block", shape, dtype)
        channels = 1 if shape.stem else shape.channels
        x = values(rng, (n, shape.height, shape.width, channels), dtype)
        weights = BlockWeights.random(shape, rng)

        def call(target: str, x=x, weights=weights, tiling=tiling) -> mx.array:
            if isinstance(tiling, int):  # the batch that it is for
                tiling = tilings.default_tiling(weights.shape, tiling, target)
            return kernels.block(x, weights.packed(target), weights.shape, tiling, target)

        sizes = f"{n}x{shape.height}x{shape.width}x{shape.channels}->{shape.outputs} stride {shape.stride}"
        yield Case(
            "stem_block" if shape.stem else "block",
            f"{sizes}, {describe(tiling)}",
            dtype,
            call,
            lambda x=x, weights=weights: weights.apply(exact(x)),
            targets,
        )


def head_cases() -> Iterator[Case]:
    """Pixels around the slices that share a sum, and few channels."""
    for dtype in ("float32", "float16"):
        for size, outputs in (((1, 1, 1, 16), 1), ((3, 7, 7, 192), 10), ((1, 3, 5, 48), 7)):
            rng = generator("head", size, outputs, dtype)
            x = values(rng, size, dtype)
            matrix, bias = floats(rng.normal(size=(outputs, size[-1]))), floats(rng.normal(size=outputs))

            def call(target: str, x=x, matrix=matrix, bias=bias) -> mx.array:
                return kernels.head(x, kernels.pack_head(matrix, bias), bias.size, target)

            def reference(x=x, matrix=matrix, bias=bias) -> np.ndarray:
                return exact(x).mean((1, 2)) @ exact(matrix).T + exact(bias)

            yield Case("head", f"{'x'.join(map(str, size))}->{outputs}", dtype, call, reference)


def block_head_cases() -> Iterator[Case]:
    """Last blocks with the head: both kinds of skip, tiles that do not divide the pixels."""
    forms = (
        (BlockShape(7, 7, 48, 48, 1), Tiling(7, 1, 7, 7, 2, 4, True, 96, 4)),
        (BlockShape(5, 3, 16, 32, 2), Tiling(3, 1, 2, 4, 1, 8, False, 32, 0)),
        (BlockShape(5, 5, 8, 16, 1), Tiling(5, 1, 1, 7, 2, 2, False, 64, 4)),
    )
    for dtype in ("float32", "float16"):
        for shape, tiling in forms:
            rng = generator("block_head", shape, dtype)
            x = values(rng, (3, shape.height, shape.width, shape.channels), dtype)
            block = BlockWeights.random(shape, rng)
            matrix, bias = floats(rng.normal(size=(7, shape.outputs))), floats(rng.normal(size=7))

            def call(target: str, x=x, block=block, matrix=matrix, bias=bias, tiling=tiling) -> mx.array:
                weights = mx.concatenate([block.packed(target), kernels.pack_head(matrix, bias)])
                call = block_head_call(x, 3, x.dtype, weights, block.shape, bias.size, tiling, target)
                return kernels.launch(call, target)[0]

            def reference(x=x, block=block, matrix=matrix, bias=bias) -> np.ndarray:
                return block.apply(exact(x)).mean((1, 2)) @ exact(matrix).T + exact(bias)

            label = (
                f"3x{shape.height}x{shape.width}x{shape.channels}->{shape.outputs}->7 stride {shape.stride}"
            )
            yield Case("block_head", label, dtype, call, reference, ("metal", "cuda"))


def network_cases() -> Iterator[Case]:
    """The whole network in one launch, and a block at a time."""
    for dtype in ("float32", "float16"):
        for n in (1, 3):
            rng = generator("network", n, dtype)
            x, weights = values(rng, (n, 28, 28, 1), dtype), NetworkWeights.random(NETWORK, rng)

            def one(target: str, x=x, weights=weights) -> mx.array:
                return kernels.network(x, weights.packed(target), weights.shape, None, target)

            def five(target: str, x=x, weights=weights) -> mx.array:
                return kernels.network_by_blocks(x, weights.packed(target), weights.shape, None, target)

            def large(target: str, x=x, weights=weights) -> mx.array:
                return kernels.network(x, weights.packed(target), weights.shape, LARGE_TILES, target)

            def two(target: str, x=x, weights=weights) -> mx.array:
                return kernels.network(x, weights.packed(target), weights.shape, TWO_GROUPS, target)

            def four(target: str, x=x, weights=weights) -> mx.array:
                with_head = None, None, None, WITH_HEAD
                return kernels.network_by_blocks(x, weights.packed(target), weights.shape, with_head, target)

            for launches, call, targets in (
                ("one launch", one, TARGETS),
                ("five launches", five, TARGETS),
                ("one launch, large tiles", large, ("metal", "cuda")),
                ("four launches", four, ("cuda",)),
                ("one launch, two groups", two, ("metal", "cuda")),
            ):
                yield Case(
                    "network",
                    f"{n}x28x28x1, {launches}",
                    dtype,
                    call,
                    lambda x=x, weights=weights: weights.apply(exact(x)),
                    targets,
                )


def spread_cases() -> Iterator[Case]:
    """The network spread over a CUDA GPU, at batches on either side of its changes of tiling."""
    for dtype in ("float32", "float16"):
        for n in (1, 2, 5, 16):
            rng = generator("network_spread", n, dtype)
            x, weights = values(rng, (n, 28, 28, 1), dtype), NetworkWeights.random(NETWORK, rng)

            def call(target: str, x=x, weights=weights) -> mx.array:
                return kernels.network_spread(x, weights.packed(target), weights.shape, None, target)

            yield Case(
                "network_spread",
                f"{n}x28x28x1",
                dtype,
                call,
                lambda x=x, weights=weights: weights.apply(exact(x)),
                ("cuda",),
            )


CASES = tuple(
    case
    for cases in (
        square_cases,
        name_cases,
        depthwise_cases,
        causal_conv_cases,
        block_cases,
        head_cases,
        block_head_cases,
        network_cases,
        spread_cases,
    )
    for case in cases()
)
