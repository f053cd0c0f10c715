"""The layer for multi-token prediction in MiMo-7B's checkpoints (Xiaomi 2025, arXiv 2505.07608).

A Qwen 2 layer on a projection of the target's last hidden state and the embedding of the next token. The states that
it reads are those before the target's final norm, and those that it feeds back are after its own, as in vLLM's
`mimo_mtp.py`. vLLM also zeroes the embedding at position 0; the published model code does not, nor do we.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.layers.context import LayerContext
from jaxserve.layers.linear import linear
from jaxserve.layers.norm import normalize
from jaxserve.models.base import CheckpointLayer, Leaves, Stream, Table
from jaxserve.models.blocks import pre_norm_layer
from jaxserve.models.drafters.base import DrafterModel
from jaxserve.models.llama import list_layer_params
from jaxserve.models.parameters import norm_params, projection_params


def run_layer(
    model: DrafterModel, leaves: Leaves, embeds: Stream, hidden: Stream, ctx: LayerContext
) -> tuple[Stream, jax.Array]:
    """Returns the states [T, D] that the next pass and the target's head read, and the pool."""
    config, norm = model.config, model.config.norm
    parts = [normalize(norm, leaves["hidden_norm"], hidden), normalize(norm, leaves["embed_norm"], embeds)]
    x = linear(ctx, leaves["input_proj"], jnp.concatenate(parts, axis=-1))
    x, pages = pre_norm_layer(config, leaves, x, ctx)
    return normalize(norm, leaves["out_norm"], x), pages


def list_params(model: DrafterModel) -> Table:
    """Returns all parameters by dotted path, under their names in the target's own checkpoint."""
    config = model.config
    layer = CheckpointLayer(config, 0, model.first_layer)
    names = {"embed_norm": "token_layernorm", "hidden_norm": "hidden_layernorm", "out_norm": "final_layernorm"}
    table = norm_params(layer, names) | list_layer_params(layer)
    shape = (2 * config.hidden_size, config.hidden_size)
    table |= projection_params(config, "input_proj", layer.tensor("input_proj"), shape)
    return {f"layers.0.{name}": parameter for name, parameter in table.items()}
