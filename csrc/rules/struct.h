// What every struct obeys: it is there, and it is as large as this library reads it.
#pragma once

#include "rules/path.h"

namespace kvx {

template <class Struct>
inline kvx_status_t check_struct(const Path &path, const Struct *object) {
  if (!object) return KVX_INVALID("%s is NULL", KVX_AT(path));
  if (object->size < sizeof(Struct)) {
    return KVX_INVALID("%s.size is %u, expected at least %zu (spec 6)", KVX_AT(path), object->size,
                       sizeof(Struct));
  }
  return KVX_STATUS_OK;
}

}  // namespace kvx
