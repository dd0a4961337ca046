"""A batch of 2³¹ values or more: refused, split, or indexed with enough bits. Nothing is allocated."""

import dataclasses
from math import prod

import mlx.core as mx
import numpy as np
import pytest
from kernel_cases import NETWORK, BlockWeights, batchnorm_params, floats, generator, values
from msl_emulator import Failed, Run, emulate, unavailable
from msl_text import Launch, metal_device, to_numpy

import kernels

needs_clang = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
RNG = generator("large batches")
BLOCK = NETWORK.blocks[1]
DEPTHWISE_PARAMS = batchnorm_params(RNG, 48)
CONV_PARAMS = floats(RNG.normal(size=(5, 96)))
BLOCK_WEIGHTS = BlockWeights.random(BLOCK, RNG).packed("metal")
HEAD_WEIGHTS = floats(RNG.normal(size=1930))

CALLS = {
    # kernel: (shape of one image or sequence, call)
    "dw_bn_relu": ((28, 28, 48), lambda x: kernels.dw_bn_relu(x, DEPTHWISE_PARAMS, 1, "metal")),
    "causal_conv1d": ((64, 96), lambda x: kernels.causal_conv1d(x, CONV_PARAMS, True, "metal")),
    "square": ((1024,), lambda x: kernels.square(x, "metal")),
    "block": ((14, 14, 96), lambda x: kernels.block(x, BLOCK_WEIGHTS, BLOCK, None, "metal")),
    "head": ((7, 7, 192), lambda x: kernels.head(x, HEAD_WEIGHTS, 10, "metal")),
}


def launches_of(kernel: str, total: int) -> list[Launch]:
    """What `kernel` launches for just over `total` values in float16, which exist as a shape only."""
    shape, call = CALLS[kernel]
    launches = []

    def record(launch: Launch) -> list[mx.array]:
        launches.append(launch)
        kinds = launch.output_dtypes
        return [mx.broadcast_to(mx.zeros((), kinds[n]), s) for n, s in launch.output_shapes.items()]

    with metal_device(record):
        call(mx.broadcast_to(mx.zeros((), mx.float16), (total // prod(shape) + 2, *shape)))
    return launches


@pytest.mark.parametrize("kernel", CALLS)
def test_batch_past_2_31_values_is_refused_split_or_indexed_wide(kernel: str):
    try:
        launches = launches_of(kernel, 2**31)
    except ValueError as error:
        assert "2³¹" in str(error)
        return
    sizes = [launch.inputs["x"].size for launch in launches]
    assert sum(sizes) > 2**31, "a part of the batch is left out"
    assert max(sizes) < 2**31 or "ulong(image)" in launches[0].text.source


def emulate_last_image(launch: Launch) -> tuple[np.ndarray, np.ndarray]:
    """The last image's result, run alone among buffers of full size, and the same on one image alone."""
    count, *shape = launch.inputs["x"].shape
    image = to_numpy(values(generator("large", launch.text.name), (1, *shape), "float16"))
    groups = launch.grid[0] // launch.threadgroup[0]
    last = (groups - groups // count, groups - 1)
    ((result,),) = emulate(launch, "address", [Run()], {"x": image}, last)
    inputs = launch.inputs | {"x": mx.zeros((1, *shape), mx.float16)}
    alone = dataclasses.replace(
        launch,
        inputs=inputs | ({"x_shape": mx.array((1, *shape), mx.int32)} if "x_shape" in inputs else {}),
        output_shapes={name: (1, *s[1:]) for name, s in launch.output_shapes.items()},
        grid=(groups // count * launch.threadgroup[0], *launch.grid[1:]),
    )
    ((expected,),) = emulate(alone, "address", [Run()], {"x": image})
    return result.reshape(-1)[-expected.size :], expected.reshape(-1)


@needs_clang
@pytest.mark.parametrize("kernel", [kernel for kernel in CALLS if kernel != "square"])
def test_last_image_of_the_largest_launch(kernel: str):
    result, expected = emulate_last_image(launches_of(kernel, 2**32)[0])
    assert np.any(expected)
    np.testing.assert_array_equal(result, expected)


@needs_clang
@pytest.mark.parametrize("kernel", ["block", "head"])
def test_narrow_index_in_a_large_launch_is_caught(kernel: str):
    launch = launches_of(kernel, 2**32)[0]
    text = dataclasses.replace(launch.text, source=launch.text.source.replace("ulong(image)", "image"))
    assert text != launch.text, "the edit does not apply"
    try:
        result, expected = emulate_last_image(dataclasses.replace(launch, text=text))
    except Failed as failed:
        assert failed.check in ("address", "undefined"), failed  # not because it no longer compiles
        return
    assert not np.array_equal(result, expected)
