// Vectors of floats, as long as those of the machine, by the extensions of GCC and Clang.

#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace jaxserve {

#ifdef __AVX512F__
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint32_t WordVec __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes), aligned(2)));

struct BFloat16 {
  uint16_t bits;
};

inline float ToFloat(float x) { return x; }
inline float ToFloat(BFloat16 x) {
  uint32_t word = uint32_t{x.bits} << 16;
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

inline Vec Load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline Vec Load(const BFloat16* p) {
#ifdef __AVX512F__  // in one instruction, where compilers make two of half the width
  WordVec words = (WordVec)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
  WordVec words = __builtin_convertvector(*reinterpret_cast<const HalfVec*>(p), WordVec);
#endif
  return (Vec)(words << 16);
}
inline void Store(float* p, Vec x) { *reinterpret_cast<Vec*>(p) = x; }
inline WordVec RoundToHalf(Vec x) {  // the bits of bfloat16: to nearest, ties to even; NaN stays NaN
  WordVec words = (WordVec)x;
  WordVec rounded = (words + 0x7fff + ((words >> 16) & 1)) >> 16;
  WordVec nan = (words >> 16) | 0x40;
  IntVec is_nan = x != x;
  return is_nan ? nan : rounded;
}
inline void Store(BFloat16* p, Vec x) {
  *reinterpret_cast<HalfVec*>(p) = __builtin_convertvector(RoundToHalf(x), HalfVec);
}
inline Vec Fill(float x) { return x - Vec{}; }
inline Vec Max(Vec a, Vec b) { return a > b ? a : b; }

// a0 b0 a1 b1 ... as two vectors.
inline void Interleave(Vec a, Vec b, Vec (&to)[2]) {
#ifdef __AVX512F__
  to[0] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  to[1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
  to[0] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  to[1] = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#endif
}

// The sums of vectors, in a tree: each step halves the lanes that belong to one of them.
typedef float Eight __attribute__((vector_size(32)));

inline Eight Fold(Vec x) {
#ifdef __AVX512F__
  return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
         __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  return x;
#endif
}
inline Eight Join4(Eight a, Eight b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}
inline Eight Join2(Eight a, Eight b) {
  return __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13) +
         __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15);
}
inline Eight Join1(Eight a, Eight b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) +
         __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
}
inline void SumEach(const Vec (&x)[8], float* to) {
  Eight fours[4];
  for (int i = 0; i < 4; ++i) fours[i] = Join4(Fold(x[2 * i]), Fold(x[2 * i + 1]));
  Eight sums = Join1(Join2(fours[0], fours[1]), Join2(fours[2], fours[3]));
  std::memcpy(to, &sums, 8 * sizeof(float));
}
inline void SumEach(const Vec (&x)[4], float* to) {
  Eight twos = Join2(Join4(Fold(x[0]), Fold(x[1])), Join4(Fold(x[2]), Fold(x[3])));
  Eight sums = Join1(twos, twos);
  std::memcpy(to, &sums, 4 * sizeof(float));
}
inline void SumEach(const Vec (&x)[1], float* to) {
  Eight four = Join4(Fold(x[0]), Fold(x[0])), two = Join2(four, four);
  *to = Join1(two, two)[0];
}
inline float Sum(Vec x) {
  float sum;
  SumEach({x}, &sum);
  return sum;
}

// e^x for x <= 0, with a relative error of some 2^-23; 0 below the normal numbers; NaN stays NaN.
inline Vec Exp(Vec x) {
  Vec clamped = x < -87.0f ? Fill(-87.0f) : x;
  Vec shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the nearest whole number
  Vec whole = shifted - 12582912.0f;
  Vec rest = clamped - whole * 0.693359375f + whole * 2.12194440e-4f;
  Vec y = Fill(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    y = y * rest + c;
  y = y * rest * rest + rest + 1.0f;
  WordVec power = ((WordVec)shifted + 127) << 23;
  y *= (Vec)power;
  return x < -87.0f ? Vec{} : y;
}

// Asks for the memory of a row before it is needed.
template <typename T>
inline void Prefetch(const T* row, int64_t dim) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t c = 0; c < dim; c += kLine) __builtin_prefetch(row + c);
}

}  // namespace jaxserve
