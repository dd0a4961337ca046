// The MSL words of the shared kernel subset, for the system's C++ compiler. A threadgroup is one thread
// here: a threadgroup-strided loop becomes a plain loop, which the compiler vectorises, and a barrier
// nothing. Cores take different groups.
#include <cstdint>
#include <cstring>

typedef uint32_t uint;
typedef uint64_t ulong;
typedef _Float16 half;

struct uint3 {
  uint x, y, z;
};

// bfloat16 storage, for compilers that lack the type: the upper half of a float, rounded to nearest even.
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  explicit bfloat(float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    const bool nan = (word & 0x7fffffffu) > 0x7f800000u;
    bits = nan ? 0x7fc0u : uint16_t((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
  }
  operator float() const {
    const uint32_t word = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
  }
};

#define FUNCTION static inline __attribute__((always_inline))
#define THREADGROUP_ARRAY(type, name, size) alignas(64) type name[size]
#define threadgroup_barrier(flags)

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
  return __builtin_fmaf(a, b, c);
}
}  // namespace metal

// A vector of VF channels, as wide as this processor's registers.
#ifdef __AVX512F__
#define VF 16
#else
#define VF 8
#endif
typedef float vf __attribute__((vector_size(4 * VF)));
typedef half half_vf __attribute__((vector_size(2 * VF)));

FUNCTION vf splat(float value) {
  return value - vf{};
}
FUNCTION vf load_vf(const float* from) {
  vf values;
  std::memcpy(&values, from, sizeof values);
  return values;
}
FUNCTION vf load_vf(const half* from) {
  half_vf values;
  std::memcpy(&values, from, sizeof values);
  return __builtin_convertvector(values, vf);
}
FUNCTION void store_vf(float* to, vf values) {
  std::memcpy(to, &values, sizeof values);
}
FUNCTION void store_vf(half* to, vf values) {
  const half_vf halves = __builtin_convertvector(values, half_vf);
  std::memcpy(to, &halves, sizeof halves);
}
FUNCTION void copy_vf(float* to, const float* from) {
  store_vf(to, load_vf(from));
}
FUNCTION void finish_copies() {}
// The processor sees by itself what is loaded next.
FUNCTION void prefetch(const void*) {}
namespace metal {
FUNCTION vf fma(vf a, vf b, vf c) {
  return a * b + c;
}
FUNCTION float dot(vf a, vf b) {
  const vf products = a * b;
  float sum = 0.0f;
  for (int i = 0; i < VF; ++i) sum += products[i];
  return sum;
}
}  // namespace metal

// Before a loop with a constant number of turns.
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 64")
#endif
