"""The work list of the prefill kernel: tiles of queries, each with all the keys that it sees or cut along them.

A block attends one unit, a tile with a run of key tiles, with one KV head. Where the chunks of a bucket cannot fill the
device with a block per tile and head, tiles are cut into several units, as decode's rows are (`mosaic_gpu/splits.py`).
They leave partial answers in slots, which `prefill_join.py` joins. The number of slots is static, two waves of blocks.
A tile that has one unit all the same takes no slot and is answered at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.prefill_static import BEGIN, NUM_UNITS, SLOT, TILE_ROWS, WHOLE
from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.mosaic_gpu.shapes import round_up
from pallas_kernels.mosaic_gpu.splits import count_units, cut_runs, estimate_times
from pallas_kernels.spec import AttnShape
from pallas_kernels.worklist import StepRows, TileList, list_chunk_tiles

# Split lengths tried, as shares of the shortest. Tiles are few and equally long: just the right length fills the waves.
_GROWTH = tuple(1.06**step for step in range(56))


@dataclass(frozen=True)
class PrefillConfig:
    """Tuning of the prefill kernel. Its ring has `stages` key tiles of `keys` tokens; 8-bit pages pass through a ring
    of `raw_stages` tiles first. `registers` are per thread, of a compute warpgroup and of the memory warpgroup."""

    keys: int = 128
    stages: int = 2
    raw_stages: int = 0
    registers: tuple[int, int] = (224, 56)
    num_sms: int = 132  # blocks at once: one per SM
    min_split_tiles: int = 4  # key tiles of the shortest unit, unless its tile sees fewer
    unit_cost: int = 3  # estimated cost of a unit in key tiles, beyond its own: start, end, its part of the join
    persistent: bool = False  # a block per SM goes from unit to unit, where tiles are not split

    def __post_init__(self) -> None:
        if self.keys % 64 or not 64 <= self.keys <= 256:
            raise ValueError(f"PrefillConfig.keys must be 64, 128, 192 or 256, got {self.keys}")
        if self.stages < 2:  # the scores of a key tile are made while the values of the one before are mixed
            raise ValueError(f"PrefillConfig.stages must be at least 2, got {self.stages}")
        if self.raw_stages < 0:
            raise ValueError(f"PrefillConfig.raw_stages must be at least 0, got {self.raw_stages}")
        if any(count % 8 for count in self.registers):
            raise ValueError(f"PrefillConfig.registers must be multiples of 8, got {self.registers}")
        for name, least in (("num_sms", 1), ("min_split_tiles", 1), ("unit_cost", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"PrefillConfig.{name} must be at least {least}, got {getattr(self, name)}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChunkUnits:
    """Units and joins as the kernels read them, used ones first; `prefill_static.py` has their columns."""

    units: jax.Array  # [U, UNIT_COLUMNS] i32, those of a tile next to each other and in the order of its keys
    joins: jax.Array | None  # [J, UNIT_COLUMNS] i32, tiles of several units; None in a bucket that never splits
    num_slots: int = field(metadata={"static": True})  # W, of partial answers


def plan_tiles(rows: StepRows, query_lens: jax.Array, shape: AttnShape) -> TileList:
    """Tiles of the rows with `query_lens` [S] > 0, longest first: blocks start in this order, so none ends late."""
    return list_chunk_tiles(rows, query_lens, tile_tokens=count_tile_tokens(shape), unit=compat.SWIZZLE_ROWS)


def list_units(tiles: TileList, rows: StepRows, shape: AttnShape, config: PrefillConfig) -> ChunkUnits:
    """The tiles' units, in their order."""
    last = count_read_tokens(rows.num_tokens, shape) - tiles.tile_tokens
    firsts = jnp.minimum(tiles.starts // compat.SWIZZLE_ROWS * compat.SWIZZLE_ROWS, last)
    begins = jnp.zeros_like(firsts)
    if shape.window is not None:
        begins = jnp.maximum(tiles.positions - shape.window + 1, 0) // config.keys
    ends = (tiles.ends + config.keys - 1) // config.keys
    wholes = jnp.full_like(firsts, WHOLE)
    origins = tiles.positions - (tiles.starts - firsts)
    columns = tiles.rows, firsts, tiles.counts, tiles.positions, origins, begins, ends, wholes
    units = jnp.stack(columns, axis=1)
    if not splits_keys(rows, shape, config):
        return ChunkUnits(units, None, 0)
    return _split(units, jnp.where(tiles.counts > 0, ends - begins, 0), shape.spec.num_kv_heads, config)


def splits_keys(rows: StepRows, shape: AttnShape, config: PrefillConfig) -> bool:
    """Whether a bucket splits tiles: its chunk has too few of them where all other rows decode, as in a chat's turn.

    Fixed splits are for decode: a tile's units would depend on which queries are in it, and need a slot for each.
    """
    if shape.fixed_splits:
        return False
    chunk_tokens = rows.num_tokens - (rows.max_rows - 1)
    return -(-chunk_tokens // count_tile_tokens(shape)) * shape.spec.num_kv_heads < config.num_sms


def count_slots(num_kv_heads: int, config: PrefillConfig) -> int:
    """W: partial answers of two waves of blocks. A split tile takes two at least."""
    return max(2, -(-2 * config.num_sms // num_kv_heads))


def count_tile_tokens(shape: AttnShape) -> int:
    """Queries in a tile: a head's rows are whole rows of swizzled shared memory, so that one copy brings them."""
    return TILE_ROWS // shape.group_size // compat.SWIZZLE_ROWS * compat.SWIZZLE_ROWS


def count_read_tokens(num_tokens: int, shape: AttnShape) -> int:
    """T with the padding that the kernel needs: a whole tile is read, and copies between global memory and swizzled
    shared memory begin at multiples of its rows."""
    return max(count_tile_tokens(shape), round_up(num_tokens, compat.SWIZZLE_ROWS))


def _split(
    tiles: jax.Array,  # [n, UNIT_COLUMNS] i32
    num_tiles: jax.Array,  # [n] i32, key tiles; 0 for an unused tile
    num_kv_heads: int,
    config: PrefillConfig,
) -> ChunkUnits:
    """Cuts tiles along their keys. All split ones together have at most W units."""
    num_slots = count_slots(num_kv_heads, config)
    length = _choose_length(num_tiles, num_slots, num_kv_heads, config)
    num_units = (num_tiles + length - 1) // length  # [n]
    ids, firsts, lengths = cut_runs(num_tiles, num_units, tiles.shape[0] + num_slots)
    is_partial = (num_units[ids] > 1) & (lengths > 0)
    slots = jnp.where(is_partial, jnp.cumsum(is_partial, dtype=jnp.int32) - 1, WHOLE)
    begins = tiles[ids, BEGIN] + firsts
    keys = jnp.stack([begins, begins + lengths, slots], axis=1)  # BEGIN, END and SLOT
    units = jnp.where((lengths > 0)[:, None], jnp.concatenate([tiles[ids, :BEGIN], keys], axis=1), 0)

    taken = jnp.where(num_units > 1, num_units, 0)
    starts = jnp.cumsum(taken, dtype=jnp.int32) - taken
    joins = jnp.concatenate([taken[:, None], tiles[:, NUM_UNITS + 1 : SLOT], starts[:, None]], axis=1)
    split = jnp.cumsum(taken > 0, dtype=jnp.int32)  # split tiles up to and including each
    places = jnp.arange(num_slots // 2, dtype=jnp.int32)
    joined = jnp.sum(split[None, :] <= places[:, None], axis=1, dtype=jnp.int32)  # [J]; n for an unused join
    return ChunkUnits(units, joins.at[joined].get(mode="fill", fill_value=0), num_slots)


def _choose_length(num_tiles: jax.Array, num_slots: int, num_kv_heads: int, config: PrefillConfig) -> jax.Array:
    """The split length in key tiles, with the shortest launch by estimate among those that the slots hold: [] i32.

    The first of the lengths tried splits nothing, and is taken where no other promises more.
    """
    longest = jnp.maximum(jnp.max(num_tiles), 1)
    shortest = jnp.maximum(config.min_split_tiles, (jnp.sum(num_tiles) + num_slots - 1) // num_slots)
    grown = jnp.ceil(shortest * jnp.asarray(_GROWTH[::-1], jnp.float32)).astype(jnp.int32)
    lengths = jnp.concatenate([longest[None], grown])  # [C]
    units = count_units(num_tiles, lengths)
    taken = jnp.sum(jnp.where(units > 1, units, 0), axis=1)
    times = estimate_times(num_tiles, lengths, num_kv_heads, config.num_sms, config.unit_cost)
    return lengths[jnp.argmin(jnp.where(taken <= num_slots, times, jnp.iinfo(jnp.int32).max))]
