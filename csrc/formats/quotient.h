// Division of many numbers by one scale, for codes of FP8: two products and a sum instead of a
// division.
#pragma once

#include <cmath>

#include "hd.h"

namespace kvx {

// Source: Markstein, Computation of Elementary Functions on the IBM RISC System/6000, 1990
class FastQuotient {
 public:
  KVX_HD explicit FastQuotient(float scale)
      : scale_(scale), inverse_(scale > 0x1p-60f && scale < 0x1p60f ? 1.0f / scale : NAN) {}

  // Whether remainders are exact with a scale of this size. With others all quotients are NaN.
  KVX_HD bool is_usual() const { return inverse_ > 0.0f; }

  // A number with the FP8 code of value / scale: the quotient itself, unless that is far below all
  // codes but 0. Where value or value / scale is not finite, it may be NaN instead.
  KVX_HD float operator()(float value) const {
    const float near = value * inverse_;
    const float excess = fmaf(near, scale_, -value);
    return fmaf(excess, -inverse_, near);  // in this order zeros keep their sign
  }

 private:
  float scale_, inverse_;
};

}  // namespace kvx
