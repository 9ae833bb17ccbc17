// The exported functions: validate, plan, run.
#include "abi/guarded.h"
#include "abi/prepared.h"
#include "error.h"
#include "formats/format.h"
#include "kvx/kvx_ext.h"
#include "plan/find.h"
#include "rules/struct.h"
#include "rules/validate.h"

static_assert(sizeof(kvx_version_t) == 16);
static_assert(sizeof(kvx_tensor_desc_t) == 112);
static_assert(sizeof(kvx_pool_desc_t) == 32);
static_assert(sizeof(kvx_cache_desc_t) == 280);
static_assert(sizeof(kvx_block_table_t) == 64);
static_assert(sizeof(kvx_slot_mapping_t) == 32);
static_assert(sizeof(kvx_seq_lens_t) == 24);
static_assert(sizeof(kvx_kv_io_desc_t) == 248);
static_assert(sizeof(kvx_scale_desc_t) == 104);
static_assert(sizeof(kvx_write_desc_t) == 512);
static_assert(sizeof(kvx_gather_desc_t) == 352);
static_assert(sizeof(kvx_gather_options_t) == 48);
static_assert(sizeof(kvx_span_t) == 112);
static_assert(sizeof(kvx_plane_axis_t) == 24);
static_assert(sizeof(kvx_plane_t) == 304);
static_assert(sizeof(kvx_place_t) == 16);
static_assert(sizeof(kvx_find_desc_t) == 48);
static_assert(sizeof(kvx_format_info_t) == 40);

namespace kvx {
namespace {

kvx_status_t write(const kvx_cache_desc_t *cache, const kvx_write_desc_t *write,
                   const kvx_write_options_t *options, void *stream) {
  KVX_TRY(validate_write(cache, write, options));
  const CallTensors tensors = tensors_of(*cache, *write);
  bool on_device;
  KVX_TRY(backend::place(tensors.data(), tensors.size(), &on_device));
  if (write->io.num_tokens == 0) return KVX_STATUS_OK;
  Plan plan;
  plan_write(*cache, *write, options ? options->flags : 0, &plan);
  return backend::run(plan, tensors.data(), tensors.size(), on_device, stream);
}

kvx_status_t gather(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather,
                    const kvx_gather_options_t *options, void *stream) {
  KVX_TRY(validate_gather(cache, gather, options));
  const CallTensors tensors = tensors_of(*cache, *gather);
  bool on_device;
  KVX_TRY(backend::place(tensors.data(), tensors.size(), &on_device));
  if (gather->io.num_tokens == 0) return KVX_STATUS_OK;
  Plan plan;
  plan_gather(*cache, *gather, options ? *options : kvx_gather_options_t{}, &plan);
  return backend::run(plan, tensors.data(), tensors.size(), on_device, stream);
}

kvx_status_t migrate(const kvx_migrate_desc_t *migrate, void *stream) {
  KVX_TRY(validate_migrate(migrate));
  Prepared prepared;
  KVX_TRY(prepare(*migrate, &prepared));
  return backend::run(prepared.plan, prepared.tensors.begin(), prepared.tensors.size(),
                      prepared.on_device, stream);
}

kvx_status_t describe_format(kvx_dtype_t dtype, kvx_format_info_t *info) {
  if (!row_of(dtype)) {
    return KVX_INVALID("dtype is %d, expected a kvx_dtype_t from 1 to %u (spec 4.3)",
                       static_cast<int>(dtype), kNumFormats - 1);
  }
  const Format &format = format_of(dtype);
  const uint32_t size = info->size;
  *info = {};
  info->size = size;
  info->flags = (is_element_type(dtype) ? KVX_FORMAT_ELEMENT : 0) |
                (format.beside == Beside::kScale ? KVX_FORMAT_SCALED : 0) |
                (format.beside == Beside::kScaleZero ? KVX_FORMAT_ZEROS : 0) |
                (format.beside == Beside::kGroupScale ? KVX_FORMAT_GROUPS : 0);
  info->name = format.name;
  info->numbers = uint32_t{1} << format.numbers_log2;
  info->bytes = format.bytes;
  info->alignment = format.alignment;
  info->digits = format.digits;
  info->lowest = format.lowest;
  info->largest = format.largest;
  return KVX_STATUS_OK;
}

kvx_status_t locate(const kvx_find_desc_t *find) {
  KVX_TRY(validate_find(find));
  return find_tokens(*find);
}

}  // namespace
}  // namespace kvx

extern "C" {

kvx_status_t kvx_get_version(kvx_version_t *version) {
  if (!version) return kvx::fail(KVX_STATUS_INVALID_ARGUMENT, "version is NULL");
  *version = {sizeof *version, KVX_ABI_VERSION_MAJOR, KVX_ABI_VERSION_MINOR, KVX_ABI_VERSION_PATCH};
  return KVX_STATUS_OK;
}

kvx_status_t kvx_check_version(uint32_t abi_major, uint32_t abi_minor) {
  if (abi_major == KVX_ABI_VERSION_MAJOR && abi_minor <= KVX_ABI_VERSION_MINOR)
    return KVX_STATUS_OK;
  return kvx::fail(KVX_STATUS_INCOMPATIBLE,
                   "abi_major.abi_minor is %u.%u, expected %d.0 to %d.%d as this libkvx has it: "
                   "compile against its headers, or load the libkvx of yours (spec 3)",
                   abi_major, abi_minor, KVX_ABI_VERSION_MAJOR, KVX_ABI_VERSION_MAJOR,
                   KVX_ABI_VERSION_MINOR);
}

kvx_status_t kvx_validate_cache_desc(const kvx_cache_desc_t *cache) {
  return kvx::guarded([=] { return kvx::validate_cache(cache); });
}

kvx_status_t kvx_write_kv(const kvx_cache_desc_t *cache, const kvx_write_desc_t *write,
                          void *stream) {
  return kvx::guarded([=] { return kvx::write(cache, write, nullptr, stream); });
}

kvx_status_t kvx_write_kv_ext(const kvx_cache_desc_t *cache, const kvx_write_desc_t *write,
                              const kvx_write_options_t *options, void *stream) {
  return kvx::guarded([=] { return kvx::write(cache, write, options, stream); });
}

kvx_status_t kvx_gather_kv(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather,
                           void *stream) {
  return kvx::guarded([=] { return kvx::gather(cache, gather, nullptr, stream); });
}

kvx_status_t kvx_gather_kv_ext(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather,
                               const kvx_gather_options_t *options, void *stream) {
  return kvx::guarded([=] { return kvx::gather(cache, gather, options, stream); });
}

kvx_status_t kvx_migrate_kv(const kvx_migrate_desc_t *migrate, void *stream) {
  return kvx::guarded([=] { return kvx::migrate(migrate, stream); });
}

kvx_status_t kvx_find_tokens(const kvx_find_desc_t *find) {
  return kvx::guarded([=] { return kvx::locate(find); });
}

kvx_status_t kvx_device_status(void *stream) {
  return kvx::guarded([=] { return kvx::backend::report_status(stream); });
}

const char *kvx_last_error(void) { return kvx::last_error(); }

kvx_status_t kvx_backend_info(kvx_backend_info_t *info) {
  KVX_TRY(kvx::check_struct({nullptr, "info"}, info));
  kvx::backend::fill(info);
  return KVX_STATUS_OK;
}

kvx_status_t kvx_format_info(kvx_dtype_t dtype, kvx_format_info_t *info) {
  KVX_TRY(kvx::check_struct({nullptr, "info"}, info));
  return kvx::describe_format(dtype, info);
}

kvx_status_t kvx_set_num_threads(uint32_t num_threads) {
  kvx::backend::set_num_threads(num_threads);
  return KVX_STATUS_OK;
}

kvx_status_t kvx_set_host_threads(kvx_parallel_t parallel, uint32_t num_threads) {
  kvx::backend::set_host_threads(parallel, num_threads);
  return KVX_STATUS_OK;
}

}  // extern "C"
