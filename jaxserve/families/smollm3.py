"""SmolLM3: Llama in which every fourth layer does not rotate."""

from __future__ import annotations

from jaxserve.core.layers.attention import AttentionConfig
from jaxserve.core.models.base import DecoderConfig, Family, LayerKind
from jaxserve.core.models.blocks import pre_norm_layer
from jaxserve.core.models.common import (
    build_config,
    read_attention,
    read_layer_types,
    read_mlp,
    read_num_layers,
    read_rope,
)
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.errors import ConfigError, shorten
from jaxserve.families import llama

KEYS = llama.KEYS | {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "eos_token_id": 128001,
    "rope_theta": 2000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "layer_types": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
}


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a SmolLM3 config.json."""
    bias = config.flag("attention_bias")
    attention = read_attention(config, qkv_bias=bias, out_bias=bias)
    return build_config(
        config,
        "smollm3",
        layers=_read_layers(config, attention),
    )


def _read_layers(config: HFConfig, attention: AttentionConfig) -> tuple[LayerKind, ...]:
    """Returns the layers; with windows on, those without rotation slide, or those that `layer_types` names."""
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window") else None
    rotates = _read_rotation(config)
    default = ["full_attention" if turns or window is None else "sliding_attention" for turns in rotates]
    types = read_layer_types(config, default)
    if window is None and "sliding_attention" in types:
        message = "must be an integer, and use_sliding_window true, when layer_types has sliding_attention"
        raise ConfigError(message, field="sliding_window")
    rope, mlp = read_rope(config, attention.head_dim), read_mlp(config, bias=config.flag("mlp_bias"))
    return tuple(
        LayerKind(attention, window if kind == "sliding_attention" else None, rope if turns else None, mlp)
        for kind, turns in zip(types, rotates, strict=True)
    )


def _read_rotation(config: HFConfig) -> list[bool]:
    """Returns whether each layer rotates: `no_rope_layers` holds 1 for those that do."""
    num_layers, interval = read_num_layers(config), config.integer("no_rope_layer_interval")
    given = config.get("no_rope_layers")
    if given is None:
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if not isinstance(given, list) or len(given) < num_layers or any(value not in (0, 1) for value in given):
        message = f"must be at least {num_layers} entries of 0 or 1, not {shorten(given)}"
        raise ConfigError(message, field="no_rope_layers", value=given)
    return [value == 1 for value in given[:num_layers]]


FAMILY = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    KEYS,
    parse,
    pre_norm_layer,
    llama.list_layer_params,
    ignored_keys=("max_window_layers",),
)
