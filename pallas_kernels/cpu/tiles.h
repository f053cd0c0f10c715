// Tiles of 16 rows of 64 bytes, and their product of bfloat16: AMX, or an emulation where the processor has none.
//
// A thread configures its tiles, uses them and releases them. Numbers of tiles are constants, as they are in
// instructions. The emulation is slow: it is there so that tests of what uses tiles run everywhere.

#pragma once

#include <cstdint>
#include <cstring>

#include "vectors.h"

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jaxserve {

constexpr int kTileRows = 16;
constexpr int64_t kTileBytes = 64;  // of a row

// Rows of each tile, at most kTileRows.
struct TileShapes {
  uint8_t rows[8];
};

#ifdef __AMX_BF16__

// Asks the kernel for the use of tiles in this process; false: it refuses.
inline bool RequestTiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Instructions as they are: GCC's functions take no constants of templates, and GCC 12's read memory behind its back.
inline void ConfigureTiles(const TileShapes& shapes) {
  struct {
    alignas(64) uint8_t bytes[64];
  } config{{1}};  // the palette
  for (int tile = 0; tile < 8; ++tile) {
    config.bytes[16 + 2 * tile] = kTileBytes;
    config.bytes[48 + tile] = shapes.rows[tile];
  }
  asm volatile("ldtilecfg %0" ::"m"(config));
}
template <int tile>
inline void LoadTile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
inline void StoreTile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
inline void ZeroTile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}
template <int sums, int left, int right>
inline void MultiplyTiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(left), "i"(right));
}
inline void ReleaseTiles() { asm volatile("tilerelease"); }

#else

inline bool RequestTiles() { return false; }

struct EmulatedTiles {
  alignas(64) uint8_t bytes[8][kTileRows][kTileBytes];
  TileShapes shapes;
};
inline thread_local EmulatedTiles emulated_tiles;

inline void ConfigureTiles(const TileShapes& shapes) {
  std::memset(&emulated_tiles, 0, sizeof(emulated_tiles));
  emulated_tiles.shapes = shapes;
}
template <int tile>
inline void LoadTile(const void* from, int64_t stride) {
  std::memset(emulated_tiles.bytes[tile], 0, sizeof(emulated_tiles.bytes[tile]));
  for (int row = 0; row < emulated_tiles.shapes.rows[tile]; ++row)
    std::memcpy(emulated_tiles.bytes[tile][row], static_cast<const char*>(from) + row * stride, kTileBytes);
}
template <int tile>
inline void StoreTile(void* to, int64_t stride) {
  for (int row = 0; row < emulated_tiles.shapes.rows[tile]; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, emulated_tiles.bytes[tile][row], kTileBytes);
}
template <int tile>
inline void ZeroTile() {
  std::memset(emulated_tiles.bytes[tile], 0, sizeof(emulated_tiles.bytes[tile]));
}
template <int sums, int left, int right>
inline void MultiplyTiles() {  // rows of `right` are pairs of rows of a matrix, column by column
  auto& tiles = emulated_tiles;
  for (int row = 0; row < tiles.shapes.rows[sums]; ++row) {
    float line[kTileRows], found[kTileRows] = {};
    const auto* x = reinterpret_cast<const BFloat16*>(tiles.bytes[left][row]);
    for (int k = 0; k < 2 * tiles.shapes.rows[right]; ++k) {
      const auto* w = reinterpret_cast<const BFloat16*>(tiles.bytes[right][k / 2]);
      for (int n = 0; n < kTileRows; ++n) found[n] += ToFloat(x[k]) * ToFloat(w[2 * n + k % 2]);
    }
    std::memcpy(line, tiles.bytes[sums][row], sizeof(line));
    for (int n = 0; n < kTileRows; ++n) line[n] += found[n];
    std::memcpy(tiles.bytes[sums][row], line, sizeof(line));
  }
}
inline void ReleaseTiles() {}

#endif

}  // namespace jaxserve
