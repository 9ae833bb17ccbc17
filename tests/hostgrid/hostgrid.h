// Runs CUDA kernels on the host, for tests: one fiber per CUDA thread, one block after another.
// Kernels include cuda_runtime.h; this is what it, the launch macro and the race check stand on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

struct uint3 {
  unsigned int x, y, z;
};

struct dim3 {
  unsigned int x, y, z;
  constexpr dim3(unsigned int x_ = 1, unsigned int y_ = 1, unsigned int z_ = 1)
      : x(x_), y(y_), z(z_) {}
};

// Of the running thread. Constants to it, and to the compiler as long as it compiles file by file;
// the scheduler sets them anew whenever another thread runs.
#define HOSTGRID_HIDDEN __attribute__((visibility("hidden")))
extern const uint3 threadIdx HOSTGRID_HIDDEN;
extern const uint3 blockIdx HOSTGRID_HIDDEN;
extern const dim3 blockDim HOSTGRID_HIDDEN;
extern const dim3 gridDim HOSTGRID_HIDDEN;

namespace hostgrid {

constexpr uint32_t kWarp = 32;
constexpr size_t kMaxParameterBytes = 32764;
constexpr size_t kMaxSharedBytes = 227 << 10;
constexpr size_t kMaxSharedBytesUnasked = 48 << 10;  // more after cudaFuncSetAttribute

// A line of a kernel. As a default argument it is the caller's.
struct Site {
  const char *file;
  int line;
  static constexpr Site here(const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// ---- launches ----

// A grid, and the line that launches it.
struct Grid : dim3 {
  Site site;
  Grid(dim3 grid, Site site_ = Site::here()) : dim3(grid), site(site_) {}
  Grid(unsigned blocks, Site site_ = Site::here()) : dim3(blocks), site(site_) {}
};

// Runs `thread(context)` on every thread of the grid. A launch that a device would refuse is
// refused with the same error, which cudaGetLastError returns, and a line on stderr.
void run(Grid grid, dim3 block, size_t shared_bytes, const void *kernel, void (*thread)(void *),
         void *context);

// cudaFuncSetAttribute's part.
void allow_shared(const void *kernel, size_t bytes);

// A launch as a device gets it: parameters one after the other, each aligned.
struct Launched {
  const void *kernel;
  uint32_t grid_x, grid_y, threads, shared_bytes;
  const unsigned char *parameters;
  uint32_t parameter_bytes;
};

// Runs launches in place of `run`: tests/sass, on the kernel's machine code. NULL: nobody does.
extern void (*runner)(const Launched *) HOSTGRID_HIDDEN;

template <class... P>
void run_elsewhere(Grid grid, dim3 block, size_t shared_bytes, void (*kernel)(P...),
                   const P &...parameters) {
  alignas(128) unsigned char bytes[kMaxParameterBytes + (alignof(P) + ... + 0)] = {};
  size_t end = 0;
  const auto append = [&](const auto &parameter) {
    end = (end + alignof(decltype(parameter)) - 1) / alignof(decltype(parameter)) *
          alignof(decltype(parameter));
    std::memcpy(bytes + end, &parameter, sizeof parameter);
    end += sizeof parameter;
  };
  (append(parameters), ...);
  const Launched launched{reinterpret_cast<const void *>(kernel),
                          grid.x,
                          grid.y,
                          block.x,
                          static_cast<uint32_t>(shared_bytes),
                          bytes,
                          static_cast<uint32_t>(end)};
  runner(&launched);
}

template <class... P>
struct Call {
  void (*kernel)(P...);
  std::tuple<P...> parameters;

  // The race check does not look at the copying of parameters: a device has them in a bank of their
  // own.
  template <size_t... i>
  __attribute__((no_sanitize("thread"))) void operator()(std::index_sequence<i...>) {
    kernel(std::get<i>(parameters)...);
  }
  static void thread(void *call) { (*static_cast<Call *>(call))(std::index_sequence_for<P...>()); }
};

template <class... P, class... A>
void launch(Grid grid, dim3 block, size_t shared_bytes, void (*kernel)(P...), A &&...arguments) {
  static_assert((sizeof(P) + ... + 0) <= kMaxParameterBytes, "too many bytes of kernel parameters");
  static_assert(!(std::is_reference_v<P> || ...), "a kernel takes its parameters by value");
  if (runner) return run_elsewhere<P...>(grid, block, shared_bytes, kernel, arguments...);
  Call<P...> call{kernel, {std::forward<A>(arguments)...}};
  run(grid, block, shared_bytes, reinterpret_cast<const void *>(kernel), &Call<P...>::thread,
      &call);
}

// ---- what a thread calls ----

void *dynamic_shared();  // of the block, aligned to 128 bytes
uint32_t lane();
// How many threads of the block have come with a `vote` that is true.
uint32_t sync_block(bool vote, Site site);
void sync_warp(uint32_t mask, Site site);
// `value` as lane `source` gave it.
uint64_t shuffle(uint32_t mask, uint64_t value, uint32_t source, Site site);
// The lanes of the mask whose `vote` is true.
uint32_t ballot(uint32_t mask, bool vote, Site site);

// ---- what the race check asks ----

// Where the running thread stands. Constant between two suspensions: a segment.
struct Position {
  uint64_t launch, segment, block;
  uint32_t thread;
  uint64_t barriers;     // that its block has passed
  uint64_t syncs;        // __syncwarp calls that it has passed
  const uint64_t *seen;  // [kWarp], how many of those of each lane are known to be in its past
};

const Position *position();     // NULL unless the caller is a kernel
bool is_stack(const void *p);   // of the running thread
bool is_shared(const void *p);  // of the running block

}  // namespace hostgrid
