"""ModernBERT: two layers of three see a window around each token, a rotary base for each kind, norms without biases."""

from __future__ import annotations

import jax

from jaxserve.core.layers.attention import attend
from jaxserve.core.layers.context import LayerContext
from jaxserve.core.layers.embedding import AddedEmbeddings
from jaxserve.core.layers.moe import feed_forward
from jaxserve.core.layers.norm import normalize
from jaxserve.core.models.base import (
    CheckpointLayer,
    DecoderConfig,
    Family,
    LayerKind,
    Leaves,
    Stream,
    Table,
)
from jaxserve.core.models.common import (
    build_config,
    make_encoder,
    read_attention,
    read_layer_types,
    read_mlp,
    read_norm,
    read_num_layers,
    read_typed_ropes,
    window_layers,
)
from jaxserve.core.models.hf_config import REQUIRED, HFConfig
from jaxserve.core.models.parameters import fused_attention_params, fused_mlp_params, norm_params
from jaxserve.core.models.trunk import Trunk

KEYS: dict[str, object] = {
    "vocab_size": REQUIRED,
    "hidden_size": REQUIRED,
    "intermediate_size": REQUIRED,
    "num_hidden_layers": REQUIRED,
    "num_attention_heads": REQUIRED,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 8192,
    "hidden_activation": "gelu",
    "norm_eps": 1e-5,
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "layer_types": None,
    "global_attn_every_n_layers": 3,
    "local_attention": 128,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "rope_parameters": None,
    "rope_scaling": None,
    "partial_rotary_factor": None,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "dtype": None,
    "torch_dtype": None,
}


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a ModernBERT config.json. A query sees `local_attention` // 2 keys on each side, and its own."""
    config = config.rename({"rope_theta": "global_rope_theta"})
    config.require_off("rope_scaling")
    bias = config.flag("attention_bias")
    attention = read_attention(config, qkv_bias=bias, out_bias=bias)
    period = config.integer("global_attn_every_n_layers")
    default = ["sliding_attention" if index % period else "full_attention" for index in range(read_num_layers(config))]
    mlp = read_mlp(config, activation_key="hidden_activation", bias=config.flag("mlp_bias"))
    ropes = read_typed_ropes(config, attention.head_dim, sliding_theta="local_rope_theta")
    radius = config.integer("local_attention", minimum=2) // 2
    layers = window_layers(attention, read_layer_types(config, default), radius, mlp, *ropes)
    norm = read_norm(config, "norm_eps", centered=True, bias=config.flag("norm_bias"), wide=True)
    return make_encoder(build_config(config, "modernbert", layers=layers, norm=norm), added=AddedEmbeddings())


def layer(
    config: DecoderConfig, kind: LayerKind, leaves: Leaves, x: Stream, ctx: LayerContext
) -> tuple[Stream, jax.Array]:
    """A norm before each block, but for the attention of the first layer, which reads the normalised embeddings."""
    norm = config.norm
    read = normalize(norm, leaves["attn_norm"], x) if "attn_norm" in leaves else x
    attended, pages = attend(kind.attention, norm, leaves, read, ctx)
    x = x + attended
    return x + feed_forward(kind.mlp, leaves, normalize(norm, leaves["mlp_norm"], x), ctx), pages


def list_layer_params(layer: CheckpointLayer) -> Table:
    """Fused q, k and v, gate before up in one module, one norm before each block but the first."""
    norms = {"attn_norm": "attn_norm", "mlp_norm": "mlp_norm"} if layer.index else {"mlp_norm": "mlp_norm"}
    table = norm_params(layer, norms) | fused_attention_params(layer, qkv="attn.Wqkv", out="attn.Wo")
    return table | fused_mlp_params(layer, gate_up="mlp.Wi", down="mlp.Wo")


FAMILY = Family(
    "modernbert",
    "ModernBertModel",
    KEYS,
    parse,
    layer,
    list_layer_params,
    ignored_keys=(
        *("classifier_activation", "classifier_bias", "classifier_pooling", "decoder_bias", "deterministic_flash_attn"),
        *("embedding_dropout", "initializer_cutoff_factor", "layer_norm_eps", "mlp_dropout", "position_embedding_type"),
        *("reference_compile", "repad_logits_with_grad", "sparse_prediction", "sparse_pred_ignore_index"),
    ),
    trunk=Trunk(
        "model.embeddings.tok_embeddings", "model.layers", "model.final_norm", "decoder", "model.embeddings.norm"
    ),
    ignored_weights=(r"(head|decoder)\..*",),
    headless=("ModernBertForMaskedLM",),
)
