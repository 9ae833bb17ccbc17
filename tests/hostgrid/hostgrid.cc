// The scheduler. A thread runs on its fiber until it waits for others or exits; a warp is advanced
// by letting each of its lanes do so; a block, by advancing any warp that can go on. Which one, and
// in which order lanes and blocks run, is drawn:
//
//   HOSTGRID_SCHED=rand|fwd|rev    any (the default), the first, the last
//   HOSTGRID_SEED=1                of rand; the same seed draws the same order in every launch
//   HOSTGRID_TRACE=1               a line on stderr for each launch: where it comes from
//
// What a device might get through by luck ends the process: see `die`.
#include "hostgrid.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <vector>

#include "cuda_runtime_api.h"

#if defined(__SANITIZE_THREAD__)
#error "compile this file without -fsanitize=thread: the race check is about kernels"
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// What kernels see as constants.
#define HOSTGRID_STORE(T, name) T running_##name __asm__(#name) HOSTGRID_HIDDEN
HOSTGRID_STORE(uint3, threadIdx);
HOSTGRID_STORE(uint3, blockIdx);
HOSTGRID_STORE(dim3, blockDim);
HOSTGRID_STORE(dim3, gridDim);

// Bounds of the section of static shared arrays, from the linker.
extern unsigned char static_shared_begin[] __asm__("__start_hostgrid_shared")
    __attribute__((weak)) HOSTGRID_HIDDEN;
extern unsigned char static_shared_end[] __asm__("__stop_hostgrid_shared")
    __attribute__((weak)) HOSTGRID_HIDDEN;

namespace hostgrid {
namespace {

constexpr size_t kMaxThreads = 1024, kMaxWarps = kMaxThreads / kWarp;
constexpr size_t kStackBytes = 128 << 10;
constexpr unsigned char kPoison = 0xCB;

enum class State : uint8_t { kReady, kAtBarrier, kInWarp, kExited };

struct Thread {
  State state;
  uint3 index;
  char *stack;          // NULL before it has begun and after it has exited
  void *stack_pointer;  // while it does not run
  void *fake_stack;     // AddressSanitizer's
  // What it waits for.
  const char *what;
  Site site;
  uint32_t mask;
  uint64_t value;
};

struct Warp {
  uint64_t exchanged[kWarp];  // of each lane, in the warp function that it has passed last
  // Vector clocks of __syncwarp. They go on from block to block.
  uint64_t syncs[kWarp];
  uint64_t seen[kWarp][kWarp];
};

struct Launch {
  uint64_t number = 0;
  void (*thread)(void *);
  void *context;
  uint32_t num_threads, num_warps;
  size_t shared_bytes;
} current;

std::mutex launching;
std::map<const void *, size_t> allowed_shared;
Thread threads[kMaxThreads];
Warp warps[kMaxWarps];
Thread *running = nullptr;  // NULL while the scheduler runs
Position here{};
uint32_t barrier_votes;           // at the barrier that the block has passed last
std::vector<char *> free_stacks;  // the last one used is the one in the processor's cache
alignas(128) unsigned char shared[kMaxSharedBytes];
void *scheduler_stack_pointer;

// ---- order ----

class Order {
 public:
  Order() {
    const char *const order = std::getenv("HOSTGRID_SCHED");
    const char *const seed = std::getenv("HOSTGRID_SEED");
    forward_ = order && std::strcmp(order, "fwd") == 0;
    reverse_ = order && std::strcmp(order, "rev") == 0;
    state_ = seed ? std::strtoull(seed, nullptr, 10) : 1;
  }

  size_t pick(size_t count) { return forward_ ? 0 : reverse_ ? count - 1 : below(count); }

  void arrange(uint32_t *first, size_t count) {
    std::iota(first, first + count, 0);
    if (reverse_) std::reverse(first, first + count);
    if (forward_ || reverse_) return;
    for (; count > 1; --count) std::swap(first[count - 1], first[below(count)]);
  }

 private:
  // Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014
  size_t below(size_t bound) {
    uint64_t x = state_ += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return ((x ^ (x >> 31)) >> 32) * bound >> 32;
  }

  bool forward_, reverse_;
  uint64_t state_;
};

// ---- the end ----

bool waits_alike(const Thread &a, const Thread &b) {
  if (a.state != b.state) return false;
  if (a.state == State::kReady || a.state == State::kExited) return true;
  return a.what == b.what && a.site.file == b.site.file && a.site.line == b.site.line &&
         (a.state == State::kAtBarrier || a.mask == b.mask);
}

void print_place() {
  std::fprintf(stderr, "  in block (%u, %u, %u) of %u threads, launch %llu\n", running_blockIdx.x,
               running_blockIdx.y, running_blockIdx.z, current.num_threads,
               static_cast<unsigned long long>(current.number));
}

// Says what all threads of the block do, and aborts.
[[noreturn]] void die(const char *problem) {
  std::fprintf(stderr, "hostgrid: %s\n", problem);
  print_place();
  const Thread *const begin = threads, *const end = begin + current.num_threads;
  for (const Thread *t = begin; t != end; ++t) {
    const auto alike = [=](const Thread &other) { return waits_alike(*t, other); };
    if (std::any_of(begin, t, alike)) continue;
    if (t->state == State::kReady) std::fprintf(stderr, "  can go on: threads");
    if (t->state == State::kExited) std::fprintf(stderr, "  have exited: threads");
    if (t->state == State::kAtBarrier)
      std::fprintf(stderr, "  wait at %s, %s:%d: threads", t->what, t->site.file, t->site.line);
    if (t->state == State::kInWarp)
      std::fprintf(stderr, "  wait at %s with mask %08x, %s:%d: threads", t->what, t->mask,
                   t->site.file, t->site.line);
    for (const Thread *first = t, *last; first != end; first = std::find_if(last, end, alike)) {
      last = std::find_if_not(first, end, alike);
      std::fprintf(stderr, last - first == 1 ? " %td" : " %td-%td", first - begin,
                   last - begin - 1);
    }
    std::fprintf(stderr, "\n");
  }
  std::abort();
}

// Says what the running thread has asked for, and aborts.
[[noreturn]] void die_asking(const char *what, uint32_t mask, Site site, uint32_t lane) {
  std::fprintf(stderr, "hostgrid: lane %u is not in mask %08x of %s by thread %u, %s:%d\n", lane,
               mask, what, here.thread, site.file, site.line);
  print_place();
  std::abort();
}

// ---- fibers ----

// Saves the caller's registers and stack pointer, and goes on where `stack_pointer` was saved.
__attribute__((naked, noipa)) void switch_stacks(void **, void *) {
  asm("pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n\t"
      "movq %rsp, (%rdi)\n\t"
      "movq %rsi, %rsp\n\t"
      "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp\n\t"
      "ret");
}

#if defined(__SANITIZE_ADDRESS__)
const void *scheduler_stack;
size_t scheduler_stack_bytes;
void *scheduler_fake_stack;

void before_thread(const Thread &t) {
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, t.stack, kStackBytes);
}
void in_thread(const Thread &t) {
  __sanitizer_finish_switch_fiber(t.fake_stack, &scheduler_stack, &scheduler_stack_bytes);
}
void before_scheduler(Thread *t) {
  __sanitizer_start_switch_fiber(t->state == State::kExited ? nullptr : &t->fake_stack,
                                 scheduler_stack, scheduler_stack_bytes);
}
void in_scheduler() { __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr); }
void set_shared_bounds() {
  __asan_unpoison_memory_region(shared, sizeof shared);
  __asan_poison_memory_region(shared + current.shared_bytes, sizeof shared - current.shared_bytes);
}
#else
void before_thread(const Thread &) {}
void in_thread(const Thread &) {}
void before_scheduler(Thread *) {}
void in_scheduler() {}
void set_shared_bounds() {}
#endif

// Leaves the running thread; returns when it runs again.
void suspend() {
  Thread *const t = running;
  before_scheduler(t);
  switch_stacks(&t->stack_pointer, scheduler_stack_pointer);
  in_thread(*t);
}

// Never returns, so the sanitizer must not expect it to clean its frame.
__attribute__((no_sanitize("address"))) void begin() {
  in_thread(*running);
  current.thread(current.context);
  running->state = State::kExited;
  suspend();
}

char *new_stack() {
  const size_t guard = 4096;
  void *const memory = mmap(nullptr, guard + kStackBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, guard, PROT_NONE) != 0) {
    std::perror("hostgrid: stack of a thread");
    std::abort();
  }
  return static_cast<char *>(memory) + guard;
}

// Gives the thread a stack from which `switch_stacks` returns into `begin`.
void give_stack(Thread *t) {
  if (free_stacks.empty()) free_stacks.push_back(new_stack());
  t->stack = free_stacks.back();
  free_stacks.pop_back();
  t->fake_stack = nullptr;
  constexpr int registers = 6;
  void **const top = reinterpret_cast<void **>(t->stack + kStackBytes);
  top[-1] = nullptr;  // where `begin` would return to
  top[-2] = reinterpret_cast<void *>(&begin);
  std::fill_n(top - 2 - registers, registers, nullptr);
  t->stack_pointer = top - 2 - registers;
}

bool is_stack_of(const Thread &t, const void *p) {
  const char *const at = static_cast<const char *>(p);
  return at >= t.stack && at < t.stack + kStackBytes;
}

void take_stack(Thread *t) {
  free_stacks.push_back(t->stack);
  t->stack = nullptr;
}

// Lets a thread run until it waits or has exited.
void resume(uint32_t thread) {
  Thread *const t = &threads[thread];
  const Warp &warp = warps[thread / kWarp];
  if (!t->stack) give_stack(t);
  running = t;
  running_threadIdx = t->index;
  ++here.segment;
  here.thread = thread;
  here.syncs = warp.syncs[thread % kWarp];
  here.seen = warp.seen[thread % kWarp];
  before_thread(*t);
  switch_stacks(&scheduler_stack_pointer, t->stack_pointer);
  in_scheduler();
  running = nullptr;
  if (t->state == State::kExited) take_stack(t);
}

void wait(State state, const char *what, Site site, uint32_t mask, uint64_t value) {
  Thread *const t = running;
  t->state = state;
  t->what = what;
  t->site = site;
  t->mask = mask;
  t->value = value;
  suspend();
}

// ---- warps ----

const char kShuffle[] = "a shuffle", kVote[] = "a vote", kSyncWarp[] = "__syncwarp";

// A warp function: the values of all lanes in the mask, valid until the next one.
const uint64_t *exchange(const char *what, uint32_t mask, uint64_t value, Site site) {
  if (!(mask >> lane() & 1)) die_asking(what, mask, site, lane());
  const uint64_t *const exchanged = warps[here.thread / kWarp].exchanged;
  wait(State::kInWarp, what, site, mask, value);
  return exchanged;
}

// What any lane of the mask has seen, all have seen now.
void join(Warp *warp, uint32_t mask) {
  uint64_t joined[kWarp] = {};
  for (uint32_t lane = 0; lane < kWarp; ++lane) {
    if (!(mask >> lane & 1)) continue;
    ++warp->syncs[lane];
    for (uint32_t i = 0; i < kWarp; ++i) joined[i] = std::max(joined[i], warp->seen[lane][i]);
  }
  for (uint32_t lane = 0; lane < kWarp; ++lane)
    if (mask >> lane & 1) joined[lane] = warp->syncs[lane];
  for (uint32_t lane = 0; lane < kWarp; ++lane)
    if (mask >> lane & 1) std::copy_n(joined, kWarp, warp->seen[lane]);
}

// Completes the warp function at which lane `leader` waits, if all lanes of its mask are there.
bool complete(uint32_t warp, uint32_t leader) {
  Thread *const lanes = &threads[warp * kWarp];
  const uint32_t mask = lanes[leader].mask, first = warp * kWarp;
  bool all_there = true;
  for (uint32_t lane = 0; lane < kWarp; ++lane) {
    if (!(mask >> lane & 1)) continue;
    if (first + lane >= current.num_threads || lanes[lane].state == State::kExited)
      die("a warp function waits for a lane that is not there");
    all_there &= waits_alike(lanes[lane], lanes[leader]);
  }
  if (!all_there) return false;
  for (uint32_t lane = 0; lane < kWarp; ++lane) {
    if (!(mask >> lane & 1)) continue;
    warps[warp].exchanged[lane] = lanes[lane].value;
    lanes[lane].state = State::kReady;
  }
  if (lanes[leader].what == kSyncWarp) join(&warps[warp], mask);
  return true;
}

// Lets each lane run until it waits or has exited, then completes what can be completed. False if
// that leaves no lane that can go on.
bool advance(uint32_t warp, Order *order) {
  const uint32_t first = warp * kWarp, count = std::min(kWarp, current.num_threads - first);
  uint32_t lanes[kWarp];
  order->arrange(lanes, count);
  for (uint32_t i = 0; i < count; ++i)
    if (threads[first + lanes[i]].state == State::kReady) resume(first + lanes[i]);
  bool can_go_on = false;
  for (uint32_t lane = 0; lane < count; ++lane)
    if (threads[first + lane].state == State::kInWarp) can_go_on |= complete(warp, lane);
  return can_go_on;
}

// ---- blocks ----

// Lets all threads go on that wait at the barrier. False if the whole block has exited.
bool release_barrier() {
  const Thread *waiting = nullptr;
  for (uint32_t i = 0; i < current.num_threads; ++i) {
    const Thread &t = threads[i];
    if (t.state == State::kInWarp) die("deadlock: these threads wait for each other");
    if (t.state == State::kExited) continue;
    if (waiting && !waits_alike(*waiting, t)) die("threads have met at different barriers");
    waiting = &t;
  }
  if (!waiting) return false;
  ++here.barriers;
  barrier_votes = 0;
  for (uint32_t i = 0; i < current.num_threads; ++i) {
    if (threads[i].state == State::kExited) continue;
    barrier_votes += threads[i].value;
    threads[i].state = State::kReady;
  }
  return true;
}

void run_block(Order *order) {
  std::memset(shared, kPoison, current.shared_bytes);
  if (static_shared_begin)
    std::memset(static_shared_begin, kPoison, static_shared_end - static_shared_begin);
  here.barriers = 0;
  uint3 index{0, 0, 0};
  for (uint32_t i = 0; i < current.num_threads; ++i) {
    threads[i].state = State::kReady;
    threads[i].index = index;
    if (++index.x < running_blockDim.x) continue;
    index.x = 0;
    if (++index.y < running_blockDim.y) continue;
    index.y = 0;
    ++index.z;
  }
  std::vector<uint32_t> ready(current.num_warps);
  do {
    ready.resize(current.num_warps);
    std::iota(ready.begin(), ready.end(), 0);
    while (!ready.empty()) {
      const auto warp = ready.begin() + order->pick(ready.size());
      if (!advance(*warp, order)) ready.erase(warp);
    }
  } while (release_barrier());
}

// ---- launches ----

cudaError_t refuse(cudaError_t error, const char *what, unsigned long long found,
                   unsigned long long limit) {
  std::fprintf(stderr, "hostgrid: launch refused: %s is %llu, expected 1 to %llu\n", what, found,
               limit);
  return returned(error);
}

cudaError_t check(dim3 grid, dim3 block, size_t shared_bytes, const void *kernel) {
  const struct {
    const char *what;
    unsigned long long found, limit;
  } rules[] = {
      {"blockDim.x", block.x, 1024},
      {"blockDim.y", block.y, 1024},
      {"blockDim.z", block.z, 64},
      {"threads per block", 1ull * block.x * block.y * block.z, kMaxThreads},
      {"gridDim.x", grid.x, INT32_MAX},
      {"gridDim.y", grid.y, 65535},
      {"gridDim.z", grid.z, 65535},
  };
  for (const auto &rule : rules)
    if (rule.found < 1 || rule.found > rule.limit)
      return refuse(cudaErrorInvalidConfiguration, rule.what, rule.found, rule.limit);
  const auto allowed = allowed_shared.find(kernel);
  const size_t limit =
      std::max(kMaxSharedBytesUnasked, allowed == allowed_shared.end() ? 0 : allowed->second);
  if (shared_bytes > limit) {
    std::fprintf(stderr,
                 "hostgrid: launch refused: shared memory is %zu bytes, expected at most %zu; "
                 "cudaFuncSetAttribute allows %zu\n",
                 shared_bytes, limit, kMaxSharedBytes);
    return returned(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

}  // namespace

void (*runner)(const Launched *) = nullptr;

void allow_shared(const void *kernel, size_t bytes) {
  const std::lock_guard<std::mutex> lock(launching);
  allowed_shared[kernel] = bytes;
}

void run(Grid grid, dim3 block, size_t shared_bytes, const void *kernel, void (*thread)(void *),
         void *context) {
  const std::lock_guard<std::mutex> lock(launching);
  if (check(grid, block, shared_bytes, kernel) != cudaSuccess) return;
  running_gridDim = grid;
  running_blockDim = block;
  const uint32_t num_threads = block.x * block.y * block.z;
  current = {current.number + 1, thread, context, num_threads, (num_threads + kWarp - 1) / kWarp,
             shared_bytes};
  set_shared_bounds();
  here.launch = current.number;
  if (is_set("HOSTGRID_TRACE"))
    std::fprintf(stderr, "hostgrid: launch from %s:%d\n", grid.site.file, grid.site.line);
  const Fence fence;
  Order order;
  std::vector<uint32_t> blocks(size_t{grid.x} * grid.y * grid.z);
  order.arrange(blocks.data(), blocks.size());
  for (const uint32_t number : blocks) {
    here.block = number;
    running_blockIdx = {number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
    run_block(&order);
  }
}

void *dynamic_shared() { return shared; }

uint32_t lane() { return here.thread % kWarp; }

uint32_t sync_block(bool vote, Site site) {
  wait(State::kAtBarrier, "__syncthreads", site, 0, vote);
  return barrier_votes;
}

void sync_warp(uint32_t mask, Site site) { exchange(kSyncWarp, mask, 0, site); }

uint64_t shuffle(uint32_t mask, uint64_t value, uint32_t source, Site site) {
  if (!(mask >> source & 1)) die_asking(kShuffle, mask, site, source);
  return exchange(kShuffle, mask, value, site)[source];
}

uint32_t ballot(uint32_t mask, bool vote, Site site) {
  const uint64_t *const votes = exchange(kVote, mask, vote, site);
  uint32_t result = 0;
  for (uint32_t lane = 0; lane < kWarp; ++lane)
    if (mask >> lane & votes[lane] & 1) result |= 1u << lane;
  return result;
}

bool is_stack(const void *p) { return is_stack_of(*running, p); }

bool is_shared(const void *p) {
  const auto *const at = static_cast<const unsigned char *>(p);
  return (at >= shared && at < shared + current.shared_bytes) ||
         (at >= static_shared_begin && at < static_shared_end);
}

const Position *position() {
  const Thread *const t = running;  // once: another host thread may launch at this moment
  return t && is_stack_of(*t, __builtin_frame_address(0)) ? &here : nullptr;
}

}  // namespace hostgrid

extern "C" __attribute__((visibility("default"))) void kvx_hostgrid_run_with(
    void (*runner)(const hostgrid::Launched *)) {
  hostgrid::runner = runner;
}

// A machine of so many devices, which own nothing yet, and of which the first is current.
extern "C" __attribute__((visibility("default"))) void kvx_hostgrid_machine(int devices,
                                                                            bool peers) {
  hostgrid::machine = {};
  hostgrid::machine.devices = devices;
  hostgrid::machine.peers = peers;
}

extern "C" __attribute__((visibility("default"))) void kvx_hostgrid_use(int device) {
  cudaSetDevice(device);
}

// Gives a device whole pages.
extern "C" __attribute__((visibility("default"))) void kvx_hostgrid_give(void *begin, size_t bytes,
                                                                         int device,
                                                                         bool is_shared) {
  hostgrid::machine.owned.push_back({static_cast<char *>(begin), bytes, device, is_shared});
}

// How often the library has called cudaGetDevice, cudaPointerGetAttributes, cudaGetSymbolAddress
// and cudaDeviceGetAttribute.
extern "C" __attribute__((visibility("default"))) void kvx_hostgrid_calls(unsigned counts[4]) {
  counts[0] = hostgrid::calls.get_device;
  counts[1] = hostgrid::calls.pointer_attributes;
  counts[2] = hostgrid::calls.symbol_address;
  counts[3] = hostgrid::calls.device_attribute;
}
