// Calls of kvx_attend.h: valid ones of odd sizes, and ones with changed fields.
//
// After each call:
//   refused   every byte is what it was, and there is a sentence
//   accepted  nothing but elements of the output has changed
#pragma once

#include <string>
#include <vector>

#include "case.h"
#include "generate.h"
#include "kvx/kvx_attend.h"
#include "mutate.h"
#include "oracle.h"

namespace fuzz {

class AttendCase {
 public:
  AttendCase(Random random, bool changes, bool big) : random_(random), changes_(changes) {
    make_cache(big);
    kvx_cache_desc_t &cache = c_.dst.layers[0];
    attend_.size = sizeof attend_;
    attend_.block = random_.below(cache.num_blocks);
    attend_.start = random_.below(cache.block_size);
    attend_.end = attend_.start + 1 + random_.below(cache.block_size - attend_.start);
    attend_.scale = 0.125f;
    const int64_t heads = int64_t{cache.num_kv_heads} * (1 + random_.below(3));
    attend_.query = vectors(heads, cache.head_dim);
    attend_.out = vectors(heads, is_absent(cache.v) ? cache.head_dim : numbers_in(cache.v));
    make_scale(cache.k, cache.num_kv_heads, &scales_[0]);
    make_scale(cache.v, cache.num_kv_heads, &scales_[1]);
    if (!changes && random_.one_in(8)) make_hostile(cache);
    for (uint32_t i = 0; changes && i < 1 + random_.below(3); ++i) change();
  }

  // The sentence of what is wrong, "" if nothing is. `status` is the call's.
  std::string run(kvx_status_t *status, bool *called) {
    *called = !changes_ || is_fair();
    if (!*called) return "";
    c_.memory.snapshot();
    *status = call();
    if (*status != KVX_STATUS_OK) {
      if (!c_.memory.unchanged()) return "a refused call has changed memory";
      const std::string sentence = kvx_last_error();
      if (sentence.empty() || sentence.size() > 400) return "no readable sentence";
      const bool is_right = changes_ || is_hostile_ || !is_supported();
      return is_right ? "" : "a valid call was refused: " + sentence;
    }
    if (is_hostile_) return "accepted a number that is out of range";
    return kept();
  }

  const std::string &story() const { return c_.story; }

 private:
  // Most caches have the numbers of a head apart from each other: some of them are enough.
  void make_cache(bool big) {
    Generator(random_, kValidate, false, big, &c_);
    for (int i = 0; i < 3 && !is_supported(); ++i) {
      c_ = {};
      Generator(random_, kValidate, false, big, &c_);
    }
  }

  kvx_tensor_desc_t vectors(int64_t heads, int64_t dim) {
    kvx_tensor_desc_t made{};
    made.size = sizeof made, made.dtype = KVX_DTYPE_F32, made.memory = KVX_MEMORY_HOST;
    made.ndim = 2, made.shape[0] = heads, made.shape[1] = dim;
    const bool by_head = random_.one_in(3);
    made.stride[by_head ? 0 : 1] = 1 + random_.below(2);
    made.stride[by_head ? 1 : 0] =
        (by_head ? heads : dim) * made.stride[by_head ? 0 : 1] + random_.below(3);
    const int64_t span = span_of(made.ndim, made.shape, made.stride);
    made.data = c_.memory.allocate(random_, static_cast<size_t>(span) * sizeof(float));
    return made;
  }

  void make_scale(const kvx_tensor_desc_t &half, uint32_t heads, kvx_scale_desc_t *scale) {
    if (is_absent(half) || !takes_scale(half.dtype) || random_.one_in(3)) return;
    scale->size = sizeof *scale, scale->dtype = KVX_DTYPE_F32;
    scale->granularity = KVX_SCALE_PER_HEAD;
    scale->ndim = 1, scale->shape[0] = heads, scale->stride[0] = 1 + random_.below(3);
    const int64_t span = span_of(scale->ndim, scale->shape, scale->stride);
    auto *const data =
        reinterpret_cast<float *>(c_.memory.allocate(random_, static_cast<size_t>(span) * 4));
    for (int64_t i = 0; i < span; ++i) data[i] = 0.25f + static_cast<float>(random_.below(8));
    scale->data = data;
  }

  void make_hostile(const kvx_cache_desc_t &cache) {
    is_hostile_ = true;
    switch (random_.below(4)) {
      case 0:
        attend_.block = random_.pick<uint32_t>({cache.num_blocks, UINT32_MAX, 1u << 31});
        break;
      case 1:
        attend_.end = random_.pick<uint32_t>({cache.block_size + 1, UINT32_MAX, attend_.start});
        break;
      case 2:
        attend_.start = random_.pick<uint32_t>({attend_.end, UINT32_MAX});
        break;
      default:
        attend_.scale = random_.pick({INFINITY, -INFINITY, NAN});
    }
  }

  void change() {
    Fields fields;
    fields.cache("cache", &c_.dst.layers[0]);
    fields.add(Field::kSize, "size", &attend_.size);
    fields.add(Field::kCount, "block", &attend_.block);
    fields.add(Field::kCount, "start", &attend_.start);
    fields.add(Field::kCount, "end", &attend_.end);
    fields.add(Field::kCount, "scale", &attend_.scale);
    fields.add(Field::kCount, "reserved", &attend_.reserved);
    fields.tensor("query", &attend_.query);
    fields.tensor("out", &attend_.out);
    for (kvx_scale_desc_t &scale : scales_)
      if (scale.size) fields.scale("scale", &scale);
    mutate(random_, fields, &c_.memory, &c_.story);
  }

  // Whether every byte that the descriptors speak of is there.
  bool is_fair() {
    const auto fits = [this](const kvx_tensor_desc_t &tensor) {
      return tensor_fits(c_.memory, tensor, static_cast<const uint8_t *>(tensor.data));
    };
    for (int kv : {0, 1})
      if (scales_[kv].size) c_.dst.scales[kv] = {scales_[kv]};
    return end_fits(c_.memory, c_.dst) && scales_fit(c_.memory, c_.dst) && fits(attend_.query) &&
           fits(attend_.out);
  }

  kvx_status_t call() {
    Placed placed;
    kvx_attend_desc_t attend = attend_;
    if (scales_[0].size) attend.k_scale = placed.put(scales_[0]);
    if (scales_[1].size) attend.v_scale = placed.put(scales_[1]);
    return kvx_attend_kv(placed.put(c_.dst.layers[0]), placed.put(attend));
  }

  static int64_t numbers_in(const kvx_tensor_desc_t &half) {
    return dim_of(half) * numbers_of(half.dtype);
  }

  // Whether this valid call is one of those that the library carries out.
  bool is_supported() const {
    const kvx_cache_desc_t &cache = c_.dst.layers[0];
    if (is_absent(cache.v)) return false;
    for (const kvx_tensor_desc_t *half : {&cache.k, &cache.v}) {
      if (half->dtype == KVX_DTYPE_U8) return false;
      const bool is_split = half->ndim == 5 && half->shape[2] > 1;
      const uint32_t inner = half->ndim - 1;
      if (is_split || (half->shape[inner] > 1 && half->stride[inner] != 1)) return false;
    }
    return true;
  }

  // "" if only elements of the output have changed.
  std::string kept() {
    const kvx_tensor_desc_t &out = attend_.out;
    const Block *const mine = c_.memory.find(out.data);
    std::vector<bool> may(mine ? mine->size : 0);
    const auto first = static_cast<int64_t>(static_cast<uint8_t *>(out.data) - mine->data.get());
    for (int64_t head = 0; head < out.shape[0]; ++head)
      for (int64_t d = 0; d < out.shape[1]; ++d)
        for (int64_t byte = 0; byte < 4; ++byte)
          may[static_cast<size_t>(first + 4 * (head * out.stride[0] + d * out.stride[1]) + byte)] =
              true;
    for (const auto &block : c_.memory.blocks)
      for (size_t i = 0; i < block->size; ++i)
        if (block->data[i] != block->before[i] && !(block.get() == mine && may[i]))
          return "a byte that is no element of the output has changed";
    return "";
  }

  Random random_;
  Case c_;
  kvx_attend_desc_t attend_{};
  kvx_scale_desc_t scales_[2]{};
  const bool changes_;
  bool is_hostile_ = false;
};

}  // namespace fuzz
