// The state of a warp and of its thread block, and what instructions do to it.
#pragma once

#include "program.h"

namespace sass {

constexpr uint32_t kLanes = 32;
constexpr uint32_t kAll = ~0u;

// What a launch has executed. Sampled launches run some of their blocks.
struct Counts {
  uint64_t blocks, blocks_run;
  uint64_t instructions;         // of warps
  uint64_t loaded, stored;       // bytes of global memory
  uint64_t loads[5], stores[5];  // of lanes, by width: 1, 2, 4, 8, 16 bytes
};

struct Block {
  uint32_t x, y, grid_x, grid_y, threads;
  const uint8_t *parameters;
  uint32_t parameter_bytes;
  std::vector<uint8_t> shared;
  bool vote = false;  // of the last BAR.RED
};

struct Warp {
  enum class State : uint8_t { kRuns, kExited, kReconverges, kWarpSync, kBlockBarrier };

  Warp(const Program &program, Block &block, uint32_t index, Counts &counts);

  // Runs until all lanes have exited or wait at a barrier of the block.
  void run();
  // Lets the lanes at the block's barrier go on.
  void pass_block_barrier();
  uint32_t lanes_in(State state) const;
  uint32_t alive() const { return ~lanes_in(State::kExited); }

  bool vote = false;       // of the lanes at BAR.RED
  bool takes_any = false;  // BAR.RED.OR: one vote is enough; otherwise all are needed

 private:
  // lane.cc
  void run_lane(const Instruction &i, uint32_t lane);
  uint32_t constant(const Operand &o, uint32_t lane, uint32_t bytes) const;
  uint32_t bits(const Operand &o, uint32_t lane) const;       // without the operand's modifiers
  uint32_t high_bits(const Operand &o, uint32_t lane) const;  // of the register that follows
  uint32_t integer(const Operand &o, uint32_t lane) const;
  float number(const Operand &o, uint32_t lane) const;
  bool truth(const Operand &o, uint32_t lane) const;
  void set(const Operand &o, uint32_t lane, uint32_t value, uint32_t next = 0);
  void set_truth(const Operand &o, uint32_t lane, bool value);
  void add3(const Instruction &i, uint32_t lane);
  void compare(const Instruction &i, uint32_t lane);
  void compare_floats(const Instruction &i, uint32_t lane);
  void special(const Instruction &i, uint32_t lane);
  void pack(const Instruction &i, uint32_t lane);
  void half_min_max(const Instruction &i, uint32_t lane);

  // warp.cc
  bool release();
  void execute(const Instruction &i, uint32_t lanes, uint32_t guarded);
  void branch(const Instruction &i, uint32_t lanes, uint32_t taken, uint32_t target);
  void reconverge(uint32_t barrier);
  void shuffle(const Instruction &i, uint32_t lanes);
  void vote_of(const Instruction &i, uint32_t lanes);
  void access(const Instruction &i, uint32_t lanes);
  void access_shared(const Instruction &i, uint32_t lanes);
  void atomic(const Instruction &i, uint32_t lanes);
  void to_uniform(const Instruction &i, uint32_t lanes);
  uint64_t global_address(const Operand &o, uint32_t lane) const;
  [[noreturn]] void refuse(const Instruction &i, const char *why) const;

  const Program &program_;
  Block &block_;
  Counts &counts_;
  const uint32_t index_;
  uint32_t registers_[256][kLanes];
  uint32_t uniforms_[64] = {};
  uint32_t predicates_[8] = {};  // a bit per lane
  bool uniform_predicates_[8] = {};
  uint32_t at_[kLanes] = {};  // index of each lane's next instruction
  State states_[kLanes];
  uint32_t members_[16][kLanes] = {};  // of a BSYNC: the lanes that each lane waits for
  uint32_t waits_for_[kLanes] = {};    // the barrier register of a lane at BSYNC
};

}  // namespace sass
