#include "rules/apart_scales.h"

#include "desc/affine.h"
#include "desc/grid.h"
#include "desc/plane.h"
#include "desc/span.h"

namespace kvx {
namespace {

[[gnu::cold]] kvx_status_t fail_scales(const Path &path, const kvx_scale_desc_t &scales,
                                       const Path &written) {
  return KVX_INVALID(
      "%s.data is %p: it lies among the elements of %s, which the call writes; "
      "pass a copy of the scales (spec 7)",
      KVX_AT(path), scales.data, KVX_AT(written));
}

bool lie_within(const kvx_scale_desc_t &scales, const Extent &written) {
  const Extent read = extent_of(scales);
  return contains(written, read.begin) || contains(written, read.end - 1);
}

// Checks one list of scales against all of the destination. `gapless`: its tensors without gaps.
kvx_status_t check_scales(const Path &path, const kvx_scale_desc_t *scales, const Path &dst_path,
                          const kvx_span_t &dst, const Extents &gapless) {
  if (!scales || !scales->data || !gapless.meet(extent_of(*scales))) return KVX_STATUS_OK;
  for (uint32_t l = 0; l < dst.num_layers; ++l) {
    const Path layer{&dst_path, "layers", l};
    KVX_TRY(check_scales_apart(path, *scales, {&layer, "k"}, dst.layers[l]->k));
    KVX_TRY(check_scales_apart(path, *scales, {&layer, "v"}, dst.layers[l]->v));
  }
  for (uint32_t i = 0; i < dst.num_planes; ++i) {
    const kvx_plane_t &plane = *dst.planes[i];
    if (is_gapless(plane) && lie_within(*scales, extent_of(plane)))
      return fail_scales(path, *scales, {&dst_path, "planes", i});
  }
  return KVX_STATUS_OK;
}

// Checks the scales of one end.
kvx_status_t check_end(const Path &path, const kvx_span_t &span, const Path &dst_path,
                       const kvx_span_t &dst, const Extents &gapless) {
  for (uint32_t l = 0; l < span.num_layers; ++l) {
    KVX_TRY(
        check_scales({&path, "k_scales", l}, scales_of(span, l, false), dst_path, dst, gapless));
    KVX_TRY(check_scales({&path, "v_scales", l}, scales_of(span, l, true), dst_path, dst, gapless));
    KVX_TRY(check_scales({&path, "k_zeros", l}, zeros_of(span, l, false), dst_path, dst, gapless));
    KVX_TRY(check_scales({&path, "v_zeros", l}, zeros_of(span, l, true), dst_path, dst, gapless));
  }
  for (uint32_t i = 0; i < span.num_planes; ++i) {
    const Path plane{&path, "planes", i};
    KVX_TRY(check_scales({&plane, "scale"}, span.planes[i]->scale, dst_path, dst, gapless));
    KVX_TRY(check_scales({&plane, "zero"}, span.planes[i]->zero, dst_path, dst, gapless));
  }
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t check_scales_apart(const Path &path, const kvx_scale_desc_t &scales,
                                const Path &tensor_path, const kvx_tensor_desc_t &tensor) {
  if (!scales.data || is_absent(tensor)) return KVX_STATUS_OK;
  if (!intersect(extent_of(scales), extent_of(tensor)) || !Grid(scales).meets(Grid(tensor)))
    return KVX_STATUS_OK;
  return fail_scales(path, scales, tensor_path);
}

kvx_status_t check_scales_apart(const Path &src_path, const Path &dst_path,
                                const kvx_migrate_desc_t &migrate) {
  const kvx_span_t &src = *migrate.src, &dst = *migrate.dst;
  if (!src.k_scales && !src.v_scales && !dst.k_scales && !dst.v_scales && !src.num_planes)
    return KVX_STATUS_OK;
  Extents gapless;
  for (uint32_t l = 0; l < dst.num_layers; ++l) {
    for (const bool is_v : {false, true}) {
      const kvx_tensor_desc_t &tensor = tensor_of(dst, l, is_v);
      if (!is_absent(tensor) && is_gapless(tensor)) gapless.add(extent_of(tensor));
    }
  }
  for (uint32_t i = 0; i < dst.num_planes; ++i)
    if (is_gapless(*dst.planes[i])) gapless.add(extent_of(*dst.planes[i]));
  gapless.sort();
  KVX_TRY(check_end(src_path, src, dst_path, dst, gapless));
  return check_end(dst_path, dst, dst_path, dst, gapless);
}

}  // namespace kvx
