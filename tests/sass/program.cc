#include "program.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

namespace sass {
namespace {

const std::map<std::string_view, Code> kCodes = {
    {"ACQBULK", Code::kNothing},  // griddepcontrol.wait
    {"ATOMG", Code::kAtomic},
    {"B2R", Code::kBarrierResult},
    {"BAR", Code::kBlockBarrier},
    {"BRA", Code::kBranch},
    {"BREAK", Code::kBreak},
    {"BREV", Code::kBitReverse},
    {"BRX", Code::kBranchIndirect},
    {"BSSY", Code::kSetReconvergence},
    {"BSYNC", Code::kReconverge},
    {"CALL", Code::kCall},
    {"CCTL", Code::kNothing},
    {"CS2R", Code::kSpecialPair},
    {"DEPBAR", Code::kNothing},
    {"ELECT", Code::kElect},
    {"ENDCOLLECTIVE", Code::kNothing},
    {"ERRBAR", Code::kNothing},
    {"CGAERRBAR", Code::kNothing},
    {"EXIT", Code::kExit},
    {"F2FP", Code::kPack},
    {"F2I", Code::kFloatToInt},
    {"FADD", Code::kFloatAdd},
    {"FCHK", Code::kCheckDivision},
    {"FENCE", Code::kNothing},
    {"FFMA", Code::kFloatFma},
    {"FLO", Code::kFindLeadingOne},
    {"FMNMX", Code::kFloatMinMax},
    {"FMUL", Code::kFloatMultiply},
    {"FSEL", Code::kSelect},
    {"FSETP", Code::kCompareFloat},
    {"HADD2", Code::kConvertHalf},
    {"HFMA2", Code::kConstant2},
    {"I2F", Code::kIntToFloat},
    {"I2FP", Code::kIntToFloat},
    {"IADD3", Code::kAdd3},
    {"IMAD", Code::kMultiplyAdd},
    {"ISETP", Code::kCompare},
    {"LD", Code::kLoad},
    {"LDC", Code::kLoadConstant},
    {"LDG", Code::kLoad},
    {"LDS", Code::kLoadShared},
    {"LEA", Code::kShiftAdd},
    {"LOP3", Code::kLogic3},
    {"MEMBAR", Code::kNothing},
    {"MOV", Code::kMove},
    {"MUFU", Code::kReciprocal},
    {"NOP", Code::kNothing},
    {"P2R", Code::kPredicatesToRegister},
    {"PLOP3", Code::kLogicPredicates},
    {"POPC", Code::kPopulation},
    {"PREEXIT", Code::kNothing},  // griddepcontrol.launch_dependents
    {"PRMT", Code::kPermute},
    {"R2UR", Code::kToUniform},
    {"RET", Code::kReturn},
    {"S2R", Code::kSpecial},
    {"S2UR", Code::kSpecial},
    {"SEL", Code::kSelect},
    {"SHF", Code::kFunnelShift},
    {"SHFL", Code::kShuffle},
    {"ST", Code::kStore},
    {"STG", Code::kStore},
    {"STS", Code::kStoreShared},
    {"VHMNMX", Code::kHalfMinMax},
    {"VIADD", Code::kAdd3},
    {"VIADDMNMX", Code::kAddMinMax},
    {"VIMNMX", Code::kMinMax},
    {"VOTE", Code::kVote},
    {"VOTEU", Code::kVote},
    {"WARPSYNC", Code::kWarpSync},
    {"YIELD", Code::kNothing},
};

bool takes(std::string_view *text, std::string_view prefix) {
  if (text->substr(0, prefix.size()) != prefix) return false;
  text->remove_prefix(prefix.size());
  return true;
}

bool drops(std::string_view *text, std::string_view suffix) {
  if (text->size() < suffix.size() || text->substr(text->size() - suffix.size()) != suffix)
    return false;
  text->remove_suffix(suffix.size());
  return true;
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

std::vector<std::string_view> split(std::string_view text, std::string_view by) {
  std::vector<std::string_view> parts;
  for (size_t at; (at = text.find(by)) != text.npos; text.remove_prefix(at + by.size()))
    parts.push_back(trimmed(text.substr(0, at)));
  parts.push_back(trimmed(text));
  return parts;
}

uint32_t integer(std::string_view text) {
  const bool negative = takes(&text, "-");
  const auto value = static_cast<uint32_t>(std::strtoull(std::string(text).c_str(), nullptr, 0));
  return negative ? 0 - value : value;
}

bool is_number(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == text.npos;
}

// R3, UR3, P3, UP3, B3 and the names of their zeros; false: something else.
bool parse_register(std::string_view text, Operand *o) {
  struct Bank {
    std::string_view prefix, rest;  // `rest`: the last one's name
    Kind kind;
    uint8_t last;
  };
  static constexpr Bank kBanks[] = {
      {"UR", "Z", Kind::kUniform, kZeroUniform},
      {"UP", "T", Kind::kUniformPredicate, kTrue},
      {"R", "Z", Kind::kRegister, kZero},
      {"P", "T", Kind::kPredicate, kTrue},
      {"B", "", Kind::kBarrier, 0},
  };
  for (const Bank &bank : kBanks) {
    std::string_view rest = text;
    if (!takes(&rest, bank.prefix) || (!is_number(rest) && (rest.empty() || rest != bank.rest)))
      continue;
    o->kind = bank.kind;
    o->index = is_number(rest) ? static_cast<uint8_t>(integer(rest)) : bank.last;
    return true;
  }
  return false;
}

// The inside of an address: registers and an offset, joined by +.
void parse_address(std::string_view text, Operand *o) {
  for (std::string_view part : split(text, "+")) {
    drops(&part, ".64");
    drops(&part, ".U32");
    Operand base;
    if (!parse_register(part, &base)) {
      o->value += integer(part);
    } else if (base.kind == Kind::kUniform) {
      o->uniform = base.index;
    } else {
      o->index = base.index;
    }
  }
}

Operand parse_operand(std::string_view text) {
  Operand o;
  if (takes(&text, "desc[")) text.remove_prefix(text.find(']') + 1);
  drops(&text, ".reuse");
  if (takes(&text, "!")) o.negative = true;
  if (takes(&text, "~")) o.inverted = true;
  if (text.size() > 1 && text[0] == '-' &&
      (text[1] == '|' || text[1] == 'R' || text[1] == 'U' || text[1] == 'c')) {
    o.negative = true;
    text.remove_prefix(1);
  }
  if (drops(&text, "|") && takes(&text, "|")) o.absolute = true;
  drops(&text, ".H0_H0");
  if (drops(&text, ".H1_H1") || drops(&text, ".H1")) o.half = 1;
  drops(&text, ".reuse");
  if (takes(&text, "c[")) {
    o.kind = Kind::kConstant;
    o.bank = static_cast<uint8_t>(integer(text.substr(0, text.find(']'))));
    text.remove_prefix(text.find("][") + 2);
    drops(&text, "]");
    parse_address(text, &o);
  } else if (takes(&text, "[")) {
    o.kind = Kind::kMemory;
    parse_address(text.substr(0, text.find(']')), &o);
  } else if (parse_register(text, &o)) {
  } else if (text.substr(0, 3) == "SR_" || text == "PR" || text == "SRZ") {
    o.kind = Kind::kName;
    o.name = text;
  } else if (text.find("0x") != text.npos) {
    o.value = integer(text);
    std::memcpy(&o.number, &o.value, sizeof o.number);
  } else {
    const std::string_view digits = text[0] == '+' ? text.substr(1) : text;
    o.number = digits.find("QNAN") != digits.npos
                   ? NAN
                   : std::strtof(std::string(digits).c_str(), nullptr);
    std::memcpy(&o.value, &o.number, sizeof o.value);
  }
  return o;
}

// Distinguishes what modifiers make of an opcode.
Code refined(const Instruction &i) {
  switch (i.code) {
    case Code::kMultiplyAdd:
      if (i.has("WIDE")) return Code::kMultiplyAddWide;
      return i.has("HI") ? Code::kMultiplyAddHigh : i.code;
    case Code::kShiftAdd:
      return i.has("HI") ? Code::kShiftAddHigh : i.code;
    case Code::kBranch:
      return i.has("DIV") ? Code::kBranchDivergent : i.code;
    case Code::kWarpSync:
      return i.has("COLLECTIVE") ? Code::kCollective : i.code;
    default:
      return i.code;
  }
}

Instruction parse(std::string_view text) {
  Instruction i;
  i.text = text;
  if (takes(&text, "@")) {
    i.guard_negative = takes(&text, "!");
    i.guard_uniform = takes(&text, "U");
    const std::string_view guard = text.substr(0, text.find(' '));
    i.guard = guard == "PT" ? kTrue : static_cast<uint8_t>(integer(guard.substr(1)));
    text = trimmed(text.substr(guard.size()));
  }
  const std::vector<std::string_view> name = split(text.substr(0, text.find(' ')), ".");
  i.modifiers.assign(name.begin() + 1, name.end());
  auto found = kCodes.find(name[0]);
  if (found == kCodes.end() && name[0][0] == 'U') {
    found = kCodes.find(name[0].substr(1));
    i.on_uniform = found != kCodes.end();
  }
  if (found != kCodes.end()) i.code = found->second;
  if (name[0] == "S2UR") i.on_uniform = true;
  i.code = refined(i);
  if (text.find(' ') != text.npos && i.code != Code::kUnknown) {
    for (std::string_view operand : split(text.substr(text.find(' ') + 1), ","))
      // "R4 -0x120 (*"BRANCH_TARGETS ...": what follows the first word repeats the table
      i.operands.push_back(parse_operand(i.code == Code::kReturn || i.code == Code::kBranchIndirect
                                             ? operand.substr(0, operand.find(' '))
                                             : operand));
  }
  i.is_unsigned = i.has("U32");
  i.extended = i.has("EX") || i.has("X");
  i.sign_extends = i.has("S8") || i.has("S16");
  i.bytes = i.has("128")                   ? 16
            : i.has("64")                  ? 8
            : i.has("U16") || i.has("S16") ? 2
            : i.has("U8") || i.has("S8")   ? 1
                                           : 4;
  if (!i.operands.empty()) i.target = i.operands.back().value;
  return i;
}

}  // namespace

void die(const std::string &why) {
  std::fprintf(stderr, "sass: %s\n", why.c_str());
  std::abort();
}

std::map<std::string, Program> read_programs(const char *path) {
  std::map<std::string, Program> programs;
  std::ifstream file(path);
  if (!file) die(std::string("cannot read ") + path);
  Program *program = nullptr;
  for (std::string line; std::getline(file, line);) {
    if (line.substr(0, 2) == "K ") {
      program = &programs[line.substr(2)];
      program->name = line.substr(2);
    } else if (line.substr(0, 2) == "2 ") {
      for (size_t at = 2; at + 1 < line.size(); at += 2)
        program->constants.push_back(
            static_cast<uint8_t>(std::stoul(line.substr(at, 2), nullptr, 16)));
    } else if (!line.empty()) {
      program->code.push_back(parse(line));
    }
  }
  return programs;
}

}  // namespace sass
