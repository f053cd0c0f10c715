// The two products of attention in tiles, for a tile of queries and a run of keys of bfloat16. Scores and sums are
// transposed, a column for each query: keys are then rows as they lie in a page, and so weights are pairs of rows.

#pragma once

#include <algorithm>
#include <cstdint>

#include "tiles.h"
#include "vectors.h"

namespace jaxserve {

constexpr int64_t kPairs = kTileRows;          // of numbers, in a row of a tile
constexpr int64_t kTileDepth = 2 * kPairs;     // summed by a product of two tiles
constexpr int64_t kTileWords = kTileRows * kPairs;

inline int64_t RoundUp(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

// c[i][m] += sum over k of a[i][k] b[k][m] for `rows` i and `width` m, multiples of 16; without `adds`, c is new. Rows of
// a are `stride` numbers apart. b has one column of tiles after another, each along all of `depth`, a multiple of 32.
template <bool adds>
inline void MultiplyInTiles(const BFloat16* a, int64_t stride, const uint32_t* b, int64_t rows, int64_t depth,
                            int64_t width, float* c) {
  const int64_t line = width * sizeof(float), column = depth / kTileDepth * kTileWords;
  auto run = [&]<int I, int J>(int64_t i, int64_t m) {
    float* at = c + i * width + m;
    float* below = at + kTileRows * width;
    if (adds) {
      LoadTile<0>(at, line);
      if (J > 1) LoadTile<1>(at + kTileRows, line);
      if (I > 1) LoadTile<2>(below, line);
      if (I > 1 && J > 1) LoadTile<3>(below + kTileRows, line);
    } else {
      ZeroTile<0>(), ZeroTile<1>(), ZeroTile<2>(), ZeroTile<3>();
    }
    const BFloat16* left = a + i * stride;
    const uint32_t* right = b + m / kTileRows * column;
    for (int64_t k = 0; k < depth; k += kTileDepth, left += kTileDepth, right += kTileWords) {
      LoadTile<4>(left, stride * sizeof(*a));
      LoadTile<6>(right, kTileBytes);
      MultiplyTiles<0, 4, 6>();
      if (J > 1) LoadTile<7>(right + column, kTileBytes), MultiplyTiles<1, 4, 7>();
      if (I > 1) LoadTile<5>(left + kTileRows * stride, stride * sizeof(*a)), MultiplyTiles<2, 5, 6>();
      if (I > 1 && J > 1) MultiplyTiles<3, 5, 7>();
    }
    StoreTile<0>(at, line);
    if (J > 1) StoreTile<1>(at + kTileRows, line);
    if (I > 1) StoreTile<2>(below, line);
    if (I > 1 && J > 1) StoreTile<3>(below + kTileRows, line);
  };
  for (int64_t i = 0; i < rows; i += 2 * kTileRows)
    for (int64_t m = 0; m < width; m += 2 * kTileRows) {
      bool is_wide = m + kTileRows < width;
      if (i + kTileRows < rows)
        is_wide ? run.template operator()<2, 2>(i, m) : run.template operator()<2, 1>(i, m);
      else
        is_wide ? run.template operator()<1, 2>(i, m) : run.template operator()<1, 1>(i, m);
    }
}

// Writes a query, column m of a matrix [dim, width] for MultiplyInTiles.
inline void PackQuery(const BFloat16* query, int64_t dim, int64_t m, uint32_t* to) {
  to += m / kTileRows * (dim / 2) * kTileRows + m % kTileRows;
  for (int64_t pair = 0; pair < dim / 2; ++pair) std::memcpy(to + pair * kTileRows, query + 2 * pair, sizeof(*to));
}

// Writes weights [count, width] as a matrix [depth, width] for MultiplyInTiles, with zeros from `count` on.
inline void PackWeights(const float* weights, int64_t count, int64_t depth, int64_t width, uint32_t* to) {
  for (int64_t m = 0; m < width; m += kLanes) {
    uint32_t* column = to + m / kTileRows * (depth / 2) * kTileRows + m % kTileRows;
    for (int64_t pair = 0; pair < depth / 2; ++pair) {
      auto read = [&](int64_t e) { return e < count ? RoundToHalf(Load(weights + e * width + m)) : WordVec{}; };
      WordVec words = read(2 * pair) | read(2 * pair + 1) << 16;
      *reinterpret_cast<WordVec*>(column + pair * kTileRows) = words;
    }
  }
}

#ifdef __AVX512F__
// Puts halves of blocks of 2 * step words of two vectors together: the first ones in `a`, the second ones in `b`.
template <int step>
inline void ExchangeHalves(WordVec& a, WordVec& b) {
  WordVec x = a, y = b;
  if constexpr (step == 1) {
    a = __builtin_shufflevector(x, y, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
    b = __builtin_shufflevector(x, y, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  } else if constexpr (step == 2) {
    a = __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    b = __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  } else if constexpr (step == 4) {
    a = __builtin_shufflevector(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    b = __builtin_shufflevector(x, y, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  } else if constexpr (step == 8) {
    a = __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    b = __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
}

inline void TransposeWords(WordVec (&x)[16]) {
  auto exchange = [&]<int step>() {
    for (int i = 0; i < 16; ++i)
      if (!(i & step)) ExchangeHalves<step>(x[i], x[i + step]);
  };
  exchange.template operator()<1>();
  exchange.template operator()<2>();
  exchange.template operator()<4>();
  exchange.template operator()<8>();
}
#endif

// Writes values, `count` rows of `dim` numbers that are `stride` apart, transposed: [dim, depth], zeros from `count` on.
inline void TransposeValues(const BFloat16* values, int64_t count, int64_t depth, int64_t dim, int64_t stride,
                            BFloat16* to) {
#ifdef __AVX512F__
  for (int64_t e = 0; e < depth; e += kTileDepth)
    for (int64_t c = 0; c < dim; c += kLanes) {
      WordVec words[16];
      for (int64_t pair = 0; pair < kPairs; ++pair) {
        auto read = [&](int64_t key) { return key < count ? (WordVec)Load(values + key * stride + c) : WordVec{}; };
        words[pair] = read(e + 2 * pair) >> 16 | read(e + 2 * pair + 1);
      }
      TransposeWords(words);
      for (int64_t i = 0; i < kLanes; ++i) *reinterpret_cast<WordVec*>(to + (c + i) * depth + e) = words[i];
    }
#else
  for (int64_t c = 0; c < dim; ++c)
    for (int64_t e = 0; e < depth; ++e) to[c * depth + e] = e < count ? values[e * stride + c] : BFloat16{};
#endif
}

}  // namespace jaxserve
