#include "encodings/turboquant.h"

#include <cmath>
#include <cstring>
#include <type_traits>

#include "cpu/kernels/kernels.h"
#include "error.h"
#include "extent.h"
#include "formats/units.h"

namespace kvx::turboquant {
namespace {

constexpr uint64_t kMostBytes = uint64_t{1} << 62;

// ---- rules ----

// Bytes from the first row's first byte to the last row's last.
uint64_t reach_of(const Rows &of, uint64_t rows) {
  return rows ? (rows - 1) * static_cast<uint64_t>(of.stride) + of.row_bytes : 0;
}

kvx_status_t check_rows(const Rows &of, uint64_t rows, uint64_t alignment, const char *unit) {
  if (!rows) return KVX_STATUS_OK;
  if (!of.data) return KVX_INVALID("%s is NULL (spec E.20)", of.name);
  const auto begin = reinterpret_cast<uintptr_t>(of.data);
  if (begin % alignment) {
    return KVX_INVALID("%s is %p, expected a multiple of %llu bytes (spec E.20)", of.name, of.data,
                       static_cast<ull>(alignment));
  }
  if (rows > 1 && (of.stride < 0 || static_cast<uint64_t>(of.stride) < of.row_bytes)) {
    return KVX_INVALID(
        "%s has a stride of %lld bytes, expected at least the %llu of a %s (spec E.20)", of.name,
        static_cast<ll>(of.stride), static_cast<ull>(of.row_bytes), unit);
  }
  const bool is_past = (rows > 1 && static_cast<uint64_t>(of.stride) > kMostBytes / (rows - 1)) ||
                       begin + reach_of(of, rows) < begin;
  if (is_past) {
    return KVX_INVALID(
        "%s has %llu rows, %lld bytes apart: they reach past the end of memory (spec E.20)",
        of.name, static_cast<ull>(rows), static_cast<ll>(of.stride));
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_apart(const Rows &written, const Rows &other, uint64_t rows) {
  if (!rows || !intersect(extent_at(written.data, reach_of(written, rows)),
                          extent_at(other.data, reach_of(other, rows)))) {
    return KVX_STATUS_OK;
  }
  return KVX_INVALID(
      "%s at %p overlaps %s at %p, expected memory of its own: pass a copy (spec E.20)",
      written.name, written.data, other.name, other.data);
}

// A stride in float32 numbers as one in bytes; saturated, which check_rows refuses.
int64_t in_bytes(int64_t numbers) {
  int64_t bytes;
  return __builtin_mul_overflow(numbers, int64_t{4}, &bytes) ? numbers < 0 ? INT64_MIN : INT64_MAX
                                                             : bytes;
}
Rows numbers_of(const char *name, const float *data, int64_t stride, uint32_t dim) {
  return {name, data, in_bytes(stride), uint64_t{dim} * 4};
}

kvx_status_t check_unit(uint32_t dim, uint32_t bits, uint32_t flags) {
  if (!is_dim(dim)) return KVX_INVALID("dim is %u, expected 64, 128 or 256 (spec E.20)", dim);
  if (bits < 2 || bits > 4) return KVX_INVALID("bits is %u, expected 2, 3 or 4 (spec E.20)", bits);
  if (flags & ~KVX_TURBOQUANT_RESIDUAL) {
    return KVX_INVALID("flags is %#x, expected no bits but RESIDUAL (1) (spec E.20)", flags);
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_slot(uint32_t dim, kvx_turboquant_slot_t kind) {
  if (!is_dim(dim)) return KVX_INVALID("dim is %u, expected 64, 128 or 256 (spec E.20)", dim);
  if (kind < KVX_TURBOQUANT_K8V4 || kind > KVX_TURBOQUANT_3BIT_NC) {
    return KVX_INVALID("kind is %d, expected K8V4 (0) to 3BIT_NC (3) (spec E.20)", kind);
  }
  return KVX_STATUS_OK;
}

// ---- units ----

// The parts of a unit, in their order: codes, signs of the residual, norm, norm of the residual.
struct UnitShape {
  int dim, code_bits;
  bool has_residual;

  UnitShape(uint32_t of_dim, uint32_t bits, uint32_t flags)
      : dim(static_cast<int>(of_dim)),
        code_bits(static_cast<int>(bits)),
        has_residual(flags & KVX_TURBOQUANT_RESIDUAL) {
    code_bits -= has_residual;
  }
  int signs() const { return code_bytes(dim, code_bits); }
  int norm() const { return signs() + (has_residual ? dim / 8 : 0); }
  int residual_norm() const { return norm() + 2; }
  int bytes() const { return norm() + (has_residual ? 4 : 2); }
};

void encode_unit(uint8_t *unit, const float *values, const UnitShape &shape, const Book &book) {
  const cpu::TurboQuantKernels &kernels = cpu::kernels().turboquant;
  float rest[kMostDim];
  float *const residual = shape.has_residual ? rest : nullptr;
  const float norm = kernels.encode(unit, residual, values, book);
  put_half(unit + shape.norm(), UnitScale::saturate(norm));
  if (!shape.has_residual) return;
  const float length = kernels.encode_signs(unit + shape.signs(), rest, shape.dim);
  // Of a unit vector: `rest` is sqrt(dim) times as long.
  put_half(unit + shape.residual_norm(), length / std::sqrt(static_cast<float>(shape.dim)));
}

void decode_unit(float *values, const uint8_t *unit, const UnitShape &shape, const Book &book) {
  const cpu::TurboQuantKernels &kernels = cpu::kernels().turboquant;
  float rest[kMostDim];
  if (shape.has_residual) {
    // A unit vector and the signs of its coordinates have an inner product of sqrt(dim) times the
    // only centroid of one bit, on average; the rotation multiplies by sqrt(dim) once more.
    const float mean = kCentroids[0][place_of_dim(shape.dim)][0];
    const float length = get_half(unit + shape.residual_norm());
    const float root = std::sqrt(static_cast<float>(shape.dim));
    kernels.decode_signs(rest, unit + shape.signs(), length / mean / root, shape.dim);
  }
  kernels.decode(values, unit, shape.has_residual ? rest : nullptr, get_half(unit + shape.norm()),
                 book);
}

// ---- slots ----

// Where the parts of a slot begin. A key in E4M3 has no norm.
struct SlotShape {
  int dim, key_bits, value_bits;

  SlotShape(uint32_t of_dim, kvx_turboquant_slot_t kind)
      : dim(static_cast<int>(of_dim)),
        key_bits(kind == KVX_TURBOQUANT_K8V4      ? 8
                 : kind == KVX_TURBOQUANT_4BIT_NC ? 4
                                                  : 3),
        value_bits(kind == KVX_TURBOQUANT_3BIT_NC ? 3 : 4) {}
  bool has_e4m3() const { return key_bits == 8; }
  int norm() const { return code_bytes(dim, key_bits); }
  int value() const { return norm() + (has_e4m3() ? 0 : 2); }
  int scale() const { return value() + code_bytes(dim, value_bits); }
  int bytes() const { return scale() + 4; }
};

void encode_slot(uint8_t *slot, const float *key, const float *value, const SlotShape &shape,
                 const Book &book) {
  const cpu::TurboQuantKernels &kernels = cpu::kernels().turboquant;
  if (shape.has_e4m3()) {
    cpu::kernels().encode[row_of(KVX_DTYPE_F8_E4M3)](slot, key, shape.dim);
  } else {
    put_half(slot + shape.norm(), kernels.encode(slot, nullptr, key, book));
  }
  const ScaleZero with =
      kernels.encode_steps(slot + shape.value(), value, shape.dim, shape.value_bits);
  put_half(slot + shape.scale(), with.scale), put_half(slot + shape.scale() + 2, with.zero);
}

void decode_slot(float *key, float *value, const uint8_t *slot, const SlotShape &shape,
                 const Book &book) {
  const cpu::TurboQuantKernels &kernels = cpu::kernels().turboquant;
  if (shape.has_e4m3()) {
    cpu::kernels().decode[row_of(KVX_DTYPE_F8_E4M3)](key, slot, shape.dim);
  } else {
    kernels.decode(key, slot, nullptr, get_half(slot + shape.norm()), book);
  }
  const uint8_t *const scale = slot + shape.scale();
  kernels.decode_steps(value, slot + shape.value(), shape.dim, shape.value_bits,
                       {get_half(scale), get_half(scale + 2)});
}

Book book_of_slot(const SlotShape &shape) {
  return shape.has_e4m3() ? Book{} : slot_book(shape.dim, shape.key_bits);
}

// Checks units and rows of numbers, and calls code(unit, row, shape, book) for each. What is not
// const is written.
template <class Byte, class Number, class Code>
kvx_status_t each_unit(Byte *units, int64_t unit_stride, Number *values, int64_t row_stride,
                       uint64_t rows, uint32_t dim, uint32_t bits, uint32_t flags, Code code) {
  KVX_TRY(check_unit(dim, bits, flags));
  const Rows coded = {"units", units, unit_stride, unit_bytes(dim, bits, flags)},
             plain = numbers_of("values", values, row_stride, dim);
  KVX_TRY(check_rows(coded, rows, 1, "unit"));
  KVX_TRY(check_rows(plain, rows, 4, "row"));
  KVX_TRY(std::is_const_v<Number> ? check_apart(coded, plain, rows)
                                  : check_apart(plain, coded, rows));
  const UnitShape shape(dim, bits, flags);
  const Book with = book(shape.dim, shape.code_bits);
  for (uint64_t row = 0; row < rows; ++row) {
    const auto r = static_cast<int64_t>(row);
    code(units + r * unit_stride, values + r * row_stride, shape, with);
  }
  return KVX_STATUS_OK;
}

}  // namespace

uint32_t unit_bytes(uint32_t dim, uint32_t bits, uint32_t flags) {
  if (!is_dim(dim) || bits < 2 || bits > 4 || flags & ~KVX_TURBOQUANT_RESIDUAL) return 0;
  return static_cast<uint32_t>(UnitShape(dim, bits, flags).bytes());
}

kvx_status_t encode(void *units, int64_t unit_stride, const float *values, int64_t row_stride,
                    uint64_t rows, uint32_t dim, uint32_t bits, uint32_t flags) {
  return each_unit(static_cast<uint8_t *>(units), unit_stride, values, row_stride, rows, dim, bits,
                   flags, encode_unit);
}

kvx_status_t decode(float *values, int64_t row_stride, const void *units, int64_t unit_stride,
                    uint64_t rows, uint32_t dim, uint32_t bits, uint32_t flags) {
  return each_unit(static_cast<const uint8_t *>(units), unit_stride, values, row_stride, rows, dim,
                   bits, flags,
                   [](const uint8_t *unit, float *to, const UnitShape &shape, const Book &with) {
                     decode_unit(to, unit, shape, with);
                   });
}

uint32_t slot_bytes(uint32_t dim, kvx_turboquant_slot_t kind) {
  if (!is_dim(dim) || kind < KVX_TURBOQUANT_K8V4 || kind > KVX_TURBOQUANT_3BIT_NC) return 0;
  return static_cast<uint32_t>(SlotShape(dim, kind).bytes());
}

kvx_status_t encode_slots(void *slots, int64_t slot_stride, const float *keys, const float *values,
                          int64_t row_stride, uint64_t rows, uint32_t dim,
                          kvx_turboquant_slot_t kind) {
  KVX_TRY(check_slot(dim, kind));
  const Rows to = {"slots", slots, slot_stride, slot_bytes(dim, kind)},
             from[] = {numbers_of("keys", keys, row_stride, dim),
                       numbers_of("values", values, row_stride, dim)};
  KVX_TRY(check_rows(to, rows, 1, "slot"));
  for (const Rows &one : from) {
    KVX_TRY(check_rows(one, rows, 4, "row"));
    KVX_TRY(check_apart(to, one, rows));
  }
  const SlotShape shape(dim, kind);
  const Book with = book_of_slot(shape);
  auto *const first = static_cast<uint8_t *>(slots);
  for (uint64_t row = 0; row < rows; ++row) {
    const auto r = static_cast<int64_t>(row);
    encode_slot(first + r * slot_stride, keys + r * row_stride, values + r * row_stride, shape,
                with);
  }
  return KVX_STATUS_OK;
}

kvx_status_t decode_slots(float *keys, float *values, int64_t row_stride, const void *slots,
                          int64_t slot_stride, uint64_t rows, uint32_t dim,
                          kvx_turboquant_slot_t kind) {
  KVX_TRY(check_slot(dim, kind));
  const Rows from = {"slots", slots, slot_stride, slot_bytes(dim, kind)},
             to[] = {numbers_of("keys", keys, row_stride, dim),
                     numbers_of("values", values, row_stride, dim)};
  KVX_TRY(check_rows(from, rows, 1, "slot"));
  for (const Rows &one : to) {
    KVX_TRY(check_rows(one, rows, 4, "row"));
    KVX_TRY(check_apart(one, from, rows));
  }
  KVX_TRY(check_apart(to[0], to[1], rows));
  const SlotShape shape(dim, kind);
  const Book with = book_of_slot(shape);
  const auto *const first = static_cast<const uint8_t *>(slots);
  for (uint64_t row = 0; row < rows; ++row) {
    const auto r = static_cast<int64_t>(row);
    decode_slot(keys + r * row_stride, values + r * row_stride, first + r * slot_stride, shape,
                with);
  }
  return KVX_STATUS_OK;
}

}  // namespace kvx::turboquant
