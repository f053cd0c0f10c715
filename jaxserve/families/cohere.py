"""Command-R and Aya: one LayerNorm per layer, which attention and feed-forward both read, and interleaved rotation."""

from __future__ import annotations

from dataclasses import replace

import jax

from jaxserve.core.layers.attention import attend
from jaxserve.core.layers.context import LayerContext
from jaxserve.core.layers.mlp import gated_mlp
from jaxserve.core.layers.norm import normalize
from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Family, LayerKind, Leaves, Stream, Table
from jaxserve.core.models.common import (
    DECODER_KEYS,
    build_config,
    omit,
    read_attention,
    read_mlp,
    read_norm,
    read_num_layers,
    read_rope,
)
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.parameters import attention_params, mlp_params, norm_params

KEYS = omit(DECODER_KEYS, "rms_norm_eps") | {
    "max_position_embeddings": 8192,
    "original_max_position_embeddings": None,
    "model_max_length": None,
    "layer_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 255001,
    "hidden_act": "silu",
    "attention_bias": False,
    "logit_scale": 0.0625,
    "use_qk_norm": False,
}


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a Command-R config.json."""
    bias = config.flag("attention_bias")
    qk_norm = "per_head" if config.flag("use_qk_norm") else None
    attention = read_attention(config, qkv_bias=bias, out_bias=bias, qk_norm=qk_norm)
    kind = LayerKind(attention, window=None, rope=read_rope(config, attention.head_dim), mlp=read_mlp(config))
    norm = read_norm(config, "layer_norm_eps", centered=True, wide=True)
    decoder = build_config(
        config,
        "cohere",
        layers=(kind,) * read_num_layers(config),
        norm=norm,
        logit_scale=config.number("logit_scale"),
    )
    # The trained length in its files; `max_position_embeddings` is only the size of the reference's cache.
    length = config.optional_integer("model_max_length") or decoder.max_position_embeddings
    return replace(decoder, max_position_embeddings=length, max_model_len=length)


def apply_layer(
    config: DecoderConfig, kind: LayerKind, leaves: Leaves, x: Stream, ctx: LayerContext
) -> tuple[Stream, jax.Array]:
    """One norm for both blocks."""
    normed = normalize(config.norm, leaves["attn_norm"], x)
    attended, pages = attend(kind.attention, config.norm, leaves, normed, ctx)
    return x + attended + gated_mlp(kind.mlp, leaves, normed, ctx), pages


def list_layer_params(layer: CheckpointLayer) -> Table:
    """Separate projections, one norm."""
    norms = norm_params(layer, {"attn_norm": "input_layernorm"})
    return norms | attention_params(layer, interleaved=True) | mlp_params(layer)


FAMILY = Family("cohere", "CohereForCausalLM", KEYS, parse, apply_layer, list_layer_params)
