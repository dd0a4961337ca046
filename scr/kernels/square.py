"""y = x² in one launch: the smallest complete kernel, the template for a new one (see README)."""

import mlx.core as mx

from kernels.launcher import Call, Kernel, launch

KERNEL = Kernel("square", inputs=("x",), outputs=("y",))

COUNT, THREADS = 1024, 256  # values and threads per group


def square(x: mx.array, target: str | None = None) -> mx.array:
    """x² for float32, float16 or bfloat16 x of any shape with 1 to 2³¹ - 1 values; squares in float32."""
    if not 0 < x.size < 2**31:
        raise ValueError(f"x must have 1 to 2³¹ - 1 values, got {x.size}")
    return launch(square_call(x.reshape(-1)), target)[0].reshape(x.shape)


def square_call(x: mx.array) -> Call:
    """The launch of `square` on x (N,)."""
    return Call(
        KERNEL,
        inputs=(x,),
        template=(("T", x.dtype), ("COUNT", COUNT)),
        groups=(-(-x.size // COUNT), 1, 1),
        group_size=(THREADS, 1, 1),
        output_shapes=(x.shape,),
        output_dtypes=(x.dtype,),
    )


def square_reference(x: mx.array, target: str | None = None) -> mx.array:
    """What `square` computes, in plain MLX operations; `target` has no effect."""
    return mx.square(x.astype(mx.float32)).astype(x.dtype)
