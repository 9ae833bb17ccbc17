// The sentence for a failing status: one per thread, read by kvx_last_error().
#pragma once

#include "kvx/kvx_abi.h"

namespace kvx {

// Remembers the sentence and returns `status`, so that a check reads `return fail(...)`.
[[gnu::cold, gnu::format(printf, 2, 3)]] kvx_status_t fail(kvx_status_t status, const char *format,
                                                           ...);

const char *last_error();

using ll = long long;  // what %lld and %llu print
using ull = unsigned long long;

}  // namespace kvx

#define KVX_INVALID(...) ::kvx::fail(KVX_STATUS_INVALID_ARGUMENT, __VA_ARGS__)
#define KVX_OUT_OF_RANGE(...) ::kvx::fail(KVX_STATUS_OUT_OF_RANGE, __VA_ARGS__)

#define KVX_TRY(call)                                           \
  do {                                                          \
    const kvx_status_t kvx_try_status = (call);                 \
    if (kvx_try_status != KVX_STATUS_OK) return kvx_try_status; \
  } while (0)
