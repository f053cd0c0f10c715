"""A step cut into units: packed queries, and a run of key tiles of their row.

For kernels that attend all queries in blocks of at most 64 rows: rows with few queries are split along their keys
(`splits.py`), all others cut into tiles of queries, each over all the keys that it sees.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic_gpu import splits
from pallas_kernels.mosaic_gpu.key_tiles import COUNT
from pallas_kernels.mosaic_gpu.packing import count_tile_tokens
from pallas_kernels.mosaic_gpu.splits import SplitList, SplitTuning
from pallas_kernels.spec import AttnShape
from pallas_kernels.worklist import StepRows, TileList, list_chunk_tiles

# Columns of a unit as kernels read it.
QUERIES, ROW, FIRST_TILE, NUM_TILES, LENGTH, BEGIN = range(6)  # and in fixed lists COUNT
UNIT_COLUMNS = 8  # 32 bytes: a unit is read in one transaction


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UnitPlan:
    """Every query of the step is in a row of `few` or in a tile of `chunks`; None if the bucket has none of that kind.

    `few_units` and `chunk_units` [W, UNIT_COLUMNS] i32 are their units as the kernel reads them.
    """

    few: SplitList
    few_units: jax.Array
    chunks: TileList | None
    chunk_units: jax.Array | None
    config: Any = field(metadata={"static": True})  # the implementation's


def plan_units(
    rows: StepRows, shape: AttnShape, config: Any, *, tuning: SplitTuning, chunk_tile_tokens: int
) -> UnitPlan:
    """Splits of the rows with few queries by `tuning`, tiles of the others over tiles of `chunk_tile_tokens` keys."""
    longest = rows.max_query_len
    if longest is not None and splits.fits(longest, shape.group_size):
        few = splits.plan_splits(rows, rows.query_lens, shape, tuning, max_query_len=longest)
        return UnitPlan(few, _list_split_units(few), None, None, config)
    num_single, num_rows = rows.distribution[0], rows.query_lens.shape[0]
    few = splits.plan_splits(rows, rows.lens_between(0, num_single), shape, tuning, max_query_len=1)
    tile_tokens = count_tile_tokens(shape, splits.QUERY_ROWS)
    chunks = list_chunk_tiles(rows, rows.lens_between(num_single, num_rows), tile_tokens=tile_tokens)
    return UnitPlan(few, _list_split_units(few), chunks, _list_chunk_units(chunks, shape, chunk_tile_tokens), config)


def _list_split_units(few: SplitList) -> jax.Array:
    """The units of split rows: a row's packed queries have the index of the row."""
    row, length = few.units[:, splits.ROW], few.units[:, splits.LENGTH]
    begin = length - few.units[:, splits.NUM_QUERIES]
    units = _join_columns(row, row, few.units[:, splits.FIRST_TILE], few.units[:, splits.NUM_TILES], length, begin)
    return units.at[:, COUNT].set(few.units[:, COUNT])


def _list_chunk_units(chunks: TileList, shape: AttnShape, tile_tokens: int) -> jax.Array:
    """The units of tiles: one per tile, over all the keys that it sees, since enough tiles fill a device."""
    ends = chunks.ends
    first = jnp.zeros_like(ends)
    if shape.window is not None:
        first = jnp.maximum(chunks.positions - shape.window + 1, 0) // tile_tokens
    num_tiles = jnp.where(chunks.counts > 0, (ends + tile_tokens - 1) // tile_tokens - first, 0)
    queries = jnp.arange(ends.shape[0], dtype=jnp.int32)
    return _join_columns(queries, chunks.rows, first, num_tiles, ends, chunks.positions)


def _join_columns(*columns: jax.Array) -> jax.Array:
    units = jnp.stack(columns, axis=1).astype(jnp.int32)  # in the order of the columns above
    return jnp.pad(units, ((0, 0), (0, UNIT_COLUMNS - len(columns))))
