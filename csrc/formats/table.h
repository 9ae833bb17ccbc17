// The table of formats, a row each. A format is its row here and its codec; sizes, names, rules and
// conversions of every backend come from them. Spec: 4.3, E.10
#pragma once

#include "formats/e2m1.h"
#include "formats/e4m3fnuz.h"
#include "formats/iq4_nl.h"
#include "formats/q4_0.h"
#include "formats/q4_1.h"
#include "formats/q4_k.h"
#include "formats/q6_k.h"
#include "formats/q8_0.h"
#include "formats/s8.h"
#include "formats/scalar.h"
#include "formats/turboquant.h"

// ROW(name, codec, kind, numbers, bytes, alignment, largest, beside, digits, lowest)
//   name       KVX_DTYPE_<name>
//   codec      from and to float32; Opaque: never converted
//   kind       Number, Index (of a table), Opaque (bytes whose meaning KVX does not know) or Unused
//              (of no tensor; it may be the dtype of scales)
//   numbers    along dim in one unit, a power of two
//   bytes      of one unit
//   alignment  of one unit
//   largest    finite number; 0: no such bound
//   beside     Nothing, or what lies beside the data: see Beside
//   digits     of precision, if it is one float, in bits; 0: it is none
//   lowest     exponent of the smallest positive number of such a float
// Numbers with a zero point have their codec in affine.h, those with scales of groups in e2m1.h: a
// byte alone says no number.
#define KVX_FORMATS(ROW)                                             \
  ROW(F16, F16, Number, 1, 2, 2, 65504.0f, Nothing, 11, -24)         \
  ROW(BF16, Bf16, Number, 1, 2, 2, 0x1.fep127f, Nothing, 8, -133)    \
  ROW(F32, F32, Number, 1, 4, 4, 0x1.fffffep127f, Nothing, 24, -149) \
  ROW(F8_E4M3, E4m3, Number, 1, 1, 1, 448.0f, Scale, 4, -9)          \
  ROW(F8_E5M2, E5m2, Number, 1, 1, 1, 57344.0f, Scale, 3, -16)       \
  ROW(S32, Opaque, Index, 1, 4, 4, 0, Nothing, 0, 0)                 \
  ROW(S64, Opaque, Index, 1, 8, 8, 0, Nothing, 0, 0)                 \
  ROW(U32, Opaque, Unused, 1, 4, 4, 0, Nothing, 0, 0)                \
  ROW(U64, Opaque, Unused, 1, 8, 8, 0, Nothing, 0, 0)                \
  ROW(U8, Opaque, Opaque, 1, 1, 1, 0, Nothing, 0, 0)                 \
  ROW(F8_E4M3FNUZ, E4m3Fnuz, Number, 1, 1, 1, 240.0f, Scale, 4, -10) \
  ROW(Q8_0, Q8_0, Number, 32, 34, 2, 0, Nothing, 0, 0)               \
  ROW(Q4_0, Q4_0, Number, 32, 18, 2, 0, Nothing, 0, 0)               \
  ROW(U8_ZERO, Opaque, Number, 1, 1, 1, 0, ScaleZero, 0, 0)          \
  ROW(U8_BIAS, Opaque, Number, 1, 1, 1, 0, ScaleZero, 0, 0)          \
  ROW(Q4_1, Q4_1, Number, 32, 20, 2, 0, Nothing, 0, 0)               \
  ROW(IQ4_NL, Iq4Nl, Number, 32, 18, 2, 0, Nothing, 0, 0)            \
  ROW(Q5_0, Q5_0, Number, 32, 22, 2, 0, Nothing, 0, 0)               \
  ROW(Q5_1, Q5_1, Number, 32, 24, 2, 0, Nothing, 0, 0)               \
  ROW(Q4_K, Q4_K, Number, 256, 144, 2, 0, Nothing, 0, 0)             \
  ROW(Q5_K, Q5_K, Number, 256, 176, 2, 0, Nothing, 0, 0)             \
  ROW(Q6_K, Q6_K, Number, 256, 210, 2, 0, Nothing, 0, 0)             \
  ROW(F4_E2M1, Opaque, Number, 2, 1, 1, 0, GroupScale, 0, 0)         \
  ROW(MXFP4, MxFp4, Number, 32, 17, 1, 0, Nothing, 0, 0)             \
  ROW(F8_E8M0, Opaque, Unused, 1, 1, 1, 0, Nothing, 0, 0)            \
  ROW(TQ2, TurboQuant<2>, Number, 128, 34, 1, 0, Nothing, 0, 0)      \
  ROW(TQ3, TurboQuant<3>, Number, 128, 50, 1, 0, Nothing, 0, 0)      \
  ROW(TQ4, TurboQuant<4>, Number, 128, 66, 1, 0, Nothing, 0, 0)      \
  ROW(S8, S8, Number, 1, 1, 1, 127.0f, Scale, 7, 0)
