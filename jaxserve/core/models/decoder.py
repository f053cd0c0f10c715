"""The decoder that every family shares: pure functions of a config, its parameters and one step's tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxserve.core.layers.attention import AttentionConfig
from jaxserve.core.layers.context import LayerContext, StateSlots
from jaxserve.core.layers.embedding import add_embeddings, embed_images, embed_tokens, project_to_vocab, split_types
from jaxserve.core.layers.layer_inputs import make_layer_inputs
from jaxserve.core.layers.mamba2 import Mamba2Config
from jaxserve.core.layers.moe import MoEConfig
from jaxserve.core.layers.norm import normalize
from jaxserve.core.layers.rope import rotary_table
from jaxserve.core.models.base import DecoderConfig, LayerKind
from jaxserve.core.models.blocks import settle
from jaxserve.errors import ConfigError
from jaxserve.families.registry import FAMILIES
from pallas_kernels.spec import BatchMeta

Pools = tuple[Any, ...]
"""The pools of a model: of pages [num_pages, 2K, page_size, H] each, then of each recurrent state, arrays by name."""

# What devices share of states, in words, by the axes of states.
_STATE_PARTS = {"kv_heads": "key heads", "heads": "value heads", "groups": "groups", "channels": "channels"}
_MAX_DEVICES = 64  # largest tensor parallel size that an error suggests


@dataclass(frozen=True)
class CacheLayout:
    """The places of layers in pools.

    `offsets`: per layer, its first page, or its place among the layers of a state's pool. `groups`: per layer, the
    index of its KV group, None without pages. `pools`: per KV group, the index of its pool. `state_pools`: per layer,
    the index of the pool of its recurrent state, None without; empty if no layer has one.
    """

    offsets: tuple[int, ...]
    groups: tuple[int | None, ...]
    pools: tuple[int, ...]
    state_pools: tuple[int | None, ...] = ()

    @property
    def num_pools(self) -> int:
        """Pools of the model."""
        return 1 + max(pool for pool in (*self.pools, *self.state_pools) if pool is not None)

    @property
    def num_page_pools(self) -> int:
        """Those of pages, which come first."""
        return 1 + max(self.pools)

    def find_pool(self, layer: int) -> int | None:
        """Returns the index of a layer's pool; None if it keeps nothing."""
        group = self.groups[layer]
        if group is not None:
            return self.pools[group]
        return self.state_pools[layer] if self.state_pools else None

    def list_offsets(self, group: int) -> tuple[int, ...]:
        """Returns the first page of each layer of a KV group that has pages of its own."""
        pairs = zip(self.offsets, self.groups, strict=True)
        return tuple(dict.fromkeys(first for first, each in pairs if each == group))


def forward(
    config: DecoderConfig,
    params: Mapping[str, Any],
    token_ids: Int[Array, " T"],
    pools: Pools,
    batches: tuple[BatchMeta, ...],  # one per KV group
    *,
    layout: CacheLayout,
    mesh: Mesh | None,
    slots: StateSlots | None = None,
    rotary_positions: Int[Array, " T"] | Int[Array, "3 T"] | None = None,
    aux_layers: tuple[int, ...] = (),
    only_stores: bool = False,
) -> tuple[Float[Array, "T D"], Pools, Float[Array, "T AD"] | None]:
    """Runs all layers over one step's flat tokens, writing what they keep into the pools.

    `params` is a runtime tree (layers/stack.py) of `config.dtype`, sharded by its specs if there is a mesh. Returns
    the residual stream *before* the final norm, the pools and, for a drafter, the residual stream before each layer of
    `aux_layers` (ascending; the number of layers means after the last), side by side: [T, A * D], None without any.
    With `only_stores` the last layer computes no more than its keys and values, and the residual stream means nothing.
    `slots` are needed by layers with a recurrent state. `rotary_positions` are where the tokens of images are, or
    texts behind them; None: each token's place in its text.
    """
    layer = FAMILIES[config.family].layer
    token_ids, types = split_types(config.embedding, token_ids)
    x = embed_tokens(config.embedding, params["embed"], token_ids)
    x, added = embed_images(params["embed"], token_ids, x)
    if config.embedding.added is not None:
        x = add_embeddings(config.embedding.added, config.norm, params, x, batches[0].positions, types)
    captured, written = [], list(pools)
    inputs = make_layer_inputs(config.layer_input_size, config.norm, params.get("layer_inputs"), token_ids, x)
    contexts = list_contexts(config, batches, layout, mesh, rotary_positions, only_stores=only_stores)
    for index, (kind, context) in enumerate(zip(config.layers, contexts, strict=True)):
        if index in aux_layers:
            captured.append(x)
        pool = layout.find_pool(index)
        kept, own = None if pool is None else written[pool], None if inputs is None else inputs[:, index]
        ctx = dataclasses.replace(context, pool=kept, slots=slots, layer_input=own)
        x, kept = layer(config, kind, params["layers"][index], x, ctx)
        x = x + added[index] if index < len(added) else x
        if pool is not None:
            written[pool] = kept
    if config.num_layers in aux_layers:
        captured.append(x)
    return x, tuple(written), jnp.concatenate(captured, axis=-1) if captured else None


def settle_states(
    config: DecoderConfig,
    params: Mapping[str, Any],
    pools: Pools,
    batch: BatchMeta,
    *,
    layout: CacheLayout,
    mesh: Mesh | None,
    slots: StateSlots,
) -> Pools:
    """Returns the pools after recurrent states have followed pending tokens, which `batch` and `slots` name."""
    written = list(pools)
    for index, kind in enumerate(config.layers):
        pool = layout.state_pools[index]
        if pool is not None:
            own = written[pool], layout.offsets[index], config.windows[index]
            ctx = LayerContext(mesh, None, batch, *own, slots)
            written[pool] = settle(kind.mixer, config.norm, params["layers"][index], ctx)
    return tuple(written)


def list_contexts(
    config: DecoderConfig,
    batches: tuple[BatchMeta, ...],
    layout: CacheLayout,
    mesh: Mesh | None,
    rotary_positions: Int[Array, " T"] | Int[Array, "3 T"] | None = None,
    *,
    only_stores: bool,
) -> list[LayerContext]:
    """Returns the context of each layer, but for its pool and its own input; the arguments are those of `forward`."""
    ropes = dict.fromkeys(kind.rope for kind in config.layers if kind.rope is not None)
    positions = batches[0].positions if rotary_positions is None else rotary_positions
    made = [rotary_table(rope, positions, config.max_model_len) for rope in ropes]
    # Left alone, XLA computes cosines and sines anew in every rotation, for each head.
    tables = dict(zip(ropes, lax.optimization_barrier(made), strict=True))
    return [
        LayerContext(
            mesh=mesh,
            products=config.products,
            few_rows=config.few_rows,
            num_rows=batches[0].query_start_loc[-1],
            rotary=tables.get(kind.rope),
            batch=batches[layout.groups[index] or 0],
            pool=None,
            offset=layout.offsets[index],
            window=config.windows[index],
            only_stores=only_stores and index == config.num_layers - 1,
        )
        for index, kind in enumerate(config.layers)
    ]


def compute_logits(
    config: DecoderConfig, params: Mapping[str, Any], hidden: Float[Array, "S D"]
) -> Float[Array, "S V"]:
    """Returns float32 logits of rows of `forward`'s hidden states: final norm, head (tied or not), soft cap."""
    normed = normalize_last(config, params, hidden)
    return project_to_vocab(config.local, config.embedding, params[config.embedding.head], normed)


def normalize_last(
    config: DecoderConfig, params: Mapping[str, Any], hidden: Float[Array, "S D"]
) -> Float[Array, "S D"]:
    """Returns rows of `forward`'s hidden states behind the final norm, which encoders do not have."""
    return normalize(config.norm, params.get("final_norm"), hidden) if config.final_norm else hidden


def fit_devices(config: DecoderConfig, tensor_parallel_size: int, *, expert_parallel: bool = False) -> DecoderConfig:
    """Returns the config whose specs and sources fit a mesh of this size.

    KV heads fewer than devices are repeated, so that each device holds one, and so is the only group of Mamba-2's
    heads. If the vocabulary does not divide, the
    embedding and the head are whole on every device. With `expert_parallel` a device holds whole experts, else a slice
    of each. If anything else does not divide, ConfigError names sizes that work.
    """
    config = dataclasses.replace(config, layers=tuple(_place_experts(kind, expert_parallel) for kind in config.layers))
    if not _fits(config, tensor_parallel_size):
        sizes = [size for size in range(1, _MAX_DEVICES + 1) if _fits(config, size)]
        parts = []
        for attention in config.attentions:
            parts += [f"{attention.num_heads} query heads", f"{attention.num_kv_heads} KV heads"]
        parts = [*dict.fromkeys(parts), *(f"{count} {name}" for name, count in sorted(_list_divisible(config)))]
        raise ConfigError(
            f"{tensor_parallel_size} does not fit {', '.join(parts[:-1])} and {parts[-1]}; sizes that work: {sizes}",
            field="tensor_parallel_size",
            value=tensor_parallel_size,
        )
    config = _repeat_group(tensor_parallel_size, config.change_attention(partial(_repeat_heads, tensor_parallel_size)))
    shard_vocab = config.vocab_size % tensor_parallel_size == 0
    embedding = dataclasses.replace(config.embedding, shard_vocab=shard_vocab)
    quantization = config.quantization
    if quantization is not None:
        quantization = dataclasses.replace(quantization, num_devices=tensor_parallel_size)
    return dataclasses.replace(config, embedding=embedding, quantization=quantization)


def _repeat_heads(num_devices: int, attention: AttentionConfig) -> AttentionConfig:
    repeats = max(num_devices // attention.num_kv_heads, 1)
    return dataclasses.replace(
        attention, num_kv_heads=attention.num_kv_heads * repeats, kv_repeats=attention.kv_repeats * repeats
    )


def _repeat_group(num_devices: int, config: DecoderConfig) -> DecoderConfig:
    def repeat(mamba: Mamba2Config) -> Mamba2Config:
        if mamba.num_groups > 1 or mamba.num_heads % num_devices:
            return mamba
        return dataclasses.replace(mamba, num_groups=num_devices, group_repeats=num_devices)

    return config.change_mixers(Mamba2Config, repeat)


def _place_experts(kind: LayerKind, by_expert: bool) -> LayerKind:
    if not isinstance(kind.mlp, MoEConfig):
        return kind
    return dataclasses.replace(kind, mlp=dataclasses.replace(kind.mlp, by_expert=by_expert))


def _fits(config: DecoderConfig, size: int) -> bool:
    return (
        size >= 1
        and all(attention.num_heads % size == 0 for attention in config.attentions)
        and all(
            attention.num_kv_heads % size == 0 or size % attention.num_kv_heads == 0 for attention in config.attentions
        )
        and all(count % size == 0 for _, count in _list_divisible(config))
    )


def _list_divisible(config: DecoderConfig) -> set[tuple[str, int]]:
    """Returns what devices share of feed-forward blocks and states, in words for users, and how many there are."""
    arrays = {array for state, _ in config.states for array in state.arrays}
    axes = {(axis, size) for array in arrays for axis, size in zip(array.axes, array.shape, strict=True)}
    axes -= {("groups", 1)}  # which is repeated
    found = {(f"{_STATE_PARTS[axis]} of a recurrent state", size) for axis, size in axes if axis is not None}
    for mlp in {kind.mlp for kind in config.layers} - {None}:
        dense = mlp.shared if isinstance(mlp, MoEConfig) else mlp
        if dense is not None:
            found.add(("feed-forward columns", dense.intermediate_size))
        if isinstance(mlp, MoEConfig):
            columns = ("columns of an expert", mlp.expert.intermediate_size)
            found.add(("experts", mlp.router.num_experts) if mlp.by_expert else columns)
    return found
