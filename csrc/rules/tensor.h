// What every tensor obeys: element type, memory, alignment.
#pragma once

#include "formats/format.h"
#include "rules/path.h"
#include "rules/struct.h"

namespace kvx {

const char *name_of(kvx_dtype_t dtype);
kvx_status_t check_element_type(const Path &path, kvx_dtype_t dtype);
kvx_status_t check_memory(const Path &path, kvx_memory_type_t memory);
kvx_status_t check_aligned(const Path &path, const void *data, kvx_dtype_t dtype);

// `one` becomes `other` without loss of meaning: both numbers, or both opaque bytes.
kvx_status_t check_convertible(const Path &path, kvx_dtype_t one, const Path &other_path,
                               kvx_dtype_t other);

}  // namespace kvx
