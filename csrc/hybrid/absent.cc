// In place of the kernels here, where libkvx is built without CUDA. There is no device, so that
// none of these is called.
#include "hybrid/launch.h"

namespace kvx::hybrid {

constexpr kvx_status_t kAbsent = KVX_STATUS_INTERNAL_ERROR;

kvx_status_t launch(const kvx_hybrid_append_t &, void *) { return kAbsent; }
kvx_status_t launch(const kvx_hybrid_tail_t &, void *) { return kAbsent; }
kvx_status_t launch(const kvx_hybrid_compress_t &, void *) { return kAbsent; }
kvx_status_t launch(const kvx_hybrid_flush_t &, void *) { return kAbsent; }
kvx_status_t launch(const kvx_hybrid_state_t &, void *) { return kAbsent; }
kvx_status_t launch(const kvx_hybrid_pages_t &, Direction, void *) { return kAbsent; }

}  // namespace kvx::hybrid
