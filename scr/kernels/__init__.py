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
    launch,
    unavailable,
)
from kernels.networks import (
    NetworkShape,
    block_calls,
    network,
    network_by_blocks,
    network_call,
    network_reference,
    weight_parts,
)
from kernels.plans import ARGUMENT, make_plan
from kernels.square import square, square_reference
from kernels.tilings import BlockShape, NetworkTiling, Tiling

__all__ = [
    "ARGUMENT",
    "TARGETS",
    "BlockShape",
    "Call",
    "Kernel",
    "NetworkShape",
    "NetworkTiling",
    "Output",
    "Tiling",
    "Unavailable",
    "block",
    "block_calls",
    "block_reference",
    "causal_conv1d",
    "causal_conv1d_reference",
    "chain",
    "default_target",
    "depthwise_params",
    "dw_bn_relu",
    "dw_bn_relu_reference",
    "head",
    "head_reference",
    "launch",
    "make_plan",
    "network",
    "network_by_blocks",
    "network_call",
    "network_reference",
    "pack_block",
    "pack_head",
    "square",
    "square_reference",
    "unavailable",
    "weight_parts",
]
