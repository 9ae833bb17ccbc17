// One end of an affine pair: reads and writes the numbers of a token and head as float32, piece by
// piece. Spec: E.14
#pragma once

#include "cpu/kernels/kernels.h"
#include "plan/plan.h"

namespace kvx::cpu {

constexpr int64_t kPiece = 256;  // numbers of dim at a time; a multiple of every unit's of E.10

class AffineSource {
 public:
  AffineSource(const PlanePair &pair, const AffineEnd &end);

  bool covers_tokens() const { return end_.covers_tokens; }

  // Reads numbers [first, first + count) of a head, at most kPiece.
  void read(const Place &place, uint32_t head, int64_t first, int64_t count, float *values);

  // The same for units that cover tokens; their scales and zero points are loaded.
  void decode_each(const Place &place, uint32_t head, int64_t first, int64_t count, float *values,
                   const float *scales, const float *zeros) const;
  // Loads the scales and zero points of these numbers.
  void load_units(const Place &place, uint32_t head, int64_t first, int64_t count, float *scales,
                  float *zeros) const;

 private:
  friend class AffineTarget;

  const uint8_t *address(const Place &place, uint32_t head) const {
    return address_of(plane_, place) + head * plane_.head_stride;
  }
  // The units of these numbers, contiguous: in place or, if they are not contiguous there, a copy.
  const uint8_t *gather(const uint8_t *vector, int64_t first, int64_t count, uint8_t *stage) const;
  // The same of whole units of the source; of F4_E2M1, of whole groups.
  void read_units(const Place &place, uint32_t head, int64_t first, int64_t count, float *values);
  void read_scaled(const Place &place, uint32_t head, int64_t first, int64_t count,
                   float *values) const;
  // The same of F4_E2M1: whole groups.
  void read_groups(const Place &place, uint32_t head, int64_t first, int64_t count,
                   float *values) const;

  const Plane plane_;
  const AffineEnd end_;
  const Scales scales_;
  const bool is_dense_;
  const float tensor_scale_;  // of F4_E2M1
  // Of units that cover tokens, those of the last read.
  int64_t block_ = -1, first_ = 0;
  uint32_t head_ = 0;
  float unit_scales_[kPiece], unit_zeros_[kPiece];
};

class AffineTarget {
 public:
  AffineTarget(const PlanePair &pair, const AffineEnd &end);

  // 0: a format without zero points.
  uint32_t group() const { return end_.group; }

  // Sets bytes, scales and zero points to zero.
  void clear(const Place &place, uint32_t head) const;

  // ---- a format without zero points ----

  // Sets the scale that later numbers of this place are divided by.
  void set_scale(const Place &place, uint32_t head);
  // Finds the scale for numbers whose largest magnitude is `most`, and stores it.
  void find_scale(const Place &place, uint32_t head, float most);
  // Mutates `values`.
  void write(const Place &place, uint32_t head, int64_t first, int64_t count, float *values) const;

  // ---- a format with zero points ----

  ScaleZero find_unit(const Bounds &bounds) const;
  void store_unit(const Place &place, uint32_t head, int64_t group, const ScaleZero &unit) const;
  void quantize(const Place &place, uint32_t head, int64_t first, int64_t count,
                const float *values, const ScaleZero &unit) const;
  // Finds the scales of whole groups of F4_E2M1, at most kPiece numbers, and stores both.
  void quantize_groups(const Place &place, uint32_t head, int64_t first, int64_t count,
                       const float *values) const;
  bool has_groups() const { return has_group_scales(plane_.dtype); }
  void quantize_each(const Place &place, uint32_t head, int64_t first, int64_t count,
                     const float *values, const float *scales, const float *zeros) const;

  // Of a source of the same format: the units of a block's head, and the bytes of a token's.
  void copy_units(const Place &place, const AffineSource &src, const Place &from,
                  uint32_t head) const;
  void copy_bytes(const Place &place, const AffineSource &src, const Place &from,
                  uint32_t head) const;

 private:
  uint8_t *address(const Place &place, uint32_t head) const {
    return address_of(plane_, place) + head * plane_.head_stride;
  }
  // Calls encode(to) with the address of the units of these numbers, or with a stage that is copied
  // there.
  template <class Encode>
  void store(const Place &place, uint32_t head, int64_t first, int64_t count, Encode encode) const;

  const Plane plane_;
  const AffineEnd end_;
  const Scales scales_;
  const uint32_t dim_;
  const bool finds_scales_, is_dense_;
  const float tensor_scale_;  // of F4_E2M1
  float divisor_ = 1.0f;
};

}  // namespace kvx::cpu
