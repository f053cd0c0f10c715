"""RoBERTa and XLM-R (multilingual E5, bge-m3): BERT whose positions begin behind the padding token's id."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.core.models.base import DecoderConfig, Family
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.families import bert

KEYS = bert.KEYS | {"pad_token_id": 1}


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a RoBERTa config.json. A padding token inside a text has a position like any other."""
    return bert.read_encoder(config, "roberta", first_position=config.integer("pad_token_id", minimum=0) + 1)


def parse_xlm(config: HFConfig) -> DecoderConfig:
    """Reads an XLM-R config.json."""
    return replace(parse(config), family="xlm-roberta")


FAMILY = Family(
    "roberta",
    "RobertaModel",
    KEYS,
    parse,
    bert.FAMILY.layer,
    bert.list_layer_params,
    ignored_keys=bert.IGNORED_KEYS,
    trunk=bert.name_trunk("roberta"),
    ignored_weights=bert.list_ignored("roberta"),
    headless=("RobertaForMaskedLM",),
)

XLM_FAMILY = replace(
    FAMILY,
    model_type="xlm-roberta",
    architecture="XLMRobertaModel",
    parse=parse_xlm,
    headless=("XLMRobertaForMaskedLM",),
)
