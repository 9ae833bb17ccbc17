// A torch operator that writes new tokens into a paged cache through libkvx, on the CPU or a GPU.
// write_tokens.py beside it builds this file and calls it.
#include <kvx/kvx_ext.h>
#include <torch/extension.h>

namespace {

kvx_dtype_t dtype_of(const at::Tensor &tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return KVX_DTYPE_F32;
    case at::kHalf:
      return KVX_DTYPE_F16;
    case at::kBFloat16:
      return KVX_DTYPE_BF16;
    default:
      TORCH_CHECK(false, "dtype is ", tensor.scalar_type(),
                  ", expected float32, float16, bfloat16");
  }
}

// Describes a tensor where it lies, with whatever strides it has. layout: INVALID for tokens that
// are in no cache.
kvx_tensor_desc_t describe(const at::Tensor &tensor, kvx_layout_t layout) {
  TORCH_CHECK(tensor.dim() <= 5, "a tensor has ", tensor.dim(), " axes, expected at most 5");
  kvx_tensor_desc_t desc = {};
  desc.size = sizeof desc;
  desc.dtype = dtype_of(tensor);
  desc.layout = layout;
  desc.memory = tensor.is_cuda() ? KVX_MEMORY_DEVICE : KVX_MEMORY_HOST;
  desc.ndim = static_cast<uint32_t>(tensor.dim());
  desc.data = tensor.data_ptr();
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
    desc.shape[axis] = tensor.size(axis);
    desc.stride[axis] = tensor.stride(axis);
  }
  return desc;
}

// key_cache, value_cache: (num_blocks, block_size, num_kv_heads, head_dim)
// key, value:             (num_tokens, num_kv_heads, head_dim)
// slots:                  (num_tokens,), int64: block * block_size + offset; negative: skipped
// stream:                 of CUDA; 0 on the CPU
void write_tokens(const at::Tensor &key_cache, const at::Tensor &value_cache, const at::Tensor &key,
                  const at::Tensor &value, const at::Tensor &slots, int64_t stream) {
  TORCH_CHECK(key_cache.dim() == 4, "key_cache has ", key_cache.dim(), " axes, expected 4");
  TORCH_CHECK(key.dim() == 3, "key has ", key.dim(), " axes, expected 3");
  TORCH_CHECK(slots.scalar_type() == at::kLong && slots.is_contiguous() && slots.dim() == 1,
              "slots is not a contiguous vector of int64");
  TORCH_CHECK(slots.device() == key_cache.device(), "slots is on ", slots.device(), ", expected ",
              key_cache.device(), " as key_cache is");
  kvx_cache_desc_t cache = {};
  cache.size = sizeof cache;
  cache.num_blocks = static_cast<uint32_t>(key_cache.size(0));
  cache.block_size = static_cast<uint32_t>(key_cache.size(1));
  cache.num_kv_heads = static_cast<uint32_t>(key_cache.size(2));
  cache.head_dim = static_cast<uint32_t>(key_cache.size(3));
  cache.k = describe(key_cache, KVX_LAYOUT_BLOCK_NHD);
  cache.v = describe(value_cache, KVX_LAYOUT_BLOCK_NHD);

  kvx_write_desc_t write = {};
  write.size = sizeof write;
  write.io.size = sizeof write.io;
  write.io.key = describe(key, KVX_LAYOUT_INVALID);
  write.io.value = describe(value, KVX_LAYOUT_INVALID);
  write.io.num_tokens = static_cast<uint32_t>(slots.numel());
  write.io.num_kv_heads = cache.num_kv_heads;
  write.io.head_dim = cache.head_dim;
  write.slots.size = sizeof write.slots;
  write.slots.dtype = KVX_DTYPE_S64;
  write.slots.token_count = write.io.num_tokens;
  write.slots.invalid_slot = -1;
  write.slots.slots = slots.data_ptr();
  // libkvx checks all of it before it writes the first byte, and says in words what is wrong.
  const kvx_status_t status = kvx_write_kv(&cache, &write, reinterpret_cast<void *>(stream));
  TORCH_CHECK(status == KVX_STATUS_OK, kvx_last_error());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  TORCH_CHECK(KVX_CHECK_VERSION() == KVX_STATUS_OK, kvx_last_error());
  module.def("write_tokens", &write_tokens);
}
