// The exported functions: validate, plan, run.
#include <array>
#include <exception>
#include <vector>

#include "cpu/float_env.h"
#include "cpu/kernels.h"
#include "cpu/pool.h"
#include "cpu/run.h"
#include "error.h"
#include "grown.h"
#include "plan.h"
#include "validate.h"
#if KVX_WITH_CUDA
#include "cuda/run.h"
#endif

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
static_assert(sizeof(kvx_view_t) == 80);

namespace kvx {
namespace {

struct Named {
  const char *name;
  const kvx_tensor_desc_t *tensor;
};

// Whether the call runs on the device: if any of its tensors lies there.
template <class Tensors>
kvx_status_t place(const Tensors &tensors, bool *on_device) {
  *on_device = false;
  for (const Named &named : tensors) {
    if (is_absent(*named.tensor)) continue;
    const kvx_memory_type_t memory = named.tensor->memory;
#if KVX_WITH_CUDA
    if (memory == KVX_MEMORY_DEVICE && !cuda::has_device()) {
      return fail(KVX_STATUS_UNSUPPORTED,
                  "%s.memory is DEVICE, but no CUDA device can be used here: %s (spec 4.3)",
                  named.name, cuda::no_device_because());
    }
    *on_device |= memory != KVX_MEMORY_HOST && cuda::has_device();
#else
    if (memory == KVX_MEMORY_DEVICE) {
      return fail(KVX_STATUS_UNSUPPORTED,
                  "libkvx was built without CUDA; %s.memory is DEVICE. Rebuild with nvcc on PATH "
                  "(spec 4.3)",
                  named.name);
    }
#endif
  }
  return KVX_STATUS_OK;
}

template <class Tensors>
kvx_status_t run_plan(const Plan &plan, [[maybe_unused]] const Tensors &tensors,
                      [[maybe_unused]] bool on_device, [[maybe_unused]] void *stream) {
#if KVX_WITH_CUDA
  if (on_device) {
    for (const auto &[name, tensor] : tensors) {
      const bool on_host = tensor->memory == KVX_MEMORY_HOST;
      // Copy engines reach all host memory, unless to fill it.
      if (is_absent(*tensor) || (on_host && plan.copy_engine && !plan.zero_fill)) continue;
      const Extent extent = extent_of(*tensor);
      KVX_TRY(cuda::check_reachable(name, ".data", extent.begin));
      // Pinned memory may end within a tensor.
      if (on_host) KVX_TRY(cuda::check_reachable(name, "'s last byte", extent.end - 1));
    }
    return cuda::run(plan, stream);
  }
#endif
  uint64_t tokens;
  KVX_TRY(cpu::check_data(plan, &tokens));
  cpu::run(plan, tokens);
  return KVX_STATUS_OK;
}

kvx_status_t write(const kvx_cache_desc_t *cache, const kvx_write_desc_t *write,
                   const kvx_write_options_t *options, void *stream) {
  KVX_TRY(validate_write(cache, write, options));
  const std::array<Named, 4> tensors = {{{"cache.k", &cache->k},
                                         {"cache.v", &cache->v},
                                         {"write.io.key", &write->io.key},
                                         {"write.io.value", &write->io.value}}};
  bool on_device;
  KVX_TRY(place(tensors, &on_device));
  if (write->io.num_tokens == 0) return KVX_STATUS_OK;
  TensorPair pairs[2]{};
  Plan plan;
  plan_write(*cache, *write, options ? options->flags : 0, pairs, &plan);
  return run_plan(plan, tensors, on_device, stream);
}

kvx_status_t gather(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather,
                    const kvx_gather_options_t *given, void *stream) {
  kvx_gather_options_t room;
  const kvx_gather_options_t *const options = grown(given, &room);
  KVX_TRY(validate_gather(cache, gather, options));
  const std::array<Named, 4> tensors = {{{"cache.k", &cache->k},
                                         {"cache.v", &cache->v},
                                         {"gather.io.key", &gather->io.key},
                                         {"gather.io.value", &gather->io.value}}};
  bool on_device;
  KVX_TRY(place(tensors, &on_device));
  if (gather->io.num_tokens == 0) return KVX_STATUS_OK;
  TensorPair pairs[2]{};
  Plan plan;
  plan_gather(*cache, *gather, options ? *options : kvx_gather_options_t{}, pairs, &plan);
  return run_plan(plan, tensors, on_device, stream);
}

kvx_status_t migrate(const kvx_migrate_desc_t *given, void *stream) {
  kvx_view_t src, dst;
  kvx_migrate_desc_t room;
  const kvx_migrate_desc_t *migrate = given;
  if (given && given->size >= sizeof *given) {
    room = *given;
    room.src = grown(given->src, &src);
    room.dst = grown(given->dst, &dst);
    migrate = &room;
  }
  KVX_TRY(validate_migrate(migrate));
  std::vector<Named> tensors;
  for (uint32_t l = 0; l < migrate->src->num_layers; ++l) {
    const kvx_cache_desc_t &src = *migrate->src->layers[l], &dst = *migrate->dst->layers[l];
    tensors.push_back({"src.layers[].k", &src.k});
    tensors.push_back({"src.layers[].v", &src.v});
    tensors.push_back({"dst.layers[].k", &dst.k});
    tensors.push_back({"dst.layers[].v", &dst.v});
  }
  bool on_device;
  KVX_TRY(place(tensors, &on_device));
  std::vector<TensorPair> pairs(size_t{2} * migrate->src->num_layers);
  Plan plan;
  plan_migrate(*migrate, pairs.data(), &plan);
  return run_plan(plan, tensors, on_device, stream);
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

kvx_status_t kvx_device_status(void *stream) {
#if KVX_WITH_CUDA
  if (kvx::cuda::has_device())
    return kvx::guarded([=] { return kvx::cuda::report_status(stream); });
#endif
  static_cast<void>(stream);
  return KVX_STATUS_OK;
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
#if KVX_WITH_CUDA
  info->has_cuda = 1;
#endif
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

kvx_status_t kvx_set_team(kvx_team_t team, uint32_t num_threads) {
  kvx::cpu::set_team(team, num_threads);
  return KVX_STATUS_OK;
}

}  // extern "C"
