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
