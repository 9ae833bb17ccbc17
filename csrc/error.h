// The sentence behind a failing status: one per thread, read by kvx_last_error().
#pragma once

#include "kvx/kvx_ext.h"

namespace kvx {

// Remembers the sentence and returns `status`, so that a check reads `return fail(...)`.
[[gnu::format(printf, 2, 3)]] kvx_status_t fail(kvx_status_t status, const char *format, ...);

const char *last_error();

}  // namespace kvx

#define KVX_TRY(call)                                           \
  do {                                                          \
    const kvx_status_t kvx_try_status = (call);                 \
    if (kvx_try_status != KVX_STATUS_OK) return kvx_try_status; \
  } while (0)
