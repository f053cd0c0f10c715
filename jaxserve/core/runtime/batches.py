"""The pages of a step's rows, and what attention needs to know of the rows."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.batch import prepare_batch
from pallas_kernels.spec import AttnShape, BatchMeta


def prepare_batches(
    tables: Int[Array, "G S M"],
    seq_lens: Int[Array, " S"],
    query_start_loc: Int[Array, " E"],  # [S + 1]
    distribution: Int[Array, " 3"],
    *,
    num_tokens: int,
    max_query_len: int | None,
    shapes: Sequence[AttnShape],
    impl: str,
) -> tuple[BatchMeta, ...]:
    """Returns the batch of each KV group; `shapes` are theirs. See `prepare_batch`."""
    return tuple(
        prepare_batch(
            table,
            seq_lens,
            query_start_loc,
            distribution,
            num_tokens=num_tokens,
            shape=shape,
            max_query_len=max_query_len,
            impl=impl,
        )
        for table, shape in zip(tables, shapes, strict=True)
    )


def bound_pages(
    tables: Int[Array, "G S M"], max_num_tokens: Int[Array, " S"], page_size: int, num_beyond: int
) -> Int[Array, "G S M2"]:
    """Returns page tables for rows that may compute up to `num_beyond` tokens too many.

    Entries that a row of `max_num_tokens` never needs are the null page, since they may name another row's pages, and
    so is what is added behind them. The last token of a row need not be computed.
    """
    groups, num_rows, width = tables.shape
    is_needed = jnp.arange(width, dtype=jnp.int32) * page_size < max_num_tokens[:, None] - 1
    beyond = jnp.zeros((groups, num_rows, -(-num_beyond // page_size)), tables.dtype)
    return jnp.concatenate([jnp.where(is_needed, tables, 0), beyond], axis=2)
