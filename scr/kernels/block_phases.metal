// A block's two phases on one strip of output rows, one part of its channels: what a group does in block.metal,
// and what the network kernels do one block after the other.
//
// source: where the depthwise phase reads. x: the block's input where the skip is the identity (else unused).
// y: the block's output, (HEIGHT, WIDTH, N). rows: scratch, as product_phase.metal says.
template <int H, int W, int C, int N, int STRIDE, bool SKIP, int ROWS, int SPLITS, int RUN, int LD, int TP,
          int NV, int STEPS, bool AHEAD, bool PACKED, typename Source, typename Weights, typename Input,
          typename Output>
FUNCTION void block_strip(Source source, Weights weights, Input x, Output y, ScratchPointer rows, uint strip,
                          uint split, uint lid, uint threads) {
  constexpr uint HEIGHT = (H - 1) / STRIDE + 1, WIDTH = (W - 1) / STRIDE + 1;
  const uint top_row = strip * ROWS, first = top_row * (WIDTH * N);
  depthwise<H, W, C, STRIDE, ROWS, RUN, LD, SKIP>(source, weights, rows, top_row, lid, threads);
  SCRATCH_BARRIER;
  product<SKIP ? 2 * C : C, LD, N, SPLITS, TP, NV, STEPS, AHEAD, PACKED, !SKIP>(
      rows, weights + 10 * C, x + (SKIP ? 0 : first), y + first,
      metal::min(uint(ROWS), HEIGHT - top_row) * WIDTH, split, lid, threads);
}
