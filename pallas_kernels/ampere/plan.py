"""Block sizes for a device, and the step cut into units: packed queries and a run of key tiles of their row."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.ampere import kernel
from pallas_kernels.ampere.compat import TILE_ROWS
from pallas_kernels.ampere.config import AmpereConfig, TileConfig, UnitConfig
from pallas_kernels.ampere.device import find_sm_bytes
from pallas_kernels.ampere.launch import count_smem_bytes
from pallas_kernels.mosaic_gpu import splits
from pallas_kernels.mosaic_gpu.packing import count_tile_tokens
from pallas_kernels.mosaic_gpu.shapes import stored_width
from pallas_kernels.mosaic_gpu.splits import SplitList
from pallas_kernels.platform import traced_core_count
from pallas_kernels.spec import AttnShape
from pallas_kernels.tune import tune
from pallas_kernels.worklist import StepRows, TileList, list_chunk_tiles

_BLOCK_RESERVE = 1024  # the SM's own, per block
_MAX_STAGES = 4
_WIDE = 256  # stored heads whose accumulators leave too few registers for the scores of 64 keys
_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AmpereWork:
    """Every query of the step is in a row of `few` or in a tile of `chunks`; None if the bucket has none of that kind.

    `few_units` and `chunk_units` [W, UNIT_COLUMNS] i32 are their units as the kernel reads them.
    """

    few: SplitList | None
    few_units: jax.Array | None
    chunks: TileList | None
    chunk_units: jax.Array | None
    config: AmpereConfig = field(metadata=_STATIC)


def default_config(shape: AttnShape) -> AmpereConfig:
    """Two blocks per SM if their rings fit, so that one computes while the other waits; tiles of 64 keys if they fit;
    and the longest such ring.

    Raises:
        ValueError: not even the smallest ring fits.
    """
    sm_bytes = find_sm_bytes()
    for ctas_per_sm in (2, 1):
        room = sm_bytes // ctas_per_sm - _BLOCK_RESERVE
        for tile_tokens in (64, 32) if stored_width(shape) < _WIDE else (32,):
            fitting = [s for s in range(2, _MAX_STAGES + 1) if count_smem_bytes(shape, tile_tokens, s) <= room]
            if fitting:
                units = UnitConfig(tile_tokens, fitting[-1], ctas_per_sm, traced_core_count())
                return AmpereConfig(units, TileConfig(tile_tokens, fitting[-1]))
    raise ValueError(f"no ring of two tiles of {shape.spec} fits the shared memory of a block")


def find_config(shape: AttnShape, rows: StepRows) -> AmpereConfig:
    """The configuration of the device's table, else by formula."""
    formula = default_config(shape)
    return AmpereConfig(
        tune("ampere_decode", formula.decode, shape, rows),
        tune("ampere_prefill", formula.prefill, shape, rows),
    )


def plan_work(rows: StepRows, shape: AttnShape, config: AmpereConfig) -> AmpereWork:
    """Splits of the rows with few queries, tiles of the others."""
    longest = rows.max_query_len
    if longest is not None and splits.fits(longest, shape.group_size):
        few = splits.plan_splits(rows, rows.query_lens, shape, config.decode, max_query_len=longest)
        return AmpereWork(few, _list_split_units(few), None, None, config)
    num_single, num_rows = rows.distribution[0], rows.query_lens.shape[0]
    few = splits.plan_splits(rows, rows.lens_between(0, num_single), shape, config.decode, max_query_len=1)
    tile_tokens = count_tile_tokens(shape, TILE_ROWS)
    chunks = list_chunk_tiles(rows, rows.lens_between(num_single, num_rows), tile_tokens=tile_tokens)
    return AmpereWork(few, _list_split_units(few), chunks, _list_chunk_units(chunks, shape, config.prefill), config)


def _list_split_units(few: SplitList) -> jax.Array:
    """The units of split rows: a row's packed queries have the index of the row."""
    row, length = few.units[:, splits.ROW], few.units[:, splits.LENGTH]
    begin = length - few.units[:, splits.NUM_QUERIES]
    return _join_columns(row, row, few.units[:, splits.FIRST_TILE], few.units[:, splits.NUM_TILES], length, begin)


def _list_chunk_units(chunks: TileList, shape: AttnShape, config: TileConfig) -> jax.Array:
    """The units of tiles: one per tile, over all the keys that it sees, since enough tiles fill a device."""
    ends = chunks.positions + chunks.counts
    first = jnp.zeros_like(ends)
    if shape.window is not None:
        first = jnp.maximum(chunks.positions - shape.window + 1, 0) // config.tile_tokens
    num_tiles = jnp.where(chunks.counts > 0, (ends + config.tile_tokens - 1) // config.tile_tokens - first, 0)
    queries = jnp.arange(ends.shape[0], dtype=jnp.int32)
    return _join_columns(queries, chunks.rows, first, num_tiles, ends, chunks.positions)


def _join_columns(*columns: jax.Array) -> jax.Array:
    units = jnp.stack(columns, axis=1).astype(jnp.int32)  # in the order of the kernel's columns
    return jnp.pad(units, ((0, 0), (0, kernel.UNIT_COLUMNS - len(columns))))
