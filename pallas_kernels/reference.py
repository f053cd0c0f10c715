"""The oracle: attention as the formula says, in float32, row by row. Readable, slow, and compared with by everything.

It reads only what the caller gave (`page_table`, `seq_lens`, `query_start_loc`), none of the derived fields.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.spec import AttnParams, BatchMeta


def attend(
    q: jax.Array,  # [T, N, H]
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, H]
    batch: BatchMeta,
    *,
    params: AttnParams,
    page_offset: int | jax.Array,
) -> jax.Array:
    """Attention [T, N, H] in q's dtype over pages that already hold this step's keys and values; 0 for padding."""
    num_tokens, _, head_dim = q.shape
    num_rows, width = batch.page_table.shape
    _, heads, page_size, _ = kv_pages.shape
    group_size = q.shape[1] // (heads // 2)
    tokens, key_positions = jnp.arange(num_tokens), jnp.arange(width * page_size)

    def attend_row(row: jax.Array) -> jax.Array:
        begin, end = batch.query_start_loc[row], batch.query_start_loc[row + 1]
        length = batch.seq_lens[row]
        pages = kv_pages.at[batch.page_table[row] + page_offset].get(mode="clip")  # [M, 2K, page_size, H]
        logical = pages.swapaxes(1, 2).reshape(-1, heads, head_dim).astype(jnp.float32)  # [M * page_size, 2K, H]
        oldest = 0 if params.window is None else length - (end - begin) - params.window + 1
        held = (key_positions >= oldest) & (key_positions < length)
        logical = jnp.where(held[:, None, None], logical, 0)
        k = jnp.repeat(logical[:, 0::2], group_size, axis=1)  # [M * page_size, N, H]
        v = jnp.repeat(logical[:, 1::2], group_size, axis=1)

        # Every token of the step asks; below, only the answers to the row's own are kept.
        positions = length - end + tokens
        seen = held & (key_positions <= positions[:, None])  # [T, M * page_size]
        if params.window is not None:
            seen &= key_positions > positions[:, None] - params.window
        scores = _product("tnh,enh->tne", q.astype(jnp.float32), k) * params.scale
        if params.softcap is not None:
            scores = params.softcap * jnp.tanh(scores / params.softcap)
        weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
        answer = _product("tne,enh->tnh", weights, v)
        return jnp.where(((tokens >= begin) & (tokens < end))[:, None, None], answer, 0)

    return jnp.sum(jax.lax.map(attend_row, jnp.arange(num_rows)), axis=0).astype(q.dtype)


def _product(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, left, right, precision=jax.lax.Precision.HIGHEST)
