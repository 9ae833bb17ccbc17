// In place of all other files here, where libkvx is built without CUDA. There is no device, so that
// nothing else is called.
#include "cuda/copy_engine.h"
#include "cuda/run.h"

namespace kvx::cuda {

bool is_built() { return false; }
bool has_device() { return false; }
bool has_batches() { return false; }
const char *no_device_because() { return ""; }
const char *find_in_device_memory(const Plan &) { return nullptr; }
double copy_speed(bool, bool) { return 0; }
void describe(const Plan &, kvx_plan_info_t *, kvx_plane_info_t *) {}

constexpr kvx_status_t kAbsent = KVX_STATUS_INTERNAL_ERROR;

kvx_status_t run(const Plan &, Reach *, void *) { return kAbsent; }
kvx_status_t report_status(void *) { return kAbsent; }
kvx_status_t copy_pairs(const void *const *, void *const *, uint64_t, uint64_t, kvx_memcpy_mode_t,
                        bool *, void *) {
  return kAbsent;
}
kvx_status_t copy_each_pair(const void *const *, void *const *, uint64_t, uint32_t, void *) {
  return kAbsent;
}

kvx_status_t Reach::begin() { return kAbsent; }
kvx_status_t Reach::check(const char *, const char *, const Extent &) { return kAbsent; }
kvx_status_t Reach::check_whole(const char *, const Extent &) { return kAbsent; }
kvx_status_t Reach::check_owners() const { return kAbsent; }

}  // namespace kvx::cuda
