// Products of any number of rows with a matrix that was packed when it was loaded (packing.py). Its panels of columns lie
// one behind the other, each in the order in which it is read: for bfloat16 in tiles of 32 rows and 16 columns, two side
// by side, for float32 row by row. A sum is added in one order, whatever rows are beside it.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "call.h"
#include "tiles.h"
#include "vectors.h"

namespace {

using namespace jaxserve;

constexpr int64_t kTasks = 8;        // of each thread, at least, where there are panels for them
constexpr int64_t kMostPanels = 16;  // of a task
constexpr int64_t kAhead = 4096;     // bytes of a matrix that are fetched before they are needed

template <typename T>
struct Product {
  const T *x, *w;  // [rows, depth] and [panels, depth * width]
  const T* up;     // null, or like w: then out is silu(x w) times (x up)
  void* out;       // [rows, panels * width]
  bool wide_out;   // whether it is float32
  int64_t rows, depth, columns;

  void Put(int64_t row, int64_t column, const float* from, int64_t count) const {
    int64_t at = row * columns + column;
    for (int64_t i = 0; i < count; i += kLanes)
      if (wide_out)
        Store(static_cast<float*>(out) + at + i, Load(from + i));
      else
        Store(static_cast<BFloat16*>(out) + at + i, Load(from + i));
  }
};

template <typename T>
constexpr int64_t kWidth = 64;  // columns of a panel
template <>
constexpr int64_t kWidth<BFloat16> = 2 * kTileRows;

template <typename T>
constexpr int64_t kAxes = 3;  // of a matrix
template <>
constexpr int64_t kAxes<BFloat16> = 5;

// gate = silu(gate) * up.
inline void Gate(const float* up, int64_t count, float* gate) {
  for (int64_t i = 0; i < count; i += kLanes) {
    Vec x = Load(gate + i), e = Exp(x < 0.0f ? x : -x);
    Store(gate + i, x * (x < 0.0f ? e : Fill(1.0f)) / (1.0f + e) * Load(up + i));
  }
}

// Tiles 0 to 3 are sums of 32 rows and 32 columns; 4 and 5 have rows of x, 6 and 7 columns of the matrix.
TileShapes ShapeTiles(int64_t rows) {
  auto first = static_cast<uint8_t>(std::min<int64_t>(rows, kTileRows));
  auto second = static_cast<uint8_t>(rows > kTileRows ? rows - kTileRows : 1);
  return {{first, first, second, second, first, second, kTileRows, kTileRows}};
}

// Writes the sums of at most 32 rows of x with a panel, for which tiles are shaped, to `sums`.
template <bool both, bool fetch>
inline void MultiplyTilesOf(const BFloat16* x, const BFloat16* panel, int64_t depth, float (*sums)[2 * kTileRows]) {
  constexpr int64_t kDepth = kTileBytes / sizeof(BFloat16), kSize = kTileRows * kDepth;
  constexpr int64_t kStride = sizeof(*sums);
  int64_t stride = depth * sizeof(BFloat16);
  ZeroTile<0>(), ZeroTile<1>();
  if (both) ZeroTile<2>(), ZeroTile<3>();
  for (int64_t k = 0; k < depth; k += kDepth, panel += 2 * kSize) {
    if (fetch) Prefetch(panel + kAhead / sizeof(*panel), 2 * kSize);
    LoadTile<4>(x + k, stride);
    LoadTile<6>(panel, kTileBytes);
    LoadTile<7>(panel + kSize, kTileBytes);
    MultiplyTiles<0, 4, 6>();
    MultiplyTiles<1, 4, 7>();
    if (!both) continue;
    LoadTile<5>(x + kTileRows * depth + k, stride);
    MultiplyTiles<2, 5, 6>();
    MultiplyTiles<3, 5, 7>();
  }
  StoreTile<0>(sums[0], kStride), StoreTile<1>(sums[0] + kTileRows, kStride);
  if (both) StoreTile<2>(sums[kTileRows], kStride), StoreTile<3>(sums[kTileRows] + kTileRows, kStride);
}

void RunPanels(const Product<BFloat16>& p, int64_t first, int64_t last) {
  constexpr int64_t kRows = 2 * kTileRows, kColumns = kWidth<BFloat16>;
  alignas(64) float sums[kRows][kColumns], others[kRows][kColumns];
  for (int64_t row = 0; row < p.rows; row += kRows) {
    int64_t rows = std::min(kRows, p.rows - row);
    if (row == 0 || rows < kRows) ConfigureTiles(ShapeTiles(rows));
    bool both = rows > kTileRows;
    auto multiply = row == 0 ? (both ? MultiplyTilesOf<true, true> : MultiplyTilesOf<false, true>)
                             : (both ? MultiplyTilesOf<true, false> : MultiplyTilesOf<false, false>);
    for (int64_t panel = first; panel < last; ++panel) {
      const int64_t at = panel * p.depth * kColumns;
      multiply(p.x + row * p.depth, p.w + at, p.depth, sums);
      if (p.up) multiply(p.x + row * p.depth, p.up + at, p.depth, others), Gate(others[0], rows * kColumns, sums[0]);
      for (int64_t r = 0; r < rows; ++r) p.Put(row + r, panel * kColumns, sums[r], kColumns);
    }
  }
  ReleaseTiles();
}

constexpr int64_t kBlock = 128;  // rows of a panel that stay in the first cache
constexpr int kVectors = kLanes > 8 ? 4 : 2, kRegisterRows = 6;  // whose sums are in registers

template <int R, bool fetch>
inline void MultiplyPanel(const float* x, int64_t stride, const float* panel, int64_t depth, float* acc) {
  for (int64_t c = 0; c < kWidth<float>; c += kVectors * kLanes) {
    Vec sums[R][kVectors];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Load(acc + r * kWidth<float> + c + v * kLanes);
    for (int64_t k = 0; k < depth; ++k) {
      if (fetch) Prefetch(panel + k * kWidth<float> + c + kAhead / sizeof(*panel), kVectors * kLanes);
      Vec right[kVectors];
      for (int v = 0; v < kVectors; ++v) right[v] = Load(panel + k * kWidth<float> + c + v * kLanes);
      for (int r = 0; r < R; ++r) {
        Vec left = Fill(x[r * stride + k]);
        for (int v = 0; v < kVectors; ++v) sums[r][v] += left * right[v];
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) Store(acc + r * kWidth<float> + c + v * kLanes, sums[r][v]);
  }
}

// Writes the products of all rows with a panel to `sums` [rows, kWidth].
void MultiplyRows(const Product<float>& p, const float* panel, float* sums) {
  constexpr int64_t kColumns = kWidth<float>;
  std::fill_n(sums, p.rows * kColumns, 0.0f);
  for (int64_t k = 0; k < p.depth; k += kBlock) {
    const float *w = panel + k * kColumns, *x = p.x + k;
    int64_t depth = std::min(kBlock, p.depth - k), row = 0;
    auto run = [&]<int R>() {
      for (; row + R <= p.rows; row += R) {
        auto multiply = row > 0 ? MultiplyPanel<R, false> : MultiplyPanel<R, true>;
        multiply(x + row * p.depth, p.depth, w, depth, sums + row * kColumns);
      }
    };
    run.template operator()<kRegisterRows>();
    run.template operator()<4>();
    run.template operator()<2>();
    run.template operator()<1>();
  }
}

void RunPanels(const Product<float>& p, int64_t first, int64_t last) {
  constexpr int64_t kColumns = kWidth<float>;
  const int64_t size = p.rows * kColumns;
  thread_local std::vector<float> acc;
  acc.resize(std::max<size_t>(acc.size(), 2 * size));
  for (int64_t panel = first; panel < last; ++panel) {
    const int64_t at = panel * p.depth * kColumns;
    MultiplyRows(p, p.w + at, acc.data());
    if (p.up) MultiplyRows(p, p.up + at, acc.data() + size), Gate(acc.data() + size, size, acc.data());
    for (int64_t row = 0; row < p.rows; ++row) p.Put(row, panel * kColumns, acc.data() + row * kColumns, kColumns);
  }
}

// x [T, depth] with w [panels, ..] or each of [parts, panels, ..], of whose rows `used` [1] count; zeros follow. An out
// without parts of a w with two has silu of the first product times the second.
template <typename T>
void Multiply(const XLA_FFI_CallFrame* frame) {
  XLA_FFI_Buffer x = Argument(frame, 0), w = Argument(frame, 1), out = Result(frame, 0);
  int64_t parts = out.rank == 3 ? out.dims[0] : 1, all = x.dims[0];
  Product<T> p{static_cast<const T*>(x.data), static_cast<const T*>(w.data), nullptr, out.data};
  p.wide_out = out.dtype == XLA_FFI_DataType_F32;
  p.depth = x.dims[1], p.columns = out.dims[out.rank - 1];
  p.rows = std::clamp<int64_t>(*Ints(frame, 2), 0, all);
  if (out.rank == 2 && w.rank > kAxes<T>) p.up = p.w + p.depth * p.columns;
  const int64_t panels = p.columns / kWidth<T>, line = p.columns * (p.wide_out ? 4 : 2);
  for (int64_t part = 0; part < parts; ++part)
    std::memset(static_cast<char*>(out.data) + (part * all + p.rows) * line, 0, (all - p.rows) * line);
  if (p.rows == 0) return;
  Threads threads{frame};
  const int64_t wanted = kTasks * threads.Count();
  const int64_t size = std::clamp<int64_t>(parts * panels / wanted, 1, kMostPanels), tasks = (panels + size - 1) / size;
  ParallelFor(threads, parts * tasks, [&](int64_t task) {
    Product<T> part = p;
    part.w += task / tasks * p.depth * p.columns;
    part.out = static_cast<char*>(p.out) + task / tasks * all * line;
    int64_t first = task % tasks * size;
    RunPanels(part, first, std::min(first + size, panels));
  });
}

const char* Call(const XLA_FFI_CallFrame* frame) {
  if (frame->args.size != 3 || frame->rets.size != 1) return "wrong number of arrays";
  XLA_FFI_DataType type = Argument(frame, 0).dtype;
  if (Argument(frame, 1).dtype != type) return "rows and matrices must have one type";
  if (type != XLA_FFI_DataType_F32 && type != XLA_FFI_DataType_BF16) return "rows must be float32 or bfloat16";
  (type == XLA_FFI_DataType_F32 ? Multiply<float> : Multiply<BFloat16>)(frame);
  return nullptr;
}

}  // namespace

// Whether this process may use tiles, which it asks for.
extern "C" int JaxserveRequestTiles() { return RequestTiles(); }

extern "C" XLA_FFI_Error* JaxservePackedProduct(XLA_FFI_CallFrame* frame) { return Answer(frame, Call); }
