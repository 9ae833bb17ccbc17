// Rows to the records of engines' pages and back, in HOST memory.
#include "cpu/kernels/kernels.h"
#include "hybrid/numbers.h"
#include "hybrid/quantize.h"
#include "hybrid/rows.h"
#include "hybrid/run.h"

namespace kvx::hybrid {
namespace {

void write_record(const Record &to, const void *row, kvx_dtype_t dtype) {
  for (uint32_t g = 0; g < kPageGroups; ++g) {
    const void *const group = number_at(row, dtype, g * kPageGroup);
    to.scales[g] = page_exponent(largest_of(group, dtype, kPageGroup));
    to_e4m3(to.data + g * kPageGroup, group, dtype, kPageGroup, E8m0::decode(to.scales[g]));
  }
  to.scales[kPageGroups] = 0;
  to_dtype(to.data + kPageNope, KVX_DTYPE_BF16, number_at(row, dtype, kPageNope), dtype, kPageRope);
}

void read_record(void *row, kvx_dtype_t dtype, const Record &from) {
  const cpu::ConvertRun convert = cpu::kernels().find(KVX_DTYPE_F8_E4M3, dtype);
  for (uint32_t g = 0; g < kPageGroups; ++g) {
    const cpu::Conversion how{{E8m0::decode(from.scales[g]), 1.0f}, false, false, 0};
    convert(number_at(row, dtype, g * kPageGroup), from.data + g * kPageGroup, kPageGroup, how);
  }
  to_dtype(number_at(row, dtype, kPageNope), dtype, from.data + kPageNope, KVX_DTYPE_BF16,
           kPageRope);
}

}  // namespace

void run(const kvx_hybrid_pages_t &p, Direction direction) {
  each_row(p.num_rows, 3 * kPageDim, [&](uint64_t i) {
    const Record record = record_of_slot(p, p.slots[i]);
    if (!record.data) return;
    void *const row = number_at(p.rows, p.dtype, i * kPageDim);
    direction == Direction::kWrite ? write_record(record, row, p.dtype)
                                   : read_record(row, p.dtype, record);
  });
}

}  // namespace kvx::hybrid
