#include "rules/write.h"

#include <initializer_list>

#include "desc/scale.h"
#include "rules/apart.h"
#include "rules/cache.h"
#include "rules/io.h"
#include "rules/scales.h"
#include "rules/struct.h"
#include "rules/table.h"
#include "rules/validate.h"

namespace kvx {
namespace {

// Checks the scales of K or V: a descriptor or, if that is empty, a pointer to one F32.
kvx_status_t check_write_scales(const Path &cache_path, const kvx_cache_desc_t &cache,
                                const Path &path, const kvx_write_desc_t &write, bool is_v,
                                bool finds_scales) {
  const Path tensor_path{&cache_path, is_v ? "v" : "k"};
  const kvx_tensor_desc_t &tensor = is_v ? cache.v : cache.k;
  const kvx_scale_desc_t &desc = is_v ? write.v_scale_desc : write.k_scale_desc;
  const Path desc_path{&path, is_v ? "v_scale_desc" : "k_scale_desc"};
  if (!desc.data) KVX_TRY(check_unused(desc_path, desc));
  if (desc.data || (is_v ? write.v_scale : write.k_scale)) {
    KVX_TRY(check_scales({&path, name_of_scales(write, is_v)}, scales_of(write, is_v), cache,
                         tensor, tensor_path));
  }
  if (!finds_scales) return KVX_STATUS_OK;
  return check_found_scales(desc_path, &desc, tensor_path, tensor);
}

}  // namespace

kvx_status_t check_write_options(const kvx_write_options_t *options, uint32_t *flags) {
  const Path path{nullptr, "options"};
  *flags = 0;
  if (!options) return KVX_STATUS_OK;
  KVX_TRY(check_struct(path, options));
  *flags = options->flags;
  return check_flags(
      path, *flags,
      KVX_FLAG_BACKGROUND | KVX_FLAG_COPY_ENGINE | KVX_FLAG_FIND_SCALES | KVX_FLAG_OWNER_MASK);
}

kvx_status_t check_write(const Path &cache_path, const kvx_cache_desc_t &cache, const Path &path,
                         const kvx_write_desc_t *write, const char *owner, uint32_t flags) {
  KVX_TRY(check_struct(path, write));
  KVX_TRY(check_input({&path, "io"}, cache, write->io));
  const Path slots{&path, "slots"};
  KVX_TRY(check_slots(slots, write->slots));
  if (write->slots.token_count != write->io.num_tokens) {
    return KVX_INVALID("%s.token_count is %u, expected io.num_tokens %u (spec 6.4)", KVX_AT(slots),
                       write->slots.token_count, write->io.num_tokens);
  }
  const bool finds_scales = flags & KVX_FLAG_FIND_SCALES;
  for (const bool is_v : {false, true})
    KVX_TRY(check_write_scales(cache_path, cache, path, *write, is_v, finds_scales));
  return check_apart(cache_path, cache, path, *write, owner, finds_scales);
}

kvx_status_t validate_write(const kvx_cache_desc_t *cache, const kvx_write_desc_t *write,
                            const kvx_write_options_t *options) {
  const Path cache_path{nullptr, "cache"}, path{nullptr, "write"};
  KVX_TRY(check_cache(cache_path, cache));
  uint32_t flags;
  KVX_TRY(check_write_options(options, &flags));
  return check_write(cache_path, *cache, path, write, path.name, flags);
}

}  // namespace kvx
