#include "rules/hybrid.h"

#include <cmath>
#include <initializer_list>

#include "desc/tensor.h"
#include "error.h"
#include "rules/struct.h"

namespace kvx {
namespace {

constexpr uint64_t kMostBytes = uint64_t{1} << 62;
constexpr uint32_t kMostDim = 4096;  // of a row: kernels keep one in shared memory
constexpr uint32_t kMostRows = INT32_MAX;

// The product of the extents of an array and of the bytes of an element; 2^62 at most.
uint64_t bytes_of(std::initializer_list<uint64_t> factors) {
  uint64_t bytes = 1;
  for (const uint64_t factor : factors)
    if (__builtin_mul_overflow(bytes, factor, &bytes) || bytes > kMostBytes) return kMostBytes;
  return bytes;
}

uint32_t size_of_number(kvx_dtype_t dtype) { return dtype == KVX_DTYPE_F32 ? 4 : 2; }

kvx_status_t check_memory(const Path &path, kvx_memory_type_t memory) {
  if (memory == KVX_MEMORY_HOST || memory == KVX_MEMORY_DEVICE) return KVX_STATUS_OK;
  return KVX_INVALID("%s.memory is %d, expected HOST (1) or DEVICE (2) (spec E.22)", KVX_AT(path),
                     memory);
}

struct Between {
  const char *field;
  uint32_t value, least, most;
};

kvx_status_t check_between(const Path &path, std::initializer_list<Between> fields) {
  for (const auto &[field, value, least, most] : fields) {
    if (value >= least && value <= most) continue;
    return KVX_INVALID("%s.%s is %u, expected %u to %u (spec E.22)", KVX_AT(path), field, value,
                       least, most);
  }
  return KVX_STATUS_OK;
}

// Size and memory, with which every struct begins.
template <class Call>
kvx_status_t check_begin(const Path &path, const Call *call) {
  KVX_TRY(check_struct(path, call));
  return check_memory(path, call->memory);
}

kvx_status_t check_numbers(const Path &path, const char *field, kvx_dtype_t dtype) {
  if (dtype == KVX_DTYPE_F32 || dtype == KVX_DTYPE_BF16) return KVX_STATUS_OK;
  return KVX_INVALID("%s.%s is %d (%s), expected BF16 (2) or F32 (3) (spec E.22)", KVX_AT(path),
                     field, dtype, name_of(dtype));
}

kvx_status_t check_position_bytes(const Path &path, uint32_t bytes) {
  if (bytes == 4 || bytes == 8) return KVX_STATUS_OK;
  return KVX_INVALID("%s.position_bytes is %u, expected 4 or 8 (spec E.22)", KVX_AT(path), bytes);
}

kvx_status_t check_bits(const Path &path, uint32_t flags, uint32_t known) {
  if (!(flags & ~known)) return KVX_STATUS_OK;
  return KVX_INVALID("%s.flags is %#x, expected no bits but those of %#x (spec E.22)", KVX_AT(path),
                     flags, known);
}

kvx_status_t check_reserved(const Path &path, uint32_t reserved) {
  if (!reserved) return KVX_STATUS_OK;
  return KVX_INVALID("%s.reserved is %u, expected 0 (spec E.22)", KVX_AT(path), reserved);
}

kvx_status_t check_array(const Path &path, const HybridArray &array) {
  if (!array.data) {
    if (array.is_optional) return KVX_STATUS_OK;
    return KVX_INVALID("%s.%s is NULL (spec E.22)", KVX_AT(path), array.name);
  }
  const auto begin = reinterpret_cast<uintptr_t>(array.data);
  if (begin % array.alignment) {
    return KVX_INVALID("%s.%s is %p, expected a multiple of %u bytes (spec E.22)", KVX_AT(path),
                       array.name, array.data, array.alignment);
  }
  if (array.bytes >= kMostBytes || begin + array.bytes < begin) {
    return KVX_INVALID("%s.%s is %p: its numbers reach past the end of memory (spec E.22)",
                       KVX_AT(path), array.name, array.data);
  }
  return KVX_STATUS_OK;
}

// Checks each array, and that no array that is written meets another.
kvx_status_t check_arrays(const Path &path, const HybridArrays &arrays) {
  for (int i = 0; i < arrays.count; ++i) KVX_TRY(check_array(path, arrays.list[i]));
  for (int i = 0; i < arrays.count; ++i) {
    const HybridArray &written = arrays.list[i];
    if (!written.is_written || !written.data || !written.bytes) continue;
    for (int j = 0; j < arrays.count; ++j) {
      const HybridArray &other = arrays.list[j];
      if (i == j || !other.data || !intersect(written.extent(), other.extent())) continue;
      return KVX_INVALID("%s.%s at %p overlaps %s at %p, expected memory of its own (spec E.22)",
                         KVX_AT(path), written.name, written.data, other.name, other.data);
    }
  }
  return KVX_STATUS_OK;
}

struct Lister {
  HybridArrays *arrays;

  void operator()(const char *name, const void *data, std::initializer_list<uint64_t> factors,
                  uint32_t alignment, bool is_written = false, bool is_optional = false) const {
    arrays->list[arrays->count++] = {name,      data,       bytes_of(factors),
                                     alignment, is_written, is_optional};
  }
  void read_if_given(const char *name, const void *data, std::initializer_list<uint64_t> factors,
                     uint32_t alignment) const {
    (*this)(name, data, factors, alignment, false, true);
  }
  void write(const char *name, const void *data, std::initializer_list<uint64_t> factors,
             uint32_t alignment) const {
    (*this)(name, data, factors, alignment, true);
  }
};

// The spans of append and tail.
template <class Call>
void list_spans(const Lister &add, const Call &call) {
  if (!call.num_spans) return;
  add("span_of", call.span_of, {call.num_tokens, 4}, 4);
  add("span_starts", call.span_starts, {uint64_t{call.num_spans} + 1, 4}, 4);
}

// Both of a pair of arrays, or neither.
kvx_status_t check_pair(const Path &path, const char *first, const void *a, const char *second,
                        const void *b) {
  if (!a == !b) return KVX_STATUS_OK;
  return KVX_INVALID("%s.%s is %p and %s %p, expected both or neither (spec E.22)", KVX_AT(path),
                     first, a, second, b);
}

kvx_status_t check_groups(const Path &path, const kvx_hybrid_flush_t &flush) {
  if (flush.keys < KVX_HYBRID_NO_KEYS || flush.keys > KVX_HYBRID_FP8) {
    return KVX_INVALID(
        "%s.keys is %d, expected NO_KEYS (0), NVFP4 (1), MXFP4 (2) or FP8 (3) (spec E.22)",
        KVX_AT(path), flush.keys);
  }
  if (flush.keys == KVX_HYBRID_NO_KEYS)
    return check_between(path, {{"key_dim", flush.key_dim, 0, 0}});
  if (flush.keys == KVX_HYBRID_FP8)
    return check_between(path, {{"key_dim", flush.key_dim, 1, kMostDim}});
  const uint32_t group = flush.keys == KVX_HYBRID_NVFP4 ? 16 : 32;
  KVX_TRY(check_between(path, {{"key_dim", flush.key_dim, group, kMostDim}}));
  if (flush.key_dim % group == 0) return KVX_STATUS_OK;
  return KVX_INVALID(
      "%s.key_dim is %u, expected a multiple of the %u numbers of a group (spec E.22)",
      KVX_AT(path), flush.key_dim, group);
}

}  // namespace

kvx_status_t check_hybrid(const kvx_hybrid_append_t *append, HybridArrays *arrays) {
  const Path path{nullptr, "append"};
  KVX_TRY(check_begin(path, append));
  const kvx_hybrid_append_t &a = *append;
  KVX_TRY(check_between(path, {{"num_tokens", a.num_tokens, 0, kMostRows},
                               {"num_slots", a.num_slots, 1, kMostRows},
                               {"window", a.window, 1, kMostRows},
                               {"nope_dim", a.nope_dim, 1, kMostDim},
                               {"rope_dim", a.rope_dim, 1, kMostDim}}));
  KVX_TRY(check_position_bytes(path, a.position_bytes));
  KVX_TRY(check_bits(path, a.flags, KVX_HYBRID_ONE_EACH));
  KVX_TRY(check_between(path, {{"num_spans", a.num_spans, 0, kMostRows}}));
  if (!a.num_tokens) return KVX_STATUS_OK;
  const Lister add{arrays};
  const uint64_t dim = uint64_t{a.nope_dim} + a.rope_dim;
  add("x", a.x, {a.num_tokens, dim, 2}, 2);
  add("positions", a.positions, {a.num_tokens, a.position_bytes}, a.position_bytes);
  add("slots", a.slots, {a.num_tokens, 4}, 4);
  add.write("fp8", a.fp8, {a.num_slots, a.window, a.nope_dim}, 1);
  add.write("rope", a.rope, {a.num_slots, a.window, a.rope_dim, 2}, 2);
  add("inv_scale", a.inv_scale, {a.num_slots, a.window, 4}, 4, true, true);
  add.write("pos", a.pos, {a.num_slots, a.window, 4}, 4);
  add.write("head", a.head, {a.num_slots, 4}, 4);
  list_spans(add, a);
  return check_arrays(path, *arrays);
}

kvx_status_t check_hybrid(const kvx_hybrid_tail_t *tail, HybridArrays *arrays) {
  const Path path{nullptr, "tail"};
  KVX_TRY(check_begin(path, tail));
  const kvx_hybrid_tail_t &t = *tail;
  KVX_TRY(check_between(path, {{"num_tokens", t.num_tokens, 0, kMostRows},
                               {"num_slots", t.num_slots, 1, kMostRows},
                               {"ratio", t.ratio, 1, kMostRows},
                               {"row", t.row, 1, 2 * kMostDim}}));
  KVX_TRY(check_numbers(path, "dtype", t.dtype));
  KVX_TRY(check_numbers(path, "state", t.state));
  KVX_TRY(check_between(path, {{"num_spans", t.num_spans, 0, kMostRows}}));
  KVX_TRY(check_reserved(path, t.reserved));
  if (!t.num_tokens) return KVX_STATUS_OK;
  const Lister add{arrays};
  const uint32_t read = size_of_number(t.dtype), kept = size_of_number(t.state);
  add("k", t.k, {t.num_tokens, t.row, read}, read);
  add("z", t.z, {t.num_tokens, t.row, read}, read);
  add("slots", t.slots, {t.num_tokens, 4}, 4);
  add.write("ka", t.ka, {t.num_slots, t.ratio, t.row, kept}, kept);
  add.write("za", t.za, {t.num_slots, t.ratio, t.row, kept}, kept);
  add.write("tail_len", t.tail_len, {t.num_slots, 4}, 4);
  list_spans(add, t);
  return check_arrays(path, *arrays);
}

kvx_status_t check_hybrid(const kvx_hybrid_compress_t *compress, HybridArrays *arrays) {
  const Path path{nullptr, "compress"};
  KVX_TRY(check_begin(path, compress));
  const kvx_hybrid_compress_t &c = *compress;
  KVX_TRY(
      check_bits(path, c.flags, KVX_HYBRID_SINGLE_ROW | KVX_HYBRID_BULK | KVX_HYBRID_NO_OVERLAP));
  KVX_TRY(check_between(path, {{"num_rows", c.num_rows, 0, kMostRows},
                               {"num_slots", c.num_slots, 1, kMostRows},
                               {"ratio", c.ratio, 1, kMostRows},
                               {"head_dim", c.head_dim, 1, kMostDim},
                               {"rope_dim", c.rope_dim, 0, c.head_dim}}));
  if (c.rope_dim % 2) {
    return KVX_INVALID("%s.rope_dim is %u, expected an even number (spec E.22)", KVX_AT(path),
                       c.rope_dim);
  }
  KVX_TRY(check_position_bytes(path, c.position_bytes));
  KVX_TRY(check_numbers(path, "state", c.state));
  KVX_TRY(check_numbers(path, "out_dtype", c.out_dtype));
  KVX_TRY(check_reserved(path, c.reserved));
  if (!(c.eps >= 0 && std::isfinite(c.eps))) {
    return KVX_INVALID("%s.eps is %g, expected a finite number, 0 or more (spec E.22)",
                       KVX_AT(path), static_cast<double>(c.eps));
  }
  KVX_TRY(check_pair(path, "kb", c.kb, "zb", c.zb));
  if (!c.num_rows) return KVX_STATUS_OK;
  const bool is_bulk = c.flags & KVX_HYBRID_BULK;
  if (!is_bulk && !c.slots && c.num_rows > c.num_slots) {
    return KVX_INVALID(
        "%s.num_rows is %u, expected at most num_slots %u: without slots row i is tail i (spec "
        "E.22)",
        KVX_AT(path), c.num_rows, c.num_slots);
  }
  const bool has_previous = is_bulk ? !(c.flags & KVX_HYBRID_NO_OVERLAP) : c.kb != nullptr;
  const uint64_t row =
      has_previous && !(c.flags & KVX_HYBRID_SINGLE_ROW) ? 2 * uint64_t{c.head_dim} : c.head_dim;
  const uint64_t tails = is_bulk ? c.num_rows : c.num_slots, before = is_bulk ? 1 : c.num_slots;
  const uint32_t kept = size_of_number(c.state), made = size_of_number(c.out_dtype);
  const Lister add{arrays};
  add("ka", c.ka, {tails, c.ratio, row, kept}, kept);
  add("za", c.za, {tails, c.ratio, row, kept}, kept);
  add.read_if_given("kb", c.kb, {before, c.ratio, row, kept}, kept);
  add.read_if_given("zb", c.zb, {before, c.ratio, row, kept}, kept);
  add.read_if_given("ape_a", c.ape_a, {c.ratio, c.head_dim, 4}, 4);
  add.read_if_given("ape_b", c.ape_b, {c.ratio, c.head_dim, 4}, 4);
  add.read_if_given("norm_weight", c.norm_weight, {c.head_dim, 4}, 4);
  add.read_if_given("cos_sin", c.cos_sin, {c.num_positions, c.rope_dim, 4}, 4);
  add("positions", c.positions, {c.num_rows, c.position_bytes}, c.position_bytes, false,
      !c.cos_sin);
  add.read_if_given("slots", c.slots, {c.num_rows, 4}, 4);
  add.read_if_given("mask", c.mask, {c.num_rows}, 1);
  add.write("out", c.out, {c.num_rows, c.head_dim, made}, made);
  return check_arrays(path, *arrays);
}

kvx_status_t check_hybrid(const kvx_hybrid_flush_t *flush, HybridArrays *arrays) {
  const Path path{nullptr, "flush"};
  KVX_TRY(check_begin(path, flush));
  const kvx_hybrid_flush_t &f = *flush;
  KVX_TRY(check_between(path, {{"num_rows", f.num_rows, 0, kMostRows},
                               {"num_blocks", f.num_blocks, 1, kMostRows},
                               {"entries_per_block", f.entries_per_block, 1, kMostRows},
                               {"nope_dim", f.nope_dim, 1, kMostDim},
                               {"rope_dim", f.rope_dim, 1, kMostDim},
                               {"max_blocks", f.max_blocks, 1, kMostRows}}));
  KVX_TRY(check_groups(path, f));
  KVX_TRY(check_numbers(path, "dtype", f.dtype));
  const bool has_e2m1 = f.keys == KVX_HYBRID_NVFP4 || f.keys == KVX_HYBRID_MXFP4;
  KVX_TRY(check_bits(path, f.flags, has_e2m1 ? KVX_HYBRID_THRESHOLDS : 0));
  if (!f.num_rows) return KVX_STATUS_OK;
  const uint32_t size = size_of_number(f.dtype);
  const Lister add{arrays};
  const uint64_t entries = bytes_of({f.num_blocks, f.entries_per_block});
  add("entry", f.entry, {f.num_rows, uint64_t{f.nope_dim} + f.rope_dim, size}, size);
  add.read_if_given("slots", f.slots, {f.num_rows, 4}, 4);
  add("entry_ids", f.entry_ids, {f.num_rows, 4}, 4);
  add.read_if_given("mask", f.mask, {f.num_rows}, 1);
  add("block_table", f.block_table, {f.num_rows, f.max_blocks, 4}, 4);
  add.write("fp8", f.fp8, {entries, f.nope_dim}, 1);
  add.write("rope", f.rope, {entries, f.rope_dim, 2}, 2);
  add("inv_scale", f.inv_scale, {entries, 4}, 4, true, true);
  if (f.keys != KVX_HYBRID_NO_KEYS) {
    const bool is_fp8 = f.keys == KVX_HYBRID_FP8;
    const uint32_t group = f.keys == KVX_HYBRID_NVFP4 ? 16 : 32;
    add("index_key", f.index_key, {f.num_rows, f.key_dim, size}, size);
    add.write("key_codes", f.key_codes, {entries, is_fp8 ? f.key_dim : f.key_dim / 2}, 1);
    add.write("key_scales", f.key_scales, {entries, is_fp8 ? 4 : f.key_dim / group},
              is_fp8 ? 4 : 1);
  }
  return check_arrays(path, *arrays);
}

kvx_status_t check_hybrid(const kvx_hybrid_state_t *state, HybridArrays *arrays) {
  const Path path{nullptr, "state"};
  KVX_TRY(check_begin(path, state));
  const kvx_hybrid_state_t &s = *state;
  KVX_TRY(check_between(path, {{"num_rows", s.num_rows, 0, kMostRows},
                               {"num_slots", s.num_slots, 1, kMostRows},
                               {"ratio", s.ratio, 1, kMostRows},
                               {"row", s.row, 1, 2 * kMostDim}}));
  KVX_TRY(check_numbers(path, "state", s.state));
  KVX_TRY(check_reserved(path, s.reserved));
  KVX_TRY(check_pair(path, "kb", s.kb, "zb", s.zb));
  if (!s.num_rows) return KVX_STATUS_OK;
  const uint32_t size = size_of_number(s.state);
  const Lister add{arrays};
  add("slots", s.slots, {s.num_rows, 4}, 4);
  add.read_if_given("mask", s.mask, {s.num_rows}, 1);
  add.write("ka", s.ka, {s.num_slots, s.ratio, s.row, size}, size);
  add.write("za", s.za, {s.num_slots, s.ratio, s.row, size}, size);
  add("kb", s.kb, {s.num_slots, s.ratio, s.row, size}, size, true, true);
  add("zb", s.zb, {s.num_slots, s.ratio, s.row, size}, size, true, true);
  add.write("tail_len", s.tail_len, {s.num_slots, 4}, 4);
  return check_arrays(path, *arrays);
}

kvx_status_t check_hybrid(const kvx_hybrid_pages_t *pages, HybridArrays *arrays, bool writes) {
  const Path path{nullptr, "pages"};
  KVX_TRY(check_begin(path, pages));
  const kvx_hybrid_pages_t &p = *pages;
  KVX_TRY(check_between(path, {{"num_rows", p.num_rows, 0, kMostRows},
                               {"num_pages", p.num_pages, 1, kMostRows},
                               {"entries_per_page", p.entries_per_page, 1, 1 << 20}}));
  KVX_TRY(check_numbers(path, "dtype", p.dtype));
  const uint64_t least = uint64_t{p.entries_per_page} * 584;
  if (p.page_stride < least || p.page_stride % 2) {
    return KVX_INVALID(
        "%s.page_stride is %llu, expected an even number, at least %llu: 584 bytes for each entry "
        "(spec E.22)",
        KVX_AT(path), static_cast<ull>(p.page_stride), static_cast<ull>(least));
  }
  if (!p.num_rows) return KVX_STATUS_OK;
  const uint32_t size = size_of_number(p.dtype);
  const uint64_t apart = bytes_of({p.num_pages - 1, p.page_stride});
  const Lister add{arrays};
  add("slots", p.slots, {p.num_rows, 8}, 8);
  add("rows", p.rows, {p.num_rows, 512, size}, size, !writes);
  add("pages", p.pages, {apart >= kMostBytes ? apart : apart + least}, 2, writes);
  return check_arrays(path, *arrays);
}

}  // namespace kvx
