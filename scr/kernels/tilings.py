"""How the kernels cut their work: the constants that differ per target and batch, and what decided them.

A `Tiling` is what the texts block.metal and stem_block.metal take beside their sizes; a `NetworkTiling` what
network.metal takes. Both are values: `kernels.block(…, tiling=…)` runs any that fits.
"""

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

from kernels import host
from kernels.launcher import METAL_THREADGROUP_BYTES, STATIC_SHARED_BYTES

GPU_VECTOR = 4  # channels in a `vf` of the GPU preludes
SCRATCH_BYTES = METAL_THREADGROUP_BYTES
CUDA_SCRATCH_BYTES = STATIC_SHARED_BYTES  # more needs a special launch
HOST_SCRATCH_BYTES = 160 * 1024  # keeps a group's rows in a core's second-level cache


class BlockShape(NamedTuple):
    """The sizes of a block: input (height, width, channels) -> output (out_height, out_width, outputs).

    With `stem`, the input is the image (height, width) and `channels` what the stem makes of it.
    """

    height: int
    width: int
    channels: int
    outputs: int
    stride: int = 1
    stem: bool = False

    @property
    def out_height(self) -> int:
        """Rows of the output."""
        return -(-self.height // self.stride)

    @property
    def out_width(self) -> int:
        """Columns of the output."""
        return -(-self.width // self.stride)

    @property
    def projected(self) -> bool:
        """Whether the skip is a convolution; else it is the identity."""
        return self.stem or self.stride != 1 or self.channels != self.outputs

    @property
    def depth(self) -> int:
        """K of the block's matrix product."""
        return self.channels * (2 if self.projected else 1)


@dataclass(frozen=True)
class Tiling:
    """One way to cut a block: see block.metal and the two phases for what the constants do."""

    rows: int  # output rows per group
    splits: int  # groups that share a strip's channels
    run: int  # output columns per thread in the depthwise phase
    pixels: int  # a thread's tile of the product: pixels × vectors
    vectors: int
    steps: int  # values of k at a time
    ahead: bool  # load the next weights before using these
    threads: int  # per group; 1 on the host
    padding: int  # floats between two rows of scratch
    staged: bool = False  # copy the group's weights to scratch first
    head: bool = False  # of the network's last block: computes the head too, in the same launch

    def scratch_bytes(self, shape: BlockShape) -> int:
        """Threadgroup memory of one group."""
        whole = -(-self.rows * shape.out_width // self.pixels) * self.pixels
        image = (shape.stride * (self.rows - 1) + 5) * (shape.width + 2) if shape.stem else 0
        staged = shape.depth * shape.outputs // self.splits if self.staged else 0
        sums = whole // self.pixels * shape.outputs if self.head else 0
        return 4 * (whole * (shape.depth + self.padding) + staged + image + sums)

    def misfit(self, shape: BlockShape, vector: int) -> str | None:
        """Why this tiling does not fit `shape` on a target with vectors of `vector` channels, or None."""
        tile = self.splits * self.vectors * vector
        if shape.channels % vector or shape.outputs % tile:
            return f"channels must be multiples of {vector} and outputs of {tile}"
        if shape.out_width % self.run:
            return f"a run of {self.run} does not divide {shape.out_width} columns"
        if shape.depth % self.steps:
            return f"{self.steps} steps do not divide a depth of {shape.depth}"
        if self.padding % GPU_VECTOR:
            return f"a padding of {self.padding} leaves rows of scratch unaligned"
        return None


@dataclass(frozen=True)
class NetworkTiling:
    """One way to cut the network's single launch; numbers 1 and 2 are the 14×14 and the 7×7 stages."""

    run1: int
    pixels1: int
    vectors1: int
    run2: int
    pixels2: int
    vectors2: int
    steps: int
    ahead: bool
    threads: int
    padding: int
    run0: int | None = None  # of block 0, which computes the stem for its run; None: run1
    steps2: int | None = None  # of the 7×7 stages; None: steps, and the same for ahead
    ahead2: bool | None = None
    walk: int | None = None  # groups at most; None: one for each multiprocessor on CUDA, each image elsewhere

    def misfit(self, shapes: tuple[BlockShape, ...], vector: int) -> str | None:
        """Why this tiling does not fit blocks of `shapes`, with vectors of `vector` channels, or None."""
        first = self.run0 or self.run1, self.pixels1, self.vectors1, self.steps
        wide = self.run1, *first[1:]
        deep = self.run2, self.pixels2, self.vectors2, self.steps2 or self.steps
        stages = first, wide, deep, deep
        for shape, (run, pixels, vectors, steps) in zip(shapes, stages, strict=True):
            misfit = Tiling(
                rows=shape.out_height,
                splits=1,
                run=run,
                pixels=pixels,
                vectors=vectors,
                steps=steps,
                ahead=self.ahead,
                threads=self.threads,
                padding=self.padding,
            ).misfit(shape, vector)
            if misfit:
                return misfit
        return None


@dataclass(frozen=True)
class SpreadTiling:
    """One way to cut network_spread.metal's launch: a tiling per block and what the blocks share.

    Of the blocks' tilings rows, splits, pixels and staged count.
    """

    blocks: tuple[Tiling, Tiling, Tiling, Tiling]
    groups: int  # a power of two, at most as many as the GPU runs at once
    threads: int
    steps: int
    ahead: bool
    padding: int = 4

    def scratch_floats(self, shapes: tuple[BlockShape, ...]) -> int:
        """Scratch of one group: its widest block's."""
        return max(t.scratch_bytes(s) // 4 for t, s in zip(self.blocks, shapes, strict=True))


def vector_width(target: str) -> int:
    """Channels in a `vf` on `target`."""
    return host.vector_width() if target == "host" else GPU_VECTOR


def packed_vectors(outputs: int, target: str) -> int:
    """Vectors of a thread's tile that weights for `target` are packed by; 0 where they are not (GPUs).

    On a CPU with 32 vector registers 7×3 tiles use 21 + 3 of them (AVX-512, 117 GFLOP/s per core of a
    Zen 4, against 112 for 14×2 and 93 for 7×3 of half the width); with 16, 6×2 uses 12 + 2 and a broadcast.
    """
    if target != "host":
        return 0
    vector = host.vector_width()
    wanted = (3, 2, 4, 1) if vector == 16 else (2, 1)
    return next((n for n in wanted if outputs % (n * vector) == 0), 1)


def divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`."""
    return next(d for d in range(min(number, limit), 0, -1) if number % d == 0)


def power_of_two(limit: int) -> int:
    """The largest power of two that is at most `limit`."""
    return 1 << (limit.bit_length() - 1)


def default_tiling(shape: BlockShape, batch: int, target: str, last: bool = False) -> Tiling:
    """The tiling to use for `batch` images where nobody has tuned; `last`: the head follows this block.

    On an H200 the head costs nothing in a launch whose groups have whole images (432 µs of 4096 images, which
    block 3 takes without it), and 46 µs in one of its own.
    """
    tiling = _host_tiling(shape, batch) if target == "host" else _gpu_tiling(shape, batch, target)
    return replace(tiling, head=last and target == "cuda" and _takes_head(tiling, shape))


def _takes_head(tiling: Tiling, shape: BlockShape) -> bool:
    """Whether a launch so cut can compute the head too: whole images per group, and room for the sums."""
    whole = (tiling.rows, tiling.splits, tiling.staged) == (shape.out_height, 1, False) and not shape.stem
    return whole and replace(tiling, head=True).scratch_bytes(shape) <= CUDA_SCRATCH_BYTES


def _host_tiling(shape: BlockShape, batch: int) -> Tiling:
    """A strip as large as the second-level cache takes, and, where images are few, as many groups as cores.

    Cores share an image's rows first: then each finds most of what it reads in its own cache, which outweighs
    that 7 rows divide badly (batch 1 on two cores: 1.09 times faster than with the channels shared). Where
    rows are too few, channels too, whose depthwise phase a split repeats.
    """
    vectors = packed_vectors(shape.outputs, "host")
    pixels = 7 if host.vector_width() == 16 else 6
    row_bytes = 4 * shape.out_width * shape.depth
    share = -(-host.default_threads() // batch)  # groups wanted per image
    rows = max(1, min(HOST_SCRATCH_BYTES // row_bytes, -(-shape.out_height // share)))
    strips = -(-shape.out_height // rows)
    splits = divisor(shape.outputs // (vectors * host.vector_width()), max(1, share // strips))
    return Tiling(rows, splits, divisor(shape.out_width, 14), pixels, vectors, 1, False, 1, 0)


def _gpu_tiling(shape: BlockShape, batch: int, target: str) -> Tiling:
    """Found on an H200 by searching more than 400 tilings per block (conclusions/h200/kernel_notes.md).

    Few images: a GPU waits for weights, so a group per row and part of the channels stages its part at once.
    More: deep steps without a second set of registers. Many: tiles whose warps fill the schedulers evenly,
    13×4 or 10×4 on 7×7 images and 7×4 on wide rows (7×8 below batch 256). Loads to registers are not the
    limit of the product, but runs of pixels, which save most of the depthwise phase's, pay. Metal's, not
    timed yet, are those that fit its threadgroup memory.
    """
    cuda = target == "cuda"
    limit = CUDA_SCRATCH_BYTES if cuda else SCRATCH_BYTES
    wide = shape.out_width > 7
    tile, ahead, most_rows, run = (7, 1), False, 7, 2 if shape.stem else 7
    if batch < 4:
        tile, steps, most_rows, run = (1, 1), 8, 1, 1
    elif batch < 64:
        tile, steps, most_rows = (4 if wide else 2, 1), 32, 1
    elif wide and batch < 256 and cuda:
        tile, steps, ahead, most_rows, run = (7, 2), 4, True, 4, 7 if shape.stem else 14
    elif wide:
        steps, most_rows = 32 if cuda and shape.stem else 16, 2
    elif batch < 256:
        steps, ahead = 8, True
    elif cuda:
        tile, steps, ahead = (13 if shape.projected else 10, 1), 4, True
    elif shape.projected:
        tile, steps, ahead, most_rows = (7, 2), 4, True, 4
    else:
        tile, steps = (14, 1), 12
    row_bytes = 4 * shape.out_width * (shape.depth + 4)
    rows = max(1, min(shape.out_height, most_rows, limit // row_bytes))
    rows = -(-shape.out_height // -(-shape.out_height // rows))  # strips of about the same height
    run = divisor(shape.out_width, run)
    columns = shape.outputs // GPU_VECTOR
    splits = divisor(columns, max(1, min(12, 112 // (batch * shape.out_height)))) if batch < 4 else 1
    pixels, vectors = min(tile[0], rows * shape.out_width), divisor(columns, tile[1])
    steps = divisor(shape.depth, steps)
    tiling = Tiling(rows, splits, run, pixels, vectors, steps, ahead, 1, 4, staged=batch < 4)
    if tiling.scratch_bytes(shape) > limit:  # no room for weights, or for pixels that do not exist
        tiling = replace(tiling, pixels=divisor(rows * shape.out_width, pixels), staged=False)
    return _with_threads(tiling, shape)


def _with_threads(tiling: Tiling, shape: BlockShape) -> Tiling:
    """`tiling` with a thread per tile, in whole SIMD groups; where weights are staged, with more threads.

    Those serve the depthwise phase and the staging, which are most of the work of a group with few tiles.
    """
    pixels = tiling.rows * shape.out_width
    columns = shape.outputs // tiling.splits // (tiling.vectors * GPU_VECTOR)
    items = -(-pixels // tiling.pixels) * columns
    if tiling.staged:
        items = max(items, pixels // tiling.run * (shape.channels // GPU_VECTOR))
    return replace(tiling, threads=min(384, max(64, -(-items // 32) * 32)))


def default_network_tiling(shapes: tuple[BlockShape, ...], batch: int, target: str) -> NetworkTiling:
    """The tiling of network.metal where nobody has tuned, for a network of these blocks."""
    wide, deep = shapes[1], shapes[3]
    if target == "host":
        pixels = (7, 7) if host.vector_width() == 16 else (6, 5)
        vectors = packed_vectors(wide.outputs, "host"), packed_vectors(deep.outputs, "host")
        runs = divisor(wide.out_width, 14), divisor(deep.out_width, 14)
        return NetworkTiling(runs[0], pixels[0], vectors[0], runs[1], pixels[1], vectors[1], 1, False, 1, 0)
    wide_run, deep_run = divisor(wide.out_width, 7), divisor(deep.out_width, 7)
    if target == "cuda":
        return NetworkTiling(wide_run, 13, 1, deep_run, 7, 1, 4, True, 384, 4)
    return NetworkTiling(divisor(wide.out_width, 14), 14, 1, deep_run, 7, 1, 8, False, 352, 4)


SPREAD_BATCH = 16  # the largest batch whose images a CUDA GPU computes together


def default_spread_tiling(batch: int, multiprocessors: int) -> SpreadTiling:
    """The tiling of the network spread over a CUDA GPU where nobody has tuned: a group per multiprocessor."""

    def cut(rows: int, splits: int, pixels: int) -> Tiling:
        return Tiling(rows, splits, 1, pixels, 1, 8, False, 384, 4, staged=True)

    if batch < 4:
        wide, deep = (cut(1, 8, 1), cut(1, 12, 1)) if batch == 1 else (cut(1, 4, 1), cut(2, 12, 1))
    else:
        wide, deep = (cut(1, 2, 2), cut(4, 12, 2)) if batch < 8 else (cut(2, 2, 2), cut(4, 6, 2))
    return SpreadTiling(
        (wide, wide, deep, deep), groups=power_of_two(multiprocessors), threads=256, steps=8, ahead=False
    )


def block_candidates(shape: BlockShape, batch: int, target: str, last: bool = False) -> list[Tiling]:
    """Tilings worth trying for `batch` images on `target`; the default comes first.

    `last`: the head follows this block, so that its launch may compute it too.
    """
    default = default_tiling(shape, batch, target, last)
    vector = vector_width(target)
    limit = {"host": HOST_SCRATCH_BYTES, "metal": SCRATCH_BYTES, "cuda": CUDA_SCRATCH_BYTES}[target]
    found = [default]
    if target == "host":
        for rows in {default.rows, *(divisor(shape.out_height, n) for n in (14, 7, 2))}:
            for pixels in (5, 6, 7, 8):
                found.append(replace(default, rows=rows, pixels=pixels))
        found += [replace(default, splits=n) for n in (1, 2, 4)]
        found.append(replace(default, run=divisor(shape.out_width, 7)))
    elif batch < 64:
        for rows, run, splits, pixels in itertools.product((1, 2), (1, 7), (1, 4, 12), (1, 2, 4)):
            for steps, ahead, staged in ((8, False, True), (16, True, False), (32, False, False)):
                found.append(Tiling(rows, splits, run, pixels, 1, steps, ahead, 0, 4, staged))
    else:
        tiles = ((7, 1), (10, 1), (13, 1), (7, 2))
        modes = ((4, True), (8, True), (16, False))
        for rows, run, tile, mode in itertools.product((2, 4, 7), (2, 7), tiles, modes):
            found.append(Tiling(rows, 1, run, *tile, *mode, 0, 4))
    if target != "host":
        found = [default, *(_fitted(tiling, shape) for tiling in found[1:])]
        if last:
            found += [replace(tiling, head=not tiling.head) for tiling in found if _takes_head(tiling, shape)]
    fitting = [t for t in found if not t.misfit(shape, vector) and t.scratch_bytes(shape) <= limit]
    return list(dict.fromkeys([default, *fitting]))


def _fitted(tiling: Tiling, shape: BlockShape) -> Tiling:
    """`tiling` with what the shape does not allow replaced by the next smaller that it does."""
    columns = shape.outputs // GPU_VECTOR
    vectors = divisor(columns, tiling.vectors)
    fitted = replace(
        tiling,
        rows=min(tiling.rows, shape.out_height),
        splits=divisor(columns // vectors, tiling.splits),
        run=divisor(shape.out_width, tiling.run),
        vectors=vectors,
        steps=divisor(shape.depth, tiling.steps),
    )
    return _with_threads(fitted, shape)


def network_candidates(shapes: tuple[BlockShape, ...], batch: int, target: str) -> list[NetworkTiling]:
    """Tilings of network.metal worth trying for `batch` images on `target`; the default comes first."""
    default = default_network_tiling(shapes, batch, target)
    if target == "host":
        tiles = ((7, 7), (6, 7), (8, 7), (7, 5), (6, 5), (8, 8))
        found = [replace(default, pixels1=a, pixels2=b) for a, b in tiles]
        found.append(replace(default, run1=divisor(shapes[1].out_width, 7)))
    else:
        found = [
            replace(default, pixels1=pixels, threads=threads, steps=steps, ahead=ahead)
            for pixels in (7, 13, 14)
            for threads in (352, 384)
            for steps, ahead in ((4, True), (8, False))
        ]
    return list(dict.fromkeys([default, *found]))


class Tunings:
    """Tilings found by a search on one machine, per level and batch size; see harness/tuning.py.

    A batch takes what was found for the largest tuned batch that is not larger, else for the smallest.
    """

    def __init__(self, entries: dict[tuple[str, int], tuple[Tiling | NetworkTiling | None, ...]]):
        self.entries = entries

    def pick(self, level: str, batch: int) -> tuple[Tiling | NetworkTiling | None, ...] | None:
        """The tilings of `level`: one per block, or the network's one; None, or a None in it: the default."""
        batches = sorted(size for name, size in self.entries if name == level)
        if not batches:
            return None
        return self.entries[level, max((size for size in batches if size <= batch), default=batches[0])]
