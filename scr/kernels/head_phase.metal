// Last phases of the network: global average pooling and the linear layer, (PIXELS, C) -> (N).
//
//   weights  (N, C), then (N) bias          scratch  float, max(SLICES, VF·N·PARTS / C + 1)·C + C
//
// SLICES threads share the pixels of a channel vector, PARTS the channels of an output; each adds up its
// share in registers, then the shares are added.
template <int PIXELS, int C, int N, int SLICES, int PARTS, typename Source, typename Weights,
          typename Scratch, typename Output>
FUNCTION void head(Source x, Weights weights, Scratch mean, Output y, uint lid, uint threads) {
  constexpr int VECTORS = C / VF;
  const Scratch sums = mean + C;
  for (uint i = lid; i < uint(SLICES * VECTORS); i += threads) {
    const uint c = i % VECTORS * VF, slice = i / VECTORS;
    vf sum = splat(0.0f);
    for (uint p = slice; p < uint(PIXELS); p += SLICES) sum = sum + load_vf(x + p * C + c);
    store_vf(sums + slice * C + c, sum);
  }
  SCRATCH_BARRIER;
  for (uint c = lid; c < uint(C); c += threads) {
    float sum = 0.0f;
    for (int s = 0; s < SLICES; ++s) sum += sums[s * C + c];
    mean[c] = sum / PIXELS;
  }
  SCRATCH_BARRIER;
  for (uint i = lid; i < uint(N * PARTS); i += threads) {
    const uint n = i / PARTS;
    vf sum = splat(0.0f);
    for (uint c = i % PARTS * VF; c < uint(C); c += PARTS * VF)
      sum = metal::fma(load_vf(mean + c), load_vf(weights + n * C + c), sum);
    store_vf(sums + i * VF, sum);
  }
  SCRATCH_BARRIER;
  for (uint n = lid; n < uint(N); n += threads) {
    float sum = weights[N * C + n];
    for (int s = 0; s < PARTS * VF; ++s) sum += sums[n * (PARTS * VF) + s];
    y[n] = sum;
  }
}
