// Second phase of a block, where nearly all of its work is: y = relu(rows · weights + bias [+ x]).
//
//   rows     [pixel][K] float in scratch, row stride LD      weights  K×N, then (N) bias, float
//   y        [pixel][N] of the group's pixels                x        likewise, added if IDENTITY
//
// A thread keeps a tile of TP pixels × NV vectors of VF channels in registers and walks K, STEPS at a time;
// with AHEAD it loads the weights of the next STEPS before it uses those it has, which hides their latency.
// Two orders of weights and threads:
//   PACKED   weights [N/(NV·VF)][K][NV·VF], pixel tiles fastest: one thread streams its weights from its
//            first-level cache (CPU)
//   else     weights [K][N], channel tiles fastest, a thread's vectors as far apart as there are tiles:
//            neighbouring threads load neighbouring vectors (GPU)
// Of the N channels the group computes part number `split` of SPLITS. Pixels past `pixels` are computed from
// whatever scratch holds and dropped. x may be y: a thread reads only what it then overwrites.
template <int K, int LD, int N, int SPLITS, int TP, int NV, int STEPS, bool AHEAD, bool PACKED,
          bool IDENTITY, typename Scratch, typename Weights, typename Input, typename Output>
FUNCTION void product(Scratch rows, Weights weights, Input x, Output y, uint pixels, uint split, uint lid,
                      uint threads) {
  constexpr uint TILE = NV * VF, TILES = N / SPLITS / TILE;
  constexpr uint APART = PACKED ? VF : TILES * VF;  // a thread's channel vectors
  constexpr uint ROW = PACKED ? TILE : N;           // from one k to the next
  const uint pixel_tiles = (pixels + TP - 1) / TP;
  for (uint i = lid; i < pixel_tiles * TILES; i += threads) {
    const uint pixel = (PACKED ? i % pixel_tiles : i / TILES) * TP;
    const uint tile = PACKED ? i / pixel_tiles : i % TILES;
    const uint channel = split * (TILES * TILE) + tile * (PACKED ? TILE : VF);
    const Weights column = weights + (PACKED ? channel * K : channel);

    vf sums[TP][NV], now[STEPS][NV], next[STEPS][NV];
    UNROLL for (int p = 0; p < TP; ++p)
      UNROLL for (int v = 0; v < NV; ++v) {
        sums[p][v] = load_vf(weights + K * N + channel + v * APART);
        if (IDENTITY && pixel + p < pixels)
          sums[p][v] = sums[p][v] + load_vf(x + (pixel + p) * N + channel + v * APART);
      }
    UNROLL for (int s = 0; s < STEPS; ++s)
      UNROLL for (int v = 0; v < NV; ++v)
        next[s][v] = AHEAD ? load_vf(column + s * ROW + v * APART) : splat(0.0f);
    for (int k = 0; k < K; k += STEPS) {
      const int from = AHEAD ? metal::min(k + STEPS, K - STEPS) : k;
      UNROLL for (int s = 0; s < STEPS; ++s)
        UNROLL for (int v = 0; v < NV; ++v) {
          now[s][v] = next[s][v];
          next[s][v] = load_vf(column + (from + s) * ROW + v * APART);
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
