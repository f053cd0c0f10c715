"""The attention block: fused projection, optional head norms, rotation, paged attention, output projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from jaxserve.layers.linear import project
from jaxserve.layers.norm import NormConfig, rms_norm
from jaxserve.layers.rope import rotate
from jaxserve.sharding import DEFAULT_RULES, KV_POOL_AXES
from pallas_kernels.api import attend_with_update
from pallas_kernels.spec import AttnLayer, AttnParams, BatchMeta, HeadParams


@dataclass(frozen=True)
class KVScales:
    """Scales of 8-bit keys and values that a checkpoint brings: tensors of `shape` whose names follow `name`, with
    {part} for k or v, below the layer's own."""

    name: str
    shape: tuple[int, ...]  # () or [1] for the whole layer, or one per KV head


@dataclass(frozen=True)
class AttentionConfig:
    """`num_kv_heads` counts heads as stored; each stands for 1 / `kv_repeats` of a head of the checkpoint.

    `qk_norm`: RMS norm over each q and k head before rotation. `scale` multiplies scores, `softcap` bounds them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    kv_repeats: int = 1
    kv_scales: KVScales | None = None

    @property
    def group_size(self) -> int:
        """Query heads that share one stored KV head (G)."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class PagedCall:
    """Where one layer attends: its window, its share of the pool, the devices."""

    window: int | None
    page_offset: int
    mesh: Mesh | None


def attention_block(
    config: AttentionConfig,
    norm: NormConfig,
    params: Mapping[str, Array],
    x: Float[Array, "T D"],
    *,
    rotary: tuple[Float[Array, "T half"], Float[Array, "T half"]],
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, H]
    batch: BatchMeta,
    call: PagedCall,
) -> tuple[Float[Array, "T D"], jax.Array]:
    """Returns the block's output and the pool with this step's K and V written.

    Parameters: `qkv` [D, K * (G + 2) * H] holds, per KV head, its G query heads, then K, then V; `o` is [N * H, D].
    `k_scale` and `v_scale` [K], where there are any, are those of 8-bit pages.
    """
    tokens, group = x.shape[0], config.group_size
    qkv = project(x, params["qkv"], params.get("qkv_bias"))
    qkv = qkv.reshape(tokens, config.num_kv_heads, group + 2, config.head_dim)
    q = qkv[:, :, :group].reshape(tokens, config.num_heads, config.head_dim)
    k, v = qkv[:, :, group], qkv[:, :, group + 1]
    if config.qk_norm:
        q, k = rms_norm(norm, q, params["q_norm"]), rms_norm(norm, k, params["k_norm"])
    q, k = rotate(q, *rotary), rotate(k, *rotary)
    heads = HeadParams(k_scale=params.get("k_scale"), v_scale=params.get("v_scale"))
    out, kv_pages = _attend(config, call, q=q, k=k, v=v, heads=heads, kv_pages=kv_pages, batch=batch)
    return project(out.reshape(tokens, -1), params["o"], params.get("o_bias")), kv_pages


def _attend(
    config: AttentionConfig,
    call: PagedCall,
    *,
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    heads: HeadParams,
    kv_pages: jax.Array,
    batch: BatchMeta,
) -> tuple[Float[Array, "T N H"], jax.Array]:
    """Paged attention; on a mesh every device attends with its own heads (kernels cannot be partitioned for us)."""
    attn_params = AttnParams(scale=config.scale, window=call.window, softcap=config.softcap)

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, heads: HeadParams, kv_pages: jax.Array, batch: BatchMeta
    ) -> tuple[jax.Array, jax.Array]:
        return attend_with_update(q, k, v, kv_pages, batch, AttnLayer(attn_params, heads, call.page_offset))

    if call.mesh is None:
        return attend(q, k, v, heads, kv_pages, batch)
    by_head = DEFAULT_RULES.spec((None, "heads", None))
    by_kv_head = DEFAULT_RULES.spec((None, "kv_heads", None))
    scales = jax.tree.map(lambda _: DEFAULT_RULES.spec(("kv_heads",)), heads)
    pool = DEFAULT_RULES.spec(KV_POOL_AXES)
    sharded = jax.shard_map(
        attend,
        mesh=call.mesh,
        in_specs=(by_head, by_kv_head, by_kv_head, scales, pool, PartitionSpec()),
        out_specs=(by_head, pool),
        check_vma=False,  # kernels state no varying axes
    )
    return sharded(q, k, v, heads, kv_pages, batch)
