// Products of few bfloat16 rows with a matrix [in, out]: bound by the memory of the matrix, which is read once, as it is
// stored, in strips of columns and blocks of rows. While a block is multiplied, the next one is fetched.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "call.h"
#include "vectors.h"

namespace {

using namespace jaxserve;

constexpr int64_t kStrip = 256;         // columns of a task
constexpr int64_t kBlock = 64;          // rows of the matrix in a block
constexpr int kColumns = 2 * kLanes;    // whose sums are in registers

struct Product {
  const BFloat16 *x, *w;  // [rows, depth] and [parts, depth, columns]; depth is even, columns a multiple of kColumns
  void* out;              // [parts, rows, columns]
  bool wide_out;          // whether it is float32
  int64_t rows, depth, columns, parts;

  void Put(int64_t part, int64_t row, int64_t column, const float* from, int64_t count) const {
    int64_t at = (part * rows + row) * columns + column;
    for (int64_t i = 0; i < count; i += kLanes) {
      if (wide_out)
        Store(static_cast<float*>(out) + at + i, Load(from + i));
      else
        Store(static_cast<BFloat16*>(out) + at + i, Load(from + i));
    }
  }
};

// Adds R rows of x times kColumns columns of a block of the matrix to `acc`, whose rows are kStrip apart.
#ifdef __AVX512BF16__
constexpr int kRows = 8;  // of sums in registers

// Two numbers of a row at a time: lines k and k + 1 of the matrix are interleaved, which leaves the columns of two
// vectors of sums in another order. `Restore` undoes it.
template <int R>
inline void MultiplyBlock(const BFloat16* x, int64_t x_stride, const BFloat16* w, int64_t w_stride, int64_t depth,
                          float* acc) {
  __m512 sums[R][2];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v) sums[r][v] = _mm512_loadu_ps(acc + r * kStrip + v * kLanes);
  for (int64_t k = 0; k < depth; k += 2) {
    const BFloat16 *line = w + k * w_stride, *next = line + w_stride;
    Prefetch(line + kBlock * w_stride, kColumns);
    Prefetch(next + kBlock * w_stride, kColumns);
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
    for (int v = 0; v < 2; ++v) _mm512_storeu_ps(acc + r * kStrip + v * kLanes, sums[r][v]);
}

inline void Restore(float* acc) {  // from columns 0-3, 8-11, 16-19, ... and 4-7, 12-15, 20-23, ...
  const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
  const __m512i high = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
  for (int64_t i = 0; i < kStrip; i += 2 * kLanes) {
    __m512 a = _mm512_loadu_ps(acc + i), b = _mm512_loadu_ps(acc + i + kLanes);
    _mm512_storeu_ps(acc + i, _mm512_permutex2var_ps(a, low, b));
    _mm512_storeu_ps(acc + i + kLanes, _mm512_permutex2var_ps(a, high, b));
  }
}
#else
constexpr int kRows = 2;

template <int R>
inline void MultiplyBlock(const BFloat16* x, int64_t x_stride, const BFloat16* w, int64_t w_stride, int64_t depth,
                          float* acc) {
  Vec sums[R][2];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v) sums[r][v] = Load(acc + r * kStrip + v * kLanes);
  for (int64_t k = 0; k < depth; ++k) {
    const BFloat16* line = w + k * w_stride;
    Prefetch(line + kBlock * w_stride, kColumns);
    for (int r = 0; r < R; ++r) {
      float left = ToFloat(x[r * x_stride + k]);
      for (int v = 0; v < 2; ++v) sums[r][v] += left * Load(line + v * kLanes);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2; ++v) Store(acc + r * kStrip + v * kLanes, sums[r][v]);
}

inline void Restore(float*) {}
#endif

// Columns [column, column + kStrip) of one part.
void RunStrip(const Product& p, int64_t part, int64_t column, float* acc) {
  int64_t width = std::min(kStrip, p.columns - column);
  const BFloat16* w = p.w + part * p.depth * p.columns + column;
  std::fill(acc, acc + p.rows * kStrip, 0.0f);
  for (int64_t k = 0; k < p.depth; k += kBlock) {
    int64_t depth = std::min(kBlock, p.depth - k);
    for (int64_t c = 0; c < width; c += kColumns) {
      auto run = [&]<int R>(int64_t row) {
        MultiplyBlock<R>(p.x + row * p.depth + k, p.depth, w + k * p.columns + c, p.columns, depth, acc + row * kStrip + c);
      };
      int64_t row = 0;
      for (; row + kRows <= p.rows; row += kRows) run.template operator()<kRows>(row);
      for (; row + 2 <= p.rows; row += 2) run.template operator()<2>(row);
      for (; row < p.rows; ++row) run.template operator()<1>(row);
    }
  }
  for (int64_t row = 0; row < p.rows; ++row) {
    Restore(acc + row * kStrip);
    p.Put(part, row, column, acc + row * kStrip, width);
  }
}

const char* Call(const XLA_FFI_CallFrame* frame) {
  if (frame->args.size != 2 || frame->rets.size != 1) return "wrong number of arrays";
  XLA_FFI_Buffer x = Argument(frame, 0), w = Argument(frame, 1), out = Result(frame, 0);
  if (x.dtype != XLA_FFI_DataType_BF16 || w.dtype != XLA_FFI_DataType_BF16) return "rows and matrix must be bfloat16";
  Product p{};
  p.x = static_cast<const BFloat16*>(x.data), p.w = static_cast<const BFloat16*>(w.data), p.out = out.data;
  p.wide_out = out.dtype == XLA_FFI_DataType_F32;
  p.rows = x.dims[0], p.depth = x.dims[1];
  p.columns = w.dims[w.rank - 1], p.parts = w.rank == 3 ? w.dims[0] : 1;
  int64_t strips = (p.columns + kStrip - 1) / kStrip;
  ParallelFor(Threads{frame}, strips * p.parts, [&](int64_t task) {
    thread_local std::vector<float> acc;
    if (static_cast<int64_t>(acc.size()) < p.rows * kStrip) acc.resize(p.rows * kStrip);
    RunStrip(p, task / strips, task % strips * kStrip, acc.data());
  });
  return nullptr;
}

}  // namespace

// The most rows with which this is faster than XLA's product, which tiles made for matrices (AMX) serve from few on.
#ifdef __AMX_BF16__
extern "C" const int JaxserveProductRows = 8;
#elif defined(__AVX512BF16__)
extern "C" const int JaxserveProductRows = 32;
#else
extern "C" const int JaxserveProductRows = 2;
#endif

extern "C" XLA_FFI_Error* JaxserveProduct(XLA_FFI_CallFrame* frame) { return Answer(frame, Call); }
