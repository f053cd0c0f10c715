"""Qwen3-Next: three layers with Gated DeltaNet for each with gated attention, and experts behind all of them."""

from __future__ import annotations

from jaxserve.core.layers.attention import AttentionConfig
from jaxserve.core.layers.mlp import MLPConfig
from jaxserve.core.layers.moe import MoEConfig
from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Family, LayerKind, Table
from jaxserve.core.models.blocks import hybrid_layer
from jaxserve.core.models.common import (
    DECODER_KEYS,
    alternate_layer_types,
    build_config,
    read_attention,
    read_layer_types,
    read_mlp,
    read_norm,
    read_num_layers,
)
from jaxserve.core.models.delta_parameters import BY_KEY_HEAD, DELTA_KEYS, DeltaModules, delta_params, read_delta
from jaxserve.core.models.expert_parameters import moe_params
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.moe_config import (
    COUNT_KEYS,
    TRAINING_KEYS,
    give_experts,
    read_count,
    read_experts,
    read_sparse_layers,
)
from jaxserve.core.models.parameters import attention_params, mlp_params, pre_norm_params
from jaxserve.core.models.rope_config import parse_rope, rope_parameters

HYBRID_KEYS: dict[str, object] = (
    DECODER_KEYS
    | DELTA_KEYS
    | {
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "layer_types": None,
        "full_attention_interval": 4,
    }
)
"""Keys of all families with these layers; `attn_output_gate` stands in newer files only."""

KEYS = (
    HYBRID_KEYS
    | COUNT_KEYS
    | {
        "intermediate_size": 5632,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }
)

_LINEAR = "linear_attention"


def read_hybrid_layers(config: HFConfig, mlp: MLPConfig | MoEConfig) -> tuple[LayerKind, ...]:
    """Returns the layers, by `layer_types`, else by `full_attention_interval`."""
    config.require(attn_output_gate=True)
    bias = config.flag("attention_bias")
    attention = read_attention(config, qkv_bias=bias, out_bias=bias, qk_norm="shared", gated=True)
    length = config.integer("max_position_embeddings")
    rope = parse_rope(
        rope_parameters(config), head_dim=attention.head_dim, max_position_embeddings=length, partial=True
    )
    default = alternate_layer_types(read_num_layers(config), config.integer("full_attention_interval"), _LINEAR)
    kinds = {
        "full_attention": LayerKind(attention, None, rope, mlp),
        _LINEAR: LayerKind(read_delta(config), None, None, mlp),
    }
    return tuple(kinds[kind] for kind in read_layer_types(config, default, _LINEAR))


def build_hybrid(config: HFConfig, family: str, layers: tuple[LayerKind, ...]) -> DecoderConfig:
    """Returns the decoder; stored weights of its norms are less by one."""
    return build_config(config, family, layers=layers, norm=read_norm(config, unit_offset=True, wide=True))


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a Qwen3-Next config.json."""
    moe = read_experts(
        config,
        read_count(config, 512),
        normalize=config.flag("norm_topk_prob"),
        shared_size=config.integer("shared_expert_intermediate_size"),
        gated_shared=True,
    )
    layers = read_hybrid_layers(config, read_mlp(config))
    layers = give_experts(layers, read_sparse_layers(config, len(layers)), moe)
    return build_hybrid(config, "qwen3_next", layers)


def list_layer_params(layer: CheckpointLayer, modules: DeltaModules = BY_KEY_HEAD) -> Table:
    """A norm before each block; projections of Gated DeltaNet in `modules`."""
    is_attention = isinstance(layer.kind.mixer, AttentionConfig)
    table = attention_params(layer) if is_attention else delta_params(layer, modules)
    return pre_norm_params(layer) | table | (moe_params(layer) if layer.has_experts else mlp_params(layer))


FAMILY = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    KEYS,
    parse,
    hybrid_layer,
    list_layer_params,
    ignored_keys=TRAINING_KEYS,
    ignored_weights=(r"mtp\..*",),
)
