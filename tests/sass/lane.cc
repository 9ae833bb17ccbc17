// What arithmetic instructions do to one lane.
#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstring>

#include "numbers.h"
#include "warp.h"

namespace sass {
namespace {

constexpr uint32_t kParameters = 0x210;  // where they begin in constant bank 0 on sm_90

float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

uint32_t as_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

uint64_t pair(uint32_t high, uint32_t low) { return uint64_t{high} << 32 | low; }

float fused(const Instruction &i, float x, float y, float z) {
  const int mode = i.has("RM")   ? FE_DOWNWARD
                   : i.has("RP") ? FE_UPWARD
                   : i.has("RZ") ? FE_TOWARDZERO
                                 : FE_TONEAREST;
  std::fesetround(mode);
  volatile float a = x, b = y, c = z;
  volatile float result = std::fma(a, b, c);
  std::fesetround(FE_TONEAREST);
  return result;
}

uint32_t shift(const Instruction &i, uint32_t low, uint32_t by, uint32_t high) {
  const bool wide = i.has("U64") || i.has("S64"), to_high = i.has("HI");
  const uint32_t width = wide ? 64 : 32;
  by = i.has("W") ? by % width : std::min(by, width);
  const uint64_t value = pair(high, low);
  if (i.has("L")) {
    if (!to_high) return by >= 32 && !wide ? 0 : by == 64 ? 0 : static_cast<uint32_t>(value << by);
    return by == 64 ? 0 : static_cast<uint32_t>((value << by) >> 32);
  }
  if (to_high) {
    if (i.has("S32") || i.has("S64"))
      return static_cast<uint32_t>(static_cast<int32_t>(high) >> std::min(by, 31u));
    return by >= 32 ? 0 : high >> by;
  }
  if (i.has("S64")) return static_cast<uint32_t>(static_cast<int64_t>(value) >> std::min(by, 63u));
  return by == 64 ? 0 : static_cast<uint32_t>(value >> by);
}

uint32_t permute(uint64_t bytes, uint32_t selector) {
  uint32_t result = 0;
  for (uint32_t k = 0; k < 4; ++k) {
    const uint32_t pick = selector >> 4 * k & 15;
    uint32_t byte = bytes >> (pick & 7) * 8 & 255;
    if (pick & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * k;
  }
  return result;
}

uint32_t logic(uint32_t x, uint32_t y, uint32_t z, uint32_t table) {
  uint32_t result = 0;
  for (uint32_t row = 0; row < 8; ++row)
    if (table >> row & 1) result |= (row & 4 ? x : ~x) & (row & 2 ? y : ~y) & (row & 1 ? z : ~z);
  return result;
}

// Of `x / y`: whether the short sequence of a division is not exact.
bool is_hard(float x, float y) {
  const auto exponent = [](float v) { return static_cast<int>(as_bits(v) >> 23 & 255); };
  const int a = exponent(x), b = exponent(y);
  return a == 0 || b == 0 || a == 255 || b == 255 || std::abs(a - b) > 124 || b > 252 || b < 2 ||
         a < 26;
}

// The first source: results and their predicates come before.
size_t first_source(const Instruction &i) {
  size_t k = 1;
  while (i.operands[k].kind == Kind::kPredicate || i.operands[k].kind == Kind::kUniformPredicate)
    ++k;
  return k;
}

}  // namespace

// ---- operands

uint32_t Warp::constant(const Operand &o, uint32_t lane, uint32_t bytes) const {
  const uint32_t at =
      o.value + (o.index == kZero ? 0 : registers_[o.index][lane]) + uniforms_[o.uniform];
  uint32_t value = 0;
  if (o.bank == 2) {
    if (at + bytes > program_.constants.size()) die("constant bank 2 in " + program_.name);
    std::memcpy(&value, &program_.constants[at], bytes);
  } else if (o.bank == 0 && at >= kParameters &&
             at + bytes <= kParameters + block_.parameter_bytes) {
    std::memcpy(&value, block_.parameters + at - kParameters, bytes);
  } else if (o.bank != 0) {
    die("constant bank " + std::to_string(o.bank) + " in " + program_.name);
  } else if (at == 0) {
    value = block_.threads;
  } else if (at == 0xc) {
    value = block_.grid_x;
  } else if (at == 0x10) {
    value = block_.grid_y;
  } else if (at != 0x28 && at != 0x208 && at != 0x20c) {  // the stack's; a descriptor of memory
    die("constant " + std::to_string(at) + " in " + program_.name);
  }
  return value;
}

uint32_t Warp::bits(const Operand &o, uint32_t lane) const {
  switch (o.kind) {
    case Kind::kRegister:
      return o.index == kZero ? 0 : registers_[o.index][lane];
    case Kind::kUniform:
      return uniforms_[o.index];
    case Kind::kImmediate:
      return o.value;
    case Kind::kConstant:
      return constant(o, lane, 4);
    default:
      die("an operand has no bits in " + program_.name);
  }
}

uint32_t Warp::high_bits(const Operand &o, uint32_t lane) const {
  Operand next = o;
  if (o.kind == Kind::kImmediate || o.index == (o.kind == Kind::kUniform ? kZeroUniform : kZero)) {
    if (o.kind != Kind::kConstant) return 0;
  }
  if (o.kind == Kind::kConstant) {
    next.value += 4;
  } else {
    ++next.index;
  }
  return bits(next, lane);
}

uint32_t Warp::integer(const Operand &o, uint32_t lane) const {
  const uint32_t value = bits(o, lane);
  return o.negative ? 0 - value : o.inverted ? ~value : value;
}

float Warp::number(const Operand &o, uint32_t lane) const {
  const float x = as_float(bits(o, lane)), positive = o.absolute ? std::fabs(x) : x;
  return o.negative ? -positive : positive;
}

bool Warp::truth(const Operand &o, uint32_t lane) const {
  const bool value = o.index == kTrue                    ? true
                     : o.kind == Kind::kUniformPredicate ? uniform_predicates_[o.index]
                                                         : predicates_[o.index] >> lane & 1;
  return value != o.negative;
}

void Warp::set(const Operand &o, uint32_t lane, uint32_t value, uint32_t next) {
  if (o.kind == Kind::kUniform) {
    if (o.index != kZeroUniform) uniforms_[o.index + next] = value;
  } else if (o.index != kZero) {
    registers_[o.index + next][lane] = value;
  }
}

void Warp::set_truth(const Operand &o, uint32_t lane, bool value) {
  if (o.index == kTrue) return;
  if (o.kind == Kind::kUniformPredicate) {
    uniform_predicates_[o.index] = value;
  } else {
    predicates_[o.index] = (predicates_[o.index] & ~(1u << lane)) | uint32_t{value} << lane;
  }
}

// ---- instructions

void Warp::add3(const Instruction &i, uint32_t lane) {
  const std::vector<Operand> &o = i.operands;
  const size_t first = first_source(i);
  const auto addend = [&](const Operand &source) {  // -x carries as ~x + 1 does
    const uint32_t value = bits(source, lane);
    return source.negative ? uint64_t{~value} + 1 : uint64_t{source.inverted ? ~value : value};
  };
  uint64_t sum = 0;
  for (size_t k = first; k < o.size(); ++k) {
    const bool is_carry = o[k].kind == Kind::kPredicate || o[k].kind == Kind::kUniformPredicate;
    sum += !is_carry ? addend(o[k]) : i.extended && truth(o[k], lane) ? 1 : 0;
  }
  if (first > 1) set_truth(o[1], lane, sum >> 32 >= 1);
  if (first > 2) set_truth(o[2], lane, sum >> 32 >= 2);
  set(o[0], lane, static_cast<uint32_t>(sum));
}

void Warp::compare(const Instruction &i, uint32_t lane) {
  const std::vector<Operand> &o = i.operands;
  const uint32_t x = integer(o[2], lane), y = integer(o[3], lane);
  const bool equal = x == y;
  const bool less = i.is_unsigned ? x < y : static_cast<int32_t>(x) < static_cast<int32_t>(y);
  // .EX: the high words; the low words' result decides where these are equal
  const bool has_low = i.has("EX"), low = has_low && truth(o[5], lane);
  bool result;
  if (i.has("LT")) {
    result = less || (equal && low);
  } else if (i.has("LE")) {
    result = less || (equal && (!has_low || low));
  } else if (i.has("GT")) {
    result = (!less && !equal) || (equal && low);
  } else if (i.has("GE")) {
    result = (!less && !equal) || (equal && (!has_low || low));
  } else if (i.has("EQ")) {
    result = equal && (!has_low || low);
  } else if (i.has("NE")) {
    result = !equal || low;
  } else {
    refuse(i, "a comparison");
  }
  const bool with = truth(o[4], lane);
  const auto joined = [&](bool r) {
    return i.has("OR") ? r || with : i.has("XOR") ? r != with : r && with;
  };
  set_truth(o[0], lane, joined(result));
  set_truth(o[1], lane, joined(!result));
}

void Warp::compare_floats(const Instruction &i, uint32_t lane) {
  const std::vector<Operand> &o = i.operands;
  const float x = number(o[2], lane), y = number(o[3], lane);
  const bool unordered = std::isnan(x) || std::isnan(y);
  struct Test {
    const char *name;
    bool holds;
  };
  const Test tests[] = {{"LT", x < y},
                        {"EQ", x == y},
                        {"LE", x <= y},
                        {"GT", x > y},
                        {"NE", !unordered && x != y},
                        {"GE", x >= y},
                        {"LTU", !(x >= y)},
                        {"EQU", unordered || x == y},
                        {"LEU", !(x > y)},
                        {"GTU", !(x <= y)},
                        {"NEU", x != y},
                        {"GEU", !(x < y)}};
  const auto test = std::find_if(std::begin(tests), std::end(tests),
                                 [&](const Test &t) { return i.has(t.name); });
  if (test == std::end(tests)) refuse(i, "a comparison");
  const bool with = truth(o[4], lane);
  const auto joined = [&](bool r) { return i.has("OR") ? r || with : r && with; };
  set_truth(o[0], lane, joined(test->holds));
  set_truth(o[1], lane, joined(!test->holds));
}

void Warp::special(const Instruction &i, uint32_t lane) {
  const std::string &name = i.operands[1].name;
  uint32_t value = 0;  // of SR_CgaCtaId
  if (name == "SR_TID.X") {
    value = index_ * kLanes + lane;
  } else if (name == "SR_CTAID.X") {
    value = block_.x;
  } else if (name == "SR_CTAID.Y") {
    value = block_.y;
  } else if (name == "SR_LANEID") {
    value = lane;
  } else if (name != "SR_CgaCtaId") {
    refuse(i, "a special register");
  }
  set(i.operands[0], lane, value);
}

// Two floats to numbers of 8 or 16 bits, or two FP8 numbers to halves.
void Warp::pack(const Instruction &i, uint32_t lane) {
  const std::vector<Operand> &o = i.operands;
  if (i.has("UNPACK_B")) {
    const uint32_t codes = integer(o[1], lane) >> 16 * o[1].half;
    const auto half = [&](uint32_t code) {
      return to_half(fp8_to_float(static_cast<uint8_t>(code), i.has("E4M3")));
    };
    return set(o[0], lane, half(codes & 255) | uint32_t{half(codes >> 8 & 255)} << 16);
  }
  const float high = number(o[1], lane), low = number(o[2], lane);
  if (i.has("BF16")) return set(o[0], lane, uint32_t{to_bfloat(high)} << 16 | to_bfloat(low));
  if (i.has("F16")) return set(o[0], lane, uint32_t{to_half(high)} << 16 | to_half(low));
  const bool e4m3 = i.has("E4M3");
  const uint32_t both = uint32_t{to_fp8(high, e4m3)} << 8 | to_fp8(low, e4m3);
  set(o[0], lane, both | integer(o[3], lane) << 16);
}

// The largest, or smallest, of three numbers of 16 bits, twice; NaN only if all three are NaN.
void Warp::half_min_max(const Instruction &i, uint32_t lane) {
  const std::vector<Operand> &o = i.operands;
  const bool bfloat = i.has("BF16_V2");
  if (i.has("NAN") || o.size() != 5) refuse(i, "of halves");
  uint32_t both = 0;
  for (uint32_t shift = 0; shift < 32; shift += 16) {
    uint32_t found = 0x7fff;
    float number = NAN;
    for (size_t k = 1; k <= 3; ++k) {
      const uint32_t half = bits(o[k], lane) >> shift & 0xffff;
      const float x = bfloat ? as_float(half << 16) : half_to_float(static_cast<uint16_t>(half));
      const bool is_first = std::isnan(number) && !std::isnan(x);
      if (is_first || (truth(o[4], lane) ? x < number : x > number)) found = half, number = x;
    }
    both |= found << shift;
  }
  set(o[0], lane, both);
}

void Warp::run_lane(const Instruction &i, uint32_t lane) {
  const std::vector<Operand> &o = i.operands;
  const auto x = [&](size_t k) { return integer(o[k], lane); };
  const auto f = [&](size_t k) { return number(o[k], lane); };
  const auto p = [&](size_t k) { return truth(o[k], lane); };
  const auto put = [&](uint32_t value) { set(o[0], lane, value); };
  const auto wide = [&](size_t k) { return pair(high_bits(o[k], lane), bits(o[k], lane)); };
  const auto least = [&](uint32_t a, uint32_t b, bool lesser) {
    const bool less = i.is_unsigned ? a < b : static_cast<int32_t>(a) < static_cast<int32_t>(b);
    return less == lesser ? a : b;
  };
  switch (i.code) {
    case Code::kAdd3:
      return add3(i, lane);
    case Code::kMultiplyAdd:
      return put(x(1) * x(2) + x(3) + (i.extended && p(4) ? 1 : 0));
    case Code::kMultiplyAddHigh: {
      if (!i.is_unsigned) refuse(i, "signed");
      return put(static_cast<uint32_t>((uint64_t{x(1)} * x(2) + wide(3)) >> 32));
    }
    case Code::kMultiplyAddWide: {
      if (first_source(i) != 1 || i.extended) refuse(i, "with a carry");
      const uint64_t product = i.is_unsigned
                                   ? uint64_t{x(1)} * x(2)
                                   : static_cast<uint64_t>(int64_t{static_cast<int32_t>(x(1))} *
                                                           static_cast<int32_t>(x(2)));
      const uint64_t sum = product + wide(3);
      set(o[0], lane, static_cast<uint32_t>(sum), 0);
      return set(o[0], lane, static_cast<uint32_t>(sum >> 32), 1);
    }
    case Code::kShiftAdd: {
      const size_t k = first_source(i);
      const uint32_t value = bits(o[k + 1], lane);
      const uint64_t addend = o[k + 1].negative   ? uint64_t{~value} + 1
                              : o[k + 1].inverted ? ~value
                                                  : value;
      const uint64_t sum = uint64_t{x(k) << x(k + 2)} + addend;
      if (k > 1) set_truth(o[1], lane, sum >> 32);
      return put(static_cast<uint32_t>(sum));
    }
    case Code::kShiftAddHigh: {
      const bool signs = i.has("SX32");
      const uint32_t low = x(1),
                     high = signs ? static_cast<uint32_t>(static_cast<int32_t>(low) >> 31) : x(3);
      const size_t by = signs ? 3 : 4;
      const uint32_t carry = i.extended && p(by + 1) ? 1 : 0;
      return put(static_cast<uint32_t>(pair(high, low) << x(by) >> 32) + x(2) + carry);
    }
    case Code::kLogic3: {
      const bool tests = o[0].kind == Kind::kPredicate || o[0].kind == Kind::kUniformPredicate;
      const size_t k = tests ? 1 : 0;
      const uint32_t result = logic(x(k + 1), x(k + 2), x(k + 3), o[k + 4].value);
      set(o[k], lane, result);
      if (tests) set_truth(o[0], lane, result != 0 || p(k + 5));
      return;
    }
    case Code::kLogicPredicates: {
      const uint32_t row = p(2) << 2 | p(3) << 1 | p(4);
      const bool second = o[6].value >> row & 1;
      set_truth(o[0], lane, o[5].value >> row & 1);
      return set_truth(o[1], lane, second);
    }
    case Code::kCompare:
      return compare(i, lane);
    case Code::kCompareFloat:
      return compare_floats(i, lane);
    case Code::kSelect: {
      const size_t chosen = p(3) ? 1 : 2;
      return put(i.text.find("FSEL") != i.text.npos ? as_bits(f(chosen)) : x(chosen));
    }
    case Code::kFunnelShift:
      return put(shift(i, x(1), x(2), x(3)));
    case Code::kPermute:
      return put(permute(pair(x(3), x(1)), x(2)));
    case Code::kMove:
      return put(x(1));
    case Code::kSpecial:
      return special(i, lane);
    case Code::kSpecialPair:
      put(0);
      return set(o[0], lane, 0, i.has("32") ? 0 : 1);
    case Code::kLoadConstant: {
      uint32_t value = constant(o[1], lane, std::min(i.bytes, 4u));
      if (i.sign_extends)
        value = i.bytes == 1 ? static_cast<uint32_t>(int32_t{static_cast<int8_t>(value)})
                             : static_cast<uint32_t>(int32_t{static_cast<int16_t>(value)});
      Operand next = o[1];
      next.value += 4;
      const uint32_t high = i.bytes == 8 ? constant(next, lane, 4) : 0;
      put(value);
      if (i.bytes == 8) set(o[0], lane, high, 1);
      if (i.bytes > 8) refuse(i, "a width");
      return;
    }
    case Code::kPopulation:
      return put(static_cast<uint32_t>(__builtin_popcount(x(1))));
    case Code::kFindLeadingOne: {
      const uint32_t value = x(1), zeros = value ? static_cast<uint32_t>(__builtin_clz(value)) : 0;
      return put(value == 0 ? kAll : i.has("SH") ? zeros : 31 - zeros);
    }
    case Code::kBitReverse: {
      uint32_t reversed = 0;
      for (uint32_t bit = 0; bit < 32; ++bit) reversed |= (x(1) >> bit & 1) << (31 - bit);
      return put(reversed);
    }
    case Code::kMinMax:
      return put(least(x(1), x(2), p(3)));
    case Code::kAddMinMax:
      return put(least(x(1) + x(2), x(3), p(4)));
    case Code::kPredicatesToRegister: {
      uint32_t all = 0;
      for (uint32_t k = 0; k < kTrue; ++k) all |= (predicates_[k] >> lane & 1) << k;
      return put(all & x(3));
    }
    case Code::kBarrierResult:
      return set_truth(o[1], lane, block_.vote);
    // Floats
    case Code::kIntToFloat: {
      if (!i.is_unsigned) refuse(i, "signed");
      float result = static_cast<float>(x(1));
      if (i.has("RP") && static_cast<double>(result) < x(1))
        result = std::nextafter(result, INFINITY);
      return put(as_bits(result));
    }
    case Code::kFloatToInt: {
      const float value = f(1);
      if (!i.is_unsigned || !i.has("TRUNC")) refuse(i, "a rounding");
      return put(!(value > 0) ? 0 : value >= 4294967296.0f ? kAll : static_cast<uint32_t>(value));
    }
    case Code::kReciprocal:
      if (i.has("RCP")) return put(as_bits(1.0f / f(1)));
      refuse(i, "a function");
    case Code::kFloatFma:
      return put(as_bits(fused(i, f(1), f(2), f(3))));
    case Code::kFloatMultiply:
      return put(as_bits(f(1) * f(2)));
    case Code::kFloatAdd:
      return put(as_bits(f(1) + f(2)));
    case Code::kFloatMinMax:
      return put(as_bits(p(3) ? std::fmin(f(1), f(2)) : std::fmax(f(1), f(2))));
    case Code::kCheckDivision:
      return set_truth(o[0], lane, is_hard(f(1), f(2)));
    case Code::kPack:
      return pack(i, lane);
    case Code::kHalfMinMax:
      return half_min_max(i, lane);
    case Code::kConvertHalf: {  // .F32: one half to a float
      if (!i.has("F32")) refuse(i, "of halves");
      const uint32_t both = bits(o[2], lane);
      return put(as_bits(half_to_float(static_cast<uint16_t>(o[2].half ? both >> 16 : both))));
    }
    case Code::kConstant2: {  // -RZ * RZ + two numbers: a constant of two halves
      const auto half = [&](const Operand &c) {
        return i.has("BF16_V2") ? to_bfloat(c.number) : to_half(c.number);
      };
      if (o.size() != 5 || o[2].index != kZero) refuse(i, "of halves");
      return put(uint32_t{half(o[3])} << 16 | half(o[4]));
    }
    default:
      refuse(i, "an instruction that is not known");
  }
}

}  // namespace sass
