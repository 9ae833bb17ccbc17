#include "cpu/threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>

namespace kvx::cpu {
namespace {

constexpr uint32_t kMaxThreads = 256, kMaxDefaultThreads = 16;

std::atomic<uint32_t> chosen_threads{0};

#if defined(__linux__)
// The cores of the process, not of the calling thread.
bool process_cores(cpu_set_t *cores) {
  return sched_getaffinity(getpid(), sizeof *cores, cores) == 0;
}
#endif

// A helper would inherit the cores of the thread that started it, which may be pinned to one.
void use_process_cores() {
#if defined(__linux__)
  cpu_set_t cores;
  if (process_cores(&cores)) sched_setaffinity(0, sizeof cores, &cores);
#endif
}

// The number of threads that the user has set; 0: none.
uint32_t asked_threads() {
  const uint32_t chosen = chosen_threads.load(std::memory_order_relaxed);
  if (chosen) return chosen;
  static const uint32_t from_environment = [] {
    const char *text = std::getenv("KVX_NUM_THREADS");
    const long count = text ? std::strtol(text, nullptr, 10) : 0;
    return static_cast<uint32_t>(std::clamp<long>(count, 0, kMaxThreads));
  }();
  return from_environment;
}

uint32_t default_threads() {
#if defined(__linux__)
  cpu_set_t cores;
  if (process_cores(&cores))
    return std::clamp<uint32_t>(static_cast<uint32_t>(CPU_COUNT(&cores)), 1, kMaxDefaultThreads);
#endif
  return std::clamp<uint32_t>(std::thread::hardware_concurrency(), 1, kMaxDefaultThreads);
}

// Threads are detached and the pool is never destroyed: they end with the process.
class Pool {
 public:
  bool is_mine() const { return process_ == getpid(); }

  void run(uint32_t helpers, Work work, void *context) {
    std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
    if (!owner.owns_lock()) return work(context, true);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      grow(helpers);
      work_ = work;
      context_ = context;
      wanted_ = running_ = std::min(helpers, size_);
    }
    wake_.notify_all();
    work(context, true);
    std::unique_lock<std::mutex> lock(mutex_);
    running_ -= wanted_;  // helpers that have not begun need not run
    wanted_ = 0;
    done_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  // Helpers block signals: the host's threads take them.
  void grow(uint32_t size) {
    if (size_ >= size) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (; size_ < size; ++size_) std::thread(&Pool::serve, this).detach();
    } catch (const std::exception &) {
      // No thread can be created: those that exist do the work.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void serve() {
    use_process_cores();
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return wanted_ > 0; });
      --wanted_;
      const Work work = work_;
      void *context = context_;
      lock.unlock();
      work(context, false);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  const pid_t process_ = getpid();
  std::mutex owner_;  // one caller's work at a time
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  uint32_t size_ = 0, wanted_ = 0, running_ = 0;
  Work work_ = nullptr;
  void *context_ = nullptr;
};

// A forked child has none of its parent's threads, so it gets its own pool.
Pool &pool() {
  static std::atomic<Pool *> current{nullptr};
  Pool *found = current.load(std::memory_order_acquire);
  if (found && found->is_mine()) return *found;
  auto *fresh = new Pool;
  if (current.compare_exchange_strong(found, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;
  return *found;
}

struct HostThreads {
  kvx_parallel_t parallel = nullptr;
  uint32_t num_threads = 0;
  pid_t process = 0;  // a forked child has none of the threads
};

thread_local HostThreads host_threads;

// One call on the host's threads, whose number may differ from the one requested.
struct Region {
  const pthread_t caller;
  const Work work;
  void *const context;
  std::atomic<int64_t> helpers;
  bool caller_has_worked;

  static void enter(void *data) {
    auto *region = static_cast<Region *>(data);
    if (pthread_equal(region->caller, pthread_self())) {
      region->caller_has_worked = true;
      region->work(region->context, true);
    } else if (region->helpers.fetch_sub(1, std::memory_order_relaxed) > 0) {
      region->work(region->context, false);
    }
  }
};

}  // namespace

uint32_t num_threads() {
  const uint32_t asked = asked_threads();
  if (asked) return asked;
  static const uint32_t by_default = default_threads();
  return by_default;
}

void set_num_threads(uint32_t count) {
  chosen_threads.store(std::min(count, kMaxThreads), std::memory_order_relaxed);
}

void set_host_threads(kvx_parallel_t parallel, uint32_t num_threads) {
  host_threads = {parallel, num_threads, getpid()};
}

uint32_t num_host_threads() {
  if (!host_threads.parallel || host_threads.process != getpid()) return 0;
  const uint32_t asked = asked_threads();
  return asked ? std::min(asked, host_threads.num_threads) : host_threads.num_threads;
}

void run_with_helpers(uint32_t helpers, Work work, void *context) {
  if (helpers == 0) return work(context, true);
  if (num_host_threads()) {
    Region region = {pthread_self(), work, context, {helpers}, false};
    host_threads.parallel(Region::enter, &region, 0, 0);
    // A host that has not run it here leaves items, or none: whoever works takes those that are
    // left.
    if (!region.caller_has_worked) work(context, true);
    return;
  }
  pool().run(helpers, work, context);
}

}  // namespace kvx::cpu
