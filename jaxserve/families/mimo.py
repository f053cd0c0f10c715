"""MiMo-7B (Xiaomi 2025): Qwen 2, with layers for multi-token prediction that a drafter may use.

Those layers are no part of the decoder: served without the drafter "mtp", their tensors are not read.
"""

from __future__ import annotations

from jaxserve.core.models.base import DecoderConfig, Family
from jaxserve.core.models.blocks import pre_norm_layer
from jaxserve.core.models.common import build_config, read_attention
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.families import llama, qwen2

# `num_nextn_predict_layers` counts the layers for prediction, which `drafters/mtp.py` knows. The reference has biases
# on q, k and v whatever `attention_bias` says.
KEYS = qwen2.KEYS | {"num_nextn_predict_layers": 0, "attention_bias": None}
MTP_LAYERS = "model.mtp_layers"


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a MiMo config.json."""
    config.require(attention_bias=True)
    config.integer("num_nextn_predict_layers", minimum=0)
    attention = read_attention(config, qkv_bias=True)
    return build_config(config, "mimo", layers=qwen2.read_layers(config, attention))


FAMILY = Family(
    "mimo",
    "MiMoForCausalLM",
    KEYS,
    parse,
    pre_norm_layer,
    llama.list_layer_params,
    ignored_weights=(r"model\.mtp_layers\..*",),
)
