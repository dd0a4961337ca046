"""A depthwise-separable residual block in one launch, with or without the stem before it, and the head.

Activations are (N, H, W, C). Weights come folded (BatchNorm is in them) and packed: one float32 array per
launch, in the order the text reads.
"""

from dataclasses import replace

import mlx.core as mx

from kernels.launcher import Call, Kernel, Output, default_target, launch
from kernels.tilings import BlockShape, Tiling, default_tiling, packed_vectors, vector_width

PHASES = ("scratch_threadgroup.metal", "depthwise_phase.metal", "product_phase.metal", "block_phases.metal")
BLOCK = Kernel("block", inputs=("x", "weights"), outputs=("y",), headers=PHASES)
STEM_BLOCK = Kernel("stem_block", inputs=("x", "weights"), outputs=("y",), headers=PHASES)
HEAD = Kernel(
    "head",
    inputs=("x", "weights"),
    outputs=("y",),
    headers=("scratch_threadgroup.metal", "head_phase.metal"),
)
BLOCK_HEAD = Kernel(
    "block_head", inputs=("x", "weights"), outputs=("y",), headers=(*PHASES, "head_phase.metal")
)
TYPES = (mx.float32, mx.float16)


def pack_block(
    shape: BlockShape,
    taps: mx.array,
    bias: mx.array,
    matrix: mx.array,
    out_bias: mx.array,
    stem: tuple[mx.array, mx.array] | None = None,
    target: str | None = None,
) -> mx.array:
    """Pack a block's folded weights for `block` on `target`; returns a float32 vector.

    taps (9, C) in row order, bias (C,): the depthwise convolution. matrix (K, N), out_bias (N,): the
    pointwise convolution, above the skip convolution where there is one (K = 2C), and the sum of their
    biases. stem: its taps (9, C) and bias (C,), for a shape with a stem.
    """
    tile = packed_vectors(shape.outputs, target or default_target()) * vector_width(
        target or default_target()
    )
    if tile:  # (K, N) -> (N / tile, K, tile)
        matrix = matrix.reshape(shape.depth, -1, tile).transpose(1, 0, 2)
    parts = (*(stem or ()), taps, bias, matrix, out_bias)
    return mx.concatenate([part.astype(mx.float32).reshape(-1) for part in parts])


def unpack_block(weights: mx.array, shape: BlockShape, target: str | None = None) -> list[mx.array]:
    """The inverse of `pack_block`: taps, bias, matrix, out_bias, and before them the stem's two, if any."""
    target = target or default_target()
    c, k, n = shape.channels, shape.depth, shape.outputs
    shapes = [(9, c), (c,)] * (2 if shape.stem else 1) + [(k, n), (n,)]
    parts, start = [], 0
    for size in shapes:
        length = size[0] * (size[1] if len(size) == 2 else 1)
        parts.append(weights[start : start + length].reshape(size))
        start += length
    tile = packed_vectors(n, target) * vector_width(target)
    if tile:  # (N / tile, K, tile) -> (K, N)
        parts[-2] = parts[-2].reshape(-1, k, tile).transpose(1, 0, 2).reshape(k, n)
    return parts


def packed_size(shape: BlockShape) -> int:
    """Number of floats that `pack_block` makes."""
    return 10 * shape.channels * (2 if shape.stem else 1) + (shape.depth + 1) * shape.outputs


def block(
    x: mx.array,
    weights: mx.array,
    shape: BlockShape,
    tiling: Tiling | None = None,
    target: str | None = None,
) -> mx.array:
    """relu(pointwise(relu(depthwise(x))) + skip(x)), with x = relu(stem(image)) if `shape.stem`.

    x (N, H, W, C) float32 or float16, with a stem (N, H, W, 1); weights of `pack_block` for the same
    target → (N, out_height, out_width, outputs) of x's type. Accumulates in float32. Raises ValueError for
    what does not fit, Unavailable where the target is missing.
    """
    expected = (shape.height, shape.width, 1 if shape.stem else shape.channels)
    if x.ndim != 4 or x.shape[1:] != expected or x.shape[0] == 0:
        raise ValueError(f"x must be (N, {', '.join(map(str, expected))}) with N ≥ 1, got {x.shape}")
    call = block_call(x, x.shape[0], x.dtype, weights, shape, tiling, target or default_target())
    return launch(call, target)[0]


def block_call(
    x: mx.array | Output,
    batch: int,
    dtype: mx.Dtype,
    weights: mx.array,
    shape: BlockShape,
    tiling: Tiling | None,
    target: str,
) -> Call:
    """The launch of `block` on `batch` images of type `dtype`."""
    if dtype not in TYPES:
        raise ValueError(f"x must be float32 or float16, got {dtype}")
    if weights.size != packed_size(shape) or weights.dtype != mx.float32:
        raise ValueError(
            f"weights must be {packed_size(shape)} float32 of pack_block, got {weights.size} {weights.dtype}"
        )
    tiling = tiling or default_tiling(shape, batch, target)
    misfit = tiling.misfit(shape, vector_width(target))
    if misfit:
        raise ValueError(f"{shape} on {target}: {misfit}")
    packed = packed_vectors(shape.outputs, target)
    if packed not in (0, tiling.vectors):
        raise ValueError(f"weights for {target} are packed for {packed} vectors a tile, not {tiling.vectors}")
    _refuse_small(target, x, weights)
    strips = -(-shape.out_height // tiling.rows)
    return Call(
        STEM_BLOCK if shape.stem else BLOCK,
        inputs=(x, weights),
        template=(
            ("T", dtype),
            ("H", shape.height),
            ("W", shape.width),
            ("C", shape.channels),
            ("N", shape.outputs),
            ("STRIDE", shape.stride),
            *(() if shape.stem else (("SKIP", shape.projected),)),
            ("ROWS", tiling.rows),
            ("SPLITS", tiling.splits),
            ("RUN", tiling.run),
            ("LD", shape.depth + tiling.padding),
            ("TP", tiling.pixels),
            ("NV", tiling.vectors),
            ("STEPS", tiling.steps),
            ("AHEAD", tiling.ahead),
            ("PACKED", target == "host"),
            ("STAGED", tiling.staged),
        ),
        groups=(batch * strips * tiling.splits, 1, 1),
        group_size=(tiling.threads, 1, 1),
        output_shapes=((batch, shape.out_height, shape.out_width, shape.outputs),),
        output_dtypes=(dtype,),
        threadgroup_bytes=tiling.scratch_bytes(shape),
    )


def block_head_call(
    x: mx.array | Output,
    batch: int,
    dtype: mx.Dtype,
    weights: mx.array,
    shape: BlockShape,
    outputs: int,
    tiling: Tiling,
    target: str,
) -> Call:
    """The launch of `block` and then `head` on `batch` images of type `dtype`.

    weights: those of both, one after the other. The tiling's rows must be all and its splits 1.
    """
    tiling = replace(tiling, head=True)
    size, (_, parts, _) = packed_size(shape), head_slices(target)
    if (tiling.rows, tiling.splits, tiling.staged, shape.stem) != (shape.out_height, 1, False, False):
        raise ValueError(f"{shape}: the head takes whole images of a block without stem, not {tiling}")
    if weights.size != size + outputs * (shape.outputs + 1):
        raise ValueError(f"weights must be pack_block's and pack_head's, got {weights.size}")
    call = block_call(x, batch, dtype, weights[:size], shape, tiling, target)
    tiles = -(-shape.out_height * shape.out_width // tiling.pixels)
    if outputs * parts > tiles * tiling.pixels * (shape.depth + tiling.padding):
        raise ValueError(f"{outputs} outputs are too many for the scratch of this launch")
    return replace(
        call,
        kernel=BLOCK_HEAD,
        inputs=(x, weights),
        template=(
            *(c for c in call.template if c[0] not in ("ROWS", "SPLITS", "STAGED")),
            ("CLASSES", outputs),
            ("PARTS", parts),
        ),
        output_shapes=((batch, outputs),),
    )


def block_reference(
    x: mx.array,
    weights: mx.array,
    shape: BlockShape,
    tiling: Tiling | None = None,
    target: str | None = None,
) -> mx.array:
    """What `block` computes, in plain MLX operations in float32; same arguments (`tiling` has no effect)."""
    parts = unpack_block(weights, shape, target)
    y = x.astype(mx.float32)
    c = shape.channels
    if shape.stem:
        taps, bias = parts[0], parts[1]
        y = mx.maximum(mx.conv2d(y, taps.T.reshape(c, 3, 3, 1), padding=1) + bias, 0)
    taps, bias, matrix, out_bias = parts[-4:]
    rows = mx.conv2d(y, taps.T.reshape(c, 3, 3, 1), stride=shape.stride, padding=1, groups=c)
    rows = mx.maximum(rows + bias, 0)
    if shape.projected:
        rows = mx.concatenate([rows, y[:, :: shape.stride, :: shape.stride]], axis=-1)
        y = mx.zeros((1,))
    return mx.maximum(rows @ matrix + out_bias + y, 0).astype(x.dtype)


def pack_head(weight: mx.array, bias: mx.array) -> mx.array:
    """Pack a linear layer's weight (N, C) and bias (N,) for `head`; returns a float32 vector."""
    return mx.concatenate([weight.astype(mx.float32).reshape(-1), bias.astype(mx.float32)])


def head(x: mx.array, weights: mx.array, outputs: int, target: str | None = None) -> mx.array:
    """Global average pooling and a linear layer.

    x (N, H, W, C) float32 or float16, C a multiple of the target's vector width (4 on GPUs, 8 or 16 on a
    CPU); weights of `pack_head` → (N, outputs) of x's type.
    """
    if x.ndim != 4 or 0 in x.shape:
        raise ValueError(f"x must be (N, H, W, C) with no empty axis, got shape {x.shape}")
    n, h, w, c = x.shape
    return launch(head_call(x, n, h * w, c, x.dtype, weights, outputs, target or default_target()), target)[0]


def head_slices(target: str, batch: int = 1) -> tuple[int, int, int]:
    """SLICES and PARTS of head_phase.metal (how many threads share a sum), and the threads of its group.

    Few images: as many threads as the sums have parts. Many: small groups, of which more run at once.
    """
    if target == "host":
        return 1, 1, 1
    return (7, 24, 352) if batch < 64 else (4, 12, 192)


def head_call(
    x: mx.array | Output,
    batch: int,
    pixels: int,
    channels: int,
    dtype: mx.Dtype,
    weights: mx.array,
    outputs: int,
    target: str,
) -> Call:
    """The launch of `head` on `batch` images of type `dtype`."""
    if dtype not in TYPES:
        raise ValueError(f"x must be float32 or float16, got {dtype}")
    if weights.size != outputs * (channels + 1) or weights.dtype != mx.float32:
        size = outputs * (channels + 1)
        raise ValueError(f"weights must be {size} float32 of pack_head, got {weights.size} {weights.dtype}")
    vector = vector_width(target)
    if channels % vector:
        raise ValueError(f"channels must be a multiple of {vector} on {target}, got {channels}")
    _refuse_small(target, x, weights)
    slices, parts, threads = head_slices(target, batch)
    return Call(
        HEAD,
        inputs=(x, weights),
        template=(
            ("PIXELS", pixels),
            ("C", channels),
            ("N", outputs),
            ("SLICES", slices),
            ("PARTS", parts),
        ),
        groups=(batch, 1, 1),
        group_size=(threads, 1, 1),
        output_shapes=((batch, outputs),),
        output_dtypes=(dtype,),
        threadgroup_bytes=4 * (slices * channels + outputs * parts),
    )


def _refuse_small(target: str, *arrays: mx.array | Output) -> None:
    """ValueError for an array that MLX would pass to Metal in another address space than the texts take."""
    if target == "metal" and any(isinstance(a, mx.array) and a.size < 8 for a in arrays):
        raise ValueError("arrays of fewer than 8 values do not run on metal")


def head_reference(x: mx.array, weights: mx.array, outputs: int, target: str | None = None) -> mx.array:
    """What `head` computes, in plain MLX operations in float32; same arguments (`target` has no effect)."""
    c = x.shape[-1]
    matrix, bias = weights[: outputs * c].reshape(outputs, c), weights[outputs * c :]
    return (mx.mean(x.astype(mx.float32), axis=(1, 2)) @ matrix.T + bias).astype(x.dtype)
