#include "desc/grown.h"

#include <cstring>

namespace kvx {
namespace {

// Until 1.3 the field at reserved_0 was null_block_id: a block id, or negative for none.
template <class Struct>
const Struct *grown_from(uint32_t earlier_size, const Struct *given, Struct *room) {
  if (!given || given->size != earlier_size) return given;
  *room = {};
  std::memcpy(static_cast<void *>(room), static_cast<const void *>(given), earlier_size);
  room->size = sizeof *room;
  const int64_t null_block_id = room->reserved_0;
  room->reserved_0 = 0;
  room->null_block_plus_1 = null_block_id < 0 ? 0 : KVX_NULL_BLOCK(null_block_id);
  return room;
}

}  // namespace

const kvx_gather_options_t *grown(const kvx_gather_options_t *options, kvx_gather_options_t *room) {
  return grown_from(kGatherOptionsSize13, options, room);
}

const kvx_span_t *grown(const kvx_span_t *span, kvx_span_t *room) {
  if (!span || span->size != kSpanSize14) return grown_from(kSpanSize13, span, room);
  *room = {};
  std::memcpy(static_cast<void *>(room), static_cast<const void *>(span), kSpanSize14);
  room->size = sizeof *room;
  return room;
}

}  // namespace kvx
