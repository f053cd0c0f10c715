"""Gemma 3 text: five windowed layers for each global one, a rotary base for each kind, and norms on the heads.

With `use_bidirectional_attention` it is an encoder, EmbeddingGemma.
Images of multimodal checkpoints ("gemma3") have a tower of their own (gemma3_tower.py).
"""

from __future__ import annotations

from jaxserve.core.layers.attention import AttentionConfig
from jaxserve.core.models.base import DecoderConfig, Family, LayerKind
from jaxserve.core.models.blocks import sandwich_layer
from jaxserve.core.models.common import (
    alternate_layer_types,
    build_config,
    make_encoder,
    omit,
    read_attention,
    read_layer_types,
    read_mlp,
    read_norm,
    read_num_layers,
    read_typed_ropes,
    window_layers,
)
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.trunk import DEFAULT_TRUNK
from jaxserve.families import gemma2
from jaxserve.families.gemma2 import IGNORED_KEYS, list_layer_params
from jaxserve.families.multimodal import serve_as_text

KEYS = omit(gemma2.KEYS, "original_max_position_embeddings") | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
}


def parse(config: HFConfig) -> DecoderConfig:
    """Reads the config.json of a Gemma 3 text model."""
    config.require_off("attn_logit_softcapping")  # the reference accepts a value and does not apply it
    bias = config.flag("attention_bias")
    scale = config.number("query_pre_attn_scalar") ** -0.5
    attention = read_attention(config, scale=scale, qkv_bias=bias, out_bias=bias, qk_norm="shared")
    is_encoder = config.flag("use_bidirectional_attention")
    model = build_config(
        config,
        "gemma3_text",
        layers=_read_layers(config, attention, is_encoder=is_encoder),
        norm=read_norm(config, unit_offset=True, wide=True),
        embed_scale=config.integer("hidden_size") ** 0.5,
        final_softcap=config.optional_number("final_logit_softcapping"),
    )
    return make_encoder(model, pooling_type="MEAN") if is_encoder else model


def _read_layers(config: HFConfig, attention: AttentionConfig, *, is_encoder: bool) -> tuple[LayerKind, ...]:
    ropes = read_typed_ropes(config, attention.head_dim, sliding_theta="rope_local_base_freq")
    period = config.integer("sliding_window_pattern")
    types = read_layer_types(config, alternate_layer_types(read_num_layers(config), period))
    mlp = read_mlp(config, activation_key="hidden_activation")
    if is_encoder:  # half of the window is on each side of a query
        window: int | None = config.integer("sliding_window", minimum=2) // 2
    else:
        window = config.optional_integer("sliding_window")
    return window_layers(attention, types, window, mlp, *ropes)


FAMILY = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    KEYS,
    parse,
    sandwich_layer,
    list_layer_params,
    ignored_keys=IGNORED_KEYS,
    fits_float16=False,
    headless=("Gemma3TextModel",),
)

MULTIMODAL_FAMILY = serve_as_text(
    FAMILY,
    "gemma3",
    "Gemma3ForConditionalGeneration",
    ignored_keys=(
        "vision_config",
        "mm_tokens_per_image",
        "boi_token_index",
        "eoi_token_index",
        "image_token_index",
    ),
    towers=("vision_tower", "multi_modal_projector"),
    trunk=DEFAULT_TRUNK.below("language_model"),
)
