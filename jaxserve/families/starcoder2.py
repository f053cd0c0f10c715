"""StarCoder 2: LayerNorms, a feed-forward block without a gate, and biases everywhere."""

from __future__ import annotations

from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Family, LayerKind, Table
from jaxserve.core.models.blocks import pre_norm_layer
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
from jaxserve.core.models.parameters import attention_params, plain_mlp_params, pre_norm_params

KEYS = omit(DECODER_KEYS, "rms_norm_eps") | {
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": None,
    "norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 50256,
    "hidden_act": "gelu_pytorch_tanh",
    "sliding_window": None,
    "use_bias": True,
    "mlp_type": None,
    "norm_type": None,
    "scale_attn_weights": None,
}


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a StarCoder 2 config.json. `use_bias` is for projections; norms always have a bias."""
    config.require(mlp_type="default", norm_type="layer_norm", scale_attn_weights=True)
    bias = config.flag("use_bias")
    attention = read_attention(config, qkv_bias=bias, out_bias=bias)
    rope, window = read_rope(config, attention.head_dim), config.optional_integer("sliding_window")
    kind = LayerKind(attention, window, rope, read_mlp(config, bias=bias, gated=False))
    return build_config(
        config,
        "starcoder2",
        layers=(kind,) * read_num_layers(config),
        norm=read_norm(config, "norm_epsilon", centered=True, bias=True, wide=True),
    )


def list_layer_params(layer: CheckpointLayer) -> Table:
    """Separate projections, one norm before each block."""
    mlp = plain_mlp_params(layer, up="mlp.c_fc", down="mlp.c_proj")
    return pre_norm_params(layer) | attention_params(layer) | mlp


FAMILY = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    KEYS,
    parse,
    pre_norm_layer,
    list_layer_params,
    ignored_keys=(
        "activation_function",
        "attention_softmax_in_fp32",
        "scale_attention_softmax_in_fp32",
        "layer_norm_epsilon",
        "residual_dropout",
        "embedding_dropout",
    ),
)
