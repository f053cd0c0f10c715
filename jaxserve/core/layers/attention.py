"""The attention block: fused projection, optional q and k norms, rotation, paged attention, output projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxserve.core.layers.context import LayerContext
from jaxserve.core.layers.linear import Leaf, linear
from jaxserve.core.layers.memory import PagedKV
from jaxserve.core.layers.norm import NormConfig, normalize, normalize_plainly
from jaxserve.core.layers.rope import rotate
from jaxserve.core.sharding import DEFAULT_RULES, KV_POOL_AXES
from pallas_kernels.api import attend_stored, attend_with_update, store
from pallas_kernels.spec import AttnLayer, AttnParams, BatchMeta, HeadParams

_HEAD_AXES = {"sinks": "heads", "k_scale": "kv_heads", "v_scale": "kv_heads"}  # of HeadParams' arrays

QKNorm = Literal["shared", "per_head", "projection"]
"""What a norm of q and k spans: each head, with one weight [H] for all heads ("shared") or one each, or all heads."""


Projections = Literal["qkv", "qk", "q"]
"""What a layer projects: with "qk" keys are values, too; with "q" keys and values are those of another layer."""


@dataclass(frozen=True)
class KVScales:
    """A checkpoint's scales of 8-bit keys and values: tensors `name` below a layer's, where {part} is k or v."""

    name: str
    shape: tuple[int, ...]  # () or [1] for the whole layer, or one per KV head


@dataclass(frozen=True)
class LatentConfig:
    """Latent attention: heads share one row per token, from which each makes its key and its value.

    The row has `rank` numbers without position (R) and `rope_dim` that rotate (P), so `head_dim` is R + P. The query of
    a head has `nope_dim` and P numbers, its value `value_dim`. Queries come from a latent of `query_rank` numbers, or,
    if that is None, from the block's input. `interleaved`: in the checkpoint, pairs that rotate are neighbours.
    """

    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int | None = None
    interleaved: bool = True


@dataclass(frozen=True)
class QueryGrowth:
    """Queries at position p are multiplied by 1 + beta * log(1 + p // length), as in Llama 4."""

    beta: float
    length: int


@dataclass(frozen=True)
class AttentionConfig:
    """`num_kv_heads` counts stored heads: each KV head of the checkpoint is stored `kv_repeats` times.

    `qk_norm` applies before rotation. `scale` multiplies scores, `softcap` bounds them. `sinks`: every head has a
    learned score without a value, which takes part in the softmax. With `latent` there is one KV head. `v_norm`: values
    are normalised, without a weight. `projections`: `num_kv_heads` counts the heads that are read, whoever writes them.
    Without `causal` a token sees its whole text. With `mutual_images` tokens of one image see each other, as far back
    as a window reaches. `gated`: query heads have gates, projected beside them, whose sigmoids weigh the heads'
    answers.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QKNorm | None = None
    sinks: bool = False
    kv_repeats: int = 1
    kv_scales: KVScales | None = None
    latent: LatentConfig | None = None
    query_growth: QueryGrowth | None = None
    v_norm: bool = False
    projections: Projections = "qkv"
    causal: bool = True
    mutual_images: bool = False
    gated: bool = False

    @property
    def value_dim(self) -> int | None:
        """The numbers of a stored row that are its value, if a row is key and value."""
        return None if self.latent is None else self.latent.rank

    @property
    def columns(self) -> int:
        """Columns of `qkv`."""
        queries = self.group_size * (1 + self.gated)
        return self.num_kv_heads * (queries + len(self.projections) - 1) * self.head_dim

    @property
    def memory(self) -> PagedKV:
        """The keys and values that it keeps."""
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        return PagedKV(*heads, self.value_dim, self.causal, self.mutual_images)

    @property
    def num_activations(self) -> int:
        """The numbers per token that it holds: queries, keys, values; of latents queries and answers."""
        if self.value_dim is not None:
            return self.num_heads * (self.head_dim + self.value_dim)
        return (self.num_heads * (1 + self.gated) + 2 * self.num_kv_heads) * self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads that share one stored KV head (G)."""
        return self.num_heads // self.num_kv_heads


def attend(
    config: AttentionConfig, norm: NormConfig, leaves: Mapping[str, Any], x: Float[Array, "T D"], ctx: LayerContext
) -> tuple[Float[Array, "T D"], jax.Array]:
    """Returns the block's output and the pool with this step's K and V written.

    Parameters: `qkv` [D, K * (G + 2) * H] holds, per KV head, its G query heads, then K, then V, as far as there are
    `projections`; gated attention has the gates of the G heads in front. `o` is [N * H, D]. Without a K nothing is
    written: the pages are another layer's. Optional: `q_norm` and `k_norm`, in the shapes of `config.qk_norm`; `sinks`
    [N]; `k_scale` and `v_scale` [K] of 8-bit pages.
    """
    tokens, head_dim = x.shape[0], config.head_dim
    columns = config.group_size * head_dim  # of the queries of a KV head, and of their gates
    # Its columns are cut before they become heads: XLA would make heads an axis of the product, and on a TPU copy the
    # weight into another layout for that, in each layer.
    qkv = linear(ctx, leaves["qkv"], x).reshape(tokens, config.num_kv_heads, -1)
    gates, qkv = (qkv[:, :, :columns], qkv[:, :, columns:]) if config.gated else (None, qkv)
    q = qkv[:, :, :columns].reshape(tokens, config.num_heads, head_dim)
    q = _prepare_heads(config, norm, leaves.get("q_norm"), q, ctx)
    k = v = None
    if config.projections != "q":
        k, v = qkv[:, :, columns : columns + head_dim], qkv[:, :, -head_dim:]
        k = _prepare_heads(config, norm, leaves.get("k_norm"), k, ctx)
        v = normalize_plainly(norm, v) if config.v_norm else v
    out, kv_pages = attend_pages(config, leaves, ctx, q=q, k=k, v=v)
    out = out if gates is None else out * jax.nn.sigmoid(gates.reshape(out.shape))
    return linear(ctx, leaves["o"], out.reshape(tokens, -1), reduce=True), kv_pages


def _prepare_heads(
    config: AttentionConfig, norm: NormConfig, leaf: Leaf | None, heads: Float[Array, "T n H"], ctx: LayerContext
) -> Float[Array, "T n H"]:
    """Returns queries or keys, normalised if the model has a norm for them, and rotated."""
    if leaf is not None:
        heads = _normalize_heads(config, norm, leaf, heads)
    return heads if ctx.rotary is None else rotate(heads, *ctx.rotary)


def _normalize_heads(
    config: AttentionConfig, norm: NormConfig, leaf: Leaf, heads: Float[Array, "T n H"]
) -> Float[Array, "T n H"]:
    if config.qk_norm != "projection":
        return normalize(norm, leaf, heads)
    return normalize(norm, leaf, heads.reshape(heads.shape[0], -1)).reshape(heads.shape)


def attend_pages(
    config: AttentionConfig,
    leaves: Mapping[str, Any],
    ctx: LayerContext,
    *,
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"] | None,
    v: Float[Array, "T K H"] | None,
) -> tuple[Float[Array, "T N V"], jax.Array]:
    """Paged attention; on a mesh every device attends with its own heads (kernels cannot be partitioned for us).

    Of `leaves` it takes the sinks and the scales of 8-bit pages. `v` is None for latents. `k` is None where the pages
    are another layer's, which has written the step's keys and values. In a context that only stores, the attention is
    zeros.
    """
    params = AttnParams(scale=config.scale, window=ctx.window, softcap=config.softcap)
    heads = {name: leaves[name] for name in _HEAD_AXES if name in leaves}
    if config.query_growth is not None:
        q = _grow_queries(config.query_growth, q, ctx.batch.positions)

    def attend_here(
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        heads: Mapping[str, jax.Array],
        kv_pages: jax.Array,
        batch: BatchMeta,
    ) -> tuple[jax.Array, jax.Array]:
        layer = AttnLayer(params, HeadParams(**heads), ctx.offset)
        if k is None:
            return attend_stored(q, kv_pages, batch, layer)
        if ctx.only_stores:
            return jnp.zeros((*q.shape[:2], batch.shape.spec.out_dim), q.dtype), store(k, v, kv_pages, batch, layer)
        return attend_with_update(q, k, v, kv_pages, batch, layer)

    if ctx.mesh is None:
        return attend_here(q, k, v, heads, ctx.pool, ctx.batch)
    by_head = DEFAULT_RULES.spec((None, "heads", None))
    by_kv_head = DEFAULT_RULES.spec((None, "kv_heads", None))
    each_head = {name: DEFAULT_RULES.spec((_HEAD_AXES[name],)) for name in heads}
    pool = DEFAULT_RULES.spec(KV_POOL_AXES)
    sharded = jax.shard_map(
        attend_here,
        mesh=ctx.mesh,
        in_specs=(by_head, by_kv_head, by_kv_head, each_head, pool, PartitionSpec()),
        out_specs=(by_head, pool),
        check_vma=False,  # kernels state no varying axes
    )
    return sharded(q, k, v, heads, ctx.pool, ctx.batch)


def _grow_queries(growth: QueryGrowth, q: Float[Array, "T N H"], positions: Int[Array, " T"]) -> Float[Array, "T N H"]:
    factors = 1 + growth.beta * jnp.log1p((positions // growth.length).astype(jnp.float32))
    return q * factors[:, None, None].astype(q.dtype)
