// Runs launches on the machine code, block by block, and counts. Called from machine.py.
#include <algorithm>
#include <memory>

#include "warp.h"

namespace {

using namespace sass;

constexpr uint32_t kReservedShared = 0x400;  // dynamic shared memory begins behind it on sm_90

std::map<std::string, Program> programs;

void run_block(const Program &program, Block &block, Counts &counts) {
  std::vector<std::unique_ptr<Warp>> warps;
  for (uint32_t i = 0; i * kLanes < block.threads; ++i)
    warps.push_back(std::make_unique<Warp>(program, block, i, counts));
  for (;;) {
    for (auto &warp : warps) warp->run();
    bool lives = false, all_arrived = true, any_voted = false, all_voted = true, takes_any = false;
    for (auto &warp : warps) {
      const uint32_t waiting = warp->lanes_in(Warp::State::kBlockBarrier);
      lives |= warp->alive() != 0;
      all_arrived &= waiting == warp->alive();
      if (!waiting) continue;
      takes_any = warp->takes_any;
      any_voted |= warp->vote;
      all_voted &= warp->vote;
    }
    block.vote = takes_any ? any_voted : all_voted;
    if (!lives) return;
    if (!all_arrived) die("threads are missing at a barrier of " + program.name);
    for (auto &warp : warps) warp->pass_block_barrier();
  }
}

}  // namespace

extern "C" {

void sass_read(const char *path) { programs = read_programs(path); }

// Runs about `sample` blocks of the grid, evenly spread; 0: all. False: no such kernel.
bool sass_launch(const char *name, uint32_t grid_x, uint32_t grid_y, uint32_t threads,
                 uint32_t shared_bytes, const uint8_t *parameters, uint32_t parameter_bytes,
                 uint32_t sample, Counts *counts) {
  const auto found = programs.find(name);
  if (found == programs.end()) return false;
  const uint64_t blocks = uint64_t{grid_x} * grid_y;
  const uint64_t step = sample ? std::max<uint64_t>(blocks / sample, 1) : 1;
  *counts = {};
  counts->blocks = blocks;
  for (uint64_t i = 0; i < blocks; i += step) {
    Block block{static_cast<uint32_t>(i % grid_x),
                static_cast<uint32_t>(i / grid_x),
                grid_x,
                grid_y,
                threads,
                parameters,
                parameter_bytes,
                std::vector<uint8_t>(kReservedShared + shared_bytes, 0xcb)};
    run_block(found->second, block, *counts);
    ++counts->blocks_run;
  }
  return true;
}
}
