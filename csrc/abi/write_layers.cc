// kvx_layers.h: validate, plan, run.
#include "plan/write_layers.h"

#include "abi/guarded.h"
#include "abi/prepared.h"
#include "error.h"
#include "kvx/kvx_layers.h"
#include "rules/validate.h"

namespace kvx {
namespace {

kvx_status_t write_layers(const kvx_cache_desc_t *const *caches,
                          const kvx_write_desc_t *const *writes, uint32_t num_layers,
                          const kvx_write_options_t *options, void *stream) {
  KVX_TRY(validate_write_layers(caches, writes, num_layers, options));
  SmallVector<NamedTensor, 4> tensors;
  tensors.reserve(size_t{4} * num_layers);
  for (uint32_t l = 0; l < num_layers; ++l) {
    tensors.push({"caches[].k", &caches[l]->k});
    tensors.push({"caches[].v", &caches[l]->v});
    tensors.push({"writes[].io.key", &writes[l]->io.key});
    tensors.push({"writes[].io.value", &writes[l]->io.value});
  }
  bool on_device;
  KVX_TRY(backend::place(tensors.begin(), tensors.size(), &on_device));
  if (writes[0]->io.num_tokens == 0) return KVX_STATUS_OK;
  Plan plan;
  plan_write_layers(caches, writes, num_layers, options ? options->flags : 0, &plan);
  return backend::run(plan, tensors.begin(), tensors.size(), on_device, stream);
}

}  // namespace
}  // namespace kvx

extern "C" kvx_status_t kvx_write_layers(const kvx_cache_desc_t *const *caches,
                                         const kvx_write_desc_t *const *writes, uint32_t num_layers,
                                         const kvx_write_options_t *options, void *stream) {
  return kvx::guarded(
      [=] { return kvx::write_layers(caches, writes, num_layers, options, stream); });
}
