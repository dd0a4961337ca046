// Words of the shared kernel subset that are not MSL already, for Apple's compiler.
#include <metal_stdlib>
using namespace metal;

// A function of a header file that kernels call.
#define FUNCTION inline

// Scratch memory of one threadgroup: declared at kernel scope, at most 32 KB in all.
#define THREADGROUP_ARRAY(type, name, size) alignas(16) threadgroup type name[size]

// A vector of VF channels.
#define VF 4
typedef float4 vf;

FUNCTION vf splat(float value) {
  return vf(value);
}
FUNCTION vf load_vf(const device float* from) {
  return *reinterpret_cast<const device float4*>(from);
}
FUNCTION vf load_vf(const threadgroup float* from) {
  return *reinterpret_cast<const threadgroup float4*>(from);
}
FUNCTION vf load_vf(const device half* from) {
  return float4(*reinterpret_cast<const device half4*>(from));
}
FUNCTION void store_vf(device float* to, vf values) {
  *reinterpret_cast<device float4*>(to) = values;
}
FUNCTION void store_vf(threadgroup float* to, vf values) {
  *reinterpret_cast<threadgroup float4*>(to) = values;
}
FUNCTION void store_vf(device half* to, vf values) {
  *reinterpret_cast<device half4*>(to) = half4(values);
}
FUNCTION void copy_vf(threadgroup float* to, const device float* from) {
  store_vf(to, load_vf(from));
}
FUNCTION void copy_vf(device float* to, const device float* from) {
  store_vf(to, load_vf(from));
}
FUNCTION void finish_copies() {}

// Asks for memory that is loaded later, where that can be told.
FUNCTION void prefetch(const device void*) {}

// Before a loop with a constant number of turns.
#define UNROLL _Pragma("clang loop unroll(full)")
