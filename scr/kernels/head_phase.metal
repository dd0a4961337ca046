// Last phases of the network: global average pooling and the linear layer, (PIXELS, C) -> (N).

// sums [SLICES][C] of x (PIXELS, C): as many threads share the pixels of a channel vector.
template <int PIXELS, int C, int SLICES, typename Source, typename Scratch>
FUNCTION void pool(Source x, Scratch sums, uint lid, uint threads) {
  constexpr uint VECTORS = C / VF;
  for (uint i = lid; i < SLICES * VECTORS; i += threads) {
    const uint c = i % VECTORS * VF, slice = i / VECTORS;
    vf sum = splat(0.0f);
    for (uint p = slice; p < uint(PIXELS); p += SLICES) sum = sum + load_vf(x + p * C + c);
    store_vf(sums + slice * C + c, sum);
  }
}

// y = W · (the sum of `sums` over slices) / PIXELS + b, with weights (N, C), then (N) bias. PARTS threads share
// the channels of an output; shares [N][PARTS] is scratch. Each adds up the slices of its channels anew, which
// costs less than a barrier.
template <int PIXELS, int C, int N, int SLICES, int PARTS, typename Scratch, typename Weights, typename Output>
FUNCTION void linear(Scratch sums, Weights weights, Scratch shares, Output y, uint lid, uint threads) {
  for (uint i = lid; i < uint(N * PARTS); i += threads) {
    const uint n = i / PARTS;
    vf share = splat(0.0f);
    for (uint c = i % PARTS * VF; c < uint(C); c += PARTS * VF) {
      vf sum = splat(0.0f);
      UNROLL for (int s = 0; s < SLICES; ++s) sum = sum + load_vf(sums + s * C + c);
      share = metal::fma(sum, load_vf(weights + n * C + c), share);
    }
    shares[i] = metal::dot(share, splat(1.0f));
  }
  SCRATCH_BARRIER;
  for (uint n = lid; n < uint(N); n += threads) {
    float sum = 0.0f;
    UNROLL for (int s = 0; s < PARTS; ++s) sum += shares[n * PARTS + s];
    y[n] = sum / PIXELS + weights[N * C + n];
  }
}
