// Rules of every struct: it is not NULL, its size is at least the one that this library reads, its
// reserved fields are 0 and its flags known.
#pragma once

#include "kvx/kvx_ops.h"
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

// Checks the size of an embedded struct that the call does not use: 0, or that of the struct.
template <class Struct>
inline kvx_status_t check_unused(const Path &path, const Struct &object) {
  if (__builtin_expect(object.size == 0 || object.size >= sizeof(Struct), true))
    return KVX_STATUS_OK;
  return KVX_INVALID("%s.size is %u, expected at least %zu, or 0 if it is not used (spec 3)",
                     KVX_AT(path), object.size, sizeof(Struct));
}

inline kvx_status_t check_nonzero(const Path &path, const char *field, uint32_t value) {
  if (value) return KVX_STATUS_OK;
  return KVX_INVALID("%s.%s is 0, expected at least 1 (spec 7.1)", KVX_AT(path), field);
}

inline kvx_status_t check_reserved_0(const Path &path, int64_t reserved_0) {
  if (reserved_0 == 0) return KVX_STATUS_OK;
  return KVX_INVALID("%s.reserved_0 is %lld, expected 0 (spec E.2)", KVX_AT(path),
                     static_cast<ll>(reserved_0));
}

inline kvx_status_t check_flags(const Path &path, uint32_t flags, uint32_t known) {
  if (flags & ~known) {
    return KVX_INVALID("%s.flags is %#x, expected no bits but those of %#x (spec E.2)",
                       KVX_AT(path), flags, known);
  }
  constexpr uint32_t kBoth = KVX_FLAG_BACKGROUND | KVX_FLAG_COPY_ENGINE;
  if ((flags & kBoth) == kBoth) {
    return KVX_INVALID(
        "%s.flags is %#x, expected BACKGROUND (2) or COPY_ENGINE (4), not both "
        "(spec E.2)",
        KVX_AT(path), flags);
  }
  return KVX_STATUS_OK;
}

}  // namespace kvx
