// Converts runs of tokens from one format to another, with given or new scales.
#pragma once

#include <memory>

#include "cpu/kernels/kernels.h"
#include "plan/plan.h"

namespace kvx::cpu {

// The scale of each (token, head) from one block and offset on.
struct ScaleCursor {
  const Scales &scales;
  const uint8_t *first;

  ScaleCursor(const Scales &all, const Place &place)
      : scales(all),
        first(all.data + place.block * all.block_stride + place.offset * all.token_stride) {}

  float at(int64_t token, int64_t head) const;
  void store(int64_t token, int64_t head, float scale) const;

 private:
  const uint8_t *address(int64_t token, int64_t head) const {
    return first + token * scales.token_stride + head * scales.head_stride;
  }
};

// Buffers for converting vectors that are not dense at the source or destination; small calls
// allocate only what they need.
class Stages {
 public:
  Stages(const Plan &plan, uint64_t tokens);

  // Vectors that are converted at a time: at least one.
  static int64_t vectors_of(const PlanePair &pair);

  uint8_t *src() { return src_.get(); }
  uint8_t *dst() { return dst_.get(); }

 private:
  std::unique_ptr<uint8_t[]> src_, dst_;
};

// Converts contiguous numbers of one format to another: with the kernel of this pair of formats or,
// if there is none, through float32.
class RunConverter {
 public:
  // hadamard: numbers that are rotated together; 0: none are
  RunConverter(kvx_dtype_t src, kvx_dtype_t dst, uint32_t hadamard = 0)
      : run_(hadamard ? nullptr : kernels().find(src, dst)),
        decode_(kernels().decode[row_of(src)]),
        encode_(kernels().encode[row_of(dst)]),
        src_(src),
        dst_(dst),
        order_(hadamard) {}

  void operator()(uint8_t *dst, const uint8_t *src, int64_t numbers, const Conversion &how) const {
    if (run_) return run_(dst, src, numbers, how);
    if (order_) return rotated(dst, src, numbers, how.scaling);
    through_floats(dst, src, numbers, how.scaling);
  }

 private:
  void through_floats(uint8_t *dst, const uint8_t *src, int64_t numbers,
                      const Scaling &scaling) const;
  void rotated(uint8_t *dst, const uint8_t *src, int64_t numbers, const Scaling &scaling) const;

  const ConvertRun run_;
  const DecodeVector decode_;
  const EncodeVector encode_;
  const kvx_dtype_t src_, dst_;
  const int64_t order_;
};

// Converts; vectors that are not dense go through dense stages.
class Converter {
 public:
  Converter(const PlanePair &pair, Stages *stages, uint64_t tokens, bool streaming);

  void operator()(uint8_t *dst, const uint8_t *src, const uint8_t *next, int64_t tokens,
                  const Place &src_place, const Place &dst_place);

 private:
  bool are_many(uint64_t tokens) const;
  void convert_tile(uint8_t *dst, const uint8_t *src, int64_t ahead, int64_t first_token,
                    int64_t tokens, int64_t first_head, int64_t heads, const ScaleCursor &scale,
                    const ScaleCursor &divisor, bool many);
  void convert_each(uint8_t *dst, const Plane &to, const uint8_t *src, const Plane &from,
                    int64_t ahead, int64_t first_token, int64_t tokens, int64_t first_head,
                    int64_t heads, const ScaleCursor &scale, const ScaleCursor &divisor, bool many);
  // The same with a kernel for vectors whose scales differ.
  void convert_rows(uint8_t *dst, const Plane &to, const uint8_t *src, const Plane &from,
                    int64_t ahead, int64_t first_token, int64_t tokens, int64_t first_head,
                    int64_t heads, const ScaleCursor &scale, const ScaleCursor &divisor, bool many);
  // The scaling of a vector; finds and stores its divisor first if the call says so.
  Scaling scaling_of(const uint8_t *vector, int64_t token, int64_t head, const ScaleCursor &scale,
                     const ScaleCursor &divisor) const;
  float find_scale(const uint8_t *vector, float factor) const;

  const PlanePair &pair_;
  Stages &stages_;
  const bool streaming_;
  const RunConverter run_;
  const ConvertRows rows_;               // NULL: a call for each vector
  const ConvertRun to_floats_;           // NULL: the source's vectors are decoded
  const int64_t src_units_, dst_units_;  // of a vector
  const bool stages_src_, stages_dst_;
  const bool varies_, many_;  // scales within a block; elements of one scale
};

}  // namespace kvx::cpu
