"""Gemma 4 text: heads of two sizes, pages that later layers read again, inputs of each layer, experts beside the MLP.

Images of multimodal checkpoints ("gemma4") have a tower of their own (gemma4_tower.py); that of sound is left out.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax

from jaxserve.core.layers.activations import ACTIVATIONS
from jaxserve.core.layers.attention import AttentionConfig
from jaxserve.core.layers.context import LayerContext
from jaxserve.core.layers.linear import linear
from jaxserve.core.layers.mlp import MLPConfig, gated_mlp
from jaxserve.core.layers.moe import MoEConfig, mix_experts
from jaxserve.core.layers.norm import normalize
from jaxserve.core.layers.rope import RopeConfig
from jaxserve.core.layers.router import RouterConfig
from jaxserve.core.models.base import (
    CheckpointLayer,
    DecoderConfig,
    Family,
    LayerKind,
    Leaves,
    Parameter,
    ParamSpec,
    Stream,
    Table,
)
from jaxserve.core.models.blocks import sandwich_layer
from jaxserve.core.models.common import (
    DECODER_KEYS,
    alternate_layer_types,
    build_config,
    omit,
    read_attention,
    read_layer_types,
    read_mlp,
    read_norm,
    read_num_layers,
)
from jaxserve.core.models.expert_parameters import expert_params, router_params
from jaxserve.core.models.hf_config import HFConfig, check_integer, check_mapping
from jaxserve.core.models.moe_config import MAX_EXPERTS
from jaxserve.core.models.parameters import attention_params, make_source, mlp_params, norm_params, projection_params
from jaxserve.core.models.rope_config import parse_rope
from jaxserve.errors import ConfigError, shorten
from jaxserve.families import gemma2
from jaxserve.families.multimodal import serve_as_text

KEYS = omit(DECODER_KEYS, "rope_theta", "rope_scaling", "partial_rotary_factor") | {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "sliding_window": 512,
    "layer_types": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": None,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "per_layer_config": None,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
}

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPES: dict[str, dict[str, object]] = {
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}


def parse(config: HFConfig) -> DecoderConfig:
    """Reads the config.json of a Gemma 4 text model."""
    config.require(use_bidirectional_attention="vision")  # among the tokens of an image
    size = config.integer("hidden_size_per_layer_input", minimum=0) or None
    if size is not None:
        config.require(vocab_size_per_layer_input=config.integer("vocab_size"))
    decoder = build_config(
        config,
        "gemma4_text",
        layers=_read_layers(config),
        norm=read_norm(config, wide=True),
        embed_scale=config.integer("hidden_size") ** 0.5,
        final_softcap=config.optional_number("final_logit_softcapping"),
    )
    return replace(decoder, layer_input_size=size)


def _read_layers(config: HFConfig) -> tuple[LayerKind, ...]:
    """Returns the layers; of the last `num_kv_shared_layers` each reads the pages of the last of its type before."""
    num_layers, mlp = read_num_layers(config), _read_mlp(config)
    types = read_layer_types(config, [*alternate_layer_types(num_layers, 6)[:-1], _FULL])
    if types[-1] != _FULL:
        raise ConfigError("the last layer must have full_attention", field="layer_types", value=types[-1])
    num_own = num_layers - config.integer("num_kv_shared_layers", minimum=0)
    if num_own < 1 or set(types[:num_own]) != set(types):
        message = "every type of layer needs one with keys and values of its own"
        raise ConfigError(message, field="num_kv_shared_layers", value=num_layers - num_own)
    kinds, wide = _read_kinds(config, types, mlp), 2 if config.flag("use_double_wide_mlp") else 1
    last = {kind: max(index for index in range(num_own) if types[index] == kind) for kind in kinds}
    borrowing = {
        name: replace(
            kind,
            mixer=replace(kind.attention, projections="q"),
            mlp=_widen(mlp, wide),
            page_owner=last[name],
        )
        for name, kind in kinds.items()
    }
    return (*(kinds[name] for name in types[:num_own]), *(borrowing[name] for name in types[num_own:]))


def _read_mlp(config: HFConfig) -> MLPConfig | MoEConfig:
    """Returns the dense block, or the experts that stand beside it, with it as the shared one."""
    dense = read_mlp(config, activation_key="hidden_activation")
    if not config.flag("enable_moe_block"):
        config.require_off("num_experts", "top_k_experts", "moe_intermediate_size")
        return dense
    count, top_k = config.integer("num_experts", maximum=MAX_EXPERTS), config.integer("top_k_experts")
    if top_k > count:
        raise ConfigError(f"{top_k} of {count} experts is not possible", field="top_k_experts", value=top_k)
    expert = replace(dense, intermediate_size=config.integer("moe_intermediate_size"))
    return MoEConfig(RouterConfig(count, top_k, normalize=True, scales=True), expert, shared=dense)


def _widen(mlp: MLPConfig | MoEConfig, times: int) -> MLPConfig | MoEConfig:
    """Returns the same with so many times the columns in the dense block."""
    if isinstance(mlp, MoEConfig):
        assert mlp.shared is not None
        return replace(mlp, shared=replace(mlp.shared, intermediate_size=times * mlp.shared.intermediate_size))
    return replace(mlp, intermediate_size=times * mlp.intermediate_size)


def _read_kinds(config: HFConfig, types: list[str], mlp: MLPConfig | MoEConfig) -> dict[str, LayerKind]:
    """Returns the layers of each type that have keys and values of their own."""
    bias = config.flag("attention_bias")
    sliding = read_attention(config, scale=1.0, qkv_bias=bias, out_bias=bias, qk_norm="shared")
    sliding = replace(sliding, v_norm=True)
    attentions = {_SLIDING: sliding, _FULL: _read_full_attention(config, sliding, types)}
    window = config.integer("sliding_window")
    ropes = {kind: _read_rope(config, kind, attention.head_dim) for kind, attention in attentions.items()}
    return {
        kind: LayerKind(attentions[kind], window if kind == _SLIDING else None, ropes[kind], mlp)
        for kind in dict.fromkeys(types)
    }


def _read_full_attention(config: HFConfig, sliding: AttentionConfig, types: list[str]) -> AttentionConfig:
    """Returns the attention of full layers, whose numbers transformers 5 writes for each layer."""
    keys_are_values = config.flag("attention_k_eq_v")
    given = {"head_dim": config.integer("global_head_dim")}
    num_kv_heads = config.optional_integer("num_global_key_value_heads")
    if keys_are_values and num_kv_heads is not None:
        given["num_key_value_heads"] = num_kv_heads
    by_layer = config.mapping("per_layer_config")
    if by_layer:
        full = {str(index) for index, kind in enumerate(types) if kind == _FULL}
        by_layer = {key.lstrip("0") or "0": value for key, value in by_layer.items()}  # transformers fills them up
        numbers = [check_mapping("per_layer_config", each) for each in by_layer.values()]
        known = {"head_dim", "num_key_value_heads"}
        if by_layer.keys() != full or any(each != numbers[0] or not each.keys() <= known for each in numbers):
            message = (
                f"must hold head_dim and num_key_value_heads, the same for each full layer, not {shorten(by_layer)}"
            )
            raise ConfigError(message, field="per_layer_config", value=by_layer)
        given = {key: check_integer(f"per_layer_config.{key}", value) for key, value in numbers[0].items()}
    num_kv_heads = given.get("num_key_value_heads", sliding.num_kv_heads)
    if sliding.num_heads % num_kv_heads:
        message = f"{num_kv_heads} does not divide num_attention_heads {sliding.num_heads}"
        raise ConfigError(message, field="num_global_key_value_heads", value=num_kv_heads)
    return replace(
        sliding,
        head_dim=given.get("head_dim", sliding.head_dim),
        num_kv_heads=num_kv_heads,
        projections="qk" if keys_are_values else "qkv",
    )


def _read_rope(config: HFConfig, kind: str, head_dim: int) -> RopeConfig:
    by_type = config.mapping("rope_parameters") or _ROPES
    parameters = check_mapping(f"rope_parameters.{kind}", by_type.get(kind))
    length = config.integer("max_position_embeddings")
    return parse_rope(parameters, head_dim=head_dim, max_position_embeddings=length)


def apply_layer(
    config: DecoderConfig, kind: LayerKind, leaves: Leaves, x: Stream, ctx: LayerContext
) -> tuple[Stream, jax.Array]:
    """Gemma 2's layer, then the layer's own input through a gate, then a factor on everything."""
    x, pages = sandwich_layer(config, kind, leaves, x, ctx, _feed_forward)
    if ctx.layer_input is not None:
        gate = ACTIVATIONS[_find_dense(kind).activation](linear(ctx, leaves["input_gate"], x))
        fed = linear(ctx, leaves["input_proj"], gate * ctx.layer_input)
        x = x + normalize(config.norm, leaves["input_norm"], fed)
    return x * leaves["factor"], pages


def _find_dense(kind: LayerKind) -> MLPConfig:
    dense = kind.mlp.shared if isinstance(kind.mlp, MoEConfig) else kind.mlp
    assert dense is not None
    return dense


def _feed_forward(config: DecoderConfig, kind: LayerKind, leaves: Leaves, x: Stream, ctx: LayerContext) -> Stream:
    """The dense block, or the sum of it and of experts, each between norms of its own.

    The router reads the residual stream through a norm of its own, too.
    """
    norm, dense = config.norm, partial(gated_mlp, _find_dense(kind))
    inner = normalize(norm, leaves["mlp_norm"], x)
    if not isinstance(kind.mlp, MoEConfig):
        return dense(leaves, inner, ctx)
    fed = normalize(norm, leaves["shared_out_norm"], dense(leaves["shared"], inner, ctx))
    routed = normalize(norm, leaves["router_norm"], x) * config.hidden_size**-0.5
    inner = normalize(norm, leaves["experts_norm"], x)
    mixed = mix_experts(replace(kind.mlp, shared=None), leaves, inner, ctx, router_input=routed)
    return fed + normalize(norm, leaves["experts_out_norm"], mixed)


def list_layer_params(layer: CheckpointLayer) -> Table:
    """Gemma 2's, experts beside the dense block, a factor and, where the layer has an input, what it goes through."""
    config, size = layer.config, layer.config.layer_input_size
    source = make_source((layer.tensor("layer_scalar"),), ((1,),), lambda tensor: tensor)
    table = (
        norm_params(layer, gemma2.NORMS)
        | attention_params(layer)
        | {"factor": Parameter(ParamSpec((1,), config.dtype, (None,), "ones"), source)}
    )
    table |= _list_moe_params(layer, layer.kind.mlp) if isinstance(layer.kind.mlp, MoEConfig) else mlp_params(layer)
    if size is None:
        return table
    hidden = config.hidden_size
    table |= projection_params(config, "input_gate", layer.tensor("per_layer_input_gate"), (hidden, size))
    table |= projection_params(config, "input_proj", layer.tensor("per_layer_projection"), (size, hidden))
    return table | norm_params(layer, {"input_norm": "post_per_layer_input_norm"})


def _list_moe_params(layer: CheckpointLayer, moe: MoEConfig) -> Table:
    """Returns the router, the experts, the dense block as `shared`, and the norms around them."""
    vectors = {"router_norm.weight": ("router.scale", layer.config.hidden_size)}
    vectors["router.scales"] = "router.per_expert_scale", moe.router.num_experts
    table = {
        name: Parameter(
            ParamSpec((size,), layer.config.dtype, (None,), "ones"),
            make_source((layer.tensor(tensor),), ((size,),), lambda array: array),
        )
        for name, (tensor, size) in vectors.items()
    }
    table |= norm_params(layer, _EXPERT_NORMS) | router_params(layer, moe, layer.tensor("router.proj"))
    table |= expert_params(layer, moe, layer.tensor("experts"), layer.tensor("experts"))
    return table | {f"shared.{name}": each for name, each in mlp_params(layer, moe.shared).items()}


_EXPERT_NORMS = {
    "shared_out_norm": "post_feedforward_layernorm_1",
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_out_norm": "post_feedforward_layernorm_2",
}

# Layers that read another's pages have keys and values in files, which nothing uses.
_UNUSED = r".*layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\..*"

FAMILY = Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    KEYS,
    parse,
    apply_layer,
    list_layer_params,
    ignored_weights=(_UNUSED,),
    fits_float16=False,
)

MULTIMODAL_FAMILY = serve_as_text(
    FAMILY,
    "gemma4",
    "Gemma4ForConditionalGeneration",
    ignored_keys=(
        "vision_config",
        "audio_config",
        "boi_token_id",
        "eoi_token_id",
        "image_token_id",
        "video_token_id",
        "boa_token_id",
        "eoa_token_id",
        "eoa_token_index",
        "audio_token_id",
        "vision_soft_tokens_per_image",
    ),
    towers=tuple(f"model.{tower}" for tower in ("vision_tower", "audio_tower", "embed_vision", "embed_audio")),
)
