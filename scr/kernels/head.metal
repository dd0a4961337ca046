// Global average pooling and the linear layer in one launch; a group takes one image.
//
//   x  (batch, PIXELS, C) T      weights  float: (N, C), (N) bias      y  (batch, N) T
//
// Constants: PIXELS C N; tiling: SLICES PARTS, the threads that share a channel vector's pixels and an
// output's channels.
// Work: PIXELS·C + 2·C·N FLOP per image. Bytes: sizeof(T)·(PIXELS·C + N) per image, 4·(C·N + N) once per
// batch. Scratch: 4·(C + max(SLICES·C, N·PARTS·VF)) bytes. Bound by latency at batch 1 and by memory later: on
// GPUs 7 slices of a 7×7 image and 12 parts keep 336 and 120 threads busy; a CPU thread does it alone.
constexpr int SHARES = SLICES * C > N * PARTS * VF ? SLICES * C : N * PARTS * VF;
SCRATCH_ARRAY(scratch, C + SHARES);
const uint image = threadgroup_position_in_grid.x;
head<PIXELS, C, N, SLICES, PARTS>(x + ulong(image) * (PIXELS * C), weights, scratch, y + image * N,
                                  thread_position_in_threadgroup.x, threads_per_threadgroup.x);
