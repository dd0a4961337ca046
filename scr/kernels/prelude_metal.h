// Words of the shared kernel subset that are not MSL already, for Apple's compiler.
#include <metal_stdlib>
using namespace metal;

// A function of a header file that kernels call.
#define FUNCTION inline

// Scratch memory of one threadgroup: declared at kernel scope, at most 32 KB in all.
#define THREADGROUP_ARRAY(type, name, size) threadgroup type name[size]
