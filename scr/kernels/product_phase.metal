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
//            load neighbouring vectors (GPU). Eight threads, whose 16-byte loads a GPU serves at once, keep
//            to one line of weights: where there are 4 tiles more than a multiple of 8, they take 4 tiles of
//            channels for two of pixels
// With POOL, y is [pixel tile][CHANNELS]: of each tile only the sum over its pixels is stored.
// Pixels past `pixels` are computed from whatever scratch holds and dropped. x may be y: a thread reads only
// what it then overwrites.
template <int K, int LD, int CHANNELS, int ROW, int N, int TP, int NV, int STEPS, bool AHEAD,
          bool PACKED, bool IDENTITY, bool POOL, typename Scratch, typename Weights, typename Bias, typename Input,
          typename Output>
FUNCTION void product(Scratch rows, Weights weights, Bias bias, Input x, Output y, uint pixels, uint lid,
                      uint threads) {
  constexpr uint TILE = NV * VF, TILES = CHANNELS / TILE;
  constexpr uint APART = PACKED ? VF : TILES * VF;  // a thread's channel vectors
  constexpr uint NEXT = PACKED ? TILE : ROW;        // from one k to the next
  constexpr uint DOWN = !PACKED && TILES % 8 == 4 ? 2 : 1, ACROSS = DOWN == 2 ? 4 : TILES;
  // Two turns in one, so that no register moves from next to now; not where that would make loads of rows wider.
  constexpr int TWICE = AHEAD && STEPS % VF == 0 && K / STEPS % 2 == 0 ? 2 : 1;
  const uint pixel_tiles = (pixels + TP - 1) / TP, tiles = (pixel_tiles + DOWN - 1) / DOWN * DOWN * TILES;
  for (uint i = lid; i < tiles; i += threads) {
    const uint row = PACKED ? i % pixel_tiles : i / ACROSS % DOWN + i / (TILES * DOWN) * DOWN;
    const uint pixel = metal::min(row, pixel_tiles - 1) * TP, kept = row < pixel_tiles ? pixels - pixel : 0;
    const uint channel = PACKED ? i / pixel_tiles * TILE
                                : (i % ACROSS + i / (ACROSS * DOWN) % (TILES / ACROSS) * ACROSS) * VF;
    const Weights column = weights + (PACKED ? channel * K : channel);
    const Scratch values = rows + pixel * LD;

    vf sums[TP][NV], now[STEPS][NV], next[STEPS][NV];
    UNROLL for (int p = 0; p < TP; ++p)
      UNROLL for (int v = 0; v < NV; ++v) {
        sums[p][v] = load_vf(bias + channel + v * APART);
        if (IDENTITY && uint(p) < kept)
          sums[p][v] = sums[p][v] + load_vf(x + (pixel + p) * N + channel + v * APART);
      }
    UNROLL for (int s = 0; s < STEPS; ++s)
      UNROLL for (int v = 0; v < NV; ++v)
        next[s][v] = AHEAD ? load_vf(column + s * NEXT + v * APART) : splat(0.0f);
    for (int start = 0; start < K; start += STEPS * TWICE)
      UNROLL for (int k = start; k < start + STEPS * TWICE; k += STEPS) {
        const int from = AHEAD ? metal::min(k + STEPS, K - STEPS) : k;
        UNROLL for (int s = 0; s < STEPS; ++s)
          UNROLL for (int v = 0; v < NV; ++v) {
            now[s][v] = next[s][v];
            next[s][v] = load_vf(column + (from + s) * NEXT + v * APART);
          }
        UNROLL for (int s = 0; s < STEPS; ++s)
          UNROLL for (int p = 0; p < TP; ++p)
            UNROLL for (int v = 0; v < NV; ++v)
              sums[p][v] =
                  metal::fma(splat(values[p * LD + k + s]), AHEAD ? now[s][v] : next[s][v], sums[p][v]);
      }
    const Output here = y + (POOL ? row : pixel) * N + channel;
    vf pooled[NV];
    UNROLL for (int v = 0; v < NV; ++v) pooled[v] = splat(0.0f);
    UNROLL for (int p = 0; p < TP; ++p)
      if (uint(p) < kept)
        UNROLL for (int v = 0; v < NV; ++v) {
          const vf value = metal::max(sums[p][v], splat(0.0f));
          if (POOL)
            pooled[v] = pooled[v] + value;
          else
            store_vf(here + p * N + v * APART, value);
        }
    if (POOL && kept > 0)
      UNROLL for (int v = 0; v < NV; ++v) store_vf(here + v * APART, pooled[v]);
  }
}
