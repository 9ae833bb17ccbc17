#include <algorithm>
#include <utility>
#include <vector>

#include "cuda/copy_engine.h"
#include "cuda/run.h"
#include "cuda/runtime.h"
#include "error.h"
#include "plan/check.h"
#include "plan/loops.h"
#include "plan/violation.h"
#include "plan/walk.h"

// cudaMemcpyBatchAsync; before CUDA 13 it returns the number of a copy that has an error, too.
#define KVX_HAS_BATCHES (CUDART_VERSION >= 12090)

namespace kvx::cuda {
namespace {

constexpr size_t kBatch = 4096;            // copies
constexpr int64_t kMostPitch = INT32_MAX;  // of 2D copies

// Copies on their way to a stream. They may run in any order.
class Copies {
 public:
  Copies(cudaStream_t stream, bool batches) : stream_(stream), batches_(batches) {
    dsts_.reserve(kBatch);
    srcs_.reserve(kBatch);
    sizes_.reserve(kBatch);
  }

  // NULL `src`: zeros.
  kvx_status_t add(uint8_t *dst, const uint8_t *src, size_t bytes) {
    if (!src) {
      KVX_CUDA_TRY(cudaMemsetAsync(dst, 0, bytes, stream_));
      return KVX_STATUS_OK;
    }
    if (!sizes_.empty() && dst == dsts_.back() + sizes_.back() &&
        src == srcs_.back() + sizes_.back()) {
      sizes_.back() += bytes;
      return KVX_STATUS_OK;
    }
    if (sizes_.size() == kBatch) KVX_TRY(flush());
    dsts_.push_back(dst);
    srcs_.push_back(src);
    sizes_.push_back(bytes);
    return KVX_STATUS_OK;
  }

  // `rows.count` runs of `bytes`.
  kvx_status_t add(uint8_t *dst, const uint8_t *src, size_t bytes, const Loop &rows) {
    const auto height = static_cast<size_t>(rows.count);
    const auto src_pitch = static_cast<size_t>(rows.src), dst_pitch = static_cast<size_t>(rows.dst);
    if (src) {
      KVX_CUDA_TRY(cudaMemcpy2DAsync(dst, dst_pitch, src, src_pitch, bytes, height,
                                     cudaMemcpyDefault, stream_));
    } else {
      KVX_CUDA_TRY(cudaMemset2DAsync(dst, dst_pitch, 0, bytes, height, stream_));
    }
    return KVX_STATUS_OK;
  }

  kvx_status_t flush() {
    if (sizes_.empty()) return KVX_STATUS_OK;
    if (batches_) {
      KVX_TRY(flush_as_batch());
    } else {
      for (size_t i = 0; i < sizes_.size(); ++i)
        KVX_CUDA_TRY(cudaMemcpyAsync(dsts_[i], srcs_[i], sizes_[i], cudaMemcpyDefault, stream_));
    }
    dsts_.clear();
    srcs_.clear();
    sizes_.clear();
    return KVX_STATUS_OK;
  }

 private:
  kvx_status_t flush_as_batch() {
#if KVX_HAS_BATCHES
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    size_t first = 0;  // of the copies that have these attributes
    const auto dsts = reinterpret_cast<void **>(dsts_.data());
    const auto srcs = reinterpret_cast<void **>(const_cast<uint8_t **>(srcs_.data()));
#if CUDART_VERSION >= 13000
    KVX_CUDA_TRY(cudaMemcpyBatchAsync(dsts, srcs, sizes_.data(), sizes_.size(), &attributes, &first,
                                      1, stream_));
#else
    size_t failed;  // number of the copy that has an error
    KVX_CUDA_TRY(cudaMemcpyBatchAsync(dsts, srcs, sizes_.data(), sizes_.size(), &attributes, &first,
                                      1, &failed, stream_));
#endif
#endif
    return KVX_STATUS_OK;
  }

  const cudaStream_t stream_;
  const bool batches_;
  std::vector<uint8_t *> dsts_;
  std::vector<const uint8_t *> srcs_;
  std::vector<size_t> sizes_;
};

// Batches need a runtime that has them, and a stream that is neither being captured nor the legacy
// default stream.
kvx_status_t can_batch(cudaStream_t stream, bool *can) {
  *can = false;
  if (!has_batches() || !stream || stream == cudaStreamLegacy) return KVX_STATUS_OK;
  cudaStreamCaptureStatus capture;
  KVX_CUDA_TRY(cudaStreamIsCapturing(stream, &capture));
  *can = capture == cudaStreamCaptureStatusNone;
  return KVX_STATUS_OK;
}

// Moves runs of tokens of one pair: joins what continues, then splits it into runs.
class Mover {
 public:
  Mover(const PlanePair &pair, Copies *copies)
      : pair_(pair), copies_(*copies), by_element_(!can_loop(pair.src, pair.dst)) {}

  kvx_status_t add(const Place &from, const Place &to, int64_t tokens) {
    const uint8_t *src = from.block < 0 ? nullptr : address_of(pair_.src, from);
    uint8_t *dst = address_of(pair_.dst, to);
    const bool src_continues = src ? src_ && src == src_ + tokens_ * pair_.src.token_stride : !src_;
    if (tokens_ && src_continues && dst == dst_ + tokens_ * pair_.dst.token_stride) {
      tokens_ += tokens;
      return KVX_STATUS_OK;
    }
    KVX_TRY(flush());
    src_ = src;
    dst_ = dst;
    tokens_ = tokens;
    return KVX_STATUS_OK;
  }

  kvx_status_t flush() {
    if (!tokens_) return KVX_STATUS_OK;
    const int64_t tokens = std::exchange(tokens_, 0);
    const Plane &src = src_ ? pair_.src : pair_.dst;
    const bool by_element = src_ && by_element_;
    Loops loops;
    make_loops(src, pair_.dst, tokens, pair_.num_heads, by_element ? 1 : pair_.head_dim,
               size_of(pair_.dst.dtype), &loops);
    // The longest loop innermost: the rows of 2D copies
    std::stable_sort(loops.at, loops.at + loops.count,
                     [](const Loop &a, const Loop &b) { return a.count < b.count; });
    if (!by_element) return copy(loops, dst_, src_);
    for (int64_t d = 0; d < pair_.head_dim; ++d) {
      KVX_TRY(
          copy(loops, dst_ + element_offset(pair_.dst, d), src_ + element_offset(pair_.src, d)));
    }
    return KVX_STATUS_OK;
  }

 private:
  kvx_status_t copy(const Loops &loops, uint8_t *dst, const uint8_t *src) {
    const auto bytes = static_cast<size_t>(loops.run);
    const Loop *const rows = loops.count ? &loops.at[loops.count - 1] : nullptr;
    const bool has_rows = rows && std::min(rows->src, rows->dst) >= loops.run &&
                          std::max(rows->src, rows->dst) <= kMostPitch;
    const int outer = loops.count - (has_rows ? 1 : 0);
    int64_t count = 1;
    for (int i = 0; i < outer; ++i) count *= loops.at[i].count;
    for (int64_t n = 0; n < count; ++n) {
      int64_t rest = n, to = 0, from = 0;
      for (int i = outer - 1; i >= 0; --i) {
        const Loop &dim = loops.at[i];
        to += rest % dim.count * dim.dst;
        from += rest % dim.count * dim.src;
        rest /= dim.count;
      }
      const uint8_t *const source = src ? src + from : nullptr;
      KVX_TRY(has_rows ? copies_.add(dst + to, source, bytes, *rows)
                       : copies_.add(dst + to, source, bytes));
    }
    return KVX_STATUS_OK;
  }

  const PlanePair &pair_;
  Copies &copies_;
  const bool by_element_;
  const uint8_t *src_ = nullptr;  // NULL: zeros
  uint8_t *dst_ = nullptr;
  int64_t tokens_ = 0;
};

kvx_status_t check_same_bytes(const PlanePair &pair, size_t layer) {
  if (!pair.convert) return KVX_STATUS_OK;
  return fail(
      KVX_STATUS_UNSUPPORTED,
      "%c of layer %zu has another %s at each end, but COPY_ENGINE moves bytes as they are; "
      "call without the flag (spec E.2)",
      pair.is_v ? 'V' : 'K', layer,
      pair.hadamard                      ? "rotation"
      : pair.src.dtype == pair.dst.dtype ? "scale"
                                         : "dtype");
}

bool is_in_device_memory(const Ints &ints) {
  if (!ints.data) return false;
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, ints.data) == cudaSuccess)
    return attributes.type == cudaMemoryTypeDevice;
  cudaGetLastError();  // clear the error, or the caller's next call returns it
  return true;
}

}  // namespace

const char *find_in_device_memory(const Plan &plan) {
  for (const LookupPair &lookup : plan.lookups) {
    const FieldNames names = field_names(plan, lookup);
    if (is_in_device_memory(plan.rows.lens)) return names.lens;
    for (const bool at_dst : {false, true}) {
      const Lookup &a = at_dst ? lookup.dst : lookup.src;
      if (is_in_device_memory(a.indices) || is_in_device_memory(a.indptr))
        return at_dst ? names.dst_table : names.src_table;
      if (is_in_device_memory(a.starts)) return at_dst ? names.dst_starts : names.src_starts;
    }
  }
  return nullptr;
}

bool has_batches() { return KVX_HAS_BATCHES; }

kvx_status_t copy_pairs(const void *const *srcs, void *const *dsts, uint64_t bytes, uint64_t count,
                        kvx_memcpy_mode_t mode, bool *batched, void *stream) {
  *batched = false;
  if (mode != KVX_MEMCPY_ASYNC) KVX_TRY(can_batch(static_cast<cudaStream_t>(stream), batched));
  if (mode == KVX_MEMCPY_BATCH && !*batched) {
    return fail(KVX_STATUS_UNSUPPORTED,
                "a batch of copies is asked for, which takes CUDA 12.9, a stream that is not the "
                "legacy default stream, and no capture; give such a stream, or take MEMCPY_ASYNC "
                "(spec E.15)");
  }
  Copies copies(static_cast<cudaStream_t>(stream), *batched);
  for (uint64_t i = 0; i < count; ++i) {
    KVX_TRY(copies.add(static_cast<uint8_t *>(dsts[i]), static_cast<const uint8_t *>(srcs[i]),
                       static_cast<size_t>(bytes)));
  }
  return copies.flush();
}

kvx_status_t run_copies(const Plan &plan, void *stream) {
  for (size_t layer = 0; layer < plan.layers.size(); ++layer)
    for (const PlanePair *pair = plan.begin_of(layer); pair != plan.end_of(layer); ++pair)
      KVX_TRY(check_same_bytes(*pair, layer));
  if (const char *const name = find_in_device_memory(plan)) {
    return KVX_INVALID("%s lies in device memory, expected host memory with COPY_ENGINE (spec E.2)",
                       name);
  }
  uint64_t tokens;
  KVX_TRY(check_data(plan, &tokens));
  bool batches;
  KVX_TRY(can_batch(static_cast<cudaStream_t>(stream), &batches));
  Copies copies(static_cast<cudaStream_t>(stream), batches);
  for (const PlanePair &pair : plan.pairs) {
    Mover mover(pair, &copies);
    KVX_TRY(walk(plan, pair, 0, tokens,
                 [&](uint64_t, const Place &from, const Place &to, uint64_t count) {
                   const bool moves = to.block >= 0 && (from.block >= 0 || plan.zero_fill);
                   return moves ? mover.add(from, to, static_cast<int64_t>(count)) : KVX_STATUS_OK;
                 }));
    KVX_TRY(mover.flush());
  }
  return copies.flush();
}

}  // namespace kvx::cuda
