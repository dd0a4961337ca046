// Ask for `COUNT` values that a later phase loads.
template <int COUNT, typename Pointer>
FUNCTION void warm(Pointer values, uint lid, uint threads) {
  constexpr uint LINE = 32;  // 128 bytes of floats
  for (uint i = lid * LINE; i < uint(COUNT); i += threads * LINE) prefetch(values + i);
}

// A block's two phases on one strip of output rows and one part of its channels: what a group does in
// block.metal, and what the network kernels do one block after the other.
//
// source: where the depthwise phase reads. x: the block's input where the skip is the identity (else unused).
// y: the block's output, (HEIGHT, WIDTH, N). rows: scratch, as product_phase.metal says. With STAGED the group
// first starts to copy its part of the matrix to `staged`, K·N/SPLITS floats of scratch: every load is then
// under way at once, where the product's own loop waits for memory K / STEPS times. It pays where a GPU has few
// groups.
//
// y with POOL: as product_phase.metal says. AFTER: before the product the group asks for so many floats that follow
// the block's weights, which the phase after this block reads first, so that it need not wait for memory; 0: none.
// It pays where a multiprocessor has one group.
template <int H, int W, int C, int N, int STRIDE, bool SKIP, int ROWS, int SPLITS, int RUN, int LD, int TP,
          int NV, int STEPS, bool AHEAD, bool PACKED, bool STAGED, bool POOL, int AFTER,
          typename Source, typename Weights, typename Input, typename Output>
FUNCTION void block_strip(Source source, Weights weights, Input x, Output y, ScratchPointer rows,
                          ScratchPointer staged, uint strip, uint split, uint lid, uint threads) {
  constexpr uint HEIGHT = (H - 1) / STRIDE + 1, WIDTH = (W - 1) / STRIDE + 1;
  constexpr uint K = SKIP ? 2 * C : C, CHANNELS = N / SPLITS, VECTORS = CHANNELS / VF;
  const uint top_row = strip * ROWS, first = top_row * (WIDTH * N) + split * CHANNELS;
  const uint pixels = metal::min(uint(ROWS), HEIGHT - top_row) * WIDTH;
  const Weights matrix = weights + 10 * C + split * CHANNELS * (PACKED ? K : 1);
  const Weights bias = weights + 10 * C + K * N + split * CHANNELS;
  const Input residual = x + (SKIP ? 0 : first);
  if (STAGED)
    for (uint i = lid; i < K * VECTORS; i += threads)
      copy_vf(staged + i * VF, matrix + i / VECTORS * N + i % VECTORS * VF);
  depthwise<H, W, C, STRIDE, ROWS, RUN, LD, SKIP>(source, weights, rows, top_row, lid, threads);
  if (STAGED) finish_copies();
  warm<AFTER>(weights + 10 * C + (K + 1) * N, lid, threads);
  SCRATCH_BARRIER;
  if (STAGED)
    product<K, LD, CHANNELS, CHANNELS, N, TP, NV, STEPS, AHEAD, PACKED, !SKIP, POOL>(
        rows, staged, bias, residual, y + first, pixels, lid, threads);
  else
    product<K, LD, CHANNELS, N, N, TP, NV, STEPS, AHEAD, PACKED, !SKIP, POOL>(
        rows, matrix, bias, residual, y + first, pixels, lid, threads);
}

// A block (not the first) of all images: the groups of the grid take its strips and parts in turn.
template <typename T, int H, int C, int N, int STRIDE, bool SKIP, int ROWS, int SPLITS, int LD, int TP,
          int STEPS, bool AHEAD, bool STAGED, typename Weights>
FUNCTION void block_of_all(const device T* x, Weights weights, device T* y, ScratchPointer rows, uint batch,
                           uint group, uint groups, uint lid, uint threads) {
  constexpr uint HEIGHT = (H - 1) / STRIDE + 1, STRIPS = (HEIGHT + ROWS - 1) / ROWS;
  constexpr uint PIXELS = (ROWS * HEIGHT + TP - 1) / TP * TP;
  for (uint i = group; i < batch * (STRIPS * SPLITS); i += groups) {
    const uint image = i / (STRIPS * SPLITS), strip = i / SPLITS % STRIPS;
    const Stored<const device T*, H, C> source = {x + ulong(image) * (H * H * C)};
    block_strip<H, H, C, N, STRIDE, SKIP, ROWS, SPLITS, 1, LD, TP, 1, STEPS, AHEAD, false, STAGED,
                false, 0>(source, weights, source.values, y + ulong(image) * (HEIGHT * HEIGHT * N), rows,
                          rows + PIXELS * LD, strip, i % SPLITS, lid, threads);
    SCRATCH_BARRIER;
  }
}
