// Rules of kvx_find_desc_t: those of a migration's source.
#include "desc/span.h"
#include "rules/span.h"
#include "rules/struct.h"
#include "rules/table.h"
#include "rules/validate.h"

namespace kvx {
namespace {

kvx_status_t check_kv(const Path &path, const Path &src, const kvx_find_desc_t &find) {
  const kvx_span_t &span = *find.span;
  KVX_TRY(check_nonzero(src, "num_layers", span.num_layers));
  // A table of pointers is looked up for one layer; other tables serve all layers.
  const bool is_of_one = is_pointers(span);
  const uint32_t most = is_of_one ? span.num_layers - 1 : 0;
  if (find.layer > most) {
    return KVX_INVALID("%s.layer is %u, expected at most %u (spec E.12)", KVX_AT(path), find.layer,
                       most);
  }
  bool has_v = false;
  for (uint32_t l = 0; l < span.num_layers; ++l)
    has_v |= (!is_of_one || l == find.layer) && !is_absent(span.layers[l]->v);
  if (find.is_v <= 1 && (!find.is_v || has_v)) return KVX_STATUS_OK;
  return KVX_INVALID("%s.is_v is %u, expected 0 (K), or 1 where there is a V (spec E.12)",
                     KVX_AT(path), find.is_v);
}

kvx_status_t check_plane(const Path &path, const kvx_find_desc_t &find) {
  if (find.plane_plus_1 > find.span->num_planes) {
    return KVX_INVALID("%s.plane_plus_1 is %u, expected at most num_planes %u (spec E.12)",
                       KVX_AT(path), find.plane_plus_1, find.span->num_planes);
  }
  if (!find.is_v && !find.layer) return KVX_STATUS_OK;
  return KVX_INVALID("%s.%s is %u, expected 0 for places of a plane (spec E.12)", KVX_AT(path),
                     find.is_v ? "is_v" : "layer", find.is_v ? find.is_v : find.layer);
}

}  // namespace

kvx_status_t validate_find(const kvx_find_desc_t *find) {
  const Path path{nullptr, "find"}, migrate{nullptr, "migrate"}, src{nullptr, "src"};
  KVX_TRY(check_struct(path, find));
  const Path lens{&migrate, "seq_lens"};
  if (!find->seq_lens) return KVX_INVALID("%s is NULL", KVX_AT(lens));
  KVX_TRY(check_lens(lens, *find->seq_lens));
  KVX_TRY(check_span(src, find->span));
  if (find->plane_plus_1) {
    KVX_TRY(check_plane(path, *find));
  } else {
    KVX_TRY(check_kv(path, src, *find));
  }
  if (find->place_count && !find->places)
    return KVX_INVALID("%s.places is NULL (spec E.12)", KVX_AT(path));
  return check_rows(src, *find->span, rows_of(as_source(*find)));
}

}  // namespace kvx
