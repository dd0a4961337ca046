"""Removing a bounds check or a barrier from a real kernel's text turns the suite red."""

import dataclasses

import mlx.core as mx
import pytest
from kernel_cases import CASES, Case, exact
from kernel_checks import check_launch, check_races, check_reference
from msl_emulator import Failed, build_kernel, unavailable
from msl_text import Launch, metal_device

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

BARRIER = "SCRATCH_BARRIER;\n"
RUN_TIME_CHECKS = {
    "address",
    "undefined",
    "barrier",
    "unwritten",
    "uninitialised",
    "order",
    "race",
    "reference",
}


def case(start: str) -> Case:
    """The first case whose name begins with `start`."""
    return next(case for case in CASES if str(case).startswith(start))


DEPTHWISE = case("dw_bn_relu 3x7x7x8 stride 2")
SQUARE = case("square 1025")
CONV = case("causal_conv1d 1x17x257 2 taps contiguous residual")
BLOCK = case("block 3x9x7x32->16 stride 2")
TAIL = case("block 3x3x5x4->8 stride 1")  # whose last strip is not a whole number of tiles
STEM = case("stem_block 3x9x7x16->32 stride 2")
HEAD = case("head 3x7x7x192->10")
NETWORK = case("network 1x28x28x1, one launch")
WALK = case("network 3x28x28x1, one launch, two groups")
BLOCK_HEAD = case("block_head 3x5x3x16->32")
TWO_TILES = case("block 3x7x7x8->96 stride 1, ragged")

BOUNDS = (
    # (case, check in the text, what is left of it)
    (DEPTHWISE, "h >= 1 && ", ""),
    (DEPTHWISE, "h <= H && ", ""),
    (DEPTHWISE, "w >= 1 && ", ""),
    (DEPTHWISE, " && w <= W", ""),
    (DEPTHWISE, "c < C;", "c <= C;"),
    (DEPTHWISE, "column < W_out;", "column <= W_out;"),
    (SQUARE, "metal::min(first + COUNT, uint(x_shape[0]))", "first + COUNT"),
    (CONV, "t >= back ? float(x[at - back * C + c]) : 0.0f", "float(x[at - back * C + c])"),
    (CONV, "metal::min(first + ROWS, L)", "first + ROWS"),
    (CONV, "metal::min(left + COLUMNS, C)", "left + COLUMNS"),
    (BLOCK, "(dy == 0 && y < 0)", "false"),
    (BLOCK, "&& y >= H)", "&& false)"),
    (TAIL, "dy == 2 || HEIGHT % ROWS != 0", "dy == 2"),
    (BLOCK, "(j == 0 && x < 0)", "false"),
    (BLOCK, "(j > LAST && x >= W)", "false"),
    (TAIL, "if (uint(p) < kept)\n", "\n"),
    (STEM, "y >= 0 && ", ""),
    (STEM, "y < H && ", ""),
    (STEM, "x >= 0 && ", ""),
    (STEM, "x < W ?", "true ?"),
    (HEAD, "n < uint(N)", "n <= uint(N)"),
    (HEAD, "p < uint(PIXELS)", "p <= uint(PIXELS)"),
)


def mutated(launch: Launch, old: str, new: str, number: int | None = None) -> Launch:
    """`launch` of a text in which `old` is `new`: everywhere, or only at occurrence `number`."""
    source = launch.text.source
    pieces = source.split(old)
    assert len(pieces) > (number or 0) + 1, f"{old!r} is not in {launch.text.name}"
    if number is not None:
        pieces = [old.join(pieces[: number + 1]), old.join(pieces[number + 1 :])]
    return dataclasses.replace(launch, text=dataclasses.replace(launch.text, source=new.join(pieces)))


TILES = (
    # (case, how the tiles of pixels two at a time are found, an error in it)
    (TWO_TILES, "row < pixel_tiles ? pixels - pixel : 0", "pixels - pixel"),
    (TWO_TILES, "(pixel_tiles + DOWN - 1) / DOWN * DOWN * TILES", "pixel_tiles / DOWN * DOWN * TILES"),
    (TWO_TILES, "i / ACROSS % DOWN + ", ""),
)


IMAGES = (
    # (case, how two groups share three images, an error in it)
    (WALK, "image < batch", "image <= batch"),
    (WALK, "image += WALK", "image += WALK + 1"),
    (WALK, "image = threadgroup_position_in_grid.x", "image = 0"),
    (WALK, "(POOL ? row : pixel)", "pixel"),
    (WALK, "if (POOL && kept > 0)", "if (POOL && false)"),
    (BLOCK_HEAD, "uint(p) < kept)\n        UNROLL", "true)\n        UNROLL"),
    (BLOCK_HEAD, "rows + TILES * TP * LD", "rows"),
)


@pytest.mark.parametrize(("case", "old", "new"), BOUNDS + TILES + IMAGES, ids=lambda part: str(part).strip())
def test_missing_check_or_wrong_part_is_caught(case: Case, old: str, new: str):
    with pytest.raises(Failed) as failed:
        with metal_device(lambda launch: check_launch(mutated(launch, old, new))):
            result = case.call("metal")
        check_reference(exact(result), case.reference(), case.dtype)
    assert failed.value.check in RUN_TIME_CHECKS, failed.value  # not because it no longer compiles


@pytest.mark.parametrize("case", [BLOCK, STEM, HEAD, BLOCK_HEAD, NETWORK, WALK, TWO_TILES], ids=str)
def test_each_missing_barrier_is_caught(case: Case):
    def check(launch: Launch) -> list[mx.array]:
        sound = build_kernel(launch.text, "thread").read_bytes()
        caught = 0
        for number in range(launch.text.source.count(BARRIER)):
            broken = mutated(launch, BARRIER, ";\n", number)
            if build_kernel(broken.text, "thread").read_bytes() == sound:
                continue  # it stands in a function that this kernel does not call
            with pytest.raises(Failed) as failed:
                check_races(broken)
            assert failed.value.check == "race", failed.value
            caught += 1
        assert caught
        return [mx.zeros(s, launch.output_dtypes[n]) for n, s in launch.output_shapes.items()]

    with metal_device(check):
        case.call("metal")


def test_barrier_for_the_wrong_memory_is_caught():
    """The network's scratch on Metal is device memory: a barrier for threadgroup memory does not order it."""
    with (
        metal_device(lambda launch: check_races(mutated(launch, "mem_device", "mem_threadgroup"))),
        pytest.raises(Failed) as failed,
    ):
        NETWORK.call("metal")
    assert failed.value.check == "race"
