"""Phi-3, 3.5 and Phi-4-mini: Llama with fused tensors, partial rotation and LongRoPE."""

from __future__ import annotations

from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Family, LayerKind, Table
from jaxserve.core.models.blocks import pre_norm_layer
from jaxserve.core.models.common import DECODER_KEYS, build_config, read_attention, read_mlp, read_num_layers
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.parameters import fused_attention_params, fused_mlp_params, pre_norm_params
from jaxserve.core.models.rope_config import parse_rope, rope_parameters
from jaxserve.errors import ConfigError

KEYS = DECODER_KEYS | {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "sliding_window": None,
    "attention_bias": False,
    "mlp_bias": False,
    "lm_head_bias": False,
}

_OLD_NAMES = ("su", "yarn")  # LongRoPE in early Phi-3 files


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a Phi-3 config.json."""
    config.require_off("attention_bias", "mlp_bias", "lm_head_bias")
    attention = read_attention(config)
    parameters = rope_parameters(config)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    parameters["rope_type"] = kind = "longrope" if kind in _OLD_NAMES else kind
    if kind not in ("default", "longrope"):
        raise ConfigError("Phi-3 has default and longrope only", field="rope_type", value=kind)
    parameters["original_max_position_embeddings"] = config.get("original_max_position_embeddings")
    rope = parse_rope(
        parameters,
        head_dim=attention.head_dim,
        max_position_embeddings=config.integer("max_position_embeddings"),
        partial=True,
    )
    layer = LayerKind(attention, config.optional_integer("sliding_window"), rope, read_mlp(config))
    return build_config(config, "phi3", layers=(layer,) * read_num_layers(config))


def list_layer_params(layer: CheckpointLayer) -> Table:
    """Fused projections, one norm before each block."""
    return pre_norm_params(layer) | fused_attention_params(layer) | fused_mlp_params(layer)


FAMILY = Family(
    "phi3",
    "Phi3ForCausalLM",
    KEYS,
    parse,
    pre_norm_layer,
    list_layer_params,
    ignored_keys=("interpolate_factor", "full_attn_mod"),
)
