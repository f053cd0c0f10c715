"""A smaller model of any family as the drafter (Leviathan et al. 2022, arXiv 2211.17192)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

from jaxserve.core.models.base import DecoderConfig
from jaxserve.errors import ConfigError
from jaxserve.families.registry import parse_config
from jaxserve.features.speculation.drafters.base import DrafterModel

_log = logging.getLogger(__name__)


def parse_draft_model(raw: Mapping[str, object], target: DecoderConfig) -> DrafterModel:
    """Returns the drafter that a model's config.json describes, for a target with its `max_model_len`.

    It serves the target's lengths and dtype. Beyond the length that it was trained on its drafts are poor, but the
    target's tokens are what they are, so that is a warning. Raises ConfigError naming the key that cannot work.
    """
    config = parse_config(raw)
    if config.vocab_size != target.vocab_size:
        raise ConfigError(
            f"{config.vocab_size} is not the target's, {target.vocab_size}; give a smaller model of the same family",
            field="vocab_size",
            value=config.vocab_size,
        )
    if config.states:
        raise ConfigError(
            f"{config.family} keeps a recurrent state, which cannot take a draft back; give a draft model whose layers "
            "all have attention",
            field="model_type",
            value=config.family,
        )
    if config.max_supported_len < target.max_model_len:
        _log.warning(
            "the draft model was trained on %d tokens, and max_model_len is %d: beyond them expect short drafts",
            config.max_supported_len,
            target.max_model_len,
        )
    config = dataclasses.replace(config, dtype=target.dtype, max_model_len=target.max_model_len)
    return DrafterModel(
        method="draft_model",
        config=config,
        aux_layers=(),
        takes_next=False,
        draft_vocab_size=config.vocab_size,
        target_hidden_size=target.hidden_size,
        has_embed=True,
        has_head=True,
    )
