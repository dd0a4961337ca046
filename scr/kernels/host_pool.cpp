// Threads that run the groups of a chain of kernel launches; without work they spin a moment, then sleep.
//
// A step is one launch. Each thread has a share of its groups, the same of every step, so that it finds in
// its cache what it wrote in the step before; done with its own, it takes what others have left. A step is
// over when all its groups have run; only then does the next begin. Progress is counted in groups, not in
// threads, so a thread that wakes late delays nobody: it joins whichever step is current.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

namespace {

constexpr auto SPIN = std::chrono::microseconds(200);  // for the next step or chain; waking costs up to 50

struct Step {
  void (*run)(void* const* buffers, const int32_t* const* shapes, uint32_t x, uint32_t y, uint32_t z);
  void* const* buffers;
  const int32_t* const* shapes;
  uint32_t groups[3];
};

// A thread's share of the current step.
struct alignas(64) Share {
  std::atomic<uint64_t> next{0};  // upper half: the step's number; lower: groups taken from the share
};

template <typename Condition>
bool spin_until(Condition holds) {
  const auto end = std::chrono::steady_clock::now() + SPIN;
  do {
    for (int i = 0; i < 16; ++i) {
      if (holds()) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

// Gives each thread of the pool a core of its own, and none the caller's. Linux, where it thinks the cores
// busy (spinning counts), wakes a thread on the caller's core, and there it waits until the chain is over.
class Cores {
 public:
  void add(std::thread& thread) {
#ifdef __linux__
    threads_.push_back(thread.native_handle());
    pin(threads_.size());
#endif
  }

  // Where the caller has come to the core of a thread, they change places.
  void make_room() {
#ifdef __linux__
    if (cores_.empty()) return;
    const int here = sched_getcpu();
    if (cores_[0] == here) return;
    const auto at = std::find(cores_.begin(), cores_.end(), here);
    if (at == cores_.end()) return;
    std::swap(cores_[0], *at);
    const size_t moved = at - cores_.begin();
    for (size_t t = 1; t <= threads_.size(); ++t)
      if (t % cores_.size() == 0 || t % cores_.size() == moved) pin(t);
#endif
  }

 private:
#ifdef __linux__
  static std::vector<int> allowed() {
    std::vector<int> found;
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
      for (int core = 0; core < CPU_SETSIZE; ++core)
        if (CPU_ISSET(core, &set)) found.push_back(core);
    return found;
  }

  void pin(size_t thread) {
    if (cores_.empty()) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cores_[thread % cores_.size()], &set);
    pthread_setaffinity_np(threads_[thread - 1], sizeof set, &set);  // a core that is gone: anywhere
  }

  std::vector<int> cores_ = allowed();  // the caller's, those of the threads 1, 2, …, then from the first again
  std::vector<pthread_t> threads_;
#endif
};

class Pool {
 public:
  // Runs `count` steps in order on `threads` threads, the caller being one of them.
  void run(const Step* steps, int count, int threads) {
    std::lock_guard<std::mutex> one_chain_at_a_time(chains_);
    if (threads > room_) {
      shares_ = std::make_unique<Share[]>(threads);
      for (int t = std::max(1, room_); t < threads; ++t) {
        std::thread thread([this, t] { wait_and_work(t); });
        cores_.add(thread);
        thread.detach();
      }
      room_ = threads;
    }
    if (threads > 1) cores_.make_room();
    steps_ = steps, count_ = count, threads_ = threads;
    begin_step(0);
    chain_ += 1;  // odd: there is work
    if (threads > 1) chain_.notify_all();
    work(0);
    chain_ += 1;  // even: a thread that has not joined yet finds nothing to do
    while (!spin_until([this] { return active_ == 0; })) std::this_thread::yield();
  }

 private:
  void wait_and_work(int thread) {
    for (uint32_t seen = 0;;) {
      uint32_t now = chain_;
      if (now == seen || now % 2 == 0) {
        if (!spin_until([&] { return chain_ != now; })) chain_.wait(now);
        continue;
      }
      seen = now;
      ++active_;  // before the look at chain_: `run` sees the one or this thread the other
      if (chain_ == now && thread < threads_) work(thread);
      --active_;
    }
  }

  void begin_step(int number) {
    done_.store(0, std::memory_order_relaxed);
    for (int t = 0; t < threads_; ++t)
      shares_[t].next.store(uint64_t(number) << 32, std::memory_order_relaxed);
    current_.store(number, std::memory_order_release);
  }

  void work(int thread) {
    for (int i = current_.load(std::memory_order_acquire); i < count_;
         i = current_.load(std::memory_order_acquire)) {
      const Step& step = steps_[i];
      const uint64_t total = uint64_t(step.groups[0]) * step.groups[1] * step.groups[2];
      for (int t = 0; t < threads_; ++t) take(step, i, total, (thread + t) % threads_);
      if (!spin_until([&] { return current_.load(std::memory_order_acquire) != i; }))
        current_.wait(i, std::memory_order_acquire);
    }
  }

  // Runs groups of a share of step number `i` until none is left, or the step is over.
  void take(const Step& step, int i, uint64_t total, int share) {
    const uint64_t gx = step.groups[0], gy = step.groups[1], threads = threads_;
    const uint64_t first = (total * share + threads - 1) / threads;
    const uint64_t size = (total * (share + 1) + threads - 1) / threads - first;
    std::atomic<uint64_t>& next = shares_[share].next;
    for (uint64_t mark = next.load(std::memory_order_acquire);;) {
      const uint64_t begin = uint32_t(mark);
      if (mark >> 32 != uint64_t(i) || begin >= size) return;
      const uint64_t end = begin + std::max<uint64_t>(1, (size - begin) / 8);  // less and less: all end together
      if (!next.compare_exchange_weak(mark, mark - begin + end, std::memory_order_acquire)) continue;
      for (uint64_t g = first + begin; g < first + end; ++g)
        step.run(step.buffers, step.shapes, uint32_t(g % gx), uint32_t(g / gx % gy), uint32_t(g / (gx * gy)));
      if (done_.fetch_add(end - begin, std::memory_order_acq_rel) + end - begin == total) {
        begin_step(i + 1);
        current_.notify_all();
        return;
      }
      mark = next.load(std::memory_order_acquire);
    }
  }

  std::mutex chains_;
  Cores cores_;
  std::unique_ptr<Share[]> shares_;
  const Step* steps_ = nullptr;
  int count_ = 0, threads_ = 1, room_ = 0;  // room_: shares, and threads with the caller
  std::atomic<uint32_t> chain_{0};  // grows by one when a chain begins and by one when it ends
  alignas(64) std::atomic<int> active_{0};
  alignas(64) std::atomic<int> current_{0};
  alignas(64) std::atomic<uint64_t> done_{0};
};

}  // namespace

extern "C" void run_chain(const Step* steps, int count, int threads) {
  static Pool* pool = new Pool;  // never destroyed: its sleeping threads outlive static destruction
  pool->run(steps, count, std::max(1, threads));
}
