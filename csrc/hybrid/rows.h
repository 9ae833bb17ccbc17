// Rows of a call, shared among threads if the call is large.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cpu/float_env.h"
#include "cpu/threads.h"

namespace kvx::hybrid {

constexpr uint64_t kBytesPerHelper = 1 << 20;       // fewer are written before a thread has woken
constexpr uint64_t kBytesPerHostThread = 64 << 10;  // the same for a thread that is awake
constexpr uint64_t kBytesPerShare = 32 << 10;

// Calls visit(i) for each row; rows of about `bytes` bytes of work.
template <class Visit>
void each_row(uint64_t rows, uint64_t bytes, const Visit &visit) {
  struct Job {
    const Visit &visit;
    uint64_t rows, share;
    std::atomic<uint64_t> next;

    static void work(void *context, bool) {
      auto *const job = static_cast<Job *>(context);
      const cpu::StandardFloats standard;
      for (uint64_t first; (first = job->next.fetch_add(job->share)) < job->rows;)
        for (uint64_t i = first; i < std::min(first + job->share, job->rows); ++i) job->visit(i);
    }
  };
  const uint64_t all = rows * bytes;
  const bool lent = all >= kBytesPerHostThread && cpu::num_host_threads();
  const uint64_t threads = lent ? cpu::num_host_threads() : cpu::num_threads();
  const uint64_t worth = all / (lent ? kBytesPerHostThread : kBytesPerHelper);
  const uint64_t helpers = std::min({threads - 1, worth, rows ? rows - 1 : 0});
  if (!helpers) {
    for (uint64_t i = 0; i < rows; ++i) visit(i);
    return;
  }
  Job job{visit, rows, std::max<uint64_t>(1, kBytesPerShare / std::max<uint64_t>(1, bytes)), {0}};
  cpu::run_with_helpers(static_cast<uint32_t>(helpers), Job::work, &job);
}

}  // namespace kvx::hybrid
