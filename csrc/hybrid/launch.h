// Launches the calls of kvx_hybrid.h on DEVICE memory. Kernels skip rows whose numbers are out of
// range. One block of kThreads threads for a row.
#pragma once

#include "hybrid/run.h"

namespace kvx::hybrid {

kvx_status_t launch(const kvx_hybrid_append_t &append, void *stream);
kvx_status_t launch(const kvx_hybrid_tail_t &tail, void *stream);
kvx_status_t launch(const kvx_hybrid_compress_t &compress, void *stream);
kvx_status_t launch(const kvx_hybrid_flush_t &flush, void *stream);
kvx_status_t launch(const kvx_hybrid_state_t &state, void *stream);
kvx_status_t launch(const kvx_hybrid_pages_t &pages, Direction direction, void *stream);

}  // namespace kvx::hybrid
