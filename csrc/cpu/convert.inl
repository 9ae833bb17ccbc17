// Converting a contiguous run of elements; plain loops that the compiler vectorises.
// Included by kernels.inl.

template <class Src, class Dst, class Map>
KVX_INLINE void convert_each(void *dst, const void *src, int64_t count, Map map) {
  auto *__restrict to = static_cast<typename Dst::Bits *>(dst);
  const auto *__restrict from = static_cast<const typename Src::Bits *>(src);
  for (int64_t i = 0; i < count; ++i) to[i] = map(Src::decode(from[i]));
}

// Dividing by a power of two is multiplying by its inverse, exactly, and several times faster.
KVX_INLINE bool has_exact_inverse(float divisor) {
  const uint32_t bits = bits_of(divisor);
  return (bits & 0x7fffffu) == 0 && bits >= 1u << 23 && bits <= 253u << 23;
}

template <class Src, class Dst>
void convert_run(void *dst, const void *src, int64_t count, float scale, float divisor,
                 [[maybe_unused]] bool streaming) {
#if KVX_VECTOR_BYTES == 64
  if constexpr (std::is_same_v<Src, Bf16> && std::is_same_v<Dst, E4m3>) {
    const int64_t done = scale == 1.0f ? bf16_to_e4m3(dst, src, count, divisor, streaming) : 0;
    dst = static_cast<E4m3::Bits *>(dst) + done, src = static_cast<const Bf16::Bits *>(src) + done;
    count -= done;
  }
#endif
  const auto convert = [=](auto map) __attribute__((always_inline)) {
    convert_each<Src, Dst>(dst, src, count, map);
  };
  if (scale == 1.0f && divisor == 1.0f) {
    constexpr bool exact = std::is_same_v<Dst, Bf16> && sizeof(typename Src::Bits) == 1;
    if constexpr (exact) return convert([](float x) { return Bf16::encode_exact(x); });
    convert([](float x) { return Dst::encode(x); });
  } else if (has_exact_inverse(divisor)) {
    const float inverse = 1.0f / divisor;
    convert([=](float x) { return Dst::encode(x * scale * inverse); });
  } else {
    convert([=](float x) { return Dst::encode(x * scale / divisor); });
  }
}
