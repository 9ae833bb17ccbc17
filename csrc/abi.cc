// The exported functions: validate, plan, run.
#include <exception>
#include <vector>

#include "cpu/float_env.h"
#include "cpu/kernels.h"
#include "cpu/pool.h"
#include "cpu/run.h"
#include "error.h"
#include "plan.h"
#include "validate.h"

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

namespace kvx {
namespace {

// This build runs on HOST memory, and on UNIFIED memory as the same.
kvx_status_t check_reachable(const char *name, const kvx_tensor_desc_t &tensor) {
  if (is_absent(tensor) || tensor.memory != KVX_MEMORY_DEVICE) return KVX_STATUS_OK;
  return fail(KVX_STATUS_UNSUPPORTED,
              "libkvx was built without CUDA; %s.memory is DEVICE. Rebuild with nvcc on PATH "
              "(spec 4.3)",
              name);
}

kvx_status_t check_reachable(const char *k, const char *v, const kvx_cache_desc_t &cache) {
  KVX_TRY(check_reachable(k, cache.k));
  return check_reachable(v, cache.v);
}

kvx_status_t run_plan(const Plan &plan) {
  KVX_TRY(cpu::check_data(plan));
  cpu::run(plan);
  return KVX_STATUS_OK;
}

kvx_status_t write(const kvx_cache_desc_t *cache, const kvx_write_desc_t *write) {
  KVX_TRY(validate_write(cache, write));
  KVX_TRY(check_reachable("cache.k", "cache.v", *cache));
  KVX_TRY(check_reachable("write.io.key", write->io.key));
  KVX_TRY(check_reachable("write.io.value", write->io.value));
  if (write->io.num_tokens == 0) return KVX_STATUS_OK;
  TensorPair pairs[2];
  Plan plan;
  plan_write(*cache, *write, pairs, &plan);
  return run_plan(plan);
}

kvx_status_t gather(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather,
                    const kvx_gather_options_t *options) {
  KVX_TRY(validate_gather(cache, gather, options));
  KVX_TRY(check_reachable("cache.k", "cache.v", *cache));
  KVX_TRY(check_reachable("gather.io.key", gather->io.key));
  KVX_TRY(check_reachable("gather.io.value", gather->io.value));
  if (gather->io.num_tokens == 0) return KVX_STATUS_OK;
  kvx_gather_options_t defaults{};
  defaults.null_block_id = KVX_NO_NULL_BLOCK;
  TensorPair pairs[2];
  Plan plan;
  plan_gather(*cache, *gather, options ? *options : defaults, pairs, &plan);
  return run_plan(plan);
}

kvx_status_t migrate(const kvx_migrate_desc_t *migrate) {
  KVX_TRY(validate_migrate(migrate));
  for (uint32_t l = 0; l < migrate->src->num_layers; ++l) {
    KVX_TRY(check_reachable("src.layers[].k", "src.layers[].v", *migrate->src->layers[l]));
    KVX_TRY(check_reachable("dst.layers[].k", "dst.layers[].v", *migrate->dst->layers[l]));
  }
  std::vector<TensorPair> pairs(size_t{2} * migrate->src->num_layers);
  Plan plan;
  plan_migrate(*migrate, pairs.data(), &plan);
  return run_plan(plan);
}

// No exception leaves the library; it is memory that runs out, before the first write.
template <class Call>
kvx_status_t guarded(Call call) {
  const cpu::StandardFloats standard;
  try {
    return call();
  } catch (const std::exception &error) {
    return fail(KVX_STATUS_INTERNAL_ERROR, "%s", error.what());
  }
}

}  // namespace
}  // namespace kvx

extern "C" {

kvx_status_t kvx_get_version(kvx_version_t *version) {
  if (!version) return kvx::fail(KVX_STATUS_INVALID_ARGUMENT, "version is NULL");
  *version = {sizeof *version, KVX_ABI_VERSION_MAJOR, KVX_ABI_VERSION_MINOR, KVX_ABI_VERSION_PATCH};
  return KVX_STATUS_OK;
}

kvx_status_t kvx_validate_cache_desc(const kvx_cache_desc_t *cache) {
  return kvx::guarded([=] { return kvx::validate_cache(cache); });
}

kvx_status_t kvx_write_kv(const kvx_cache_desc_t *cache, const kvx_write_desc_t *write, void *) {
  return kvx::guarded([=] { return kvx::write(cache, write); });
}

kvx_status_t kvx_gather_kv(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather, void *) {
  return kvx::guarded([=] { return kvx::gather(cache, gather, nullptr); });
}

kvx_status_t kvx_gather_kv_ext(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather,
                               const kvx_gather_options_t *options, void *) {
  return kvx::guarded([=] { return kvx::gather(cache, gather, options); });
}

kvx_status_t kvx_migrate_kv(const kvx_migrate_desc_t *migrate, void *) {
  return kvx::guarded([=] { return kvx::migrate(migrate); });
}

const char *kvx_last_error(void) { return kvx::last_error(); }

kvx_status_t kvx_backend_info(kvx_backend_info_t *info) {
  if (!info) return kvx::fail(KVX_STATUS_INVALID_ARGUMENT, "info is NULL");
  if (info->size < sizeof *info) {
    return kvx::fail(KVX_STATUS_INVALID_ARGUMENT, "info.size is %u, expected at least %zu (spec 6)",
                     info->size, sizeof *info);
  }
  const uint32_t size = info->size;
  *info = {};
  info->size = size;
  info->num_threads = kvx::cpu::num_threads();
  info->cpu_isa = kvx::cpu::kernels().isa;
  info->version = KVX_VERSION;
  info->stream_bytes = kvx::cpu::stream_bytes();
  return KVX_STATUS_OK;
}

kvx_status_t kvx_set_num_threads(uint32_t num_threads) {
  kvx::cpu::set_num_threads(num_threads);
  return KVX_STATUS_OK;
}

}  // extern "C"
