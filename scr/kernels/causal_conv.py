"""Depthwise causal convolution over (batch, time, channels) + bias + residual in one launch."""

import mlx.core as mx

from kernels.launcher import Call, Kernel, launch

KERNEL = Kernel("causal_conv1d", inputs=("x", "params"), outputs=("y",))

MAX_VALUES = 2**31  # per array of one launch: the text's indices are 32 bits wide
ROWS, COLUMNS = 16, 256  # a group's times and channels: 16 re-reads 3 rows of history for 16 new ones
THREADS = (64, 4, 1)


def causal_conv1d(
    x: mx.array, params: mx.array, residual: bool = True, target: str | None = None
) -> mx.array:
    """y[b, t, c] = bias[c] + Σₖ tap[k, c]·x[b, t - K + 1 + k, c], plus x[b, t, c] if `residual`.

    x (B, L, C) float32, float16 or bfloat16; params (K + 1, C) float32, K ≥ 1: taps, oldest first, then the
    bias → (B, L, C) of x's type. Accumulates in float32. A batch of 2³¹ values or more is split. Raises
    ValueError for shapes and types that do not fit, Unavailable where the target is missing.
    """
    if x.ndim != 3 or 0 in x.shape:
        raise ValueError(f"x must be (B, L, C) with no empty axis, got shape {x.shape}")
    b, length, c = x.shape
    if params.ndim != 2 or params.shape[0] < 2 or params.shape[1] != c or params.dtype != mx.float32:
        raise ValueError(f"params must be (K + 1, {c}) float32, K ≥ 1, got {params.shape} {params.dtype}")
    if x.dtype not in (mx.float32, mx.float16, mx.bfloat16):
        raise ValueError(f"x must be float32, float16 or bfloat16, got {x.dtype}")
    sequences = (MAX_VALUES - 1) // (length * c)
    if sequences == 0:
        raise ValueError(f"one sequence of {length}×{c} has 2³¹ values or more, too many for one launch")
    parts = [
        launch(causal_conv1d_call(x[i : i + sequences], params, residual), target)[0]
        for i in range(0, b, sequences)
    ]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def causal_conv1d_call(x: mx.array, params: mx.array, residual: bool = True) -> Call:
    """The launch of `causal_conv1d` on one part of a batch."""
    b, length, c = x.shape
    return Call(
        KERNEL,
        # Fewer than 8 elements would arrive in another address space on Metal; two taps over one channel
        # and the bias are 3, so params is padded with elements that nothing reads.
        inputs=(x, mx.pad(params.reshape(-1), (0, max(0, 8 - params.size)))),
        template=(
            ("T", x.dtype),
            ("K", params.shape[0] - 1),
            ("ROWS", ROWS),
            ("COLUMNS", COLUMNS),
            ("RESIDUAL", residual),
        ),
        groups=(b * -(-length // ROWS), -(-c // COLUMNS), 1),
        group_size=THREADS,
        output_shapes=(x.shape,),
        output_dtypes=(x.dtype,),
    )


def causal_conv1d_reference(
    x: mx.array, params: mx.array, residual: bool = True, target: str | None = None
) -> mx.array:
    """What `causal_conv1d` computes, in plain MLX operations; same arguments (`target` has no effect)."""
    taps, c = params.shape[0] - 1, x.shape[2]
    padded = mx.pad(x.astype(mx.float32), [(0, 0), (taps - 1, 0), (0, 0)])
    y = mx.conv1d(padded, params[:-1].T[:, :, None], groups=c) + params[-1]  # weight (C, K, 1)
    return (y + x if residual else y).astype(x.dtype)
