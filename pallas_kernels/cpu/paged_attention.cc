// Paged attention on CPUs: writes a step's keys and values, then attends, in place in the pages.
//
// Online softmax (Milakov and Gimelshein, 2018) over one page at a time. Work is (tile of queries, KV head). A tile of
// few queries, as decoding has, multiplies keys as they lie and is bound by memory. Larger tiles hold their queries and
// sums transposed, a lane for each query: then no sum runs across lanes, and both products are the same small matrix
// product. With tiles in the processor they multiply bfloat16 there. Keys that no query of a tile sees are not read.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#include <vector>

#include "attention_tiles.h"
#include "call.h"
#include "vectors.h"

namespace {

using namespace jaxserve;

constexpr int kKeys = 64;          // most keys of a page that are attended together
constexpr int kFewQueries = 8;     // up to here a tile's queries are attended as rows
constexpr float kMasked = -1e30f;  // finite, so that a query without a key stays finite
#ifdef __AVX512F__
constexpr int kColumns = 4;  // vectors of queries in registers, beside four keys or channels
#else
constexpr int kColumns = 2;
#endif

inline Vec Cap(Vec scores, float softcap) {  // softcap * tanh(scores / softcap)
  Vec x = scores * (2.0f / softcap);
  Vec size = x < 0.0f ? x : -x;
  Vec e = Exp(size);
  Vec tanh = (1.0f - e) / (1.0f + e);
  return softcap * (x < 0.0f ? -tanh : tanh);
}

struct Problem {
  const void *q, *k, *v;  // [T, N, H], [T, K, H] twice
  void *out, *pages;      // [T, N, V], [pages, rows, page_size, H]
  bool wide_q;            // whether q, k, v and out are float32
  const int32_t *table, *write_pages, *write_offsets;
  const int32_t *rows, *starts, *counts, *positions, *ends;  // of the tiles
  const int32_t* last_keys;  // [T], that each query sees, ascending in a row, and at least its own; or null: its own
  const float* sinks;        // [N], or null
  int64_t num_tokens, num_heads, num_kv_heads, head_dim, value_dim, page_size, page_rows, table_width;
  int64_t page_offset, window;  // the most keys that a query sees, up to its last; 0: all
  int64_t step;                 // of the last key seen, from one query to the next: 1, or 0 if all see the whole row
  float scale, softcap;         // softcap 0: none
  bool in_tiles;                // whether tiles of many queries are multiplied in the processor's tiles

  int64_t group() const { return num_heads / num_kv_heads; }
};

// Where the queries of one tile and KV head are, and the keys that they see.
struct Tile {
  int64_t row, start, count, position, head;  // position: the last key of the first query, perhaps behind the row's end
  int64_t begin, end;  // of keys: from the first that one query sees to the last
};

void LoadQuery(const Problem& p, int64_t token, int64_t head, float* to) {
  int64_t at = (token * p.num_heads + head) * p.head_dim;
  for (int64_t i = 0; i < p.head_dim; i += kLanes) {
    Vec x = p.wide_q ? Load(static_cast<const float*>(p.q) + at + i) : Load(static_cast<const BFloat16*>(p.q) + at + i);
    Store(to + i, x * p.scale);
  }
}

void StoreAnswer(const Problem& p, int64_t token, int64_t head, const float* sums, float total) {
  int64_t at = (token * p.num_heads + head) * p.value_dim;
  float factor = 1.0f / std::max(total, 1e-30f);
  for (int64_t i = 0; i < p.value_dim; i += kLanes) {
    Vec x = Load(sums + i) * factor;
    if (p.wide_q)
      Store(static_cast<float*>(p.out) + at + i, x);
    else
      Store(static_cast<BFloat16*>(p.out) + at + i, x);
  }
}

template <typename T>
const T* FindPage(const Problem& p, const Tile& tile, int64_t page) {
  int64_t id = p.table[tile.row * p.table_width + page] + p.page_offset;
  int64_t rows_per_head = p.page_rows / p.num_kv_heads;
  return static_cast<const T*>(p.pages) + (id * p.page_rows + tile.head * rows_per_head) * p.page_size * p.head_dim;
}

// A run of at most kKeys keys in one page. Its successor is `ahead` numbers away, for keys and values alike.
template <typename T>
struct Run {
  const T *keys, *values;
  int64_t first, count, ahead;
};

// Calls f(run) for each run of the keys of a tile, in order.
template <typename T, typename F>
void ForEachRun(const Problem& p, const Tile& tile, F&& f) {
  int64_t to_values = p.page_rows > p.num_kv_heads ? p.page_size * p.head_dim : 0;  // a latent is key and value
  auto find = [&](int64_t at) { return FindPage<T>(p, tile, at / p.page_size) + at % p.page_size * p.head_dim; };
  const T* keys = find(tile.begin);
  for (int64_t at = tile.begin; at < tile.end;) {
    int64_t count = std::min({p.page_size - at % p.page_size, tile.end - at, int64_t{kKeys}});
    const T* next = at + count < tile.end ? find(at + count) : keys;
    f(Run<T>{keys, keys + to_values, at, count, next - keys});
    at += count;
    keys = next;
  }
}

// sums[g] = sums[g] * shrink[g] + the run's values by their weights[g], for G queries.
template <int G, typename T>
void MixRows(const Run<T>& keys, const float* weights, const float* shrink, int64_t dim, int64_t stride, float* sums) {
  constexpr int S = G > 2 ? 2 : 4;  // vectors of channels in registers
  int64_t c = 0;
  auto run = [&]<int W>() {
    Vec acc[G][W];
    for (int g = 0; g < G; ++g)
      for (int s = 0; s < W; ++s) acc[g][s] = Load(sums + g * dim + c + s * kLanes) * shrink[g];
    for (int64_t e = 0; e < keys.count; ++e) {
      const T* value = keys.values + e * stride + c;
      Prefetch(value + keys.ahead, W * kLanes);
      for (int s = 0; s < W; ++s) {
        Vec x = Load(value + s * kLanes);
        for (int g = 0; g < G; ++g) acc[g][s] += x * weights[g * kKeys + e];
      }
    }
    for (int g = 0; g < G; ++g)
      for (int s = 0; s < W; ++s) Store(sums + g * dim + c + s * kLanes, acc[g][s]);
    c += W * kLanes;
  };
  while (c + S * kLanes <= dim) run.template operator()<S>();
  while (c < dim) run.template operator()<1>();
}

template <int G, typename T>
void ScoreRows(const Run<T>& keys, const float* q, int64_t dim, float* scores) {
  constexpr int E = G > 2 ? 4 : 8;  // keys in registers
  auto run = [&]<int W>(int64_t e) {
    Vec acc[G][W] = {};
    const T* rows = keys.keys + e * dim;
    Prefetch(rows + keys.ahead, W * dim);
    for (int64_t c = 0; c < dim; c += kLanes)
      for (int i = 0; i < W; ++i) {
        Vec key = Load(rows + i * dim + c);
        for (int g = 0; g < G; ++g) acc[g][i] += key * Load(q + g * dim + c);
      }
    for (int g = 0; g < G; ++g) SumEach(acc[g], scores + g * kKeys + e);
  };
  int64_t e = 0;
  for (; e + E <= keys.count; e += E) run.template operator()<E>(e);
  for (; e + 4 <= keys.count; e += 4) run.template operator()<4>(e);
  for (; e < keys.count; ++e) run.template operator()<1>(e);
}

// One token, G of the query heads of its KV head, the first of them `first`.
template <int G, typename T>
void AttendRow(const Problem& p, const Tile& tile, int64_t first, float* scratch) {
  float *q = scratch, *sums = q + G * p.head_dim, *scores = sums + G * p.value_dim;  // scores [G, kKeys]
  float largest[G], total[G], shrink[G];
  for (int g = 0; g < G; ++g) {
    LoadQuery(p, tile.start, first + g, q + g * p.head_dim);
    largest[g] = p.sinks ? p.sinks[first + g] : kMasked;
    total[g] = p.sinks ? 1.0f : 0.0f;
  }
  std::fill(sums, sums + G * p.value_dim, 0.0f);
  ForEachRun<T>(p, tile, [&](const Run<T>& keys) {
    int64_t count = keys.count;
    ScoreRows<G>(keys, q, p.head_dim, scores);
    for (int g = 0; g < G; ++g) {
      float* line = scores + g * kKeys;
      for (int64_t e = 0; p.softcap && e < count; e += kLanes) Store(line + e, Cap(Load(line + e), p.softcap));
      for (int64_t e = count; e % kLanes; ++e) line[e] = kMasked;
      Vec most = Fill(largest[g]);
      for (int64_t e = 0; e < count; e += kLanes) most = Max(Load(line + e), most);
      float now = most[0];
      for (int i = 1; i < kLanes; ++i) now = std::max(now, most[i]);
      Vec sum = {};
      for (int64_t e = 0; e < count; e += kLanes) {
        Vec weight = Exp(Load(line + e) - now);
        Store(line + e, weight);
        sum += weight;
      }
      shrink[g] = Exp(Fill(largest[g] - now))[0];
      total[g] = total[g] * shrink[g] + Sum(sum);
      largest[g] = now;
    }
    MixRows<G>(keys, scores, shrink, p.value_dim, p.head_dim, sums);
  });
  for (int g = 0; g < G; ++g) StoreAnswer(p, tile.start, first + g, sums + g * p.value_dim, total[g]);
}

template <typename T>
void AttendRows(const Problem& p, const Tile& tile, float* scratch) {
  int64_t head = tile.head * p.group(), end = head + p.group();
  for (; head + 4 <= end; head += 4) AttendRow<4, T>(p, tile, head, scratch);
  for (; head + 2 <= end; head += 2) AttendRow<2, T>(p, tile, head, scratch);
  for (; head < end; ++head) AttendRow<1, T>(p, tile, head, scratch);
}

// c[i][m] = c[i][m] * shrink[m] + sum over j of a[i * ai + j * aj] * b[j][m], for `rows` i and `width` m, a multiple
// of kLanes. Without `shrink`, c is new.
void Multiply(const float* a, int64_t ai, int64_t aj, const float* b, const float* shrink, int64_t rows, int64_t depth,
              int64_t width, float* c) {
  auto run = [&]<int I, int J>(int64_t i, int64_t m) {
    Vec acc[I][J];
    for (int x = 0; x < I; ++x)
      for (int y = 0; y < J; ++y) {
        int64_t at = m + y * kLanes;
        acc[x][y] = shrink ? Load(c + (i + x) * width + at) * Load(shrink + at) : Vec{};
      }
    for (int64_t j = 0; j < depth; ++j) {
      Vec right[J];
      for (int y = 0; y < J; ++y) right[y] = Load(b + j * width + m + y * kLanes);
      for (int x = 0; x < I; ++x) {
        float left = a[(i + x) * ai + j * aj];
        for (int y = 0; y < J; ++y) acc[x][y] += left * right[y];
      }
    }
    for (int x = 0; x < I; ++x)
      for (int y = 0; y < J; ++y) Store(c + (i + x) * width + m + y * kLanes, acc[x][y]);
  };
  int64_t m = 0;
  auto run_columns = [&]<int J>() {
    constexpr int I = J > 1 ? 4 : 8;
    int64_t i = 0;
    for (; i + I <= rows; i += I) run.template operator()<I, J>(i, m);
    for (; i < rows; ++i) run.template operator()<1, J>(i, m);
    m += J * kLanes;
  };
  while (m + kColumns * kLanes <= width) run_columns.template operator()<kColumns>();
  while (m < width) run_columns.template operator()<1>();
}

inline const float* Widen(const float* rows, int64_t, int64_t, int64_t, float*) { return rows; }
inline const float* Widen(const BFloat16* rows, int64_t count, int64_t dim, int64_t stride, float* to) {
  for (int64_t e = 0; e < count; ++e)
    for (int64_t c = 0; c < dim; c += kLanes) Store(to + e * stride + c, Load(rows + e * stride + c));
  return to;
}

// All queries of a tile and KV head: lane m is query head m % group of token m / group. With `in_tiles`, queries and
// weights are multiplied as bfloat16.
template <typename T, bool in_tiles>
void AttendTile(const Problem& p, const Tile& tile, int64_t width, float* scratch) {
  int64_t group = p.group(), used = tile.count * group;
  float *q = scratch, *sums = q + p.head_dim * width, *scores = sums + p.value_dim * width;
  float *largest = scores + kKeys * width, *total = largest + width, *shrink = total + width, *ends = shrink + width;
  float *seen = ends + width, *line = seen + width, *wide_keys = line + std::max(p.head_dim, p.value_dim);
  float *wide_values = wide_keys + kKeys * p.head_dim, *narrow_weights = wide_values + kKeys * p.value_dim;
  auto *pairs = reinterpret_cast<uint32_t*>(q), *weights = reinterpret_cast<uint32_t*>(narrow_weights);
  std::fill(q, scores, 0.0f);
  if constexpr (in_tiles) ConfigureTiles({{16, 16, 16, 16, 16, 16, 16, 16}});
  for (int64_t m = 0; m < width; ++m) {
    int64_t token = std::min(m / group, tile.count - 1), head = tile.head * group + m % group;
    largest[m] = p.sinks ? p.sinks[head] : kMasked;
    total[m] = p.sinks ? 1.0f : 0.0f;
    ends[m] = static_cast<float>(tile.position + token * p.step);  // where its window ends; exact up to 2^24
    seen[m] = p.last_keys ? static_cast<float>(p.last_keys[tile.start + token]) : ends[m];
    if (m >= used) continue;
    if constexpr (in_tiles) {
      int64_t at = ((tile.start + token) * p.num_heads + head) * p.head_dim;
      PackQuery(static_cast<const BFloat16*>(p.q) + at, p.head_dim, m, pairs);
      continue;
    }
    LoadQuery(p, tile.start + token, head, line);
    for (int64_t c = 0; c < p.head_dim; ++c) q[c * width + m] = line[c];
  }
  ForEachRun<T>(p, tile, [&](const Run<T>& keys) {
    int64_t first = keys.first, count = keys.count;
    const float* wide = nullptr;
    if constexpr (in_tiles) {  // perhaps with keys behind the last, which are in the page, too
      MultiplyInTiles<false>(keys.keys, p.head_dim, pairs, RoundUp(count, kTileRows), p.head_dim, width, scores);
    } else {
      wide = Widen(keys.keys, count, p.head_dim, p.head_dim, wide_keys);
      Multiply(wide, p.head_dim, 1, q, nullptr, count, p.head_dim, width, scores);
    }
    bool is_cut = first + count - 1 > tile.position ||  // some query does not see all of these keys
                  (p.window && first <= tile.position + tile.count - 1 - p.window);
    for (int64_t m = 0; m < width; m += kLanes) {
      Vec before = Load(largest + m), most = before, end = Load(ends + m), last = Load(seen + m), sum = {};
      for (int64_t e = 0; e < count; ++e) {
        Vec x = Load(scores + e * width + m);
        if (in_tiles) x *= p.scale;
        if (p.softcap) x = Cap(x, p.softcap);
        if (is_cut) {
          float key = static_cast<float>(first + e);
          x = last < key ? Fill(kMasked) : x;
          if (p.window) x = end - static_cast<float>(p.window) >= key ? Fill(kMasked) : x;
        }
        if (in_tiles || is_cut || p.softcap) Store(scores + e * width + m, x);
        most = Max(x, most);
      }
      for (int64_t e = 0; e < count; ++e) {
        Vec weight = Exp(Load(scores + e * width + m) - most);
        Store(scores + e * width + m, weight);
        sum += weight;
      }
      Vec factor = Exp(before - most);
      Store(total + m, Load(total + m) * factor + sum);
      Store(largest + m, most);
      Store(shrink + m, factor);
    }
    if constexpr (in_tiles) {
      auto* values = reinterpret_cast<BFloat16*>(wide_values);
      int64_t depth = RoundUp(count, kTileDepth);
      TransposeValues(keys.values, count, depth, p.value_dim, p.head_dim, values);
      PackWeights(scores, count, depth, width, weights);
      for (int64_t at = 0; at < p.value_dim * width; at += width)
        for (int64_t m = 0; m < width; m += kLanes) Store(sums + at + m, Load(sums + at + m) * Load(shrink + m));
      MultiplyInTiles<true>(values, depth, weights, p.value_dim, depth, width, sums);
      return;
    }
    if (keys.keys != keys.values)
      wide = Widen(keys.values, count, p.value_dim, p.head_dim, wide_values);
    Multiply(wide, 1, p.head_dim, scores, shrink, p.value_dim, count, width, sums);
  });
  if constexpr (in_tiles) ReleaseTiles();
  for (int64_t m = 0; m < used; ++m) {
    for (int64_t c = 0; c < p.value_dim; ++c) line[c] = sums[c * width + m];
    StoreAnswer(p, tile.start + m / group, tile.head * group + m % group, line, total[m]);
  }
}

int64_t TileWidth(const Problem& p, int64_t tile_tokens) {
  return RoundUp(tile_tokens * p.group(), p.in_tiles ? kTileRows : kLanes);
}

int64_t ScratchSize(const Problem& p, int64_t width) {
  int64_t dims = p.head_dim + p.value_dim;
  return (dims + kKeys + 6 + kKeys / 2) * std::max(width, int64_t{kLanes}) + 3 * dims + kKeys * dims;
}

template <typename T>
void Attend(const Problem& p, int64_t index, int64_t tile_tokens, float* scratch) {
  int64_t i = index / p.num_kv_heads;
  Tile tile{p.rows[i], p.starts[i], p.counts[i], p.positions[i], index % p.num_kv_heads, 0, 0};
  tile.begin = p.window ? std::max(int64_t{0}, tile.position - p.window + 1) : 0;
  tile.end = p.last_keys ? p.last_keys[tile.start + tile.count - 1] + 1 : p.ends[i];
  if (tile_tokens == 1 && p.group() <= kFewQueries)
    AttendRows<T>(p, tile, scratch);
  else if (!p.in_tiles)
    AttendTile<T, false>(p, tile, TileWidth(p, tile.count), scratch);
  else if constexpr (std::is_same_v<T, BFloat16>) {
    // Runs of keys begin where one of a whole page does, whatever the window is: their last tile is then in the page, too,
    // and weights are added in the same pairs.
    tile.begin -= tile.begin % p.page_size % kKeys;
    AttendTile<T, true>(p, tile, TileWidth(p, tile.count), scratch);
  }
}

// Writes the keys and values of one token; tokens of the null page are padding.
template <typename T, typename Q>
void WriteToken(const Problem& p, int64_t token) {
  if (p.write_pages[token] == 0) return;
  int64_t parts = p.page_rows / p.num_kv_heads;
  for (int64_t head = 0; head < p.num_kv_heads; ++head)
    for (int64_t part = 0; part < parts; ++part) {
      const Q* from = static_cast<const Q*>(part ? p.v : p.k) + (token * p.num_kv_heads + head) * p.head_dim;
      int64_t row = (p.write_pages[token] + p.page_offset) * p.page_rows + head * parts + part;
      T* to = static_cast<T*>(p.pages) + (row * p.page_size + p.write_offsets[token]) * p.head_dim;
      for (int64_t c = 0; c < p.head_dim; c += kLanes) Store(to + c, Load(from + c));
    }
}

constexpr int64_t kWriteTokens = 64;  // written by one task

// A list of tiles of at most `tile_tokens` queries each, the used ones first.
struct TileList {
  int64_t first, size, tile_tokens;
};

template <typename T>
void RunStep(const Threads& threads, const Problem& p, std::initializer_list<TileList> lists) {
  ParallelFor(threads, (p.num_tokens + kWriteTokens - 1) / kWriteTokens, [&](int64_t block) {
    int64_t end = std::min((block + 1) * kWriteTokens, p.num_tokens);
    for (int64_t token = block * kWriteTokens; token < end; ++token)
      p.wide_q ? WriteToken<T, float>(p, token) : WriteToken<T, BFloat16>(p, token);
  });
  std::vector<TileList> used;
  int64_t num_items = 0, size = 0, num_tokens = 0;
  for (TileList list : lists) {
    int64_t count = 0;
    for (; count < list.size && p.counts[list.first + count] > 0; ++count)
      num_tokens = std::max<int64_t>(num_tokens, p.starts[list.first + count] + p.counts[list.first + count]);
    used.push_back({list.first, count, list.tile_tokens});
    num_items += count * p.num_kv_heads;
    size = std::max(size, ScratchSize(p, TileWidth(p, list.tile_tokens)));
  }
  ParallelFor(threads, num_items, [&](int64_t item) {
    thread_local std::vector<float> scratch;
    if (static_cast<int64_t>(scratch.size()) < size) scratch.resize(size);
    for (const TileList& list : used) {
      int64_t count = list.size * p.num_kv_heads;
      if (item < count) return Attend<T>(p, list.first * p.num_kv_heads + item, list.tile_tokens, scratch.data());
      item -= count;
    }
  });
  int64_t line = p.num_heads * p.value_dim * (p.wide_q ? 4 : 2);  // padding gets zeros
  std::memset(static_cast<char*>(p.out) + num_tokens * line, 0, (p.num_tokens - num_tokens) * line);
}

const char* Call(const XLA_FFI_CallFrame* frame) {  // returns what is wrong, or null
  enum { kQ, kK, kV, kPages, kTable, kWrites, kTiles, kSizes, kFactors, kSinks, kLastKeys, kNumArgs };
  if (frame->args.size != kNumArgs || frame->rets.size != 2) return "wrong number of arrays";
  auto arg = [&](int i) { return Argument(frame, i); };
  auto ints = [&](int i) { return Ints(frame, i); };
  XLA_FFI_Buffer q = arg(kQ), k = arg(kK), pages = arg(kPages);
  for (XLA_FFI_Buffer buffer : {q, pages})
    if (buffer.dtype != XLA_FFI_DataType_F32 && buffer.dtype != XLA_FFI_DataType_BF16)
      return "queries and pages must be float32 or bfloat16";
  if (k.dtype != q.dtype || arg(kV).dtype != q.dtype) return "queries, keys and values must have one type";
  if (Result(frame, 1).data != pages.data) return "the pages must be written in place";

  Problem p{};
  p.q = q.data, p.k = k.data, p.v = arg(kV).data, p.out = Result(frame, 0).data, p.pages = pages.data;
  p.wide_q = q.dtype == XLA_FFI_DataType_F32;
  p.num_tokens = q.dims[0], p.num_heads = q.dims[1], p.head_dim = q.dims[2], p.num_kv_heads = k.dims[1];
  p.page_rows = pages.dims[1], p.page_size = pages.dims[2];
  p.table = ints(kTable), p.table_width = arg(kTable).dims[1];
  p.write_pages = ints(kWrites), p.write_offsets = p.write_pages + p.num_tokens;
  int64_t num_tiles = arg(kTiles).dims[1];
  p.rows = ints(kTiles), p.starts = p.rows + num_tiles, p.counts = p.starts + num_tiles;
  p.positions = p.counts + num_tiles, p.ends = p.positions + num_tiles;
  const int32_t* sizes = ints(kSizes);
  p.page_offset = sizes[0], p.window = sizes[1], p.value_dim = sizes[2], p.step = sizes[5];
  p.in_tiles = sizes[6];
  const float* factors = static_cast<const float*>(arg(kFactors).data);
  p.scale = factors[0], p.softcap = factors[1];
  p.sinks = arg(kSinks).dims[0] ? static_cast<const float*>(arg(kSinks).data) : nullptr;

  p.last_keys = arg(kLastKeys).dims[0] ? ints(kLastKeys) : nullptr;

  TileList singles{0, sizes[3], 1}, chunks{sizes[3], num_tiles - sizes[3], sizes[4]};
  auto run = pages.dtype == XLA_FFI_DataType_F32 ? RunStep<float> : RunStep<BFloat16>;
  run(Threads{frame}, p, {chunks, singles});
  return nullptr;
}

}  // namespace

extern "C" XLA_FFI_Error* JaxservePagedAttention(XLA_FFI_CallFrame* frame) { return Answer(frame, Call); }
