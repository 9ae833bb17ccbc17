#include "encodings/lossless_block.h"

#include <algorithm>
#include <cstring>

#include "cpu/kernels/kernels.h"

namespace kvx::lossless {
namespace {

// A buffer of symbols for the kernels, which work on whole groups.
struct Symbols {
  alignas(32) uint8_t at[kBlock + kSlack];
};

// Places each symbol outside a level behind those of the level, or before: a level after it then
// has one run of symbols. `place` is below 256, since a symbol below `first` is not one of the
// last.
uint8_t close_gap(uint8_t symbol, Level over) {
  return static_cast<uint8_t>(symbol < over.first ? symbol + over.symbols() : symbol);
}
uint8_t open_gap(uint8_t place, Level over) {
  const auto last = static_cast<uint8_t>(over.first + over.symbols() - 1);
  return static_cast<uint8_t>(place <= last ? place - over.symbols() : place);
}

// ---- choosing the levels ----

// How often each symbol occurs in a sample, as sums: `below[s]` is how often those below `s` do.
// Valid from `begin` to `end`; no symbol outside occurs.
struct Counts {
  uint32_t below[257];
  int begin = 0, end = 256;

  uint32_t of(int first, int symbols) const {
    return below[std::min(first + symbols, end)] - below[std::max(first, begin)];
  }
  uint32_t all() const { return below[end] - below[begin]; }

  // The level of this width that has the most of them; the first of several.
  Level best(int width) const {
    const int symbols = (1 << width) - 1;
    int found = std::min(begin, 256 - symbols);
    uint32_t most = of(found, symbols);
    for (int first = begin + 1; first + symbols <= end; ++first) {
      const uint32_t count = below[first + symbols] - below[first];
      if (count > most) most = count, found = first;
    }
    return {static_cast<uint8_t>(width), static_cast<uint8_t>(found)};
  }

  // Those outside a level that is one of the best, where close_gap places them.
  Counts outside(Level level) const {
    const int first = level.first, symbols = level.symbols();
    Counts counts;
    counts.begin = std::min(begin + symbols, 256), counts.end = std::max(end, counts.begin);
    uint32_t sum = counts.below[counts.begin] = 0;
    for (int place = counts.begin; place < counts.end; ++place) {
      const int symbol = place < first + symbols ? place - symbols : place;
      counts.below[place + 1] = sum += below[symbol + 1] - below[symbol];
    }
    return counts;
  }
};

// Counts a quarter of the groups. Which ones moves on with each row of 32, 64, 128 ... numbers, so
// that every channel has a share. A short block is counted whole.
Counts sample(const uint8_t *exponents, int64_t count) {
  constexpr int kTables = 4;  // a symbol that repeats would wait for its own count
  uint16_t tables[kTables][256] = {};
  const bool is_short = count < kBlock / 2;
  for (int64_t group = 0; group * kGroup < count; ++group) {
    if (!is_short && (group + group / 4) % 4 != 0) continue;
    const uint8_t *const from = exponents + group * kGroup;
    const int64_t end = std::min(kGroup, count - group * kGroup);
    for (int64_t i = 0; i < end; ++i) ++tables[i % kTables][from[i]];
  }
  Counts counts;
  uint32_t sum = counts.below[0] = 0;
  for (int symbol = 0; symbol < 256; ++symbol) {
    for (const auto &table : tables) sum += table[symbol];
    counts.below[symbol + 1] = sum;
  }
  while (counts.below[counts.begin + 1] == 0) ++counts.begin;
  while (counts.below[counts.end - 1] == sum) --counts.end;
  return counts;
}

void choose(const uint8_t *exponents, int64_t count, Level levels[2]) {
  const Counts counts = sample(exponents, count);
  uint32_t least = ~0u;
  for (int width = 1; width <= kMaxWidth; ++width) {
    const Level first = counts.best(width);
    const Counts others = counts.outside(first);
    for (int second_width = 1; second_width <= kMaxWidth; ++second_width) {
      const Level second = others.best(second_width);
      const uint32_t raw = others.all() - others.of(second.first, second.symbols());
      const auto bits = counts.all() * static_cast<uint32_t>(width) +
                        others.all() * static_cast<uint32_t>(second_width) + raw * 8;
      if (bits >= least) continue;
      least = bits;
      levels[0] = first, levels[1] = second;
    }
  }
}

// ---- the bytes of a block ----

void put16(uint8_t *to, int64_t value) {
  to[0] = static_cast<uint8_t>(value);
  to[1] = static_cast<uint8_t>(value >> 8);
}
int64_t get16(const uint8_t *from) { return from[0] | from[1] << 8; }

// Fills the last group, so that the planes have zeros behind the last symbol.
void pad(uint8_t *symbols, int64_t count, Level level) {
  memset(symbols + count, level.first, static_cast<size_t>(groups_of(count) * kGroup - count));
}

// Whether the planes of a level have zeros behind the last symbol.
bool is_padded(const uint8_t *planes, int64_t count, Level level) {
  if (count % kGroup == 0) return true;
  const uint32_t behind = ~0u << (count % kGroup);
  const uint8_t *const last = planes + (groups_of(count) - 1) * 4 * level.width;
  for (int plane = 0; plane < level.width; ++plane) {
    uint32_t bits;
    memcpy(&bits, last + 4 * plane, sizeof bits);
    if (bits & behind) return false;
  }
  return true;
}

}  // namespace

int64_t encode_block(uint8_t *to, const uint16_t *numbers, int64_t count) {
  const cpu::LosslessKernels &kernels = cpu::kernels().lossless;
  Symbols exponents, others, raw;
  uint8_t planes[2][kBlock / kGroup * 4 * kMaxWidth];
  kernels.split(exponents.at, to + kBlockHeader, numbers, count);
  Level levels[2];
  choose(exponents.at, count, levels);
  pad(exponents.at, count, levels[0]);
  const int64_t num_others =
      kernels.pack(planes[0], others.at, exponents.at, groups_of(count), levels[0]);
  for (int64_t i = 0; i < num_others; ++i) others.at[i] = close_gap(others.at[i], levels[0]);
  pad(others.at, num_others, levels[1]);
  const int64_t num_raw =
      kernels.pack(planes[1], raw.at, others.at, groups_of(num_others), levels[1]);

  const int64_t first_bytes = plane_bytes(levels[0], count),
                second_bytes = plane_bytes(levels[1], num_others);
  memset(to, 0, kBlockHeader);
  if (first_bytes + second_bytes + num_raw >= count) {
    memcpy(to + kBlockHeader, numbers, static_cast<size_t>(2 * count));
    return most_bytes(count);
  }
  for (int level = 0; level < 2; ++level)
    to[2 * level] = levels[level].width, to[2 * level + 1] = levels[level].first;
  put16(to + 4, num_others), put16(to + 6, num_raw);
  uint8_t *next = to + kBlockHeader + count;
  const auto put = [&next](const uint8_t *from, int64_t bytes) {
    memcpy(next, from, static_cast<size_t>(bytes));
    next += bytes;
  };
  put(planes[0], first_bytes), put(planes[1], second_bytes), put(raw.at, num_raw);
  return next - to;
}

const char *read_block(const uint8_t *from, uint64_t bytes, int64_t count, bool counts,
                       Block *block) {
  if (bytes < kBlockHeader || bytes > static_cast<uint64_t>(most_bytes(count)))
    return "its length is not one of a block";
  *block = {count,  {get16(from + 4), get16(from + 6)}, {}, from[0] == 0, from + kBlockHeader, {},
            nullptr};
  if (block->is_stored) {
    for (int i = 1; i < kBlockHeader; ++i)
      if (from[i]) return "bytes 1 to 7 of a block of stored numbers are not 0";
    return bytes == static_cast<uint64_t>(most_bytes(count)) ? nullptr
                                                             : "its numbers are cut short";
  }
  const uint8_t *next = block->rest + count;
  const int64_t symbols[] = {count, block->others[0]};
  uint64_t needed = static_cast<uint64_t>(kBlockHeader + count + block->others[1]);
  for (int i = 0; i < 2; ++i) {
    const Level level = block->levels[i] = {from[2 * i], from[2 * i + 1]};
    if (level.width < 1 || level.width > kMaxWidth) return "a width is not 1 to 4";
    if (level.first + level.symbols() > 256) return "a level has symbols past 255";
    if (block->others[i] > symbols[i]) return "a level has more other symbols than symbols";
    block->planes[i] = next;
    next += plane_bytes(level, symbols[i]);
    needed += static_cast<uint64_t>(plane_bytes(level, symbols[i]));
  }
  block->raw = next;
  if (needed != bytes) return "its parts do not add up to its length";
  for (int i = 0; i < 2; ++i) {
    if (!is_padded(block->planes[i], symbols[i], block->levels[i]))
      return "its planes have ones behind the last symbol";
    if (!counts) continue;
    const int64_t found = cpu::kernels().lossless.count(block->planes[i], groups_of(symbols[i]),
                                                        block->levels[i].width);
    if (found != block->others[i]) return "its planes have another number of other symbols";
  }
  return nullptr;
}

// Whatever the planes say, a kernel takes at most a symbol for each bit: `others` and `raw` have as
// many.
void decode_block(uint16_t *numbers, const Block &block) {
  if (block.is_stored) {
    memcpy(numbers, block.rest, static_cast<size_t>(2 * block.numbers));
    return;
  }
  const cpu::LosslessKernels &kernels = cpu::kernels().lossless;
  Symbols exponents, others, raw;
  memcpy(raw.at, block.raw, static_cast<size_t>(block.others[1]));
  kernels.unpack(others.at, block.planes[1], raw.at, groups_of(block.others[0]), block.levels[1]);
  for (int64_t i = 0; i < block.others[0]; ++i)
    others.at[i] = open_gap(others.at[i], block.levels[0]);
  kernels.unpack(exponents.at, block.planes[0], others.at, groups_of(block.numbers),
                 block.levels[0]);
  kernels.join(numbers, exponents.at, block.rest, block.numbers);
}

}  // namespace kvx::lossless
