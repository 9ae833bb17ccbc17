#include "plan/kept.h"

#include "desc/scale.h"

namespace kvx {

template <class T>
T *KeptMigration::keep(const T *given) {
  if (!given) return nullptr;
  T &kept = std::get<std::deque<T>>(structs_).emplace_back(*given);
  kept.size = sizeof kept;
  return &kept;
}

template <class T>
const T *const *KeptMigration::keep(const T *const *given, uint32_t count) {
  if (!given) return nullptr;
  std::vector<const void *> &list = lists_.emplace_back();
  for (uint32_t i = 0; i < count; ++i) list.push_back(keep(given[i]));
  return reinterpret_cast<const T *const *>(list.data());
}

const kvx_plane_t *KeptMigration::keep_plane(const kvx_plane_t &given) {
  kvx_plane_t *plane = keep(&given);
  plane->scale = keep(given.scale);
  plane->zero = keep(given.zero);
  plane->block_table = keep(given.block_table);
  plane->slots = keep(given.slots);
  return plane;
}

kvx_span_t *KeptMigration::keep_span(const kvx_span_t &given) {
  kvx_span_t *span = keep(&given);
  span->layers = keep(given.layers, given.num_layers);
  span->block_table = keep(given.block_table);
  span->slots = keep(given.slots);
  span->starts = keep(given.starts);
  span->k_scales = keep(given.k_scales, given.num_layers);
  span->v_scales = keep(given.v_scales, given.num_layers);
  span->k_zeros = keep(given.k_zeros, given.num_layers);
  span->v_zeros = keep(given.v_zeros, given.num_layers);
  if (given.planes) {
    std::vector<const void *> &planes = lists_.emplace_back();
    for (uint32_t i = 0; i < given.num_planes; ++i) planes.push_back(keep_plane(*given.planes[i]));
    span->planes = reinterpret_cast<const kvx_plane_t *const *>(planes.data());
  }
  return span;
}

KeptMigration::KeptMigration(const kvx_migrate_desc_t &given) : desc_(given) {
  desc_.size = sizeof desc_;
  desc_.seq_lens = keep(given.seq_lens);
  desc_.src = keep_span(*given.src);
  desc_.dst = keep_span(*given.dst);
}

KeptWrite::KeptWrite(const kvx_cache_desc_t &given_cache, const kvx_write_desc_t &given,
                     const kvx_write_options_t *given_options)
    : cache(given_cache), call(given) {
  if (given_options) options = *given_options;
  cache.size = sizeof cache;
  call.size = sizeof call;
  options.size = sizeof options;
}

KeptGather::KeptGather(const kvx_cache_desc_t &given_cache, const kvx_gather_desc_t &given,
                       const kvx_gather_options_t *given_options)
    : cache(given_cache), call(given) {
  if (given_options) options = *given_options;
  cache.size = sizeof cache;
  call.size = sizeof call;
  options.size = sizeof options;
  if (options.k_scale) options.k_scale = &(k_scale = *options.k_scale);
  if (options.v_scale) options.v_scale = &(v_scale = *options.v_scale);
}

bool has_scales(const KeptWrite &write) { return has_scales(write.call); }
bool has_scales(const KeptGather &gather) {
  return gather.options.k_scale || gather.options.v_scale;
}

}  // namespace kvx
