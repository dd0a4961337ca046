// A depthwise-separable residual block in one launch (block 0 with the stem in front: stem_block.metal).
//
//   x        (batch, H, W, C) T                         y  (batch, HEIGHT, WIDTH, N) T
//   weights  float: (9, C) taps, (C) bias, K×N, (N) bias; BatchNorm folded in. fp32 for either T: they are
//            read through caches, and a conversion in the inner loop costs more than the bytes it saves
//
// Constants: H W C N STRIDE; SKIP: the skip is a convolution, so K = 2C, else the identity and K = C;
// tiling: ROWS SPLITS RUN TP NV STEPS AHEAD PACKED STAGED, and LD, the row stride of scratch (padded against
// bank conflicts).
// Group: one image's strip of ROWS output rows, part `split` of its channels. Phases: depthwise, product.
//
// Work: 2·HEIGHT·WIDTH·(9C + K·N) FLOP per image; the depthwise part is repeated SPLITS times.
// Bytes: sizeof(T)·(H·W·C + HEIGHT·WIDTH·N) per image, input rows shared by two strips twice;
// 4·(10C + K·N + N) once per batch.
// Scratch: 4·LD·(ROWS·WIDTH rounded up to TP) bytes; STAGED 4·K·N/SPLITS more.
// Default tiling (tilings.py): a CPU core takes the whole image if its rows fit the second-level cache, in tiles
// whose sums fill the registers (7×48 with AVX-512, else 6×16). A GPU with many images takes strips of 2 wide rows
// or a 7×7 image, in tiles that give every scheduler as many warps; with few, one row, split channels and staged
// weights, since then it waits for memory.
constexpr int HEIGHT = (H - 1) / STRIDE + 1, WIDTH = (W - 1) / STRIDE + 1, K = SKIP ? 2 * C : C;
constexpr int STRIPS = (HEIGHT + ROWS - 1) / ROWS, PIXELS = (ROWS * WIDTH + TP - 1) / TP * TP;
SCRATCH_ARRAY(rows, PIXELS * LD + (STAGED ? K * N / SPLITS : 0));
const ScratchPointer staged = rows + PIXELS * LD;
const uint group = threadgroup_position_in_grid.x, image = group / (SPLITS * STRIPS);
const uint strip = group / SPLITS % STRIPS, split = group % SPLITS;

const Stored<const device T*, W, C> source = {x + ulong(image) * (H * W * C)};
block_strip<H, W, C, N, STRIDE, SKIP, ROWS, SPLITS, RUN, LD, TP, NV, STEPS, AHEAD, PACKED, STAGED, false, 0>(
    source, weights, source.values, y + ulong(image) * (HEIGHT * WIDTH * N), rows, staged, strip, split,
    thread_position_in_threadgroup.x, threads_per_threadgroup.x);
