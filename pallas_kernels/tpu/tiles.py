"""Tiles of queries of the rows that have several new tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from pallas_kernels.worklist import BY_ROW, StepRows, list_chunk_tiles

NUM_COLUMNS = 5


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TilePlan:
    """The tiles of a step. The step's tokens are cut into equal blocks, and a tile is the part of a row in one of them.
    So queries need no gathering, and neighbouring tiles of one block share its copy."""

    columns: jax.Array  # [5 * n] i32: rows, blocks, positions of slot 0 (negative before the text), begins, ends
    num_tiles: jax.Array  # [] i32, used ones
    tile_tokens: int = field(metadata={"static": True})


def plan_tiles(rows: StepRows, tile_tokens: int) -> TilePlan:
    """Cuts all rows but the one-token ones. Slot j of a tile is token block * tile_tokens + j; the slots in [begin,
    end) are its row's. Tiles are in the order of the tokens."""
    lens = rows.lens_between(rows.distribution[0], rows.query_lens.shape[0])
    leads = jnp.where(lens > 0, rows.query_start_loc[:-1] % tile_tokens, 0)
    lens = lens + leads
    starts = rows.query_start_loc[:-1] - leads  # where the first block of each row begins
    # The list is made as if each row began there. It is long enough: a cut between blocks adds at most one tile.
    widened = replace(rows, query_start_loc=jnp.append(starts, rows.query_start_loc[-1]))
    found = list_chunk_tiles(widened, lens, tile_tokens=tile_tokens, order=BY_ROW)
    begins = jnp.where(found.starts == starts[found.rows], leads[found.rows], 0)
    columns = (found.rows, found.starts // tile_tokens, found.positions, begins, found.counts)
    return TilePlan(jnp.concatenate(columns), found.num_groups, tile_tokens)
