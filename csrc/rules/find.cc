// Rules of kvx_find_desc_t: those of a migration's source.
#include "desc/span.h"
#include "rules/span.h"
#include "rules/struct.h"
#include "rules/table.h"
#include "rules/validate.h"

namespace kvx {

kvx_status_t validate_find(const kvx_find_desc_t *find) {
  const Path path{nullptr, "find"}, migrate{nullptr, "migrate"}, src{nullptr, "src"};
  KVX_TRY(check_struct(path, find));
  const Path lens{&migrate, "seq_lens"};
  if (!find->seq_lens) return KVX_INVALID("%s is NULL", KVX_AT(lens));
  KVX_TRY(check_lens(lens, *find->seq_lens));
  KVX_TRY(check_span(src, find->span));
  KVX_TRY(check_nonzero(src, "num_layers", find->span->num_layers));
  // A table of pointers is looked up for layer 0; other tables serve all layers.
  const uint32_t asked = is_pointers(*find->span) ? 1 : find->span->num_layers;
  bool has_v = false;
  for (uint32_t l = 0; l < asked; ++l) has_v |= !is_absent(find->span->layers[l]->v);
  if (find->is_v > 1 || (find->is_v && !has_v)) {
    return KVX_INVALID("%s.is_v is %u, expected 0 (K), or 1 where there is a V (spec E.12)",
                       KVX_AT(path), find->is_v);
  }
  if (find->place_count && !find->places)
    return KVX_INVALID("%s.places is NULL (spec E.12)", KVX_AT(path));
  return check_rows(src, *find->span, rows_of(as_source(*find)));
}

}  // namespace kvx
