"""The oracle of every test: attention as the formula says, in float32, row by row. Readable and slow.

It reads only what the caller gave (`page_table`, `seq_lens`, `query_start_loc`), no derived field.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.layout import gather_heads
from pallas_kernels.spec import AttnLayer, AttnShape, BatchMeta, KVSpec
from pallas_kernels.trees import see_ancestors
from pallas_kernels.worklist import StepRows


def choose_layout(spec: KVSpec) -> str:
    """Plain; every layout works."""
    return "plain"


def find_obstacle(shape: AttnShape) -> str | None:
    """None: every shape works."""
    return None


def plan_work(rows: StepRows, shape: AttnShape, *, config: None = None) -> tuple[()]:
    """It needs no plan."""
    return ()


def attend(
    q: jax.Array,  # [T, N, H]
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, H]
    batch: BatchMeta,
    layer: AttnLayer,
) -> jax.Array:
    """Attention [T, N, V] in q's dtype over pages that already hold this step's keys and values; 0 for padding."""
    num_tokens, num_heads, _ = q.shape
    num_rows, width = batch.page_table.shape
    spec, group_size = batch.shape.spec, batch.shape.group_size
    params, heads = layer.params, layer.heads
    tokens, key_positions = jnp.arange(num_tokens), jnp.arange(width * spec.page_size)

    def attend_row(row: jax.Array) -> jax.Array:
        begin, end = batch.query_start_loc[row], batch.query_start_loc[row + 1]
        length = batch.seq_lens[row]
        oldest = 0 if params.window is None else length - (end - begin) - params.window + 1
        held = (key_positions >= oldest) & (key_positions < length)
        pages = gather_heads(kv_pages, batch.page_table[row][None] + layer.page_offset, spec, flat=False)
        k, v = (
            _repeat(
                jnp.where(held[:, None], half[0].astype(jnp.float32), 0), scale, group_size
            )  # [N, M * page_size, H]
            for half, scale in zip(pages, (heads.k_scale, heads.values_scale(spec)), strict=True)
        )

        # Every token of the step attends to the row; only the results of the row's own tokens are kept below.
        positions = length - end + tokens if batch.shape.causal else jnp.full_like(tokens, length - 1)
        seen = held & (key_positions <= positions[:, None])  # [T, M * page_size]
        if params.window is not None:
            seen &= key_positions > positions[:, None] - params.window
        if batch.ancestors is not None:
            seen &= see_ancestors(batch.ancestors, key_positions - (length - (end - begin)))
        scores = _product("tnh,neh->tne", q.astype(jnp.float32), k) * params.scale
        if params.softcap is not None:
            scores = params.softcap * jnp.tanh(scores / params.softcap)
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        if heads.sinks is not None:  # one more key, without a value
            sinks = jnp.broadcast_to(heads.sinks.astype(jnp.float32)[:, None], (num_tokens, num_heads, 1))
            scores = jnp.concatenate([scores, sinks], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : key_positions.shape[0]]
        answer = _product("tne,neh->tnh", weights, v)
        return jnp.where(((tokens >= begin) & (tokens < end))[:, None, None], answer, 0)

    return jnp.sum(jax.lax.map(attend_row, jnp.arange(num_rows)), axis=0).astype(q.dtype)


def _repeat(half: jax.Array, scale: jax.Array | None, group_size: int) -> jax.Array:
    """[K, E, H] of stored keys or values -> [N, E, H] as the query heads see them."""
    half = half if scale is None else half * scale[:, None, None]
    return jnp.repeat(half, group_size, axis=0)


def _product(subscripts: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, left, right, precision=jax.lax.Precision.HIGHEST)
