// Calls that no library can refuse and that a sanitizer must report inside libkvx, so that the
// tests which find nothing have looked.
//
//   lie overflow [device]   the descriptor says two blocks, the memory holds one
//   lie race                two threads write the same slot
//   lie twice device        two tokens of one call have the same slot
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <thread>

#include "kvx/kvx_ext.h"

namespace {

kvx_memory_type_t memory_type = KVX_MEMORY_HOST;

kvx_tensor_desc_t tensor(float *data, uint32_t ndim, std::initializer_list<int64_t> shape) {
  kvx_tensor_desc_t made{};
  made.size = sizeof made;
  made.dtype = KVX_DTYPE_F32;
  made.layout = KVX_LAYOUT_BLOCK_NHD;
  made.memory = memory_type;
  made.ndim = ndim;
  made.data = data;
  int64_t stride = 1;
  for (uint32_t axis = ndim; axis-- > 0; stride *= made.shape[axis]) {
    made.shape[axis] = shape.begin()[axis];
    made.stride[axis] = stride;
  }
  return made;
}

}  // namespace

int main(int argc, char **argv) {
  const bool race = argc > 1 && std::strcmp(argv[1], "race") == 0;
  const bool twice = argc > 1 && std::strcmp(argv[1], "twice") == 0;
  if (argc > 2) memory_type = KVX_MEMORY_DEVICE;
  const std::unique_ptr<float[]> memory(new float[8]());  // one block of one token, head_dim 8
  float key[16] = {1, 2, 3, 4, 5, 6, 7, 8};
  const int64_t slot = race || twice ? 0 : 1;
  const int64_t slots[] = {slot, slot};
  const uint32_t num_tokens = twice ? 2 : 1;

  kvx_cache_desc_t cache{};
  cache.size = sizeof cache;
  cache.num_blocks = 2;
  cache.block_size = cache.num_kv_heads = 1;
  cache.head_dim = 8;
  cache.k = tensor(memory.get(), 4, {2, 1, 1, 8});
  cache.v.size = sizeof cache.v;

  kvx_write_desc_t write{};
  write.size = sizeof write;
  write.io.size = sizeof write.io;
  write.io.key = tensor(key, 3, {num_tokens, 1, 8});
  write.io.value.size = sizeof write.io.value;
  write.io.num_tokens = write.slots.token_count = num_tokens;
  write.io.num_kv_heads = 1;
  write.io.head_dim = 8;
  write.slots.size = sizeof write.slots;
  write.slots.dtype = KVX_DTYPE_S64;
  write.slots.invalid_slot = -1;
  write.slots.slots = slots;

  const auto call = [&] { return kvx_write_kv(&cache, &write, nullptr); };
  if (!race) return call() == KVX_STATUS_OK ? EXIT_SUCCESS : EXIT_FAILURE;
  std::thread other([&] {
    for (int i = 0; i < 1000; ++i) call();
  });
  for (int i = 0; i < 1000; ++i) call();
  other.join();
  return EXIT_SUCCESS;
}
