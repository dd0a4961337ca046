// The MSL words of the shared kernel subset, for NVRTC. The address spaces (device, constant, threadgroup)
// are taken out of the text before it gets here: as macros they would break CUDA's own __device__.
typedef unsigned int uint;
typedef unsigned long long ulong;

#define FUNCTION __device__ __forceinline__

#define thread_position_in_threadgroup threadIdx
#define threadgroup_position_in_grid blockIdx
#define threads_per_threadgroup blockDim
#define threadgroups_per_grid gridDim
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

// A vector of VF channels.
#define VF 4
typedef float4 vf;

FUNCTION vf splat(float value) {
  return make_float4(value, value, value, value);
}
FUNCTION vf operator+(vf a, vf b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
FUNCTION vf load_vf(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}
FUNCTION vf load_vf(const __half* from) {
  const uint2 bits = *reinterpret_cast<const uint2*>(from);
  const float2 low = __half22float2(reinterpret_cast<const __half2&>(bits.x));
  const float2 high = __half22float2(reinterpret_cast<const __half2&>(bits.y));
  return make_float4(low.x, low.y, high.x, high.y);
}
// The compiler splits a plain float4 store wherever it cannot prove what the type promises, that the address
// is a multiple of 16. It does know the address space, so that the test costs nothing.
FUNCTION void store_vf(float* to, vf values) {
  if (__isGlobal(to)) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(values.x), "f"(values.y),
                 "f"(values.z), "f"(values.w)
                 : "memory");
  } else {
    *reinterpret_cast<float4*>(to) = values;
  }
}
// Halves are never kept in scratch.
FUNCTION void store_vf(__half* to, vf values) {
  const __half2 low = __floats2half2_rn(values.x, values.y), high = __floats2half2_rn(values.z, values.w);
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(reinterpret_cast<const uint&>(low)),
               "r"(reinterpret_cast<const uint&>(high))
               : "memory");
}
// From memory to scratch, done after finish_copies; where the GPU can (Ampere and later), past the registers,
// while the thread goes on.
FUNCTION void copy_vf(float* to, const float* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint(__cvta_generic_to_shared(to))), "l"(from)
               : "memory");
#else
  store_vf(to, load_vf(from));
#endif
}
FUNCTION void finish_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
// Ask for the line of memory at `from`, which is loaded later.
FUNCTION void prefetch(const void* from) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(from));
}
namespace metal {
FUNCTION vf fma(vf a, vf b, vf c) {
  return make_float4(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y), fmaf(a.z, b.z, c.z), fmaf(a.w, b.w, c.w));
}
FUNCTION vf max(vf a, vf b) {
  return make_float4(fmaxf(a.x, b.x), fmaxf(a.y, b.y), fmaxf(a.z, b.z), fmaxf(a.w, b.w));
}
FUNCTION float dot(vf a, vf b) {
  return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w)));
}
}  // namespace metal

// Wait until all groups of the grid are here, and see what they wrote. There must be a power of two of them, so
// that the count of arrivals, which starts at zero and is never reset, wraps at the end of a turn.
FUNCTION void grid_barrier(const uint* arrivals, uint groups) {
  __syncthreads();
  if (threadIdx.x == 0) {
    uint* const count = const_cast<uint*>(arrivals);
    __threadfence();
    const uint turn = atomicAdd(count, 1u) / groups;
    while (*const_cast<volatile uint*>(count) / groups == turn) {
    }
    __threadfence();
  }
  __syncthreads();
}

// Before a loop with a constant number of turns.
#define UNROLL _Pragma("unroll")
