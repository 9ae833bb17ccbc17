#include "rules/blocks.h"

#include <initializer_list>

#include "rules/struct.h"

namespace kvx {
namespace {

constexpr uint64_t kMostBytes = uint64_t{1} << 31;  // of a run that one token or head has

kvx_status_t check_products(const kvx_blocks_t &sizes) {
  const uint64_t head = uint64_t{sizes.hd} * sizes.itemsize;
  const uint64_t heads = sizes.universal_heads ? sizes.universal_heads : sizes.nh;
  uint64_t bytes = head, chunks = sizes.nl;
  const bool too_large = __builtin_mul_overflow(chunks, uint64_t{sizes.no}, &chunks) ||
                         __builtin_mul_overflow(chunks, uint64_t{sizes.nb ? sizes.nb : 1}, &chunks);
  if (too_large || chunks > UINT32_MAX) {
    return KVX_INVALID(
        "sizes.nb * sizes.nl * sizes.no is %u * %u * %u, expected less than 2^32 "
        "(spec E.15)",
        sizes.nb, sizes.nl, sizes.no);
  }
  if (head >= kMostBytes) {
    return KVX_INVALID("sizes.hd * sizes.itemsize is %u * %u, expected less than 2^31 (spec E.15)",
                       sizes.hd, sizes.itemsize);
  }
  for (const uint64_t factor :
       {heads, uint64_t{sizes.nt}, uint64_t{sizes.nl}, uint64_t{sizes.no}}) {
    if (__builtin_mul_overflow(bytes, factor, &bytes) || bytes >> 62) {
      return KVX_INVALID("sizes gives a block of 2^62 bytes or more, expected less (spec E.15)");
    }
  }
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t check_alignment(const char *name, uint32_t alignment) {
  if (alignment <= 16 && (alignment & (alignment - 1)) == 0) return KVX_STATUS_OK;
  return KVX_INVALID("%s is %u, expected 0, 1, 2, 4, 8 or 16 (spec E.15)", name, alignment);
}

kvx_status_t check_copy_memory(const char *name, kvx_memory_type_t memory) {
  if (memory == KVX_MEMORY_HOST || memory == KVX_MEMORY_DEVICE) return KVX_STATUS_OK;
  return KVX_INVALID("%s is %d, expected HOST (1) or DEVICE (2) (spec E.15)", name, memory);
}

kvx_status_t check_copy_bytes(uint64_t bytes) {
  if (bytes && bytes < kMostBytes) return KVX_STATUS_OK;
  return KVX_INVALID("bytes is %llu, expected 1 to 2^31 - 1 (spec E.15)", static_cast<ull>(bytes));
}

kvx_status_t check_pointer_table(const char *name, const void *table) {
  if (!table) return KVX_INVALID("%s is NULL", name);
  if (reinterpret_cast<uintptr_t>(table) % sizeof(void *) == 0) return KVX_STATUS_OK;
  return KVX_INVALID("%s is %p, expected a multiple of 8 bytes: it holds addresses (spec E.15)",
                     name, table);
}

kvx_status_t check_blocks(const kvx_blocks_t *sizes) {
  const Path path{nullptr, "sizes"};
  KVX_TRY(check_struct(path, sizes));
  KVX_TRY(check_copy_memory("sizes.memory", sizes->memory));
  KVX_TRY(check_nonzero(path, "nl", sizes->nl));
  KVX_TRY(check_nonzero(path, "no", sizes->no));
  KVX_TRY(check_nonzero(path, "nt", sizes->nt));
  KVX_TRY(check_nonzero(path, "nh", sizes->nh));
  KVX_TRY(check_nonzero(path, "hd", sizes->hd));
  const uint32_t size = sizes->itemsize;
  if (size != 1 && size != 2 && size != 4 && size != 8) {
    return KVX_INVALID("sizes.itemsize is %u, expected 1, 2, 4 or 8 bytes (spec E.15)", size);
  }
  if (sizes->layout != KVX_STACK_NHD && sizes->layout != KVX_STACK_HND) {
    return KVX_INVALID("sizes.layout is %d, expected NHD (0) or HND (1) (spec E.15)",
                       sizes->layout);
  }
  const uint32_t heads = sizes->universal_heads ? sizes->universal_heads : sizes->nh;
  if (sizes->nh > heads || sizes->head_start > heads - sizes->nh) {
    return KVX_INVALID(
        "sizes.head_start is %u: with the %u heads of a stack it reaches past the %u of a "
        "universal "
        "block (spec E.15)",
        sizes->head_start, sizes->nh, heads);
  }
  KVX_TRY(check_alignment("sizes.alignment", sizes->alignment));
  if (sizes->reserved) {
    return KVX_INVALID("sizes.reserved is %u, expected 0 (spec E.15)", sizes->reserved);
  }
  return check_products(*sizes);
}

}  // namespace kvx
