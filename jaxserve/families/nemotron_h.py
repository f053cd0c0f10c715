"""Nemotron-H and Nemotron 3: layers of one block each, Mamba-2, attention without rotation, a plain MLP or experts."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.core.layers.activations import ACTIVATIONS
from jaxserve.core.layers.attention import AttentionConfig
from jaxserve.core.layers.mamba2 import Mamba2Config
from jaxserve.core.layers.memory import NO_MIXER, NoMixer
from jaxserve.core.layers.moe import MoEConfig
from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Family, LayerKind, Table
from jaxserve.core.models.blocks import hybrid_layer
from jaxserve.core.models.common import DECODER_KEYS, build_config, omit, read_attention, read_mlp, read_norm
from jaxserve.core.models.expert_parameters import moe_params
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.mamba_parameters import check_groups, mamba_params, require_free_steps
from jaxserve.core.models.moe_config import ROUTED_KEYS, TRAINING_KEYS, read_routed_experts
from jaxserve.core.models.parameters import attention_params, norm_params, plain_mlp_params
from jaxserve.core.models.trunk import Trunk
from jaxserve.errors import ConfigError, shorten

KEYS = (
    omit(DECODER_KEYS, "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    | ROUTED_KEYS
    | {
        "num_hidden_layers": None,
        "hybrid_override_pattern": None,
        "layers_block_type": None,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5,
        "eos_token_id": 2,
        "intermediate_size": 21504,
        "attention_bias": False,
        "sliding_window": None,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "use_bias": False,
        "residual_in_fp32": False,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "mamba_hidden_act": "silu",
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "time_step_limit": None,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": None,
        "routed_scaling_factor": 1.0,
    }
)
_IGNORED_KEYS = (
    *("rms_norm_eps", "norm_eps", "rope_theta", "partial_rotary_factor"),  # of other families
    *("chunk_size", "expand", "mamba_proj_bias", "mamba_ssm_cache_dtype", "num_logits_to_keep", "use_mamba_kernels"),
    *("time_step_floor", "time_step_max", "time_step_min", "rescale_prenorm_residual"),  # of weights that are drawn
    *("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
    *("moe_shared_expert_overlap", *TRAINING_KEYS),
)

_MAMBA, _ATTENTION, _MLP, _EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
_LETTERS = {"M": _MAMBA, "*": _ATTENTION, "-": _MLP, "E": _EXPERTS}
_OLDER_TYPES = {"mamba": _MAMBA, "attention": _ATTENTION}
_MAX_LAYERS = 1024


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a Nemotron-H config.json."""
    config.require_off("attention_bias", "sliding_window", "residual_in_fp32")
    types = _read_types(config)
    read = {_MAMBA: _read_mamba, _ATTENTION: _read_attention, _MLP: _read_mlp, _EXPERTS: _read_experts}
    kinds = {kind: read[kind](config) for kind in dict.fromkeys(types)}
    layers = tuple(kinds[kind] for kind in types)
    return build_config(config, "nemotron_h", layers=layers, norm=read_norm(config, "layer_norm_epsilon", wide=True))


def _read_types(config: HFConfig) -> list[str]:
    """Returns the kind of each layer: by name in newer files, by letters in older ones."""
    field, names, form = "layers_block_type", {kind: kind for kind in _LETTERS.values()} | _OLDER_TYPES, list
    if config.get(field) is None:
        field, names, form = "hybrid_override_pattern", _LETTERS, str
    given = config.get(field)
    is_known = isinstance(given, form) and all(isinstance(kind, str) and kind in names for kind in given)
    if not is_known or not 0 < len(given) <= _MAX_LAYERS:
        message = f"must say of each layer which of {', '.join(names)} it is, not {shorten(given)}"
        raise ConfigError(message, field=field, value=given)
    count = config.optional_integer("num_hidden_layers")
    if count not in (None, len(given)):
        raise ConfigError(f"is not the {len(given)} layers of {field}", field="num_hidden_layers", value=count)
    return [names[kind] for kind in given]


def _read_mamba(config: HFConfig) -> LayerKind:
    require_free_steps(config)
    mamba = Mamba2Config(
        num_groups=config.integer("n_groups"),
        num_heads=config.integer("mamba_num_heads"),
        head_dim=config.integer("mamba_head_dim"),
        state_size=config.integer("ssm_state_size"),
        conv_size=config.integer("conv_kernel", minimum=2, maximum=64),
        activation=config.choice("mamba_hidden_act", ACTIVATIONS),
        conv_bias=config.flag("use_conv_bias"),
        bias=config.flag("use_bias"),
    )
    return LayerKind(check_groups("mamba_num_heads", mamba), None, None, None)


def _read_attention(config: HFConfig) -> LayerKind:
    return LayerKind(read_attention(config), None, None, None)


def _read_mlp(config: HFConfig) -> LayerKind:
    mlp = read_mlp(config, activation_key="mlp_hidden_act", bias=config.flag("mlp_bias"), gated=False)
    return LayerKind(NO_MIXER, None, None, mlp)


def _read_experts(config: HFConfig) -> LayerKind:
    """Returns a layer of experts and a shared block, all without gates."""
    config.require_off("moe_latent_size", "mlp_bias")
    config.require(n_shared_experts=1)
    moe = read_routed_experts(config.rename({"hidden_act": "mlp_hidden_act"}), gated=False)
    size = config.integer("moe_shared_expert_intermediate_size")
    return LayerKind(NO_MIXER, None, None, replace(moe, shared=replace(moe.expert, intermediate_size=size)))


def list_layer_params(layer: CheckpointLayer) -> Table:
    """A norm before the layer's block."""
    mixer = layer.kind.mixer
    norm = norm_params(layer, {"mlp_norm" if isinstance(mixer, NoMixer) else "attn_norm": "norm"})
    if isinstance(mixer, Mamba2Config):
        return norm | mamba_params(layer, "mixer")
    if isinstance(mixer, AttentionConfig):
        return norm | attention_params(layer, modules={part: f"mixer.{part}_proj" for part in "qkvo"})
    if isinstance(layer.kind.mlp, MoEConfig):
        return norm | moe_params(layer, module="mixer", packed_module="mixer", shared="shared_experts")
    return norm | plain_mlp_params(layer, up="mixer.up_proj", down="mixer.down_proj")


FAMILY = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    KEYS,
    parse,
    hybrid_layer,
    list_layer_params,
    ignored_keys=_IGNORED_KEYS,
    trunk=Trunk("backbone.embeddings", "backbone.layers", "backbone.norm_f"),
    ignored_weights=(r"mtp\..*",),
)
