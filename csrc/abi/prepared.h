// A migration between its validation and its run: its tensors' memory, and its plan.
#pragma once

#include <vector>

#include "backend.h"
#include "kvx/kvx_migrate.h"

namespace kvx {

// The caller's arguments, in structs of this version.
class Grown {
 public:
  explicit Grown(const kvx_migrate_desc_t *given);
  Grown(const Grown &) = delete;
  Grown &operator=(const Grown &) = delete;

  const kvx_migrate_desc_t *get() const { return migrate_; }

 private:
  kvx_span_t src_, dst_;
  kvx_migrate_desc_t room_;
  const kvx_migrate_desc_t *migrate_;
};

struct Prepared {
  Few<NamedTensor, 4> tensors;
  std::vector<kvx_tensor_desc_t> planes;  // their bytes, for `tensors`
  bool on_device = false;
  Plan plan;

  kvx_status_t run(const Plan &now, void *stream) const {
    return backend::run(now, tensors.begin(), tensors.size(), on_device, stream);
  }
};

// Prepares a valid migration, whose tensors `prepared` points to.
kvx_status_t prepare(const kvx_migrate_desc_t &migrate, Prepared *prepared);

}  // namespace kvx
