// The race check: what code compiled with -fsanitize=thread calls, linked instead of libtsan. Only
// kernels are looked at. Two accesses to a byte, one of which writes, are a race unless both are
// atomic or one happens before the other. In CUDA it does if they are
//
//   of one thread, or
//   of one block with a __syncthreads between them, or
//   of one warp with a __syncwarp of both lanes between them, or a chain of such, or
//   of two launches.
//
// Shuffles and votes order nothing, as on a device.
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hostgrid.h"

#if defined(__SANITIZE_THREAD__)
#error "compile this file without -fsanitize=thread: it would call itself"
#endif

namespace hostgrid {
namespace {

enum Kind : uint32_t { kRead, kWrite, kAtomic };

// A stretch of a thread between two suspensions: its past does not change.
struct Segment {
  uint64_t block;
  uint32_t thread;
  uint64_t barriers, syncs;
};

struct Access {
  uint32_t segment : 30;  // number of its segment, from 1; 0: no access
  uint32_t kind : 2;
  int32_t pc;  // from `check`
};

// What is remembered of some bytes. Of accesses that nothing orders two are enough, of two warps
// where there are two: an access that races with any of them races with one of these, unless parts
// of a warp have met in a __syncwarp of their own.
struct Cell {
  Access writes[2], reads[2];
};

// Bytes of a page share cells as far as all accesses to the page have touched them together.
constexpr size_t kPageBytes = 1024, kMaxCellBytes = 16;

struct Page {
  size_t cell_bytes = 0;
  std::vector<Cell> cells;

  void refine(size_t bytes) {
    std::vector<Cell> finer(kPageBytes / bytes);
    for (size_t i = 0; cell_bytes && i < finer.size(); ++i)
      finer[i] = cells[i * bytes / cell_bytes];
    cells.swap(finer);
    cell_bytes = bytes;
  }
};

// Of this launch.
std::unordered_map<uintptr_t, Page> pages;
std::vector<Segment> segments;
Position now{};  // of the last access

unsigned long num_accesses, num_races;

void begin_segment(const Position &here) {
  if (here.launch != now.launch) {
    pages.clear();
    segments.clear();
  }
  now = here;
  segments.push_back({here.block, here.thread, here.barriers, here.syncs});
}

const Segment &segment_of(const Access &a) { return segments[a.segment - 1]; }

bool happened_before(const Segment &a) {
  if (a.block != now.block) return false;
  if (a.thread == now.thread || a.barriers < now.barriers) return true;
  return a.thread / kWarp == now.thread / kWarp && a.syncs < now.seen[a.thread % kWarp];
}

// Blocks run one after another in the same shared memory, which on a device is each block's own.
bool is_concurrent(const Access &a, bool shared) {
  if (a.segment == 0) return false;
  const Segment &segment = segment_of(a);
  return !(shared && segment.block != now.block) && !happened_before(segment);
}

bool in_one_warp(const Access &a, const Access &b) {
  const Segment &x = segment_of(a), &y = segment_of(b);
  return x.block == y.block && x.thread / kWarp == y.thread / kWarp;
}

void add(Access (&kept)[2], const Access &access, bool shared) {
  for (Access &a : kept) {
    if (is_concurrent(a, shared)) continue;
    a = access;
    return;
  }
  if (in_one_warp(kept[0], kept[1]) && !in_one_warp(kept[0], access)) kept[1] = access;
}

void remember(Cell *cell, const Access &access, bool shared) {
  if (access.kind == kWrite) *cell = {{access}, {}};
  if (access.kind == kAtomic) add(cell->writes, access, shared);
  if (access.kind == kRead) add(cell->reads, access, shared);
}

// What the access races with, or NULL.
const Access *find_race(const Cell &cell, const Access &access, bool shared) {
  for (const Access &write : cell.writes) {
    const bool both_atomic = access.kind == kAtomic && write.kind == kAtomic;
    if (!both_atomic && is_concurrent(write, shared)) return &write;
  }
  if (access.kind == kRead) return nullptr;
  for (const Access &read : cell.reads)
    if (is_concurrent(read, shared)) return &read;
  return nullptr;
}

void check(const void *p, size_t bytes, Kind kind, const void *pc);

void print_access(const char *when, const Access &access) {
  static const char *const names[] = {"read", "write", "atomic"};
  const Segment &segment = segment_of(access);
  const char *const pc = reinterpret_cast<const char *>(&check) + access.pc - 1;
  Dl_info module{};
  dladdr(pc, &module);
  std::fprintf(stderr, "  %s %s by thread %u of block %llu: addr2line -Cfipe %s %#tx\n", when,
               names[access.kind], segment.thread, static_cast<unsigned long long>(segment.block),
               module.dli_fname, pc - static_cast<const char *>(module.dli_fbase));
}

// Each pair of places in the code once.
void report(const void *p, bool shared, const Access &access, const Access &earlier) {
  constexpr size_t kMaxReports = 10;
  static std::set<std::pair<int32_t, int32_t>> reported;
  if (reported.size() == kMaxReports || !reported.insert({access.pc, earlier.pc}).second) return;
  std::fprintf(stderr, "hostgrid: race in launch %llu at %p, %s memory\n",
               static_cast<unsigned long long>(now.launch), p, shared ? "shared" : "global");
  print_access("this", access);
  print_access("earlier", earlier);
}

void check(const void *p, size_t bytes, Kind kind, const void *pc) {
  const Position *const here = position();
  if (!here || is_stack(p)) return;
  if (here->segment != now.segment) begin_segment(*here);
  ++num_accesses;
  const bool shared = is_shared(p);
  const Access access{
      static_cast<uint32_t>(segments.size()), kind,
      static_cast<int32_t>(static_cast<const char *>(pc) - reinterpret_cast<const char *>(&check))};
  const auto begin = reinterpret_cast<uintptr_t>(p), end = begin + bytes;
  const uintptr_t alignment = begin | bytes | kMaxCellBytes;
  const size_t cell_bytes = alignment & -alignment;
  bool is_race = false;
  for (uintptr_t at = begin; at < end;) {
    Page &page = pages[at / kPageBytes];
    if (page.cell_bytes == 0 || page.cell_bytes > cell_bytes) page.refine(cell_bytes);
    const uintptr_t stop = std::min(end, (at / kPageBytes + 1) * kPageBytes);
    for (; at < stop; at += page.cell_bytes) {
      Cell &cell = page.cells[at % kPageBytes / page.cell_bytes];
      const Access *const earlier = is_race ? nullptr : find_race(cell, access, shared);
      if (earlier) report(reinterpret_cast<const void *>(at), shared, access, *earlier);
      is_race |= earlier != nullptr;
      remember(&cell, access, shared);
    }
  }
  num_races += is_race;
}

}  // namespace
}  // namespace hostgrid

extern "C" {

// ---- for tests ----

#define EXPORTED __attribute__((visibility("default")))
EXPORTED unsigned long hostgrid_races() { return hostgrid::num_races; }
EXPORTED unsigned long hostgrid_accesses() { return hostgrid::num_accesses; }

// ---- for the compiler ----

#define CHECK(p, bytes, kind) hostgrid::check(p, bytes, hostgrid::kind, __builtin_return_address(0))

#define ACCESSES(bytes)                                                  \
  void __tsan_read##bytes(void *p) { CHECK(p, bytes, kRead); }           \
  void __tsan_write##bytes(void *p) { CHECK(p, bytes, kWrite); }         \
  void __tsan_unaligned_read##bytes(void *p) { CHECK(p, bytes, kRead); } \
  void __tsan_unaligned_write##bytes(void *p) { CHECK(p, bytes, kWrite); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void *p, unsigned long bytes) { CHECK(p, bytes, kRead); }
void __tsan_write_range(void *p, unsigned long bytes) { CHECK(p, bytes, kWrite); }

void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}

// Host code needs them too, so they do what they say, in the strongest order. An atomic load is not
// looked at: it races with no atomic, and kernels have none alone.
#define CHANGE(T, bits, name)                           \
  T __tsan_atomic##bits##_##name(T *p, T value, int) {  \
    CHECK(p, sizeof(T), kAtomic);                       \
    return __atomic_##name(p, value, __ATOMIC_SEQ_CST); \
  }
#define COMPARE(T, bits, strength)                                                              \
  int __tsan_atomic##bits##_compare_exchange_##strength(T *p, T *expected, T value, int, int) { \
    CHECK(p, sizeof(T), kAtomic);                                                               \
    return __atomic_compare_exchange_n(p, expected, value, false, __ATOMIC_SEQ_CST,             \
                                       __ATOMIC_SEQ_CST);                                       \
  }
#define ATOMICS(T, bits)                                                                         \
  T __tsan_atomic##bits##_load(const T *p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); } \
  void __tsan_atomic##bits##_store(T *p, T value, int) {                                         \
    CHECK(p, sizeof(T), kAtomic);                                                                \
    __atomic_store_n(p, value, __ATOMIC_SEQ_CST);                                                \
  }                                                                                              \
  T __tsan_atomic##bits##_exchange(T *p, T value, int) {                                         \
    CHECK(p, sizeof(T), kAtomic);                                                                \
    return __atomic_exchange_n(p, value, __ATOMIC_SEQ_CST);                                      \
  }                                                                                              \
  CHANGE(T, bits, fetch_add)                                                                     \
  CHANGE(T, bits, fetch_sub)                                                                     \
  CHANGE(T, bits, fetch_and)                                                                     \
  CHANGE(T, bits, fetch_or)                                                                      \
  CHANGE(T, bits, fetch_xor)                                                                     \
  COMPARE(T, bits, strong)                                                                       \
  COMPARE(T, bits, weak)
ATOMICS(uint8_t, 8)
ATOMICS(uint16_t, 16)
ATOMICS(uint32_t, 32)
ATOMICS(uint64_t, 64)
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

}  // extern "C"
