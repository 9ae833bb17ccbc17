// Weighted sums of the tokens of a compressed entry. Each number is computed alone, as a kernel on
// a device does it, so that all have the same bits. Included by kernels.inl, after attend.inl.

// kAttendLanes numbers of one token.
template <class Codec>
KVX_INLINE void load_parts(Part (&to)[kParts], const void *numbers, int64_t at) {
  const auto *const from = static_cast<const typename Codec::Bits *>(numbers) + at;
  float decoded[kAttendLanes];
  for (int i = 0; i < kAttendLanes; ++i) decoded[i] = Codec::decode(from[i]);
  for (int p = 0; p < kParts; ++p) to[p] = part_at(decoded, p);
}

template <class Codec>
KVX_INLINE void load_scores(Part (&to)[kParts], const Stream &stream, int64_t at, int64_t ape_at) {
  load_parts<Codec>(to, stream.z, at);
  if (!stream.ape) return;
  for (int p = 0; p < kParts; ++p) to[p] += part_at(stream.ape + ape_at, p);
}

template <class Codec>
KVX_INLINE void weigh_lanes(float *out, const Stream &a, const Stream &b, int64_t d, int64_t stride,
                            int64_t tokens, int64_t dim) {
  constexpr float kNothing = -__builtin_huge_valf();
  const Stream *const streams[] = {&a, &b};
  Part most[kParts], sum[kParts] = {}, total[kParts] = {}, score[kParts], key[kParts];
  for (int p = 0; p < kParts; ++p) most[p] = Part{} + kNothing;
  for (const Stream *stream : streams) {
    for (int64_t t = 0; stream->z && t < tokens; ++t) {
      load_scores<Codec>(score, *stream, t * stride + d, t * dim + d);
      for (int p = 0; p < kParts; ++p) most[p] = score[p] > most[p] ? score[p] : most[p];
    }
  }
  for (const Stream *stream : streams) {
    for (int64_t t = 0; stream->z && t < tokens; ++t) {
      load_scores<Codec>(score, *stream, t * stride + d, t * dim + d);
      load_parts<Codec>(key, stream->k, t * stride + d);
      for (int p = 0; p < kParts; ++p) {
        Part weight = score[p] - most[p];
        exp_each(weight);
        sum[p] += weight;
        total[p] += weight * key[p];
      }
    }
  }
  for (int p = 0; p < kParts; ++p) part_at(out + d, p) = total[p] / sum[p];
}

// The same of a single number.
template <class Codec>
KVX_INLINE void weigh_one(float *out, const Stream &a, const Stream &b, int64_t d, int64_t stride,
                          int64_t tokens, int64_t dim) {
  using Bits = typename Codec::Bits;
  const Stream *const streams[] = {&a, &b};
  const auto score_at = [&](const Stream &stream, int64_t t) KVX_MEMBER {
    const float score = Codec::decode(static_cast<const Bits *>(stream.z)[t * stride + d]);
    return stream.ape ? score + stream.ape[t * dim + d] : score;
  };
  float most = -__builtin_huge_valf(), sum = 0.0f, total = 0.0f;
  for (const Stream *stream : streams) {
    for (int64_t t = 0; stream->z && t < tokens; ++t) {
      const float score = score_at(*stream, t);
      most = score > most ? score : most;
    }
  }
  for (const Stream *stream : streams) {
    for (int64_t t = 0; stream->z && t < tokens; ++t) {
      const float weight = exp_of(score_at(*stream, t) - most);
      sum += weight;
      total += weight * Codec::decode(static_cast<const Bits *>(stream->k)[t * stride + d]);
    }
  }
  out[d] = total / sum;
}

template <class Codec>
static void weigh(float *out, const Stream &a, const Stream &b, int64_t stride, int64_t tokens,
                  int64_t dim) {
  int64_t d = 0;
  for (; d + kAttendLanes <= dim; d += kAttendLanes)
    weigh_lanes<Codec>(out, a, b, d, stride, tokens, dim);
  for (; d < dim; ++d) weigh_one<Codec>(out, a, b, d, stride, tokens, dim);
}
