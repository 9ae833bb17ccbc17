#include "rules/validate.h"

#include <algorithm>

#include "desc/memory.h"
#include "desc/scale.h"
#include "desc/view.h"
#include "error.h"
#include "rules/apart.h"
#include "rules/path.h"
#include "rules/plane.h"
#include "rules/scale.h"
#include "rules/struct.h"
#include "rules/table.h"
#include "rules/tensor.h"

namespace kvx {
namespace {

using std::int64_t;
using std::uint64_t;

}  // namespace

const char *name_of(kvx_dtype_t dtype) {
  switch (dtype) {
    case KVX_DTYPE_F16:
      return "F16";
    case KVX_DTYPE_BF16:
      return "BF16";
    case KVX_DTYPE_F32:
      return "F32";
    case KVX_DTYPE_F8_E4M3:
      return "F8_E4M3";
    case KVX_DTYPE_F8_E5M2:
      return "F8_E5M2";
    case KVX_DTYPE_S32:
      return "S32";
    case KVX_DTYPE_S64:
      return "S64";
    case KVX_DTYPE_U32:
      return "U32";
    case KVX_DTYPE_U64:
      return "U64";
    case KVX_DTYPE_U8:
      return "U8";
    default:
      return "no kvx_dtype_t";
  }
}

namespace {

const char *section_of(kvx_layout_t layout) {
  switch (layout) {
    case KVX_LAYOUT_BLOCK_NHD:
      return "BLOCK_NHD, spec 4.2";
    case KVX_LAYOUT_BLOCK_HND:
      return "BLOCK_HND, spec 4.2";
    case KVX_LAYOUT_BLOCK_HND_PACKED:
      return "BLOCK_HND_PACKED, spec 4.2";
    default:
      return "BLOCK_CUSTOM, spec 4.2";
  }
}

// A field that must be zero: another version of the struct has a meaning for it.
kvx_status_t check_reserved(const Path &path, int64_t reserved_0) {
  if (reserved_0 == 0) return KVX_STATUS_OK;
  return KVX_INVALID(
      "%s.reserved_0 is %lld, expected 0: it was null_block_id until ABI 1.3; set "
      "null_block_plus_1 to KVX_NULL_BLOCK(id) (spec E.2)",
      KVX_AT(path), static_cast<ll>(reserved_0));
}

kvx_status_t check_nonzero(const Path &path, const char *field, uint32_t value) {
  if (value) return KVX_STATUS_OK;
  return KVX_INVALID("%s.%s is 0, expected at least 1 (spec 7.1)", KVX_AT(path), field);
}

}  // namespace

// Data that holds numbers: elements of the cache and of IO tensors.
kvx_status_t check_element_type(const Path &path, kvx_dtype_t dtype) {
  const bool known = dtype == KVX_DTYPE_F16 || dtype == KVX_DTYPE_BF16 || dtype == KVX_DTYPE_F32 ||
                     is_fp8(dtype) || dtype == KVX_DTYPE_U8;
  if (known) return KVX_STATUS_OK;
  return KVX_INVALID(
      "%s.dtype is %d (%s), expected F16, BF16, F32, F8_E4M3, F8_E5M2 or U8 (spec 4.3)",
      KVX_AT(path), dtype, name_of(dtype));
}

namespace {

kvx_status_t check_index_type(const Path &path, const char *field, kvx_dtype_t dtype,
                              const char *section) {
  if (dtype == KVX_DTYPE_S32 || dtype == KVX_DTYPE_S64) return KVX_STATUS_OK;
  return KVX_INVALID("%s.%s is %d (%s), expected S32 or S64 (spec %s)", KVX_AT(path), field, dtype,
                     name_of(dtype), section);
}

}  // namespace

kvx_status_t check_memory(const Path &path, kvx_memory_type_t memory) {
  if (memory == KVX_MEMORY_HOST || memory == KVX_MEMORY_DEVICE || memory == KVX_MEMORY_UNIFIED)
    return KVX_STATUS_OK;
  return KVX_INVALID("%s.memory is %d, expected HOST (1), DEVICE (2) or UNIFIED (3) (spec 4.3)",
                     KVX_AT(path), memory);
}

namespace {

// Sizes are powers of two.
bool is_aligned(uintptr_t address, kvx_dtype_t dtype) {
  return (address & (static_cast<uintptr_t>(size_of(dtype)) - 1)) == 0;
}

bool is_aligned(const void *data, kvx_dtype_t dtype) {
  return is_aligned(reinterpret_cast<uintptr_t>(data), dtype);
}

kvx_status_t check_indices(const Path &path, const char *field, const void *data,
                           kvx_dtype_t dtype) {
  if (!data) return KVX_INVALID("%s.%s is NULL", KVX_AT(path), field);
  if (!is_aligned(data, dtype)) {
    return KVX_INVALID("%s.%s is %p, expected a multiple of %lld bytes (%s)", KVX_AT(path), field,
                       data, static_cast<ll>(size_of(dtype)), name_of(dtype));
  }
  return KVX_STATUS_OK;
}

// The address space does not end within the tensor.
kvx_status_t check_reach(const Path &path, const kvx_tensor_desc_t &tensor) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data);
  const auto bytes = static_cast<uintptr_t>(extent_bytes(tensor));
  if (begin <= UINTPTR_MAX - bytes) return KVX_STATUS_OK;
  return KVX_INVALID("%s.data is %p: its %llu bytes reach past the end of memory (spec 4.2)",
                     KVX_AT(path), tensor.data, static_cast<ull>(bytes));
}

}  // namespace

kvx_status_t check_aligned(const Path &path, const void *data, kvx_dtype_t dtype) {
  if (is_aligned(data, dtype)) return KVX_STATUS_OK;
  return fail(KVX_STATUS_UNSUPPORTED,
              "%s.data is %p, expected a multiple of %lld bytes (%s, spec 4.4)", KVX_AT(path), data,
              static_cast<ll>(size_of(dtype)), name_of(dtype));
}

namespace {

kvx_status_t check_shape(const Path &path, const kvx_tensor_desc_t &tensor, int axis,
                         int64_t expected, const char *meaning, const char *section) {
  if (tensor.shape[axis] == expected) return KVX_STATUS_OK;
  return KVX_INVALID("%s.shape[%d] is %lld, expected %s %lld (%s)", KVX_AT(path), axis,
                     static_cast<ll>(tensor.shape[axis]), meaning, static_cast<ll>(expected),
                     section);
}

// Strides are not negative and the whole tensor stays addressable in 64 bit.
kvx_status_t check_strides(const Path &path, uint32_t ndim, const int64_t *shape,
                           const int64_t *stride, kvx_dtype_t dtype) {
  const int64_t most = (int64_t{1} << 62) / size_of(dtype);
  int64_t extent = 1;
  for (uint32_t axis = 0; axis < ndim; ++axis) {
    if (stride[axis] < 0) {
      return KVX_INVALID("%s.stride[%u] is %lld, expected at least 0 (spec 4.2)", KVX_AT(path),
                         axis, static_cast<ll>(stride[axis]));
    }
    int64_t reach;
    if (shape[axis] > 0 && (__builtin_mul_overflow(shape[axis] - 1, stride[axis], &reach) ||
                            __builtin_add_overflow(extent, reach, &extent) || extent > most)) {
      return KVX_INVALID(
          "%s.stride[%u] is %lld: with shape[%u] %lld the tensor reaches past 2^62 bytes (spec "
          "4.2)",
          KVX_AT(path), axis, static_cast<ll>(stride[axis]), axis, static_cast<ll>(shape[axis]));
    }
  }
  return KVX_STATUS_OK;
}

// No two elements share memory. Sufficient, and met by every order of axes with any padding: seen
// from the smallest stride up, each stride steps over all that lies below it.
template <class Desc>
kvx_status_t check_disjoint(const Path &path, const Desc &tensor) {
  uint32_t order[KVX_MAX_TENSOR_DIMS], n = 0;
  for (uint32_t axis = tensor.ndim; axis-- > 0;) {  // the last axis is mostly the smallest
    if (tensor.shape[axis] == 0) return KVX_STATUS_OK;
    if (tensor.shape[axis] == 1) continue;
    uint32_t at = n++;
    for (; at > 0 && tensor.stride[order[at - 1]] >= tensor.stride[axis]; --at)
      order[at] = order[at - 1];
    order[at] = axis;
  }
  int64_t extent = 1;
  for (uint32_t i = 0; i < n; ++i) {
    const uint32_t axis = order[i];
    if (tensor.stride[axis] < extent) {
      return KVX_INVALID(
          "%s.stride[%u] is %lld, expected at least %lld: elements overlap (spec 4.2)",
          KVX_AT(path), axis, static_cast<ll>(tensor.stride[axis]), static_cast<ll>(extent));
    }
    extent += (tensor.shape[axis] - 1) * tensor.stride[axis];
  }
  return KVX_STATUS_OK;
}

// Size, dtype, memory and what follows from the layout alone: ndim and the packed axis.
kvx_status_t check_cache_layout(const Path &path, const kvx_tensor_desc_t &tensor) {
  KVX_TRY(check_struct(path, &tensor));
  KVX_TRY(check_element_type(path, tensor.dtype));
  uint32_t ndim = 4;
  switch (tensor.layout) {
    case KVX_LAYOUT_BLOCK_NHD:
    case KVX_LAYOUT_BLOCK_HND:
      break;
    case KVX_LAYOUT_BLOCK_HND_PACKED:
      ndim = 5;
      break;
    case KVX_LAYOUT_BLOCK_CUSTOM:
      if (tensor.ndim == 5) ndim = 5;
      break;
    default:
      return KVX_INVALID(
          "%s.layout is %d, expected BLOCK_NHD (1), BLOCK_HND (2), BLOCK_HND_PACKED (3) or "
          "BLOCK_CUSTOM (15) (spec 4.2)",
          KVX_AT(path), tensor.layout);
  }
  KVX_TRY(check_memory(path, tensor.memory));
  if (tensor.ndim != ndim) {
    return KVX_INVALID("%s.ndim is %u, expected %u (%s)", KVX_AT(path), tensor.ndim, ndim,
                       section_of(tensor.layout));
  }
  return KVX_STATUS_OK;
}

// `head_dim` is that of this tensor, or 0 to take it from the shape (V may differ from K).
kvx_status_t check_cache_tensor(const Path &path, const kvx_cache_desc_t &cache,
                                const kvx_tensor_desc_t &tensor, int64_t head_dim) {
  KVX_TRY(check_cache_layout(path, tensor));
  const Axes axes = axes_of(tensor);
  const char *section = section_of(tensor.layout);
  KVX_TRY(check_shape(path, tensor, axes.block, cache.num_blocks, "num_blocks", section));
  KVX_TRY(check_shape(path, tensor, axes.token, cache.block_size, "block_size", section));
  KVX_TRY(check_shape(path, tensor, axes.head, cache.num_kv_heads, "num_kv_heads", section));
  if (tensor.shape[axes.inner] < 1 || (axes.outer >= 0 && tensor.shape[axes.outer] < 1)) {
    const int axis = tensor.shape[axes.inner] < 1 ? axes.inner : axes.outer;
    return KVX_INVALID("%s.shape[%d] is %lld, expected at least 1 (%s)", KVX_AT(path), axis,
                       static_cast<ll>(tensor.shape[axis]), section);
  }
  if (axes.outer < 0) {
    if (head_dim) KVX_TRY(check_shape(path, tensor, axes.inner, head_dim, "head_dim", section));
  } else if (head_dim) {
    const int64_t pack = tensor.shape[axes.inner];
    if (head_dim % pack != 0) {
      return KVX_INVALID("%s.shape[%d] (pack) is %lld, expected a divisor of head_dim %lld (%s)",
                         KVX_AT(path), axes.inner, static_cast<ll>(pack), static_cast<ll>(head_dim),
                         section);
    }
    KVX_TRY(check_shape(path, tensor, axes.outer, head_dim / pack, "head_dim / pack", section));
  }
  int64_t dim;
  if (__builtin_mul_overflow(tensor.shape[axes.inner],
                             axes.outer < 0 ? 1 : tensor.shape[axes.outer], &dim) ||
      dim > INT32_MAX) {
    return KVX_INVALID("%s.shape gives a head_dim past 2^31 (%s)", KVX_AT(path), section);
  }
  KVX_TRY(check_strides(path, tensor.ndim, tensor.shape, tensor.stride, tensor.dtype));
  KVX_TRY(check_disjoint(path, tensor));
  if (!tensor.data) return KVX_INVALID("%s.data is NULL (spec 6.2)", KVX_AT(path));
  KVX_TRY(check_reach(path, tensor));
  return check_aligned(path, tensor.data, tensor.dtype);
}

kvx_status_t check_cache(const Path &path, const kvx_cache_desc_t *cache) {
  KVX_TRY(check_struct(path, cache));
  KVX_TRY(check_nonzero(path, "num_blocks", cache->num_blocks));
  KVX_TRY(check_nonzero(path, "block_size", cache->block_size));
  KVX_TRY(check_nonzero(path, "num_kv_heads", cache->num_kv_heads));
  KVX_TRY(check_nonzero(path, "head_dim", cache->head_dim));
  KVX_TRY(check_cache_tensor({&path, "k"}, *cache, cache->k, cache->head_dim));
  if (is_absent(cache->v)) return KVX_STATUS_OK;
  return check_cache_tensor({&path, "v"}, *cache, cache->v, 0);
}

// One K or V tensor seen through a pool: its strides and base must be those of the sub-blocks.
kvx_status_t check_pool_tensor(const Path &path, const kvx_tensor_desc_t &tensor,
                               const kvx_cache_desc_t &cache) {
  const int64_t size = size_of(tensor.dtype), bytes_per_block = cache.pool.bytes_per_block;
  const Axes axes = axes_of(tensor);
  int64_t extent = 1;
  for (uint32_t axis = 0; axis < tensor.ndim; ++axis) {
    if (static_cast<int>(axis) != axes.block)
      extent += (tensor.shape[axis] - 1) * tensor.stride[axis];
  }
  if (extent * size > bytes_per_block) {
    return KVX_INVALID(
        "%s has blocks of %lld bytes, expected at most pool.bytes_per_block %lld (spec 6.7)",
        KVX_AT(path), static_cast<ll>(extent * size), static_cast<ll>(bytes_per_block));
  }
  int64_t block_stride;
  if (__builtin_mul_overflow(tensor.stride[axes.block], size, &block_stride)) block_stride = 0;
  if (block_stride == 0 || block_stride % bytes_per_block != 0 ||
      block_stride / bytes_per_block > INT32_MAX) {
    return KVX_INVALID(
        "%s.stride[%d] is %lld (x %lld bytes), expected a multiple of pool.bytes_per_block %lld "
        "(spec E.8)",
        KVX_AT(path), axes.block, static_cast<ll>(tensor.stride[axes.block]), static_cast<ll>(size),
        static_cast<ll>(bytes_per_block));
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_pool(const Path &path, const kvx_cache_desc_t &cache) {
  const Path pool{&path, "pool"};
  KVX_TRY(check_struct(pool, &cache.pool));
  if (cache.block_size & (cache.block_size - 1)) {
    return KVX_INVALID("%s.block_size is %u, expected a power of two for KV_OFFSETS (spec 5.1)",
                       KVX_AT(path), cache.block_size);
  }
  KVX_TRY(check_memory(pool, cache.pool.memory));
  if (!cache.pool.primary) return KVX_INVALID("%s.primary is NULL (spec 6.7)", KVX_AT(pool));
  KVX_TRY(check_nonzero(pool, "bytes_per_block", cache.pool.bytes_per_block));
  if (cache.k.data != cache.pool.primary) {
    return KVX_INVALID("%s.k.data is %p, expected pool.primary %p (spec E.8)", KVX_AT(path),
                       cache.k.data, cache.pool.primary);
  }
  KVX_TRY(check_pool_tensor({&path, "k"}, cache.k, cache));
  for (const kvx_tensor_desc_t *tensor : {&cache.k, &cache.v}) {
    if (is_absent(*tensor)) continue;
    const uintptr_t offset =
        reinterpret_cast<uintptr_t>(tensor->data) - reinterpret_cast<uintptr_t>(cache.k.data);
    const uintptr_t address = reinterpret_cast<uintptr_t>(cache.pool.secondary) + offset;
    if (cache.pool.secondary && !is_aligned(address, tensor->dtype)) {
      return fail(KVX_STATUS_UNSUPPORTED,
                  "%s.secondary is %p, expected a multiple of %lld bytes (%s, spec 4.4)",
                  KVX_AT(pool), cache.pool.secondary, static_cast<ll>(size_of(tensor->dtype)),
                  name_of(tensor->dtype));
    }
  }
  if (is_absent(cache.v)) return KVX_STATUS_OK;
  KVX_TRY(check_pool_tensor({&path, "v"}, cache.v, cache));
  const int64_t k_step = cache.k.stride[axes_of(cache.k).block] * size_of(cache.k.dtype);
  const int64_t v_step = cache.v.stride[axes_of(cache.v).block] * size_of(cache.v.dtype);
  if (v_step != k_step) {
    return KVX_INVALID("%s.v steps %lld bytes per block, expected that of k, %lld (spec E.8)",
                       KVX_AT(path), static_cast<ll>(v_step), static_cast<ll>(k_step));
  }
  const int64_t apart = static_cast<int64_t>(reinterpret_cast<uintptr_t>(cache.v.data) -
                                             reinterpret_cast<uintptr_t>(cache.k.data));
  if (apart < 0 || apart >= k_step || apart % cache.pool.bytes_per_block != 0) {
    return KVX_INVALID(
        "%s.v.data is %lld bytes past k.data, expected a multiple of pool.bytes_per_block %u below "
        "the block's %lld bytes (spec E.8)",
        KVX_AT(path), static_cast<ll>(apart), cache.pool.bytes_per_block, static_cast<ll>(k_step));
  }
  return KVX_STATUS_OK;
}

}  // namespace

// Scales of one K or V tensor: `desc` is used when its data is set.
kvx_status_t check_scales(const Path &path, const kvx_scale_desc_t &desc,
                          const kvx_cache_desc_t &cache, const kvx_tensor_desc_t &tensor,
                          const Path &tensor_path) {
  if (!desc.data) return KVX_STATUS_OK;
  KVX_TRY(check_struct(path, &desc));
  if (is_absent(tensor)) {
    return KVX_INVALID("%s is given, but %s is absent (spec E.1)", KVX_AT(path),
                       KVX_AT(tensor_path));
  }
  if (desc.dtype != KVX_DTYPE_F32 && desc.dtype != KVX_DTYPE_F16 && desc.dtype != KVX_DTYPE_BF16) {
    return KVX_INVALID("%s.dtype is %d (%s), expected F32, F16 or BF16 (spec 6.6)", KVX_AT(path),
                       desc.dtype, name_of(desc.dtype));
  }
  const int64_t blocks = cache.num_blocks, tokens = cache.block_size, heads = cache.num_kv_heads;
  int64_t expected[3];
  uint32_t ndim;
  switch (desc.granularity) {
    case KVX_SCALE_PER_TENSOR:
      ndim = 0;
      break;
    case KVX_SCALE_PER_BLOCK:
      ndim = 1, expected[0] = blocks;
      break;
    case KVX_SCALE_PER_HEAD:
      ndim = 1, expected[0] = heads;
      break;
    case KVX_SCALE_PER_BLOCK_HEAD:
      ndim = 2, expected[0] = blocks, expected[1] = heads;
      break;
    case KVX_SCALE_PER_TOKEN_HEAD:
      ndim = 3, expected[0] = blocks, expected[1] = tokens, expected[2] = heads;
      break;
    default:
      return KVX_INVALID(
          "%s.granularity is %d, expected PER_TENSOR (1), PER_BLOCK (2), PER_HEAD (3), "
          "PER_BLOCK_HEAD (4) or PER_TOKEN_HEAD (16) (spec 6.6)",
          KVX_AT(path), desc.granularity);
  }
  if (desc.granularity == KVX_SCALE_PER_TENSOR) {
    if (desc.ndim > KVX_MAX_TENSOR_DIMS) {
      return KVX_INVALID("%s.ndim is %u, expected at most %d (spec 6.6)", KVX_AT(path), desc.ndim,
                         KVX_MAX_TENSOR_DIMS);
    }
    for (uint32_t axis = 0; axis < desc.ndim; ++axis) {
      if (desc.shape[axis] != 1) {
        return KVX_INVALID("%s.shape[%u] is %lld, expected 1 (PER_TENSOR, spec 6.6)", KVX_AT(path),
                           axis, static_cast<ll>(desc.shape[axis]));
      }
    }
  } else {
    if (desc.ndim != ndim) {
      return KVX_INVALID("%s.ndim is %u, expected %u for granularity %d (spec 6.6)", KVX_AT(path),
                         desc.ndim, ndim, desc.granularity);
    }
    for (uint32_t axis = 0; axis < ndim; ++axis) {
      if (desc.shape[axis] != expected[axis]) {
        return KVX_INVALID("%s.shape[%u] is %lld, expected %lld for granularity %d (spec 6.6)",
                           KVX_AT(path), axis, static_cast<ll>(desc.shape[axis]),
                           static_cast<ll>(expected[axis]), desc.granularity);
      }
    }
    KVX_TRY(check_strides(path, ndim, desc.shape, desc.stride, desc.dtype));
  }
  KVX_TRY(check_aligned(path, desc.data, desc.dtype));
  const bool readable = is_readable(tensor.memory);
  if (!is_fp8(tensor.dtype)) {
    const bool one = desc.granularity == KVX_SCALE_PER_TENSOR &&
                     (!readable || read_scale(desc.data, desc.dtype) == 1.0f);
    if (one) return KVX_STATUS_OK;
    return KVX_INVALID(
        "%s is given, but %s.dtype is %s: scales apply to FP8 caches; pass no scale, or 1.0 per "
        "tensor (spec E.6)",
        KVX_AT(path), KVX_AT(tensor_path), name_of(tensor.dtype));
  }
  if (readable && desc.granularity == KVX_SCALE_PER_TENSOR) {
    const float scale = read_scale(desc.data, desc.dtype);
    if (!is_usable_scale(scale)) {
      return KVX_INVALID("%s is %g, expected a finite scale above 0 (spec E.6)", KVX_AT(path),
                         static_cast<double>(scale));
    }
  }
  return KVX_STATUS_OK;
}

namespace {

bool varies_by_block(const kvx_scale_desc_t &desc) {
  return desc.data && desc.granularity != KVX_SCALE_PER_TENSOR &&
         desc.granularity != KVX_SCALE_PER_HEAD;
}

kvx_status_t check_secondary_scales(const Path &path, const kvx_cache_desc_t &cache,
                                    const kvx_scale_desc_t &desc) {
  if (!cache.pool.secondary || !varies_by_block(desc)) return KVX_STATUS_OK;
  return fail(
      KVX_STATUS_UNSUPPORTED,
      "%s varies by block, but the pool has a secondary pool whose blocks it cannot number; "
      "use PER_TENSOR or PER_HEAD (spec E.8)",
      KVX_AT(path));
}

}  // namespace

// `one` becomes `other` without loss of meaning: both numbers, or both opaque bytes.
kvx_status_t check_convertible(const Path &path, kvx_dtype_t one, const Path &other_path,
                               kvx_dtype_t other) {
  if ((one == KVX_DTYPE_U8) == (other == KVX_DTYPE_U8)) return KVX_STATUS_OK;
  return KVX_INVALID(
      "%s.dtype is %s, but %s.dtype is %s: U8 holds opaque bytes and is never converted (spec E.5)",
      KVX_AT(path), name_of(one), KVX_AT(other_path), name_of(other));
}

namespace {

// Leading extents of a 4-D gather output; a write is 3-D.
struct IoShape {
  bool may_be_4d;
  uint32_t rows, tokens;
};

// key or value of a write (input) or a gather (output). `head_dim` is that of the cache's tensor.
kvx_status_t check_io_tensor(const Path &path, const kvx_kv_io_desc_t &io,
                             const kvx_tensor_desc_t &tensor, int64_t head_dim, IoShape shape,
                             bool output) {
  KVX_TRY(check_struct(path, &tensor));
  KVX_TRY(check_element_type(path, tensor.dtype));
  KVX_TRY(check_memory(path, tensor.memory));
  if (tensor.ndim != 3 && !(tensor.ndim == 4 && shape.may_be_4d)) {
    return KVX_INVALID("%s.ndim is %u, expected 3%s (spec 6.8)", KVX_AT(path), tensor.ndim,
                       shape.may_be_4d ? " or 4" : "");
  }
  if (tensor.ndim == 4) {
    KVX_TRY(check_shape(path, tensor, 0, shape.rows, "seq_count * beam_width", "spec 6.10"));
    KVX_TRY(check_shape(path, tensor, 1, shape.tokens, "max_seq_len", "spec 6.10"));
  } else if (output) {
    KVX_TRY(check_shape(path, tensor, 0, io.num_tokens, "num_tokens", "spec 6.8"));
  } else if (tensor.shape[0] < io.num_tokens) {
    return KVX_INVALID("%s.shape[0] is %lld, expected at least num_tokens %u (spec 6.8)",
                       KVX_AT(path), static_cast<ll>(tensor.shape[0]), io.num_tokens);
  }
  const int head_axis = static_cast<int>(tensor.ndim) - 2;
  KVX_TRY(check_shape(path, tensor, head_axis, io.num_kv_heads, "num_kv_heads", "spec 6.8"));
  KVX_TRY(check_shape(path, tensor, head_axis + 1, head_dim, "head_dim", "spec 6.8"));
  KVX_TRY(check_strides(path, tensor.ndim, tensor.shape, tensor.stride, tensor.dtype));
  if (output) KVX_TRY(check_disjoint(path, tensor));
  if (io.num_tokens == 0) return KVX_STATUS_OK;
  if (!tensor.data) return KVX_INVALID("%s.data is NULL (spec 6.2)", KVX_AT(path));
  KVX_TRY(check_reach(path, tensor));
  return check_aligned(path, tensor.data, tensor.dtype);
}

kvx_status_t check_io(const Path &path, const kvx_cache_desc_t &cache, const kvx_kv_io_desc_t &io,
                      IoShape shape, bool output) {
  const Path cache_path{nullptr, "cache"};
  KVX_TRY(check_struct(path, &io));
  if (io.num_kv_heads != cache.num_kv_heads) {
    return KVX_INVALID("%s.num_kv_heads is %u, expected cache.num_kv_heads %u (spec 7)",
                       KVX_AT(path), io.num_kv_heads, cache.num_kv_heads);
  }
  if (io.head_dim != cache.head_dim) {
    return KVX_INVALID("%s.head_dim is %u, expected cache.head_dim %u (spec 7)", KVX_AT(path),
                       io.head_dim, cache.head_dim);
  }
  const Path key{&path, "key"}, value{&path, "value"}, k{&cache_path, "k"}, v{&cache_path, "v"};
  KVX_TRY(check_io_tensor(key, io, io.key, cache.head_dim, shape, output));
  KVX_TRY(check_convertible(key, io.key.dtype, k, cache.k.dtype));
  if (is_absent(cache.v)) {
    if (is_absent(io.value)) return KVX_STATUS_OK;
    return KVX_INVALID("%s is given, but cache.v is absent (spec E.1)", KVX_AT(value));
  }
  KVX_TRY(check_io_tensor(value, io, io.value, dim_of(cache.v), shape, output));
  return check_convertible(value, io.value.dtype, v, cache.v.dtype);
}

}  // namespace

kvx_status_t check_slots(const Path &path, const kvx_slot_mapping_t &slots) {
  KVX_TRY(check_struct(path, &slots));
  KVX_TRY(check_index_type(path, "dtype", slots.dtype, "5.2"));
  return slots.token_count ? check_indices(path, "slots", slots.slots, slots.dtype) : KVX_STATUS_OK;
}

namespace {

kvx_status_t check_lens(const Path &path, const kvx_seq_lens_t &lens) {
  KVX_TRY(check_struct(path, &lens));
  KVX_TRY(check_index_type(path, "dtype", lens.dtype, "5.3"));
  return lens.seq_count ? check_indices(path, "lengths", lens.lengths, lens.dtype) : KVX_STATUS_OK;
}

kvx_status_t check_count(const Path &path, const char *field, uint32_t found, uint64_t expected,
                         const char *meaning) {
  if (found == expected) return KVX_STATUS_OK;
  return KVX_INVALID("%s.%s is %u, expected %s = %llu (spec 5.1)", KVX_AT(path), field, found,
                     meaning, static_cast<ull>(expected));
}

}  // namespace

kvx_status_t check_table(const Path &path, const kvx_block_table_t &table) {
  KVX_TRY(check_struct(path, &table));
  const bool offsets = table.format == KVX_BLOCK_TABLE_KV_OFFSETS;
  const bool ragged = table.format == KVX_BLOCK_TABLE_RAGGED;
  if (!offsets && !ragged && table.format != KVX_BLOCK_TABLE_PACKED) {
    return KVX_INVALID(
        "%s.format is %d, expected PACKED (1), RAGGED (2) or KV_OFFSETS (3) (spec 5.1)",
        KVX_AT(path), table.format);
  }
  if (offsets && table.index_dtype != KVX_DTYPE_S32) {
    return KVX_INVALID("%s.index_dtype is %d (%s), expected S32 for KV_OFFSETS (spec 5.1)",
                       KVX_AT(path), table.index_dtype, name_of(table.index_dtype));
  }
  KVX_TRY(check_index_type(path, "index_dtype", table.index_dtype, "7.1"));
  if (offsets) {
    KVX_TRY(check_nonzero(path, "beam_width", table.beam_width));
    if (!(table.flags & KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX)) {
      return KVX_INVALID("%s.flags is %#x, expected KVCACHEINDEX set for KV_OFFSETS (spec 5.1)",
                         KVX_AT(path), table.flags);
    }
  } else if (table.beam_width > 1) {
    return KVX_INVALID("%s.beam_width is %u, expected 1 unless KV_OFFSETS (spec 5.1)", KVX_AT(path),
                       table.beam_width);
  }
  if (ragged) {
    KVX_TRY(check_index_type(path, "indptr_dtype", table.indptr_dtype, "5.1"));
    KVX_TRY(check_count(path, "indptr_count", table.indptr_count, uint64_t{table.seq_count} + 1,
                        "seq_count + 1"));
    KVX_TRY(check_indices(path, "indptr", table.indptr, table.indptr_dtype));
  } else {
    if (table.seq_count)
      KVX_TRY(check_nonzero(path, "max_blocks_per_seq", table.max_blocks_per_seq));
    KVX_TRY(check_count(path, "indptr_count", table.indptr_count, 0, "none"));
    if (table.indptr) {
      return KVX_INVALID("%s.indptr is %p, expected NULL unless RAGGED (spec 5.1)", KVX_AT(path),
                         table.indptr);
    }
    uint64_t expected = table.max_blocks_per_seq;  // grows to at most 2^97: checked
    if (__builtin_mul_overflow(expected, uint64_t{table.seq_count}, &expected) ||
        (offsets && __builtin_mul_overflow(expected, uint64_t{2} * table.beam_width, &expected))) {
      expected = UINT64_MAX;
    }
    KVX_TRY(check_count(path, "indices_count", table.indices_count, expected,
                        offsets ? "seq_count * beam_width * 2 * max_blocks_per_seq"
                                : "seq_count * max_blocks_per_seq"));
  }
  if (table.indices_count)
    KVX_TRY(check_indices(path, "indices", table.indices, table.index_dtype));
  return KVX_STATUS_OK;
}

namespace {

kvx_status_t check_flags(const Path &path, uint32_t flags, uint32_t known) {
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

// Scales that the call itself finds and stores.
kvx_status_t check_found_scales(const Path &path, const kvx_scale_desc_t *desc,
                                const Path &tensor_path, const kvx_tensor_desc_t &tensor) {
  if (is_absent(tensor)) return KVX_STATUS_OK;
  if (!is_fp8(tensor.dtype)) {
    return KVX_INVALID("%s.dtype is %s, expected FP8 with FIND_SCALES (spec E.9)",
                       KVX_AT(tensor_path), name_of(tensor.dtype));
  }
  if (!desc || !desc->data) {
    return KVX_INVALID("%s is NULL, expected room for the scales with FIND_SCALES (spec E.9)",
                       KVX_AT(path));
  }
  if (desc->granularity != KVX_SCALE_PER_TOKEN_HEAD) {
    return KVX_INVALID(
        "%s.granularity is %d, expected PER_TOKEN_HEAD (16) with FIND_SCALES "
        "(spec E.9)",
        KVX_AT(path), desc->granularity);
  }
  return check_disjoint(path, *desc);
}

// The scale entry of a list that may be missing altogether.
const kvx_scale_desc_t *entry(const kvx_scale_desc_t *const *list, uint32_t layer) {
  return list ? list[layer] : nullptr;
}

// Bytes from K to V of the same block.
ptrdiff_t v_offset(const kvx_cache_desc_t &cache) {
  return is_absent(cache.v) ? 0
                            : static_cast<const uint8_t *>(cache.v.data) -
                                  static_cast<const uint8_t *>(cache.k.data);
}

kvx_status_t check_view(const Path &path, const kvx_view_t *view) {
  KVX_TRY(check_struct(path, view));
  KVX_TRY(check_reserved(path, view->reserved_0));
  if (!view->num_planes) KVX_TRY(check_nonzero(path, "num_layers", view->num_layers));
  if (view->num_layers && !view->layers)
    return KVX_INVALID("%s.layers is NULL (spec E.3)", KVX_AT(path));
  if (view->block_table && view->slots) {
    return KVX_INVALID("%s has a block_table and slots, expected at most one (spec E.3)",
                       KVX_AT(path));
  }
  if (view->block_table) KVX_TRY(check_table({&path, "block_table"}, *view->block_table));
  const bool offsets = view->block_table && view->block_table->format == KVX_BLOCK_TABLE_KV_OFFSETS;
  for (uint32_t l = 0; l < view->num_layers; ++l) {
    const Path layer{&path, "layers", l};
    const kvx_cache_desc_t *cache = view->layers[l], *first = view->layers[0];
    KVX_TRY(check_cache(layer, cache));
    if (cache->num_blocks != first->num_blocks || cache->block_size != first->block_size) {
      return KVX_INVALID(
          "%s holds %u blocks of %u tokens, expected %u of %u as layers[0]: one table serves all "
          "layers (spec E.3)",
          KVX_AT(layer), cache->num_blocks, cache->block_size, first->num_blocks,
          first->block_size);
    }
    if (offsets) {
      KVX_TRY(check_pool(layer, *cache));
      if (cache->pool.bytes_per_block != first->pool.bytes_per_block ||
          cache->k.stride[axes_of(cache->k).block] * size_of(cache->k.dtype) !=
              first->k.stride[axes_of(first->k).block] * size_of(first->k.dtype) ||
          is_absent(cache->v) != is_absent(first->v) || v_offset(*cache) != v_offset(*first) ||
          !cache->pool.secondary != !first->pool.secondary) {
        return KVX_INVALID(
            "%s is not of the same pool as layers[0]: one KV_OFFSETS table serves "
            "one pool; migrate pool by pool (spec E.8)",
            KVX_AT(layer));
      }
    }
    const Path k{&layer, "k"}, v{&layer, "v"};
    for (const bool is_v : {false, true}) {
      const Path scales{&path, is_v ? "v_scales" : "k_scales", l};
      const kvx_scale_desc_t *desc = entry(is_v ? view->v_scales : view->k_scales, l);
      if (!desc) continue;
      KVX_TRY(check_struct(scales, desc));
      KVX_TRY(check_scales(scales, *desc, *cache, is_v ? cache->v : cache->k, is_v ? v : k));
      if (offsets) KVX_TRY(check_secondary_scales(scales, *cache, *desc));
    }
  }
  if (offsets && view->num_layers) {
    KVX_TRY(check_secondary({&path, "layers"}, view->layers, view->num_layers,
                            view->secondary_num_blocks));
  }
  if (view->slots) {
    KVX_TRY(check_slots({&path, "slots"}, *view->slots));
    if (view->starts) {
      return KVX_INVALID(
          "%s has slots and starts, expected starts NULL: slots name every token "
          "(spec E.3)",
          KVX_AT(path));
    }
  }
  if (view->starts) KVX_TRY(check_lens({&path, "starts"}, *view->starts));
  return check_planes(path, *view);
}

kvx_status_t check_heads(const Path &path, const kvx_view_t &view, uint32_t layer,
                         uint32_t num_heads) {
  const uint32_t held = view.layers[layer]->num_kv_heads;
  if (view.head_start <= held && num_heads <= held - view.head_start) return KVX_STATUS_OK;
  return KVX_INVALID(
      "%s.head_start is %u: with num_heads %u it reaches past the %u heads of layers[%u] (spec "
      "E.3)",
      KVX_AT(path), view.head_start, num_heads, held, layer);
}

kvx_status_t check_layer_pair(const Path &src_path, const Path &dst_path,
                              const kvx_migrate_desc_t &migrate, uint32_t l) {
  const kvx_cache_desc_t &src = *migrate.src->layers[l], &dst = *migrate.dst->layers[l];
  const Path src_layer{&src_path, "layers", l}, dst_layer{&dst_path, "layers", l};
  if (migrate.num_heads == 0) {
    if (src.num_kv_heads != dst.num_kv_heads) {
      return KVX_INVALID(
          "%s.num_kv_heads is %u, expected that of %s, %u; give num_heads to move a range "
          "(spec E.3)",
          KVX_AT(dst_layer), dst.num_kv_heads, KVX_AT(src_layer), src.num_kv_heads);
    }
    for (const auto &[path, view] :
         {std::pair{&src_path, migrate.src}, std::pair{&dst_path, migrate.dst}}) {
      if (view->head_start != 0) {
        return KVX_INVALID("%s.head_start is %u, expected 0 when num_heads is 0 (all) (spec E.3)",
                           KVX_AT(*path), view->head_start);
      }
    }
  } else {
    KVX_TRY(check_heads(src_path, *migrate.src, l, migrate.num_heads));
    KVX_TRY(check_heads(dst_path, *migrate.dst, l, migrate.num_heads));
  }
  if (is_absent(src.v) != is_absent(dst.v)) {
    return KVX_INVALID("%s has %s V, expected as %s (spec E.1)", KVX_AT(dst_layer),
                       is_absent(dst.v) ? "no" : "a", KVX_AT(src_layer));
  }
  for (const bool is_v : {false, true}) {
    const kvx_tensor_desc_t &from = is_v ? src.v : src.k, &to = is_v ? dst.v : dst.k;
    if (is_absent(from)) continue;
    const Path from_path{&src_layer, is_v ? "v" : "k"}, to_path{&dst_layer, is_v ? "v" : "k"};
    if (dim_of(from) != dim_of(to)) {
      return KVX_INVALID("%s has head_dim %lld, expected that of %s, %lld (spec E.3)",
                         KVX_AT(to_path), static_cast<ll>(dim_of(to)), KVX_AT(from_path),
                         static_cast<ll>(dim_of(from)));
    }
    KVX_TRY(check_convertible(to_path, to.dtype, from_path, from.dtype));
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_rows(const Path &path, const kvx_view_t &view, uint64_t rows) {
  if (view.block_table && rows_of(*view.block_table) != rows) {
    return KVX_INVALID("%s.block_table has %llu rows, expected %llu, as seq_lens has it (spec E.3)",
                       KVX_AT(path), static_cast<ull>(rows_of(*view.block_table)),
                       static_cast<ull>(rows));
  }
  if (!view.block_table && !view.slots && view.num_layers && rows > view.layers[0]->num_blocks) {
    return KVX_INVALID(
        "%s is dense and holds %u sequences (num_blocks), expected at least %llu (spec E.3)",
        KVX_AT(path), view.layers[0]->num_blocks, static_cast<ull>(rows));
  }
  if (view.starts && view.starts->seq_count != rows) {
    return KVX_INVALID("%s.starts.seq_count is %u, expected %llu, one per row (spec E.3)",
                       KVX_AT(path), view.starts->seq_count, static_cast<ull>(rows));
  }
  return check_plane_rows(path, view, rows);
}

}  // namespace

kvx_status_t validate_cache(const kvx_cache_desc_t *cache) {
  return check_cache({nullptr, "cache"}, cache);
}

kvx_status_t validate_write(const kvx_cache_desc_t *cache, const kvx_write_desc_t *write,
                            const kvx_write_options_t *options) {
  const Path cache_path{nullptr, "cache"}, path{nullptr, "write"}, with{nullptr, "options"};
  KVX_TRY(validate_cache(cache));
  uint32_t flags = 0;
  if (options) {
    KVX_TRY(check_struct(with, options));
    flags = options->flags;
    KVX_TRY(check_flags(with, flags,
                        KVX_FLAG_BACKGROUND | KVX_FLAG_COPY_ENGINE | KVX_FLAG_FIND_SCALES));
  }
  KVX_TRY(check_struct(path, write));
  KVX_TRY(check_io({&path, "io"}, *cache, write->io, {false, 0, 0}, /*output=*/false));
  const Path slots{&path, "slots"};
  KVX_TRY(check_slots(slots, write->slots));
  if (write->slots.token_count != write->io.num_tokens) {
    return KVX_INVALID("%s.token_count is %u, expected io.num_tokens %u (spec 6.4)", KVX_AT(slots),
                       write->slots.token_count, write->io.num_tokens);
  }
  for (const bool is_v : {false, true}) {
    const kvx_scale_desc_t &desc = is_v ? write->v_scale_desc : write->k_scale_desc;
    const kvx_tensor_desc_t &tensor = is_v ? cache->v : cache->k;
    const Path tensor_path{&cache_path, is_v ? "v" : "k"};
    const char *const field =
        is_v ? (desc.data ? "v_scale_desc" : "v_scale") : (desc.data ? "k_scale_desc" : "k_scale");
    KVX_TRY(check_scales({&path, field},
                         scale_or_pointer(desc, is_v ? write->v_scale : write->k_scale), *cache,
                         tensor, tensor_path));
    if (flags & KVX_FLAG_FIND_SCALES) {
      KVX_TRY(check_found_scales({&path, is_v ? "v_scale_desc" : "k_scale_desc"}, &desc,
                                 tensor_path, tensor));
    }
  }
  return check_apart(*cache, *write, flags & KVX_FLAG_FIND_SCALES);
}

kvx_status_t validate_gather(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather,
                             const kvx_gather_options_t *options) {
  const Path cache_path{nullptr, "cache"}, path{nullptr, "gather"}, with{nullptr, "options"};
  KVX_TRY(validate_cache(cache));
  KVX_TRY(check_struct(path, gather));
  const Path table{&path, "block_table"}, lens{&path, "seq_lens"}, io{&path, "io"};
  KVX_TRY(check_table(table, gather->block_table));
  const bool offsets = gather->block_table.format == KVX_BLOCK_TABLE_KV_OFFSETS;
  if (offsets) KVX_TRY(check_pool(cache_path, *cache));
  KVX_TRY(check_lens(lens, gather->seq_lens));
  if (gather->seq_lens.seq_count != gather->block_table.seq_count) {
    return KVX_INVALID("%s.seq_count is %u, expected block_table.seq_count %u (spec 5.3)",
                       KVX_AT(lens), gather->seq_lens.seq_count, gather->block_table.seq_count);
  }
  const uint64_t rows = rows_of(gather->block_table);
  uint64_t tokens;
  if (__builtin_mul_overflow(rows, uint64_t{gather->max_seq_len}, &tokens)) tokens = UINT64_MAX;
  if (gather->io.num_tokens != tokens || rows > UINT32_MAX) {
    return KVX_INVALID(
        "%s.num_tokens is %u, expected seq_count * beam_width * max_seq_len = %llu (spec 6.10)",
        KVX_AT(io), gather->io.num_tokens, static_cast<ull>(tokens));
  }
  KVX_TRY(check_io(io, *cache, gather->io, {true, static_cast<uint32_t>(rows), gather->max_seq_len},
                   /*output=*/true));
  if (!options) return check_apart(*cache, *gather, nullptr);
  KVX_TRY(check_struct(with, options));
  KVX_TRY(check_reserved(with, options->reserved_0));
  KVX_TRY(check_flags(with, options->flags,
                      KVX_FLAG_ZERO_FILL | KVX_FLAG_BACKGROUND | KVX_FLAG_COPY_ENGINE));
  for (const bool is_v : {false, true}) {
    const kvx_scale_desc_t *desc = is_v ? options->v_scale : options->k_scale;
    if (!desc) continue;
    const Path scale{&with, is_v ? "v_scale" : "k_scale"};
    KVX_TRY(check_struct(scale, desc));
    KVX_TRY(check_scales(scale, *desc, *cache, is_v ? cache->v : cache->k,
                         {&cache_path, is_v ? "v" : "k"}));
    if (offsets) KVX_TRY(check_secondary_scales(scale, *cache, *desc));
  }
  return check_apart(*cache, *gather, options);
}

kvx_status_t validate_migrate(const kvx_migrate_desc_t *migrate) {
  const Path path{nullptr, "migrate"}, src{nullptr, "src"}, dst{nullptr, "dst"};
  KVX_TRY(check_struct(path, migrate));
  KVX_TRY(check_flags(
      path, migrate->flags,
      KVX_FLAG_ZERO_FILL | KVX_FLAG_BACKGROUND | KVX_FLAG_COPY_ENGINE | KVX_FLAG_FIND_SCALES));
  const Path lens_path{&path, "seq_lens"};
  if (!migrate->seq_lens) return KVX_INVALID("%s is NULL", KVX_AT(lens_path));
  KVX_TRY(check_lens(lens_path, *migrate->seq_lens));
  KVX_TRY(check_view(src, migrate->src));
  KVX_TRY(check_view(dst, migrate->dst));
  if (migrate->src->num_layers != migrate->dst->num_layers) {
    return KVX_INVALID("dst.num_layers is %u, expected src.num_layers %u (spec E.3)",
                       migrate->dst->num_layers, migrate->src->num_layers);
  }
  for (uint32_t l = 0; l < migrate->src->num_layers; ++l)
    KVX_TRY(check_layer_pair(src, dst, *migrate, l));
  KVX_TRY(check_plane_pairs(src, dst, *migrate));
  if (migrate->flags & KVX_FLAG_FIND_SCALES) {
    for (uint32_t i = 0; i < 2 * migrate->dst->num_layers; ++i) {
      const bool is_v = i % 2;
      const kvx_view_t &view = *migrate->dst;
      const Path layer{&dst, "layers", i / 2};
      KVX_TRY(check_found_scales({&dst, is_v ? "v_scales" : "k_scales", i / 2},
                                 entry(is_v ? view.v_scales : view.k_scales, i / 2),
                                 {&layer, is_v ? "v" : "k"},
                                 is_v ? view.layers[i / 2]->v : view.layers[i / 2]->k));
    }
  }
  const uint64_t rows = rows_of(*migrate);
  KVX_TRY(check_rows(src, *migrate->src, rows));
  KVX_TRY(check_rows(dst, *migrate->dst, rows));
  return check_apart(*migrate);
}

}  // namespace kvx
