// Throws calls at libkvx: valid ones of odd sizes, ones with hostile indices, and ones whose
// descriptors have been mutated field by field. Built with sanitizers, over buffers of the exact
// size, so that one byte read or written too far ends the run.
//
// After each call:
//   refused   every byte is what it was, and there is a sentence
//   accepted  only the elements of the named tokens have changed, they hold the source's bytes
//             where nothing was converted, and the call was one that the spec allows
//   a valid call must not be refused; one with a hostile index that is used must be
//
//   fuzz [seconds [seed [first iteration [iterations]]]]
//   fuzz device [seconds [...]]       calls on DEVICE memory, which tests/hostgrid takes from the
//   host fuzz threads [seconds [seed]]     valid calls from several threads at once, for
//   ThreadSanitizer
//
// A device skips what is out of range. Such calls must not touch other memory; the rest is
// compared.
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "attend.h"
#include "bury.h"
#include "call.h"
#include "generate.h"
#include "hybrid.h"
#include "mutate.h"
#include "oracle.h"

// The race check of tests/hostgrid, where it is linked.
extern "C" __attribute__((weak)) unsigned long hostgrid_races();
extern "C" __attribute__((weak)) unsigned long hostgrid_accesses();

namespace fuzz {
namespace {

constexpr int kHybrid = kOps, kAttend = kOps + 1, kCounted = kOps + 2;

struct Counts {
  uint64_t calls[kCounted]{}, accepted[kCounted]{}, refused[kCounted]{}, out_of_range[kCounted]{};
  uint64_t unfair = 0;
};

constexpr const char *kOpNames[] = {"validate", "write", "gather", "migrate", "hybrid", "attend"};

std::string g_where = "fuzz threads";  // for the report of a sanitizer or of the hostgrid

void print_where() { std::fprintf(stderr, "while running: %s\n", g_where.c_str()); }

bool fail(const Case &c, const std::string &what) {
  std::printf("FAILED: %s\n%s: %s\n%slast error: %s\n", g_where.c_str(), kOpNames[c.op],
              what.c_str(), c.story.c_str(), kvx_last_error());
  return false;
}

void put_on_device(Case *c) {
  for (End *end : {&c->src, &c->dst}) {
    for (kvx_cache_desc_t &cache : end->layers)
      cache.k.memory = cache.v.memory = cache.pool.memory = KVX_MEMORY_DEVICE;
    for (PlaneCase &plane : end->planes) plane.desc.memory = KVX_MEMORY_DEVICE;
  }
  c->io.key.memory = c->io.value.memory = KVX_MEMORY_DEVICE;
}

bool run_on_device(Random random, Counts *counts, bool big) {
  const Op op = random.pick({kWrite, kGather, kMigrate});
  Case c;
  Generator(random, op, random.one_in(3), big, &c, /*device=*/true);
  put_on_device(&c);
  if (random.one_in(8)) bury(random, &c);
  c.memory.snapshot();
  Oracle oracle{c};
  oracle.run();
  if (oracle.inside) {
    ++counts->calls[op], ++counts->refused[op];
    if (call(c) != KVX_STATUS_INVALID_ARGUMENT || !c.memory.unchanged())
      return fail(c, "an array inside the destination was accepted");
    return true;
  }
  const bool skips = oracle.bad_index || !oracle.scales_good;
  if (hostgrid_races && (skips || oracle.writes_twice())) return ++counts->unfair, true;
  ++counts->calls[op];
  if (call(c) != KVX_STATUS_OK) return fail(c, "a valid call was refused");
  const kvx_status_t skipped = kvx_device_status(nullptr);
  ++(skipped == KVX_STATUS_OK ? counts->accepted : counts->refused)[op];
  if (skipped == KVX_STATUS_OUT_OF_RANGE) ++counts->out_of_range[op];
  if (skips) return true;
  if (skipped != KVX_STATUS_OK && !oracle.unsure) return fail(c, "a token was skipped");
  if (oracle.complaint.empty()) oracle.compare();
  return oracle.complaint.empty() ? true : fail(c, oracle.complaint);
}

// A call of a kind with a case of its own.
template <class T>
bool run_other(T &&c, int kind, Counts *counts) {
  kvx_status_t status = KVX_STATUS_OK;
  bool called = false;
  const std::string wrong = c.run(&status, &called);
  if (!called) return ++counts->unfair, true;
  ++counts->calls[kind];
  ++(status == KVX_STATUS_OK ? counts->accepted : counts->refused)[kind];
  if (status == KVX_STATUS_OUT_OF_RANGE) ++counts->out_of_range[kind];
  if (wrong.empty()) return true;
  std::printf("FAILED: %s\n%s: %s\n%s", g_where.c_str(), kOpNames[kind], wrong.c_str(),
              c.story().c_str());
  return false;
}

// threads: calls run at the same time. They are valid, and write no byte twice: the library's
// threads would race for it.
bool run_one(Random random, Counts *counts, bool threads, bool big) {
  if (!threads && random.one_in(6))
    return run_other(HybridCase(random, random.one_in(3)), kHybrid, counts);
  if (!threads && random.one_in(8))
    return run_other(AttendCase(random, random.one_in(2), big), kAttend, counts);
  const bool validate = !threads && random.one_in(8);
  const Op op = validate ? kValidate : random.pick({kWrite, kGather, kMigrate});
  const bool hostile = !threads && random.one_in(3);
  Case c;
  Generator(random, op, hostile, big, &c);
  if (!threads && random.one_in(8)) bury(random, &c);
  if (!threads && !random.one_in(4)) {
    const uint32_t mutations = 1 + random.below(3);
    for (uint32_t i = 0; i < mutations; ++i) mutate(random, &c);
  }
  Claims claims = Claims::kOwned;
  if (c.mutated) {
    claims = claims_of(c);
    if (claims == Claims::kUnfair) return ++counts->unfair, true;
    if (claims == Claims::kTooLarge) disarm(&c);
  }
  c.memory.snapshot();
  if (threads) {
    Oracle oracle{c};
    oracle.run();
    if (oracle.writes_twice()) return ++counts->unfair, true;
  }
  const kvx_status_t status = call(c);
  ++counts->calls[op];
  if (status != KVX_STATUS_OK) {
    ++counts->refused[op];
    if (status == KVX_STATUS_OUT_OF_RANGE) ++counts->out_of_range[op];
    if (status < 0 || status > KVX_STATUS_OUT_OF_RANGE)
      return fail(c, "status " + std::to_string(status));
    if (!c.memory.unchanged()) return fail(c, "a refused call has changed memory");
    const std::string sentence = kvx_last_error();
    if (sentence.empty() || sentence.size() > 400) return fail(c, "no readable sentence");
    for (const char letter : sentence) {
      if (letter < ' ' || letter > '~') return fail(c, "the sentence is not text");
    }
    if (c.mutated) return true;
    Oracle oracle{c};
    oracle.run();
    if (!oracle.bad_index && oracle.scales_good && !oracle.unsure)
      return fail(c, "a valid call was refused");
    if (oracle.inside && status != KVX_STATUS_INVALID_ARGUMENT)
      return fail(c, "an array inside the destination was followed");
    return true;
  }
  ++counts->accepted[op];
  const Fields fields = fields_of(&c);
  if (const Field *const size = small_size_of(fields))
    return fail(c, "accepted " + size->name + " " + std::to_string(load<uint32_t>(size->at)));
  if (is_ambiguous(c)) return fail(c, "accepted axes of CUSTOM that have equal extents");
  if (claims == Claims::kTooLarge) {
    return c.memory.unchanged() ? true : fail(c, "a call without tokens has changed memory");
  }
  Oracle oracle{c};
  oracle.run();
  if (oracle.bad_index) return fail(c, std::string("accepted out of range: ") + oracle.bad_index);
  if (!oracle.scales_good) return fail(c, "a scale that is not finite and positive was accepted");
  if (oracle.complaint.empty()) oracle.compare();
  return oracle.complaint.empty() ? true : fail(c, oracle.complaint);
}

uint64_t argument(int argc, char **argv, int i, uint64_t otherwise) {
  return argc > i ? std::strtoull(argv[i], nullptr, 10) : otherwise;
}

using Clock = std::chrono::steady_clock;

int run_fuzz(bool device, double seconds, uint64_t seed, uint64_t first, uint64_t iterations) {
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  Counts counts;
  uint64_t i = first;
  for (; i < first + iterations && (seconds == 0 || Clock::now() < end); ++i) {
    const std::string number = std::to_string(i);
    g_where = std::string("fuzz ") + (device ? "device " : "") + "0 " + std::to_string(seed) + " " +
              number + " 1";
    if (device) setenv("HOSTGRID_SEED", number.c_str(), 1);
    Random random{seed * 0x2545f4914f6cdd1du + i};
    random.next();
    const bool big = i % 4096 == 4095;
    if (!(device ? run_on_device(random, &counts, big) : run_one(random, &counts, false, big)))
      return EXIT_FAILURE;
  }
  for (int op = 0; op < (device ? kOps : kCounted); ++op) {
    std::printf("%s: %llu calls, %llu accepted, %llu refused, %llu of them out of range\n",
                kOpNames[op], static_cast<unsigned long long>(counts.calls[op]),
                static_cast<unsigned long long>(counts.accepted[op]),
                static_cast<unsigned long long>(counts.refused[op]),
                static_cast<unsigned long long>(counts.out_of_range[op]));
  }
  std::printf("%llu iterations, %llu not called: %s\n", static_cast<unsigned long long>(i - first),
              static_cast<unsigned long long>(counts.unfair),
              device ? "they write a byte twice" : "they claim indices that are not there");
  if (!hostgrid_races) return EXIT_SUCCESS;
  std::printf("%lu races in %lu accesses\n", hostgrid_races(), hostgrid_accesses());
  return hostgrid_races() == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

// Large calls share the library's threads, small ones run beside them.
int run_threads(double seconds, uint64_t seed) {
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  std::atomic<bool> ok{true};
  std::atomic<uint64_t> calls{0};
  std::vector<std::thread> all;
  for (uint64_t thread = 0; thread < 4; ++thread) {
    all.emplace_back([&, thread] {
      Counts counts;
      for (uint64_t i = 0; ok && Clock::now() < end; ++i) {
        Random random{seed + thread * 0x100000000u + i};
        random.next();
        if (thread == 0) kvx_set_num_threads(1 + static_cast<uint32_t>(i % 4));
        if (!run_one(random, &counts, true, i % 16 == thread)) ok = false;
        ++calls;
      }
    });
  }
  for (std::thread &thread : all) thread.join();
  std::printf("%llu calls from 4 threads\n", static_cast<unsigned long long>(calls.load()));
  return ok ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace
}  // namespace fuzz

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
extern "C" void __sanitizer_set_death_callback(void (*callback)());
extern "C" void __ubsan_on_report() { fuzz::print_where(); }
#endif

int main(int argc, char **argv) {
  using fuzz::argument;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  __sanitizer_set_death_callback(fuzz::print_where);
#endif
  if (argc > 1 && std::strcmp(argv[1], "threads") == 0) {
    return fuzz::run_threads(static_cast<double>(argument(argc, argv, 2, 5)),
                             argument(argc, argv, 3, 1));
  }
  const bool device = argc > 1 && std::strcmp(argv[1], "device") == 0;
  if (device) --argc, ++argv;
  std::signal(SIGABRT, [](int) { fuzz::print_where(); });  // the hostgrid has said why
  return fuzz::run_fuzz(device, static_cast<double>(argument(argc, argv, 1, 10)),
                        argument(argc, argv, 2, 1), argument(argc, argv, 3, 0),
                        argument(argc, argv, 4, UINT64_MAX >> 1));
}
