"""EuroBERT: Llama's layers without causal masks."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.core.models.base import DecoderConfig, Family
from jaxserve.core.models.common import make_encoder
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.families import llama

KEYS = llama.KEYS | {"rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "eos_token_id": 128001}


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a EuroBERT config.json."""
    return make_encoder(replace(llama.parse(config), family="eurobert"), pooling_type="MEAN")


FAMILY = Family(
    "eurobert",
    "EuroBertModel",
    KEYS,
    parse,
    llama.FAMILY.layer,
    llama.list_layer_params,
    ignored_keys=("classifier_pooling", "clf_pooling"),
    headless=("EuroBertForMaskedLM",),
)
