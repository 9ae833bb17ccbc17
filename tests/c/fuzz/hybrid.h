// Calls of kvx_hybrid.h: valid ones of odd sizes, with hostile numbers, and with changed fields.
//
// After each call:
//   refused   every byte is what it was, and there is a sentence
//   accepted  only arrays that the call writes have changed, and only where rows take part
#pragma once

#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "kvx/kvx_hybrid.h"
#include "memory.h"

namespace fuzz {

// A call on HOST memory, written field by field, so that a change of any is a change of the call.
class HybridCase {
 public:
  HybridCase(Random random, bool changes) : random_(random), changes_(changes) { make(); }

  // The sentence of what is wrong, "" if nothing is. `status` is the call's.
  std::string run(kvx_status_t *status, bool *called) {
    if (changes_) {
      change();
      *called = is_fair();
      if (!*called) return "";
    }
    *called = true;
    memory_.snapshot();
    *status = call_();
    if (*status != KVX_STATUS_OK) {
      if (!memory_.unchanged()) return "a refused call has changed memory";
      const std::string sentence = kvx_last_error();
      if (sentence.empty() || sentence.size() > 400) return "no readable sentence";
      if (!changes_ && !is_hostile_) return "a valid call was refused: " + sentence;
      return "";
    }
    if (is_hostile_ && !changes_) return "accepted a number that is out of range";
    for (const Array &array : arrays_()) {
      if (!*array.data || array.is_written || array.bytes == 0) continue;  // 0: not used
      const Block *const block = memory_.find(*array.data);
      if (block && std::memcmp(block->data.get(), block->before.data(), block->size) != 0)
        return "an array that is only read has changed";
    }
    return changes_ ? "" : untouched_();
  }

  const std::string &story() const { return story_; }

 private:
  struct Array {
    const void **data;
    Wide bytes;
    bool is_written;
  };
  struct Number {
    std::string name;
    void *at;
    uint32_t bytes;
  };

  template <class T>
  T *numbers(uint64_t count) {
    return reinterpret_cast<T *>(
        memory_.allocate(random_, std::max<uint64_t>(1, count) * sizeof(T)));
  }
  uint8_t *bytes(Wide count) {
    return memory_.allocate(random_, static_cast<size_t>(std::max<Wide>(1, count)));
  }
  template <class T>
  void field(const char *name, T *at) {
    fields_.push_back({name, at, sizeof *at});
  }
  template <class T>
  static Array at(T **data, Wide bytes, bool is_written = false) {
    auto *const plain = const_cast<std::remove_const_t<T> **>(data);
    return {const_cast<const void **>(reinterpret_cast<void **>(plain)), bytes, is_written};
  }
  static Wide size(kvx_dtype_t dtype) { return dtype == KVX_DTYPE_F32 ? 4 : 2; }
  kvx_dtype_t number() { return random_.pick({KVX_DTYPE_F32, KVX_DTYPE_BF16}); }
  bool hostile() {
    if (changes_ || !random_.one_in(8)) return false;
    return is_hostile_ = true;
  }
  // Slots of tails or rings: some are skipped, one may be out of range.
  int32_t *slots_of(uint32_t rows, uint32_t count, bool distinct) {
    auto *const slots = numbers<int32_t>(rows);
    for (uint32_t i = 0; i < rows; ++i) {
      const bool taken = distinct && i >= count;
      slots[i] = taken || random_.one_in(5) ? -1
                 : distinct                 ? static_cast<int32_t>(i)
                                            : static_cast<int32_t>(random_.below(count));
    }
    if (rows && hostile())
      slots[random_.below(rows)] =
          random_.pick({-2, static_cast<int32_t>(count), INT32_MAX, INT32_MIN});
    return slots;
  }
  // Tokens in spans, a slot each; a number of one may be out of range. Returns the slots.
  template <class Call>
  const int32_t *spans_of(Call &d) {
    if (random_.one_in(2)) return slots_of(d.num_tokens, d.num_slots, false);
    const uint32_t rows = d.num_tokens, spans = 1 + random_.below(5);
    auto *const slots = numbers<int32_t>(rows), *const of = numbers<int32_t>(rows);
    auto *const starts = numbers<int32_t>(spans + 1);
    uint32_t first = 0;
    for (uint32_t span = 0; span < spans; ++span) {
      starts[span] = static_cast<int32_t>(first);
      const bool skipped = span >= d.num_slots || random_.one_in(5);
      const uint32_t end = span + 1 == spans ? rows : first + random_.below(rows - first + 1);
      for (; first < end; ++first) {
        slots[first] = skipped ? -1 : static_cast<int32_t>(span);
        of[first] = static_cast<int32_t>(span);
      }
    }
    starts[spans] = static_cast<int32_t>(rows);
    if (rows && hostile()) {
      const auto past = static_cast<int32_t>(rows + 1 + spans);
      const int32_t value = random_.pick({-1, past, INT32_MIN, INT32_MAX});
      (random_.one_in(2) ? of[random_.below(rows)] : starts[random_.below(spans + 1)]) = value;
    }
    d.num_spans = spans, d.span_of = of, d.span_starts = starts;
    return slots;
  }
  // Slots that say nothing but which rows are skipped; one may be out of range.
  int32_t *skips_of(uint32_t rows) {
    auto *const slots = numbers<int32_t>(rows);
    for (uint32_t i = 0; i < rows; ++i)
      slots[i] = !is_hostile_ && random_.one_in(5)
                     ? -1
                     : static_cast<int32_t>(random_.below(uint64_t{INT32_MAX} + 1));
    if (rows && hostile()) slots[random_.below(rows)] = random_.pick({-2, INT32_MIN});
    return slots;
  }
  uint8_t *mask_of(uint32_t rows) {
    if (random_.one_in(2)) return nullptr;
    uint8_t *const mask = bytes(rows);
    for (uint32_t i = 0; i < rows; ++i) mask[i] = !is_hostile_ && random_.one_in(3) ? 0 : 1;
    return mask;
  }
  // No byte of rows, `row` bytes each, has changed but those of rows that `may` names.
  std::string kept(const void *data, Wide rows, Wide row, const std::function<bool(Wide)> &may) {
    const Block *const block = memory_.find(data);
    for (Wide i = 0; block && i < rows; ++i)
      if (!may(i) && std::memcmp(block->data.get() + static_cast<size_t>(i * row),
                                 block->before.data() + static_cast<size_t>(i * row),
                                 static_cast<size_t>(row)) != 0)
        return "row " + std::to_string(static_cast<long long>(i)) + " has changed";
    return "";
  }

  void append() {
    auto &d = append_;
    d.size = sizeof d, d.memory = KVX_MEMORY_HOST;
    d.num_tokens = random_.below(20), d.num_slots = 1 + random_.below(4);
    d.window = 1 + random_.below(6), d.nope_dim = 1 + random_.below(70);
    d.rope_dim = 1 + random_.below(20), d.position_bytes = random_.pick({4u, 8u});
    const Wide rows = Wide{d.num_slots} * d.window;
    d.x = bytes(Wide{d.num_tokens} * (d.nope_dim + d.rope_dim) * 2);
    uint8_t *const positions = bytes(Wide{d.num_tokens} * d.position_bytes);
    std::memset(positions, 0, std::max<size_t>(1, size_t{d.num_tokens} * d.position_bytes));
    d.positions = positions;
    const int32_t *const slots = spans_of(d);
    d.slots = slots;
    d.fp8 = bytes(rows * d.nope_dim), d.rope = bytes(rows * d.rope_dim * 2);
    if (!random_.one_in(4)) d.inv_scale = numbers<float>(rows);
    d.pos = numbers<int32_t>(rows);
    d.head = numbers<int32_t>(d.num_slots);
    for (uint32_t s = 0; s < d.num_slots; ++s) d.head[s] = static_cast<int32_t>(random_.below(300));
    field("size", &d.size), field("memory", &d.memory), field("num_tokens", &d.num_tokens);
    field("num_slots", &d.num_slots), field("window", &d.window), field("nope_dim", &d.nope_dim);
    field("rope_dim", &d.rope_dim), field("position_bytes", &d.position_bytes);
    field("flags", &d.flags), field("num_spans", &d.num_spans);
    call_ = [&d] { return kvx_hybrid_append_swa(&d, nullptr); };
    arrays_ = [&d]() -> std::vector<Array> {
      const Wide all = Wide{d.num_slots} * d.window;
      return {at(&d.x, Wide{d.num_tokens} * (Wide{d.nope_dim} + d.rope_dim) * 2),
              at(&d.positions, Wide{d.num_tokens} * d.position_bytes),
              at(&d.slots, Wide{d.num_tokens} * 4),
              at(&d.fp8, all * d.nope_dim, true),
              at(&d.rope, all * d.rope_dim * 2, true),
              at(&d.inv_scale, all * 4, true),
              at(&d.pos, all * 4, true),
              at(&d.head, Wide{d.num_slots} * 4, true),
              at(&d.span_of, d.num_spans ? Wide{d.num_tokens} * 4 : Wide{0}),
              at(&d.span_starts, d.num_spans ? (Wide{d.num_spans} + 1) * 4 : Wide{0})};
    };
    untouched_ = [this, &d, slots] {
      const auto named = [&d, slots](Wide slot) { return names(slots, d.num_tokens, slot); };
      const Wide n = d.num_slots, w = d.window;
      std::string found = kept(d.fp8, n, w * d.nope_dim, named);
      found += kept(d.rope, n, w * d.rope_dim * 2, named) + kept(d.inv_scale, n, w * 4, named);
      return found + kept(d.pos, n, w * 4, named) + kept(d.head, n, 4, named);
    };
  }

  void tail() {
    auto &d = tail_;
    d.size = sizeof d, d.memory = KVX_MEMORY_HOST;
    d.num_tokens = random_.below(10), d.num_slots = 1 + random_.below(4);
    d.ratio = d.num_tokens + 1 + random_.below(3), d.row = 1 + random_.below(50);
    d.dtype = number(), d.state = number();
    const Wide in = Wide{d.num_tokens} * d.row * size(d.dtype);
    const Wide kept_bytes = Wide{d.num_slots} * d.ratio * d.row * size(d.state);
    d.k = bytes(in), d.z = bytes(in);
    const int32_t *const slots = spans_of(d);
    d.slots = slots, d.ka = bytes(kept_bytes), d.za = bytes(kept_bytes);
    d.tail_len = numbers<int32_t>(d.num_slots);
    for (uint32_t s = 0; s < d.num_slots; ++s)
      d.tail_len[s] = static_cast<int32_t>(random_.below(2));
    field("size", &d.size), field("memory", &d.memory), field("num_tokens", &d.num_tokens);
    field("num_slots", &d.num_slots), field("ratio", &d.ratio), field("row", &d.row);
    field("dtype", &d.dtype), field("state", &d.state);
    field("num_spans", &d.num_spans), field("reserved", &d.reserved);
    call_ = [&d] { return kvx_hybrid_append_tail(&d, nullptr); };
    arrays_ = [&d]() -> std::vector<Array> {
      const Wide given = Wide{d.num_tokens} * d.row * size(d.dtype);
      const Wide all = Wide{d.num_slots} * d.ratio * d.row * size(d.state);
      return {at(&d.k, given),
              at(&d.z, given),
              at(&d.slots, Wide{d.num_tokens} * 4),
              at(&d.ka, all, true),
              at(&d.za, all, true),
              at(&d.tail_len, Wide{d.num_slots} * 4, true),
              at(&d.span_of, d.num_spans ? Wide{d.num_tokens} * 4 : Wide{0}),
              at(&d.span_starts, d.num_spans ? (Wide{d.num_spans} + 1) * 4 : Wide{0})};
    };
    untouched_ = [this, &d, slots] {
      const auto named = [&d, slots](Wide slot) { return names(slots, d.num_tokens, slot); };
      const Wide n = d.num_slots, row = Wide{d.ratio} * d.row * size(d.state);
      return kept(d.ka, n, row, named) + kept(d.za, n, row, named) + kept(d.tail_len, n, 4, named);
    };
  }

  // Numbers of a row, and rows, of the tails of a compress.
  Wide row_of_compress() const {
    const auto &d = compress_;
    const bool is_bulk = d.flags & KVX_HYBRID_BULK;
    const bool overlaps = is_bulk ? !(d.flags & KVX_HYBRID_NO_OVERLAP) : d.kb != nullptr;
    return overlaps && !(d.flags & KVX_HYBRID_SINGLE_ROW) ? 2 * Wide{d.head_dim} : d.head_dim;
  }

  void compress() {
    auto &d = compress_;
    d.size = sizeof d, d.memory = KVX_MEMORY_HOST;
    d.num_rows = random_.below(6), d.num_slots = d.num_rows + 1 + random_.below(3);
    d.ratio = 1 + random_.below(5), d.head_dim = 2 + random_.below(150);
    d.rope_dim = 2 * random_.below(d.head_dim / 2 + 1), d.position_bytes = random_.pick({4u, 8u});
    d.num_positions = 1 + random_.below(9), d.flags = 2 * random_.below(8);
    d.state = number(), d.out_dtype = number(), d.eps = 1e-6f;
    const bool is_bulk = d.flags & KVX_HYBRID_BULK;
    const bool with_previous = !random_.one_in(3);
    static const uint8_t given = 0;
    if (with_previous) d.kb = d.zb = &given;  // row_of_compress looks whether there are any
    const Wide tail = row_of_compress() * d.ratio * size(d.state);
    const Wide tails = is_bulk ? d.num_rows : d.num_slots, before = is_bulk ? 1 : d.num_slots;
    d.ka = bytes(tails * tail), d.za = bytes(tails * tail);
    if (with_previous) d.kb = bytes(before * tail), d.zb = bytes(before * tail);
    const Wide biases = Wide{d.ratio} * d.head_dim;
    if (random_.one_in(2)) d.ape_a = numbers<float>(biases), d.ape_b = numbers<float>(biases);
    if (random_.one_in(2)) d.norm_weight = numbers<float>(d.head_dim);
    const bool rotates = random_.one_in(2);
    if (rotates) d.cos_sin = numbers<float>(uint64_t{d.num_positions} * d.rope_dim);
    uint8_t *const positions = bytes(Wide{d.num_rows} * d.position_bytes);
    std::memset(positions, 0, std::max<size_t>(1, size_t{d.num_rows} * d.position_bytes));
    d.positions = positions;
    const int32_t *const slots = random_.one_in(2) ? nullptr
                                 : is_bulk         ? skips_of(d.num_rows)
                                                   : slots_of(d.num_rows, d.num_slots, false);
    d.slots = slots;
    const uint8_t *const mask = mask_of(d.num_rows);
    d.mask = mask, d.out = bytes(Wide{d.num_rows} * d.head_dim * size(d.out_dtype));
    field("size", &d.size), field("memory", &d.memory), field("num_rows", &d.num_rows);
    field("num_slots", &d.num_slots), field("ratio", &d.ratio), field("head_dim", &d.head_dim);
    field("rope_dim", &d.rope_dim), field("position_bytes", &d.position_bytes);
    field("num_positions", &d.num_positions), field("flags", &d.flags), field("state", &d.state);
    field("out_dtype", &d.out_dtype), field("eps", &d.eps), field("reserved", &d.reserved);
    call_ = [&d] { return kvx_hybrid_compress(&d, nullptr); };
    arrays_ = [this, &d]() -> std::vector<Array> {
      const bool bulk = d.flags & KVX_HYBRID_BULK;
      const Wide one = row_of_compress() * d.ratio * size(d.state);
      const Wide all = bulk ? d.num_rows : d.num_slots, past = bulk ? 1 : d.num_slots;
      const Wide ape = Wide{d.ratio} * d.head_dim * 4;
      return {at(&d.ka, all * one),
              at(&d.za, all * one),
              at(&d.kb, past * one),
              at(&d.zb, past * one),
              at(&d.ape_a, ape),
              at(&d.ape_b, ape),
              at(&d.norm_weight, Wide{d.head_dim} * 4),
              at(&d.cos_sin, Wide{d.num_positions} * d.rope_dim * 4),
              at(&d.positions, d.cos_sin ? Wide{d.num_rows} * d.position_bytes : 0),
              at(&d.slots, Wide{d.num_rows} * 4),
              at(&d.mask, d.num_rows),
              at(&d.out, Wide{d.num_rows} * d.head_dim * size(d.out_dtype), true)};
    };
    untouched_ = [this, &d, slots, mask] {
      return kept(d.out, d.num_rows, Wide{d.head_dim} * size(d.out_dtype), [slots, mask](Wide i) {
        return (!mask || mask[i]) && (!slots || slots[i] != -1);
      });
    };
  }

  static Wide code_bytes(const kvx_hybrid_flush_t &d) {
    return d.keys == KVX_HYBRID_FP8 ? d.key_dim : d.key_dim / 2;
  }
  static Wide scale_bytes(const kvx_hybrid_flush_t &d) {
    return d.keys == KVX_HYBRID_FP8 ? 4 : d.key_dim / (d.keys == KVX_HYBRID_NVFP4 ? 16 : 32);
  }

  void flush() {
    auto &d = flush_;
    d.size = sizeof d, d.memory = KVX_MEMORY_HOST;
    d.num_rows = random_.below(6), d.num_blocks = d.num_rows + 1 + random_.below(4);
    d.entries_per_block = 1 + random_.below(4), d.nope_dim = 1 + random_.below(70);
    d.rope_dim = 1 + random_.below(20), d.max_blocks = 1 + random_.below(4), d.dtype = number();
    d.keys = random_.pick({KVX_HYBRID_NO_KEYS, KVX_HYBRID_NVFP4, KVX_HYBRID_MXFP4, KVX_HYBRID_FP8});
    if (d.keys == KVX_HYBRID_FP8) {
      d.key_dim = 1 + random_.below(150);
    } else if (d.keys != KVX_HYBRID_NO_KEYS) {
      d.key_dim = (d.keys == KVX_HYBRID_NVFP4 ? 16 : 32) * (1 + random_.below(6));
      d.flags = random_.one_in(2) ? KVX_HYBRID_THRESHOLDS : 0;
    }
    const Wide entries = Wide{d.num_blocks} * d.entries_per_block;
    d.entry = bytes(Wide{d.num_rows} * (d.nope_dim + d.rope_dim) * size(d.dtype));
    auto *const ids = numbers<int32_t>(d.num_rows);
    auto *const table = numbers<int32_t>(uint64_t{d.num_rows} * d.max_blocks);
    for (uint32_t i = 0; i < d.num_rows; ++i) {
      ids[i] = static_cast<int32_t>(random_.below(d.max_blocks * d.entries_per_block));
      for (uint32_t j = 0; j < d.max_blocks; ++j)
        table[i * d.max_blocks + j] = static_cast<int32_t>(i);
    }
    if (d.num_rows && hostile()) {
      const uint32_t i = random_.below(d.num_rows);
      if (random_.one_in(2)) {
        ids[i] =
            random_.pick({-1, static_cast<int32_t>(d.max_blocks * d.entries_per_block), INT32_MAX});
      } else {
        for (uint32_t j = 0; j < d.max_blocks; ++j)
          table[i * d.max_blocks + j] =
              random_.pick({-1, static_cast<int32_t>(d.num_blocks), INT32_MIN});
      }
    }
    const int32_t *const slots = random_.one_in(2) ? nullptr : skips_of(d.num_rows);
    const uint8_t *const mask = mask_of(d.num_rows);
    d.slots = slots, d.entry_ids = ids, d.block_table = table, d.mask = mask;
    d.fp8 = bytes(entries * d.nope_dim), d.rope = bytes(entries * d.rope_dim * 2);
    d.inv_scale = numbers<float>(entries);
    if (d.keys != KVX_HYBRID_NO_KEYS) {
      d.index_key = bytes(Wide{d.num_rows} * d.key_dim * size(d.dtype));
      d.key_codes = bytes(entries * code_bytes(d)), d.key_scales = bytes(entries * scale_bytes(d));
    }
    field("size", &d.size), field("memory", &d.memory), field("num_rows", &d.num_rows);
    field("num_blocks", &d.num_blocks), field("entries_per_block", &d.entries_per_block);
    field("nope_dim", &d.nope_dim), field("rope_dim", &d.rope_dim);
    field("max_blocks", &d.max_blocks), field("key_dim", &d.key_dim), field("keys", &d.keys);
    field("dtype", &d.dtype), field("flags", &d.flags);
    call_ = [&d] { return kvx_hybrid_flush_write(&d, nullptr); };
    arrays_ = [&d]() -> std::vector<Array> {
      const Wide all = Wide{d.num_blocks} * d.entries_per_block;
      const bool has_keys = d.keys != KVX_HYBRID_NO_KEYS;
      return {at(&d.entry, Wide{d.num_rows} * (Wide{d.nope_dim} + d.rope_dim) * size(d.dtype)),
              at(&d.index_key, has_keys ? Wide{d.num_rows} * d.key_dim * size(d.dtype) : 0),
              at(&d.slots, Wide{d.num_rows} * 4),
              at(&d.entry_ids, Wide{d.num_rows} * 4),
              at(&d.mask, d.num_rows),
              at(&d.block_table, Wide{d.num_rows} * d.max_blocks * 4),
              at(&d.fp8, all * d.nope_dim, true),
              at(&d.rope, all * d.rope_dim * 2, true),
              at(&d.inv_scale, all * 4, true),
              at(&d.key_codes, has_keys ? all * code_bytes(d) : 0, true),
              at(&d.key_scales, has_keys ? all * scale_bytes(d) : 0, true)};
    };
    untouched_ = [this, &d, ids, slots, mask] {
      const Wide all = Wide{d.num_blocks} * d.entries_per_block;
      const auto written = [&d, ids, slots, mask](Wide entry) {
        const Wide row = entry / d.entries_per_block;  // the block of row i is block i
        return row < d.num_rows && (!mask || mask[row]) && (!slots || slots[row] != -1) &&
               entry % d.entries_per_block == ids[row] % static_cast<int32_t>(d.entries_per_block);
      };
      std::string found = kept(d.fp8, all, d.nope_dim, written);
      found +=
          kept(d.rope, all, Wide{d.rope_dim} * 2, written) + kept(d.inv_scale, all, 4, written);
      if (d.keys == KVX_HYBRID_NO_KEYS) return found;
      found += kept(d.key_codes, all, code_bytes(d), written);
      return found + kept(d.key_scales, all, scale_bytes(d), written);
    };
  }

  void state() {
    auto &d = state_;
    d.size = sizeof d, d.memory = KVX_MEMORY_HOST;
    d.num_rows = random_.below(6), d.num_slots = 1 + random_.below(5);
    d.ratio = 1 + random_.below(5), d.row = 1 + random_.below(40), d.state = number();
    const Wide all = Wide{d.num_slots} * d.ratio * d.row * size(d.state);
    const int32_t *const slots = slots_of(d.num_rows, d.num_slots, true);
    const uint8_t *const mask = mask_of(d.num_rows);
    d.slots = slots, d.mask = mask, d.ka = bytes(all), d.za = bytes(all);
    if (random_.one_in(2)) d.kb = bytes(all), d.zb = bytes(all);
    d.tail_len = numbers<int32_t>(d.num_slots);
    field("size", &d.size), field("memory", &d.memory), field("num_rows", &d.num_rows);
    field("num_slots", &d.num_slots), field("ratio", &d.ratio), field("row", &d.row);
    field("state", &d.state), field("reserved", &d.reserved);
    call_ = [&d] { return kvx_hybrid_rotate_state(&d, nullptr); };
    arrays_ = [&d]() -> std::vector<Array> {
      const Wide bytes = Wide{d.num_slots} * d.ratio * d.row * size(d.state);
      return {at(&d.slots, Wide{d.num_rows} * 4),
              at(&d.mask, d.num_rows),
              at(&d.ka, bytes, true),
              at(&d.za, bytes, true),
              at(&d.kb, bytes, true),
              at(&d.zb, bytes, true),
              at(&d.tail_len, Wide{d.num_slots} * 4, true)};
    };
    untouched_ = [this, &d, slots, mask] {
      const auto named = [&d, slots, mask](Wide slot) {
        for (uint32_t i = 0; i < d.num_rows; ++i)
          if ((!mask || mask[i]) && slots[i] == slot) return true;
        return false;
      };
      const Wide n = d.num_slots, row = Wide{d.ratio} * d.row * size(d.state);
      std::string found = kept(d.ka, n, row, named) + kept(d.za, n, row, named);
      if (d.kb) found += kept(d.kb, n, row, named) + kept(d.zb, n, row, named);
      return found + kept(d.tail_len, n, 4, named);
    };
  }

  void pages() {
    auto &d = pages_;
    const bool writes = random_.one_in(2);
    d.size = sizeof d, d.memory = KVX_MEMORY_HOST;
    d.num_rows = random_.below(5), d.num_pages = 1 + random_.below(3);
    d.entries_per_page = 1 + random_.below(4), d.dtype = number();
    d.page_stride = uint64_t{d.entries_per_page} * 584 + 2 * random_.below(40);
    const uint32_t most = d.num_pages * d.entries_per_page;
    auto *const slots = numbers<int64_t>(d.num_rows);
    for (uint32_t i = 0; i < d.num_rows; ++i)
      slots[i] = i >= most || random_.one_in(5) ? -1 : static_cast<int64_t>(i);
    if (d.num_rows && hostile())
      slots[random_.below(d.num_rows)] =
          random_.pick({int64_t{-2}, int64_t{most}, INT64_MAX, INT64_MIN});
    d.slots = slots, d.rows = bytes(Wide{d.num_rows} * 512 * size(d.dtype));
    const Wide page = Wide{d.entries_per_page} * 584;
    d.pages = bytes((Wide{d.num_pages} - 1) * d.page_stride + page);
    field("size", &d.size), field("memory", &d.memory), field("num_rows", &d.num_rows);
    field("num_pages", &d.num_pages), field("entries_per_page", &d.entries_per_page);
    field("dtype", &d.dtype), field("page_stride", &d.page_stride);
    call_ = [&d, writes] {
      return writes ? kvx_hybrid_write_pages(&d, nullptr) : kvx_hybrid_read_pages(&d, nullptr);
    };
    arrays_ = [&d, writes]() -> std::vector<Array> {
      const Wide all = (Wide{d.num_pages} - 1) * d.page_stride + Wide{d.entries_per_page} * 584;
      return {at(&d.slots, Wide{d.num_rows} * 8),
              at(&d.rows, Wide{d.num_rows} * 512 * size(d.dtype), !writes),
              at(&d.pages, all, writes)};
    };
    untouched_ = [this, &d, slots, writes]() -> std::string {
      if (!writes) {
        const Wide row = 512 * size(d.dtype);
        return kept(d.rows, d.num_rows, row, [slots](Wide i) { return slots[i] != -1; });
      }
      const Block *const block = memory_.find(d.pages);
      for (size_t b = 0; b < block->size; ++b) {
        if (block->data[b] == block->before[b]) continue;
        const Wide page_of = b / d.page_stride, in = b % d.page_stride;
        const Wide data = Wide{d.entries_per_page} * 576;
        if (in >= data + Wide{d.entries_per_page} * 8) return "padding has changed";
        const Wide entry = page_of * d.entries_per_page + (in < data ? in / 576 : (in - data) / 8);
        bool is_named = false;
        for (uint32_t i = 0; i < d.num_rows; ++i) is_named |= slots[i] == entry;
        if (!is_named) return "an entry that is not named has changed";
      }
      return "";
    };
  }

  static bool names(const int32_t *slots, uint32_t count, Wide slot) {
    for (uint32_t i = 0; i < count; ++i)
      if (slots[i] == slot) return true;
    return false;
  }

  void make() {
    using Make = void (HybridCase::*)();
    (this->*random_.pick({Make{&HybridCase::append}, Make{&HybridCase::tail},
                          Make{&HybridCase::compress}, Make{&HybridCase::flush},
                          Make{&HybridCase::state}, Make{&HybridCase::pages}}))();
  }

  // Changes fields and pointers.
  void change() {
    for (uint32_t times = 1 + random_.below(3); times; --times) {
      if (random_.one_in(3)) {
        std::vector<Array> all = arrays_();
        const Array &array = random_.pick(all), &other = random_.pick(all);
        const uint32_t how = random_.below(3);
        const auto *const bytes = static_cast<const uint8_t *>(*array.data);
        *array.data = how == 0 ? nullptr : how == 1 && bytes ? bytes + 1 : *other.data;
        story_ += "pointer changed, way " + std::to_string(how) + "\n";
        continue;
      }
      const Number &field = random_.pick(fields_);
      uint64_t value = 0;
      std::memcpy(&value, field.at, field.bytes);
      value = random_.pick({value + 1, value - 1, uint64_t{0}, uint64_t{1}, uint64_t{2},
                            uint64_t{3}, uint64_t{16}, uint64_t{4096}, uint64_t{4097},
                            uint64_t{INT32_MAX}, UINT64_MAX, value * 2, value ^ 0x80000000u});
      std::memcpy(field.at, &value, field.bytes);
      story_ += field.name + " = " + std::to_string(value) + "\n";
    }
  }

  // Whether every array is as long as the call says: others the library cannot know to be short.
  bool is_fair() {
    for (const Array &array : arrays_())
      if (*array.data && array.bytes > 0 && !memory_.holds(*array.data, array.bytes)) return false;
    return true;
  }

  Random random_;
  bool changes_, is_hostile_ = false;
  Memory memory_;
  std::string story_;
  std::vector<Number> fields_;
  std::function<kvx_status_t()> call_;
  std::function<std::vector<Array>()> arrays_;
  std::function<std::string()> untouched_;
  kvx_hybrid_append_t append_{};
  kvx_hybrid_tail_t tail_{};
  kvx_hybrid_compress_t compress_{};
  kvx_hybrid_flush_t flush_{};
  kvx_hybrid_state_t state_{};
  kvx_hybrid_pages_t pages_{};
};

}  // namespace fuzz
