"""Llama without causal masks, as NVIDIA's embedding models have it; their files say how a text is pooled."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.core.models.base import DecoderConfig, Family
from jaxserve.core.models.common import make_encoder
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.families import llama
from jaxserve.pooling_options import PoolingType

KEYS = llama.KEYS | {"pooling": "avg"}
_POOLING: dict[str, PoolingType] = {"avg": "MEAN", "cls": "CLS", "last": "LAST"}


def parse(config: HFConfig) -> DecoderConfig:
    """Reads the config.json of a bidirectional Llama."""
    pooling_type = _POOLING[config.choice("pooling", _POOLING)]
    return make_encoder(replace(llama.parse(config), family="llama_bidirec"), pooling_type=pooling_type)


FAMILY = Family(
    "llama_bidirec",
    "LlamaBidirectionalModel",
    KEYS,
    parse,
    llama.FAMILY.layer,
    llama.list_layer_params,
    ignored_keys=llama.IGNORED_KEYS,
    headless=("LlamaBidirectionalForMaskedLM",),
)
