// Products of few rows with a matrix: bound by the memory of the matrix, which is read once, as it is stored. One of
// [in, out] is read in strips of columns and blocks of rows; while a block is multiplied, the next one is fetched. Rows may
// be sorted by groups, each with a matrix of its own. One of [out, in], as a table of embeddings is, is read line by line.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "call.h"
#include "product_blocks.h"
#include "vectors.h"

namespace {

using namespace jaxserve;

constexpr int64_t kLeastStrip = 64;  // fewest columns of a task
constexpr int64_t kTasks = 2;        // of each thread, at least, where there are columns for them
constexpr int64_t kMostRows = 64;    // of a product of a group, whose sums then stay in cache

template <typename T>
struct Product {
  const T *x, *w;  // [rows, depth] and [depth, columns] or [columns, depth]; `find_shape_obstacle` says which sizes fit
  void* out;       // [.., columns]
  int64_t first;   // the row of `out` where [rows, columns] go
  bool wide_out;   // whether it is float32
  int64_t rows, depth, columns;

  void Put(int64_t row, int64_t column, const float* from, int64_t count) const {
    int64_t at = (first + row) * columns + column;
    for (int64_t i = 0; i < count; i += kLanes)
      if (wide_out)
        Store(static_cast<float*>(out) + at + i, Load(from + i));
      else
        Store(static_cast<BFloat16*>(out) + at + i, Load(from + i));
  }
};

// Runs run<R>(row) for R rows from `row` on, until all have been: for `most` of them at a time, then for fewer.
template <int most, typename Run>
inline void ForRows(int64_t rows, const Run& run) {
  int64_t row = 0;
  for (; row + most <= rows; row += most) run.template operator()<most>(row);
  for (; row + 2 <= rows; row += 2) run.template operator()<2>(row);
  for (; row < rows; ++row) run.template operator()<1>(row);
}

// The numbers of x from `first` on that a block of the matrix is multiplied with, and how far its rows are apart.
template <typename T>
struct Factors {
  const T* x;
  int64_t stride;
};
template <typename T>
inline Factors<T> ReadFactors(const Product<T>& p, int64_t first, int64_t, std::vector<T>&) {
  return {p.x + first, p.depth};
}
inline Factors<float> ReadFactors(const Product<BFloat16>& p, int64_t first, int64_t depth, std::vector<float>& wide) {
  constexpr int64_t stride = Cut<BFloat16>::deep_block;
  if (static_cast<int64_t>(wide.size()) < p.rows * stride) wide.resize(p.rows * stride);
  for (int64_t row = 0; row < p.rows; ++row)
    for (int64_t k = 0; k < depth; ++k) wide[row * stride + k] = ToFloat(p.x[row * p.depth + first + k]);
  return {wide.data(), stride};
}

// Writes the products with `width` columns from `column` on, at most as many as a strip has.
template <typename T>
void RunStrip(const Product<T>& p, int64_t column, int64_t width, float* acc) {
  using Cut = Cut<T>;
  thread_local std::vector<typename Cut::Factor> factors;
  const T* w = p.w + column;
  std::fill(acc, acc + p.rows * Cut::strip, 0.0f);
  const int64_t block = p.rows > kFewRows ? Cut::deep_block : Cut::block;
  for (int64_t k = 0; k < p.depth; k += block) {
    int64_t depth = std::min(block, p.depth - k);
    auto [x, stride] = ReadFactors(p, k, depth, factors);
    for (int64_t c = 0; c < width; c += Cut::columns) {
      ForRows<Cut::rows>(p.rows, [&, x = x, stride = stride]<int R>(int64_t row) {
        MultiplyBlock<R>(x + row * stride, stride, w + k * p.columns + c, p.columns, depth,
                         row == 0 ? block * p.columns : 0, acc + row * Cut::strip + c);
      });
    }
  }
  for (int64_t row = 0; row < p.rows; ++row) {
    Restore<T>(acc + row * Cut::strip);
    p.Put(row, column, acc + row * Cut::strip, width);
  }
}

// The rows of x as MultiplyLines reads them.
template <typename T>
inline const T* ReadRows(const Product<T>& p, std::vector<T>&) {
  return p.x;
}
inline const float* ReadRows(const Product<BFloat16>& p, std::vector<float>& wide) {
  int64_t size = p.rows * p.depth;
  if (static_cast<int64_t>(wide.size()) < size) wide.resize(size);
  for (int64_t i = 0; i < size; i += 2 * kLanes) {
    Vec even, odd;
    LoadWords(p.x + i, even, odd);
    Store(wide.data() + i, even);
    Store(wide.data() + i + kLanes, odd);
  }
  return wide.data();
}

// The same of a matrix [columns, depth], some lines at a time with all rows of x.
template <typename T>
void RunLines(const Product<T>& p, int64_t column, int64_t width, float* acc) {
  thread_local std::vector<typename Cut<T>::Factor> factors;
  const auto* x = ReadRows(p, factors);
  for (int64_t c = 0; c < width; c += kLines) {
    const T* w = p.w + (column + c) * p.depth;
    ForRows<kLineRows>(p.rows, [&]<int R>(int64_t row) {
      MultiplyLines<R>(x + row * p.depth, w, p.depth, acc + row * kLineStrip + c);
    });
  }
  for (int64_t row = 0; row < p.rows; ++row) p.Put(row, column, acc + row * kLineStrip, width);
}

// Runs all strips of the products, which have one number of columns; `run` is RunStrip or RunLines, for which sums have
// `stride`. A strip has fewer columns than that where threads would have nothing to do.
template <typename T>
void RunAll(const XLA_FFI_CallFrame* frame, const std::vector<Product<T>>& products, int64_t stride,
            void (*run)(const Product<T>&, int64_t, int64_t, float*)) {
  if (products.empty()) return;
  Threads threads{frame};
  int64_t columns = products[0].columns, count = products.size(), wanted = kTasks * threads.Count(), strip = stride;
  auto count_strips = [&] { return (columns + strip - 1) / strip; };
  while (strip > kLeastStrip && count_strips() * count < wanted) strip /= 2;
  int64_t strips = count_strips();
  ParallelFor(threads, strips * count, [&](int64_t task) {
    thread_local std::vector<float> acc;
    const Product<T>& product = products[task / strips];
    if (static_cast<int64_t>(acc.size()) < product.rows * stride) acc.resize(product.rows * stride);
    int64_t column = task % strips * strip;
    run(product, column, std::min(strip, columns - column), acc.data());
  });
}

// A product of the first two arguments, of all rows.
template <typename T>
Product<T> ReadProduct(const XLA_FFI_CallFrame* frame) {
  XLA_FFI_Buffer x = Argument(frame, 0), w = Argument(frame, 1), out = Result(frame, 0);
  Product<T> p{};
  p.x = static_cast<const T*>(x.data), p.w = static_cast<const T*>(w.data), p.out = out.data;
  p.wide_out = out.dtype == XLA_FFI_DataType_F32;
  p.rows = x.dims[0], p.depth = x.dims[1], p.columns = w.dims[w.rank - 1];
  return p;
}

// x [rows, depth] with w [depth, columns] or each of [parts, depth, columns].
template <typename T>
void Multiply(const XLA_FFI_CallFrame* frame) {
  XLA_FFI_Buffer w = Argument(frame, 1);
  int64_t parts = w.rank == 3 ? w.dims[0] : 1;
  std::vector<Product<T>> products(parts, ReadProduct<T>(frame));
  for (int64_t part = 0; part < parts; ++part) {
    products[part].w += part * products[part].depth * products[part].columns;
    products[part].first = part * products[part].rows;
  }
  RunAll(frame, products, Cut<T>::strip, RunStrip<T>);
}

// x [rows, depth] with w [columns, depth].
template <typename T>
void MultiplyTable(const XLA_FFI_CallFrame* frame) {
  Product<T> p = ReadProduct<T>(frame);
  p.columns = Argument(frame, 1).dims[0];
  RunAll(frame, {p}, kLineStrip, RunLines<T>);
}

// Rows of x [rows, depth], `sizes` of each group, with the group's matrices: w[first + part * groups + group] of
// w [matrices, depth, columns] gives a part of out [parts, rows, columns].
template <typename T>
void MultiplyGroups(const XLA_FFI_CallFrame* frame) {
  const int32_t *sizes = Ints(frame, 2), first = *Ints(frame, 3);
  int64_t groups = Argument(frame, 2).dims[0], parts = Result(frame, 0).dims[0];
  const Product<T> all = ReadProduct<T>(frame);
  std::vector<Product<T>> products;
  for (int64_t group = 0, start = 0; group < groups; start += sizes[group++])
    for (int64_t row = start, end = std::min<int64_t>(start + sizes[group], all.rows); row < end; row += kMostRows)
      for (int64_t part = 0; part < parts; ++part) {
        Product<T> p = all;
        p.x += row * p.depth;
        p.w += (first + part * groups + group) * p.depth * p.columns;
        p.first = part * all.rows + row;
        p.rows = std::min(kMostRows, end - row);
        products.push_back(p);
      }
  RunAll(frame, products, Cut<T>::strip, RunStrip<T>);
}

// What is wrong with a call of so many arguments, or null; `wide` and `narrow` answer it.
const char* Call(const XLA_FFI_CallFrame* frame, int64_t arguments, void (*wide)(const XLA_FFI_CallFrame*),
                 void (*narrow)(const XLA_FFI_CallFrame*)) {
  if (frame->args.size != arguments || frame->rets.size != 1) return "wrong number of arrays";
  XLA_FFI_DataType type = Argument(frame, 0).dtype;
  if (Argument(frame, 1).dtype != type) return "rows and matrices must have one type";
  if (type != XLA_FFI_DataType_F32 && type != XLA_FFI_DataType_BF16) return "rows must be float32 or bfloat16";
  (type == XLA_FFI_DataType_F32 ? wide : narrow)(frame);
  return nullptr;
}

const char* CallProduct(const XLA_FFI_CallFrame* frame) {
  return Call(frame, 2, Multiply<float>, Multiply<BFloat16>);
}

const char* CallTableProduct(const XLA_FFI_CallFrame* frame) {
  return Call(frame, 2, MultiplyTable<float>, MultiplyTable<BFloat16>);
}

const char* CallGroupedProduct(const XLA_FFI_CallFrame* frame) {
  return Call(frame, 4, MultiplyGroups<float>, MultiplyGroups<BFloat16>);
}

}  // namespace

// The most rows, of float32 and of bfloat16, with which these are faster than XLA's products with a matrix [in, out], and
// with one [out, in]. Where there are tiles made for matrices (AMX), XLA's are faster from few rows on, although it packs
// the matrix in each of them; matrices that are packed once (packing.py) have another product. XLA serves bfloat16 badly
// where there are no instructions for it.
#ifdef __AMX_BF16__
extern "C" const int JaxserveProductRows[] = {8, 8}, JaxserveTableRows[] = {8, 8};
#elif defined(__AVX512BF16__)
extern "C" const int JaxserveProductRows[] = {16, 64}, JaxserveTableRows[] = {8, 8};
#elif defined(__AVX512F__)
extern "C" const int JaxserveProductRows[] = {8, 32}, JaxserveTableRows[] = {8, 8};
#else
extern "C" const int JaxserveProductRows[] = {16, 64}, JaxserveTableRows[] = {16, 32};
#endif

extern "C" XLA_FFI_Error* JaxserveProduct(XLA_FFI_CallFrame* frame) { return Answer(frame, CallProduct); }
extern "C" XLA_FFI_Error* JaxserveTableProduct(XLA_FFI_CallFrame* frame) { return Answer(frame, CallTableProduct); }
extern "C" XLA_FFI_Error* JaxserveGroupedProduct(XLA_FFI_CallFrame* frame) { return Answer(frame, CallGroupedProduct); }
