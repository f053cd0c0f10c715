"""The pages of a step's rows, and what attention needs to know of the rows."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxserve.request import FIRST_IMAGE_ROW
from pallas_kernels.backends import find_backend
from pallas_kernels.batch import prepare_batch
from pallas_kernels.spec import AttnShape, BatchMeta

MUTUAL_IMPL = "xla"  # of attention in which tokens of an image see each other, where `impl` takes no last keys


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
    last_keys: Sequence[Int[Array, " T"] | None] | None = None,
) -> tuple[BatchMeta, ...]:
    """Returns the batch of each KV group; `shapes` and `last_keys` are theirs. See `prepare_batch`.

    A group with last keys has the implementation that takes them.
    """
    return tuple(
        prepare_batch(
            table,
            seq_lens,
            query_start_loc,
            distribution,
            num_tokens=num_tokens,
            shape=shape,
            max_query_len=max_query_len,
            impl=impl if keys is None or find_backend(impl).takes_last_keys else MUTUAL_IMPL,
            last_keys=keys,
        )
        for table, shape, keys in zip(tables, shapes, last_keys or (None,) * len(shapes), strict=True)
    )


def find_last_keys(
    token_ids: Int[Array, " T"],
    seq_lens: Int[Array, " S"],
    query_start_loc: Int[Array, " E"],  # [S + 1]
) -> Int[Array, " T"]:
    """Returns the last key that each token sees where tokens of an image see each other, as `prepare_batch` has it.

    It is a token's own, but for images: theirs end where placeholders end, of which no chunk cuts a run. Those of
    padding mean nothing.
    """
    tokens = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
    rows = jnp.sum(query_start_loc[None, 1:] <= tokens[:, None], axis=1, dtype=jnp.int32)
    is_image = token_ids <= FIRST_IMAGE_ROW
    goes_on = is_image[:-1] & is_image[1:] & (rows[:-1] == rows[1:])
    last = jnp.where(jnp.append(goes_on, False), token_ids.shape[0], tokens)
    last = lax.cummin(last, reverse=True)
    rows = jnp.minimum(rows, seq_lens.shape[0] - 1)
    return seq_lens[rows] - query_start_loc[rows + 1] + last


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
