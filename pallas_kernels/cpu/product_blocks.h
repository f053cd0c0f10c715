// What products have in registers: some rows of x times some columns of a block of a matrix [in, out], or some lines of one
// [out, in].

#pragma once

#include <cstdint>
#include <cstring>

#include "vectors.h"

namespace jaxserve {

// How a matrix of T is cut.
template <typename T>
struct Cut;

template <>
struct Cut<float> {
  using Factor = float;                            // what rows of x are multiplied as
  static constexpr int64_t strip = 512;            // most columns of a task
  static constexpr int64_t block = 8;              // rows of the matrix in a block,
  static constexpr int64_t deep_block = block;     // and where more than kFewRows rows of x are multiplied with it
  static constexpr int columns = 4 * kLanes;       // of a block that are multiplied together,
  static constexpr int rows = kLanes > 8 ? 4 : 6;  // with so many rows of x
};

template <>
struct Cut<BFloat16> {
  static constexpr int64_t strip = 512;
  static constexpr int columns = 32;
#ifdef __AVX512BF16__
  using Factor = BFloat16;
  static constexpr int64_t block = 32, deep_block = 128;
  static constexpr int rows = 8;
#else
  using Factor = float;
  static constexpr int64_t block = 16, deep_block = block;
  static constexpr int rows = kLanes > 8 ? 8 : 6;
#endif
};

// Up to so many rows of x reading the matrix is the limit, which likes blocks that fit the first cache with the next one.
// With more rows it is multiplying, which likes sums that seldom leave registers.
constexpr int64_t kFewRows = 16;

constexpr int kLines = 4;                      // of a matrix [columns, depth] whose sums are in registers,
constexpr int kLineRows = kLanes > 8 ? 6 : 2;  // of so many rows of x
constexpr int64_t kLineStrip = 64;             // lines of a task

// The even and the odd ones of some numbers: a word has one of each.
inline void LoadWords(const BFloat16* p, Vec& even, Vec& odd) {
  WordVec words = *reinterpret_cast<const WordVec*>(p);
  even = (Vec)(words << 16);
  odd = (Vec)(words & 0xffff0000);
}

// Columns of a line as vectors, those of BFloat16 in turns the even and the odd ones.
template <int V>
inline void LoadColumns(const float* p, Vec (&columns)[V]) {
  for (int v = 0; v < V; ++v) columns[v] = Load(p + v * kLanes);
}
template <int V>
inline void LoadColumns(const BFloat16* p, Vec (&columns)[V]) {
  for (int v = 0; v < V; v += 2) LoadWords(p + v * kLanes, columns[v], columns[v + 1]);
}

// Adds R rows of x times some columns of a block of the matrix to `acc`. As many columns at a time as there are
// registers for their sums. What lies `ahead` in the matrix is fetched meanwhile; 0: nothing.
template <int R, typename T>
inline void MultiplyBlock(const float* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t depth, int64_t ahead,
                          float* acc) {
  constexpr int V = kLanes > 8 || R <= 2 ? Cut<T>::columns / kLanes : 2;
  for (int c = 0; c < Cut<T>::columns; c += V * kLanes, w += V * kLanes, acc += V * kLanes) {
    Vec sums[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sums[r][v] = Load(acc + r * Cut<T>::strip + v * kLanes);
    for (int64_t k = 0; k < depth; ++k) {
      const T* line = w + k * w_stride;
      if (ahead) Prefetch(line + ahead, V * kLanes);
      Vec right[V];
      LoadColumns(line, right);
      for (int r = 0; r < R; ++r) {
        Vec left = Fill(x[r * x_stride + k]);
        for (int v = 0; v < V; ++v) sums[r][v] += left * right[v];
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) Store(acc + r * Cut<T>::strip + v * kLanes, sums[r][v]);
  }
}

// Puts the sums of a strip into the order of its columns.
template <typename T>
inline void Restore(float*) {}

#ifdef __AVX512BF16__
// Two numbers of a row at a time: lines k and k + 1 of the matrix are interleaved, which leaves the columns of two
// vectors of sums in another order.
template <int R>
inline void MultiplyBlock(const BFloat16* x, int64_t x_stride, const BFloat16* w, int64_t w_stride, int64_t depth,
                          int64_t ahead, float* acc) {
  using Cut = Cut<BFloat16>;
  __m512 sums[R][2];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v) sums[r][v] = _mm512_loadu_ps(acc + r * Cut::strip + v * kLanes);
  for (int64_t k = 0; k < depth; k += 2) {
    const BFloat16 *line = w + k * w_stride, *next = line + w_stride;
    if (ahead) Prefetch(line + ahead, Cut::columns);
    if (ahead) Prefetch(next + ahead, Cut::columns);
    __m512i first = _mm512_loadu_si512(line), second = _mm512_loadu_si512(next);
    __m512bh low = (__m512bh)_mm512_unpacklo_epi16(first, second);
    __m512bh high = (__m512bh)_mm512_unpackhi_epi16(first, second);
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      std::memcpy(&pair, x + r * x_stride + k, sizeof(pair));
      __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      sums[r][0] = _mm512_dpbf16_ps(sums[r][0], low, both);
      sums[r][1] = _mm512_dpbf16_ps(sums[r][1], high, both);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v) _mm512_storeu_ps(acc + r * Cut::strip + v * kLanes, sums[r][v]);
}

template <>
inline void Restore<BFloat16>(float* acc) {  // from columns 0-3, 8-11, 16-19, ... and 4-7, 12-15, 20-23, ...
  const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512i high = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
  for (int64_t i = 0; i < Cut<BFloat16>::strip; i += 2 * kLanes) {
    __m512 a = _mm512_loadu_ps(acc + i), b = _mm512_loadu_ps(acc + i + kLanes);
    _mm512_storeu_ps(acc + i, _mm512_permutex2var_ps(a, low, b));
    _mm512_storeu_ps(acc + i + kLanes, _mm512_permutex2var_ps(a, high, b));
  }
}
#else
template <>
inline void Restore<BFloat16>(float* acc) {
  for (int64_t i = 0; i < Cut<BFloat16>::strip; i += 2 * kLanes) {
    Vec even = Load(acc + i), odd = Load(acc + i + kLanes), halves[2];
    Interleave(even, odd, halves);
    Store(acc + i, halves[0]);
    Store(acc + i + kLanes, halves[1]);
  }
}
#endif

// Writes the products of R rows of x with kLines lines of a matrix [columns, depth] to `acc`. The sums of a row are added
// in the same order whatever R is.
template <int R, typename T>
inline void MultiplyLines(const T* x, const T* w, int64_t depth, float* acc) {
  Vec sums[R][kLines]{};
  for (int64_t k = 0; k < depth; k += kLanes) {
    Vec right[kLines];
    for (int line = 0; line < kLines; ++line) right[line] = Load(w + line * depth + k);
    for (int r = 0; r < R; ++r) {
      Vec left = Load(x + r * depth + k);
      for (int line = 0; line < kLines; ++line) sums[r][line] += left * right[line];
    }
  }
  for (int r = 0; r < R; ++r) SumEach(sums[r], acc + r * kLineStrip);
}

#ifdef __AVX512BF16__
template <int R>
inline void MultiplyLines(const BFloat16* x, const BFloat16* w, int64_t depth, float* acc) {
  __m512 sums[R][kLines];
  for (int r = 0; r < R; ++r)
    for (int line = 0; line < kLines; ++line) sums[r][line] = _mm512_setzero_ps();
  for (int64_t k = 0; k < depth; k += 2 * kLanes) {
    __m512bh right[kLines];
    for (int line = 0; line < kLines; ++line) right[line] = (__m512bh)_mm512_loadu_si512(w + line * depth + k);
    for (int r = 0; r < R; ++r) {
      __m512bh left = (__m512bh)_mm512_loadu_si512(x + r * depth + k);
      for (int line = 0; line < kLines; ++line) sums[r][line] = _mm512_dpbf16_ps(sums[r][line], left, right[line]);
    }
  }
  for (int r = 0; r < R; ++r) {
    Vec each[kLines];
    for (int line = 0; line < kLines; ++line) each[line] = (Vec)sums[r][line];
    SumEach(each, acc + r * kLineStrip);
  }
}
#else
// Rows of x are floats, in turns a vector of even numbers and one of odd ones.
template <int R>
inline void MultiplyLines(const float* x, const BFloat16* w, int64_t depth, float* acc) {
  Vec sums[R][kLines]{};
  for (int64_t k = 0; k < depth; k += 2 * kLanes)
    for (int line = 0; line < kLines; ++line) {
      Vec even, odd;
      LoadWords(w + line * depth + k, even, odd);
      for (int r = 0; r < R; ++r) {
        sums[r][line] += Load(x + r * depth + k) * even;
        sums[r][line] += Load(x + r * depth + k + kLanes) * odd;
      }
    }
  for (int r = 0; r < R; ++r) SumEach(sums[r], acc + r * kLineStrip);
}
#endif

}  // namespace jaxserve
