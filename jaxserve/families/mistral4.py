"""Mistral Small 4: DeepSeek-V3's layers with a softmax over experts, and queries that grow with their position."""

from __future__ import annotations

import dataclasses

from jaxserve.core.layers.attention import QueryGrowth
from jaxserve.core.models.base import DecoderConfig, Family
from jaxserve.core.models.blocks import latent_layer
from jaxserve.core.models.common import DECODER_KEYS, read_num_layers
from jaxserve.core.models.hf_config import HFConfig, check_integer, check_number
from jaxserve.core.models.latent_attention import LATENT_KEYS
from jaxserve.core.models.moe_config import ROUTED_KEYS, read_dense_first, read_routed_experts
from jaxserve.core.models.rope_config import rope_parameters
from jaxserve.families import deepseek_v3

KEYS = (
    DECODER_KEYS
    | LATENT_KEYS
    | ROUTED_KEYS
    | {
        "max_position_embeddings": 1048576,
        "hidden_act": "silu",
        "q_lora_rank": 1024,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
    }
)


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a Mistral Small 4 config.json."""
    sparse = read_dense_first(config, read_num_layers(config))
    moe = read_routed_experts(config, scoring="softmax", correction=False)
    decoder = deepseek_v3.build_decoder(config, "mistral4", sparse, moe)
    growth = _read_growth(config)
    return decoder.change_attention(lambda attention: dataclasses.replace(attention, query_growth=growth))


def _read_growth(config: HFConfig) -> QueryGrowth | None:
    """Returns the growth that the rope object describes; without it there is none."""
    parameters = rope_parameters(config)
    beta = parameters.get("llama_4_scaling_beta")
    if not beta:
        return None
    key = "original_max_position_embeddings"
    return QueryGrowth(
        beta=check_number("rope_parameters.llama_4_scaling_beta", beta),
        length=check_integer(f"rope_parameters.{key}", parameters.get(key)),
    )


FAMILY = Family(
    "mistral4",
    "Mistral4ForCausalLM",
    KEYS,
    parse,
    latent_layer,
    deepseek_v3.list_layer_params,
    ignored_keys=deepseek_v3.FAMILY.ignored_keys,
)
