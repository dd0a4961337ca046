// Where a kernel's scratch lies: in the output `memory`, a part per group, for scratch that is larger than
// threadgroup memory.
typedef device float* ScratchPointer;
#define SCRATCH_ARRAY(name, size) \
  device float* const name = memory + ulong(threadgroup_position_in_grid.x) * (size)
#define SCRATCH_BARRIER threadgroup_barrier(mem_flags::mem_device)
