// The whole network in one launch; a group takes one image through all phases.
//
//   x  (batch, H, H) T      y  (batch, CLASSES) T
//   weights  float: stem and block 0 as in stem_block.metal, blocks 1, 2, 3 as in block.metal, the head as in
//            head.metal, one after the other
//
// Constants: H, C0 stem channels, C1 channels of blocks 0 and 1, C2 of blocks 2 and 3, CLASSES; tiling as in
// block.metal: RUN1 TP1 NV1 for blocks 0 and 1, RUN2 TP2 NV2 for blocks 2 and 3, STEPS AHEAD PACKED, PAD (row
// padding of scratch); SLICES PARTS as in head.metal.
//
// Work: 15.9 MFLOP per image by the usual count, 16.3 with what the stem is computed twice.
// Bytes: sizeof(T)·(H² + CLASSES) per image; 415 KB of weights, read by every group through the caches.
// Scratch: 4·(P1·C1 + P1·(2·C0 + PAD)) = 154 KB: a block's activations and its product's rows, whose product
// overwrites the activations in place. Beyond Metal's 32 KB: there scratch is device memory (SCRATCH_ARRAY).
// Default tiling, reasons and other targets' figures: tilings.py.
constexpr int H1 = (H + 1) / 2, H2 = (H1 + 1) / 2, P1 = H1 * H1, P2 = H2 * H2;
constexpr int LD1 = 2 * C0 + PAD, LD1B = C1 + PAD, LD2 = 2 * C1 + PAD, LD2B = C2 + PAD;
constexpr int R1 = (P1 + TP1 - 1) / TP1 * TP1, R2 = (P2 + TP2 - 1) / TP2 * TP2;  // whole tiles
constexpr int ACTIVATIONS = P1 * C1 > P2 * C2 ? P1 * C1 : P2 * C2;
constexpr int WIDE1 = R1 * (LD1 > LD1B ? LD1 : LD1B), WIDE2 = R2 * (LD2 > LD2B ? LD2 : LD2B);
SCRATCH_ARRAY(scratch, ACTIVATIONS + (WIDE1 > WIDE2 ? WIDE1 : WIDE2));
const ScratchPointer a = scratch, rows = scratch + ACTIVATIONS;
const uint image = threadgroup_position_in_grid.x;
const uint lid = thread_position_in_threadgroup.x, threads = threads_per_threadgroup.x;

pad_image<H, H, 2 * H1 + 1>(x + ulong(image) * (H * H), a, -1, lid, threads);
SCRATCH_BARRIER;
const Stem<ScratchPointer, const device float*, H, C0> stem = {a, weights, -1};
const device float* w = weights + 10 * C0;
depthwise<H, H, C0, 2, H1, RUN1, LD1, true>(stem, w, rows, 0, lid, threads);
SCRATCH_BARRIER;
product<2 * C0, LD1, C1, 1, TP1, NV1, STEPS, AHEAD, PACKED, false>(rows, w + 10 * C0, a, a, P1, 0, lid, threads);
SCRATCH_BARRIER;

const Stored<ScratchPointer, H1, C1> wide = {a};
w += 10 * C0 + (2 * C0 + 1) * C1;
depthwise<H1, H1, C1, 1, H1, RUN1, LD1B, false>(wide, w, rows, 0, lid, threads);
SCRATCH_BARRIER;
product<C1, LD1B, C1, 1, TP1, NV1, STEPS, AHEAD, PACKED, true>(rows, w + 10 * C1, a, a, P1, 0, lid, threads);
SCRATCH_BARRIER;

w += 10 * C1 + (C1 + 1) * C1;
depthwise<H1, H1, C1, 2, H2, RUN2, LD2, true>(wide, w, rows, 0, lid, threads);
SCRATCH_BARRIER;
product<2 * C1, LD2, C2, 1, TP2, NV2, STEPS, AHEAD, PACKED, false>(rows, w + 10 * C1, a, a, P2, 0, lid, threads);
SCRATCH_BARRIER;

const Stored<ScratchPointer, H2, C2> deep = {a};
w += 10 * C1 + (2 * C1 + 1) * C2;
depthwise<H2, H2, C2, 1, H2, RUN2, LD2B, false>(deep, w, rows, 0, lid, threads);
SCRATCH_BARRIER;
product<C2, LD2B, C2, 1, TP2, NV2, STEPS, AHEAD, PACKED, true>(rows, w + 10 * C2, a, a, P2, 0, lid, threads);
SCRATCH_BARRIER;

w += 10 * C2 + (C2 + 1) * C2;
head<P2, C2, CLASSES, SLICES, PARTS>(a, w, rows, y + image * CLASSES, lid, threads);
