"""Mistral: Llama with a sliding window on every layer, if the file gives one.

Of checkpoints with Pixtral's tower, those of Mistral Small 3.1 and later ("mistral3") and of Pixtral itself, which are
published as "llava", the language model is this one.
"""

from __future__ import annotations

from jaxserve.core.models.base import DecoderConfig, Family, LayerKind
from jaxserve.core.models.blocks import pre_norm_layer
from jaxserve.core.models.common import (
    DECODER_KEYS,
    build_config,
    read_attention,
    read_mlp,
    read_num_layers,
    read_rope,
)
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.trunk import DEFAULT_TRUNK
from jaxserve.families import llama
from jaxserve.families.multimodal import serve_as_text

KEYS = DECODER_KEYS | {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": None,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "sliding_window": 4096,
}


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a Mistral config.json; a missing `sliding_window` means 4096, null means none."""
    attention = read_attention(config)
    rope, window = read_rope(config, attention.head_dim), config.optional_integer("sliding_window")
    kind = LayerKind(attention, window, rope, read_mlp(config))
    return build_config(config, "mistral", layers=(kind,) * read_num_layers(config))


FAMILY = Family(
    "mistral", "MistralForCausalLM", KEYS, parse, pre_norm_layer, llama.list_layer_params, headless=("MistralModel",)
)

_VISION_KEYS = (
    *("vision_config", "image_token_index", "image_token_id", "multimodal_projector_bias", "projector_hidden_act"),
    *("vision_feature_layer", "vision_feature_select_strategy", "spatial_merge_size", "image_seq_length"),
    "ignore_index",  # of losses
)
TOWERS = ("vision_tower", "multi_modal_projector")

MULTIMODAL_FAMILY, PIXTRAL_FAMILY = (
    serve_as_text(
        FAMILY,
        name,
        architecture,
        ignored_keys=_VISION_KEYS,
        towers=TOWERS,
        trunk=DEFAULT_TRUNK.below("language_model"),
    )
    for name, architecture in (
        ("mistral3", "Mistral3ForConditionalGeneration"),
        ("llava", "LlavaForConditionalGeneration"),
    )
)
