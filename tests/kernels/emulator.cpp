// Runs a kernel compiled for emulation: every thread of the grid, a group at a time, as Metal would.
//
//   emulator LIBRARY JOB
//
// LIBRARY holds `emulated_kernel` (see shim/emulator.h). JOB is a text file:
//
//   grid X Y Z                    threads, not groups; the last groups may be partial (dispatchThreads)
//   threadgroup X Y Z
//   groups FIRST LAST             optional: run only these groups, by linear index
//   input BYTES FILE              one line per buffer, in the order of [[buffer(n)]]
//   output BYTES FILE CONTENTS    CONTENTS: a file of what it holds before, or - for UNWRITTEN;
//                                 scratch instead of output: what it holds afterwards means nothing
//   run ORDER SEED SYNCHRONISED   forward, reverse or shuffled; the mem_flags whose barriers order memory
//
// Each `run` line is one dispatch, whose outputs go to FILE.ORDER. An input's FILE may hold only its last bytes;
// the rest is zero. Buffers over 1 GB are mapped, not allocated, and of such an output only the last MB is saved.
//
// Threads of a group are fibers that meet at
// barriers. Buffers have exactly their size, on the heap, so that the sanitizer this is built with sees a step
// over the edge; memory that Metal leaves undefined is NaN, and for MemorySanitizer uninitialised. To
// ThreadSanitizer each thread of the grid is a thread of its own, ordered by nothing but barriers.
// Ends with a line `PASS`, or `FAIL CHECK what is wrong`, or the report of the sanitizer that stopped it.
#include "shim/emulator.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#ifdef USE_MEMORY_SANITIZER
#include <sanitizer/msan_interface.h>
#endif
#ifdef USE_THREAD_SANITIZER
#include <sanitizer/tsan_interface.h>
extern "C" int __tsan_get_report_mop(void* report, unsigned long index, int* tid, void** address, int* size,
                                     int* write, int* atomic, void** trace, unsigned long trace_size);
extern "C" void __sanitizer_symbolize_pc(void* pc, const char* format, char* text, unsigned long size);
#endif
#ifdef USE_ADDRESS_SANITIZER
#include <sanitizer/common_interface_defs.h>
#endif

namespace {

const unsigned long STACK_BYTES = 64 * 1024, PAGE = 4096;
const unsigned long LARGE = 1ul << 30, LAST = 1ul << 20;
// Repeated, both are NaNs in any floating-point type, which arithmetic hands on as they are.
const unsigned char UNWRITTEN[2] = {0xFF, 0x7F}, UNINITIALISED[2] = {0xFF, 0xFF};
const unsigned long THREADGROUP_BYTES = 32 * 1024;  // the limit of every Apple GPU

struct Buffer {
  bool output, scratch;
  unsigned long bytes;

  bool mapped() const { return bytes > LARGE; }
  char file[4096], contents[4096];
  void* memory;
};

struct Run {
  char order[16];
  unsigned seed, synchronised;
};

enum State { READY, WAITING, DONE };

struct Fiber {
  ucontext_t context;
  EmulatedThread at;
  State state;
  int line;  // of the barrier it waits at
  char* stack;
  void* tsan;
};

struct ThreadgroupVariable {
  int number;
  void* memory;
  unsigned long bytes;
};

struct Range {
  const char *begin, *end;
};

emulated_uint3 grid, threadgroup;
unsigned long first_group = 0, last_group = ~0ul;
std::vector<Buffer> buffers;
std::vector<void*> arguments;
decltype(&emulated_kernel) kernel;

Run run;
std::mt19937 shuffler;
std::vector<Fiber> fibers;  // of the group that runs
// Fibers add to these; they must not grow, which would be accesses in view of ThreadSanitizer.
const unsigned long MAX_VARIABLES = 32;
std::vector<ThreadgroupVariable> variables;  // of the group that runs
std::vector<Range> threadgroup_memory;       // of all groups of this dispatch
Fiber* current;
char* stacks;
ucontext_t scheduler;
unsigned meetings;  // how often the group has met
#ifdef USE_THREAD_SANITIZER
// What its ordering hangs on. Two barriers in turn: while some threads have yet to leave one, others may have
// reached the next.
char barriers[2], end_of_dispatch;
// ThreadSanitizer keeps apart 255 threads at a time and goes blind beyond. In a larger group, threads that are a
// multiple of LANES apart are one thread to it; no loop strides by that prime.
const unsigned LANES = 199;
void *scheduler_tsan, *lanes[LANES];
#endif
#ifdef USE_ADDRESS_SANITIZER
const void* scheduler_stack;
unsigned long scheduler_stack_bytes;
#endif

[[noreturn]] void fail(const char* check, const char* text) {
  printf("FAIL %s %s\n", check, text);
  fflush(stdout);
  _Exit(3);
}

// A buffer's memory. What is mapped ends before a page that cannot be touched.
void* take(const Buffer& buffer) {
  if (!buffer.mapped()) return malloc(buffer.bytes);
  const unsigned long whole = (buffer.bytes + PAGE - 1) / PAGE * PAGE;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  char* memory = static_cast<char*>(mmap(nullptr, whole + PAGE, PROT_READ | PROT_WRITE, flags, -1, 0));
  if (memory == MAP_FAILED || mprotect(memory + whole, PAGE, PROT_NONE)) fail("job", "no address space");
  return memory + whole - buffer.bytes;
}

void read_file(const char* name, const Buffer& buffer) {
  FILE* file = fopen(name, "rb");
  if (!file || fseek(file, 0, SEEK_END)) fail("job", name);
  const unsigned long bytes = ftell(file);
  rewind(file);
  char* memory = static_cast<char*>(buffer.memory);
  if (bytes > buffer.bytes || fread(memory + buffer.bytes - bytes, 1, bytes, file) != bytes) fail("job", name);
  if (bytes < buffer.bytes && !buffer.mapped()) memset(memory, 0, buffer.bytes - bytes);
  fclose(file);
}

// ---- Fibers ----

void enter(Fiber& fiber) {
  current = &fiber;
#ifdef USE_THREAD_SANITIZER
  __tsan_switch_to_fiber(fiber.tsan, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef USE_ADDRESS_SANITIZER
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, fiber.stack, STACK_BYTES);
#endif
  swapcontext(&scheduler, &fiber.context);
#ifdef USE_ADDRESS_SANITIZER
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

void leave(Fiber& fiber) {
#ifdef USE_THREAD_SANITIZER
  __tsan_switch_to_fiber(scheduler_tsan, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef USE_ADDRESS_SANITIZER
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(fiber.state == DONE ? nullptr : &fake, scheduler_stack, scheduler_stack_bytes);
#endif
  swapcontext(&fiber.context, &scheduler);
#ifdef USE_ADDRESS_SANITIZER
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

void run_thread() {
#ifdef USE_ADDRESS_SANITIZER
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
  Fiber& fiber = *current;
  kernel(arguments.data(), fiber.at);
#ifdef USE_THREAD_SANITIZER
  __tsan_release(&end_of_dispatch);
#endif
  fiber.state = DONE;
  leave(fiber);
}

// Stacks for the threads of a group.
void map_stacks() {
#ifndef USE_THREAD_SANITIZER
  if (stacks) return;
#endif
  // ThreadSanitizer gets fresh ones: the last group's threads on them must not seem to race with this one's.
  const unsigned long bytes = STACK_BYTES * threadgroup.x * threadgroup.y * threadgroup.z;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (stacks ? MAP_FIXED : 0);
  void* mapped = mmap(stacks, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (mapped == MAP_FAILED) fail("job", "no memory for the threads of a group");
  stacks = static_cast<char*>(mapped);
}

void prepare(Fiber& fiber, const EmulatedThread& at) {
  fiber.stack = stacks + STACK_BYTES * at.thread_index_in_threadgroup;
  fiber.at = at;
  fiber.state = READY;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = STACK_BYTES;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, run_thread, 0);
}

// ---- Groups ----

void describe(char* text, unsigned long size, const Fiber& fiber) {
  const emulated_uint3 at = fiber.at.thread_position_in_threadgroup;
  if (fiber.state == DONE)
    snprintf(text, size, "thread (%u, %u, %u) has returned", at.x, at.y, at.z);
  else
    snprintf(text, size, "thread (%u, %u, %u) waits at line %d", at.x, at.y, at.z, fiber.line);
}

// Every thread has returned or waits: they must have done the same, at the same barrier. True if all returned.
bool meet() {
  for (const Fiber& fiber : fibers) {
    if (fiber.state == fibers[0].state && (fiber.state == DONE || fiber.line == fibers[0].line)) continue;
    char one[128], other[128], text[320];
    describe(one, sizeof one, fibers[0]);
    describe(other, sizeof other, fiber);
    snprintf(text, sizeof text, "a barrier that not all threads of a group reach: %s, %s", one, other);
    fail("barrier", text);
  }
  ++meetings;
  return fibers[0].state == DONE;
}

void run_group(const EmulatedThread& group) {
  const emulated_uint3 size = group.threads_per_threadgroup;
  const unsigned count = size.x * size.y * size.z;
  fibers.resize(count);
  variables.clear();
  map_stacks();
  std::vector<unsigned> order(count);
  for (unsigned i = 0; i < count; ++i) {
    EmulatedThread at = group;
    at.thread_index_in_threadgroup = i;
    at.thread_position_in_threadgroup = emulated_uint3{i % size.x, i / size.x % size.y, i / (size.x * size.y)};
    at.thread_position_in_grid = group.threadgroup_position_in_grid * threadgroup + at.thread_position_in_threadgroup;
    prepare(fibers[i], at);
    order[i] = strcmp(run.order, "reverse") ? i : count - 1 - i;
  }
#ifdef USE_THREAD_SANITIZER
  // After all that the scheduler does to the group's memory, which a new fiber sees as done.
  for (unsigned i = 0; i < std::min(count, LANES); ++i) lanes[i] = __tsan_create_fiber(0);
  for (unsigned i = 0; i < count; ++i) fibers[i].tsan = lanes[i % LANES];
#endif
  do {
    if (!strcmp(run.order, "shuffled")) std::shuffle(order.begin(), order.end(), shuffler);
    for (unsigned i : order)
      if (fibers[i].state != DONE) enter(fibers[i]);
  } while (!meet());
  for (const Fiber& fiber : fibers)
    if (fiber.stack[0] || fiber.stack[1]) fail("job", "a thread needs more stack than the emulator gives");
#ifdef USE_THREAD_SANITIZER
  for (unsigned i = 0; i < std::min(count, LANES); ++i) __tsan_destroy_fiber(lanes[i]);
#endif
}

void dispatch() {
  const emulated_uint3 groups = (grid + threadgroup - 1) / threadgroup;
  const unsigned long count = 1ul * groups.x * groups.y * groups.z;
  std::vector<unsigned long> order;
  for (unsigned long i = first_group; i < count && i <= last_group; ++i) order.push_back(i);
  variables.reserve(MAX_VARIABLES);
  threadgroup_memory.reserve(MAX_VARIABLES * order.size());
  if (!strcmp(run.order, "reverse")) std::reverse(order.begin(), order.end());
  if (!strcmp(run.order, "shuffled")) std::shuffle(order.begin(), order.end(), shuffler);
  for (unsigned long i : order) {
    EmulatedThread group = {};
    group.threads_per_grid = grid;
    group.threadgroups_per_grid = groups;
    group.dispatch_threads_per_threadgroup = threadgroup;
    group.threadgroup_position_in_grid =
        emulated_uint3{unsigned(i % groups.x), unsigned(i / groups.x % groups.y), unsigned(i / groups.x / groups.y)};
    const emulated_uint3 rest = grid - group.threadgroup_position_in_grid * threadgroup;
    group.threads_per_threadgroup = __builtin_elementwise_min(threadgroup, rest);
    run_group(group);
  }
}

// ---- Jobs ----

void read_job(const char* name, std::vector<Run>& runs) {
  FILE* file = fopen(name, "r");
  if (!file) fail("job", name);
  char word[16];
  while (fscanf(file, "%15s", word) == 1) {
    int fields = 0, wanted = 3;
    unsigned x, y, z;
    Buffer buffer = {};
    Run next;
    if (!strcmp(word, "grid") || !strcmp(word, "threadgroup")) {
      fields = fscanf(file, "%u %u %u", &x, &y, &z);
      (word[0] == 'g' ? grid : threadgroup) = emulated_uint3{x, y, z};
    } else if (!strcmp(word, "groups")) {
      fields = fscanf(file, "%lu %lu", &first_group, &last_group), wanted = 2;
    } else if (!strcmp(word, "input")) {
      fields = fscanf(file, "%lu %4095s", &buffer.bytes, buffer.file), wanted = 2;
      buffers.push_back(buffer);
    } else if (!strcmp(word, "output") || !strcmp(word, "scratch")) {
      buffer.scratch = word[0] == 's';
      fields = fscanf(file, "%lu %4095s %4095s", &buffer.bytes, buffer.file, buffer.contents);
      buffer.output = true;
      buffers.push_back(buffer);
    } else if (!strcmp(word, "run")) {
      fields = fscanf(file, "%15s %u %u", next.order, &next.seed, &next.synchronised);
      runs.push_back(next);
    }
    if (fields != wanted) fail("job", "a line that the comment at the head of this file does not list");
  }
  fclose(file);
}

void allocate() {
  arguments.clear();
  for (Buffer& buffer : buffers) {
    buffer.memory = take(buffer);
    if (!buffer.output || strcmp(buffer.contents, "-")) {
      read_file(buffer.output ? buffer.contents : buffer.file, buffer);
    } else if (!buffer.mapped()) {
      unsigned char* bytes = static_cast<unsigned char*>(buffer.memory);
      for (unsigned long i = 0; i < buffer.bytes; ++i) bytes[i] = (buffer.scratch ? UNINITIALISED : UNWRITTEN)[i % 2];
#ifdef USE_MEMORY_SANITIZER
      __msan_poison(buffer.memory, buffer.bytes);
#endif
    }
    arguments.push_back(buffer.memory);
  }
}

void save() {
  for (Buffer& buffer : buffers) {
    if (buffer.output) {
#ifdef USE_MEMORY_SANITIZER
      const long at = __msan_test_shadow(buffer.memory, buffer.bytes);
      if (buffer.scratch) __msan_unpoison(buffer.memory, buffer.bytes);
      if (at >= 0 && !buffer.scratch) {
        char text[128];
        snprintf(text, sizeof text, "byte %ld of an output comes from memory that nothing has written", at);
        __msan_print_shadow(static_cast<char*>(buffer.memory) + at, 1);  // tells where that memory is from
        fail("uninitialised", text);
      }
#endif
      char name[4200];
      snprintf(name, sizeof name, "%s.%s", buffer.file, run.order);
      FILE* file = fopen(name, "wb");
      const unsigned long bytes = buffer.mapped() ? LAST : buffer.bytes;
      const char* from = static_cast<char*>(buffer.memory) + buffer.bytes - bytes;
      if (!file || fwrite(from, 1, bytes, file) != bytes || fclose(file)) fail("job", name);
    }
    if (!buffer.mapped()) free(buffer.memory);
  }
}

}  // namespace

// ---- What a kernel calls ----

void emulated_barrier([[maybe_unused]] unsigned flags, int line) {
  Fiber& fiber = *current;
  fiber.state = WAITING;
  fiber.line = line;
#ifdef USE_THREAD_SANITIZER
  char* barrier = &barriers[meetings % 2];
  if (flags & run.synchronised) __tsan_release(barrier);
#endif
  leave(fiber);
#ifdef USE_THREAD_SANITIZER
  if (flags & run.synchronised) __tsan_acquire(barrier);
#endif
}

void* emulated_threadgroup_memory(int variable, unsigned long bytes) {
  unsigned long total = bytes;
  for (const ThreadgroupVariable& known : variables) {
    if (known.number == variable) {
#ifdef USE_THREAD_SANITIZER
      __tsan_acquire(known.memory);
#endif
      return known.memory;
    }
    total += known.bytes;
  }
  if (total > THREADGROUP_BYTES) {
    char text[96];
    snprintf(text, sizeof text, "a group uses %lu bytes of threadgroup memory, of %lu", total, THREADGROUP_BYTES);
    fail("threadgroup-memory", text);
  }
  if (variables.size() == MAX_VARIABLES) fail("job", "more threadgroup variables than the emulator keeps");
  char* memory = static_cast<char*>(malloc(bytes));
  memset(memory, UNINITIALISED[0], bytes);
#ifdef USE_MEMORY_SANITIZER
  __msan_poison(memory, bytes);
#endif
#ifdef USE_THREAD_SANITIZER
  __tsan_release(memory);
#endif
  variables.push_back({variable, memory, bytes});
  threadgroup_memory.push_back({memory, memory + bytes});
  return memory;
}

#ifdef USE_THREAD_SANITIZER
// Barriers order the memory that their flags name and no other, so only races on that memory count in a run.
extern "C" void __tsan_on_report(void* report) {
  int tid, size, write, atomic;
  void *address, *one[1] = {}, *other[1] = {};
  __tsan_get_report_mop(report, 1, &tid, &address, &size, &write, &atomic, other, 1);
  __tsan_get_report_mop(report, 0, &tid, &address, &size, &write, &atomic, one, 1);
  unsigned memory = 1;  // mem_device
  for (const Range& range : threadgroup_memory)
    if (address >= range.begin && address < range.end) memory = 2;  // mem_threadgroup
  if (memory != run.synchronised) return;
  char first[256] = "", second[256] = "", text[640];
  __sanitizer_symbolize_pc(one[0], "%s:%l", first, sizeof first);
  __sanitizer_symbolize_pc(other[0], "%s:%l", second, sizeof second);
  snprintf(text, sizeof text, "two threads meet in %s memory without a barrier between: %s and %s",
           memory == 1 ? "device" : "threadgroup", first, second);
  fail("race", text);
}
#endif

int main(int count, char** words) {
  if (count != 3) fail("job", "usage: emulator LIBRARY JOB");
  std::vector<Run> runs;
  read_job(words[2], runs);
  void* library = dlopen(words[1], RTLD_NOW);
  if (!library) fail("job", dlerror());
  kernel = reinterpret_cast<decltype(kernel)>(dlsym(library, "emulated_kernel"));
#ifdef USE_THREAD_SANITIZER
  scheduler_tsan = __tsan_get_current_fiber();
#endif
  for (const Run& next : runs) {
    run = next;
    shuffler.seed(run.seed);
    allocate();
    dispatch();
#ifdef USE_THREAD_SANITIZER
    __tsan_acquire(&end_of_dispatch);
#endif
    save();
    for (const Range& range : threadgroup_memory) free(const_cast<char*>(range.begin));
    threadgroup_memory.clear();
  }
  puts("PASS");
}
