"""DeepSeek-V2: latent attention, experts chosen by a softmax, the best groups first; scores are not normalised."""

from __future__ import annotations

from jaxserve.core.models.base import DecoderConfig, Family
from jaxserve.core.models.blocks import latent_layer
from jaxserve.core.models.common import DECODER_KEYS, read_num_layers
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.latent_attention import IGNORED_KEYS, LATENT_KEYS
from jaxserve.core.models.moe_config import ROUTED_KEYS, TRAINING_KEYS, read_dense_first, read_routed_experts
from jaxserve.families import deepseek_v3

_JUDGES = {"greedy": 0, "group_limited_greedy": 1}  # scores that judge a group, by `topk_method`

KEYS = (
    DECODER_KEYS
    | LATENT_KEYS
    | ROUTED_KEYS
    | {
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "mlp_bias": False,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1407,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "norm_topk_prob": False,
    }
)


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a DeepSeek-V2 config.json."""
    config.require(scoring_func="softmax", moe_layer_freq=1)
    config.require_off("norm_topk_prob", "mlp_bias")
    judges = _JUDGES[config.choice("topk_method", _JUDGES)]
    moe = read_routed_experts(config, judges=judges, scoring="softmax", correction=False)
    sparse = read_dense_first(config, read_num_layers(config))
    return deepseek_v3.build_decoder(config, "deepseek_v2", sparse, moe)


FAMILY = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    KEYS,
    parse,
    latent_layer,
    deepseek_v3.list_layer_params,
    ignored_keys=(*IGNORED_KEYS, *TRAINING_KEYS),
)
