// Rules of kvx_gather_desc_t and kvx_gather_options_t.
#include <initializer_list>

#include "desc/span.h"
#include "rules/apart.h"
#include "rules/cache.h"
#include "rules/io.h"
#include "rules/pool.h"
#include "rules/scales.h"
#include "rules/struct.h"
#include "rules/table.h"
#include "rules/validate.h"

namespace kvx {
namespace {

kvx_status_t check_options(const kvx_cache_desc_t &cache, const kvx_gather_options_t &options,
                           bool offsets, bool pointers) {
  const Path path{nullptr, "options"}, cache_path{nullptr, "cache"};
  KVX_TRY(check_struct(path, &options));
  KVX_TRY(check_reserved_0(path, options.reserved_0));
  KVX_TRY(check_flags(
      path, options.flags,
      KVX_FLAG_ZERO_FILL | KVX_FLAG_BACKGROUND | KVX_FLAG_COPY_ENGINE | KVX_FLAG_OWNER_MASK));
  for (const bool is_v : {false, true}) {
    const kvx_scale_desc_t *const scales = is_v ? options.v_scale : options.k_scale;
    if (!scales) continue;
    const Path scale{&path, is_v ? "v_scale" : "k_scale"};
    KVX_TRY(check_struct(scale, scales));
    KVX_TRY(check_scales(scale, *scales, cache, is_v ? cache.v : cache.k,
                         {&cache_path, is_v ? "v" : "k"}));
    if (offsets) KVX_TRY(check_secondary_scales(scale, cache, *scales));
    if (pointers) KVX_TRY(check_pointer_scales(scale, *scales));
  }
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t validate_gather(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather,
                             const kvx_gather_options_t *options) {
  const Path cache_path{nullptr, "cache"}, path{nullptr, "gather"};
  KVX_TRY(check_cache(cache_path, cache));
  KVX_TRY(check_struct(path, gather));
  const Path table{&path, "block_table"}, lens{&path, "seq_lens"}, io{&path, "io"};
  KVX_TRY(check_table(table, gather->block_table));
  const bool offsets = is_kv_offsets(gather->block_table);
  if (offsets) KVX_TRY(check_pool(cache_path, *cache));
  if (is_pointers(gather->block_table))
    KVX_TRY(check_pointers(table, gather->block_table, &cache, 1));
  KVX_TRY(check_lens(lens, gather->seq_lens));
  if (gather->seq_lens.seq_count != gather->block_table.seq_count) {
    return KVX_INVALID("%s.seq_count is %u, expected block_table.seq_count %u (spec 5.3)",
                       KVX_AT(lens), gather->seq_lens.seq_count, gather->block_table.seq_count);
  }
  const uint64_t rows = rows_of(gather->block_table);
  uint64_t tokens;
  if (__builtin_mul_overflow(rows, uint64_t{gather->max_seq_len}, &tokens)) tokens = UINT64_MAX;
  if (gather->io.num_tokens != tokens || rows > UINT32_MAX) {
    return KVX_INVALID(
        "%s.num_tokens is %u, expected seq_count * beam_width * max_seq_len = %llu (spec 6.10)",
        KVX_AT(io), gather->io.num_tokens, static_cast<ull>(tokens));
  }
  KVX_TRY(check_output(io, *cache, gather->io, static_cast<uint32_t>(rows), gather->max_seq_len));
  if (options) KVX_TRY(check_options(*cache, *options, offsets, is_pointers(gather->block_table)));
  return check_apart(*cache, *gather, options);
}

}  // namespace kvx
