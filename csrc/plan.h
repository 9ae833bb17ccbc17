// What a backend runs: descriptors reduced to byte strides. The last to know a layout's name.
#pragma once

#include "address.h"
#include "kvx/kvx_ext.h"

namespace kvx {

// One end of a tensor pair. Element d of a (block, token, head) lies at
// block * block_stride + token * token_stride + head * head_stride
//   + (d / pack) * outer_stride + (d % pack) * inner_stride bytes from the base.
struct Side {
  uint8_t *base;
  uint8_t *secondary;  // base in the secondary pool, or NULL
  int64_t block_stride, token_stride, head_stride;
  int64_t outer_stride, inner_stride;
  uint32_t pack;
  kvx_dtype_t dtype;
};

// The scale of (block, token, head) lies at data + block * block_stride + ...; NULL data means 1.
struct Scales {
  const uint8_t *data;
  kvx_dtype_t dtype;
  int64_t block_stride, token_stride, head_stride;
};

// K or V of one layer, from one cache to the other.
struct TensorPair {
  Side src, dst;
  Scales src_scales, dst_scales;
  uint32_t num_heads, head_dim;
  uint8_t kv;        // which address of the plan: K 0, V 1
  bool convert;      // dtype or scale differs; otherwise bytes are copied
  bool find_scales;  // dst_scales are found on the way and stored
};

// The tokens that move: row r has min(lens[r / rows_per_len], max_len) of them, or `uniform_len`
// when there are no lens.
struct Rows {
  uint64_t count;
  uint32_t rows_per_len;
  uint64_t uniform_len;
  uint64_t max_len;
  Ints lens;
  bool fill_to_max;  // rows go on to max_len with tokens that have no source

  KVX_HD int64_t length_of(uint64_t row) const {
    if (!lens.data) return static_cast<int64_t>(uniform_len);
    return lens[divide(row, rows_per_len).quotient];
  }
  // Tokens that move of a row with this length.
  KVX_HD uint64_t cut(int64_t length) const {
    const auto len = static_cast<uint64_t>(length);
    return len < max_len ? len : max_len;
  }
  KVX_HD uint64_t stored(uint64_t row) const { return cut(length_of(row)); }
};

enum class Call : uint8_t { kWrite, kGather, kMigrate };

// What the caller calls the fields whose data can be out of range.
struct Names {
  const char *src_table, *dst_table, *src_starts, *dst_starts, *lens;
};

struct Plan {
  Rows rows;
  Address src[2], dst[2];  // K, V
  bool same_places;        // K and V are found at the same blocks and offsets
  bool has_v;
  bool zero_fill;
  bool background, copy_engine;  // how a device moves it
  bool check_same_pool;          // both ends share memory: their blocks must be disjoint
  Call call;

  // K and V of layer l are pairs[2 * l + kv]. num_heads 0: nothing to move, because the cache has
  // no V or because K's pair moves both.
  const TensorPair *pairs;
  uint32_t num_layers;
};

// Position of each axis in a layout's shape; outer is -1 where dim is one axis.
struct Axes {
  int block, token, head, outer, inner;
};
inline Axes axes_of(const kvx_tensor_desc_t &tensor) {
  if (tensor.layout == KVX_LAYOUT_BLOCK_NHD) return {0, 1, 2, -1, 3};
  if (tensor.ndim == 5) return {0, 3, 1, 2, 4};
  return {0, 2, 1, -1, 3};
}

KVX_HD constexpr int64_t size_of(kvx_dtype_t dtype) {
  switch (dtype) {
    case KVX_DTYPE_F32:
    case KVX_DTYPE_S32:
    case KVX_DTYPE_U32:
      return 4;
    case KVX_DTYPE_S64:
    case KVX_DTYPE_U64:
      return 8;
    case KVX_DTYPE_F16:
    case KVX_DTYPE_BF16:
      return 2;
    default:
      return 1;
  }
}

constexpr bool is_fp8(kvx_dtype_t dtype) {
  return dtype == KVX_DTYPE_F8_E4M3 || dtype == KVX_DTYPE_F8_E5M2;
}

inline bool is_absent(const kvx_tensor_desc_t &tensor) {
  return tensor.data == nullptr && tensor.ndim == 0;
}

// The host may read it while the call is prepared: a call on UNIFIED memory runs on the host where
// there is no device.
bool is_readable(kvx_memory_type_t memory);

inline bool is_kv_offsets(const kvx_block_table_t &table) {
  return table.format == KVX_BLOCK_TABLE_KV_OFFSETS;
}

// Sequences, or their beams.
inline uint64_t rows_of(const kvx_block_table_t &table) {
  return uint64_t{table.seq_count} * (is_kv_offsets(table) ? table.beam_width : 1);
}

// Rows of a migration: one per length or, where a KV_OFFSETS table has as many sequences as there
// are lengths, one per beam of each.
uint64_t rows_of(const kvx_migrate_desc_t &migrate);

// Elements of dim per token and head.
inline int64_t dim_of(const kvx_tensor_desc_t &tensor) {
  const Axes axes = axes_of(tensor);
  return tensor.shape[axes.inner] * (axes.outer < 0 ? 1 : tensor.shape[axes.outer]);
}

// The v1 per-tensor F32 pointer as a descriptor, for when `desc` is empty.
kvx_scale_desc_t scale_or_pointer(const kvx_scale_desc_t &desc, const void *per_tensor);

// The bytes from a tensor's first element to its last.
struct Extent {
  const uint8_t *begin, *end;
};
inline int64_t extent_bytes(const kvx_tensor_desc_t &tensor) {
  int64_t last = 0;
  for (uint32_t axis = 0; axis < tensor.ndim; ++axis)
    last += (tensor.shape[axis] - 1) * tensor.stride[axis];
  return (last + 1) * size_of(tensor.dtype);
}
inline Extent extent_of(const kvx_tensor_desc_t &tensor) {
  const auto *data = static_cast<const uint8_t *>(tensor.data);
  return {data, data + extent_bytes(tensor)};
}

inline bool intersect(const Extent &a, const Extent &b) {
  return a.begin < b.end && b.begin < a.end;
}

// A KV_OFFSETS table may name blocks of a secondary pool.
bool has_secondary(const kvx_view_t &view);

// Both ends are the same tensors, so that their block ids mean the same blocks.
bool are_same_pool(const kvx_view_t &src, const kvx_view_t &dst);

// Each takes validated arguments and fills `plan` and `pairs`: two of zeros per layer, to which the
// plan refers.
void plan_write(const kvx_cache_desc_t &cache, const kvx_write_desc_t &write, uint32_t flags,
                TensorPair *pairs, Plan *plan);
void plan_gather(const kvx_cache_desc_t &cache, const kvx_gather_desc_t &gather,
                 const kvx_gather_options_t &options, TensorPair *pairs, Plan *plan);
void plan_migrate(const kvx_migrate_desc_t &migrate, TensorPair *pairs, Plan *plan);

}  // namespace kvx
