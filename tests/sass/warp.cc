// What a warp executes together: flow, shuffles, votes and memory.
//
// Of lanes that have diverged, those at the lowest address run first, until they wait for the
// others where the compiler reconverges them (BSYNC). The order does not matter to what is
// computed; the count of executed instructions is that of a device that reconverges there, too.
#include "warp.h"

#include <algorithm>
#include <cstring>

namespace sass {
namespace {

constexpr uint64_t kEndless = 50'000'000;  // instructions of a warp

template <class Visit>
void each_lane(uint32_t lanes, Visit visit) {
  for (; lanes; lanes &= lanes - 1) visit(static_cast<uint32_t>(__builtin_ctz(lanes)));
}

uint32_t first_of(uint32_t lanes) { return static_cast<uint32_t>(__builtin_ctz(lanes)); }

uint32_t log2_of(uint32_t bytes) { return static_cast<uint32_t>(__builtin_ctz(bytes)); }

}  // namespace

Warp::Warp(const Program &program, Block &block, uint32_t index, Counts &counts)
    : program_(program), block_(block), counts_(counts), index_(index) {
  std::memset(registers_, 0xa5, sizeof registers_);
  for (uint32_t lane = 0; lane < kLanes; ++lane)
    states_[lane] = index * kLanes + lane < block.threads ? State::kRuns : State::kExited;
}

void Warp::refuse(const Instruction &i, const char *why) const {
  die(std::string(why) + ": " + i.text + " in " + program_.name);
}

uint32_t Warp::lanes_in(State state) const {
  uint32_t lanes = 0;
  for (uint32_t lane = 0; lane < kLanes; ++lane) lanes |= uint32_t{states_[lane] == state} << lane;
  return lanes;
}

void Warp::run() {
  for (uint64_t steps = 0;; ++steps) {
    uint32_t at = UINT32_MAX, lanes = 0;
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      if (states_[lane] != State::kRuns || at_[lane] > at) continue;
      if (at_[lane] < at) lanes = 0;
      at = at_[lane];
      lanes |= 1u << lane;
    }
    if (!lanes) {
      if (release()) continue;
      return;
    }
    if (at >= program_.code.size() || steps > kEndless) die("runs away: " + program_.name);
    const Instruction &i = program_.code[at];
    ++counts_.instructions;
    uint32_t holds = i.guard == kTrue ? kAll : predicates_[i.guard];
    if (i.guard_uniform) holds = i.guard == kTrue || uniform_predicates_[i.guard] ? kAll : 0;
    if (i.guard_negative) holds = ~holds;
    each_lane(lanes, [&](uint32_t lane) { at_[lane] = at + 1; });
    execute(i, lanes, lanes & holds);
  }
}

// Where no lane runs: lets those go on that wait for lanes that have exited, or for all. False:
// all that live wait for the block.
bool Warp::release() {
  const uint32_t live = alive();
  bool released = false;
  each_lane(lanes_in(State::kReconverges), [&](uint32_t lane) {
    if (states_[lane] != State::kReconverges) return;
    reconverge(lane);
    released |= states_[lane] == State::kRuns;
  });
  if (released) return true;
  const uint32_t synced = lanes_in(State::kWarpSync);
  if (live && synced == live) {
    each_lane(live, [&](uint32_t lane) { states_[lane] = State::kRuns; });
    return true;
  }
  if (lanes_in(State::kBlockBarrier) != live) die("lanes wait for each other in " + program_.name);
  return false;
}

// Lets the lanes go on that wait at the same BSYNC as `lane` if none is missing.
void Warp::reconverge(uint32_t lane) {
  const uint32_t barrier = waits_for_[lane], wanted = members_[barrier][lane] & alive();
  uint32_t there = 0;
  each_lane(lanes_in(State::kReconverges), [&](uint32_t other) {
    if (waits_for_[other] == barrier && at_[other] == at_[lane]) there |= 1u << other;
  });
  if (wanted & ~there) return;
  each_lane(wanted, [&](uint32_t other) { states_[other] = State::kRuns; });
}

void Warp::pass_block_barrier() {
  each_lane(lanes_in(State::kBlockBarrier), [&](uint32_t lane) { states_[lane] = State::kRuns; });
}

void Warp::branch(const Instruction &i, uint32_t lanes, uint32_t taken, uint32_t target) {
  if (target % kInstructionBytes) refuse(i, "a target");
  each_lane(lanes & taken, [&](uint32_t lane) { at_[lane] = target / kInstructionBytes; });
}

// `lanes` have come to the instruction; `guarded` are those whose guard holds.
void Warp::execute(const Instruction &i, uint32_t lanes, uint32_t guarded) {
  const std::vector<Operand> &o = i.operands;
  switch (i.code) {
    case Code::kNothing:
      return;
    case Code::kExit:
      return each_lane(guarded, [&](uint32_t lane) { states_[lane] = State::kExited; });
    case Code::kBranch: {  // BRA P0, target: of the lanes for which P0 holds, too
      uint32_t taken = guarded;
      for (size_t k = 0; k + 1 < o.size(); ++k)
        each_lane(taken, [&](uint32_t lane) { taken &= ~(uint32_t{!truth(o[k], lane)} << lane); });
      if (i.has("ANY") && taken) taken = lanes;
      return branch(i, lanes, taken, i.target);
    }
    case Code::kBranchDivergent: {  // unless all lanes of a mask are here
      const bool diverged = (bits(o[0], first_of(lanes)) & alive()) != lanes;
      return branch(i, lanes, diverged ? lanes : 0, i.target);
    }
    case Code::kCall:
      return branch(i, lanes, guarded, i.target);
    case Code::kReturn:
    case Code::kBranchIndirect:
      return each_lane(guarded,
                       [&](uint32_t lane) { branch(i, 1u << lane, kAll, bits(o[0], lane)); });
    case Code::kSetReconvergence:
      return each_lane(guarded, [&](uint32_t lane) { members_[o[0].index][lane] = guarded; });
    case Code::kReconverge:
      each_lane(guarded, [&](uint32_t lane) {
        states_[lane] = State::kReconverges;
        waits_for_[lane] = o[0].index;
      });
      if (guarded) reconverge(first_of(guarded));
      return;
    case Code::kBreak:
      for (uint32_t &members : members_[o.back().index]) members &= ~guarded;
      return;
    case Code::kWarpSync:
      each_lane(guarded, [&](uint32_t lane) { states_[lane] = State::kWarpSync; });
      return;
    case Code::kCollective:
      if (guarded && (bits(o[0], first_of(guarded)) & alive()) != guarded)
        refuse(i, "lanes are missing");
      return;
    case Code::kBlockBarrier:
      takes_any = i.has("OR");
      vote = !takes_any;
      each_lane(guarded, [&](uint32_t lane) {
        states_[lane] = State::kBlockBarrier;
        if (i.has("RED")) vote = takes_any ? vote | truth(o[1], lane) : vote & truth(o[1], lane);
      });
      return;
    case Code::kShuffle:
      return shuffle(i, guarded);
    case Code::kVote:
      return vote_of(i, guarded);
    case Code::kElect:
      return each_lane(guarded,
                       [&](uint32_t lane) { set_truth(o[0], lane, lane == first_of(guarded)); });
    case Code::kToUniform:
      return to_uniform(i, guarded);
    case Code::kLoad:
    case Code::kStore:
      return access(i, guarded);
    case Code::kLoadShared:
    case Code::kStoreShared:
      return access_shared(i, guarded);
    case Code::kAtomic:
      return atomic(i, guarded);
    default:
      if (i.on_uniform) return guarded ? run_lane(i, first_of(guarded)) : void();
      return each_lane(guarded, [&](uint32_t lane) { run_lane(i, lane); });
  }
}

void Warp::shuffle(const Instruction &i, uint32_t lanes) {
  const std::vector<Operand> &o = i.operands;
  uint32_t given[kLanes] = {}, sources[kLanes] = {};
  each_lane(lanes, [&](uint32_t lane) { given[lane] = integer(o[2], lane); });
  uint32_t inside = 0;
  each_lane(lanes, [&](uint32_t lane) {
    const uint32_t by = integer(o[3], lane) & 31, mask = integer(o[4], lane);
    const uint32_t segment = mask >> 8 & 31, clamp = mask & 31;
    const uint32_t first = lane & segment, last = first | (clamp & ~segment);
    int source;
    if (i.has("IDX")) {
      source = static_cast<int>(first | (by & ~segment));
    } else if (i.has("BFLY")) {
      source = static_cast<int>(lane ^ by);
    } else {
      source =
          static_cast<int>(lane) + (i.has("UP") ? -static_cast<int>(by) : static_cast<int>(by));
    }
    const bool is_inside =
        i.has("UP") ? source >= static_cast<int>(last) : source <= static_cast<int>(last);
    sources[lane] = is_inside ? static_cast<uint32_t>(source) : lane;
    inside |= uint32_t{is_inside} << lane;
    if (!(lanes >> sources[lane] & 1)) refuse(i, "shuffles from a lane that is not here");
  });
  each_lane(lanes, [&](uint32_t lane) {
    set(o[1], lane, given[sources[lane]]);
    set_truth(o[0], lane, inside >> lane & 1);
  });
}

void Warp::vote_of(const Instruction &i, uint32_t lanes) {
  uint32_t votes = 0;
  each_lane(lanes,
            [&](uint32_t lane) { votes |= uint32_t{truth(i.operands.back(), lane)} << lane; });
  const bool result = i.has("ALL") ? votes == lanes : votes != 0;
  each_lane(lanes, [&](uint32_t lane) {
    for (size_t k = 0; k + 1 < i.operands.size(); ++k) {
      const Operand &o = i.operands[k];
      const bool takes_bits = o.kind == Kind::kRegister || o.kind == Kind::kUniform;
      takes_bits ? set(o, lane, votes) : set_truth(o, lane, result);
    }
  });
}

// R2UR: the value of one lane. With a predicate: whether a lane has another.
void Warp::to_uniform(const Instruction &i, uint32_t lanes) {
  const std::vector<Operand> &o = i.operands;
  if (!lanes) return;
  const uint32_t value = bits(o.back(), first_of(lanes));
  if (o.size() == 3) {
    each_lane(lanes, [&](uint32_t lane) {
      const bool differs = bits(o.back(), lane) != value;
      set_truth(o[0], lane, differs || (i.has("OR") && truth(o[0], lane)));
    });
  }
  set(o[o.size() - 2], 0, value);
}

// ---- memory

uint64_t Warp::global_address(const Operand &o, uint32_t lane) const {
  const uint64_t uniform = o.uniform == kZeroUniform
                               ? 0
                               : uint64_t{uniforms_[o.uniform + 1]} << 32 | uniforms_[o.uniform];
  uint64_t base = 0;
  if (o.index != kZero) base = registers_[o.index][lane];
  if (o.index != kZero && o.uniform == kZeroUniform)
    base |= uint64_t{registers_[o.index + 1][lane]} << 32;
  return base + uniform + static_cast<uint64_t>(int64_t{static_cast<int32_t>(o.value)});
}

void Warp::access(const Instruction &i, uint32_t lanes) {
  const bool loads = i.code == Code::kLoad;
  const Operand &memory = i.operands[loads ? 1 : 0], &data = i.operands[loads ? 0 : 1];
  uint64_t *const widths = loads ? counts_.loads : counts_.stores;
  each_lane(lanes, [&](uint32_t lane) {
    const uint64_t address = global_address(memory, lane);
    if (address % i.bytes) refuse(i, "misaligned");
    auto *const at = reinterpret_cast<uint8_t *>(static_cast<uintptr_t>(address));
    uint32_t words[4] = {};
    if (loads) {
      std::memcpy(words, at, i.bytes);
      if (i.sign_extends) refuse(i, "a signed load");
      for (uint32_t k = 0; k < (i.bytes + 3) / 4; ++k) set(data, lane, words[k], k);
    } else {
      for (uint32_t k = 0; k < (i.bytes + 3) / 4; ++k)
        words[k] = data.index == kZero ? 0 : registers_[data.index + k][lane];
      std::memcpy(at, words, i.bytes);
    }
    (loads ? counts_.loaded : counts_.stored) += i.bytes;
    ++widths[log2_of(i.bytes)];
  });
}

void Warp::access_shared(const Instruction &i, uint32_t lanes) {
  const bool loads = i.code == Code::kLoadShared;
  const Operand &memory = i.operands[loads ? 1 : 0], &data = i.operands[loads ? 0 : 1];
  each_lane(lanes, [&](uint32_t lane) {
    const uint32_t at = memory.value +
                        (memory.index == kZero ? 0 : registers_[memory.index][lane]) +
                        uniforms_[memory.uniform];
    if (at % i.bytes || size_t{at} + i.bytes > block_.shared.size()) refuse(i, "shared memory");
    uint32_t words[4] = {};
    if (loads) {
      std::memcpy(words, &block_.shared[at], i.bytes);
      for (uint32_t k = 0; k < (i.bytes + 3) / 4; ++k) set(data, lane, words[k], k);
    } else {
      for (uint32_t k = 0; k < (i.bytes + 3) / 4; ++k)
        words[k] = data.index == kZero ? 0 : registers_[data.index + k][lane];
      std::memcpy(&block_.shared[at], words, i.bytes);
    }
  });
}

void Warp::atomic(const Instruction &i, uint32_t lanes) {
  const std::vector<Operand> &o = i.operands;
  const uint32_t bytes = i.has("64") ? 8 : 4;
  each_lane(lanes, [&](uint32_t lane) {
    auto *const at =
        reinterpret_cast<uint8_t *>(static_cast<uintptr_t>(global_address(o[2], lane)));
    uint64_t before = 0, given = bits(o[3], lane);
    if (bytes == 8) given |= uint64_t{high_bits(o[3], lane)} << 32;
    std::memcpy(&before, at, bytes);
    uint64_t after;
    if (i.has("ADD")) {
      after = before + given;
    } else if (i.has("EXCH")) {
      after = given;
    } else if (i.has("CAS") && bytes == 4) {
      after = before == given ? bits(o[4], lane) : before;
    } else {
      refuse(i, "an atomic");
    }
    std::memcpy(at, &after, bytes);
    set(o[1], lane, static_cast<uint32_t>(before));
    if (bytes == 8) set(o[1], lane, static_cast<uint32_t>(before >> 32), 1);
  });
}

}  // namespace sass
