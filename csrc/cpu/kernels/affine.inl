// Numbers with a zero point from and to float32. Included by kernels.inl.

template <class Format>
void affine_decode(float *__restrict to, const uint8_t *__restrict q, int64_t numbers,
                   const ScaleZero &with) {
  const ScaleZero of = with;
  for (int64_t i = 0; i < numbers; ++i) to[i] = Format::decode(q[i], of);
}

template <class Format>
void affine_decode_each(float *__restrict to, const uint8_t *__restrict q, int64_t numbers,
                        const float *__restrict scales, const float *__restrict zeros) {
  for (int64_t i = 0; i < numbers; ++i) to[i] = Format::decode(q[i], {scales[i], zeros[i]});
}

template <class Format>
void affine_encode(uint8_t *__restrict to, const float *__restrict from, int64_t numbers,
                   const ScaleZero &with) {
  const ScaleZero of = with;
  for (int64_t i = 0; i < numbers; ++i) to[i] = Format::encode(from[i], of);
}

template <class Format>
void affine_encode_each(uint8_t *__restrict to, const float *__restrict from, int64_t numbers,
                        const float *__restrict scales, const float *__restrict zeros) {
  for (int64_t i = 0; i < numbers; ++i) to[i] = Format::encode(from[i], {scales[i], zeros[i]});
}

// Side by side in as many lanes as the widest registers have: the order does not matter.
inline void bound_run(Bounds *of, const float *from, int64_t numbers) {
  constexpr int kLanes = 16;
  int64_t i = 0;
  if (numbers >= kLanes) {
    float least[kLanes], largest[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) least[lane] = of->least, largest[lane] = of->largest;
    for (; i + kLanes <= numbers; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const float x = from[i + lane];
        least[lane] = x < least[lane] ? x : least[lane];
        largest[lane] = x > largest[lane] ? x : largest[lane];
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) of->merge({least[lane], largest[lane]});
  }
  for (; i < numbers; ++i) of->add(from[i]);
}

inline void bound_each(float *__restrict least, float *__restrict largest,
                       const float *__restrict from, int64_t numbers) {
  for (int64_t i = 0; i < numbers; ++i) {
    least[i] = from[i] < least[i] ? from[i] : least[i];
    largest[i] = from[i] > largest[i] ? from[i] : largest[i];
  }
}

template <class Format>
constexpr AffineKernels affine_kernels() {
  return {affine_decode<Format>, affine_decode_each<Format>, affine_encode<Format>,
          affine_encode_each<Format>};
}
