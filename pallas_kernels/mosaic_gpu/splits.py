"""The work list of decode: rows cut into runs of key tiles, once per step, shared by all layers.

A unit is a row and a run of its tiles; a block of the kernel attends one unit with one KV head. Long rows are cut into
several units, so that a few rows fill the device and a long one does not outlast the others (split keys, as in
Flash-Decoding, Dao et al. 2023). A combine kernel joins the units of a row. The number of unit slots W is static.

How rows are cut depends on all of them, save with `AttnShape.fixed_splits`: then units end at multiples of a fixed
number of keys of the row's own text. W must hold all rows at their longest, which are far more units than a step has.
So a few blocks share the list, and unused slots cost memory but no time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic_gpu.key_tiles import COUNT
from pallas_kernels.mosaic_gpu.packing import count_query_rows
from pallas_kernels.mosaic_gpu.shapes import round_up, stored_width
from pallas_kernels.spec import AttnShape
from pallas_kernels.worklist import StepRows

_GROWTH = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 64.0)  # split lengths tried, as shares of the shortest

QUERY_ROWS = 64  # rows of a block's products; G * Qp of them are used
FIXED_TOKENS = 1024  # keys of a fixed unit, a multiple of every kernel's tile; twice as many, or more, where
FIXED_BYTES = 2**27  # the partial answers of the longest rows would take more memory than this

# Columns of `SplitList.units`.
ROW, FIRST_TILE, NUM_TILES, LENGTH, NUM_QUERIES = range(5)
UNIT_COLUMNS = 8  # 32 bytes: a unit is read in one transaction


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SplitList:
    """Units: used ones first, those of a row next to each other and in the order of its text."""

    units: jax.Array  # [W, UNIT_COLUMNS] i32: row, first tile, tiles (0: unused), the row's tokens and queries
    row_first_unit: jax.Array  # [S] i32
    row_num_units: jax.Array  # [S] i32, 0 for a row outside the list
    tile_tokens: int = field(metadata={"static": True})
    max_queries: int = field(metadata={"static": True})  # Qp: most queries of a row, rounded up to a power of two
    # Blocks per KV head that share the units of a fixed list, whose partial answers are f32. None: one for each slot.
    num_blocks: int | None = field(metadata={"static": True}, default=None)


def count_unit_slots(num_rows: int, num_kv_heads: int, num_blocks: int) -> int:
    """W: one unit per row, and enough more for two waves of `num_blocks` blocks."""
    return num_rows + max(1, -(-2 * num_blocks // num_kv_heads))


class SplitTuning(Protocol):
    """The part of a kernel's tuning that concerns units."""

    @property
    def tile_tokens(self) -> int: ...
    @property
    def ctas_per_sm(self) -> int: ...
    @property
    def num_sms(self) -> int: ...
    @property
    def min_split_tokens(self) -> int: ...
    @property
    def unit_cost(self) -> int: ...


def plan_splits(
    rows: StepRows, query_lens: jax.Array, shape: AttnShape, config: SplitTuning, *, max_query_len: int
) -> SplitList:
    """Units of the rows with `query_lens` [S] > 0, which are at most `max_query_len`."""
    if rows.reach is None:  # all queries see what the last one does, as if it were alone
        query_lens = jnp.minimum(query_lens, 1)
    num_blocks, num_kv_heads = config.ctas_per_sm * config.num_sms, shape.spec.num_kv_heads
    if shape.fixed_splits:
        unit_tokens, num_slots = fix_units(rows, shape, max_query_len)
        return list_fixed_splits(
            query_lens,
            rows.seq_lens,
            num_slots=num_slots,
            num_blocks=min(num_slots, max(1, num_blocks // num_kv_heads)),
            tile_tokens=config.tile_tokens,
            unit_tokens=unit_tokens,
            max_queries=pad_queries(max_query_len),
            window=shape.window,
        )
    return list_splits(
        query_lens,
        rows.seq_lens,
        num_slots=count_unit_slots(query_lens.shape[0], num_kv_heads, num_blocks),
        num_kv_heads=num_kv_heads,
        num_blocks=num_blocks,
        tile_tokens=config.tile_tokens,
        min_split_tiles=-(-config.min_split_tokens // config.tile_tokens),
        unit_cost=config.unit_cost,
        max_queries=pad_queries(max_query_len),
        window=shape.window,
    )


def pad_queries(max_query_len: int) -> int:
    """Qp: `max_query_len` rounded up to a power of two."""
    return 1 << (max_query_len - 1).bit_length()


def fits(max_query_len: int, group_size: int) -> bool:
    """Whether a KV head's queries of a row, padded to a power of two, fit into a block's rows."""
    return group_size * pad_queries(max_query_len) <= QUERY_ROWS


def list_splits(
    query_lens: jax.Array,  # [S] i32, new tokens; 0 leaves a row out
    seq_lens: jax.Array,  # [S] i32, including the new tokens
    *,
    num_slots: int,  # W, more than S
    num_kv_heads: int,
    num_blocks: int,  # blocks that the device runs at once
    tile_tokens: int,
    min_split_tiles: int,
    unit_cost: int,  # in tiles, beyond the unit's own: the block's start, filling its ring, its part of the join
    max_queries: int,
    window: int | None,
) -> SplitList:
    """Cuts every row into units of nearly equal length, with the split length that promises the shortest launch.

    With n_i tiles in row i and a split length L, row i has ceil(n_i / L) units; sum(n_i) / (W - S) <= L keeps their
    sum within W. Tiles before the window, which no query of the row sees, are in no unit.
    """
    num_rows = query_lens.shape[0]
    firsts, ends = _find_tiles(query_lens, seq_lens, tile_tokens, window)
    num_tiles = ends - firsts  # [S]
    split = _choose_split(num_tiles, num_slots - num_rows, num_kv_heads, num_blocks, min_split_tiles, unit_cost)
    row_units = (num_tiles + split - 1) // split  # [S]
    rows, first_tiles, unit_tiles = cut_runs(num_tiles, row_units, num_slots)
    columns = [rows, firsts[rows] + first_tiles, unit_tiles, seq_lens[rows], query_lens[rows]]
    return _make_list(columns, row_units, tile_tokens, max_queries)


def fix_units(rows: StepRows, shape: AttnShape, max_query_len: int) -> tuple[int, int]:
    """Keys of a fixed unit, and W for the longest rows that the page table can hold: both by sizes of the engine."""
    num_rows = count_query_rows(shape.group_size, pad_queries(max_query_len))
    width = shape.spec.out_dim if shape.spec.is_latent else stored_width(shape)
    slot_bytes = round_up(shape.spec.num_kv_heads * num_rows, QUERY_ROWS) * width * 4
    span = rows.max_len if shape.window is None else min(rows.max_len, shape.window + max_query_len - 1)
    tokens = FIXED_TOKENS
    while True:  # a run of `span` keys may begin at any of a unit's
        row_units = min(-(-rows.max_len // tokens), (span - 2 + tokens) // tokens + 1)
        if tokens >= rows.max_len or rows.max_rows * row_units * slot_bytes <= FIXED_BYTES:
            return tokens, rows.max_rows * row_units
        tokens *= 2


def list_fixed_splits(
    query_lens: jax.Array,  # [S] i32, new tokens; 0 leaves a row out
    seq_lens: jax.Array,  # [S] i32, including the new tokens
    *,
    num_slots: int,  # W, no less than the units of any step
    num_blocks: int,
    tile_tokens: int,
    unit_tokens: int,
    max_queries: int,
    window: int | None,
) -> SplitList:
    """Cuts every row at the multiples of `unit_tokens` in its text, whatever the other rows are."""
    if unit_tokens % tile_tokens:
        raise ValueError(f"a fixed unit of {unit_tokens} keys must be a multiple of tile_tokens, got {tile_tokens}")
    length = unit_tokens // tile_tokens
    firsts, ends = _find_tiles(query_lens, seq_lens, tile_tokens, window)
    row_units = jnp.where(ends > firsts, (ends + length - 1) // length - firsts // length, 0)
    rows, index, is_unit = _place_units(row_units, num_slots)
    begins = (firsts // length)[rows] * length + index * length
    first_tiles = jnp.maximum(begins, firsts[rows])
    unit_tiles = jnp.where(is_unit, jnp.minimum(begins + length, ends[rows]) - first_tiles, 0)
    columns = [rows, first_tiles, unit_tiles, seq_lens[rows], query_lens[rows]]
    found = _make_list(columns, row_units, tile_tokens, max_queries)
    return replace(found, units=found.units.at[:, COUNT].set(jnp.sum(row_units)), num_blocks=num_blocks)


def _find_tiles(
    query_lens: jax.Array, seq_lens: jax.Array, tile_tokens: int, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """The first tile that a query of each row sees, and the one behind the last: [S] i32 both, 0 for unused rows."""
    used = query_lens > 0
    ends = jnp.where(used, (seq_lens + tile_tokens - 1) // tile_tokens, 0)
    if window is None:
        return jnp.zeros_like(ends), ends
    return jnp.where(used, jnp.maximum(seq_lens - query_lens - window + 1, 0) // tile_tokens, 0), ends


def _make_list(columns: list[jax.Array], row_units: jax.Array, tile_tokens: int, max_queries: int) -> SplitList:
    """The list of units with these first columns [W]."""
    is_unit = columns[NUM_TILES] > 0
    units = jnp.stack([jnp.where(is_unit, column, 0).astype(jnp.int32) for column in columns], axis=1)
    return SplitList(
        units=jnp.pad(units, ((0, 0), (0, UNIT_COLUMNS - len(columns)))),
        row_first_unit=(jnp.cumsum(row_units) - row_units).astype(jnp.int32),
        row_num_units=row_units.astype(jnp.int32),
        tile_tokens=tile_tokens,
        max_queries=max_queries,
    )


def cut_runs(num_tiles: jax.Array, num_units: jax.Array, num_slots: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cuts runs of `num_tiles` [S] into `num_units` [S] units, in order: the run of each slot, its unit's first tile in
    the run, and its tiles, [W] i32 each; no tiles in a slot without a unit."""
    runs, index, is_unit = _place_units(num_units, num_slots)
    # The first `longer` units of a run have one tile more than the others.
    parts = jnp.maximum(num_units, 1)[runs]
    shorter, longer = num_tiles[runs] // parts, num_tiles[runs] % parts
    firsts = index * shorter + jnp.minimum(index, longer)
    return runs, firsts.astype(jnp.int32), jnp.where(is_unit, shorter + (index < longer), 0).astype(jnp.int32)


def _place_units(num_units: jax.Array, num_slots: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The run of each slot, its unit's place among those of the run, and whether it has a unit: [W] each."""
    ends = jnp.cumsum(num_units)
    slots = jnp.arange(num_slots, dtype=jnp.int32)
    runs = jnp.sum(ends[None, :] <= slots[:, None], axis=1, dtype=jnp.int32)  # [W]; S for unused slots
    is_unit = runs < num_units.shape[0]
    runs = jnp.minimum(runs, num_units.shape[0] - 1)
    return runs, slots - (ends - num_units)[runs], is_unit


def _choose_split(
    num_tiles: jax.Array, spare_slots: int, num_kv_heads: int, num_blocks: int, min_split_tiles: int, unit_cost: int
) -> jax.Array:
    """The split length in tiles, the best of a few: [] i32."""
    shortest = jnp.maximum(min_split_tiles, (jnp.sum(num_tiles) + spare_slots - 1) // spare_slots)
    lengths = jnp.ceil(shortest * jnp.asarray(_GROWTH, jnp.float32)).astype(jnp.int32)  # [C]
    times = estimate_times(num_tiles, lengths, num_kv_heads, num_blocks, unit_cost)
    return lengths[jnp.argmin(times)]


def count_units(num_tiles: jax.Array, lengths: jax.Array) -> jax.Array:
    """Units of each run of tiles [S] at each split length [C]: [C, S]."""
    return (num_tiles[None, :] + lengths[:, None] - 1) // lengths[:, None]


def estimate_times(
    num_tiles: jax.Array, lengths: jax.Array, num_kv_heads: int, num_blocks: int, unit_cost: int
) -> jax.Array:
    """The time of a launch for runs of `num_tiles` [S] at split lengths [C], in tiles: [C] i32.

    A launch of equally long blocks takes whole waves of them. A launch of unequal ones takes at most the time of all
    tiles shared by the device, plus the longest block. The smaller of the two is the estimate (FlashInfer weighs waves
    against merging in the same way).
    """
    units = count_units(num_tiles, lengths)
    parts = jnp.maximum(units, 1)
    longest = jnp.max((num_tiles + parts - 1) // parts, axis=1) + unit_cost  # [C]
    blocks = num_kv_heads * jnp.sum(units, axis=1)
    waves = (blocks + num_blocks - 1) // num_blocks
    shared = (num_kv_heads * jnp.sum(num_tiles) + blocks * unit_cost) // num_blocks + longest
    return jnp.minimum(waves * longest, shared)
