// What a kernel compiled for emulation and the emulator (emulator.cpp) know of each other.
#ifndef EMULATOR_H
#define EMULATOR_H

typedef unsigned int emulated_uint3 __attribute__((ext_vector_type(3)));

// Section 5.2.3.6, table 5.8: where a thread is. In a partial last group threads_per_threadgroup is smaller
// than dispatch_threads_per_threadgroup.
struct EmulatedThread {
  emulated_uint3 thread_position_in_grid;
  emulated_uint3 thread_position_in_threadgroup;
  emulated_uint3 threadgroup_position_in_grid;
  emulated_uint3 threads_per_threadgroup;
  emulated_uint3 threads_per_grid;
  emulated_uint3 threadgroups_per_grid;
  emulated_uint3 dispatch_threads_per_threadgroup;
  unsigned int thread_index_in_threadgroup;
};

extern "C" {
// The kernel, as one thread runs it; buffers by their [[buffer(n)]].
void emulated_kernel(void* const* buffers, const EmulatedThread& at);

// All threads of the group meet here. `flags` are mem_flags, `line` is the barrier's line in the text.
void emulated_barrier(unsigned int flags, int line);

// The group's memory for the threadgroup variable number `variable`, exactly `bytes` long.
void* emulated_threadgroup_memory(int variable, unsigned long bytes);
}

#endif
