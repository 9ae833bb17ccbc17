#include "cpu/affine_ends.h"

#include <algorithm>
#include <cstring>

#include "cpu/convert.h"
#include "desc/scale.h"

namespace kvx::cpu {
namespace {

// What kPiece numbers of any format take, but those of tables.
constexpr int64_t kStageBytes = kPiece * 8;
#define KVX_ROW(name, codec, kind, numbers, bytes, ...) \
  static_assert(kPiece % numbers == 0 && kPiece / numbers * bytes <= kStageBytes);
KVX_FORMATS(KVX_ROW)
#undef KVX_ROW

constexpr int64_t kLeastGroup = 16;  // numbers of a group of F4_E2M1

// Numbers [first, first + count) of the groups of a place's head.
void load_groups(const GroupNumbers &all, const Place &place, uint32_t head, int64_t first,
                 int64_t count, float *numbers) {
  const uint8_t *at =
      all.data + all.offset_of(place.block, place.offset, head) + first * all.group_stride;
  if (all.dtype == KVX_DTYPE_F32 && all.group_stride == 4) {
    std::memcpy(numbers, at, static_cast<size_t>(count) * 4);
    return;
  }
  for (int64_t i = 0; i < count; ++i, at += all.group_stride)
    numbers[i] = read_scale(at, all.dtype);
}

uint8_t *group_scale_at(const GroupNumbers &all, const Place &place, uint32_t head, int64_t group) {
  return all.data +
         all.offset_of(place.block, place.offset, int64_t{head}, static_cast<uint32_t>(group));
}

// The scale of a tensor of F4_E2M1.
float tensor_scale_of(const AffineEnd &end) {
  return end.group && end.zeros.data ? read_scale(end.zeros.data, end.zeros.dtype) : 1.0f;
}

void copy_groups(const GroupNumbers &to, uint8_t *dst, const GroupNumbers &from, const uint8_t *src,
                 int64_t count) {
  const auto size = static_cast<size_t>(size_of(to.dtype));
  if (to.group_stride == from.group_stride && to.group_stride == size_of(to.dtype)) {
    std::memcpy(dst, src, static_cast<size_t>(count) * size);
    return;
  }
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(dst + i * to.group_stride, src + i * from.group_stride, size);
}

}  // namespace

// ---- the source ----

AffineSource::AffineSource(const PlanePair &pair, const AffineEnd &end)
    : plane_(pair.src),
      end_(end),
      scales_(pair.src_scales),
      is_dense_(is_dense_vector(pair.src, units_of(pair.src.dtype, pair.head_dim))),
      tensor_scale_(has_group_scales(pair.src.dtype) ? tensor_scale_of(end) : 1.0f) {}

const uint8_t *AffineSource::gather(const uint8_t *vector, int64_t first, int64_t count,
                                    uint8_t *stage) const {
  const int64_t unit = units_of(plane_.dtype, first), units = units_of(plane_.dtype, count);
  const int64_t bytes = size_of(plane_.dtype);
  if (is_dense_) return vector + unit * bytes;
  for (int64_t i = 0; i < units; ++i)
    std::memcpy(stage + i * bytes, vector + element_offset(plane_, unit + i),
                static_cast<size_t>(bytes));
  return stage;
}

void AffineSource::read_scaled(const Place &place, uint32_t head, int64_t first, int64_t count,
                               float *values) const {
  alignas(8) uint8_t stage[kStageBytes];
  const DecodeVector decode = kernels().decode[row_of(plane_.dtype)];
  const uint8_t *const vector = address(place, head);
  decode(values, gather(vector, first, count, stage), count);
  const float scale = ScaleCursor(scales_, place).at(0, head);
  if (scale == 1.0f) return;
  for (int64_t i = 0; i < count; ++i) values[i] *= scale;
}

void AffineSource::read(const Place &place, uint32_t head, int64_t first, int64_t count,
                        float *values) {
  const bool has_groups = has_group_scales(plane_.dtype);
  const int64_t unit = has_groups ? end_.group : numbers_of(plane_.dtype, 1), last = first + count;
  if (first % unit == 0 && count % unit == 0) return read_units(place, head, first, count, values);
  // Groups of the destination may end within units of the source.
  float whole[kPiece];
  const int64_t end = (last + unit - 1) / unit * unit;
  for (int64_t at = first / unit * unit; at < last; at += kPiece) {
    const int64_t begin = std::max(at, first), past = std::min(at + kPiece, last);
    read_units(place, head, at, std::min(end - at, kPiece), whole);
    std::copy(whole + (begin - at), whole + (past - at), values + (begin - first));
  }
}

void AffineSource::read_units(const Place &place, uint32_t head, int64_t first, int64_t count,
                              float *values) {
  if (!end_.group) return read_scaled(place, head, first, count, values);
  if (end_.covers_tokens) {
    if (place.block != block_ || head != head_ || first != first_) {
      load_units(place, head, first, count, unit_scales_, unit_zeros_);
      block_ = place.secondary ? -1 : place.block, head_ = head, first_ = first;
    }
    return decode_each(place, head, first, count, values, unit_scales_, unit_zeros_);
  }
  if (has_group_scales(plane_.dtype)) return read_groups(place, head, first, count, values);
  uint8_t stage[kPiece];
  const uint8_t *const q = gather(address(place, head), first, count, stage);
  const auto decode = kernels().affine(plane_.dtype).decode;
  for (int64_t d = 0; d < count;) {
    const int64_t group = (first + d) / end_.group;
    const int64_t run = std::min((group + 1) * end_.group - first, count) - d;
    float scale, zero;
    load_groups(end_.scales, place, head, group, 1, &scale);
    load_groups(end_.zeros, place, head, group, 1, &zero);
    decode(values + d, q + d, run, {scale, zero});
    d += run;
  }
}

void AffineSource::read_groups(const Place &place, uint32_t head, int64_t first, int64_t count,
                               float *values) const {
  uint8_t stage[kPiece];
  float factors[kPiece / kLeastGroup];
  const int64_t group = end_.group;
  const int64_t begin = first / group, end = (first + count) / group;
  for (int64_t g = begin; g < end; ++g) {
    const uint8_t *const at = group_scale_at(end_.scales, place, head, g);
    factors[g - begin] = load_group_scale(at, end_.scales.dtype) * tensor_scale_;
  }
  const uint8_t *const q = gather(address(place, head), first, count, stage);
  kernels().fp4.decode(values, q, end - begin, group, factors);
}

void AffineSource::decode_each(const Place &place, uint32_t head, int64_t first, int64_t count,
                               float *values, const float *scales, const float *zeros) const {
  uint8_t stage[kPiece];
  kernels()
      .affine(plane_.dtype)
      .decode_each(values, gather(address(place, head), first, count, stage), count, scales, zeros);
}

void AffineSource::load_units(const Place &place, uint32_t head, int64_t first, int64_t count,
                              float *scales, float *zeros) const {
  load_groups(end_.scales, place, head, first, count, scales);
  load_groups(end_.zeros, place, head, first, count, zeros);
}

// ---- the destination ----

AffineTarget::AffineTarget(const PlanePair &pair, const AffineEnd &end)
    : plane_(pair.dst),
      end_(end),
      scales_(pair.dst_scales),
      dim_(pair.head_dim),
      finds_scales_(pair.find_scales),
      is_dense_(is_dense_vector(pair.dst, units_of(pair.dst.dtype, pair.head_dim))),
      tensor_scale_(has_group_scales(pair.dst.dtype) ? tensor_scale_of(end) : 1.0f) {}

template <class Encode>
void AffineTarget::store(const Place &place, uint32_t head, int64_t first, int64_t count,
                         Encode encode) const {
  const int64_t unit = units_of(plane_.dtype, first), units = units_of(plane_.dtype, count);
  const int64_t bytes = size_of(plane_.dtype);
  uint8_t *const vector = address(place, head);
  if (is_dense_) return encode(vector + unit * bytes);
  alignas(8) uint8_t stage[kStageBytes];
  encode(stage);
  for (int64_t i = 0; i < units; ++i)
    std::memcpy(vector + element_offset(plane_, unit + i), stage + i * bytes,
                static_cast<size_t>(bytes));
}

void AffineTarget::clear(const Place &place, uint32_t head) const {
  for (int64_t d = 0; d < dim_; d += kPiece) {
    const int64_t count = std::min(dim_ - d, kPiece);
    store(place, head, d, count, [&](uint8_t *to) {
      std::memset(to, 0, static_cast<size_t>(bytes_of(plane_.dtype, count)));
    });
  }
  if (finds_scales_) ScaleCursor(scales_, place).store(0, head, 1.0f);
  for (int64_t g = 0; end_.group && g < dim_ / end_.group; ++g)
    store_unit(place, head, g, {0.0f, 0.0f});
}

void AffineTarget::set_scale(const Place &place, uint32_t head) {
  if (!finds_scales_) divisor_ = ScaleCursor(scales_, place).at(0, head);
}

void AffineTarget::find_scale(const Place &place, uint32_t head, float most) {
  divisor_ = found_scale(most, format_of(plane_.dtype).largest, scales_.dtype);
  ScaleCursor(scales_, place).store(0, head, divisor_);
}

void AffineTarget::write(const Place &place, uint32_t head, int64_t first, int64_t count,
                         float *values) const {
  if (divisor_ != 1.0f)
    for (int64_t i = 0; i < count; ++i) values[i] /= divisor_;
  store(place, head, first, count,
        [&](uint8_t *to) { kernels().encode[row_of(plane_.dtype)](to, values, count); });
}

ScaleZero AffineTarget::find_unit(const Bounds &bounds) const {
  const ScaleZero unit = with_affine(plane_.dtype, [&](auto format) {
    return decltype(format)::find(bounds, end_.covers_tokens);
  });
  return {saturate_for(end_.scales.dtype, unit.scale), saturate_for(end_.zeros.dtype, unit.zero)};
}

void AffineTarget::store_unit(const Place &place, uint32_t head, int64_t group,
                              const ScaleZero &unit) const {
  if (has_group_scales(plane_.dtype)) {
    return store_group_scale(group_scale_at(end_.scales, place, head, group), end_.scales.dtype,
                             unit.scale);
  }
  for (const bool is_zero : {false, true}) {
    const GroupNumbers &all = is_zero ? end_.zeros : end_.scales;
    uint8_t *const at =
        all.data + all.offset_of(place.block, place.offset, head) + group * all.group_stride;
    write_scale(at, all.dtype, is_zero ? unit.zero : unit.scale);
  }
}

void AffineTarget::quantize(const Place &place, uint32_t head, int64_t first, int64_t count,
                            const float *values, const ScaleZero &unit) const {
  store(place, head, first, count,
        [&](uint8_t *to) { kernels().affine(plane_.dtype).encode(to, values, count, unit); });
}

void AffineTarget::quantize_groups(const Place &place, uint32_t head, int64_t first, int64_t count,
                                   const float *values) const {
  float scales[kPiece / kLeastGroup];
  const int64_t group = end_.group, groups = count / group;
  store(place, head, first, count, [&](uint8_t *to) {
    kernels().fp4.encode(to, scales, values, groups, group, end_.scales.dtype, tensor_scale_);
  });
  for (int64_t g = 0; g < groups; ++g)
    store_unit(place, head, first / group + g, {scales[g], 0.0f});
}

void AffineTarget::quantize_each(const Place &place, uint32_t head, int64_t first, int64_t count,
                                 const float *values, const float *scales,
                                 const float *zeros) const {
  store(place, head, first, count, [&](uint8_t *to) {
    kernels().affine(plane_.dtype).encode_each(to, values, count, scales, zeros);
  });
}

void AffineTarget::copy_units(const Place &place, const AffineSource &src, const Place &from,
                              uint32_t head) const {
  for (const bool is_zero : {false, true}) {
    const GroupNumbers &to = is_zero ? end_.zeros : end_.scales;
    const GroupNumbers &of = is_zero ? src.end_.zeros : src.end_.scales;
    copy_groups(to, to.data + to.offset_of(place.block, place.offset, head), of,
                of.data + of.offset_of(from.block, from.offset, head), dim_);
  }
}

void AffineTarget::copy_bytes(const Place &place, const AffineSource &src, const Place &from,
                              uint32_t head) const {
  for (int64_t d = 0; d < dim_; d += kPiece) {
    const int64_t count = std::min(dim_ - d, kPiece);
    uint8_t stage[kPiece];
    const uint8_t *const q = src.gather(src.address(from, head), d, count, stage);
    store(place, head, d, count,
          [&](uint8_t *to) { std::memcpy(to, q, static_cast<size_t>(count)); });
  }
}

}  // namespace kvx::cpu
