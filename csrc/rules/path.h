// The name of a field in errors: `src.layers[3].v`.
#pragma once

#include <cstdint>
#include <cstdio>

#include "error.h"

namespace kvx {

// The path of a field, for errors: built on the stack, formatted only when a check fails.
struct Path {
  const Path *parent;
  const char *name;
  int64_t index = -1;
};

struct Spelled {
  char text[96];
  operator const char *() const { return text; }
};

[[gnu::cold]] inline Spelled spell(const Path &path) {
  Spelled spelled{};
  char *out = spelled.text;
  size_t left = sizeof spelled.text;
  if (path.parent) {
    const int n = std::snprintf(out, left, "%s.", static_cast<const char *>(spell(*path.parent)));
    out += n, left -= static_cast<size_t>(n);
  }
  const int n = std::snprintf(out, left, "%s", path.name);
  out += n, left -= static_cast<size_t>(n);
  if (path.index >= 0) std::snprintf(out, left, "[%lld]", static_cast<ll>(path.index));
  return spelled;
}

}  // namespace kvx

#define KVX_AT(path) static_cast<const char *>(spell(path))
