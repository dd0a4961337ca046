"""The whole network, a block at a time (five launches) or in one launch, from one packed array of weights.

Sizes are the article's: images (N, 28, 28, 1) -> (N, 10), channels 48, 96, 192.
"""

from collections.abc import Sequence

import mlx.core as mx

from kernels.blocks import (
    HEAD,
    TYPES,
    block_call,
    block_reference,
    head_call,
    head_reference,
    head_slices,
    packed_size,
)
from kernels.launcher import Call, Kernel, Output
from kernels.tilings import BlockShape, NetworkTiling, Tiling, default_network_tiling, vector_width

CLASSES = 10
BLOCKS = (
    BlockShape(28, 28, 48, 96, 2, stem=True),
    BlockShape(14, 14, 96, 96, 1),
    BlockShape(14, 14, 96, 192, 2),
    BlockShape(7, 7, 192, 192, 1),
)
PHASES = ("depthwise_phase.metal", "product_phase.metal", "head_phase.metal")
NETWORK = Kernel(
    "network", inputs=("x", "weights"), outputs=("y",), headers=("scratch_threadgroup.metal", *PHASES)
)
NETWORK_IN_DEVICE_MEMORY = Kernel(
    "network", inputs=("x", "weights"), outputs=("y", "memory"), headers=("scratch_device.metal", *PHASES)
)


def weight_parts(weights: mx.array) -> list[mx.array]:
    """The packed weights of the four blocks and the head, cut from the network's one array."""
    ends = [0]
    for shape in BLOCKS:
        ends.append(ends[-1] + packed_size(shape))
    ends.append(ends[-1] + (BLOCKS[-1].outputs + 1) * CLASSES)
    if weights.size != ends[-1]:
        raise ValueError(f"weights must be {ends[-1]} float32, got {weights.size}")
    return [mx.contiguous(weights[a:b]) for a, b in zip(ends, ends[1:], strict=False)]


def block_calls(
    x: mx.array,
    batch: int,
    dtype: mx.Dtype,
    parts: Sequence[mx.array],
    target: str,
    tilings: Sequence[Tiling | None] = (None,) * 4,
) -> list[Call]:
    """The five launches of the block level."""
    calls: list[Call] = []
    for i, (shape, tiling) in enumerate(zip(BLOCKS, tilings, strict=True)):
        source = x if i == 0 else Output(i - 1)
        calls.append(block_call(source, batch, dtype, parts[i], shape, tiling, target))
    last = BLOCKS[-1]
    pixels = last.out_height * last.out_width
    calls.append(
        head_call(Output(3), batch, pixels, last.outputs, dtype, parts[4], CLASSES, target)
    )
    return calls


def network_call(
    x: mx.array,
    batch: int,
    dtype: mx.Dtype,
    weights: mx.array,
    target: str,
    tiling: NetworkTiling | None = None,
) -> Call:
    """The one launch of the network level."""
    if dtype not in TYPES:
        raise ValueError(f"x must be float32 or float16, got {dtype}")
    tiling = tiling or default_network_tiling(batch, target)
    slices, parts = head_slices(target)
    floats = network_scratch_floats(tiling)
    in_device_memory = target == "metal"
    return Call(
        NETWORK_IN_DEVICE_MEMORY if in_device_memory else NETWORK,
        inputs=(x, weights),
        template=(
            ("T", dtype),
            ("H", BLOCKS[0].height),
            ("C0", BLOCKS[0].channels),
            ("C1", BLOCKS[1].channels),
            ("C2", BLOCKS[3].channels),
            ("CLASSES", CLASSES),
            ("RUN1", tiling.run1),
            ("TP1", tiling.pixels1),
            ("NV1", tiling.vectors1),
            ("RUN2", tiling.run2),
            ("TP2", tiling.pixels2),
            ("NV2", tiling.vectors2),
            ("STEPS", tiling.steps),
            ("AHEAD", tiling.ahead),
            ("PACKED", target == "host"),
            ("PAD", tiling.padding),
            ("SLICES", slices),
            ("PARTS", parts),
        ),
        groups=(batch, 1, 1),
        group_size=(tiling.threads, 1, 1),
        output_shapes=((batch, CLASSES),) + (((batch, floats),) if in_device_memory else ()),
        output_dtypes=(dtype,) + ((mx.float32,) if in_device_memory else ()),
        threadgroup_bytes=0 if in_device_memory else 4 * floats,
    )


def network_scratch_floats(tiling: NetworkTiling) -> int:
    """Scratch of one group of network.metal, in floats."""
    activations = max(s.out_height * s.out_width * s.outputs for s in BLOCKS)
    rows = 0
    for shape, pixels in zip(BLOCKS, (tiling.pixels1,) * 2 + (tiling.pixels2,) * 2, strict=True):
        whole = -(-shape.out_height * shape.out_width // pixels) * pixels
        rows = max(rows, whole * (shape.depth + tiling.padding))
    return activations + rows
