#include "cpu/speed.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <new>

#include "cpu/threads.h"

namespace kvx::cpu {
namespace {

constexpr size_t kBytes = 16 << 20, kPieceBytes = 256 << 10;
constexpr int kRounds = 3;  // the best counts

struct Copy {
  uint8_t *dst;
  const uint8_t *src;
  std::atomic<size_t> next{0};

  static void work(void *context, bool) {
    auto *copy = static_cast<Copy *>(context);
    for (size_t at; (at = copy->next.fetch_add(kPieceBytes)) < kBytes;)
      std::memcpy(copy->dst + at, copy->src + at, kPieceBytes);
  }
};

double measure(uint32_t helpers) {
  const std::unique_ptr<uint8_t[]> src(new (std::nothrow) uint8_t[kBytes]),
      dst(new (std::nothrow) uint8_t[kBytes]);
  if (!src || !dst) return 0.0;
  std::memset(src.get(), 1, kBytes);
  std::memset(dst.get(), 2, kBytes);
  double best = 0.0;
  for (int i = 0; i < kRounds; ++i) {
    Copy copy{dst.get(), src.get()};
    const auto start = std::chrono::steady_clock::now();
    run_with_helpers(helpers, Copy::work, &copy);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    if (taken.count() > 0) best = std::max(best, static_cast<double>(kBytes) / taken.count());
  }
  return best;
}

}  // namespace

double copy_speed(bool by_all_threads) {
  static const double alone = measure(0);
  if (!by_all_threads) return alone;
  static const double together = std::max(alone, measure(num_threads() - 1));
  return together;
}

}  // namespace kvx::cpu
