#include "rules/apart_arrays.h"

#include "desc/plane.h"
#include "desc/secondary.h"

namespace kvx {
kvx_status_t fail_array(const Array &array, const Path &written) {
  return KVX_INVALID(
      "%s.%s.%s is %p: its %llu bytes meet %s, which the call writes; pass a copy of the array "
      "(spec 7)",
      array.owner, array.group, array.field, static_cast<const void *>(array.extent.begin),
      static_cast<ull>(array.extent.end - array.extent.begin), KVX_AT(written));
}

kvx_status_t check_arrays_apart(const Path &dst_path, const kvx_migrate_desc_t &migrate,
                                const Extent &written) {
  const kvx_span_t &dst = *migrate.dst;
  const bool finds_scales = migrate.flags & KVX_FLAG_FIND_SCALES;
  if (!finds_scales && !has_secondary(dst)) {  // the usual case: far apart
    bool any = false;
    KVX_TRY(each_array(migrate, [&](const Array &array) {
      any |= meet(array, written);
      return KVX_STATUS_OK;
    }));
    if (!any) return KVX_STATUS_OK;
  }
  const auto check = [&](const Path &path, const Extent &extent) {
    return each_array(migrate,
                      [&](const Array &array) { return check_array_apart(array, path, extent); });
  };
  for (uint32_t l = 0; l < dst.num_layers; ++l) {
    const Path layer{&dst_path, "layers", l}, pool{&layer, "pool"};
    for (const bool is_v : {false, true}) {
      if (is_absent(tensor_of(dst, l, is_v))) continue;
      KVX_TRY(check({&layer, is_v ? "v" : "k"}, extent_of(dst, l, is_v, false)));
      if (has_secondary(dst)) KVX_TRY(check({&pool, "secondary"}, extent_of(dst, l, is_v, true)));
      if (finds_scales) {
        KVX_TRY(check({&dst_path, is_v ? "v_scales" : "k_scales", l},
                      extent_of(*scales_of(dst, l, is_v))));
      }
    }
  }
  for (uint32_t i = 0; i < dst.num_planes; ++i)
    KVX_TRY(check({&dst_path, "planes", i}, extent_of(*dst.planes[i])));
  return KVX_STATUS_OK;
}

}  // namespace kvx
