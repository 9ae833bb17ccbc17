#include "cpu/convert.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/copier.h"
#include "desc/scale.h"
#include "kvx/kvx_encode.h"

namespace kvx::cpu {
namespace {

constexpr int64_t kStageBytes = 32 << 10;
constexpr uint64_t kManyElements = 8192;  // of one scale: from here on, tables for it pay off
constexpr int64_t kPiece = 256;  // numbers in a stage of floats; a multiple of every unit's

#define KVX_ROW(name, codec, kind, numbers, ...) static_assert(kPiece % numbers == 0);
KVX_FORMATS(KVX_ROW)
#undef KVX_ROW

// Whether scales differ within a block.
bool varies(const Scales &scales) {
  return scales.data && (scales.token_stride || scales.head_stride);
}

}  // namespace

float ScaleCursor::at(int64_t token, int64_t head) const {
  if (!scales.data) return 1.0f;
  return read_scale(address(token, head), scales.dtype);
}

void ScaleCursor::store(int64_t token, int64_t head, float scale) const {
  write_scale(const_cast<uint8_t *>(address(token, head)), scales.dtype, scale);
}

Stages::Stages(const Plan &plan, uint64_t tokens) {
  size_t src_bytes = 0, dst_bytes = 0;
  for (const PlanePair &pair : plan.pairs) {
    if (!pair.convert || pair.affine) continue;
    const auto most_vectors = static_cast<uint64_t>(vectors_of(pair));
    const uint64_t vectors =
        tokens < most_vectors ? std::min(tokens * pair.num_heads, most_vectors) : most_vectors;
    const auto bytes = [&](const Plane &plane) {
      return static_cast<size_t>(vectors) *
             static_cast<size_t>(bytes_of(plane.dtype, pair.head_dim));
    };
    if (!is_dense_vector(pair.src, units_of(pair.src.dtype, pair.head_dim)))
      src_bytes = std::max(src_bytes, bytes(pair.src));
    if (!is_dense_vector(pair.dst, units_of(pair.dst.dtype, pair.head_dim)))
      dst_bytes = std::max(dst_bytes, bytes(pair.dst));
  }
  if (src_bytes) src_.reset(new uint8_t[src_bytes]);
  if (dst_bytes) dst_.reset(new uint8_t[dst_bytes]);
}

int64_t Stages::vectors_of(const PlanePair &pair) {
  return std::max<int64_t>(kStageBytes / (int64_t{pair.head_dim} * 4), 1);
}

void RunConverter::through_floats(uint8_t *dst, const uint8_t *src, int64_t numbers,
                                  const Scaling &scaling) const {
  const bool scales = scaling.scale != 1.0f || scaling.divisor != 1.0f;
  float values[kPiece];
  for (int64_t i = 0; i < numbers; i += kPiece) {
    const int64_t count = std::min(numbers - i, kPiece);
    decode_(values, src + bytes_of(src_, i), count);
    if (scales)
      for (int64_t j = 0; j < count; ++j) values[j] = scaling(values[j]);
    encode_(dst + bytes_of(dst_, i), values, count);
  }
}

// The same, between two scales: numbers, not what is stored of them, are rotated.
void RunConverter::rotated(uint8_t *dst, const uint8_t *src, int64_t numbers,
                           const Scaling &scaling) const {
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(order_)));
  const int64_t piece = std::max(kPiece, order_);
  float values[KVX_HADAMARD_MAX_ORDER];
  for (int64_t i = 0; i < numbers; i += piece) {
    const int64_t count = std::min(numbers - i, piece);
    decode_(values, src + bytes_of(src_, i), count);
    for (int64_t j = 0; j < count; ++j) values[j] *= scaling.scale;
    kernels().hadamard(values, count / order_, order_, scale);
    for (int64_t j = 0; j < count; ++j) values[j] /= scaling.divisor;
    encode_(dst + bytes_of(dst_, i), values, count);
  }
}

Converter::Converter(const PlanePair &pair, Stages *stages, uint64_t tokens, bool streaming)
    : pair_(pair),
      stages_(*stages),
      streaming_(streaming),
      run_(pair.src.dtype, pair.dst.dtype, pair.hadamard),
      rows_(pair.hadamard ? nullptr : kernels().find_rows(pair.src.dtype, pair.dst.dtype)),
      to_floats_(kernels().find(pair.src.dtype, KVX_DTYPE_F32)),
      src_units_(units_of(pair.src.dtype, pair.head_dim)),
      dst_units_(units_of(pair.dst.dtype, pair.head_dim)),
      stages_src_(!is_dense_vector(pair.src, src_units_)),
      stages_dst_(!is_dense_vector(pair.dst, dst_units_)),
      varies_(pair.find_scales || varies(pair.src_scales) || varies(pair.dst_scales)),
      many_(!varies_ && !pair.src_scales.block_stride && !pair.dst_scales.block_stride &&
            are_many(tokens)) {}

void Converter::operator()(uint8_t *dst, const uint8_t *src, const uint8_t *next, int64_t tokens,
                           const Place &src_place, const Place &dst_place) {
  const ScaleCursor scale(pair_.src_scales, src_place), divisor(pair_.dst_scales, dst_place);
  const bool many = many_ || (!varies_ && are_many(static_cast<uint64_t>(tokens)));
  const int64_t vectors = Stages::vectors_of(pair_);
  const int64_t heads = std::min<int64_t>(vectors, pair_.num_heads);
  const int64_t step = vectors / heads;
  for (int64_t t = 0; t < tokens; t += step) {
    for (int64_t h = 0; h < pair_.num_heads; h += heads) {
      convert_tile(dst + t * pair_.dst.token_stride + h * pair_.dst.head_stride,
                   src + t * pair_.src.token_stride + h * pair_.src.head_stride, next - src, t,
                   std::min(step, tokens - t), h, std::min<int64_t>(heads, pair_.num_heads - h),
                   scale, divisor, many);
    }
  }
}

bool Converter::are_many(uint64_t tokens) const {
  return tokens * pair_.num_heads * pair_.head_dim >= kManyElements;
}

void Converter::convert_tile(uint8_t *dst, const uint8_t *src, int64_t ahead, int64_t first_token,
                             int64_t tokens, int64_t first_head, int64_t heads,
                             const ScaleCursor &scale, const ScaleCursor &divisor, bool many) {
  const Plane src_stage = dense_plane(stages_.src(), pair_.src.dtype, heads, src_units_);
  const Plane dst_stage = dense_plane(stages_.dst(), pair_.dst.dtype, heads, dst_units_);
  const Plane &from = stages_src_ ? src_stage : pair_.src;
  const Plane &to = stages_dst_ ? dst_stage : pair_.dst;
  if (stages_src_) {
    Copier(pair_.src, src_stage, heads, src_units_, false)(src_stage.base, src,
                                                           {src_stage.base, src}, tokens);
    src = src_stage.base;
    ahead = 0;
  }
  uint8_t *const out = stages_dst_ ? dst_stage.base : dst;
  convert_each(out, to, src, from, ahead, first_token, tokens, first_head, heads, scale, divisor,
               many);
  if (stages_dst_)
    Copier(dst_stage, pair_.dst, heads, dst_units_, streaming_)(dst, out, {dst, out}, tokens);
}

// Makes one call per vector, per token or for all, as far as vectors follow each other and share
// scales, or there is a kernel for vectors that do not.
void Converter::convert_each(uint8_t *dst, const Plane &to, const uint8_t *src, const Plane &from,
                             int64_t ahead, int64_t first_token, int64_t tokens, int64_t first_head,
                             int64_t heads, const ScaleCursor &scale, const ScaleCursor &divisor,
                             bool many) {
  int64_t run = pair_.head_dim;
  int64_t src_bytes = src_units_ * size_of(from.dtype), dst_bytes = dst_units_ * size_of(to.dtype);
  const auto follows = [&](int64_t src_stride, int64_t dst_stride, int64_t count) {
    return count == 1 || (src_stride == src_bytes && dst_stride == dst_bytes);
  };
  if (!varies_ && follows(from.head_stride, to.head_stride, heads)) {
    run *= heads, src_bytes *= heads, dst_bytes *= heads, heads = 1;
    if (follows(from.token_stride, to.token_stride, tokens)) run *= tokens, tokens = 1;
  } else if (varies_ && rows_) {
    return convert_rows(dst, to, src, from, ahead, first_token, tokens, first_head, heads, scale,
                        divisor, many);
  }
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      const uint8_t *const vector = src + t * from.token_stride + h * from.head_stride;
      const Scaling scaling = scaling_of(vector, first_token + t, first_head + h, scale, divisor);
      run_(dst + t * to.token_stride + h * to.head_stride, vector, run,
           {scaling, streaming_ && !stages_dst_, many, ahead});
    }
  }
}

// Rows are the heads of a token or, where its scales are those of all tokens, the tokens of a head:
// the kernel prepares a scale once for rows that follow each other.
void Converter::convert_rows(uint8_t *dst, const Plane &to, const uint8_t *src, const Plane &from,
                             int64_t ahead, int64_t first_token, int64_t tokens, int64_t first_head,
                             int64_t heads, const ScaleCursor &scale, const ScaleCursor &divisor,
                             bool many) {
  constexpr int64_t kMost = 64;
  Scaling scalings[kMost];
  const Conversion how = {{1.0f, 1.0f}, streaming_ && !stages_dst_, many, ahead};
  const bool by_head =
      !pair_.find_scales && !pair_.src_scales.token_stride && !pair_.dst_scales.token_stride;
  const int64_t outer = by_head ? heads : tokens, inner = by_head ? tokens : heads;
  const int64_t src_step = by_head ? from.token_stride : from.head_stride;
  const int64_t dst_step = by_head ? to.token_stride : to.head_stride;
  const auto place = [](const Plane &plane, int64_t token, int64_t head) {
    return token * plane.token_stride + head * plane.head_stride;
  };
  for (int64_t i = 0; i < outer; ++i) {
    for (int64_t first = 0; first < inner; first += kMost) {
      const int64_t count = std::min(inner - first, kMost);
      for (int64_t j = 0; j < count; ++j) {
        const int64_t t = by_head ? first + j : i, h = by_head ? i : first + j;
        scalings[j] = by_head && j ? scalings[0]
                                   : scaling_of(src + place(from, t, h), first_token + t,
                                                first_head + h, scale, divisor);
      }
      const int64_t t = by_head ? first : i, h = by_head ? i : first;
      rows_({dst + place(to, t, h), src + place(from, t, h), dst_step, src_step, count,
             pair_.head_dim},
            scalings, how);
    }
  }
}

Scaling Converter::scaling_of(const uint8_t *vector, int64_t token, int64_t head,
                              const ScaleCursor &scale, const ScaleCursor &divisor) const {
  const float factor = scale.at(token, head);
  if (pair_.find_scales) divisor.store(token, head, find_scale(vector, factor));
  return {factor, divisor.at(token, head)};
}

float Converter::find_scale(const uint8_t *vector, float factor) const {
  float amax = 0.0f, values[kPiece];
  for (int64_t d = 0; d < pair_.head_dim; d += kPiece) {
    const int64_t count = std::min<int64_t>(pair_.head_dim - d, kPiece);
    const uint8_t *const from = vector + bytes_of(pair_.src.dtype, d);
    if (to_floats_) {
      to_floats_(values, from, count, {{factor, 1.0f}, false, false, 0});
    } else {
      kernels().decode[row_of(pair_.src.dtype)](values, from, count);
      if (factor != 1.0f)
        for (int64_t i = 0; i < count; ++i) values[i] *= factor;
    }
    for (int64_t i = 0; i < count; ++i) amax = std::max(amax, std::abs(values[i]));  // not NaN
  }
  return found_scale(amax, format_of(pair_.dst.dtype).largest, pair_.dst_scales.dtype);
}

}  // namespace kvx::cpu
