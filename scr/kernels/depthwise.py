"""Depthwise 3×3 convolution + BatchNorm + ReLU in one launch: the article's kernel. Layout NHWC."""

import mlx.core as mx

from kernels.launcher import Call, Kernel, launch

KERNEL = Kernel("dw_bn_relu", inputs=("x", "params"), outputs=("y",))

MAX_VALUES = 2**31  # per array of one launch: the text's indices are 32 bits wide
THREADS = 256  # per threadgroup, at most


def depthwise_params(weight: mx.array, scale: mx.array, shift: mx.array) -> mx.array:
    """Pack a depthwise layer for `dw_bn_relu`.

    weight (C, 3, 3, 1) as MLX stores it, scale (C,), shift (C,) → (11, C) float32: nine taps in row order,
    then scale and shift. One packed array, since Metal gives arrays of fewer than 8 elements another
    address space.
    """
    taps = weight.reshape(weight.shape[0], 9).T  # (C, 3, 3, 1) -> (9, C)
    return mx.contiguous(mx.concatenate([taps, scale[None], shift[None]]).astype(mx.float32))


def dw_bn_relu(
    x: mx.array, params: mx.array, stride: int = 1, target: str | None = None, relu: bool = True
) -> mx.array:
    """Depthwise 3×3 convolution with padding 1, then scale and shift per channel and, if `relu`, ReLU.

    x (N, H, W, C) float32, float16 or bfloat16; params (11, C) float32 of `depthwise_params`; stride 1 or 2
    → (N, ⌈H/stride⌉, ⌈W/stride⌉, C) of x's type. Accumulates in float32. A batch of 2³¹ values or more is
    split. Raises ValueError for shapes and types that do not fit, Unavailable where the target is missing.
    """
    if x.ndim != 4 or 0 in x.shape:
        raise ValueError(f"x must be (N, H, W, C) with no empty axis, got shape {x.shape}")
    n, h, w, c = x.shape
    if params.shape != (11, c) or params.dtype != mx.float32:
        raise ValueError(f"params must be (11, {c}) float32, got {params.shape} {params.dtype}")
    if stride not in (1, 2):
        raise ValueError(f"stride must be 1 or 2, got {stride}")
    if x.dtype not in (mx.float32, mx.float16, mx.bfloat16):
        raise ValueError(f"x must be float32, float16 or bfloat16, got {x.dtype}")
    images = images_per_launch(h, w, c)
    parts = [
        launch(dw_bn_relu_call(x[i : i + images], params, stride, relu), target)[0]
        for i in range(0, n, images)
    ]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def images_per_launch(h: int, w: int, c: int) -> int:
    """How many images of h × w × c values one launch can index; ValueError if not even one."""
    images = (MAX_VALUES - 1) // (h * w * c)
    if images == 0:
        raise ValueError(f"one image of {h}×{w}×{c} has 2³¹ values or more, too many for one launch")
    return images


def dw_bn_relu_call(x: mx.array, params: mx.array, stride: int, relu: bool = True) -> Call:
    """The launch of `dw_bn_relu` on one part of a batch: a group per image and output row."""
    n, h, w, c = x.shape
    h_out, w_out = -(-h // stride), -(-w // stride)
    return Call(
        KERNEL,
        inputs=(x, params),
        template=(("T", x.dtype), ("S", stride), ("RELU", relu)),
        groups=(n * h_out, 1, 1),
        group_size=_group_size(c, w_out),
        output_shapes=((n, h_out, w_out, c),),
        output_dtypes=(x.dtype,),
    )


def _group_size(c: int, w_out: int) -> tuple[int, int, int]:
    """Channels along x, columns along y, at most THREADS; whole SIMD groups of 32 where a shape allows."""
    across = min(c, THREADS)
    limit = max(1, min(w_out, THREADS // across))
    whole = [down for down in range(limit, 0, -1) if across * down % 32 == 0]
    return across, whole[0] if whole else limit, 1


def dw_bn_relu_reference(
    x: mx.array, params: mx.array, stride: int = 1, target: str | None = None, relu: bool = True
) -> mx.array:
    """What `dw_bn_relu` computes, in plain MLX operations; same arguments (`target` has no effect)."""
    c = x.shape[3]
    weight = params[:9].T.reshape(c, 3, 3, 1)  # (9, C) -> (C, 3, 3, 1)
    y = mx.conv2d(x.astype(mx.float32), weight, stride=stride, padding=1, groups=c)
    y = y * params[9] + params[10]
    return (mx.maximum(y, 0) if relu else y).astype(x.dtype)
