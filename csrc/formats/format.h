// Questions about a format, answered from the table. A number that is no format gets row 0, of kind
// None, which the rules refuse.
#pragma once

#include <cstdint>

#include "formats/table.h"
#include "kvx/kvx_abi.h"

namespace kvx {

enum class FormatClass : uint8_t { kNone, kNumber, kIndex, kUnused, kOpaque };

// Data that a format keeps beside its units.
enum class Beside : uint8_t {
  kNothing,
  kScale,       // scales, or none: value = stored * scale
  kScaleZero,   // a scale and a zero point for each unit [E.14]
  kGroupScale,  // a scale for each group of numbers, and one for the tensor or none [E.18]
};

struct Format {
  const char *name;
  float largest;  // finite number; 0: no such bound
  FormatClass kind;
  Beside beside;
  uint8_t numbers_log2;  // of a unit, along dim
  uint8_t bytes, alignment;
  uint8_t digits;  // of precision; 0: it is no float
  int16_t lowest;  // exponent of the smallest positive number of a float
};

constexpr uint8_t log2_of(uint32_t power) {
  return power > 1 ? static_cast<uint8_t>(1 + log2_of(power / 2)) : 0;
}

inline constexpr Format kFormats[] = {
    {"no kvx_dtype_t", 0, FormatClass::kNone, Beside::kNothing, 0, 0, 1, 0, 0},
#define KVX_ROW(name, codec, kind, numbers, bytes, alignment, largest, beside, digits, lowest)   \
  {#name,  largest, FormatClass::k##kind, Beside::k##beside, log2_of(numbers), bytes, alignment, \
   digits, lowest},
    KVX_FORMATS(KVX_ROW)
#undef KVX_ROW
};
constexpr uint32_t kNumFormats = sizeof kFormats / sizeof kFormats[0];  // row 0 included

// The rows are in the order of kvx_dtype_t, without gaps.
constexpr bool rows_are_in_order() {
  int row = 0;
#define KVX_ROW(name, ...) \
  if (KVX_DTYPE_##name != ++row) return false;
  KVX_FORMATS(KVX_ROW)
#undef KVX_ROW
  return true;
}
static_assert(rows_are_in_order());

constexpr uint32_t row_of(kvx_dtype_t dtype) {
  const auto row = static_cast<uint32_t>(dtype);
  return row < kNumFormats ? row : 0;
}
constexpr const Format &format_of(kvx_dtype_t dtype) { return kFormats[row_of(dtype)]; }

// Bytes of a unit: the element of a tensor, whose shape and strides count units.
constexpr int64_t size_of(kvx_dtype_t dtype) { return format_of(dtype).bytes; }

// The alignment of a unit: a power of two.
constexpr int64_t alignment_of(kvx_dtype_t dtype) { return format_of(dtype).alignment; }

// Units that hold `numbers` numbers, a multiple of a unit's; and their bytes.
constexpr int64_t units_of(kvx_dtype_t dtype, int64_t numbers) {
  return numbers >> format_of(dtype).numbers_log2;
}
constexpr int64_t bytes_of(kvx_dtype_t dtype, int64_t numbers) {
  return units_of(dtype, numbers) * size_of(dtype);
}
constexpr int64_t numbers_of(kvx_dtype_t dtype, int64_t units) {
  return units << format_of(dtype).numbers_log2;
}

constexpr const char *name_of(kvx_dtype_t dtype) { return format_of(dtype).name; }

constexpr bool is_number(kvx_dtype_t dtype) {
  return format_of(dtype).kind == FormatClass::kNumber;
}
// Whether it is bytes that no call interprets.
constexpr bool is_opaque(kvx_dtype_t dtype) {
  return format_of(dtype).kind == FormatClass::kOpaque;
}
constexpr bool is_index_type(kvx_dtype_t dtype) {
  return format_of(dtype).kind == FormatClass::kIndex;
}
// Whether caches and tokens on their way may have it.
constexpr bool is_element_type(kvx_dtype_t dtype) { return is_number(dtype) || is_opaque(dtype); }
constexpr bool is_scale_type(kvx_dtype_t dtype) {
  return dtype == KVX_DTYPE_F32 || dtype == KVX_DTYPE_F16 || dtype == KVX_DTYPE_BF16;
}

// Whether a unit is one number, so that strides of numbers are strides of units.
constexpr bool is_scalar(kvx_dtype_t dtype) { return format_of(dtype).numbers_log2 == 0; }

// Whether every finite number of a float format is one of another. Formats that are no floats have
// no such numbers, and -128 of S8 does not come back from any.
constexpr bool includes(kvx_dtype_t dtype, kvx_dtype_t other) {
  const Format &mine = format_of(dtype), &its = format_of(other);
  return its.digits && other != KVX_DTYPE_S8 && mine.digits >= its.digits &&
         mine.lowest <= its.lowest && mine.largest >= its.largest;
}

// Whether it is FP8 or S8: a byte per number, with a scale or without.
constexpr bool takes_scale(kvx_dtype_t dtype) { return format_of(dtype).beside == Beside::kScale; }

// Whether scales of groups lie beside the data, but no zero points: F4_E2M1.
constexpr bool has_group_scales(kvx_dtype_t dtype) {
  return format_of(dtype).beside == Beside::kGroupScale;
}

// Whether a number depends on all of its unit, so that units are converted as a whole [E.20].
constexpr bool is_turboquant(kvx_dtype_t dtype) {
  return dtype == KVX_DTYPE_TQ2 || dtype == KVX_DTYPE_TQ3 || dtype == KVX_DTYPE_TQ4;
}

// Whether numbers mean nothing without what lies beside the data: a scale and a zero point, or the
// scale of a group.
constexpr bool is_affine(kvx_dtype_t dtype) {
  return format_of(dtype).beside == Beside::kScaleZero || has_group_scales(dtype);
}

// "F16, BF16 or F32": the names of the formats for which `is_one` holds.
struct Names {
  char text[512];
  int size;

  constexpr explicit Names(bool (*is_one)(kvx_dtype_t)) : text(), size() {
    const char *last = nullptr;
    for (uint32_t row = 1; row < kNumFormats; ++row) {
      if (!is_one(static_cast<kvx_dtype_t>(row))) continue;
      if (last) add(size ? ", " : ""), add(last);
      last = kFormats[row].name;
    }
    if (size) add(" or ");
    if (last) add(last);
  }
  constexpr void add(const char *word) {
    while (*word) text[size++] = *word++;
  }
};
inline constexpr Names kElementNames(is_element_type), kIndexNames(is_index_type);

// What errors expect if is_element_type(), is_scale_type() or is_index_type() is false.
constexpr const char *kElementTypes = kElementNames.text;
constexpr const char *kScaleTypes = "F32, F16 or BF16";
constexpr const char *kIndexTypes = kIndexNames.text;

}  // namespace kvx
