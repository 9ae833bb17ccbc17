// Random numbers, and memory whose every byte is accounted for.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <vector>

#include "kvx/kvx_abi.h"

namespace fuzz {

using Wide = __int128;

struct Random {
  uint64_t state;

  uint64_t next() {  // splitmix64
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  uint32_t below(uint64_t n) { return static_cast<uint32_t>(next() % n); }
  bool one_in(uint32_t n) { return below(n) == 0; }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[below(values.size())];
  }
  template <class T>
  T &pick(std::vector<T> &values) {
    return values[below(values.size())];
  }
};

struct Block {
  std::unique_ptr<uint8_t[]> data;
  size_t size = 0;
  std::vector<uint8_t> before;
  std::vector<uint8_t> writes;    // how often an accepted call may write this byte: 0, 1, 2 (many)
  std::vector<uint8_t> expected;  // what one write stores, where that is known
  std::vector<uint8_t> known;
};

struct Memory {
  std::vector<std::unique_ptr<Block>> blocks;
  Block *last = nullptr;  // the one found before: neighbours are asked for one after the other

  uint8_t *allocate(Random &random, size_t size) {
    auto block = std::make_unique<Block>();
    block->size = std::max<size_t>(size, 1);
    block->data.reset(new uint8_t[block->size]);
    for (size_t i = 0; i < block->size; i += 8) {
      const uint64_t bits = random.next();
      std::memcpy(block->data.get() + i, &bits, std::min<size_t>(8, block->size - i));
    }
    blocks.push_back(std::move(block));
    return blocks.back()->data.get();
  }
  Block *find(const void *pointer) {
    const auto *p = static_cast<const uint8_t *>(pointer);
    const auto holds = [p](const Block &block) {
      return p >= block.data.get() && p < block.data.get() + block.size;
    };
    if (last && holds(*last)) return last;
    for (auto &block : blocks) {
      if (holds(*block)) return last = block.get();
    }
    return nullptr;
  }
  bool holds(const void *pointer, Wide bytes) {
    const Block *block = find(pointer);
    if (!block) return false;
    return bytes <= block->data.get() + block->size - static_cast<const uint8_t *>(pointer);
  }
  void snapshot() {
    for (auto &block : blocks)
      block->before.assign(block->data.get(), block->data.get() + block->size);
  }
  bool unchanged() const {
    for (const auto &block : blocks) {
      if (std::memcmp(block->data.get(), block->before.data(), block->size) != 0) return false;
    }
    return true;
  }
};

inline int64_t size_of(kvx_dtype_t dtype) {
  switch (dtype) {
    case KVX_DTYPE_F16:
    case KVX_DTYPE_BF16:
      return 2;
    case KVX_DTYPE_F32:
    case KVX_DTYPE_S32:
    case KVX_DTYPE_U32:
      return 4;
    case KVX_DTYPE_Q8_0:
      return 34;
    case KVX_DTYPE_Q4_0:
    case KVX_DTYPE_IQ4_NL:
      return 18;
    case KVX_DTYPE_MXFP4:
      return 17;
    case KVX_DTYPE_Q4_K:
      return 144;
    case KVX_DTYPE_Q5_K:
      return 176;
    case KVX_DTYPE_Q6_K:
      return 210;
    case KVX_DTYPE_TQ2:
      return 34;
    case KVX_DTYPE_TQ3:
      return 50;
    case KVX_DTYPE_TQ4:
      return 66;
    case KVX_DTYPE_Q4_1:
      return 20;
    case KVX_DTYPE_Q5_0:
      return 22;
    case KVX_DTYPE_Q5_1:
      return 24;
    case KVX_DTYPE_S64:
    case KVX_DTYPE_U64:
      return 8;
    default:
      return 1;
  }
}

// Numbers of one element.
inline int64_t numbers_of(kvx_dtype_t dtype) {
  if (dtype >= KVX_DTYPE_TQ2 && dtype <= KVX_DTYPE_TQ4) return 128;
  if (dtype >= KVX_DTYPE_Q4_K && dtype <= KVX_DTYPE_Q6_K) return 256;
  if (dtype == KVX_DTYPE_F4_E2M1) return 2;
  const bool is_unit = dtype == KVX_DTYPE_Q8_0 || dtype == KVX_DTYPE_Q4_0 ||
                       dtype == KVX_DTYPE_MXFP4 ||
                       (dtype >= KVX_DTYPE_Q4_1 && dtype <= KVX_DTYPE_Q5_1);
  return is_unit ? 32 : 1;
}

inline bool takes_scale(kvx_dtype_t dtype) {
  return dtype == KVX_DTYPE_F8_E4M3 || dtype == KVX_DTYPE_F8_E5M2 ||
         dtype == KVX_DTYPE_F8_E4M3FNUZ || dtype == KVX_DTYPE_S8;
}

// Bytes with a scale and a zero point for each group of them. Spec: E.14
inline bool is_affine(kvx_dtype_t dtype) {
  return dtype == KVX_DTYPE_U8_ZERO || dtype == KVX_DTYPE_U8_BIAS;
}

// Numbers with a scale, and perhaps more, for each group of them. Spec: E.14, E.18
inline bool has_groups(kvx_dtype_t dtype) { return is_affine(dtype) || dtype == KVX_DTYPE_F4_E2M1; }

inline bool is_absent(const kvx_tensor_desc_t &tensor) { return !tensor.data && tensor.ndim == 0; }

// Of any alignment: a mutated call is looked at before the library has refused it.
inline int64_t read_int(const void *data, kvx_dtype_t dtype, uint64_t i) {
  const auto *bytes = static_cast<const uint8_t *>(data);
  if (dtype == KVX_DTYPE_S64 || dtype == KVX_DTYPE_U64) {
    int64_t wide;
    std::memcpy(&wide, bytes + i * sizeof wide, sizeof wide);
    return wide;
  }
  int32_t value;
  std::memcpy(&value, bytes + i * sizeof value, sizeof value);
  return value;
}

inline float read_scale(const void *data, kvx_dtype_t dtype) {
  uint32_t bits = 0;
  float value;
  if (dtype == KVX_DTYPE_F16) {
    uint16_t half;
    std::memcpy(&half, data, sizeof half);
    const int exponent = (half >> 10) & 31, mantissa = half & 1023;
    value = exponent == 31 ? (mantissa ? NAN : INFINITY)
            : exponent     ? std::ldexp(1024.0f + static_cast<float>(mantissa), exponent - 25)
                           : std::ldexp(static_cast<float>(mantissa), -24);
    return half & 0x8000 ? -value : value;
  }
  if (dtype == KVX_DTYPE_BF16) {
    std::memcpy(reinterpret_cast<uint8_t *>(&bits) + 2, data, 2);
  } else {
    std::memcpy(&bits, data, sizeof bits);
  }
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace fuzz
