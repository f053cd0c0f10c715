"""The decoder that every family shares: pure functions of a config, its parameters and one step's tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxserve.errors import ConfigError
from jaxserve.layers.attention import PagedCall, attention_block
from jaxserve.layers.embedding import embed_tokens, project_to_vocab
from jaxserve.layers.mlp import gated_mlp
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.rope import rotary_table
from jaxserve.layers.stack import layer_params
from jaxserve.models.base import DecoderConfig
from jaxserve.sharding import DEFAULT_RULES
from pallas_kernels.spec import BatchMeta

_MAX_DEVICES = 64  # sizes up to here are listed when a tensor parallel size is refused


@dataclass(frozen=True)
class CacheLayout:
    """Per layer: the index of its pool, its first page in that pool, and the index of its KV group."""

    pools: tuple[int, ...]
    page_offsets: tuple[int, ...]
    groups: tuple[int, ...]


def forward(
    config: DecoderConfig,
    params: Mapping[str, Any],
    token_ids: Int[Array, " T"],
    cache: tuple[jax.Array, ...],  # pools [num_pages, 2K, page_size, H]
    batches: tuple[BatchMeta, ...],  # one per KV group
    *,
    layout: CacheLayout,
    mesh: Mesh | None,
) -> tuple[Float[Array, "T D"], tuple[jax.Array, ...]]:
    """Runs all layers over one step's flat tokens, writing their K and V into the pools.

    `params` is a runtime tree (layers/stack.py) of `config.dtype`, sharded by its specs if there is a mesh. Returns
    the residual stream *before* the final norm, and the pools.
    """
    x = embed_tokens(config.embedding, params["embed"], token_ids)
    positions = batches[0].positions
    tables = {
        rope: rotary_table(rope, positions, config.max_model_len) for rope in {kind.rope for kind in config.layers}
    }
    pools = list(cache)
    for index, kind in enumerate(config.layers):
        pool = layout.pools[index]
        call = PagedCall(window=config.windows[index], page_offset=layout.page_offsets[index], mesh=mesh)
        layer = layer_params(params, index)
        attended, pools[pool] = attention_block(
            config.attention,
            config.norm,
            layer,
            rms_norm(config.norm, x, layer["attn_norm"]),
            rotary=tables[kind.rope],
            kv_pages=pools[pool],
            batch=batches[layout.groups[index]],
            call=call,
        )
        x = _add(config, mesh, x, attended, layer.get("attn_out_norm"))
        fed = gated_mlp(config.mlp, layer, rms_norm(config.norm, x, layer["mlp_norm"]))
        x = _add(config, mesh, x, fed, layer.get("mlp_out_norm"))
    return x, tuple(pools)


def _add(
    config: DecoderConfig,
    mesh: Mesh | None,
    x: Float[Array, "T D"],
    block_output: Float[Array, "T D"],
    out_norm: Float[Array, " D"] | None,
) -> Float[Array, "T D"]:
    """Adds a block's output to the residual stream, which is whole on every device: here the partial sums meet."""
    if mesh is not None:
        block_output = jax.lax.with_sharding_constraint(block_output, DEFAULT_RULES.sharding(mesh, (None, None)))
    return x + (block_output if out_norm is None else rms_norm(config.norm, block_output, out_norm))


def compute_logits(
    config: DecoderConfig, params: Mapping[str, Any], hidden: Float[Array, "S D"]
) -> Float[Array, "S V"]:
    """Returns float32 logits of rows of `forward`'s hidden states: final norm, head (tied or not), soft cap."""
    normed = rms_norm(config.norm, hidden, params["final_norm"])
    table = params["embed"] if config.embedding.tied else params["lm_head"]
    return project_to_vocab(config.embedding, table, normed)


def expand_kv_heads(config: DecoderConfig, tensor_parallel_size: int) -> DecoderConfig:
    """Returns the config whose specs and sources fit a mesh of this size.

    KV heads that do not go round are stored `tensor_parallel_size` times in all, each device holding a copy of the
    one it needs. A vocabulary that does not divide leaves embedding and head whole on every device. Query heads and
    feed-forward columns must divide; ConfigError names the sizes that work.
    """
    if not _fits(config, tensor_parallel_size):
        sizes = [size for size in range(1, _MAX_DEVICES + 1) if _fits(config, size)]
        attention = config.attention
        raise ConfigError(
            f"{tensor_parallel_size} does not fit {attention.num_heads} query heads, {attention.num_kv_heads} KV heads "
            f"and {config.mlp.intermediate_size} feed-forward columns; sizes that work: {sizes}",
            field="tensor_parallel_size",
            value=tensor_parallel_size,
        )
    repeats = max(tensor_parallel_size // config.attention.num_kv_heads, 1)
    attention = dataclasses.replace(
        config.attention,
        num_kv_heads=config.attention.num_kv_heads * repeats,
        kv_repeats=config.attention.kv_repeats * repeats,
    )
    shard_vocab = config.vocab_size % tensor_parallel_size == 0
    embedding = dataclasses.replace(config.embedding, shard_vocab=shard_vocab)
    return dataclasses.replace(config, attention=attention, embedding=embedding)


def _fits(config: DecoderConfig, size: int) -> bool:
    attention = config.attention
    heads_divide = size >= 1 and attention.num_heads % size == 0
    return (
        heads_divide
        and (attention.num_kv_heads % size == 0 or size % attention.num_kv_heads == 0)
        and config.mlp.intermediate_size % size == 0
    )
