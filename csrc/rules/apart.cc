#include "rules/apart.h"

#include "desc/grid.h"
#include "desc/scale.h"
#include "desc/secondary.h"
#include "rules/apart_arrays.h"
#include "rules/apart_pools.h"
#include "rules/apart_scales.h"

namespace kvx {
namespace {

[[gnu::cold]] kvx_status_t fail_written(const Path &path, const void *data, const Path &with) {
  return KVX_INVALID(
      "%s.data is %p: it shares memory with %s, and the call writes it; expected memory of its own "
      "(spec 7)",
      KVX_AT(path), data, KVX_AT(with));
}

template <class A, class B>
bool share_memory(const A &a, const B &b) {
  return intersect(extent_of(a), extent_of(b)) && Grid(a).meets(Grid(b));
}

// Checks the scales that a write finds for K or V against all else but the cache.
kvx_status_t check_found_apart(const Path &path, const kvx_write_desc_t &write, const Array &slots,
                               const Path &scale, const kvx_scale_desc_t &scales, bool is_v) {
  KVX_TRY(check_array_apart(slots, scale, extent_of(scales)));
  const Path io{&path, "io"};
  if (share_memory(scales, write.io.key)) return fail_written(scale, scales.data, {&io, "key"});
  if (is_absent(write.io.value)) return KVX_STATUS_OK;
  if (share_memory(scales, write.io.value)) return fail_written(scale, scales.data, {&io, "value"});
  if (is_v && share_memory(scales, write.k_scale_desc))
    return fail_written(scale, scales.data, {&path, "k_scale_desc"});
  return KVX_STATUS_OK;
}

// Checks the scales of K or V of a write against both.
kvx_status_t check_write_scales_apart(const Path &cache_path, const kvx_cache_desc_t &cache,
                                      const Path &path, const kvx_write_desc_t &write,
                                      const Array &slots, bool is_v, bool finds_scales) {
  const kvx_scale_desc_t scales = scales_of(write, is_v);
  if (!scales.data) return KVX_STATUS_OK;
  const Path scale{&path, name_of_scales(write, is_v)};
  if (finds_scales) KVX_TRY(check_found_apart(path, write, slots, scale, scales, is_v));
  KVX_TRY(check_scales_apart(scale, scales, {&cache_path, "k"}, cache.k));
  return check_scales_apart(scale, scales, {&cache_path, "v"}, cache.v);
}

// Checks key or value of a gather against the cache, its secondary pool included.
kvx_status_t check_output_apart(const Path &path, const kvx_tensor_desc_t &written,
                                const kvx_cache_desc_t &cache, const kvx_gather_options_t *options,
                                bool has_secondary) {
  const Path from{nullptr, "cache"}, pool{&from, "pool"};
  for (const bool is_v : {false, true}) {
    const kvx_tensor_desc_t &read = is_v ? cache.v : cache.k;
    if (is_absent(read)) break;
    if (share_memory(written, read))
      return fail_written(path, written.data, {&from, is_v ? "v" : "k"});
    Extent secondary;
    const uint32_t given = options ? options->secondary_num_blocks : 0;
    if (!has_secondary || !cache.pool.secondary) continue;
    if (find_secondary(cache, read, given ? given : 1, &secondary) &&
        intersect(extent_of(written), secondary)) {
      return fail_written(path, written.data, {&pool, "secondary"});
    }
  }
  return KVX_STATUS_OK;
}

[[gnu::cold]] kvx_status_t fail_gather_array(const Array &array, const char *written) {
  const Path path{nullptr, "gather"}, io{&path, "io"};
  return fail_array(array, {&io, written});
}

}  // namespace

kvx_status_t check_apart(const Path &cache_path, const kvx_cache_desc_t &cache, const Path &path,
                         const kvx_write_desc_t &write, const char *owner, bool finds_scales) {
  if (write.io.num_tokens == 0) return KVX_STATUS_OK;
  const Array slots = array_of(owner, write.slots);
  KVX_TRY(check_array_apart(slots, {&cache_path, "k"}, cache.k));
  if (!is_absent(cache.v)) KVX_TRY(check_array_apart(slots, {&cache_path, "v"}, cache.v));
  if (!has_scales(write)) return KVX_STATUS_OK;
  for (const bool is_v : {false, true}) {
    KVX_TRY(check_write_scales_apart(cache_path, cache, path, write, slots, is_v, finds_scales));
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_apart(const kvx_cache_desc_t &cache, const kvx_gather_desc_t &gather,
                         const kvx_gather_options_t *options) {
  if (is_kv_offsets(gather.block_table)) {
    const kvx_cache_desc_t *const layer = &cache;
    KVX_TRY(check_secondary({nullptr, "cache"}, &layer, 1,
                            options ? options->secondary_num_blocks : 0));
  }
  if (gather.io.num_tokens == 0) return KVX_STATUS_OK;
  const kvx_tensor_desc_t &key = gather.io.key, &value = gather.io.value;
  const Extent to_key = extent_of(key), to_value = is_absent(value) ? Extent{} : extent_of(value);
  const auto check = [&](const Array &array) {
    if (!meet(array, to_key) && !meet(array, to_value)) return KVX_STATUS_OK;
    return fail_gather_array(array, meet(array, to_key) ? "key" : "value");
  };
  KVX_TRY(check(indices_of("gather", gather.block_table)));
  KVX_TRY(check(indptr_of("gather", gather.block_table)));
  KVX_TRY(check(array_of("gather", "seq_lens", gather.seq_lens)));
  const Path path{nullptr, "gather"}, io{&path, "io"}, with{nullptr, "options"};
  const bool offsets = is_kv_offsets(gather.block_table);
  KVX_TRY(check_output_apart({&io, "key"}, key, cache, options, offsets));
  if (!is_absent(value)) {
    KVX_TRY(check_output_apart({&io, "value"}, value, cache, options, offsets));
    if (share_memory(value, key)) return fail_written({&io, "value"}, value.data, {&io, "key"});
  }
  if (!options) return KVX_STATUS_OK;
  for (const bool is_v : {false, true}) {
    const kvx_scale_desc_t *const scales = is_v ? options->v_scale : options->k_scale;
    if (!scales) continue;
    const Path scale{&with, is_v ? "v_scale" : "k_scale"};
    KVX_TRY(check_scales_apart(scale, *scales, {&io, "key"}, key));
    KVX_TRY(check_scales_apart(scale, *scales, {&io, "value"}, value));
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_arrays_apart(const kvx_migrate_desc_t &migrate) {
  if (migrate.seq_lens->seq_count == 0) return KVX_STATUS_OK;
  return check_arrays_apart({nullptr, "dst"}, migrate,
                            extent_of(*migrate.dst, /*in_secondary=*/false));
}

kvx_status_t check_apart(const kvx_migrate_desc_t &migrate) {
  const Path src_path{nullptr, "src"}, dst_path{nullptr, "dst"};
  const Extent written = extent_of(*migrate.dst, /*in_secondary=*/false);
  KVX_TRY(check_ends_apart(src_path, dst_path, migrate, written));
  if (migrate.seq_lens->seq_count == 0) return KVX_STATUS_OK;
  KVX_TRY(check_arrays_apart(dst_path, migrate, written));
  return check_scales_apart(src_path, dst_path, migrate);
}

}  // namespace kvx
