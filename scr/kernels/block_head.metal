// The last block with the head in one launch: its output is pooled where it is computed and never stored.
//
//   x  (batch, H, W, C) T      weights  float: as in block.metal, then as in head.metal      y  (batch, CLASSES) T
//
// Constants as in block.metal, without ROWS and SPLITS since a group takes a whole image; CLASSES, PARTS as in
// head.metal. Phases: depthwise, product and sums over the pixels of its tiles, linear layer.
//
// Work: block.metal's and head.metal's. Bytes: sizeof(T)·(H·W·C + CLASSES) per image, which saves writing and
// reading HEIGHT·WIDTH·N; weights once per batch. Scratch: 4·LD·(HEIGHT·WIDTH rounded up to TP) bytes, where the
// shares of outputs go at last, and 4·N per tile of pixels.
constexpr int HEIGHT = (H - 1) / STRIDE + 1, WIDTH = (W - 1) / STRIDE + 1, K = SKIP ? 2 * C : C;
constexpr int TILES = (HEIGHT * WIDTH + TP - 1) / TP;
SCRATCH_ARRAY(rows, TILES * TP * LD + TILES * N);
const ScratchPointer sums = rows + TILES * TP * LD;
const uint image = threadgroup_position_in_grid.x;
const uint lid = thread_position_in_threadgroup.x, threads = threads_per_threadgroup.x;

const Stored<const device T*, W, C> source = {x + ulong(image) * (H * W * C)};
block_strip<H, W, C, N, STRIDE, SKIP, HEIGHT, 1, RUN, LD, TP, NV, STEPS, AHEAD, PACKED, false, true, 0>(
    source, weights, source.values, sums, rows, rows, 0, 0, lid, threads);
SCRATCH_BARRIER;
linear<HEIGHT * WIDTH, N, CLASSES, TILES, PARTS>(sums, weights + 10 * C + (K + 1) * N, rows, y + image * CLASSES,
                                                  lid, threads);
