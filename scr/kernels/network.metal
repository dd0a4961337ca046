// The whole network in one launch; a group takes one image after the other through all phases.
//
//   x  (batch, H, H) T      y  (batch, CLASSES) T
//   weights  float: stem and block 0 as in stem_block.metal, blocks 1, 2, 3 as in block.metal, the head as in
//            head.metal, one after the other
//
// Constants: H, C0 stem channels, C1 channels of blocks 0 and 1, C2 of blocks 2 and 3, CLASSES; tiling as in
// block.metal: RUN0 for block 0, RUN1 for block 1, TP1 NV1 STEPS1 AHEAD1 for both, RUN2 TP2 NV2 STEPS2 AHEAD2 for
// blocks 2 and 3, PACKED, PAD (row padding of scratch); PARTS as in head.metal. A group takes every WALK-th image:
// with as many groups as a GPU runs at once, one image's end overlaps the next one's load.
//
// Work: 15.9 MFLOP per image by the usual count, 16.3 with what the stem is computed twice.
// Bytes: sizeof(T)·(H² + CLASSES) per image; 398 KB of weights, read by every group through the caches.
// Scratch: 4·(P1·C1 + R1·(2·C0 + PAD)), R1 being P1 rounded up to TP1: 158 KB with 13×4 tiles. That is a block's
// activations and its product's rows, whose product overwrites the activations in place; only block 3's goes behind
// them, already pooled by tile. Beyond Metal's 32 KB: there scratch is device memory (SCRATCH_ARRAY).
// Default tiling (tilings.py): on CUDA 13×4 and 7×4 tiles, which give 384 and 336 of 384 threads one each, so that a
// multiprocessor's four schedulers have three warps each; on Metal, not timed, 14×4 and 7×4; on CPUs as block.metal's.
constexpr int H1 = (H + 1) / 2, H2 = (H1 + 1) / 2, P1 = H1 * H1, P2 = H2 * H2;
constexpr int LD0 = 2 * C0 + PAD, LD1 = C1 + PAD, LD2 = 2 * C1 + PAD, LD3 = C2 + PAD;
constexpr int R1 = (P1 + TP1 - 1) / TP1 * TP1, R2 = (P2 + TP2 - 1) / TP2 * TP2;  // whole tiles
constexpr int TILES2 = (P2 + TP2 - 1) / TP2, POOLED = P2 * C2 + TILES2 * C2;
constexpr int ACTIVATIONS = P1 * C1 > POOLED ? P1 * C1 : POOLED;
constexpr int ROWS1 = R1 * (LD0 > LD1 ? LD0 : LD1), ROWS2 = R2 * (LD2 > LD3 ? LD2 : LD3);
SCRATCH_ARRAY(a, ACTIVATIONS + (ROWS1 > ROWS2 ? ROWS1 : ROWS2));
const ScratchPointer rows = a + ACTIVATIONS, sums = a + P2 * C2;
const uint batch = x_shape[0];
const uint lid = thread_position_in_threadgroup.x, threads = threads_per_threadgroup.x;

// No barrier at the end: the next image goes to `a`, while slow threads still read `rows`.
for (uint image = threadgroup_position_in_grid.x; image < batch; image += WALK) {
  const device float* w = weights + 10 * C0;
  warm<20 * C0>(weights, lid, threads);
  pad_image<H, H, 2 * H1 + 1>(x + ulong(image) * (H * H), a, -1, lid, threads);
  SCRATCH_BARRIER;
  const Stem<ScratchPointer, const device float*, H, C0> stem = {a, weights, -1};
  block_strip<H, H, C0, C1, 2, true, H1, 1, RUN0, LD0, TP1, NV1, STEPS1, AHEAD1, PACKED, false, false,
              10 * C1>(stem, w, a, a, rows, rows, 0, 0, lid, threads);
  SCRATCH_BARRIER;
  const Stored<ScratchPointer, H1, C1> wide = {a};
  w += 10 * C0 + (2 * C0 + 1) * C1;
  block_strip<H1, H1, C1, C1, 1, false, H1, 1, RUN1, LD1, TP1, NV1, STEPS1, AHEAD1, PACKED, false, false,
              10 * C1>(wide, w, a, a, rows, rows, 0, 0, lid, threads);
  SCRATCH_BARRIER;
  w += 10 * C1 + (C1 + 1) * C1;
  block_strip<H1, H1, C1, C2, 2, true, H2, 1, RUN2, LD2, TP2, NV2, STEPS2, AHEAD2, PACKED, false, false,
              10 * C2>(wide, w, a, a, rows, rows, 0, 0, lid, threads);
  SCRATCH_BARRIER;
  const Stored<ScratchPointer, H2, C2> deep = {a};
  w += 10 * C1 + (2 * C1 + 1) * C2;
  if (batch - image > WALK) warm<H * H>(x + ulong(image + WALK) * (H * H), lid, threads);
  block_strip<H2, H2, C2, C2, 1, false, H2, 1, RUN2, LD3, TP2, NV2, STEPS2, AHEAD2, PACKED, false, true,
              (C2 + 1) * CLASSES>(deep, w, a, sums, rows, rows, 0, 0, lid, threads);
  SCRATCH_BARRIER;
  w += 10 * C2 + (C2 + 1) * C2;
  linear<P2, C2, CLASSES, TILES2, PARTS>(sums, w, rows, y + image * CLASSES, lid, threads);
}
