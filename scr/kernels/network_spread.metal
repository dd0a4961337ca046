// The whole network in one launch that spreads every image over the GPU, for batches that leave most of it
// idle: the groups do a block together, wait for each other, and go on to the next. CUDA only: Metal does not
// promise that groups make progress side by side.
//
//   x  (batch, H, H) T      y  (batch, CLASSES) T      weights  as in network.metal
//   memory    T, two blocks' activations: 2·batch·(H/2)²·C1
//   arrivals  uint, for grid_barrier; zero before the first launch, never reset
//   previous  the last launch's y, not read: it orders launches that share `arrivals`
//
// Constants as in network.metal; per block number i: ROWSi SPLITSi TPi STAGEDi as in block.metal.
// The grid has a power of two of groups, which must fit the GPU at once.
//
// Work and bytes: those of stem_block, block × 3 and head. Scratch: the widest block's (FLOATS).
// Default tiling (tilings.py): about one group per multiprocessor, which any GPU runs at once, with staged
// weights; strips and splits give each group at most one or two parts of every block.
constexpr int H1 = (H + 1) / 2, H2 = (H1 + 1) / 2, P1 = H1 * H1, P2 = H2 * H2;
constexpr int LD0 = 2 * C0 + PAD, LD1 = C1 + PAD, LD2 = 2 * C1 + PAD, LD3 = C2 + PAD;
SCRATCH_ARRAY(rows, FLOATS);
const uint batch = x_shape[0], group = threadgroup_position_in_grid.x, groups = threadgroups_per_grid.x;
const uint lid = thread_position_in_threadgroup.x, threads = threads_per_threadgroup.x;
device T* a = memory;
device T* b = memory + ulong(batch) * (P1 * C1);

const device float* w = weights + 10 * C0;
constexpr int STRIPS0 = (H1 + ROWS0 - 1) / ROWS0, PIXELS0 = (ROWS0 * H1 + TP0 - 1) / TP0 * TP0;
const ScratchPointer staged = rows + PIXELS0 * LD0;
const ScratchPointer padded = staged + (STAGED0 ? 2 * C0 * C1 / SPLITS0 : 0);
for (uint i = group; i < batch * (STRIPS0 * SPLITS0); i += groups) {
  const uint image = i / (STRIPS0 * SPLITS0), strip = i / SPLITS0 % STRIPS0;
  const int top = int(strip * ROWS0) * 2 - 1;
  device T* output = a + ulong(image) * (P1 * C1);
  pad_image<H, H, 2 * ROWS0 + 1>(x + ulong(image) * (H * H), padded, top, lid, threads);
  SCRATCH_BARRIER;
  const Stem<ScratchPointer, const device float*, H, C0> stem = {padded, weights, top};
  block_strip<H, H, C0, C1, 2, true, ROWS0, SPLITS0, 1, LD0, TP0, 1, STEPS, AHEAD, false, STAGED0, false, 0>(
      stem, w, output, output, rows, staged, strip, i % SPLITS0, lid, threads);
  SCRATCH_BARRIER;
}
grid_barrier(arrivals, groups);
w += 10 * C0 + (2 * C0 + 1) * C1;
block_of_all<T, H1, C1, C1, 1, false, ROWS1, SPLITS1, LD1, TP1, STEPS, AHEAD, STAGED1>(
    a, w, b, rows, batch, group, groups, lid, threads);
grid_barrier(arrivals, groups);
w += 10 * C1 + (C1 + 1) * C1;
block_of_all<T, H1, C1, C2, 2, true, ROWS2, SPLITS2, LD2, TP2, STEPS, AHEAD, STAGED2>(
    b, w, a, rows, batch, group, groups, lid, threads);
grid_barrier(arrivals, groups);
w += 10 * C1 + (2 * C1 + 1) * C2;
block_of_all<T, H2, C2, C2, 1, false, ROWS3, SPLITS3, LD3, TP3, STEPS, AHEAD, STAGED3>(
    a, w, b, rows, batch, group, groups, lid, threads);
grid_barrier(arrivals, groups);
w += 10 * C2 + (C2 + 1) * C2;
for (uint image = group; image < batch; image += groups) {
  pool<P2, C2, SLICES>(b + ulong(image) * (P2 * C2), rows, lid, threads);
  SCRATCH_BARRIER;
  linear<P2, C2, CLASSES, SLICES, PARTS>(rows, w, rows + SLICES * C2, y + image * CLASSES, lid, threads);
  SCRATCH_BARRIER;
}
