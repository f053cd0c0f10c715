"""The part of attention that all layers of a step share, derived once from its rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backends import find_backend, resolve_impl
from pallas_kernels.spec import AttnShape, BatchMeta
from pallas_kernels.worklist import StepRows


def prepare_batch(
    page_table: jax.Array,  # [S, M] i32
    seq_lens: jax.Array,  # [S] i32
    query_start_loc: jax.Array,  # [S + 1] i32
    distribution: jax.Array,  # [3] i32
    *,
    num_tokens: int,
    shape: AttnShape,
    max_query_len: int | None,
    impl: str | None = None,
    config: Any = None,
    last_keys: jax.Array | None = None,  # [T] i32
) -> BatchMeta:
    """The batch for all layers of `shape`, once per step and inside jit.

    Rows are sorted. Rows [0, d0) have one token. Rows [d0, d1) have one or more, the first at a position that is a
    multiple of 32. Rows [d1, d2) have one or more at any position. The rest are padding: `query_start_loc` is flat
    there, and their lengths and pages are ignored. Entries of the table beyond a row's tokens may be anything.

    Without `shape.causal` the new tokens are still the last of their row's `seq_lens`, which `attend_with_update`
    writes. Without a window `attend_stored` then only counts keys by `seq_lens`, at least one a row: queries may be
    fewer or more.

    Args:
        max_query_len: most tokens of any row (1: a decode bucket); None if unknown.
        impl: the implementation; None for the best one on the device that is traced for.
        config: its tuning; None for the device's table, else the formula.
        last_keys: the last key that each token sees, in its row's text: from its own on, and at most the row's last. A
            window still ends at the token's own position. None: its own key. Only portable attention and the CPU kernel
            take them.

    Raises:
        ValueError: shapes do not fit each other, or the implementation cannot do `shape` or take `last_keys`.
    """
    num_rows, width = page_table.shape
    if seq_lens.shape != (num_rows,) or query_start_loc.shape != (num_rows + 1,) or distribution.shape != (3,):
        raise ValueError(
            f"page_table {page_table.shape} wants seq_lens [{num_rows}], query_start_loc [{num_rows + 1}] and "
            f"distribution [3], got {seq_lens.shape}, {query_start_loc.shape} and {distribution.shape}"
        )
    if max_query_len is not None and max_query_len < 1:
        raise ValueError(f"max_query_len must be at least 1 or None, got {max_query_len}")
    name, _ = resolve_impl(impl, shape)
    backend = find_backend(name)
    obstacle = backend.module.find_obstacle(shape)  # with the layout that the pages have
    if obstacle is not None:
        raise ValueError(f"impl {name!r} cannot run: {obstacle}")
    if last_keys is not None and not (backend.takes_last_keys and shape.causal and last_keys.shape == (num_tokens,)):
        message = (
            f"last_keys {last_keys.shape} are for {num_tokens} tokens of causal attention with impl 'xla' or 'cpu'"
        )
        raise ValueError(message)
    page_size = shape.spec.page_size
    query_lens = jnp.diff(query_start_loc)
    seq_lens = jnp.where(query_lens > 0, seq_lens, 0)
    # Entries past a row's end are read too, then masked. All name one page, which stays in the cache.
    used = jnp.arange(width, dtype=jnp.int32) * page_size < seq_lens[:, None]
    page_table = jnp.where(used, page_table, 0)

    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    token_rows = jnp.sum(query_start_loc[None, 1:] <= tokens[:, None], axis=1, dtype=jnp.int32)
    is_token = token_rows < num_rows
    token_rows = jnp.minimum(token_rows, num_rows - 1)
    first = seq_lens - query_lens  # [S], position of the row's first new token
    positions = jnp.where(is_token, first[token_rows] + tokens - query_start_loc[token_rows], 0)
    is_held = is_token if shape.causal else is_token & (positions >= 0)  # queries may be more than keys
    write_pages = jnp.where(is_held, page_table[token_rows, jnp.minimum(positions // page_size, width - 1)], 0)
    max_len = width * page_size
    rows = StepRows(
        query_start_loc, query_lens, seq_lens, distribution, num_tokens, max_query_len, max_len, shape.reach
    )
    return BatchMeta(
        page_table=page_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        distribution=distribution,
        positions=positions,
        token_rows=token_rows,
        write_pages=write_pages,
        write_offsets=positions % page_size,
        last_keys=last_keys,
        work=backend.module.plan_work(rows, shape, config=config),
        shape=shape,
        impl=name,
        interpret=backend.interpret,
        max_query_len=max_query_len,
    )
