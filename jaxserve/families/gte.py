"""GTE (the multilingual and English models of 8,192 tokens): BERT with rotated heads and a gate.

The authors' files call it "new", those of transformers "gte".
"""

from __future__ import annotations

from dataclasses import replace

from jaxserve.core.layers.rope import LongRopeScaling, RopeConfig
from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Family, Table
from jaxserve.core.models.blocks import post_norm_layer
from jaxserve.core.models.common import read_rope
from jaxserve.core.models.hf_config import HFConfig, check_number
from jaxserve.core.models.parameters import fused_attention_params, fused_mlp_params, norm_params
from jaxserve.errors import ConfigError, shorten
from jaxserve.families import bert
from jaxserve.families.nomic_bert import ROTARY_KEYS, read_rotary_encoder

KEYS = ROTARY_KEYS | {"rope_theta": 160000.0, "max_position_embeddings": 8192, "type_vocab_size": 1}

NEW_KEYS = KEYS | {
    "rope_theta": 10000.0,
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "pack_qkv": True,
    "position_embedding_type": "rope",
}


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a GTE config.json in the form of transformers."""
    return read_rotary_encoder(config, "gte", bias=True)


def parse_new(config: HFConfig) -> DecoderConfig:
    """Reads a GTE config.json in the form of its authors."""
    config.require(layer_norm_type="layer_norm", position_embedding_type="rope", pack_qkv=True)
    config.require_off("logn_attention_scale")
    return read_rotary_encoder(config, "new", bias=True, read=_read_rope)


def _read_rope(config: HFConfig, head_dim: int) -> RopeConfig:
    """Returns the rotation; the type ntk divides frequency i by factor ** ((2i + 2) / H), whatever the length."""
    scaling = config.mapping("rope_scaling")
    if scaling.get("type") != "ntk":
        return read_rope(config, head_dim)
    if scaling.keys() > {"type", "factor"}:
        message = f"of the type ntk only a factor is supported, not {shorten(scaling)}"
        raise ConfigError(message, field="rope_scaling", value=scaling)
    factor = check_number("rope_scaling.factor", scaling.get("factor"))
    factors = tuple(factor ** ((2 * index + 2) / head_dim) for index in range(head_dim // 2))
    length = config.integer("max_position_embeddings")
    return RopeConfig(head_dim, config.number("rope_theta"), LongRopeScaling(length, 1.0, factors, factors))


def list_layer_params(layer: CheckpointLayer) -> Table:
    """Fused q, k and v, up before gate in one module, one norm after each block."""
    table = norm_params(layer, {"attn_norm": "attn_ln", "mlp_norm": "mlp_ln"})
    table |= fused_attention_params(layer, qkv="attention.qkv_proj", out="attention.o_proj")
    return table | fused_mlp_params(layer, gate_up="mlp.up_gate_proj", up_first=True)


FAMILY = Family(
    "gte",
    "GteModel",
    KEYS,
    parse,
    post_norm_layer,
    list_layer_params,
    ignored_keys=bert.IGNORED_KEYS,
    trunk=bert.name_trunk("gte"),
    ignored_weights=bert.list_ignored("gte"),
    headless=("GteForMaskedLM",),
)

NEW_FAMILY = replace(
    FAMILY,
    model_type="new",
    architecture="NewModel",
    keys=NEW_KEYS,
    parse=parse_new,
    trunk=bert.name_trunk("new"),
    ignored_weights=bert.list_ignored("new"),
    ignored_keys=(*bert.IGNORED_KEYS, "logn_attention_clip1", "unpad_inputs", "use_memory_efficient_attention"),
    headless=("NewForMaskedLM",),
)
