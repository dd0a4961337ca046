"""The kernel texts (*.metal) and the one place that builds and launches them.

Per kernel a trio: the function that launches it, a reference of the same signature in plain MLX operations,
and the layer in `mlx_model.py` that uses it. This room knows arrays, sizes and targets; no layers, no
checkpoint.
"""

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
from kernels.square import square, square_reference

__all__ = [
    "TARGETS",
    "Call",
    "Kernel",
    "Output",
    "Unavailable",
    "causal_conv1d",
    "causal_conv1d_reference",
    "chain",
    "default_target",
    "depthwise_params",
    "dw_bn_relu",
    "dw_bn_relu_reference",
    "launch",
    "square",
    "square_reference",
    "unavailable",
]
