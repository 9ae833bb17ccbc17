#include "rules/apart_scales.h"

#include "desc/extents.h"
#include "desc/view.h"

namespace kvx {
namespace {

// The scales of one end. `gapless`: the destination's tensors without gaps.
kvx_status_t check_end(const Path &path, const kvx_view_t &view, const Path &dst_path,
                       const kvx_view_t &dst, const Extents &gapless) {
  for (uint32_t l = 0; l < view.num_layers; ++l) {
    for (const bool is_v : {false, true}) {
      const kvx_scale_desc_t *const scales = scales_of(view, l, is_v);
      if (!scales || !scales->data || !gapless.meet(extent_of(*scales))) continue;
      const Path scale{&path, is_v ? "v_scales" : "k_scales", l};
      for (uint32_t m = 0; m < dst.num_layers; ++m) {
        const Path layer{&dst_path, "layers", m};
        KVX_TRY(check_scales_apart(scale, *scales, {&layer, "k"}, dst.layers[m]->k));
        KVX_TRY(check_scales_apart(scale, *scales, {&layer, "v"}, dst.layers[m]->v));
      }
    }
  }
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t check_scales_apart(const Path &path, const kvx_scale_desc_t &scales,
                                const Path &tensor_path, const kvx_tensor_desc_t &tensor) {
  if (!scales.data || is_absent(tensor)) return KVX_STATUS_OK;
  const Extent written = extent_of(tensor), read = extent_of(scales);
  if (!contains(written, read.begin) && !contains(written, read.end - 1)) return KVX_STATUS_OK;
  if (!is_gapless(tensor)) return KVX_STATUS_OK;
  return KVX_INVALID(
      "%s.data is %p: it lies among the elements of %s, which the call writes; "
      "pass a copy of the scales (spec 7)",
      KVX_AT(path), scales.data, KVX_AT(tensor_path));
}

kvx_status_t check_scales_apart(const Path &src_path, const Path &dst_path,
                                const kvx_migrate_desc_t &migrate) {
  const kvx_view_t &src = *migrate.src, &dst = *migrate.dst;
  if (!src.k_scales && !src.v_scales && !dst.k_scales && !dst.v_scales) return KVX_STATUS_OK;
  Extents gapless;
  for (uint32_t l = 0; l < dst.num_layers; ++l) {
    for (const bool is_v : {false, true}) {
      const kvx_tensor_desc_t &tensor = tensor_of(dst, l, is_v);
      if (!is_absent(tensor) && is_gapless(tensor)) gapless.add(extent_of(tensor));
    }
  }
  gapless.sort();
  KVX_TRY(check_end(src_path, src, dst_path, dst, gapless));
  return check_end(dst_path, dst, dst_path, dst, gapless);
}

}  // namespace kvx
