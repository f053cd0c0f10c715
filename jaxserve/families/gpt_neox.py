"""GPT-NeoX and Pythia: LayerNorms, a feed-forward block without a gate, and usually parallel blocks."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.core.layers.attention import AttentionConfig
from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Family, LayerKind, Table
from jaxserve.core.models.blocks import pre_norm_layer
from jaxserve.core.models.common import DECODER_KEYS, build_config, omit, read_mlp, read_norm, read_num_layers
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.layouts import keep_heads
from jaxserve.core.models.parameters import fused_attention_params, plain_mlp_params, pre_norm_params
from jaxserve.core.models.rope_config import parse_rope
from jaxserve.core.models.trunk import Trunk
from jaxserve.errors import ConfigError

# Keys of newer files that the reference does not read.
_NOT_READ = ("num_key_value_heads", "head_dim", "rope_theta", "partial_rotary_factor")

KEYS = omit(DECODER_KEYS, "rms_norm_eps", *_NOT_READ) | {
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "rotary_pct": 0.25,
    "rotary_emb_base": 10000.0,
    "use_parallel_residual": True,
    "attention_bias": True,
}


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a GPT-NeoX config.json."""
    attention = _read_attention(config)
    length = config.integer("max_position_embeddings")
    old = {"rope_theta": config.get("rotary_emb_base"), "partial_rotary_factor": config.get("rotary_pct")}
    new = config.mapping("rope_scaling") or config.mapping("rope_parameters")
    parameters = old | {key: value for key, value in new.items() if value is not None}
    rope = parse_rope(parameters, head_dim=attention.head_dim, max_position_embeddings=length, partial=True)
    kind = LayerKind(attention, window=None, rope=rope, mlp=read_mlp(config, bias=True, gated=False))
    decoder = build_config(
        config,
        "gpt_neox",
        layers=(kind,) * read_num_layers(config),
        norm=read_norm(config, "layer_norm_eps", centered=True, bias=True, wide=True),
    )
    return replace(decoder, parallel=config.flag("use_parallel_residual"))


def _read_attention(config: HFConfig) -> AttentionConfig:
    hidden, heads, bias = config.integer("hidden_size"), config.integer("num_attention_heads"), "attention_bias"
    if hidden % heads:
        raise ConfigError(f"{heads} does not divide hidden_size {hidden}", field="num_attention_heads", value=heads)
    size = hidden // heads
    return AttentionConfig(heads, heads, size, scale=size**-0.5, qkv_bias=config.flag(bias), out_bias=config.flag(bias))


def list_layer_params(layer: CheckpointLayer) -> Table:
    """Fused q, k and v, two projections for the feed-forward block."""
    attention = fused_attention_params(layer, qkv="attention.query_key_value", out="attention.dense", fuse=keep_heads)
    mlp = plain_mlp_params(layer, up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h")
    return pre_norm_params(layer) | attention | mlp


FAMILY = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    KEYS,
    parse,
    pre_norm_layer,
    list_layer_params,
    ignored_keys=(*_NOT_READ, "attention_probs_dropout_prob", "hidden_dropout_prob", "custom_pipelines"),
    trunk=Trunk("gpt_neox.embed_in", "gpt_neox.layers", "gpt_neox.final_layer_norm", "embed_out"),
    ignored_weights=(r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
)
