// The MSL words of the shared kernel subset, for NVRTC. The address spaces (device, constant, threadgroup)
// are taken out of the text before it gets here: as macros they would break CUDA's own __device__.
typedef unsigned int uint;
typedef unsigned long long ulong;

#define FUNCTION __device__ __forceinline__

#define thread_position_in_threadgroup threadIdx
#define threadgroup_position_in_grid blockIdx
#define threads_per_threadgroup blockDim
#define threadgroup_barrier(flags) __syncthreads()

// Static shared memory ends at 48 KB. A launch that asks for more gets all of it as one dynamic array,
// so such a kernel declares a single scratch array.
#ifdef DYNAMIC_THREADGROUP_MEMORY
#define THREADGROUP_ARRAY(type, name, size)      \
  extern __shared__ float4 threadgroup_memory[]; \
  type* const name = reinterpret_cast<type*>(threadgroup_memory)
#else
#define THREADGROUP_ARRAY(type, name, size) __shared__ __align__(16) type name[size]
#endif

namespace metal {
template <typename N>
FUNCTION N max(N a, N b) {
  return a > b ? a : b;
}
template <typename N>
FUNCTION N min(N a, N b) {
  return a < b ? a : b;
}
FUNCTION float fma(float a, float b, float c) {
  return fmaf(a, b, c);
}
}  // namespace metal
