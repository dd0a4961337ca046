// First phase of a block: depthwise 3×3 + bias + ReLU of a strip of output rows into scratch, as the rows
// [pixel][K] of the matrix product that follows. Where the block's skip is a convolution, the value under
// the centre tap, which is the skip's input, is copied beside it: K = 2C instead of C.
//
// Work per output value: 9 multiply-adds and a max. A thread takes VF channels of RUN neighbouring pixels,
// so that it loads the taps once and each input of the run once per row. Edges are asked for only where a run
// can touch them: without a branch between its columns, the compiler loads ahead.

// Activations (H, W, C) in memory.
template <typename Pointer, int W, int C>
struct Stored {
  Pointer values;
};

template <typename Pointer, int W, int C>
FUNCTION Stored<Pointer, W, C> at_channels(Stored<Pointer, W, C> source, uint c) {
  source.values += c;
  return source;
}

template <typename Pointer, int W, int C>
FUNCTION vf value_at(Stored<Pointer, W, C> source, int y, int x) {
  return load_vf(source.values + (y * W + x) * C);
}

// The stem's activations (H, W, C), never stored: 3×3 convolution + bias + ReLU of the image, computed where
// they are read. The image lies in scratch with a border of zeros; its first row there is row `top` - 1.
template <typename Pointer, typename Weights, int W, int C>
struct Stem {
  Pointer image;
  Weights weights;  // (9, C) taps, (C) bias
  int top;
  vf taps[9], bias;
};

template <typename Pointer, typename Weights, int W, int C>
FUNCTION Stem<Pointer, Weights, W, C> at_channels(Stem<Pointer, Weights, W, C> source, uint c) {
  UNROLL for (int t = 0; t < 9; ++t) source.taps[t] = load_vf(source.weights + t * C + c);
  source.bias = load_vf(source.weights + 9 * C + c);
  return source;
}

template <typename Pointer, typename Weights, int W, int C>
FUNCTION vf value_at(Stem<Pointer, Weights, W, C> source, int y, int x) {
  vf sum = source.bias;
  UNROLL for (int t = 0; t < 9; ++t) {
    const float value = source.image[(y - source.top + t / 3) * (W + 2) + x + t % 3];
    sum = metal::fma(splat(value), source.taps[t], sum);
  }
  return metal::max(sum, splat(0.0f));
}

// Copy `ROWS` rows of an (H, W) image, from row `top` on, into scratch with a border of one zero. A thread loads
// several pixels before it stores them, so that it waits for memory once.
template <int H, int W, int ROWS, typename Image, typename Scratch>
FUNCTION void pad_image(Image image, Scratch padded, int top, uint lid, uint threads) {
  constexpr int AT_ONCE = 4;
  constexpr uint COUNT = (ROWS + 2) * (W + 2);
  for (uint start = lid; start < COUNT; start += AT_ONCE * threads) {
    float values[AT_ONCE];
    UNROLL for (int n = 0; n < AT_ONCE; ++n) {
      const uint i = start + n * threads;
      const int y = top - 1 + int(i / (W + 2)), x = int(i % (W + 2)) - 1;
      values[n] = i < COUNT && y >= 0 && y < H && x >= 0 && x < W ? float(image[y * W + x]) : 0.0f;
    }
    UNROLL for (int n = 0; n < AT_ONCE; ++n)
      if (start + n * threads < COUNT) padded[start + n * threads] = values[n];
  }
}

// weights: (9, C) taps, (C) bias. rows: output rows `top_row` on, at row stride LD; `COPY` the centre to + C.
template <int H, int W, int C, int STRIDE, int ROWS, int RUN, int LD, bool COPY, typename Source,
          typename Weights, typename Scratch>
FUNCTION void depthwise(Source source, Weights weights, Scratch rows, int top_row, uint lid, uint threads) {
  constexpr int HEIGHT = (H - 1) / STRIDE + 1, WIDTH = (W - 1) / STRIDE + 1;
  constexpr int RUNS = WIDTH / RUN, VECTORS = C / VF;
  constexpr int LAST = W - (WIDTH - RUN) * STRIDE;  // up to this one, a run's input columns are inside the image
  for (uint i = lid; i < uint(ROWS * RUNS * VECTORS); i += threads) {
    const uint c = i % VECTORS * VF;
    const int column = i / VECTORS % RUNS * RUN, row = i / (VECTORS * RUNS);
    const Scratch pixel = rows + (row * WIDTH + column) * LD + c;
    const Source here = at_channels(source, c);
    vf taps[9], sums[RUN];
    UNROLL for (int t = 0; t < 9; ++t) taps[t] = load_vf(weights + t * C + c);
    UNROLL for (int r = 0; r < RUN; ++r) sums[r] = load_vf(weights + 9 * C + c);
    UNROLL for (int dy = 0; dy < 3; ++dy) {
      const int y = (top_row + row) * STRIDE + dy - 1;
      if ((dy == 0 && y < 0) || ((dy == 2 || HEIGHT % ROWS != 0) && y >= H)) continue;
      UNROLL for (int j = 0; j < STRIDE * (RUN - 1) + 3; ++j) {  // the input columns that the run touches
        const int x = column * STRIDE + j - 1;
        if ((j == 0 && x < 0) || (j > LAST && x >= W)) continue;
        const vf value = value_at(here, y, x);
        UNROLL for (int dx = 0; dx < 3; ++dx) {
          const int r = (j - dx) / STRIDE;  // the output that sees this column under tap dx, if any does
          if (j < dx || (j - dx) % STRIDE != 0 || r >= RUN) continue;
          sums[r] = metal::fma(value, taps[3 * dy + dx], sums[r]);
          if (COPY && dy == 1 && dx == 1) store_vf(pixel + r * LD + C, value);
        }
      }
    }
    UNROLL for (int r = 0; r < RUN; ++r) store_vf(pixel + r * LD, metal::max(sums[r], splat(0.0f)));
  }
}
