// The exported functions of kvx_hybrid.h: validate and run.
#include "rules/hybrid.h"

#include "abi/guarded.h"
#include "kvx/kvx_hybrid.h"

static_assert(sizeof(kvx_hybrid_append_t) == 120);
static_assert(sizeof(kvx_hybrid_tail_t) == 104);
static_assert(sizeof(kvx_hybrid_compress_t) == 152);
static_assert(sizeof(kvx_hybrid_flush_t) == 136);
static_assert(sizeof(kvx_hybrid_state_t) == 88);
static_assert(sizeof(kvx_hybrid_pages_t) == 56);

namespace kvx {
namespace {

// Runs a valid call of `rows` rows.
template <class Call, class... Direction>
kvx_status_t run_valid(const char *name, const Call &call, uint32_t rows,
                       const HybridArrays &arrays, void *stream, Direction... direction) {
  bool on_device;
  KVX_TRY(backend::place(call.memory, name, &on_device));
  if (!rows) return KVX_STATUS_OK;
  if (!on_device) KVX_TRY(check_hybrid_data(call, (direction == hybrid::Direction::kWrite)...));
  NamedArray named[HybridArrays::kMost];
  size_t count = 0;
  for (int i = 0; on_device && i < arrays.count; ++i) {
    const HybridArray &array = arrays.list[i];
    if (array.data && array.bytes) named[count++] = {array.name, array.data};
  }
  if (on_device) KVX_TRY(backend::check_reachable(named, count));
  return backend::run_hybrid(call, direction..., on_device, stream);
}

kvx_status_t move_pages(const kvx_hybrid_pages_t *pages, hybrid::Direction direction,
                        void *stream) {
  HybridArrays arrays;
  KVX_TRY(check_hybrid(pages, &arrays, direction == hybrid::Direction::kWrite));
  return run_valid("pages", *pages, pages->num_rows, arrays, stream, direction);
}

}  // namespace
}  // namespace kvx

#define KVX_HYBRID_CALL(function, type, name, rows)                    \
  kvx_status_t function(const type *name, void *stream) {              \
    return kvx::guarded([=]() -> kvx_status_t {                        \
      kvx::HybridArrays arrays;                                        \
      KVX_TRY(kvx::check_hybrid(name, &arrays));                       \
      return kvx::run_valid(#name, *name, name->rows, arrays, stream); \
    });                                                                \
  }

extern "C" {

KVX_HYBRID_CALL(kvx_hybrid_append_swa, kvx_hybrid_append_t, append, num_tokens)
KVX_HYBRID_CALL(kvx_hybrid_append_tail, kvx_hybrid_tail_t, tail, num_tokens)
KVX_HYBRID_CALL(kvx_hybrid_compress, kvx_hybrid_compress_t, compress, num_rows)
KVX_HYBRID_CALL(kvx_hybrid_flush_write, kvx_hybrid_flush_t, flush, num_rows)
KVX_HYBRID_CALL(kvx_hybrid_rotate_state, kvx_hybrid_state_t, state, num_rows)

kvx_status_t kvx_hybrid_write_pages(const kvx_hybrid_pages_t *pages, void *stream) {
  return kvx::guarded(
      [=] { return kvx::move_pages(pages, kvx::hybrid::Direction::kWrite, stream); });
}

kvx_status_t kvx_hybrid_read_pages(const kvx_hybrid_pages_t *pages, void *stream) {
  return kvx::guarded(
      [=] { return kvx::move_pages(pages, kvx::hybrid::Direction::kRead, stream); });
}

}  // extern "C"
