"""Latent attention (MLA; DeepSeek-V2, 2024): pages hold one row per token, which all heads share.

A head's key is the row's latent times `k_b`, its value the latent times `v_b`. Both products are taken on the other
side instead: queries are multiplied by `k_b` before attention, answers by `v_b` after it. So attention reads rows as
pages hold them, and no key or value of a head is ever made. Products of `k_b` with `q_b`, or of `v_b` with `o`, are not
formed in advance: their matrices would be larger than both factors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.core.layers.attention import AttentionConfig, attend_pages
from jaxserve.core.layers.context import LayerContext
from jaxserve.core.layers.linear import linear, linear_heads
from jaxserve.core.layers.norm import NormConfig, normalize
from jaxserve.core.layers.rope import rotate

_EPS = 1e-6  # of the latents' norms, whatever the model's own is: the reference implementation's


def attend_latent(
    config: AttentionConfig, norm: NormConfig, leaves: Mapping[str, Any], x: Float[Array, "T D"], ctx: LayerContext
) -> tuple[Float[Array, "T D"], jax.Array]:
    """Returns the block's output and the pool with this step's rows written.

    Parameters, with Q = `query_rank`, or 0 without: `qkv_a` [D, Q + R + P]; `q_norm` [Q]; `q_b` [Q or D,
    N * (nope_dim + P)]; `kv_norm` [R]; `k_b` [N, nope_dim, R]; `v_b` [N, R, value_dim]; `o` [N * value_dim, D].
    Optional: `k_scale` [K] of 8-bit pages.
    """
    latent, tokens = config.latent, x.shape[0]
    assert latent is not None
    norm = dataclasses.replace(norm, eps=_EPS)
    rank = latent.query_rank or 0
    queries, row, k_rope = jnp.split(linear(ctx, leaves["qkv_a"], x), (rank, rank + latent.rank), axis=1)
    queries = x if latent.query_rank is None else normalize(norm, leaves["q_norm"], queries)
    # Without the barrier XLA makes heads an axis of the product, for which a TPU copies the weight in each layer.
    q = lax.optimization_barrier(linear(ctx, leaves["q_b"], queries)).reshape(tokens, config.num_heads, -1)
    q, q_rope = jnp.split(q, (latent.nope_dim,), axis=2)
    row, k_rope = normalize(norm, leaves["kv_norm"], row)[:, None], k_rope[:, None]
    if ctx.rotary is not None:
        q_rope, k_rope = rotate(q_rope, *ctx.rotary), rotate(k_rope, *ctx.rotary)
    q = jnp.concatenate([linear_heads(leaves["k_b"], q), q_rope], axis=2)
    k = jnp.broadcast_to(jnp.concatenate([row, k_rope], axis=2), (tokens, config.num_kv_heads, config.head_dim))
    out, kv_pages = attend_pages(config, leaves, ctx, q=q, k=k, v=None)
    values = linear_heads(leaves["v_b"], out)
    return linear(ctx, leaves["o"], values.reshape(tokens, -1), reduce=True), kv_pages
