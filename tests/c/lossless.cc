// Hostile bytes for kvx_lossless_decode, to run under AddressSanitizer: arrays of exact sizes on
// the heap, so that a byte read or written outside one is reported. Spec: E.19
//
//   lossless [seconds [seed]]    for each of three kinds of input
//
// Prints how many decodes were right on intact bytes, accepted and refused on damaged ones, and
// done while another thread changed the bytes.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "kvx/kvx_ext.h"

namespace {

using Random = std::mt19937_64;
using Clock = std::chrono::steady_clock;

uint64_t below(Random &random, uint64_t bound) { return random() % bound; }

// An array of exactly this size: a vector may have room behind its end.
template <class T>
struct Exact {
  size_t size;
  std::unique_ptr<T[]> at;
  explicit Exact(size_t n) : size(n), at(new T[n]()) {}
};

Exact<uint16_t> random_numbers(Random &random) {
  static const uint64_t kMost[] = {3, 70, 4200, 20000};
  Exact<uint16_t> numbers(below(random, kMost[below(random, 4)]));
  const uint64_t exponents = 1 + below(random, 60), first = below(random, 256);
  for (size_t i = 0; i < numbers.size; ++i) {
    // The least of three draws: some exponents are more frequent.
    uint64_t exponent = exponents;
    for (int draw = 0; draw < 3; ++draw) exponent = std::min(exponent, below(random, exponents));
    if (below(random, 50) == 0) exponent = below(random, 256);
    const uint64_t bits = random();
    numbers.at[i] = static_cast<uint16_t>((bits & 0x807f) | ((first + exponent) & 0xff) << 7);
  }
  return numbers;
}

Exact<uint8_t> encode(const Exact<uint16_t> &numbers) {
  Exact<uint8_t> room(kvx_lossless_bound(numbers.size));
  uint64_t bytes = 0;
  const kvx_status_t status = kvx_lossless_encode(room.at.get(), room.size, &bytes,
                                                  numbers.at.get(), numbers.size, KVX_DTYPE_BF16);
  if (status != KVX_STATUS_OK) std::printf("encode: %s\n", kvx_last_error()), std::exit(1);
  Exact<uint8_t> encoded(bytes);
  std::memcpy(encoded.at.get(), room.at.get(), bytes);
  return encoded;
}

void require(bool holds, const char *what) {
  if (!holds) std::printf("%s\n", what), std::exit(1);
}

// A range of random numbers, decoded from intact bytes.
void check_range(Random &random) {
  const auto numbers = random_numbers(random);
  const auto encoded = encode(numbers);
  const uint64_t first = below(random, numbers.size + 1);
  Exact<uint16_t> part(below(random, numbers.size - first + 1));
  const kvx_status_t status =
      kvx_lossless_decode(part.at.get(), first, part.size, encoded.at.get(), encoded.size);
  require(status == KVX_STATUS_OK, "intact bytes are refused");
  require(std::memcmp(part.at.get(), numbers.at.get() + first, 2 * part.size) == 0,
          "intact bytes are decoded wrongly");
}

void put64(uint8_t *to, uint64_t value) { std::memcpy(to, &value, sizeof value); }

// Changes some bytes: anywhere, in the header and index, or in the first bytes of a block.
Exact<uint8_t> damage(Random &random, const Exact<uint8_t> &from) {
  const bool shorter = below(random, 3) == 0 && from.size > 24;
  Exact<uint8_t> encoded(shorter ? 24 + below(random, from.size - 24) : from.size);
  std::memcpy(encoded.at.get(), from.at.get(), encoded.size);
  if (below(random, 4)) put64(encoded.at.get() + 16, encoded.size);  // it says its new length
  uint64_t numbers, end;
  std::memcpy(&numbers, encoded.at.get() + 8, sizeof numbers);
  const uint64_t blocks = (numbers + KVX_LOSSLESS_BLOCK - 1) / KVX_LOSSLESS_BLOCK;
  for (uint64_t changes = below(random, 4); changes-- > 0;) {
    uint64_t at = below(random, encoded.size);
    switch (below(random, 4)) {
      case 0:
        at = 8 + below(random, 16 + 8 * blocks);
        break;
      case 1:
      case 2:
        end = 24 + 8 * blocks;
        if (blocks > 1 && below(random, 2)) std::memcpy(&end, from.at.get() + 24, sizeof end);
        at = end + below(random, 12);
        break;
      default:
        break;
    }
    if (at < encoded.size) encoded.at[at] ^= static_cast<uint8_t>(1u << below(random, 8));
  }
  return encoded;
}

// Damaged bytes: refused with nothing written, or decoded to something.
bool check_damaged(Random &random) {
  const auto numbers = random_numbers(random);
  const auto encoded = damage(random, encode(numbers));
  Exact<uint16_t> into(numbers.size);
  std::memset(into.at.get(), 0x5a, 2 * into.size);
  uint64_t said = 0;
  kvx_lossless_info(encoded.at.get(), encoded.size, &said, nullptr);
  const kvx_status_t status =
      kvx_lossless_decode(into.at.get(), 0, into.size, encoded.at.get(), encoded.size);
  if (status == KVX_STATUS_OK) return true;
  for (size_t i = 0; i < into.size; ++i)
    require(into.at[i] == 0x5a5a, "a number was written before the bytes were refused");
  return false;
}

// Bytes that another thread changes during the calls.
uint64_t check_changing(Random &random, Clock::time_point until) {
  uint64_t calls = 0;
  while (Clock::now() < until) {
    const auto numbers = random_numbers(random);
    auto encoded = encode(numbers);
    Exact<uint16_t> into(numbers.size);
    std::atomic<bool> done{false};
    const uint64_t seed = random();
    std::thread other([&] {
      Random own(seed);
      while (!done) {
        const uint64_t begin = 24 + 8 * ((numbers.size + 4095) / 4096);
        const uint64_t at = begin + below(own, encoded.size - begin + 1);
        if (at >= encoded.size) continue;
        volatile uint8_t *const byte = encoded.at.get() + at;
        const uint8_t before = *byte;
        *byte = static_cast<uint8_t>(own());
        std::this_thread::yield();
        *byte = before;
      }
    });
    for (int call = 0; call < 50; ++call, ++calls)
      (void)kvx_lossless_decode(into.at.get(), 0, into.size, encoded.at.get(), encoded.size);
    done = true;
    other.join();
  }
  return calls;
}

}  // namespace

int main(int argc, char **argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 1;
  Random random(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  const auto span =
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds / 3));
  uint64_t intact = 0, accepted = 0, refused = 0;
  for (const auto until = Clock::now() + span; Clock::now() < until; ++intact) check_range(random);
  for (const auto until = Clock::now() + span; Clock::now() < until;)
    ++(check_damaged(random) ? accepted : refused);
  const uint64_t changing = check_changing(random, Clock::now() + span);
  std::printf("intact: %llu accepted: %llu refused: %llu changing: %llu\n",
              static_cast<unsigned long long>(intact), static_cast<unsigned long long>(accepted),
              static_cast<unsigned long long>(refused), static_cast<unsigned long long>(changing));
}
