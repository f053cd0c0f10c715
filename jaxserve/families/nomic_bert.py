"""NomicBERT: BERT with rotated heads, a gate in its feed-forward block, and few biases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxserve.core.layers.embedding import AddedEmbeddings
from jaxserve.core.layers.rope import RopeConfig
from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Family, LayerKind, Table
from jaxserve.core.models.blocks import post_norm_layer
from jaxserve.core.models.common import omit, read_attention, read_mlp, read_rope
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.parameters import fused_attention_params, mlp_params, norm_params
from jaxserve.core.models.trunk import Trunk
from jaxserve.families import bert
from jaxserve.pooling_options import PoolingType

# The authors' names for the keys of transformers.
_OLD_NAMES = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
}
# Their other keys, each with the one value that is supported.
_FIXED: dict[str, Any] = {"activation_function": "swiglu", "rotary_emb_fraction": 1.0, "scale_attn_weights": True}
_OFF = (
    *("causal", "prenorm", "use_rms_norm", "parallel_block", "parallel_block_tied_norm", "moe_every_n_layers"),
    *("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "rotary_emb_interleaved", "rotary_scaling_factor"),
    *("rotary_emb_scale_base", "scale_attn_by_inverse_layer_idx"),
)

ROTARY_KEYS: dict[str, object] = omit(bert.KEYS, "position_embedding_type", "is_decoder", "add_cross_attention") | {
    "rope_theta": 1000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "partial_rotary_factor": None,
    "original_max_position_embeddings": None,
}
"""Keys of encoders whose heads rotate."""

KEYS = ROTARY_KEYS | {"hidden_act": "silu", "max_position_embeddings": 2048}
KEYS |= dict.fromkeys((*_OLD_NAMES.values(), *_FIXED, *_OFF))


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a NomicBERT config.json, in the form of its authors or of transformers."""
    if config.get("n_embd") is not None:
        config.require(**_FIXED)
        config.require_off(*_OFF)
        config = config.rename(_OLD_NAMES)
    return read_rotary_encoder(config, "nomic_bert", pooling_type="MEAN")


def read_rotary_encoder(
    config: HFConfig,
    family: str,
    *,
    bias: bool = False,
    pooling_type: PoolingType = "CLS",
    read: Callable[[HFConfig, int], RopeConfig] = read_rope,
) -> DecoderConfig:
    """Returns the model of a config.json with `ROTARY_KEYS`, whose feed-forward blocks have a gate.

    `bias`: in attention and in the last projection of a feed-forward block. `read` returns the rotation of heads of a
    size.
    """
    attention = read_attention(config, qkv_bias=bias, out_bias=bias)
    kind = LayerKind(attention, None, read(config, attention.head_dim), replace(read_mlp(config), down_bias=bias))
    return bert.build_encoder(config, family, kind, AddedEmbeddings(), pooling_type)


def list_layer_params(layer: CheckpointLayer) -> Table:
    """Fused q, k and v, one norm after each block."""
    table = norm_params(layer, {"attn_norm": "norm1", "mlp_norm": "norm2"})
    table |= fused_attention_params(layer, qkv="attn.Wqkv", out="attn.out_proj")
    return table | mlp_params(layer, names=("fc12", "fc11", "fc2"))


FAMILY = Family(
    "nomic_bert",
    "NomicBertModel",
    KEYS,
    parse,
    post_norm_layer,
    list_layer_params,
    ignored_keys=(
        *bert.IGNORED_KEYS,
        *("dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "max_trained_positions"),
        *("pad_vocab_size_multiple", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout"),
        *("summary_proj_to_labels", "summary_type", "summary_use_proj", "use_flash_attn", "use_xentropy"),
    ),
    trunk=Trunk("bert.embeddings.word_embeddings", "bert.encoder.layers", embed_norm="bert.emb_ln"),
    ignored_weights=bert.list_ignored("bert"),
    headless=("NomicBertForMaskedLM", "NomicBertForPreTraining"),
)
