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
// KPARTS = 2 (GPUs, whole SIMD groups): two threads of a SIMD group share a tile, each with half of K, which
// makes threads for large tiles of few pixels. They swap sums: the first finishes the first half of the pixels,
// the second the others.
// With POOL, y is [pixel tile][KPARTS][CHANNELS]: only the sum over the pixels that a thread finishes is stored.
// Pixels past `pixels` are computed from whatever scratch holds and dropped. x may be y: a thread reads only
// what it then overwrites.
template <int K, int LD, int CHANNELS, int ROW, int N, int TP, int NV, int KPARTS, int STEPS, bool AHEAD,
          bool PACKED, bool IDENTITY, bool POOL, typename Scratch, typename Weights, typename Bias, typename Input,
          typename Output>
FUNCTION void product(Scratch rows, Weights weights, Bias bias, Input x, Output y, uint pixels, uint lid,
                      uint threads) {
  constexpr uint TILE = NV * VF, TILES = CHANNELS / TILE;
  constexpr uint APART = PACKED ? VF : TILES * VF;  // a thread's channel vectors
  constexpr uint NEXT = PACKED ? TILE : ROW;        // from one k to the next
  constexpr uint DOWN = !PACKED && TILES % 8 == 4 ? 2 : 1, ACROSS = DOWN == 2 ? 4 : TILES;
  constexpr uint SIMD = 32, LANES = SIMD / KPARTS;  // threads of a SIMD group that have the same part
  constexpr int DEPTH = K / KPARTS, OWN = (TP + KPARTS - 1) / KPARTS;  // of K and of the tile's pixels
  // Two turns in one, so that no register moves from next to now; not where that would make loads of rows wider.
  constexpr int TWICE = AHEAD && STEPS % VF == 0 && DEPTH / STEPS % 2 == 0 ? 2 : 1;
  const uint pixel_tiles = (pixels + TP - 1) / TP, tiles = (pixel_tiles + DOWN - 1) / DOWN * DOWN * TILES;
  // All threads of a SIMD group have to take part in a swap, those without a tile too.
  const uint turns = KPARTS == 1 ? tiles : (tiles * KPARTS + threads - 1) / threads * threads;
  for (uint i = lid; i < turns; i += threads) {
    const uint part = i / LANES % KPARTS, tile = KPARTS == 1 ? i : i / SIMD * LANES + i % LANES;
    const uint row = PACKED ? i % pixel_tiles : tile / ACROSS % DOWN + tile / (TILES * DOWN) * DOWN;
    const uint pixel = metal::min(row, pixel_tiles - 1) * TP, kept = row < pixel_tiles ? pixels - pixel : 0;
    const uint channel = PACKED ? i / pixel_tiles * TILE
                                : (tile % ACROSS + tile / (ACROSS * DOWN) % (TILES / ACROSS) * ACROSS) * VF;
    const Weights column = weights + (PACKED ? channel * K : channel) + part * DEPTH * NEXT;
    const Scratch values = rows + pixel * LD + part * DEPTH;

    vf sums[TP][NV], now[STEPS][NV], next[STEPS][NV];
    UNROLL for (int p = 0; p < TP; ++p)
      UNROLL for (int v = 0; v < NV; ++v) {
        sums[p][v] = splat(0.0f);
        if (KPARTS > 1 && uint(p / OWN) != part) continue;
        sums[p][v] = load_vf(bias + channel + v * APART);
        if (IDENTITY && uint(p) < kept)
          sums[p][v] = sums[p][v] + load_vf(x + (pixel + p) * N + channel + v * APART);
      }
    UNROLL for (int s = 0; s < STEPS; ++s)
      UNROLL for (int v = 0; v < NV; ++v)
        next[s][v] = AHEAD ? load_vf(column + s * NEXT + v * APART) : splat(0.0f);
    for (int start = 0; start < DEPTH; start += STEPS * TWICE)
      UNROLL for (int k = start; k < start + STEPS * TWICE; k += STEPS) {
        const int from = AHEAD ? metal::min(k + STEPS, DEPTH - STEPS) : k;
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
    if (KPARTS > 1)
      UNROLL for (int p = 0; p < OWN; ++p)
        UNROLL for (int v = 0; v < NV; ++v) {
          const vf one = sums[p][v], other = sums[p + OWN < TP ? p + OWN : TP - 1][v];
          sums[p][v] = (part == 0 ? one : other) + metal::simd_shuffle_xor(part == 0 ? other : one, LANES);
        }
    const uint first = part * OWN, end = metal::min(kept, uint(TP)), stored = end > first ? end - first : 0;
    const Output here = y + (POOL ? row * KPARTS + part : pixel + first) * N + channel;
    vf pooled[NV];
    UNROLL for (int v = 0; v < NV; ++v) pooled[v] = splat(0.0f);
    UNROLL for (int p = 0; p < OWN; ++p)
      if (uint(p) < stored)
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
