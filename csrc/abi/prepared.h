// Calls between their validation and their run: their tensors' memory, and a migration's plan.
#pragma once

#include <array>
#include <vector>

#include "backend.h"
#include "kvx/kvx_migrate.h"

namespace kvx {

// The tensors of a write or gather.
using CallTensors = std::array<NamedTensor, 4>;

inline CallTensors tensors_of(const kvx_cache_desc_t &cache, const kvx_write_desc_t &write) {
  return {{{"cache.k", &cache.k},
           {"cache.v", &cache.v},
           {"write.io.key", &write.io.key},
           {"write.io.value", &write.io.value}}};
}
inline CallTensors tensors_of(const kvx_cache_desc_t &cache, const kvx_gather_desc_t &gather) {
  return {{{"cache.k", &cache.k},
           {"cache.v", &cache.v},
           {"gather.io.key", &gather.io.key},
           {"gather.io.value", &gather.io.value}}};
}

struct Prepared {
  SmallVector<NamedTensor, 4> tensors;
  std::vector<kvx_tensor_desc_t> planes;  // their bytes, for `tensors`
  bool on_device = false;
  Plan plan;
};

// Prepares a valid migration, whose tensors `prepared` points to.
kvx_status_t prepare(const kvx_migrate_desc_t &migrate, Prepared *prepared);

}  // namespace kvx
