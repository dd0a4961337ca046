"""The block and network kernels' Python: packing, tilings, refusals, and plans that run a batch in chunks.

The texts themselves are checked, on every target, by tests/kernels.
"""

import dataclasses
import io
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest

import kernels
import mlx_model
from kernels import blocks, launcher, nvrtc, plans, tilings
from kernels.tilings import BlockShape, Tiling

SHAPE = kernels.NetworkShape(
    (
        BlockShape(12, 12, 16, 32, 2, stem=True),
        BlockShape(6, 6, 32, 32, 1),
        BlockShape(6, 6, 32, 48, 2),
        BlockShape(3, 3, 48, 48, 1),
    ),
    classes=7,
)
needs_host = pytest.mark.skipif(
    kernels.unavailable("host") is not None, reason=f"no host target: {kernels.unavailable('host')}"
)


def random(rng: np.random.Generator, *shape: int) -> mx.array:
    return mx.array(rng.normal(scale=0.3, size=shape).astype(np.float32))


def packed_block(shape: BlockShape, target: str, seed: int = 0) -> mx.array:
    rng = np.random.default_rng(seed)
    c, k, n = shape.channels, shape.depth, shape.outputs
    stem = (random(rng, 9, c), random(rng, c)) if shape.stem else None
    return blocks.pack_block(
        shape, random(rng, 9, c), random(rng, c), random(rng, k, n), random(rng, n), stem, target
    )


def packed_network(target: str) -> mx.array:
    rng = np.random.default_rng(1)
    head = kernels.pack_head(random(rng, SHAPE.classes, 48), random(rng, SHAPE.classes))
    return mx.concatenate([*(packed_block(s, target, i) for i, s in enumerate(SHAPE.blocks)), head])


@needs_host
@pytest.mark.parametrize("shape", SHAPE.blocks)
@pytest.mark.parametrize("target", ["host", "metal"])
def test_unpacking_is_the_inverse_of_packing(shape, target):
    rng = np.random.default_rng(3)
    c, k, n = shape.channels, shape.depth, shape.outputs
    parts = [random(rng, 9, c), random(rng, c), random(rng, k, n), random(rng, n)]
    stem = [random(rng, 9, c), random(rng, c)] if shape.stem else []
    packed = blocks.pack_block(shape, *parts, tuple(stem) or None, target)
    assert packed.size == blocks.packed_size(shape)
    for part, back in zip(stem + parts, blocks.unpack_block(packed, shape, target), strict=True):
        assert mx.array_equal(part, back)


def test_weights_for_a_gpu_keep_the_order_of_the_matrix():
    shape = BlockShape(4, 4, 4, 8)
    matrix = mx.arange(32, dtype=mx.float32).reshape(4, 8)
    packed = blocks.pack_block(shape, mx.zeros((9, 4)), mx.zeros(4), matrix, mx.zeros(8), target="cuda")
    assert packed[40:72].tolist() == list(range(32))


@needs_host
@pytest.mark.parametrize("level", ["block", "network"])
@pytest.mark.parametrize("batch", [1, 2, plans.HOST_CHUNK + 3])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_a_plan_computes_what_the_reference_does(level, batch, dtype):
    weights = packed_network("host")
    x = random(np.random.default_rng(batch), batch, 12, 12, 1).astype(dtype)

    def chain(n):
        if level == "network":
            return [kernels.network_call(kernels.ARGUMENT, n, dtype, weights, SHAPE, "host")]
        parts = kernels.weight_parts(weights, SHAPE)
        return kernels.block_calls(kernels.ARGUMENT, n, dtype, parts, SHAPE, "host")

    plan = kernels.make_plan(chain, batch, "host", threads=2)
    expected = np.array(kernels.network_reference(x.astype(mx.float32), weights, SHAPE, target="host"))
    tolerance = 2e-6 if dtype == mx.float32 else 2e-3  # storage between blocks; sums are float32
    for _ in range(2):  # a plan runs many times on the same memory
        y = plan(x)
        assert y.dtype == dtype
        error = np.abs(np.array(y).astype(np.float64) - expected).max() / np.abs(expected).max()
        assert error < tolerance
    every_second = mx.repeat(x, 2, axis=2)[:, :, ::2]  # the same values, not row by row in memory
    assert mx.array_equal(plan(every_second), y)
    earlier = plan(x)
    plan(x + 1)
    assert mx.array_equal(earlier, y), "a later run changed an earlier result"


@needs_host
def test_threads_may_share_a_plan():
    weights = packed_network("host")
    parts = kernels.weight_parts(weights, SHAPE)
    plan = kernels.make_plan(
        lambda n: kernels.block_calls(kernels.ARGUMENT, n, mx.float32, parts, SHAPE, "host"), 64, "host"
    )
    images = [random(np.random.default_rng(i), 64, 12, 12, 1) for i in range(2)]
    mx.eval(images)
    expected = [np.array(plan(x)) for x in images]
    assert not np.array_equal(*expected)

    def calls(which: int) -> list[np.ndarray]:
        return [np.array(plan(images[which])) for _ in range(50)]

    with ThreadPoolExecutor(2) as pool:
        for which, results in enumerate(pool.map(calls, range(2))):
            assert all(np.array_equal(result, expected[which]) for result in results)


@needs_host
def test_a_plan_on_the_host_refuses_to_be_compiled():
    weights = packed_network("host")
    plan = kernels.make_plan(
        lambda n: [kernels.network_call(kernels.ARGUMENT, n, mx.float32, weights, SHAPE, "host")], 1, "host"
    )
    with pytest.raises(kernels.Unavailable, match=r"inside mx\.compile"):
        mx.eval(mx.compile(plan)(mx.zeros((1, 12, 12, 1))))


def test_a_gpu_plan_chains_its_launches_and_hands_the_last_result_to_the_next_run(monkeypatch):
    call = kernels.Call(
        kernels.Kernel("double", ("x", "previous"), ("y",)),
        inputs=(kernels.ARGUMENT, kernels.PREVIOUS),
        template=(),
        groups=(1, 1, 1),
        group_size=(1, 1, 1),
        output_shapes=((8,),),
        output_dtypes=(mx.float32,),
    )
    second = dataclasses.replace(call, inputs=(kernels.Output(0), kernels.PREVIOUS))
    monkeypatch.setattr(plans, "unavailable", lambda target: None)
    monkeypatch.setattr(plans, "gpu_arguments", lambda call, target: {})
    # Stands in for MLX's kernel object: y = 2 x + previous.
    monkeypatch.setattr(plans, "gpu_kernel", lambda call, target: lambda inputs: [2 * inputs[0] + inputs[1]])
    plan = kernels.make_plan(lambda batch: [call, second], 8, "metal")
    x = mx.arange(8, dtype=mx.float32)
    first = plan(x)
    assert mx.array_equal(first, 4 * x)  # 2 (2 x + 0) + 0
    assert mx.array_equal(plan(x), 4 * x + 3 * first)  # 2 (2 x + first) + first


@needs_host
@pytest.mark.parametrize(
    "tiling",
    [
        Tiling(rows=1, splits=1, run=1, pixels=1, vectors=1, steps=1, ahead=False, threads=1, padding=0),
        Tiling(rows=2, splits=2, run=2, pixels=3, vectors=1, steps=4, ahead=True, threads=1, padding=4),
        Tiling(rows=4, splits=1, run=3, pixels=5, vectors=2, steps=2, ahead=False, threads=1, padding=8),
    ],
)
@pytest.mark.parametrize("shape", [BlockShape(6, 6, 32, 32, 1), BlockShape(11, 12, 32, 64, 2)])
def test_any_tiling_that_fits_gives_the_same_answer(shape, tiling, monkeypatch):
    # One vector per tile on the host, so that tilings with other numbers of vectors can be packed for.
    monkeypatch.setattr(blocks, "packed_vectors", lambda outputs, target: tiling.vectors)
    if tiling.misfit(shape, tilings.vector_width("host")):
        pytest.skip("needs a narrower vector than this processor's")
    weights = packed_block(shape, "host")
    x = random(np.random.default_rng(5), 2, shape.height, shape.width, shape.channels)
    y = np.array(kernels.block(x, weights, shape, tiling, "host"))
    expected = np.array(kernels.block_reference(x, weights, shape, target="host"))
    assert np.abs(y - expected).max() < 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("batch", [1, 16, 128, 4096])
@pytest.mark.parametrize(
    "shape",
    [
        *SHAPE.blocks,
        BlockShape(112, 112, 32, 64),
        BlockShape(56, 56, 128, 128, 2),
        BlockShape(28, 28, 256, 256),
        BlockShape(14, 14, 512, 512),
        BlockShape(7, 7, 1024, 1024),
    ],
)
def test_default_tilings_for_gpus_fit_the_shape_and_32_kilobytes(shape, batch):
    for target in ("metal", "cuda"):
        tiling = tilings.default_tiling(shape, batch, target)
        assert tiling.misfit(shape, tilings.GPU_VECTOR) is None
        assert tiling.threads % 32 == 0
        if target == "metal":
            assert tiling.scratch_bytes(shape) <= tilings.SCRATCH_BYTES


@needs_host
@pytest.mark.parametrize("threads", [1, 2, 4, 7, 8, 16])
@pytest.mark.parametrize("shape", [BlockShape(14, 14, 96, 192, 2), BlockShape(7, 7, 192, 192)])
def test_the_cores_share_a_single_image_by_rows_then_by_channels(shape, threads, monkeypatch):
    monkeypatch.setattr(tilings.host, "default_threads", lambda: threads)
    tiling = tilings.default_tiling(shape, 1, "host")
    assert tiling.misfit(shape, tilings.vector_width("host")) is None
    assert tiling.rows == -(-7 // threads)
    assert (tiling.splits > 1) == (threads > 2 * 7)
    monkeypatch.setattr(tilings.host, "default_threads", lambda: 1)
    assert tilings.default_tiling(shape, threads, "host").rows == 7  # an image each


def test_a_tiling_that_does_not_fit_is_refused_with_the_reason():
    shape = BlockShape(6, 6, 32, 32, 1)
    split = Tiling(1, 4, 1, 1, 1, 1, False, 32, 4)
    assert split.misfit(shape, 4) is None
    assert split.misfit(BlockShape(6, 6, 30, 32, 1), 4) == "channels must be multiples of 4 and outputs of 16"
    assert "does not divide 6 columns" in Tiling(1, 1, 4, 1, 1, 1, False, 32, 4).misfit(shape, 4)
    assert "do not divide a depth of 32" in Tiling(1, 1, 1, 1, 1, 5, False, 32, 4).misfit(shape, 4)
    assert "unaligned" in Tiling(1, 1, 1, 1, 1, 1, False, 32, 2).misfit(shape, 4)


@needs_host
def test_a_tile_that_the_weights_are_not_packed_for_is_refused():
    shape = BlockShape(6, 6, 32, 96, 1)
    default = tilings.default_tiling(shape, 1, "host")
    other = dataclasses.replace(default, vectors=default.vectors - 1, splits=1)
    with pytest.raises(ValueError, match="packed for"):
        kernels.block(mx.zeros((1, 6, 6, 32)), packed_block(shape, "host"), shape, other, "host")
    network = dataclasses.replace(tilings.default_network_tiling(SHAPE.blocks, 1, "host"), vectors2=1)
    with pytest.raises(ValueError, match="packed for"):
        kernels.network(mx.zeros((1, 12, 12, 1)), packed_network("host"), SHAPE, network, "host")


@pytest.mark.parametrize(
    ("shape", "tiling", "message"),
    [
        (SHAPE._replace(blocks=SHAPE.blocks[:3]), None, "blocks of the form"),
        (SHAPE._replace(blocks=(*SHAPE.blocks[:3], BlockShape(3, 3, 48, 48, 2))), None, "blocks of the form"),
        (SHAPE._replace(classes=1000), None, "1000 classes are too many"),
        (SHAPE, tilings.NetworkTiling(6, 4, 1, 3, 4, 1, 5, False, 64, 4), "5 steps do not divide"),
        (SHAPE, tilings.NetworkTiling(4, 4, 1, 3, 4, 1, 8, False, 64, 4), "run of 4 does not divide"),
    ],
)
def test_one_launch_refuses_networks_and_tilings_that_its_text_does_not_fit(shape, tiling, message):
    with pytest.raises(ValueError, match=message):
        kernels.network_call(kernels.ARGUMENT, 1, mx.float32, mx.zeros((8,)), shape, "metal", tiling)


def test_scratch_of_the_spread_network_holds_the_head():
    tiling = tilings.default_spread_tiling(1, 128)
    arrivals = mx.zeros((8,), mx.uint32)

    def floats(classes: int) -> int:
        shape = SHAPE._replace(classes=classes)
        call = kernels.spread_call(
            kernels.ARGUMENT, 1, mx.float32, mx.zeros((8,)), shape, arrivals, kernels.PREVIOUS, tiling
        )
        assert call.threadgroup_bytes == 4 * dict(call.template)["FLOATS"]
        return dict(call.template)["FLOATS"]

    assert floats(500) == 7 * 48 + 500 * 24 > floats(7)


def test_a_launch_that_is_too_large_for_a_gpu_is_refused():
    shape = BlockShape(7, 7, 192, 192)
    weights = mx.zeros((blocks.packed_size(shape),))
    whole = Tiling(7, 1, 7, 7, 1, 4, False, 384, 4)  # 38 KB
    call = blocks.block_call(kernels.ARGUMENT, 1, mx.float32, weights, shape, whole, "metal")
    launcher.gpu_arguments(dataclasses.replace(call, inputs=()), "cuda")
    with pytest.raises(ValueError, match=r"38,416 bytes of threadgroup memory, more than this GPU has"):
        launcher.gpu_arguments(dataclasses.replace(call, inputs=()), "metal")
    many = blocks.block_call(kernels.ARGUMENT, 2**23, mx.float32, weights, shape, whole, "cuda")
    with pytest.raises(ValueError, match="block needs 3,221,225,472 threads"):
        launcher.gpu_arguments(dataclasses.replace(many, inputs=()), "cuda")


def test_arrays_that_metal_gets_in_another_address_space_are_refused():
    shape = BlockShape(1, 1, 4, 4)
    with pytest.raises(ValueError, match="fewer than 8 values"):
        kernels.block(mx.zeros((1, 1, 1, 4)), mx.zeros((blocks.packed_size(shape),)), shape, target="metal")
    with pytest.raises(ValueError, match="fewer than 8 values"):
        kernels.head(mx.zeros((2, 1, 1, 4)), mx.zeros((5,)), 1, target="metal")


@needs_host
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (mx.zeros((1, 6, 6, 16)), r"x must be \(N, 6, 6, 32\)"),
        (mx.zeros((0, 6, 6, 32)), "N ≥ 1"),
        (mx.zeros((1, 6, 6, 32), mx.bfloat16), "float32 or float16"),
    ],
)
def test_block_refuses_inputs_that_do_not_fit(x, message):
    shape = BlockShape(6, 6, 32, 32, 1)
    with pytest.raises(ValueError, match=message):
        kernels.block(x, packed_block(shape, "host"), shape, target="host")


def test_a_block_with_the_head_takes_whole_images_and_both_their_weights():
    shape, whole = BlockShape(6, 6, 32, 32, 1), Tiling(6, 1, 1, 4, 1, 4, False, 64, 4, head=True)
    weights = mx.zeros((blocks.packed_size(shape) + 7 * 33,))

    def call(weights: mx.array, outputs: int, tiling: Tiling):
        return blocks.block_head_call(
            kernels.ARGUMENT, 1, mx.float32, weights, shape, outputs, tiling, "cuda"
        )

    assert call(weights, 7, whole).output_shapes == ((1, 7),)
    with pytest.raises(ValueError, match="whole images"):
        call(weights, 7, dataclasses.replace(whole, rows=3))
    with pytest.raises(ValueError, match="pack_block's and pack_head's"):
        call(weights, 8, whole)
    many = mx.zeros((blocks.packed_size(shape) + 100 * 33,))
    with pytest.raises(ValueError, match="100 outputs are too many"):
        call(many, 100, whole)


@pytest.mark.parametrize(
    ("target", "batch", "launches"),
    [
        ("cuda", 1, 5),
        ("cuda", 16, 5),
        ("cuda", 64, 4),
        ("cuda", 4096, 4),
        ("metal", 4096, 5),
        ("host", 64, 5),
    ],
)
def test_the_head_is_in_the_last_blocks_launch_where_its_groups_have_whole_images(target, batch, launches):
    parts = kernels.weight_parts(packed_network(target), SHAPE)
    last = tilings.default_tiling(SHAPE.blocks[-1], batch, target)
    for given, count in ((None, launches), ((None, None, None, last), 5)):
        calls = kernels.block_calls(kernels.ARGUMENT, batch, mx.float32, parts, SHAPE, target, given)
        assert len(calls) == count
        assert calls[-1].output_shapes == ((batch, SHAPE.classes),)


def test_the_head_follows_the_last_block_also_where_it_is_one_of_two_alike():
    a, b, c, d = SHAPE.blocks
    shape = kernels.NetworkShape((a, b, c, d, d), SHAPE.classes)
    parts = [mx.zeros((blocks.packed_size(sizes),)) for sizes in shape.blocks]
    parts.append(mx.zeros(((d.outputs + 1) * shape.classes,)))
    calls = kernels.block_calls(kernels.ARGUMENT, 64, mx.float32, parts, shape, "cuda")
    assert [call.kernel.name for call in calls] == ["stem_block", "block", "block", "block", "block_head"]


def test_scratch_with_the_head_holds_the_sums_of_its_tiles():
    shape = SHAPE.blocks[-1]
    apart = tilings.default_tiling(shape, 4096, "cuda")
    inside = tilings.default_tiling(shape, 4096, "cuda", last=True)
    assert inside == dataclasses.replace(apart, head=True)
    tiles = -(-shape.out_height * shape.out_width // apart.pixels)
    assert inside.scratch_bytes(shape) - apart.scratch_bytes(shape) == 4 * tiles * shape.outputs
    candidates = tilings.block_candidates(shape, 4096, "cuda", last=True)
    assert candidates[:1] == [inside] and apart in candidates
    assert not any(tiling.head for tiling in tilings.block_candidates(SHAPE.blocks[1], 4096, "cuda"))


def test_the_spread_networks_counter_is_no_launch_of_its_own(monkeypatch):
    """An array of zeros that is not evaluated would be filled by a kernel in every forward."""
    monkeypatch.setattr(nvrtc, "attribute", {nvrtc.MULTIPROCESSORS: 132, nvrtc.SHARED_BYTES: 232448}.get)
    weights = mx.zeros((mlx_model.SHAPE.packed_size,))
    network = mlx_model.FusedNetwork("network", weights, "cuda")
    (call,) = network.calls(1, mx.float32)
    text = io.StringIO()
    mx.export_to_dot(text, call.inputs[2])
    assert "shape=rectangle" not in text.getvalue()


@needs_host
def test_block_refuses_weights_of_another_size():
    with pytest.raises(ValueError, match="weights must be 1376 float32"):
        kernels.block(mx.zeros((1, 6, 6, 32)), mx.zeros((10,)), BlockShape(6, 6, 32, 32, 1), target="host")


def test_groups_of_the_spread_network_are_a_power_of_two():
    assert [tilings.power_of_two(n) for n in (1, 2, 24, 127, 128, 132)] == [1, 2, 16, 64, 128, 128]
