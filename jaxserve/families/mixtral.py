"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Family, LayerKind, Table
from jaxserve.core.models.blocks import pre_norm_layer
from jaxserve.core.models.common import build_config, omit, read_attention, read_num_layers, read_rope
from jaxserve.core.models.expert_parameters import moe_params
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.moe_config import COUNT_KEYS, TRAINING_KEYS, read_count, read_experts
from jaxserve.core.models.parameters import attention_params, pre_norm_params
from jaxserve.families.mistral import KEYS as MISTRAL_KEYS

KEYS = (
    omit(MISTRAL_KEYS, "sliding_window")
    | COUNT_KEYS
    | {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "num_experts_per_tok": 2,
    }
)


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a Mixtral config.json."""
    attention = read_attention(config)
    rope, window = read_rope(config, attention.head_dim), config.optional_integer("sliding_window")
    moe = read_experts(config, read_count(config, 8), size_key="intermediate_size", normalize=True)
    layers = (LayerKind(attention, window, rope, moe),) * read_num_layers(config)
    return build_config(config, "mixtral", layers=layers)


def list_layer_params(layer: CheckpointLayer) -> Table:
    """Separate projections, one norm before each block, experts by their old names."""
    experts = moe_params(layer, module="block_sparse_moe", projections=("w1", "w3", "w2"))
    return pre_norm_params(layer) | attention_params(layer) | experts


FAMILY = Family(
    "mixtral", "MixtralForCausalLM", KEYS, parse, pre_norm_layer, list_layer_params, ignored_keys=TRAINING_KEYS
)
