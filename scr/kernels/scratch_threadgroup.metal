// Where a kernel's scratch lies: in threadgroup memory.
typedef threadgroup float* ScratchPointer;
#define SCRATCH_ARRAY(name, size) THREADGROUP_ARRAY(float, name, size)
#define SCRATCH_BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)
