"""The whole network: a block at a time (a launch per block and one for the head), or in one launch.

Both run from one packed array of weights: `pack_block`'s of each block, then `pack_head`'s.
"""

import itertools
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import mlx.core as mx

from kernels import nvrtc
from kernels.blocks import (
    TYPES,
    block_call,
    block_head_call,
    block_reference,
    head_call,
    head_reference,
    head_slices,
    packed_size,
)
from kernels.launcher import (
    MAX_THREADS,
    Call,
    Kernel,
    Output,
    Template,
    Unavailable,
    chain,
    default_target,
)
from kernels.tilings import (
    BlockShape,
    NetworkTiling,
    SpreadTiling,
    Tiling,
    default_network_tiling,
    default_spread_tiling,
    default_tiling,
    packed_vectors,
    vector_width,
)

PHASES = ("depthwise_phase.metal", "product_phase.metal", "block_phases.metal", "head_phase.metal")
NETWORK = Kernel(
    "network", inputs=("x", "weights"), outputs=("y",), headers=("scratch_threadgroup.metal", *PHASES)
)
NETWORK_IN_DEVICE_MEMORY = Kernel(
    "network", inputs=("x", "weights"), outputs=("y", "memory"), headers=("scratch_device.metal", *PHASES)
)

NETWORK_SPREAD = Kernel(
    "network_spread",
    inputs=("x", "weights", "arrivals", "previous"),
    outputs=("y", "memory"),
    headers=("scratch_threadgroup.metal", *PHASES),
)


class NetworkShape(NamedTuple):
    """Sizes of a network: its blocks, the first with the stem, and the number of classes."""

    blocks: tuple[BlockShape, ...]
    classes: int

    @property
    def packed_size(self) -> int:
        """Number of floats in the packed weights."""
        return sum(map(packed_size, self.blocks)) + (self.blocks[-1].outputs + 1) * self.classes


def check_form(shape: NetworkShape) -> None:
    """Raise ValueError unless `shape` is of the form that the one-launch texts are written for."""
    first, last = shape.blocks[0], shape.blocks[-1]
    side, c1, c2 = first.height, first.outputs, last.outputs
    half, quarter = -(-side // 2), -(-side // 4)
    form = (
        BlockShape(side, side, first.channels, c1, 2, stem=True),
        BlockShape(half, half, c1, c1),
        BlockShape(half, half, c1, c2, 2),
        BlockShape(quarter, quarter, c2, c2),
    )
    if shape.blocks != form:
        raise ValueError(f"one launch takes blocks of the form {form}, got {shape.blocks}")
    if (2 * half + 3) * (side + 2) > prod(_activations(shape)):
        raise ValueError(f"images of {side}×{side} do not fit where the network's launch puts them")


def weight_parts(weights: mx.array, shape: NetworkShape) -> list[mx.array]:
    """The packed weights of each block and of the head, cut from the network's one array."""
    if weights.size != shape.packed_size or weights.dtype != mx.float32:
        raise ValueError(f"weights must be {shape.packed_size} float32, got {weights.size} {weights.dtype}")
    ends = [0, *itertools.accumulate(map(packed_size, shape.blocks)), shape.packed_size]
    return [mx.contiguous(weights[a:b]) for a, b in itertools.pairwise(ends)]


def block_calls(
    x: mx.array | Output,
    batch: int,
    dtype: mx.Dtype,
    parts: Sequence[mx.array],
    shape: NetworkShape,
    target: str,
    tilings: Sequence[Tiling | None] | None = None,
) -> list[Call]:
    """The launches of the block level on `batch` images; `parts` as `weight_parts` cuts them.

    One per block and one for the head, unless by its tiling the last block's launch computes the head.
    """
    calls: list[Call] = []
    last = shape.blocks[-1]
    for number, sizes in enumerate(shape.blocks):
        source = x if number == 0 else Output(number - 1)
        at_end = number == len(shape.blocks) - 1
        tiling = tilings[number] if tilings else None
        tiling = tiling or default_tiling(sizes, batch, target, last=at_end)
        if tiling.head and at_end:
            both = mx.concatenate(list(parts[-2:]))
            mx.eval(both)  # once: a plan would join them in every run
            return [*calls, block_head_call(source, batch, dtype, both, sizes, shape.classes, tiling, target)]
        calls.append(block_call(source, batch, dtype, parts[number], sizes, tiling, target))
    pixels = last.out_height * last.out_width
    source = Output(len(calls) - 1)
    calls.append(head_call(source, batch, pixels, last.outputs, dtype, parts[-1], shape.classes, target))
    return calls


def network_call(
    x: mx.array | Output,
    batch: int,
    dtype: mx.Dtype,
    weights: mx.array,
    shape: NetworkShape,
    target: str,
    tiling: NetworkTiling | None = None,
) -> Call:
    """The one launch of the network level on `batch` images. On Metal its scratch is a second output."""
    if dtype not in TYPES:
        raise ValueError(f"x must be float32 or float16, got {dtype}")
    check_form(shape)
    tiling = tiling or default_network_tiling(shape.blocks, batch, target)
    misfit = tiling.misfit(shape.blocks, vector_width(target))
    if misfit:
        raise ValueError(f"the network on {target}: {misfit}")
    vectors = tiling.vectors1, tiling.vectors1, tiling.vectors2, tiling.vectors2
    packed = tuple(packed_vectors(sizes.outputs, target) for sizes in shape.blocks)
    if any(packed) and packed != vectors:
        raise ValueError(f"weights for {target} are packed for {packed} vectors a tile, not {vectors}")
    _, parts, _ = head_slices(target)
    floats = network_scratch_floats(shape, tiling)
    if shape.classes * parts > floats - _kept_floats(shape, tiling):
        raise ValueError(f"{shape.classes} classes are too many for the scratch of the network's launch")
    in_device_memory = target == "metal"
    walk = tiling.walk or (multiprocessors() if target == "cuda" else MAX_THREADS)
    groups = min(batch, walk)
    return Call(
        NETWORK_IN_DEVICE_MEMORY if in_device_memory else NETWORK,
        inputs=(x, weights),
        template=(
            *_sizes(shape, dtype),
            ("RUN0", tiling.run0 or tiling.run1),
            ("RUN1", tiling.run1),
            ("TP1", tiling.pixels1),
            ("NV1", tiling.vectors1),
            ("STEPS1", tiling.steps),
            ("AHEAD1", tiling.ahead),
            ("RUN2", tiling.run2),
            ("TP2", tiling.pixels2),
            ("NV2", tiling.vectors2),
            ("STEPS2", tiling.steps2 or tiling.steps),
            ("AHEAD2", tiling.ahead if tiling.ahead2 is None else tiling.ahead2),
            ("PACKED", target == "host"),
            ("PAD", tiling.padding),
            ("PARTS", parts),
            ("WALK", walk),
        ),
        groups=(groups, 1, 1),
        group_size=(tiling.threads, 1, 1),
        output_shapes=((batch, shape.classes),) + (((groups, floats),) if in_device_memory else ()),
        output_dtypes=(dtype,) + ((mx.float32,) if in_device_memory else ()),
        threadgroup_bytes=0 if in_device_memory else 4 * floats,
    )


def _sizes(shape: NetworkShape, dtype: mx.Dtype) -> Template:
    """The template arguments that both one-launch texts have: the storage type and the network's sizes."""
    first, second, _, last = shape.blocks
    channels = ("C0", first.channels), ("C1", second.channels), ("C2", last.channels)
    return ("T", dtype), ("H", first.height), *channels, ("CLASSES", shape.classes)


def spread_call(
    x: mx.array | Output,
    batch: int,
    dtype: mx.Dtype,
    weights: mx.array,
    shape: NetworkShape,
    arrivals: mx.array,
    previous: mx.array | Output,
    tiling: SpreadTiling,
) -> Call:
    """The one launch of the network level spread over a CUDA GPU.

    arrivals: uint32 zeros, evaluated, one array for each sequence of launches; previous: the first output of
    the last launch of the sequence (at first any array of that type), so that its launches never overlap.
    """
    check_form(shape)
    last = shape.blocks[-1]
    slices, parts, _ = head_slices("cuda")
    floats = max(tiling.scratch_floats(shape.blocks), slices * last.outputs + shape.classes * parts)
    per_block = [
        (f"{name}{number}", value)
        for number, t in enumerate(tiling.blocks)
        for name, value in (("ROWS", t.rows), ("SPLITS", t.splits), ("TP", t.pixels), ("STAGED", t.staged))
    ]
    return Call(
        NETWORK_SPREAD,
        inputs=(x, weights, arrivals, previous),
        template=(
            *_sizes(shape, dtype),
            *per_block,
            ("STEPS", tiling.steps),
            ("AHEAD", tiling.ahead),
            ("PAD", tiling.padding),
            ("SLICES", slices),
            ("PARTS", parts),
            ("FLOATS", floats),
        ),
        groups=(tiling.groups, 1, 1),
        group_size=(tiling.threads, 1, 1),
        output_shapes=((batch, shape.classes), (2, batch, *_activations(shape))),
        output_dtypes=(dtype, dtype),
        threadgroup_bytes=4 * floats,
    )


def multiprocessors() -> int:
    """Multiprocessors of the first CUDA device."""
    return nvrtc.attribute(nvrtc.MULTIPROCESSORS)


def _activations(shape: NetworkShape) -> tuple[int, int]:
    """Pixels and channels of the largest activations between blocks."""
    return max(
        ((s.out_height * s.out_width, s.outputs) for s in shape.blocks), key=lambda size: size[0] * size[1]
    )


def network_scratch_floats(shape: NetworkShape, tiling: NetworkTiling) -> int:
    """Scratch of one group of network.metal, in floats: activations, and the widest product's operands."""
    stages = (shape.blocks[:2], tiling.pixels1), (shape.blocks[2:], tiling.pixels2)
    first, second = (
        -(-blocks[0].out_height * blocks[0].out_width // tile)
        * tile
        * (max(sizes.depth for sizes in blocks) + tiling.padding)
        for blocks, tile in stages
    )
    return _kept_floats(shape, tiling) + max(first, second)


def _kept_floats(shape: NetworkShape, tiling: NetworkTiling) -> int:
    """What a group of network.metal keeps between products: activations, at last with the sums of tiles."""
    last = shape.blocks[-1]
    pixels = last.out_height * last.out_width
    return max(prod(_activations(shape)), (pixels + -(-pixels // tiling.pixels2)) * last.outputs)


def network(
    x: mx.array,
    weights: mx.array,
    shape: NetworkShape,
    tiling: NetworkTiling | None = None,
    target: str | None = None,
) -> mx.array:
    """Images to logits in one launch.

    x (N, H, W, 1) float32 or float16; weights: packed for the same target → (N, classes) of x's type.
    Accumulates, and keeps every activation, in float32. Raises ValueError for what does not fit,
    Unavailable where the target is missing.
    """
    target = target or default_target()
    _check(x, weights, shape)
    return chain([network_call(x, x.shape[0], x.dtype, weights, shape, target, tiling)], target)[0]


def network_spread(
    x: mx.array,
    weights: mx.array,
    shape: NetworkShape,
    tiling: SpreadTiling | None = None,
    target: str | None = None,
) -> mx.array:
    """Images to logits in one launch that spreads each over the GPU; arguments as of `network`. CUDA only."""
    if (target or default_target()) != "cuda":
        raise Unavailable("groups that wait for each other need the cuda target")
    _check(x, weights, shape)
    batch = x.shape[0]
    tiling = tiling or default_spread_tiling(batch, multiprocessors())
    arrivals, previous = mx.zeros((8,), mx.uint32), mx.zeros((8,), x.dtype)
    mx.eval(arrivals)
    call = spread_call(x, batch, x.dtype, weights, shape, arrivals, previous, tiling)
    return chain([call], "cuda")[0]


def network_by_blocks(
    x: mx.array,
    weights: mx.array,
    shape: NetworkShape,
    tilings: Sequence[Tiling | None] | None = None,
    target: str | None = None,
) -> mx.array:
    """Images to logits in a launch per block and one for the head; arguments as of `network`.

    Activations between launches are stored in x's type.
    """
    target = target or default_target()
    _check(x, weights, shape)
    parts = weight_parts(weights, shape)
    return chain(block_calls(x, x.shape[0], x.dtype, parts, shape, target, tilings), target)[0]


def network_reference(
    x: mx.array,
    weights: mx.array,
    shape: NetworkShape,
    tiling: NetworkTiling | None = None,
    target: str | None = None,
) -> mx.array:
    """What `network` computes, in plain MLX operations in float32; `tiling` has no effect."""
    _check(x, weights, shape)
    *parts, last = weight_parts(weights, shape)
    y = x.astype(mx.float32)
    for sizes, part in zip(shape.blocks, parts, strict=True):
        y = block_reference(y, part, sizes, target=target)
    return head_reference(y, last, shape.classes).astype(x.dtype)


def _check(x: mx.array, weights: mx.array, shape: NetworkShape) -> None:
    first = shape.blocks[0]
    if x.ndim != 4 or x.shape[1:] != (first.height, first.width, 1) or x.shape[0] == 0:
        raise ValueError(f"x must be (N, {first.height}, {first.width}, 1) with N ≥ 1, got {x.shape}")
    if weights.size != shape.packed_size or weights.dtype != mx.float32:
        raise ValueError(f"weights must be {shape.packed_size} float32, got {weights.size} {weights.dtype}")
