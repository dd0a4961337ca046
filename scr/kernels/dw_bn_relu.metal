// Depthwise 3×3 convolution, padding 1, stride 1 or 2, + BatchNorm + ReLU in one launch.
//
//   x       (N, H, W, C) T            y (N, ⌈H/S⌉, ⌈W/S⌉, C) T
//   params  (11, C) float: nine taps in row order, then scale and shift
//
// A group computes one row of one image's output; thread (i, j) takes channels i, i + n_x, … of columns
// j, j + n_y, …. A value lives in registers, in fp32, until its single store.
//
// Work per output value: 9 multiply-adds, scale and shift 2, ReLU 1: 21 FLOP (24 in the article, which
// normalises per pixel from mean, variance, gamma and beta; here they are folded into scale and shift once,
// in fp32, when the weights are loaded).
// Bytes, each input and output once: sizeof(T)·C·(H·W + ⌈H/S⌉·⌈W/S⌉)·N + 44·C. Bound by memory everywhere.
// Scratch: none. Indices are 32 bits wide: x and y have fewer than 2³¹ values each (the caller splits).
const uint H = x_shape[1], W = x_shape[2], C = x_shape[3];
const uint H_out = (H + S - 1) / S, W_out = (W + S - 1) / S;
const uint image = threadgroup_position_in_grid.x / H_out;
const uint row = threadgroup_position_in_grid.x % H_out;

for (uint column = thread_position_in_threadgroup.y; column < W_out; column += threads_per_threadgroup.y) {
  // Where the nine taps lie, and which of them fall into the padding: the same for all channels.
  uint at[9];
  bool inside[9];
  for (uint k = 0; k < 9; ++k) {
    const uint h = row * S + k / 3, w = column * S + k % 3;  // both one too large: padding 1
    inside[k] = h >= 1 && h <= H && w >= 1 && w <= W;
    at[k] = inside[k] ? ((image * H + h - 1) * W + w - 1) * C : 0;
  }
  const uint out = ((image * H_out + row) * W_out + column) * C;
  for (uint c = thread_position_in_threadgroup.x; c < C; c += threads_per_threadgroup.x) {
    float sum = 0.0f;
    for (uint k = 0; k < 9; ++k) {
      const float value = inside[k] ? float(x[at[k] + c]) : 0.0f;
      sum = metal::fma(value, params[k * C + c], sum);
    }
    const float normal = metal::fma(sum, params[9 * C + c], params[10 * C + c]);
    y[out + c] = T(RELU ? metal::max(normal, 0.0f) : normal);
  }
}
