// y = x² element by element: the smallest complete kernel, the template for a new one.
//
//   x  (N,) T, fewer than 2³¹ values               y  the same
//
// A group takes COUNT consecutive values. Work: 1 FLOP per value; bytes: 2·sizeof(T) per value; no scratch.
const uint first = threadgroup_position_in_grid.x * COUNT;
const uint last = metal::min(first + COUNT, uint(x_shape[0]));
for (uint i = first + thread_position_in_threadgroup.x; i < last; i += threads_per_threadgroup.x) {
  const float value = float(x[i]);
  y[i] = T(value * value);
}
