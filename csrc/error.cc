#include "error.h"

#include <cstdarg>
#include <cstdio>

namespace kvx {
namespace {

thread_local char sentence[512] = "";

}  // namespace

kvx_status_t fail(kvx_status_t status, const char *format, ...) {
  va_list args;
  va_start(args, format);
  std::vsnprintf(sentence, sizeof sentence, format, args);
  va_end(args);
  return status;
}

const char *last_error() { return sentence; }

}  // namespace kvx
