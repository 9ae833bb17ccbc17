// TurboQuant: its centroids and its signs. Spec: E.20
// Source: arXiv 2504.19874; vLLM 0.32, model_executor/layers/quantization/turboquant/centroids.py
#pragma once

#include <cstdint>

namespace kvx::turboquant {

constexpr int kMostDim = 256, kMostCodes = 16;

// How vectors of `dim` numbers become codes, and back.
struct Book {
  int dim, bits;
  float centroids[kMostCodes];  // ascending
  float midpoints[kMostCodes];  // between a centroid and the next
  const float *signs;           // of the numbers, before the rotation; NULL: as they are
  float scale;                  // of the rotation: what its sums are multiplied by
  float epsilon;                // added to the norm that a vector is divided by
  bool is_corrected;            // decoding gives the vector the norm that is stored
};

// Positive halves of the centroids, by bits - 1 and dim: tests/lloyd_max.py computes them. They are
// those of a unit vector times sqrt(dim), the size that Hadamard's sums have.
inline constexpr float kCentroids[4][3][8] = {
    {{0.801007265f}, {0.799444436f}, {0.798664124f}},
    {{0.452118950f, 1.499974795f}, {0.452453250f, 1.505192978f}, {0.452617583f, 1.507804514f}},
    {{0.243753431f, 0.750658106f, 1.329342871f, 2.111311447f},
     {0.244424873f, 0.753330160f, 1.336598886f, 2.131470844f},
     {0.244759803f, 0.754667365f, 1.340247310f, 2.141668641f}},
    {{0.127352180f, 0.384718266f, 0.650494148f, 0.931894019f, 1.239404222f, 1.590849129f,
      2.023309826f, 2.646370491f},
     {0.127873152f, 0.386380916f, 0.653618948f, 0.937097021f, 1.247770458f, 1.604342660f,
      2.045925380f, 2.688859257f},
     {0.128133987f, 0.387214043f, 0.655187152f, 0.939713725f, 1.251989019f, 1.611168121f,
      2.057411210f, 2.710566995f}}};

// vLLM's, by bits - 3 and dim: of a Gaussian, by a coarser iteration, for unit vectors.
inline constexpr float kSlotCentroids[2][3][8] = {
    {{0x1.f5b9f6p-6f, 0x1.82e3f8p-4f, 0x1.57daa6p-3f, 0x1.133ea8p-2f},
     {0x1.62c62ep-6f, 0x1.1192aap-4f, 0x1.e6487ap-4f, 0x1.85413ep-3f},
     {0x1.f5b9f6p-7f, 0x1.82e3f8p-5f, 0x1.57daa6p-4f, 0x1.133ea8p-3f}},
    {{0x1.070514p-6f, 0x1.8d73fep-5f, 0x1.505290p-4f, 0x1.e28894p-4f, 0x1.419a18p-3f,
      0x1.9e2d80p-3f, 0x1.08c2e0p-2f, 0x1.5d8edcp-2f},
     {0x1.73f75cp-7f, 0x1.190ab2p-5f, 0x1.dba1c2p-5f, 0x1.5533e4p-4f, 0x1.c6d056p-4f,
      0x1.24de2ep-3f, 0x1.766dcep-3f, 0x1.ee5988p-3f},
     {0x1.070514p-7f, 0x1.8d73fep-6f, 0x1.505290p-5f, 0x1.e28894p-5f, 0x1.419a18p-4f,
      0x1.9e2d80p-4f, 0x1.08c2e0p-3f, 0x1.5d8edcp-3f}}};

// Signs of the first and of the second rotation: bits of the fraction of pi, a one for -1.
inline constexpr uint32_t kSignBits[2][kMostDim / 32] = {
    {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0x082efa98,
     0xec4e6c89},
    {0x452821e6, 0x38d01377, 0xbe5466cf, 0x34e90c6c, 0xc0ac29b7, 0xc97c50dd, 0x3f84d5b5,
     0xb5470917}};

struct Signs {
  float of[2][kMostDim];
  constexpr Signs() : of{} {
    for (int which = 0; which < 2; ++which)
      for (int i = 0; i < kMostDim; ++i)
        of[which][i] = kSignBits[which][i / 32] >> (31 - i % 32) & 1 ? -1.0f : 1.0f;
  }
};
inline constexpr Signs kSigns;

constexpr bool is_dim(uint32_t dim) { return dim == 64 || dim == 128 || dim == 256; }
constexpr int place_of_dim(int dim) { return dim == 64 ? 0 : dim == 128 ? 1 : 2; }

constexpr Book book_of(int dim, int bits, const float (&half)[8]) {
  Book book{};
  book.dim = dim, book.bits = bits;
  const int count = 1 << (bits - 1);
  for (int i = 0; i < count; ++i)
    book.centroids[count + i] = half[i], book.centroids[count - 1 - i] = -half[i];
  for (int i = 0; i + 1 < 2 * count; ++i)
    book.midpoints[i] = (book.centroids[i] + book.centroids[i + 1]) / 2;
  return book;
}

// The codes of TurboQuant.
constexpr Book book(int dim, int bits) {
  Book book = book_of(dim, bits, kCentroids[bits - 1][place_of_dim(dim)]);
  book.signs = kSigns.of[0];
  book.scale = 1.0f;
  return book;
}

// The codes of keys in vLLM's slots: sums of Hadamard's matrix are divided by sqrt(dim).
constexpr Book slot_book(int dim, int bits) {
  Book book = book_of(dim, bits, kSlotCentroids[bits - 3][place_of_dim(dim)]);
  book.scale = dim == 64 ? 0.125f : dim == 128 ? 0x1.6a09e6p-4f : 0.0625f;
  book.epsilon = 1e-8f;
  book.is_corrected = true;
  return book;
}

constexpr int code_bytes(int dim, int bits) { return dim * bits / 8; }

}  // namespace kvx::turboquant

namespace kvx {

// TQ2, TQ3 and TQ4: 128 numbers along dim, without a residual. A number depends on all codes of its
// unit, so that only whole units are decoded: see cpu/kernels/turboquant.inl.
template <int kBits>
struct TurboQuant {
  static constexpr int kNumbers = 128, kNorm = turboquant::code_bytes(kNumbers, kBits);
  static constexpr int kBytes = kNorm + 2;  // codes, a float16
};

}  // namespace kvx
