// Second phase of a block, where nearly all of its work is: y = relu(rows · weights + bias [+ x]), of the
// CHANNELS output channels that the group computes.
//
//   rows     [pixel][K] float in scratch, row stride LD      weights  K×CHANNELS, row stride ROW; bias (CHANNELS)
//   y        [pixel][CHANNELS], row stride N                 x        likewise, added if IDENTITY
//
// A thread keeps a tile of TP pixels × NV vectors of VF channels in registers and walks K, STEPS at a time;
// with AHEAD it loads the weights of the next STEPS before it uses those it has, which hides their latency.
// Two orders of weights and threads:
//   PACKED   weights [CHANNELS/(NV·VF)][K][NV·VF] (ROW has no meaning), pixel tiles fastest: one thread
//            streams its weights from its first-level cache (CPU)
//   else     channel tiles fastest, a thread's vectors as far apart as there are tiles: neighbouring threads
//            load neighbouring vectors (GPU)
// Pixels past `pixels` are computed from whatever scratch holds and dropped. x may be y: a thread reads only
// what it then overwrites.
template <int K, int LD, int CHANNELS, int ROW, int N, int TP, int NV, int STEPS, bool AHEAD, bool PACKED,
          bool IDENTITY, typename Scratch, typename Weights, typename Bias, typename Input, typename Output>
FUNCTION void product(Scratch rows, Weights weights, Bias bias, Input x, Output y, uint pixels, uint lid,
                      uint threads) {
  constexpr uint TILE = NV * VF, TILES = CHANNELS / TILE;
  constexpr uint APART = PACKED ? VF : TILES * VF;  // a thread's channel vectors
  constexpr uint NEXT = PACKED ? TILE : ROW;        // from one k to the next
  const uint pixel_tiles = (pixels + TP - 1) / TP;
  for (uint i = lid; i < pixel_tiles * TILES; i += threads) {
    const uint pixel = (PACKED ? i % pixel_tiles : i / TILES) * TP;
    const uint channel = PACKED ? i / pixel_tiles * TILE : i % TILES * VF;
    const Weights column = weights + (PACKED ? channel * K : channel);

    vf sums[TP][NV], now[STEPS][NV], next[STEPS][NV];
    UNROLL for (int p = 0; p < TP; ++p)
      UNROLL for (int v = 0; v < NV; ++v) {
        sums[p][v] = load_vf(bias + channel + v * APART);
        if (IDENTITY && pixel + p < pixels)
          sums[p][v] = sums[p][v] + load_vf(x + (pixel + p) * N + channel + v * APART);
      }
    UNROLL for (int s = 0; s < STEPS; ++s)
      UNROLL for (int v = 0; v < NV; ++v)
        next[s][v] = AHEAD ? load_vf(column + s * NEXT + v * APART) : splat(0.0f);
    for (int k = 0; k < K; k += STEPS) {
      const int from = AHEAD ? metal::min(k + STEPS, K - STEPS) : k;
      UNROLL for (int s = 0; s < STEPS; ++s)
        UNROLL for (int v = 0; v < NV; ++v) {
          now[s][v] = next[s][v];
          next[s][v] = load_vf(column + (from + s) * NEXT + v * APART);
        }
      UNROLL for (int s = 0; s < STEPS; ++s)
        UNROLL for (int p = 0; p < TP; ++p)
          UNROLL for (int v = 0; v < NV; ++v)
            sums[p][v] = metal::fma(splat(rows[(pixel + p) * LD + k + s]), AHEAD ? now[s][v] : next[s][v],
                                    sums[p][v]);
    }
    UNROLL for (int p = 0; p < TP; ++p)
      if (pixel + p < pixels)
        UNROLL for (int v = 0; v < NV; ++v)
          store_vf(y + (pixel + p) * N + channel + v * APART, metal::max(sums[p][v], splat(0.0f)));
  }
}
