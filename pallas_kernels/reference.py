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
    num_tokens, num_heads, head_dim = q.shape
    num_rows, width = batch.page_table.shape
    _, heads, page_size, _ = kv_pages.shape
    group_size = num_heads // (heads // 2)
    key_positions = jnp.arange(width * page_size)
    out = jnp.zeros(q.shape, jnp.float32)
    for row in range(num_rows):
        begin, end = batch.query_start_loc[row], batch.query_start_loc[row + 1]
        length = batch.seq_lens[row]
        pages = kv_pages.at[batch.page_table[row] + page_offset].get(mode="clip")  # [M, 2K, page_size, H]
        logical = pages.swapaxes(1, 2).reshape(-1, heads, head_dim).astype(jnp.float32)  # [M * page_size, 2K, H]
        logical = jnp.where((key_positions < length)[:, None, None], logical, 0)
        k = jnp.repeat(logical[:, 0::2], group_size, axis=1)  # [M * page_size, N, H]
        v = jnp.repeat(logical[:, 1::2], group_size, axis=1)

        # Every token of the step asks; below, only the answers to the row's own are kept.
        positions = length - end + jnp.arange(num_tokens)
        seen = (key_positions[None, :] <= positions[:, None]) & (key_positions < length)  # [T, M * page_size]
        if params.window is not None:
            seen &= key_positions[None, :] > positions[:, None] - params.window
            v = jnp.where((key_positions > length - (end - begin) - params.window)[:, None, None], v, 0)
        scores = _product("tnh,enh->nte", q.astype(jnp.float32), k) * params.scale
        if params.softcap is not None:
            scores = params.softcap * jnp.tanh(scores / params.softcap)
        scores = jnp.where(seen, scores, -jnp.inf)
        weights = jnp.where(seen.any(axis=1)[:, None], jax.nn.softmax(scores, axis=-1), 0)
        answer = _product("nte,enh->tnh", weights, v)
        tokens = jnp.arange(num_tokens)
        out = jnp.where(((tokens >= begin) & (tokens < end))[:, None, None], answer, out)
    return out.astype(q.dtype)


def _product(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, left, right, precision=jax.lax.Precision.HIGHEST)
