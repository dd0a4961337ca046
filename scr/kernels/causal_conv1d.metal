// Depthwise causal convolution over time + bias + residual in one launch: the layer that language models
// put between attention and feed-forward. Output t sees inputs t-K+1 … t; what lies before 0 is zero.
//
//   x       (B, L, C) T            y (B, L, C) T
//   params  (K + 1, C) float: K taps, the oldest first, then the bias
//
// A group computes ROWS consecutive times of COLUMNS channels of one sequence; a value lives in a register,
// in fp32, until its single store.
//
// Work per output value: K multiply-adds, bias and residual 2: 2K + 2 FLOP.
// Bytes, each input and output once: 2·sizeof(T)·B·L·C + 4·(K + 1)·C; at K = 4 at most 1.25 FLOP per byte in
// fp32, so bound by memory; the K reads of an input lie within one group and hit the cache.
// Scratch: none. Indices are 32 bits wide: x has fewer than 2³¹ values (the caller splits the batch).
const uint L = x_shape[1], C = x_shape[2];
const uint blocks = (L + ROWS - 1) / ROWS;
const uint sequence = threadgroup_position_in_grid.x / blocks;
const uint first = threadgroup_position_in_grid.x % blocks * ROWS;
const uint last = metal::min(first + ROWS, L);
const uint left = threadgroup_position_in_grid.y * COLUMNS;
const uint right = metal::min(left + COLUMNS, C);

for (uint t = first + thread_position_in_threadgroup.y; t < last; t += threads_per_threadgroup.y) {
  const uint at = (sequence * L + t) * C;
  for (uint c = left + thread_position_in_threadgroup.x; c < right; c += threads_per_threadgroup.x) {
    float sum = params[K * C + c];
    if (RESIDUAL) sum += float(x[at + c]);
    for (uint k = 0; k < K; ++k) {
      const uint back = K - 1 - k;
      const float value = t >= back ? float(x[at - back * C + c]) : 0.0f;
      sum = metal::fma(value, params[k * C + c], sum);
    }
    y[at + c] = T(sum);
  }
}
