"""A stand-in for an NVIDIA GPU: launches on the cuda target are compiled by NVRTC for real, and not run."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx

from kernels import launcher, nvrtc

# Of CUdevice_attribute, as an H200 answers but for the architecture.
DEVICE = {nvrtc.REGISTERS: 65536, nvrtc.MULTIPROCESSORS: 132, nvrtc.SHARED_BYTES: 227 * 1024}


@contextmanager
def cuda_device(
    run: Callable[..., Sequence[mx.array]], major: int = 9, minor: int = 0, compiler: str = ""
) -> Iterator[None]:
    """Inside the block each launch on the cuda target is handed to `run` as MLX would get it.

    `run` takes the arguments of mx.fast.precompiled_cuda_kernel and returns its outputs.
    """
    answers = DEVICE | {nvrtc.COMPUTE_MAJOR: major, nvrtc.COMPUTE_MINOR: minor}
    launcher._gpu_kernel.cache_clear()
    try:
        with (
            mock.patch.object(mx.fast, "precompiled_cuda_kernel", run),
            mock.patch.object(nvrtc, "attribute", answers.__getitem__),
            mock.patch.object(mx.cuda, "is_available", lambda: True),
            mock.patch.dict(os.environ, {"CUDA_COMPILER": compiler}),
        ):
            yield
    finally:
        launcher._gpu_kernel.cache_clear()


def zeros(
    output_shapes: Sequence[tuple[int, ...]], output_dtypes: Sequence[mx.Dtype], **_: Any
) -> list[mx.array]:
    """Outputs of a launch that did not happen."""
    return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
