// Rules of the structs of kvx_hybrid.h.
#pragma once

#include <cstdint>

#include "extent.h"
#include "kvx/kvx_hybrid.h"

namespace kvx {

// An array of a call; `data` NULL: there is none.
struct HybridArray {
  const char *name;
  const void *data;
  uint64_t bytes;
  uint32_t alignment;
  bool is_written, is_optional;

  Extent extent() const { return extent_at(data, bytes); }
};

struct HybridArrays {
  static constexpr int kMost = 13;
  HybridArray list[kMost];
  int count = 0;
};

// What the struct alone shows. Fills in the arrays of the call.
kvx_status_t check_hybrid(const kvx_hybrid_append_t *append, HybridArrays *arrays);
kvx_status_t check_hybrid(const kvx_hybrid_tail_t *tail, HybridArrays *arrays);
kvx_status_t check_hybrid(const kvx_hybrid_compress_t *compress, HybridArrays *arrays);
kvx_status_t check_hybrid(const kvx_hybrid_flush_t *flush, HybridArrays *arrays);
kvx_status_t check_hybrid(const kvx_hybrid_state_t *state, HybridArrays *arrays);
kvx_status_t check_hybrid(const kvx_hybrid_pages_t *pages, HybridArrays *arrays, bool writes);

// What the numbers in HOST memory show.
kvx_status_t check_hybrid_data(const kvx_hybrid_append_t &append);
kvx_status_t check_hybrid_data(const kvx_hybrid_tail_t &tail);
kvx_status_t check_hybrid_data(const kvx_hybrid_compress_t &compress);
kvx_status_t check_hybrid_data(const kvx_hybrid_flush_t &flush);
kvx_status_t check_hybrid_data(const kvx_hybrid_state_t &state);
kvx_status_t check_hybrid_data(const kvx_hybrid_pages_t &pages, bool writes);

}  // namespace kvx
