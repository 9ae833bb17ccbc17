#include "cpu/hadamard.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "cpu/float_env.h"
#include "cpu/kernels/kernels.h"
#include "cpu/threads.h"

namespace kvx::cpu {
namespace {

constexpr uint64_t kNumbersPerItem = 64 << 10;     // of a thread: 256 KiB
constexpr uint64_t kNumbersPerHelper = 256 << 10;  // waking a thread for less costs more

// The rows of a call, which threads take some at a time.
struct Rotation {
  float *values;
  uint64_t rows, rows_per_item;
  int64_t row_stride;
  uint32_t dim, order;
  float scale;
  std::atomic<uint64_t> next{0};

  static void work(void *context, bool is_caller) {
    auto *all = static_cast<Rotation *>(context);
    if (is_caller) return all->work();
    const StandardFloats standard;  // the caller has its own
    all->work();
  }

 private:
  void work() {
    const auto rotate = kernels().hadamard;
    for (uint64_t begin; (begin = next.fetch_add(rows_per_item)) < rows;) {
      const uint64_t end = begin + std::min(rows_per_item, rows - begin);
      for (uint64_t row = begin; row < end; ++row)
        rotate(values + static_cast<int64_t>(row) * row_stride, dim / order, order, scale);
    }
  }
};

}  // namespace

void hadamard(float *values, uint64_t rows, uint32_t dim, int64_t row_stride, uint32_t order) {
  const uint64_t numbers = rows * dim;
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(order)));
  Rotation all{values, rows, std::max<uint64_t>(kNumbersPerItem / dim, 1), row_stride, dim,
               order,  scale};
  const uint64_t helpers = std::min<uint64_t>(numbers / kNumbersPerHelper, num_threads() - 1);
  run_with_helpers(static_cast<uint32_t>(helpers), Rotation::work, &all);
}

}  // namespace kvx::cpu
