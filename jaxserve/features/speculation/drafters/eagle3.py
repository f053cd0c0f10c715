"""EAGLE-3 heads (Li et al. 2025, arXiv 2503.01840), for any target.

One layer of Llama whose attention reads the embedding of the next token beside the hidden state; further layers, if a
head has them, are Llama's. Facts about published checkpoints: vLLM's and SGLang's `llama_eagle3.py`, speculators.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.core.layers.attention import attend
from jaxserve.core.layers.context import LayerContext
from jaxserve.core.layers.linear import linear
from jaxserve.core.layers.mlp import gated_mlp
from jaxserve.core.layers.norm import normalize
from jaxserve.core.models.base import CheckpointLayer, Leaves, Stream, Table
from jaxserve.core.models.blocks import pre_norm_layer
from jaxserve.core.models.parameters import (
    attention_params,
    mlp_params,
    norm_params,
    projection_params,
    vocab_params,
    wide_norm_params,
)
from jaxserve.families.llama import list_layer_params
from jaxserve.features.speculation.drafters.base import DrafterModel

FC, FINAL_NORM, EMBED, HEAD = "fc", "norm", "embed_tokens", "lm_head"  # modules of a checkpoint
D2T, T2D = "d2t", "t2d"  # and its tensors that map the vocabularies


def combine_states(model: DrafterModel, params: Leaves, hidden: Float[Array, "T AD"]) -> Float[Array, "T D"]:
    """Returns the head's input states from the target's, side by side: `fc` [A * D of the target, D of the head]."""
    norm = model.config.norm
    if model.aux_norm == "joint":
        hidden = normalize(norm, params["input_norm"], hidden)
    elif model.aux_norm == "each":
        parts = jnp.split(hidden, len(model.aux_layers), axis=-1)
        normed = [normalize(norm, params[f"fc_norm_{index}"], part) for index, part in enumerate(parts)]
        hidden = jnp.concatenate(normed, axis=-1)
    return linear(model.config.local, params["fc"], hidden)


def run_head_layer(
    model: DrafterModel, index: int, leaves: Leaves, embeds: Stream, x: Stream, ctx: LayerContext
) -> tuple[Stream, jax.Array]:
    """Returns the residual stream [T, D] after a layer, and the pool; `qkv` of the first layer is [2 * D, ...]."""
    config, norm = model.config, model.config.norm
    kind = config.layers[index]
    if index > 0:
        return pre_norm_layer(config, kind, leaves, x, ctx)
    hidden = normalize(norm, leaves["hidden_norm"], x)
    beside = jnp.concatenate([normalize(norm, leaves["embed_norm"], embeds), hidden], axis=-1)
    attended, pages = attend(kind.attention, norm, leaves, beside, ctx)
    x = (hidden if model.norm_before_residual else x) + attended
    return x + gated_mlp(kind.mlp, leaves, normalize(norm, leaves["mlp_norm"], x), ctx), pages


def finish_states(model: DrafterModel, params: Leaves, x: Stream) -> Stream:
    """Returns the states that the next pass and the logits read."""
    return normalize(model.config.norm, params["final_norm"], x) if model.norm_output else x


def normalize_states(model: DrafterModel, params: Leaves, states: Float[Array, "S D"]) -> Float[Array, "S D"]:
    """Returns what the head is applied to."""
    return states if model.norm_output else normalize(model.config.norm, params["final_norm"], states)


def list_head_params(model: DrafterModel) -> Table:
    """Returns all parameters but `d2t` by dotted path, under the names of the checkpoint."""
    config, wide = model.config, model.target_hidden_size * len(model.aux_layers)
    table = projection_params(config, "fc", FC, (wide, config.hidden_size))
    table |= wide_norm_params(config, "final_norm", FINAL_NORM, config.hidden_size)
    if model.aux_norm == "joint":
        table |= wide_norm_params(config, "input_norm", "input_norm", wide)
    elif model.aux_norm == "each":
        for index in range(len(model.aux_layers)):
            table |= wide_norm_params(config, f"fc_norm_{index}", f"fc_norm.{index}", model.target_hidden_size)
    if model.has_embed:
        shape = (config.vocab_size, config.hidden_size)
        table |= vocab_params(config, "embed", EMBED, shape, shard_vocab=config.embedding.shard_vocab)
    if model.has_head:
        shape = (model.draft_vocab_size, config.hidden_size)
        table |= vocab_params(config, "lm_head", HEAD, shape, shard_vocab=model.shard_draft_vocab)
    for index in range(config.num_layers):
        prefix = model.first_layer if index == 0 else f"layers.{index}"
        params = _list_layer(CheckpointLayer(config, index, prefix))
        table |= {f"layers.{index}.{name}": parameter for name, parameter in params.items()}
    return table


def _list_layer(layer: CheckpointLayer) -> Table:
    if layer.index > 0:
        return list_layer_params(layer)
    names = {
        "embed_norm": "input_layernorm",
        "hidden_norm": "hidden_norm",
        "mlp_norm": "post_attention_layernorm",
    }
    attention = attention_params(layer, input_size=2 * layer.config.hidden_size)
    return norm_params(layer, names) | attention | mlp_params(layer)
