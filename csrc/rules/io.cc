#include "rules/io.h"

#include "rules/affine.h"
#include "rules/format.h"
#include "rules/struct.h"
#include "rules/tensor.h"

namespace kvx {
namespace {

// The two axes before an output's heads, if it has two.
struct Output {
  uint32_t rows, max_seq_len;
};

// Checks key or value. `output`: NULL for a write; `head_dim`: that of the cache's K or V.
kvx_status_t check_tensor(const Path &path, const kvx_kv_io_desc_t &io,
                          const kvx_tensor_desc_t &tensor, int64_t head_dim, const Output *output) {
  KVX_TRY(check_struct(path, &tensor));
  KVX_TRY(check_element_type(path, tensor.dtype));
  KVX_TRY(check_no_zeros(path, tensor.dtype));
  KVX_TRY(check_memory(path, tensor.memory));
  if (tensor.ndim != 3 && !(tensor.ndim == 4 && output)) {
    return KVX_INVALID("%s.ndim is %u, expected 3%s (spec 6.8)", KVX_AT(path), tensor.ndim,
                       output ? " or 4" : "");
  }
  if (tensor.ndim == 4) {
    KVX_TRY(check_shape(path, tensor, 0, output->rows, "seq_count * beam_width", "spec 6.10"));
    KVX_TRY(check_shape(path, tensor, 1, output->max_seq_len, "max_seq_len", "spec 6.10"));
  } else if (output) {
    KVX_TRY(check_shape(path, tensor, 0, io.num_tokens, "num_tokens", "spec 6.8"));
  } else if (tensor.shape[0] < io.num_tokens) {
    return KVX_INVALID("%s.shape[0] is %lld, expected at least num_tokens %u (spec 6.8)",
                       KVX_AT(path), static_cast<ll>(tensor.shape[0]), io.num_tokens);
  }
  const int head_axis = static_cast<int>(tensor.ndim) - 2;
  KVX_TRY(check_shape(path, tensor, head_axis, io.num_kv_heads, "num_kv_heads", "spec 6.8"));
  KVX_TRY(check_whole_units(path, tensor.dtype, head_dim));
  KVX_TRY(check_shape(path, tensor, head_axis + 1, units_of(tensor.dtype, head_dim),
                      dim_name(tensor.dtype), "spec 6.8"));
  int64_t extent;
  KVX_TRY(check_strides(path, tensor.ndim, tensor.shape, tensor.stride, tensor.dtype, &extent));
  if (output) KVX_TRY(check_disjoint(path, tensor.ndim, tensor.shape, tensor.stride));
  return io.num_tokens ? check_data_pointer(path, tensor, extent) : KVX_STATUS_OK;
}

kvx_status_t check_io(const Path &path, const kvx_cache_desc_t &cache, const kvx_kv_io_desc_t &io,
                      const Output *output) {
  KVX_TRY(check_struct(path, &io));
  if (io.num_kv_heads != cache.num_kv_heads) {
    return KVX_INVALID("%s.num_kv_heads is %u, expected cache.num_kv_heads %u (spec 7)",
                       KVX_AT(path), io.num_kv_heads, cache.num_kv_heads);
  }
  if (io.head_dim != cache.head_dim) {
    return KVX_INVALID("%s.head_dim is %u, expected cache.head_dim %u (spec 7)", KVX_AT(path),
                       io.head_dim, cache.head_dim);
  }
  const Path key{&path, "key"}, value{&path, "value"};
  const Path cache_path{nullptr, "cache"}, k{&cache_path, "k"}, v{&cache_path, "v"};
  KVX_TRY(check_no_zeros(k, cache.k.dtype));
  KVX_TRY(check_no_zeros(v, cache.v.dtype));
  KVX_TRY(check_tensor(key, io, io.key, cache.head_dim, output));
  KVX_TRY(check_convertible(key, io.key.dtype, k, cache.k.dtype));
  if (is_absent(cache.v)) {
    if (is_absent(io.value)) return check_unused(value, io.value);
    return KVX_INVALID("%s is given, but cache.v is absent (spec E.1)", KVX_AT(value));
  }
  const int64_t v_dim = dim_of(cache.v);
  if (io.num_tokens && v_dim == cache.head_dim && have_same_form(io.key, io.value)) {
    KVX_TRY(check_data_pointer(value, io.value, extent_elements(io.value)));
  } else {
    KVX_TRY(check_tensor(value, io, io.value, v_dim, output));
  }
  return check_convertible(value, io.value.dtype, v, cache.v.dtype);
}

}  // namespace

kvx_status_t check_input(const Path &path, const kvx_cache_desc_t &cache,
                         const kvx_kv_io_desc_t &io) {
  return check_io(path, cache, io, nullptr);
}

kvx_status_t check_output(const Path &path, const kvx_cache_desc_t &cache,
                          const kvx_kv_io_desc_t &io, uint32_t rows, uint32_t max_seq_len) {
  const Output output{rows, max_seq_len};
  return check_io(path, cache, io, &output);
}

kvx_status_t fail_opaque(const Path &path, kvx_dtype_t one, const Path &other_path,
                         kvx_dtype_t other) {
  return KVX_INVALID(
      "%s.dtype is %s, but %s.dtype is %s: U8 holds opaque bytes and is never converted (spec E.5)",
      KVX_AT(path), name_of(one), KVX_AT(other_path), name_of(other));
}

}  // namespace kvx
