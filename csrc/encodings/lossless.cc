#include "encodings/lossless.h"

#include <algorithm>
#include <cstring>

#include "encodings/lossless_block.h"
#include "error.h"
#include "extent.h"

namespace kvx::lossless {
namespace {

static_assert(kBlock == KVX_LOSSLESS_BLOCK);

constexpr uint8_t kMagic[] = {'K', 'V', 'X', 'L'};
constexpr uint8_t kVersion = 1;
constexpr uint64_t kHeader = 24;
constexpr uint64_t kMostNumbers = uint64_t{1} << 60;  // sizes in bytes then have 64 bits

void put64(uint8_t *to, uint64_t value) {
  for (int i = 0; i < 8; ++i) to[i] = static_cast<uint8_t>(value >> (8 * i));
}
uint64_t get64(const uint8_t *from) {
  uint64_t value = 0;
  for (int i = 0; i < 8; ++i) value |= uint64_t{from[i]} << (8 * i);
  return value;
}

uint64_t blocks_of(uint64_t numbers) { return numbers / kBlock + (numbers % kBlock != 0); }

// An encoded array whose header has been checked.
struct Array {
  const uint8_t *data;
  uint64_t bytes, numbers;

  uint64_t blocks() const { return blocks_of(numbers); }
  uint64_t first_byte() const { return kHeader + 8 * blocks(); }
  int64_t numbers_of(uint64_t block) const {
    return static_cast<int64_t>(std::min<uint64_t>(kBlock, numbers - block * kBlock));
  }
  // Where a block ends, as its index says.
  uint64_t end(uint64_t block) const { return get64(data + kHeader + 8 * block); }
};

kvx_status_t check_memory(const char *name, const void *data, uint64_t bytes) {
  if (!data && bytes) return KVX_INVALID("%s is NULL (spec E.19)", name);
  if (reinterpret_cast<uintptr_t>(data) + bytes < reinterpret_cast<uintptr_t>(data)) {
    return KVX_INVALID("%s at %p has %llu bytes, past the end of memory (spec E.19)", name, data,
                       static_cast<ull>(bytes));
  }
  return KVX_STATUS_OK;
}

// Numbers that are read or written, and that they do not overlap the encoded array.
kvx_status_t check_numbers(const void *data, uint64_t numbers, const void *encoded,
                           uint64_t bytes) {
  if (numbers > kMostNumbers) {
    return KVX_INVALID("there are %llu numbers, expected at most 2^60 (spec E.19)",
                       static_cast<ull>(numbers));
  }
  KVX_TRY(check_memory("data", data, 2 * numbers));
  if (reinterpret_cast<uintptr_t>(data) % 2) {
    return KVX_INVALID("data is at %p, expected an address aligned to 2 bytes (spec E.19)", data);
  }
  if (numbers && bytes && intersect(extent_at(data, 2 * numbers), extent_at(encoded, bytes))) {
    return KVX_INVALID(
        "data at %p overlaps encoded at %p, expected memory of its own: pass a copy "
        "(spec E.19)",
        data, encoded);
  }
  return KVX_STATUS_OK;
}

kvx_status_t open(const void *encoded, uint64_t bytes, Array *array) {
  KVX_TRY(check_memory("encoded", encoded, bytes));
  if (bytes < kHeader) {
    return KVX_INVALID("encoded has %llu bytes, expected at least the %llu of a header (spec E.19)",
                       static_cast<ull>(bytes), static_cast<ull>(kHeader));
  }
  const auto *const data = static_cast<const uint8_t *>(encoded);
  if (memcmp(data, kMagic, sizeof kMagic) != 0) {
    return KVX_INVALID(
        "encoded begins with %02x %02x %02x %02x, expected 'KVXL': it is no losslessly encoded "
        "array (spec E.19)",
        data[0], data[1], data[2], data[3]);
  }
  if (data[4] != kVersion) {
    return fail(KVX_STATUS_UNSUPPORTED,
                "encoded has version %d, expected %d: decode it with a newer libkvx (spec E.19)",
                data[4], kVersion);
  }
  if (data[5] != KVX_DTYPE_BF16 || data[6] || data[7]) {
    return KVX_INVALID(
        "encoded has dtype %d and reserved bytes %02x %02x, expected BF16 (2) and 0 (spec E.19)",
        data[5], data[6], data[7]);
  }
  const uint64_t numbers = get64(data + 8), length = get64(data + 16);
  if (length != bytes) {
    return KVX_INVALID(
        "encoded has %llu bytes, expected the %llu that its header says: it has been cut "
        "or joined (spec E.19)",
        static_cast<ull>(bytes), static_cast<ull>(length));
  }
  // A block takes more than its entry of the index.
  if (numbers > kMostNumbers || blocks_of(numbers) > (bytes - kHeader) / (8 + kBlockHeader)) {
    return KVX_INVALID(
        "encoded says that it has %llu numbers, which do not fit its %llu bytes "
        "(spec E.19)",
        static_cast<ull>(numbers), static_cast<ull>(bytes));
  }
  *array = {data, bytes, numbers};
  return KVX_STATUS_OK;
}

// Finds a block and its parts.
kvx_status_t open_block(const Array &array, uint64_t index, bool counts, Block *block) {
  const uint64_t begin = index ? array.end(index - 1) : array.first_byte(), end = array.end(index);
  if (begin < array.first_byte() || end < begin || end > array.bytes ||
      (index + 1 == array.blocks() && end != array.bytes)) {
    return KVX_INVALID(
        "encoded block %llu is at bytes %llu to %llu, expected ascending positions from %llu to "
        "%llu, where the last block ends (spec E.19)",
        static_cast<ull>(index), static_cast<ull>(begin), static_cast<ull>(end),
        static_cast<ull>(array.first_byte()), static_cast<ull>(array.bytes));
  }
  const char *const wrong =
      read_block(array.data + begin, end - begin, array.numbers_of(index), counts, block);
  if (!wrong) return KVX_STATUS_OK;
  return KVX_INVALID("encoded block %llu of %llu bytes is damaged: %s (spec E.19)",
                     static_cast<ull>(index), static_cast<ull>(end - begin), wrong);
}

}  // namespace

uint64_t bound(uint64_t numbers) {
  if (numbers > kMostNumbers) return UINT64_MAX;
  return kHeader + blocks_of(numbers) * (8 + kBlockHeader) + 2 * numbers;
}

kvx_status_t encode(void *encoded, uint64_t capacity, uint64_t *bytes, const void *data,
                    uint64_t numbers, kvx_dtype_t dtype) {
  if (!bytes) return KVX_INVALID("bytes is NULL (spec E.19)");
  if (dtype != KVX_DTYPE_BF16) {
    return fail(KVX_STATUS_UNSUPPORTED,
                "dtype is %d, expected BF16 (2): other numbers are not encoded losslessly "
                "(spec E.19)",
                dtype);
  }
  KVX_TRY(check_memory("encoded", encoded, capacity));
  KVX_TRY(check_numbers(data, numbers, encoded, capacity));
  if (capacity < bound(numbers)) {
    return KVX_INVALID(
        "capacity is %llu, expected at least %llu, kvx_lossless_bound of %llu numbers "
        "(spec E.19)",
        static_cast<ull>(capacity), static_cast<ull>(bound(numbers)), static_cast<ull>(numbers));
  }
  auto *const to = static_cast<uint8_t *>(encoded);
  const auto *const from = static_cast<const uint16_t *>(data);
  const uint64_t blocks = blocks_of(numbers);
  uint64_t end = kHeader + 8 * blocks;
  for (uint64_t block = 0; block < blocks; ++block) {
    const uint64_t first = block * kBlock;
    const auto count = static_cast<int64_t>(std::min<uint64_t>(kBlock, numbers - first));
    end += static_cast<uint64_t>(encode_block(to + end, from + first, count));
    put64(to + kHeader + 8 * block, end);
  }
  memcpy(to, kMagic, sizeof kMagic);
  to[4] = kVersion, to[5] = KVX_DTYPE_BF16, to[6] = to[7] = 0;
  put64(to + 8, numbers), put64(to + 16, end);
  *bytes = end;
  return KVX_STATUS_OK;
}

kvx_status_t info(const void *encoded, uint64_t bytes, uint64_t *numbers, kvx_dtype_t *dtype) {
  Array array;
  KVX_TRY(open(encoded, bytes, &array));
  if (numbers) *numbers = array.numbers;
  if (dtype) *dtype = KVX_DTYPE_BF16;
  return KVX_STATUS_OK;
}

kvx_status_t decode(void *data, uint64_t first, uint64_t count, const void *encoded,
                    uint64_t bytes) {
  Array array;
  KVX_TRY(open(encoded, bytes, &array));
  KVX_TRY(check_numbers(data, count, encoded, bytes));
  if (first > array.numbers || count > array.numbers - first) {
    return KVX_OUT_OF_RANGE(
        "numbers %llu to %llu are asked for, expected numbers of the %llu in the "
        "encoded array (spec E.19)",
        static_cast<ull>(first), static_cast<ull>(first + count), static_cast<ull>(array.numbers));
  }
  if (!count) return KVX_STATUS_OK;
  const uint64_t begin = first / kBlock, end = blocks_of(first + count);
  Block block;
  for (uint64_t index = begin; index < end; ++index)
    KVX_TRY(open_block(array, index, true, &block));
  auto *const to = static_cast<uint16_t *>(data);
  for (uint64_t index = begin; index < end; ++index) {
    KVX_TRY(open_block(array, index, false, &block));  // its bytes may have changed meanwhile
    const uint64_t block_first = index * kBlock, from = std::max(first, block_first),
                   until = std::min(first + count, block_first + kBlock);
    if (until - from == static_cast<uint64_t>(block.numbers)) {
      decode_block(to + (from - first), block);
      continue;
    }
    uint16_t whole[kBlock];
    decode_block(whole, block);
    memcpy(to + (from - first), whole + (from - block_first), 2 * (until - from));
  }
  return KVX_STATUS_OK;
}

}  // namespace kvx::lossless
