// Copies loops of runs: forward, or short runs transposed through registers. Included by
// kernels.inl.

typedef uint8_t Vector __attribute__((vector_size(KVX_VECTOR_BYTES), aligned(1), may_alias));
typedef uint8_t Half __attribute__((vector_size(16), aligned(1), may_alias));

KVX_INLINE void store_streaming(uint8_t *dst, Vector value) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  *reinterpret_cast<Vector *>(dst) = value;  // sanitizers do not see a streaming store
#elif defined(__x86_64__) && KVX_VECTOR_BYTES == 64
  _mm512_stream_si512(reinterpret_cast<__m512i *>(dst), reinterpret_cast<__m512i>(value));
#elif defined(__x86_64__) && KVX_VECTOR_BYTES == 32
  _mm256_stream_si256(reinterpret_cast<__m256i *>(dst), reinterpret_cast<__m256i>(value));
#elif defined(__x86_64__)
  _mm_stream_si128(reinterpret_cast<__m128i *>(dst), reinterpret_cast<__m128i>(value));
#else
  *reinterpret_cast<Vector *>(dst) = value;
#endif
}

constexpr int64_t kLineBytes = 64;

KVX_INLINE void prefetch(const uint8_t *src) {
  kFetchesNear ? __builtin_prefetch(src, 0, 3) : __builtin_prefetch(src, 0, 2);
}
KVX_INLINE Vector load(const uint8_t *src) { return *reinterpret_cast<const Vector *>(src); }
KVX_INLINE void store(uint8_t *dst, Vector value) { *reinterpret_cast<Vector *>(dst) = value; }

// Copies fewer bytes than a vector.
KVX_INLINE void copy_short(uint8_t *dst, const uint8_t *src, int64_t n) {
  if (n >= 16) {
    const Half last = *reinterpret_cast<const Half *>(src + n - 16);
    for (int64_t i = 0; i + 16 <= n; i += 16)
      *reinterpret_cast<Half *>(dst + i) = *reinterpret_cast<const Half *>(src + i);
    *reinterpret_cast<Half *>(dst + n - 16) = last;
  } else {
    if (n & 8) memcpy(dst, src, 8), dst += 8, src += 8;
    if (n & 4) memcpy(dst, src, 4), dst += 4, src += 4;
    if (n & 2) memcpy(dst, src, 2), dst += 2, src += 2;
    if (n & 1) *dst = *src;
  }
}

KVX_INLINE int64_t bytes_to_alignment(const uint8_t *dst) {
  return -reinterpret_cast<intptr_t>(dst) & (KVX_VECTOR_BYTES - 1);
}

// From here on the C library's memcpy, tuned for this processor, is worth a call.
constexpr int64_t kLibraryRun = 512;

KVX_INLINE void copy_run(uint8_t *dst, const uint8_t *src, int64_t n) {
  constexpr int64_t kVector = KVX_VECTOR_BYTES;
  if (n < kVector) return copy_short(dst, src, n);
  if (n >= kLibraryRun) {
    memcpy(dst, src, static_cast<size_t>(n));
    return;
  }
  for (; n >= 4 * kVector; n -= 4 * kVector, dst += 4 * kVector, src += 4 * kVector) {
    const Vector a = load(src), b = load(src + kVector), c = load(src + 2 * kVector),
                 d = load(src + 3 * kVector);
    store(dst, a), store(dst + kVector, b);
    store(dst + 2 * kVector, c), store(dst + 3 * kVector, d);
  }
  for (; n >= kVector; n -= kVector, dst += kVector, src += kVector) store(dst, load(src));
  // Copies the end as one vector that overlaps the bytes before.
  if (n) store(dst + n - kVector, load(src + n - kVector));
}

// What is prefetched of the next source. Processors follow a long piece by themselves, within a
// page: of each page its beginning is enough there, and all of it would cost more than it saves.
struct Ahead {
  int64_t bytes;   // from here to the same position in the next source
  uintptr_t lead;  // bytes at the beginning of each page

  static constexpr uintptr_t kPage = 4 << 10, kLead = 1 << 10;
  static constexpr int64_t kLongPiece = 16 << 10;

  // piece: bytes of the source that follow each other
  static Ahead of(int64_t bytes, int64_t piece) {
    if (bytes == 0) return {0, 0};
    return {bytes, piece >= kLongPiece || bytes == piece ? kLead : kPage};
  }
  KVX_MEMBER bool wants(const uint8_t *src) const {
    return ((reinterpret_cast<uintptr_t>(src) + static_cast<uintptr_t>(bytes)) & (kPage - 1)) <
           lead;
  }
};

// Copies whole vectors to an aligned address, past the caches.
KVX_INLINE void stream_vectors(uint8_t *dst, const uint8_t *src, int64_t n, const Ahead &ahead) {
  constexpr int64_t kVector = KVX_VECTOR_BYTES;
  for (; n >= 4 * kVector; n -= 4 * kVector, dst += 4 * kVector, src += 4 * kVector) {
    if (ahead.wants(src))
      for (int64_t line = 0; line < 4 * kVector; line += kLineBytes)
        prefetch(src + ahead.bytes + line);
    const Vector a = load(src), b = load(src + kVector), c = load(src + 2 * kVector),
                 d = load(src + 3 * kVector);
    store_streaming(dst, a), store_streaming(dst + kVector, b);
    store_streaming(dst + 2 * kVector, c), store_streaming(dst + 3 * kVector, d);
  }
  for (; n > 0; n -= kVector, dst += kVector, src += kVector) {
    if (ahead.wants(src)) prefetch(src + ahead.bytes);
    store_streaming(dst, load(src));
  }
}

// Copies a run of a usual size and prefetches the next destination for writing, which no processor
// predicts. `ahead`: bytes from here to there.
constexpr int64_t kLeastRow = 512, kMostRow = 4 << 10;

KVX_INLINE void copy_row(uint8_t *dst, const uint8_t *src, int64_t n, int64_t ahead) {
  constexpr int64_t kStep = 4 * KVX_VECTOR_BYTES;
  for (int64_t i = 0; i + kStep <= n; i += kStep) {
    for (int64_t line = 0; line < kStep; line += kLineBytes)
      __builtin_prefetch(dst + ahead + i + line, 1, 3);
    copy_run(dst + i, src + i, kStep);
  }
  if (n % kStep) copy_run(dst + n - kStep, src + n - kStep, kStep);
}

// Bytes at both ends that do not fill a vector go through the caches.
KVX_INLINE void stream_run(uint8_t *dst, const uint8_t *src, int64_t n, const Ahead &ahead) {
  const int64_t head = bytes_to_alignment(dst);
  if (n < head + KVX_VECTOR_BYTES) return copy_run(dst, src, n);
  const int64_t whole = (n - head) & -KVX_VECTOR_BYTES;
  copy_short(dst, src, head);
  stream_vectors(dst + head, src + head, whole, ahead);
  copy_short(dst + head + whole, src + head + whole, n - head - whole);
}

// Copies contiguous elements to addresses `step` bytes apart: eight at a time, without an addition
// for each address.
template <int64_t kSize>
KVX_INLINE void scatter(uint8_t *dst, int64_t step, const uint8_t *src, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8, dst += 8 * step, src += 8 * kSize) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) memcpy(dst + j * step, src + j * kSize, kSize);
  }
  for (; i < count; ++i, dst += step, src += kSize) memcpy(dst, src, kSize);
}

// A run size known at compile time becomes a few instructions.
template <bool kStreaming>
KVX_INLINE void copy_runs(const Loop dim, const int64_t run, uint8_t *dst, const uint8_t *src,
                          const Ahead ahead) {
  const auto each = [&](auto copy) __attribute__((always_inline)) {
    for (int64_t i = 0; i < dim.count; ++i, dst += dim.dst, src += dim.src) copy();
  };
  const auto copies = [&](auto size) __attribute__((always_inline)) {
    constexpr int64_t kSize = size();
    if (dim.src == kSize) return scatter<kSize>(dst, dim.dst, src, dim.count);
    each([&]() __attribute__((always_inline)) { memcpy(dst, src, size()); });
  };
  const auto streams = [&](auto size) __attribute__((always_inline)) {
    each([&]() __attribute__((always_inline)) { stream_vectors(dst, src, size(), ahead); });
  };
  if (kStreaming && bytes_to_alignment(dst) == 0 && dim.dst % KVX_VECTOR_BYTES == 0) {
    if (run == 128) return streams(std::integral_constant<int64_t, 128>{});
    if (run == 256) return streams(std::integral_constant<int64_t, 256>{});
    if (run == 512) return streams(std::integral_constant<int64_t, 512>{});
  }
  switch (run) {
    case 1:
      return copies(std::integral_constant<size_t, 1>{});
    case 2:
      return copies(std::integral_constant<size_t, 2>{});
    case 4:
      return copies(std::integral_constant<size_t, 4>{});
    case 8:
      return copies(std::integral_constant<size_t, 8>{});
    case 16:
      return copies(std::integral_constant<size_t, 16>{});
    default:
      return each([&]() __attribute__((always_inline)) {
        kStreaming ? stream_run(dst, src, run, ahead) : copy_run(dst, src, run);
      });
  }
}

// The elements of a, then those of b.
template <class Part, int... kByte>
KVX_INLINE auto join(Part a, Part b, std::integer_sequence<int, kByte...>) {
  return __builtin_shufflevector(a, b, kByte...);
}

struct Bytes16 {
  uint64_t words[2];
};

// ---- Transposes: [rows][columns] of Unit in the source is [columns][rows] in the destination ----

template <class Unit>
struct Lanes {
  typedef Unit Register __attribute__((vector_size(16), aligned(1), may_alias));
  static constexpr int kCount = 16 / sizeof(Unit);
};

// Lanes of a and b in turn, from `kFirst` on.
template <class Unit, int kFirst, class Register, int... kLane>
KVX_INLINE Register zip(Register a, Register b, std::integer_sequence<int, kLane...>) {
  constexpr int n = Lanes<Unit>::kCount;
  return __builtin_shufflevector(a, b, (kFirst + kLane / 2 + kLane % 2 * n)...);
}

// Transposes kCount x kCount units: log2(kCount) rounds interleave the first half of the rows with
// the second.
template <class Unit>
KVX_INLINE void transpose_square(uint8_t *dst, int64_t dst_step, const uint8_t *src,
                                 int64_t src_step) {
  using Register = typename Lanes<Unit>::Register;
  constexpr int n = Lanes<Unit>::kCount;
  constexpr auto lanes = std::make_integer_sequence<int, n>{};
  Register rows[n], zipped[n];
#pragma GCC unroll 16
  for (int i = 0; i < n; ++i) rows[i] = *reinterpret_cast<const Register *>(src + i * src_step);
#pragma GCC unroll 4
  for (int round = 1; round < n; round *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < n / 2; ++i) {
      zipped[2 * i] = zip<Unit, 0>(rows[i], rows[i + n / 2], lanes);
      zipped[2 * i + 1] = zip<Unit, n / 2>(rows[i], rows[i + n / 2], lanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) rows[i] = zipped[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < n; ++i) *reinterpret_cast<Register *>(dst + i * dst_step) = rows[i];
}

template <class Unit>
KVX_INLINE void transpose_scalar(uint8_t *dst, int64_t dst_step, const uint8_t *src,
                                 int64_t src_step, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c)
      memcpy(dst + c * dst_step + r * static_cast<int64_t>(sizeof(Unit)),
             src + r * src_step + c * static_cast<int64_t>(sizeof(Unit)), sizeof(Unit));
  }
}

// Prefetches the line after the one where a square begins, for each of its rows.
KVX_INLINE void prefetch_rows(const uint8_t *src, int64_t src_step, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) prefetch(src + i * src_step);
}

template <class Unit>
void transpose(uint8_t *dst, int64_t dst_step, const uint8_t *src, int64_t src_step, int64_t rows,
               int64_t columns, int64_t ahead) {
  constexpr int64_t n = Lanes<Unit>::kCount, size = sizeof(Unit);
  const int64_t whole_rows = rows / n * n, whole_columns = columns / n * n;
  for (int64_t r = 0; r < whole_rows; r += n) {
    const uint8_t *from = src + r * src_step;
    uint8_t *to = dst + r * size;
    for (int64_t c = 0; c < whole_columns; c += n) {
      if (ahead && c * size % kLineBytes == 0) prefetch_rows(from + c * size + ahead, src_step, n);
      transpose_square<Unit>(to + c * dst_step, dst_step, from + c * size, src_step);
    }
    transpose_scalar<Unit>(to + whole_columns * dst_step, dst_step, from + whole_columns * size,
                           src_step, n, columns - whole_columns);
  }
  transpose_scalar<Unit>(dst + whole_rows * size, dst_step, src + whole_rows * src_step, src_step,
                         rows - whole_rows, columns);
}

void transpose_runs(int64_t run, uint8_t *dst, int64_t dst_step, const uint8_t *src,
                    int64_t src_step, int64_t rows, int64_t columns, int64_t ahead) {
  switch (run) {
    case 1:
      return transpose<uint8_t>(dst, dst_step, src, src_step, rows, columns, ahead);
    case 2:
      return transpose<uint16_t>(dst, dst_step, src, src_step, rows, columns, ahead);
    case 4:
      return transpose<uint32_t>(dst, dst_step, src, src_step, rows, columns, ahead);
    case 8:
      return transpose<uint64_t>(dst, dst_step, src, src_step, rows, columns, ahead);
    default:
      return transpose_scalar<Bytes16>(dst, dst_step, src, src_step, rows, columns);
  }
}

// Loads one vector: 16 bytes each from rows `step` bytes apart.
KVX_INLINE Vector gather_rows(const uint8_t *src, int64_t step) {
  const auto row = [&](int i) __attribute__((always_inline)) {
    return *reinterpret_cast<const Half *>(src + i * step);
  };
#if KVX_VECTOR_BYTES == 16
  return row(0);
#elif KVX_VECTOR_BYTES == 32
  return join(row(0), row(1), std::make_integer_sequence<int, 32>{});
#else
  return join(join(row(0), row(1), std::make_integer_sequence<int, 32>{}),
              join(row(2), row(3), std::make_integer_sequence<int, 32>{}),
              std::make_integer_sequence<int, 64>{});
#endif
}

// Transposes 16-byte units directly to the destination, a whole vector at a time. The caller
// ensures that rows are a multiple of a vector and destination rows are aligned to one.
void transpose_units_streaming(uint8_t *dst, int64_t dst_step, const uint8_t *src, int64_t src_step,
                               int64_t rows, int64_t columns, int64_t ahead) {
  constexpr int64_t kUnits = KVX_VECTOR_BYTES / 16, kLineUnits = kLineBytes / 16;
  for (int64_t r = 0; r < rows; r += kLineUnits) {
    for (int64_t c = 0; c < columns; ++c) {
      const uint8_t *from = src + r * src_step + c * 16;
      uint8_t *to = dst + c * dst_step + r * 16;
      if (c % kLineUnits == 0) prefetch_rows(from + ahead, src_step, kLineUnits);
      for (int64_t i = 0; i < kLineUnits; i += kUnits)
        store_streaming(to + i * 16, gather_rows(from + i * src_step, src_step));
    }
  }
}

// Transposes into a stage in L1 and streams it out one tile later, when its stores have left the
// store buffer, so that whole lines are written.
class StreamingTranspose {
 public:
  ~StreamingTranspose() { drain(); }

  void add(int64_t run, const Loop &in_dst, const Loop &in_src, uint8_t *dst, const uint8_t *src,
           int64_t ahead) {
    const bool whole_lines = run == 16 && in_dst.count % (kLineBytes / 16) == 0 &&
                             (reinterpret_cast<intptr_t>(dst) | in_src.dst) % kLineBytes == 0;
    if (whole_lines) {
      return transpose_units_streaming(dst, in_src.dst, src, in_dst.src, in_dst.count, in_src.count,
                                       ahead);
    }
    // As many rows as leave room for a line of each: wide enough for whole registers both ways.
    const int64_t line = kLineBytes / run;
    const int64_t most_rows = kStageBytes / run / (in_src.count < line ? in_src.count : line);
    const int64_t rows = in_dst.count < most_rows ? in_dst.count : most_rows;
    const int64_t columns = kStageBytes / run / rows;
    for (int64_t r = 0; r < in_dst.count; r += rows) {
      const int64_t n = in_dst.count - r < rows ? in_dst.count - r : rows;
      for (int64_t c = 0; c < in_src.count; c += columns) {
        const int64_t m = in_src.count - c < columns ? in_src.count - c : columns;
        const uint8_t *from = src + r * in_dst.src + c * run;
        uint8_t *const stage = stages_[turn_];
        transpose_runs(run, stage, n * run, from, in_dst.src, n, m, ahead);
        drain();
        filled_ = {dst + c * in_src.dst + r * run, in_src.dst, stage, n * run, m};
        turn_ ^= 1;
      }
    }
  }

 private:
  static constexpr int64_t kStageBytes = 8 << 10;

  struct Tile {
    uint8_t *dst;
    int64_t dst_step;
    const uint8_t *stage;
    int64_t run, count;
  };

  void drain() {
    if (!filled_.count) return;
    if (filled_.dst_step == filled_.run) filled_.run *= filled_.count, filled_.count = 1;
    for (int64_t i = 0; i < filled_.count; ++i)
      stream_run(filled_.dst + i * filled_.dst_step, filled_.stage + i * filled_.run, filled_.run,
                 {0, 0});
    filled_.count = 0;
  }

  alignas(64) uint8_t stages_[2][kStageBytes];
  int turn_ = 0;
  Tile filled_{};
};

// ---- The loops ----

// The bytes of the source that follow each other from where it begins.
KVX_INLINE int64_t first_piece(const Loops &loops) {
  int64_t bytes = loops.run;
  for (int i = loops.count - 1; i >= 0 && loops.at[i].src == bytes; --i) bytes *= loops.at[i].count;
  return bytes;
}

template <bool kStreaming>
void copy_loops(const Loops &loops, uint8_t *dst, const uint8_t *src, const Ahead &ahead) {
  constexpr int kOuter = 4;
  const int inner = loops.transposes ? 2 : 1;
  if (loops.count - inner > kOuter) {  // tokens and dim are split, differently at the two ends
    Loops rest = loops;
    std::copy(loops.at + 1, loops.at + loops.count, rest.at);
    --rest.count;
    for (int64_t i = 0; i < loops.at[0].count; ++i)
      copy_loops<kStreaming>(rest, dst + i * loops.at[0].dst, src + i * loops.at[0].src, ahead);
    return;
  }
  Loop outer[kOuter] = {{1, 0, 0}, {1, 0, 0}, {1, 0, 0}, {1, 0, 0}};
  for (int i = 0; i < loops.count - inner; ++i)
    outer[kOuter - (loops.count - inner) + i] = loops.at[i];
  const Loop one = {1, 0, 0}, *last = loops.count ? &loops.at[loops.count - 1] : &one;
  const auto each = [&](auto body) __attribute__((always_inline)) {
    for (int64_t a = 0; a < outer[0].count; ++a)
      for (int64_t b = 0; b < outer[1].count; ++b)
        for (int64_t c = 0; c < outer[2].count; ++c)
          for (int64_t d = 0; d < outer[3].count; ++d)
            body(dst + a * outer[0].dst + b * outer[1].dst + c * outer[2].dst + d * outer[3].dst,
                 src + a * outer[0].src + b * outer[1].src + c * outer[2].src + d * outer[3].src);
  };
  if (!loops.transposes) {
    each([&](uint8_t *to, const uint8_t *from) {
      copy_runs<kStreaming>(*last, loops.run, to, from, ahead);
    });
  } else if (kStreaming) {
    StreamingTranspose transpose;
    each([&](uint8_t *to, const uint8_t *from) {
      transpose.add(loops.run, last[-1], *last, to, from, ahead.bytes);
    });
  } else {
    each([&](uint8_t *to, const uint8_t *from) {
      transpose_runs(loops.run, to, last->dst, from, last[-1].src, last[-1].count, last->count, 0);
    });
  }
}

void copy(const Loops &loops, uint8_t *dst, const uint8_t *src, const Next &next, bool streaming) {
  if (streaming)
    return copy_loops<true>(loops, dst, src, Ahead::of(next.src - src, first_piece(loops)));
  if (loops.count) return copy_loops<false>(loops, dst, src, {0, 0});
  if (loops.run >= kLeastRow && loops.run <= kMostRow)
    return copy_row(dst, src, loops.run, next.dst - dst);
  copy_run(dst, src, loops.run);
}
