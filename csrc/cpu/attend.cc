#include "cpu/attend.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>

#include "cpu/float_env.h"
#include "cpu/kernels/kernels.h"
#include "cpu/threads.h"
#include "desc/scale.h"

namespace kvx::cpu {
namespace {

constexpr int64_t kTile = 16;  // tokens whose vectors are decoded at a time, for L1
constexpr int64_t kLeastChunk =
    128;                             // tokens of a chunk: its stored bytes stay in L2 for all heads
constexpr int64_t kMostChunks = 64;  // each has a sum of values for every query head
constexpr uint64_t kNumbersPerHelper = 256 << 10;  // decoding fewer is quicker than waking a thread
constexpr uint64_t kNumbersPerHostThread = 32 << 10;  // the same for a thread that is awake

constexpr int64_t round_up(int64_t count) {
  return (count + kAttendLanes - 1) / kAttendLanes * kAttendLanes;
}

// Decoded vectors, `step` numbers apart.
struct Decoded {
  const float *first;
  int64_t step;
};

// Decodes vectors of one format.
class Decoder {
 public:
  explicit Decoder(const Vectors &vectors)
      : vectors_(vectors),
        run_(kernels().find(vectors.dtype, KVX_DTYPE_F32)),
        decode_(kernels().decode[row_of(vectors.dtype)]) {}

  // Decodes vectors of `tokens` tokens and one head to rows of `row` numbers, or says where such
  // rows are: float32 needs no decoding and, of whole tiles, no padding.
  Decoded operator()(float *to, int64_t row, int64_t token, int64_t tokens, int64_t head) const {
    const uint8_t *from =
        vectors_.base + token * vectors_.token_stride + head * vectors_.head_stride;
    if (vectors_.dtype == KVX_DTYPE_F32 && vectors_.dim == row && tokens == kTile &&
        vectors_.token_stride % 4 == 0)
      return {reinterpret_cast<const float *>(from), vectors_.token_stride / 4};
    const Decoded rows = {to, row};
    for (int64_t t = 0; t < tokens; ++t, to += row, from += vectors_.token_stride) {
      if (run_) {
        run_(to, from, vectors_.dim, {{1.0f, 1.0f}, false, true, 0});
      } else {
        decode_(to, from, vectors_.dim);
      }
    }
    return rows;
  }

  // Multiplies a number for each of `tokens` tokens by their scales. Scaling a score or a weight
  // is scaling the vector behind it.
  void scale(float *numbers, int64_t token, int64_t tokens, int64_t head) const {
    const Scales &scales = vectors_.scales;
    if (!scales.data) return;
    const uint8_t *at = scales.data + token * scales.token_stride + head * scales.head_stride;
    for (int64_t t = 0; t < tokens; ++t, at += scales.token_stride)
      numbers[t] *= read_scale(at, scales.dtype);
  }

 private:
  const Vectors &vectors_;
  const ConvertRun run_;
  const DecodeVector decode_;
};

// The tokens, cut into chunks. Each chunk has a softmax of its own; the sums of values of all
// chunks are added at the end, each with the weight of its chunk.
class Job {
 public:
  explicit Job(const Attention &plan)
      : plan_(plan),
        k_(plan.k),
        v_(plan.v),
        k_row_(round_up(plan.k.dim)),
        v_row_(round_up(plan.v.dim)),
        queries_(int64_t{plan.num_kv_heads} * plan.repeats),
        chunk_(std::max(kLeastChunk, round_up((plan.num_tokens - 1) / kMostChunks + 1))),
        chunks_((plan.num_tokens - 1) / chunk_ + 1),
        query_(new float[static_cast<size_t>(queries_ * k_row_)]()),
        sums_(new float[static_cast<size_t>(chunks_ * queries_ * v_row_)]()),
        largest_(new float[static_cast<size_t>(chunks_ * queries_)]),
        weights_(new float[static_cast<size_t>(chunks_ * queries_)]),
        callers_(new_scratch()) {
    for (int64_t q = 0; q < queries_; ++q)
      for (int64_t d = 0; d < plan.k.dim; ++d)
        query_[q * k_row_ + d] =
            plan.query[q * plan.query_strides[0] + d * plan.query_strides[1]] * plan.scale;
  }

  void run() {
    const uint64_t numbers =
        uint64_t{plan_.num_tokens} * plan_.num_kv_heads * (plan_.k.dim + plan_.v.dim);
    const bool lent = numbers >= kNumbersPerHostThread && num_host_threads();
    const uint64_t threads = lent ? num_host_threads() : num_threads();
    const uint64_t worth = numbers / (lent ? kNumbersPerHostThread : kNumbersPerHelper);
    const uint64_t helpers = std::min({threads - 1, worth, static_cast<uint64_t>(chunks_ - 1)});
    run_with_helpers(static_cast<uint32_t>(helpers), help, this);
    add_chunks();
  }

 private:
  using Floats = std::unique_ptr<float[]>;

  // The scores of a chunk, then a tile of decoded vectors, whose padding stays 0.
  Floats new_scratch() const {
    return Floats(new float[static_cast<size_t>(queries_ * chunk_ + kTile * (k_row_ + v_row_))]());
  }

  static void help(void *context, bool is_caller) {
    auto *job = static_cast<Job *>(context);
    if (is_caller) return job->work(job->callers_.get());
    const StandardFloats standard;  // the caller has its own
    try {
      const Floats own = job->new_scratch();
      job->work(own.get());
    } catch (const std::bad_alloc &) {
      // The other threads, at least the caller, do this thread's share.
    }
  }

  void work(float *scratch) {
    for (int64_t chunk; (chunk = next_++) < chunks_;) {
      const int64_t begin = chunk * chunk_;
      attend_to(chunk, begin, std::min<int64_t>(chunk_, plan_.num_tokens - begin), scratch);
    }
  }

  void attend_to(int64_t chunk, int64_t begin, int64_t tokens, float *scores) {
    float *const keys = scores + queries_ * chunk_, *const values = keys + kTile * k_row_;
    const AttendKernels &with = kernels().attend;
    const int64_t repeats = plan_.repeats, at = chunk * queries_;
    for (int64_t h = 0; h < plan_.num_kv_heads; ++h) {
      float *const of_head = scores + h * repeats * chunk_;
      for (int64_t t = 0; t < tokens; t += kTile) {
        const int64_t count = std::min(kTile, tokens - t);
        const Decoded rows = k_(keys, k_row_, begin + t, count, h);
        with.dot(of_head + t, chunk_, query_.get() + h * repeats * k_row_, rows.first, rows.step,
                 k_row_, repeats, count);
      }
      for (int64_t r = 0; r < repeats; ++r) {
        float *const row = of_head + r * chunk_;
        k_.scale(row, begin, tokens, h);
        const int64_t q = at + h * repeats + r;
        with.softmax(row, tokens, &largest_[q], &weights_[q]);
        v_.scale(row, begin, tokens, h);
      }
    }
    for (int64_t h = 0; h < plan_.num_kv_heads; ++h) {
      for (int64_t t = 0; t < tokens; t += kTile) {
        const int64_t count = std::min(kTile, tokens - t);
        const Decoded rows = v_(values, v_row_, begin + t, count, h);
        with.add(sums_.get() + (at + h * repeats) * v_row_, scores + h * repeats * chunk_ + t,
                 chunk_, rows.first, rows.step, v_row_, repeats, count);
      }
    }
  }

  // A chunk's weight is exp(its largest score - the largest of all).
  void add_chunks() {
    float factors[round_up(kMostChunks)], largest, unused;
    for (int64_t q = 0; q < queries_; ++q) {
      for (int64_t c = 0; c < chunks_; ++c) factors[c] = largest_[c * queries_ + q];
      kernels().attend.softmax(factors, chunks_, &largest, &unused);
      float *const sum = sums_.get() + q * v_row_;
      float all = 0.0f;
      for (int64_t c = 0; c < chunks_; ++c) {
        all += weights_[c * queries_ + q] * factors[c];
        const float *const part = sum + c * queries_ * v_row_;
        for (int64_t d = 0; d < v_row_; ++d) sum[d] = (c ? sum[d] : 0.0f) + part[d] * factors[c];
      }
      float *const out = plan_.out + q * plan_.out_strides[0];
      for (int64_t d = 0; d < plan_.v.dim; ++d) out[d * plan_.out_strides[1]] = sum[d] / all;
    }
  }

  const Attention &plan_;
  const Decoder k_, v_;
  const int64_t k_row_, v_row_, queries_, chunk_, chunks_;
  const Floats query_, sums_;       // scaled; (chunks, queries, v_row)
  const Floats largest_, weights_;  // score, and sum of exp(score - largest): (chunks, queries)
  const Floats callers_;            // allocated before anything is written
  std::atomic<int64_t> next_{0};
};

}  // namespace

void attend(const Attention &plan) { Job(plan).run(); }

}  // namespace kvx::cpu
