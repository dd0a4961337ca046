// Threads that run the groups of a chain of kernel launches, and sleep when there is none.
//
// A step is one launch: its groups are handed out one chunk at a time, and it is over when all of them have
// run; only then does the next step begin. Progress is counted in groups, not in threads, so a thread that
// wakes late delays nobody: it joins whichever step is current.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr int MAX_STEPS = 1024;
constexpr auto SPIN = std::chrono::microseconds(50);  // after a step or a chain, for the next; then sleep

struct Step {
  void (*run)(void* const* buffers, const int32_t* const* shapes, uint32_t x, uint32_t y, uint32_t z);
  void* const* buffers;
  const int32_t* const* shapes;
  uint32_t groups[3];
};

struct alignas(64) Progress {
  std::atomic<uint64_t> next{0}, done{0};
};

class Pool {
 public:
  // Runs `count` steps in order on `threads` threads, the caller being one of them.
  void run(const Step* steps, int count, int threads) {
    std::lock_guard<std::mutex> one_chain_at_a_time(chains_);
    threads = std::max(1, threads);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (int(workers_.size()) < threads - 1) {
        const int index = int(workers_.size());
        workers_.emplace_back([this, index] { sleep_and_work(index); });
        workers_.back().detach();
      }
      for (int i = 0; i < count; ++i) progress_[i].next = progress_[i].done = 0;
      steps_ = steps, count_ = count, threads_ = threads, current_ = 0;
      ++generation_;
    }
    if (threads > 1) wake_.notify_all();
    work(steps, count, threads);
    std::unique_lock<std::mutex> lock(mutex_);
    steps_ = nullptr;  // a worker that has not woken yet finds nothing to do
    left_.wait(lock, [this] { return active_ == 0; });
  }

 private:
  void sleep_and_work(int index) {
    uint64_t seen = 0;
    for (;;) {
      const auto spin_until = std::chrono::steady_clock::now() + SPIN;
      while (generation_.load(std::memory_order_acquire) == seen &&
             std::chrono::steady_clock::now() < spin_until) {
      }
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return generation_ != seen && steps_ && index < threads_ - 1; });
      seen = generation_;
      const Step* steps = steps_;
      const int count = count_, threads = threads_;
      ++active_;
      lock.unlock();
      work(steps, count, threads);
      lock.lock();
      if (--active_ == 0) left_.notify_one();
    }
  }

  void work(const Step* steps, int count, int threads) {
    for (int i = current_.load(std::memory_order_acquire); i < count;
         i = current_.load(std::memory_order_acquire)) {
      const Step& step = steps[i];
      const uint64_t gx = step.groups[0], gy = step.groups[1], total = gx * gy * step.groups[2];
      const uint64_t chunk = std::max<uint64_t>(1, total / (uint64_t(threads) * 16));
      for (;;) {
        const uint64_t begin = progress_[i].next.fetch_add(chunk, std::memory_order_relaxed);
        if (begin >= total) break;
        const uint64_t end = std::min(begin + chunk, total);
        for (uint64_t g = begin; g < end; ++g) {
          step.run(step.buffers, step.shapes, uint32_t(g % gx), uint32_t(g / gx % gy), uint32_t(g / (gx * gy)));
        }
        if (progress_[i].done.fetch_add(end - begin, std::memory_order_acq_rel) + end - begin == total) {
          current_.store(i + 1, std::memory_order_release);
          current_.notify_all();
        }
      }
      const auto spin_until = std::chrono::steady_clock::now() + SPIN;
      while (current_.load(std::memory_order_acquire) == i) {
        if (std::chrono::steady_clock::now() > spin_until) current_.wait(i, std::memory_order_acquire);
      }
    }
  }

  std::mutex chains_, mutex_;
  std::condition_variable wake_, left_;
  std::vector<std::thread> workers_;
  Progress progress_[MAX_STEPS];
  std::atomic<int> current_{0};
  const Step* steps_ = nullptr;
  int count_ = 0, threads_ = 1, active_ = 0;
  std::atomic<uint64_t> generation_{0};
};

}  // namespace

// Returns 0, or 1 if the chain is longer than MAX_STEPS.
extern "C" int run_chain(const Step* steps, int count, int threads) {
  static Pool* pool = new Pool;  // never destroyed: its sleeping threads outlive static destruction
  if (count > MAX_STEPS) return 1;
  pool->run(steps, count, threads);
  return 0;
}
