"""The kernel texts (*.metal) and the one place that builds and launches them.

Per kernel a trio: the function that launches it, a reference of the same signature in plain MLX operations,
and the layer in `mlx_model.py` that uses it. This room knows arrays, sizes and targets; no layers, no
checkpoint.
"""

from kernels.blocks import block, block_reference, head, head_reference, pack_block, pack_head
from kernels.causal_conv import causal_conv1d, causal_conv1d_reference
from kernels.depthwise import depthwise_params, dw_bn_relu, dw_bn_relu_reference
from kernels.launcher import (
    TARGETS,
    Call,
    Kernel,
    Output,
    Unavailable,
    chain,
    default_target,
    fits,
    launch,
    unavailable,
)
from kernels.networks import (
    NetworkShape,
    block_calls,
    multiprocessors,
    network,
    network_by_blocks,
    network_call,
    network_reference,
    network_spread,
    spread_call,
    weight_parts,
)
from kernels.plans import ARGUMENT, PREVIOUS, make_plan
from kernels.square import square, square_reference
from kernels.tilings import (
    SPREAD_BATCH,
    BlockShape,
    NetworkTiling,
    SpreadTiling,
    Tiling,
    Tunings,
    default_spread_tiling,
)

__all__ = [
    "ARGUMENT",
    "PREVIOUS",
    "SPREAD_BATCH",
    "TARGETS",
    "BlockShape",
    "Call",
    "Kernel",
    "NetworkShape",
    "NetworkTiling",
    "Output",
    "SpreadTiling",
    "Tiling",
    "Tunings",
    "Unavailable",
    "block",
    "block_calls",
    "block_reference",
    "causal_conv1d",
    "causal_conv1d_reference",
    "chain",
    "default_spread_tiling",
    "default_target",
    "depthwise_params",
    "dw_bn_relu",
    "dw_bn_relu_reference",
    "fits",
    "head",
    "head_reference",
    "launch",
    "make_plan",
    "multiprocessors",
    "network",
    "network_by_blocks",
    "network_call",
    "network_reference",
    "network_spread",
    "pack_block",
    "pack_head",
    "spread_call",
    "square",
    "square_reference",
    "unavailable",
    "weight_parts",
]
