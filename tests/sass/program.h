// The machine code of a kernel, as cuobjdump lists it, parsed into instructions.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace sass {

constexpr uint32_t kInstructionBytes = 16;
constexpr uint8_t kZero = 255;        // RZ: reads as 0
constexpr uint8_t kZeroUniform = 63;  // URZ
constexpr uint8_t kTrue = 7;          // PT, UPT

enum class Kind : uint8_t {
  kRegister,          // R3
  kUniform,           // UR3
  kPredicate,         // P3
  kUniformPredicate,  // UP3
  kImmediate,         // 0x10, 1.5
  kConstant,          // c[0x0][R2+0x210]
  kMemory,            // [R2.64+0x10], desc[UR4][R2.64]
  kBarrier,           // B3
  kName,              // SR_TID.X, PR
};

struct Operand {
  Kind kind = Kind::kImmediate;
  uint8_t index = kZero;           // of the register; of an address, its base
  uint8_t uniform = kZeroUniform;  // of an address: added to its base
  uint8_t bank = 0;                // of a constant
  bool negative = false;           // -R3, !P3
  bool inverted = false;           // ~R3
  bool absolute = false;           // |R3|
  uint8_t half = 0;                // R3.H1_H1 or R3.H1: 1
  uint32_t value = 0;              // immediate; offset of an address
  float number = 0;                // of an immediate that has a decimal point
  std::string name;                // of a special register
};

// What an instruction does. Opcodes that differ only in modifiers or in the datapath (UIADD3 is
// IADD3 on uniform registers) share one.
enum class Code : uint8_t {
  kUnknown,  // aborts when it is executed
  kNothing,  // caches, fences and hints: nothing to do on one processor
  // Arithmetic of a lane: lane.cc
  kAdd3,
  kBarrierResult,
  kBitReverse,
  kCheckDivision,
  kCompare,
  kCompareFloat,
  kConstant2,
  kConvertHalf,
  kFindLeadingOne,
  kFloatAdd,
  kFloatFma,
  kFloatMinMax,
  kFloatMultiply,
  kFloatToInt,
  kFunnelShift,
  kHalfMinMax,
  kIntToFloat,
  kLoadConstant,
  kLogic3,
  kLogicPredicates,
  kMinMax,
  kAddMinMax,
  kMove,
  kMultiplyAdd,
  kMultiplyAddHigh,
  kMultiplyAddWide,
  kPack,
  kPermute,
  kPopulation,
  kPredicatesToRegister,
  kReciprocal,
  kSelect,
  kShiftAdd,
  kShiftAddHigh,
  kSpecial,
  kSpecialPair,
  // Flow, lanes together, memory: warp.cc
  kAtomic,
  kBlockBarrier,
  kBranch,
  kBranchDivergent,
  kBranchIndirect,
  kBreak,
  kCall,
  kCollective,
  kElect,
  kExit,
  kLoad,
  kLoadShared,
  kReconverge,
  kReturn,
  kSetReconvergence,
  kShuffle,
  kStore,
  kStoreShared,
  kToUniform,
  kVote,
  kWarpSync,
};

struct Instruction {
  Code code = Code::kUnknown;
  bool on_uniform = false;     // executed once for the warp
  bool guard_uniform = false;  // @UP3
  bool guard_negative = false;
  uint8_t guard = kTrue;
  std::vector<Operand> operands;
  std::vector<std::string> modifiers;
  std::string text;

  // What the modifiers say, for those that are asked for often
  bool is_unsigned = false, extended = false;
  uint32_t bytes = 4;  // of an access
  bool sign_extends = false;
  uint32_t target = 0;  // of a branch

  bool has(std::string_view modifier) const {
    for (const std::string &m : modifiers)
      if (m == modifier) return true;
    return false;
  }
};

struct Program {
  std::string name;
  std::vector<Instruction> code;
  std::vector<uint8_t> constants;  // bank 2: tables of branches
};

// Reads programs written by listing.py: "K name", "2 hex of constant bank 2", "text of an
// instruction", in the order of their addresses.
std::map<std::string, Program> read_programs(const char *path);

[[noreturn]] void die(const std::string &why);

}  // namespace sass
