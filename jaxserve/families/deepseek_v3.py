"""DeepSeek-V3, R1, Kimi K2: latent attention, experts chosen by sigmoids and a correction, behind dense layers."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.core.layers.moe import MoEConfig
from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Family, LayerKind, Table
from jaxserve.core.models.blocks import latent_layer
from jaxserve.core.models.common import DECODER_KEYS, PREDICTION_LAYER, build_config, read_mlp, read_num_layers
from jaxserve.core.models.expert_parameters import moe_params
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.latent_attention import (
    IGNORED_KEYS,
    LATENT_KEYS,
    latent_attention_params,
    read_latent_attention,
    read_latent_rope,
)
from jaxserve.core.models.moe_config import (
    ROUTED_KEYS,
    TRAINING_KEYS,
    give_experts,
    read_dense_first,
    read_routed_experts,
)
from jaxserve.core.models.parameters import mlp_params, pre_norm_params

KEYS = (
    DECODER_KEYS
    | LATENT_KEYS
    | ROUTED_KEYS
    | {
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "n_routed_experts": 256,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 1,
    }
)


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a DeepSeek-V3 config.json."""
    sparse = read_dense_first(config, read_num_layers(config))
    return build_decoder(config, "deepseek_v3", sparse, read_mixture(config))


def read_mixture(config: HFConfig) -> MoEConfig:
    """Returns the mixture of experts."""
    config.require(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    config.integer("num_nextn_predict_layers", minimum=0)
    return read_routed_experts(config)


def build_decoder(config: HFConfig, family: str, sparse: list[bool], moe: MoEConfig) -> DecoderConfig:
    """Returns a model with latent attention and with experts in the layers that `sparse` names."""
    attention = read_latent_attention(config)
    kind = LayerKind(attention, window=None, rope=read_latent_rope(config, attention.latent), mlp=read_mlp(config))
    layers = give_experts((kind,) * len(sparse), sparse, moe)
    return build_config(config, family, layers=layers)


def list_layer_params(layer: CheckpointLayer) -> Table:
    """Latent attention, one norm before each block; experts or a dense block."""
    mlp = moe_params(layer, shared="shared_experts") if layer.has_experts else mlp_params(layer)
    return pre_norm_params(layer) | latent_attention_params(layer) | mlp


FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    KEYS,
    parse,
    latent_layer,
    list_layer_params,
    ignored_keys=(*IGNORED_KEYS, *TRAINING_KEYS),
    ignored_weights=PREDICTION_LAYER,
)
KIMI_FAMILY = replace(FAMILY, model_type="kimi_k2")
