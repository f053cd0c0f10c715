"""What a caller says about the pool, a layer and a step; all checks of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.platform import traced_platform
from pallas_kernels.worklist import TileList, list_chunk_tiles, list_token_tiles

DTYPES = ("float32", "bfloat16", "float16")
TILE_TOKENS = 32  # queries per tile of a chunk
# How many one-token rows, and how many tiles of chunks, are attended together: few where a loop over groups follows
# the batch (each group then stops at its own longest context), many where its length is fixed.
BOUNDED_GROUPS = (8, 4)
STATIC_GROUPS = (64, 64)

_STATIC = {"static": True}


@dataclass(frozen=True)
class KVSpec:
    """Keys and values of one layer. `num_kv_heads` (K) counts the whole model's heads or one device's, as the caller
    uses it."""

    num_kv_heads: int
    head_dim: int
    page_size: int  # tokens per page
    dtype: str

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"KVSpec.{name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"KVSpec.dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")


@dataclass(frozen=True)
class AttnParams:
    """What is static about a layer's attention. With `window` W a query at position p sees keys p-W+1..p."""

    scale: float  # multiplies q @ k
    window: int | None = None
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"AttnParams.window must be at least 1, got {self.window}")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"AttnParams.softcap must be positive, got {self.softcap}")


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class BatchMeta:
    """One step's rows and tokens, made by `prepare_batch`; the fields below the line are derived from those above."""

    page_table: jax.Array  # [S, M] i32, page ids counted from the layer's first page
    seq_lens: jax.Array  # [S] i32, tokens of the row including this step's
    query_start_loc: jax.Array  # [S + 1] i32, where each row's new tokens begin in the step's
    distribution: jax.Array  # [3] i32, cumulative ends of (one-token, chunk, mixed) rows
    # ------------------------------------------------------------------------------------------------------------
    positions: jax.Array  # [T] i32, of each token in its row's text; 0 for padding
    token_rows: jax.Array  # [T] i32, the token's row; the last one for padding
    write_pages: jax.Array  # [T] i32, page that takes the token's K and V; the null page 0 for padding
    write_offsets: jax.Array  # [T] i32, and its slot there
    tiles: tuple[TileList, ...]  # all queries of the step, each in one tile of one list
    max_query_len: int | None = field(metadata=_STATIC)
    page_size: int = field(metadata=_STATIC)
    bounded: bool = field(metadata=_STATIC)  # the portable path's loops end where the batch does, by traced bounds


def prepare_batch(
    page_table: jax.Array,  # [S, M] i32
    seq_lens: jax.Array,  # [S] i32
    query_start_loc: jax.Array,  # [S + 1] i32
    distribution: jax.Array,  # [3] i32
    *,
    num_tokens: int,
    page_size: int,
    max_query_len: int | None,
    bounded: bool | None = None,
) -> BatchMeta:
    """Derives, once per step and inside jit, what all layers share.

    Rows are sorted: [0, d0) have one token, [d0, d2) have one or more, the rest are padding (`query_start_loc` flat
    there; what `seq_lens` and the table say of them is ignored). Entries of the table beyond a row's tokens may be
    anything. `max_query_len` is what the caller knows of every row (1: a decode bucket), None for nothing.

    `bounded`: the portable path's loops get traced bounds, which end with the batch. By default on CPU only: a GPU
    would wait for the host at each of them; there bounds are static, and what lies behind the batch is masked.
    """
    bounded = traced_platform() == "cpu" if bounded is None else bounded
    num_rows, width = page_table.shape
    if seq_lens.shape != (num_rows,) or query_start_loc.shape != (num_rows + 1,) or distribution.shape != (3,):
        raise ValueError(
            f"page_table {page_table.shape} wants seq_lens [{num_rows}], query_start_loc [{num_rows + 1}] and "
            f"distribution [3], got {seq_lens.shape}, {query_start_loc.shape} and {distribution.shape}"
        )
    if max_query_len is not None and max_query_len < 1:
        raise ValueError(f"max_query_len must be at least 1 or None, got {max_query_len}")
    query_lens = jnp.diff(query_start_loc)
    seq_lens = jnp.where(query_lens > 0, seq_lens, 0)
    # Entries past a row's end are read too, then masked: let them all be one page, which stays in the cache.
    used = jnp.arange(width, dtype=jnp.int32) * page_size < seq_lens[:, None]
    page_table = jnp.where(used, page_table, 0)

    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    token_rows = jnp.sum(query_start_loc[None, 1:] <= tokens[:, None], axis=1, dtype=jnp.int32)
    is_token = token_rows < num_rows
    token_rows = jnp.minimum(token_rows, num_rows - 1)
    first = seq_lens - query_lens  # [S], position of the row's first new token
    positions = jnp.where(is_token, first[token_rows] + tokens - query_start_loc[token_rows], 0)
    write_pages = jnp.where(is_token, page_table[token_rows, jnp.minimum(positions // page_size, width - 1)], 0)
    return BatchMeta(
        page_table=page_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        distribution=distribution,
        positions=positions,
        token_rows=token_rows,
        write_pages=write_pages,
        write_offsets=positions % page_size,
        tiles=_list_tiles(
            query_start_loc,
            query_lens,
            seq_lens,
            distribution[0],
            num_tokens=num_tokens,
            max_query_len=max_query_len,
            groups=BOUNDED_GROUPS if bounded else STATIC_GROUPS,
        ),
        max_query_len=max_query_len,
        page_size=page_size,
        bounded=bounded,
    )


def _list_tiles(
    query_start_loc: jax.Array,
    query_lens: jax.Array,
    seq_lens: jax.Array,
    num_single: jax.Array,
    *,
    num_tokens: int,
    max_query_len: int | None,
    groups: tuple[int, int],
) -> tuple[TileList, ...]:
    """One-token rows in one list, the others cut into chunk tiles in a second, which a decode bucket does not have."""
    if max_query_len == 1:
        return (list_token_tiles(query_start_loc, query_lens, seq_lens, group=groups[0]),)
    is_single = jnp.arange(query_lens.shape[0]) < num_single
    longest = num_tokens if max_query_len is None else min(max_query_len, num_tokens)
    return (
        list_token_tiles(query_start_loc, jnp.where(is_single, query_lens, 0), seq_lens, group=groups[0]),
        list_chunk_tiles(
            query_start_loc,
            jnp.where(is_single, 0, query_lens),
            seq_lens,
            num_tokens=num_tokens,
            tile_tokens=min(TILE_TOKENS, longest),
            group=groups[1],
        ),
    )
