"""Granite 4: Granite's multipliers over layers of Mamba-2 and of attention, with a shared block beside experts."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.core.layers.attention import AttentionConfig
from jaxserve.core.layers.mamba2 import Mamba2Config
from jaxserve.core.layers.mlp import MLPConfig
from jaxserve.core.layers.moe import MoEConfig
from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Family, LayerKind, Table
from jaxserve.core.models.blocks import hybrid_layer
from jaxserve.core.models.common import (
    build_config,
    omit,
    read_attention,
    read_layer_types,
    read_mlp,
    read_num_layers,
    read_rope,
)
from jaxserve.core.models.expert_parameters import packed_expert_params, router_params
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.mamba_parameters import check_groups, mamba_params, require_free_steps
from jaxserve.core.models.moe_config import MAX_EXPERTS, TRAINING_KEYS, read_experts
from jaxserve.core.models.parameters import attention_params, fused_mlp_params, pre_norm_params
from jaxserve.errors import ConfigError
from jaxserve.families import granite

KEYS = omit(granite.KEYS, "mlp_bias") | {
    "intermediate_size": 11008,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "position_embedding_type": None,
    "normalization_function": None,
    "layer_types": None,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": None,
}
_IGNORED_KEYS = ("mamba_chunk_size", "init_method", "embedding_dropout", *TRAINING_KEYS)

_MAMBA = "linear_attention"
_OLDER_TYPES = {"mamba": _MAMBA, "attention": "full_attention"}


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a Granite 4 config.json. Layers of attention rotate only where `position_embedding_type` is "rope"."""
    config.require(normalization_function="rmsnorm")
    bias = config.flag("attention_bias")
    scale = config.number("attention_multiplier")
    attention = read_attention(config, scale=scale, qkv_bias=bias, out_bias=bias)
    mlp = _read_mlp(config)
    key = "position_embedding_type"
    rotates = config.get(key) is not None and config.choice(key, ("rope", "nope")) == "rope"
    kinds = {
        "full_attention": LayerKind(attention, None, read_rope(config, attention.head_dim) if rotates else None, mlp),
        _MAMBA: LayerKind(_read_mamba(config), None, None, mlp),
    }
    types = read_layer_types(config, [_MAMBA] * read_num_layers(config), _MAMBA, _OLDER_TYPES)
    decoder = build_config(
        config,
        "granitemoehybrid",
        layers=tuple(kinds[kind] for kind in types),
        embed_scale=config.number("embedding_multiplier"),
        logit_scale=1.0 / config.number("logits_scaling"),
    )
    return replace(decoder, residual_scale=config.number("residual_multiplier"))


def _read_mlp(config: HFConfig) -> MLPConfig | MoEConfig:
    """Returns experts beside a shared block, or without experts the block alone."""
    shared = read_mlp(config, size_key="shared_intermediate_size")
    count = config.integer("num_local_experts", minimum=0, maximum=MAX_EXPERTS)
    if not count:
        return shared
    return read_experts(
        config,
        count,
        size_key="intermediate_size",
        shared_size=shared.intermediate_size,
        scoring="softmax_of_chosen",
    )


def _read_mamba(config: HFConfig) -> Mamba2Config:
    require_free_steps(config)
    heads, width = config.integer("mamba_n_heads"), config.integer("mamba_expand") * config.integer("hidden_size")
    size = width // heads if config.get("mamba_d_head") == "auto" else config.integer("mamba_d_head")
    if heads * size != width:
        message = f"{heads} heads of {size} are not mamba_expand times hidden_size, {width}"
        raise ConfigError(message, field="mamba_n_heads", value=heads)
    mamba = Mamba2Config(
        num_groups=config.integer("mamba_n_groups"),
        num_heads=heads,
        head_dim=size,
        state_size=config.integer("mamba_d_state"),
        conv_size=config.integer("mamba_d_conv", minimum=2, maximum=64),
        activation=read_mlp(config).activation,
        conv_bias=config.flag("mamba_conv_bias"),
        bias=config.flag("mamba_proj_bias"),
    )
    return check_groups("mamba_n_heads", mamba)


def list_layer_params(layer: CheckpointLayer) -> Table:
    """A norm before each block; the second is a shared block and, in most files, experts."""
    is_attention = isinstance(layer.kind.mixer, AttentionConfig)
    table = pre_norm_params(layer) | (attention_params(layer) if is_attention else mamba_params(layer, "mamba"))
    moe, names = layer.kind.mlp, {"gate_up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"}
    if not isinstance(moe, MoEConfig):
        return table | fused_mlp_params(layer, **names)
    module = layer.tensor("block_sparse_moe")
    shared = fused_mlp_params(layer, mlp=moe.shared, **names)
    table |= router_params(layer, moe, f"{module}.router.layer", f"{module}.router")
    table |= packed_expert_params(layer, moe, module, ("input_linear.weight", "output_linear.weight"))
    return table | {f"shared.{name}": parameter for name, parameter in shared.items()}


FAMILY = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    KEYS,
    parse,
    hybrid_layer,
    list_layer_params,
    ignored_keys=_IGNORED_KEYS,
)
