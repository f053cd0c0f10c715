"""The layer for multi-token prediction in MiMo-7B's checkpoints (Xiaomi 2025, arXiv 2505.07608).

A Qwen 2 layer on a projection of the target's last hidden state and the embedding of the next token. The states that
it reads are those before the target's final norm, and those that it feeds back are after its own, as in vLLM's
`mimo_mtp.py`. vLLM also zeroes the embedding at position 0; the published model code does not, nor do we.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxserve.core.layers.context import LayerContext
from jaxserve.core.layers.linear import linear
from jaxserve.core.layers.norm import normalize
from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Leaves, Stream, Table
from jaxserve.core.models.blocks import pre_norm_layer
from jaxserve.core.models.hf_config import check_integer
from jaxserve.core.models.parameters import norm_params, projection_params
from jaxserve.errors import ConfigError, shorten
from jaxserve.families import mimo
from jaxserve.families.llama import list_layer_params
from jaxserve.features.speculation.drafters.base import DrafterModel


def parse_mtp(raw: Mapping[str, object], target: DecoderConfig) -> DrafterModel:
    """Returns the drafter in the checkpoint of `target`, whose config.json is `raw`.

    Of several layers the first is used for all drafts, as in vLLM. Raises ConfigError for a family without such layers
    or a checkpoint that states none.
    """
    if target.family != mimo.FAMILY.model_type:
        raise ConfigError(
            f'"mtp" needs a model with layers for multi-token prediction, which are read of MiMo-7B; {target.family} '
            'has none. Give "eagle3" with a head, "draft_model", "suffix" or "ngram"',
            field="speculative_config.method",
            value="mtp",
        )
    key = "num_nextn_predict_layers"
    if check_integer(key, raw.get(key) or 0, minimum=0) == 0:
        raise ConfigError(
            "the checkpoint states no layer for multi-token prediction", field=key, value=shorten(raw.get(key))
        )
    config = dataclasses.replace(target, layers=(dataclasses.replace(target.layers[-1], window=None),))
    config = config.change_attention(lambda attention: dataclasses.replace(attention, kv_scales=None))
    return DrafterModel(
        method="mtp",
        config=config,
        aux_layers=(target.num_layers,),
        takes_next=True,
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        first_layer=f"{mimo.MTP_LAYERS}.0",
    )


def run_mtp_layer(
    model: DrafterModel, index: int, leaves: Leaves, embeds: Stream, hidden: Stream, ctx: LayerContext
) -> tuple[Stream, jax.Array]:
    """Returns the states [T, D] that the next pass and the target's head read, and the pool."""
    config, norm = model.config, model.config.norm
    parts = [normalize(norm, leaves["hidden_norm"], hidden), normalize(norm, leaves["embed_norm"], embeds)]
    x = linear(ctx, leaves["input_proj"], jnp.concatenate(parts, axis=-1))
    x, pages = pre_norm_layer(config, config.layers[index], leaves, x, ctx)
    return normalize(norm, leaves["out_norm"], x), pages


def list_mtp_params(model: DrafterModel) -> Table:
    """Returns all parameters by dotted path, under their names in the target's own checkpoint."""
    config = model.config
    layer = CheckpointLayer(config, 0, model.first_layer)
    names = {"embed_norm": "token_layernorm", "hidden_norm": "hidden_layernorm", "out_norm": "final_layernorm"}
    table = norm_params(layer, names) | list_layer_params(layer)
    shape = (2 * config.hidden_size, config.hidden_size)
    table |= projection_params(config, "input_proj", layer.tensor("input_proj"), shape)
    return {f"layers.0.{name}": parameter for name, parameter in table.items()}
