// The stem (3×3 convolution of a one-channel image + bias + ReLU) and the first block in one launch.
//
//   x        (batch, H, W) T                            y  (batch, HEIGHT, WIDTH, N) T
//   weights  float: the stem's (9, C) taps and (C) bias, then the block's as in block.metal
//
// Constants, group and tiling as in block.metal; the skip is a convolution, K = 2C. Phases: image into
// scratch, depthwise of stem values computed where they are read, product.
//
// Work: 2·HEIGHT·WIDTH·(9C + K·N) FLOP per image, and 18·C per stem value, of which a run of RUN pixels
// computes 3·(2·RUN + 1) for the 4·RUN it needs (stride 2): 2.25 times the stem's work for RUN = 1, 1.55
// for 14. In exchange the stem's output, 4·H·W·C bytes, is neither written nor read.
// Bytes: sizeof(T)·(H·W + HEIGHT·WIDTH·N) per image; 4·(20C + K·N + N) once per batch.
// Scratch: 4·LD·(ROWS·WIDTH rounded up to TP) + 4·(STRIDE·(ROWS - 1) + 5)·(W + 2) bytes; STAGED
// 4·K·N/SPLITS more.
// Default tiling: as block.metal's, but on GPUs shorter runs (2 pixels; 7 at batches 64 to 255), since longer ones
// take registers from the stem.
constexpr int HEIGHT = (H - 1) / STRIDE + 1, WIDTH = (W - 1) / STRIDE + 1, K = 2 * C;
constexpr int STRIPS = (HEIGHT + ROWS - 1) / ROWS, PIXELS = (ROWS * WIDTH + TP - 1) / TP * TP;
constexpr int IMAGE_ROWS = STRIDE * (ROWS - 1) + 3;
SCRATCH_ARRAY(rows, PIXELS * LD + (STAGED ? K * N / SPLITS : 0) + (IMAGE_ROWS + 2) * (W + 2));
const ScratchPointer staged = rows + PIXELS * LD, padded = staged + (STAGED ? K * N / SPLITS : 0);
const uint lid = thread_position_in_threadgroup.x, threads = threads_per_threadgroup.x;
const uint group = threadgroup_position_in_grid.x, image = group / (SPLITS * STRIPS);
const uint strip = group / SPLITS % STRIPS, split = group % SPLITS;
const int top = int(strip * ROWS) * STRIDE - 1;
device T* output = y + ulong(image) * (HEIGHT * WIDTH * N);

pad_image<H, W, IMAGE_ROWS>(x + ulong(image) * (H * W), padded, top, lid, threads);
SCRATCH_BARRIER;
const Stem<ScratchPointer, const device float*, W, C> source = {padded, weights, top};
block_strip<H, W, C, N, STRIDE, true, ROWS, SPLITS, RUN, LD, TP, NV, STEPS, AHEAD, PACKED, STAGED, false, 0>(
    source, weights + 10 * C, output, output, rows, staged, strip, split, lid, threads);
