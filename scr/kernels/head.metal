// Global average pooling and the linear layer in one launch; a group takes one image.
//
//   x  (batch, PIXELS, C) T      weights  float: (N, C), (N) bias      y  (batch, N) T
//
// Constants: PIXELS C N; tiling: SLICES PARTS, the threads that share a channel vector's pixels and an
// output's channels.
// Work: PIXELS·C + 2·C·N FLOP per image. Bytes: sizeof(T)·(PIXELS·C + N) per image, 4·(C·N + N) once per
// batch. Scratch: 4·(SLICES·C + N·PARTS) bytes. Bound by latency at batch 1 and by memory later: on GPUs 7 slices
// of a 7×7 image and 24 parts keep 336 and 240 threads busy with few images, and small groups (4 slices, 12 parts)
// keep more images under way with many; a CPU thread does it alone.
SCRATCH_ARRAY(sums, SLICES * C + N * PARTS);
const uint image = threadgroup_position_in_grid.x;
const uint lid = thread_position_in_threadgroup.x, threads = threads_per_threadgroup.x;
pool<PIXELS, C, SLICES>(x + ulong(image) * (PIXELS * C), sums, lid, threads);
SCRATCH_BARRIER;
linear<PIXELS, C, N, SLICES, PARTS>(sums, weights, sums + SLICES * C, y + image * N, lid, threads);
