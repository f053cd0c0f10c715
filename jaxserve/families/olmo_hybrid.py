"""OLMo Hybrid: three layers with Gated DeltaNet, norms before their blocks, for each one of OLMo 2, norms behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxserve.core.layers.attention import AttentionConfig
from jaxserve.core.layers.context import LayerContext
from jaxserve.core.layers.gated_delta import GatedDeltaConfig
from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Family, LayerKind, Leaves, Stream, Table
from jaxserve.core.models.blocks import hybrid_layer
from jaxserve.core.models.common import (
    alternate_layer_types,
    build_config,
    read_attention,
    read_layer_types,
    read_mlp,
    read_norm,
    read_num_layers,
    read_rope,
)
from jaxserve.core.models.delta_parameters import APART, delta_params
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.parameters import attention_params, mlp_params, norm_params
from jaxserve.core.models.rope_config import rope_parameters
from jaxserve.errors import ConfigError
from jaxserve.families import olmo2

KEYS = olmo2.KEYS | {
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 100257,
    "rope_theta": None,
    "layer_types": None,
    "linear_num_key_heads": None,
    "linear_num_value_heads": None,
    "linear_key_head_dim": None,
    "linear_value_head_dim": None,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
}
_LINEAR = "linear_attention"
_ATTENDED = ("post_attention_layernorm", "feedforward_layer_norm")
_NORM_EPS = 1e-5  # of the norm in Gated DeltaNet, whatever config.json says of the others


def parse(config: HFConfig) -> DecoderConfig:
    """Reads an OLMo Hybrid config.json."""
    config.require(hidden_act="silu")
    bias = config.flag("attention_bias")
    attention = read_attention(config, qkv_bias=bias, out_bias=bias, qk_norm="projection")
    rope = read_rope(config, attention.head_dim) if _rotates(config) else None
    mlp, num_layers = read_mlp(config), read_num_layers(config)
    kinds = {
        "full_attention": LayerKind(attention, None, rope, mlp),
        _LINEAR: LayerKind(_read_delta(config), None, None, mlp),
    }
    default = alternate_layer_types(num_layers, 4, _LINEAR)
    default = default if num_layers > 3 else [*default[:-1], "full_attention"]
    layers = tuple(kinds[kind] for kind in read_layer_types(config, default, _LINEAR))
    return build_config(config, "olmo_hybrid", layers=layers, norm=read_norm(config, wide=True))


def _rotates(config: HFConfig) -> bool:
    """Returns whether attention rotates. A file that does not say so means one or the other by its age."""
    found = rope_parameters(config)["rope_theta"] is not None
    if not found and "rope_theta" not in config.mapping("rope_parameters"):
        message = 'must say whether attention rotates: {"rope_theta": null} if not, as in published models'
        raise ConfigError(message, field="rope_parameters", value=None)
    return found


def _read_delta(config: HFConfig) -> GatedDeltaConfig:
    heads = config.integer("num_attention_heads")
    keys, values = (config.optional_integer(f"linear_num_{part}_heads") or heads for part in ("key", "value"))
    if keys != values:
        raise ConfigError(f"must be linear_num_key_heads, {keys}", field="linear_num_value_heads", value=values)
    key_dim = config.optional_integer("linear_key_head_dim") or int(0.75 * config.integer("hidden_size") / keys)
    return GatedDeltaConfig(
        num_key_heads=keys,
        num_value_heads=values,
        key_dim=key_dim,
        value_dim=config.optional_integer("linear_value_head_dim") or 2 * key_dim,
        conv_size=config.integer("linear_conv_kernel_dim", minimum=2, maximum=64),
        activation="silu",
        beta_scale=2.0 if config.flag("linear_allow_neg_eigval") else 1.0,
        norm_eps=_NORM_EPS,
    )


def apply_layer(
    config: DecoderConfig, kind: LayerKind, leaves: Leaves, x: Stream, ctx: LayerContext
) -> tuple[Stream, Any]:
    """Norms before the blocks of a layer with Gated DeltaNet, behind those of one with attention."""
    layer = olmo2.apply_layer if isinstance(kind.mixer, AttentionConfig) else hybrid_layer
    return layer(config, kind, leaves, x, ctx)


def list_layer_params(layer: CheckpointLayer) -> Table:
    """Separate projections; norms have the names of published files, or those that transformers gives them."""
    if isinstance(layer.kind.mixer, AttentionConfig):
        block = attention_params(layer)
        norms = {"attn_out_norm": _ATTENDED, "mlp_out_norm": ("post_feedforward_layernorm",)}
    else:
        block = delta_params(layer, APART)
        norms = {"attn_norm": ("attention_layer_norm", "input_layernorm"), "mlp_norm": _ATTENDED[::-1]}
    table = norm_params(layer, {leaf: names[0] for leaf, names in norms.items()})
    for leaf, names in norms.items():
        other = norm_params(layer, {leaf: names[-1]})[f"{leaf}.weight"].source
        norm = table[f"{leaf}.weight"]
        table[f"{leaf}.weight"] = replace(norm, source=replace(norm.source, otherwise=other))
    return table | block | mlp_params(layer)


FAMILY = Family(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    KEYS,
    parse,
    apply_layer,
    list_layer_params,
    ignored_keys=("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
    ignored_weights=(r"mtp\..*",),
)
