"""Shared parts of the prefill kernel: static parameters, operands, scratch, and the keys of a tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import wgmma
from pallas_kernels.mosaic_gpu import compat

NUM_COMPUTE = 2  # warpgroups with queries; one more moves memory
ROWS = wgmma.ROWS  # query rows of each
TILE_ROWS = NUM_COMPUTE * ROWS
MAX_PANEL = 128  # Pallas finds no layout for wider copies of shared memory that is not swizzled
MAX_OVERLAPPED = 192  # elements of a stored head
PIECE = 64  # keys, and columns, that the memory warpgroup holds in registers at a time


@dataclass(frozen=True)
class Static:
    """The static parameters of the kernel."""

    tile_tokens: int  # queries of a tile
    group_size: int  # query heads of a KV head (G)
    num_kv_heads: int  # K
    page_size: int
    width: int  # elements of a stored head (H)
    keys: int  # per key tile
    stages: int  # key tiles in the ring
    raw_stages: int  # 8-bit key tiles in the ring before it; 0 if pages have the dtype of q
    registers: tuple[int, int]  # per thread of a compute warpgroup and of the memory warpgroup
    dtype: str  # that of q, and of keys and values in the ring
    page_dtype: str
    window: int | None
    softcap: float | None
    has_sinks: bool
    splits: bool  # whether a tile may have several units, which leave partial answers
    num_blocks: int | None  # blocks that go from unit to unit; None: a block attends one unit
    interpret: bool
    causal: bool = True  # else all queries of a tile see what one at its position does

    @property
    def origin(self) -> int:
        """The column with the position of a tile's first token that is read."""
        return ORIGIN if self.causal else POSITION

    @property
    def box(self) -> int:
        """Tokens of one TMA copy: a page, or as much of it as fits a key tile."""
        return min(self.page_size, self.keys)

    @property
    def boxes(self) -> int:
        """Copies that fill a key tile."""
        return self.keys // self.box

    @property
    def panel(self) -> int:
        """Columns of one copy out of shared memory that is not swizzled."""
        return self.width if self.width <= MAX_PANEL else self.width // 2

    @property
    def overlaps(self) -> bool:
        """Whether the scores of a key tile are made while the values of the one before are mixed: heads of 256 have no
        registers for both."""
        return self.width <= MAX_OVERLAPPED

    @property
    def is_narrow(self) -> bool:
        return self.raw_stages > 0


# Columns of a unit: a tile of queries, and the key tiles [BEGIN, END) of its row, all that the queries see or a run of
# them. A whole tile of tokens is read, never past the step's last one. `COUNT` of them are its queries, the first at
# `POSITION` of the row's text; the first token that is read would be at `ORIGIN`. `SLOT` is the place of the unit's
# partial answers, WHOLE if it has none, because it is its tile's only one.
ROW, FIRST, COUNT, POSITION, ORIGIN, BEGIN, END, SLOT = range(8)
UNIT_COLUMNS = 8  # 32 bytes: a unit is read in one transaction
WHOLE = -1
# A join, a tile of several units, has the columns of the first one, but their number in place of the row.
NUM_UNITS = ROW


class Operands(NamedTuple):
    """Device memory."""

    q: jax.Ref  # [T, N, H]
    kv_pages: jax.Ref  # [num_pages, 2K, page_size, H]
    page_table: jax.Ref  # [S, M] i32
    page_offset: jax.Ref  # [1] i32
    units: jax.Ref  # [n, UNIT_COLUMNS] i32
    scales: jax.Ref  # [K] f32, factors of raw scores; they include log2(e) unless scores are capped
    sinks: jax.Ref | None  # [K, TILE_ROWS] f32, in base 2, in the order of a tile's rows
    out: jax.Ref  # [T, N, H]
    partials: jax.Ref | None = None  # [W, K * TILE_ROWS, H] f32, answers of units, if tiles are split
    logs: jax.Ref | None = None  # [W, K * TILE_ROWS] f32, base-2 logarithms of the sums of their weights


class Scratch(NamedTuple):
    """Shared memory and barriers of a block."""

    q: jax.Ref  # [TILE_ROWS, H], row g * tile_tokens + j is token j of the tile, of the group's head g; then answers
    plain: jax.Ref  # [NUM_COMPUTE, panels, ROWS, panel], answers of a cut tile, not swizzled; in q's memory, where the
    # rows of a warpgroup have the same bytes
    partial: jax.Ref | None  # [NUM_COMPUTE, ROWS, H / 2] f32, half of the columns of a unit's answers; there too
    logs: jax.Ref | None  # [NUM_COMPUTE, ROWS] f32
    k: jax.Ref  # [stages, keys, H]
    v: jax.Ref  # [stages, keys, H]
    raw_k: jax.Ref | None  # [raw_stages, keys, H]
    raw_v: jax.Ref | None
    numbers: jax.Ref | None  # [keys] i32, 0 to keys - 1; None if a block has one unit
    q_full: jax.Ref
    q_free: jax.Ref | None  # both compute warpgroups have written their answers; likewise
    k_full: jax.Ref
    v_full: jax.Ref
    k_free: jax.Ref  # both compute warpgroups have read the slot
    v_free: jax.Ref
    v_edge: jax.Ref | None  # values of the first and the last key tile have arrived and are to be cleaned
    raw_k_full: jax.Ref | None
    raw_v_full: jax.Ref | None
    turn: jax.Ref  # it is a compute warpgroup's turn to begin products: the other one has begun its own


class Span(NamedTuple):
    """The keys of a unit, scalars: [begin, end), in key tiles [first, last), without masks in [inner, outer)."""

    origin: jax.Array  # position of the first token that is read, as if it were of the same row
    begin: jax.Array
    end: jax.Array
    first: jax.Array
    inner: jax.Array
    outer: jax.Array
    last: jax.Array
    is_last: jax.Array  # bool, whether the unit is its tile's last one

    @property
    def steps(self) -> jax.Array:
        return self.last - self.first


def list_scratch(static: Static) -> dict[str, object]:
    """Scratch types by the names in `Scratch`."""
    ring = (static.stages, static.keys, static.width)
    queries = [
        compat.tile_smem((TILE_ROWS, static.width), static.dtype),
        compat.SMEM((NUM_COMPUTE, static.width // static.panel, ROWS, static.panel), static.dtype),
    ]
    if static.splits:
        queries.append(compat.tile_smem((NUM_COMPUTE, ROWS, static.width // 2), jnp.float32))
    tiles = {
        "q_then_answers": compat.SmemUnion(*queries),
        "k": compat.tile_smem(ring, static.dtype),
        "v": compat.tile_smem(ring, static.dtype),
    }
    barriers = {
        "q_full": compat.Barrier(num_arrivals=static.group_size),
        "k_free": compat.Barrier(num_arrivals=NUM_COMPUTE, num_barriers=static.stages),
        "v_free": compat.Barrier(num_arrivals=NUM_COMPUTE, num_barriers=static.stages),
        "turn": compat.Barrier(num_barriers=NUM_COMPUTE),
    }
    arrivals = 1 if static.is_narrow else static.boxes
    barriers["k_full"] = compat.Barrier(num_arrivals=arrivals, num_barriers=static.stages)
    barriers["v_full"] = compat.Barrier(num_arrivals=arrivals, num_barriers=static.stages)
    if static.is_narrow:
        raw = (static.raw_stages, static.keys, static.width)
        for name in ("raw_k", "raw_v"):
            tiles[name] = compat.tile_smem(raw, static.page_dtype, PIECE)  # a slice of columns is of whole swizzles
            barriers[f"{name}_full"] = compat.Barrier(num_arrivals=static.boxes, num_barriers=static.raw_stages)
    else:
        barriers["v_edge"] = compat.Barrier(num_arrivals=static.boxes, num_barriers=2)
    if static.num_blocks is not None:
        barriers["q_free"] = compat.Barrier(num_arrivals=NUM_COMPUTE)
        tiles["numbers"] = compat.SMEM((static.keys,), jnp.int32)
    if static.splits:
        tiles["logs"] = compat.SMEM((NUM_COMPUTE, ROWS), jnp.float32)
    return tiles | barriers


def count_bytes(static: Static) -> int:
    """Shared memory of the tiles."""
    ring = (2 * static.stages, static.keys, static.width)
    raw = (2 * static.raw_stages, static.keys, static.width)
    queries, logs = (TILE_ROWS, static.width), (NUM_COMPUTE if static.splits else 0, ROWS)
    numbers = (0 if static.num_blocks is None else static.keys,)
    return compat.smem_bytes(
        *((queries, static.dtype), (ring, static.dtype), (raw, static.page_dtype)),
        *((logs, jnp.float32), (numbers, jnp.int32)),
    )


def find_span(static: Static, operands: Operands, unit: jax.Array) -> Span:
    """The keys of the unit that some query of its tile sees; key tiles that all queries see whole need no mask."""
    keys, window = static.keys, static.window
    columns = COUNT, POSITION, ORIGIN, BEGIN, END
    count, position, origin, first, last = (operands.units[unit, column] for column in columns)
    if not static.causal:
        count = 1
    end = position + count
    outer = lax.div(position + 1, keys)
    if window is None:
        begin, inner = first * keys, first
    else:
        begin = jnp.maximum(position - window + 1, 0)
        # The last query's window begins at end - window, the latest of all.
        inner = jnp.minimum(lax.div(jnp.maximum(end - window, 0) + keys - 1, keys), last)
    is_last = end <= last * keys
    if static.splits:
        begin, end = jnp.maximum(begin, first * keys), jnp.minimum(end, last * keys)
        inner, outer = jnp.maximum(inner, first), jnp.clip(outer, first, last)
    return Span(origin, begin, end, first, inner, jnp.maximum(outer, inner), last, is_last)
