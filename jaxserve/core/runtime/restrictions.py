"""The options that a model cannot have because of what its layers keep, or because they see a whole text at once."""

from __future__ import annotations

import logging
from dataclasses import replace

from jaxserve.config import EngineConfig
from jaxserve.core.models.base import DecoderConfig
from jaxserve.errors import ConfigError

_log = logging.getLogger(__name__)


def restrict_options(config: EngineConfig, model: DecoderConfig) -> EngineConfig:
    """Returns the resolved options as they hold for a model: without a prefix cache where prefixes cannot be shared.

    Raises:
        ConfigError: an option means nothing for the model, or the longest text does not fit a step as it must.
    """
    if not model.kv_groups:
        message = f"no layer of {model.family} keeps keys and values in pages; such models are not served"
        raise ConfigError(message, field="model")
    if model.shares_prefixes:
        return config
    reason = "keeps a recurrent state" if model.causal else "computes each text whole, in one step"
    given = [
        ("speculative_config", config.speculation.speculative_config, None),
        ("kv_offloading_size", config.cache.kv_offloading_size, None),
    ]
    if not model.causal:
        _require_whole_texts(config, model)
        given.append(("max_decode_steps", config.scheduler.max_decode_steps, 1))
        given.append(("deterministic", config.scheduler.deterministic, False))
    for field, value, unset in given:
        if value != unset:
            raise ConfigError(f"is not for {model.family}, which {reason}; leave it out", field=field, value=value)
    if config.cache.enable_prefix_caching:
        _log.info("prefix caching is off: %s %s", model.family, reason)
    return replace(config, cache=replace(config.cache, enable_prefix_caching=False))


def _require_whole_texts(config: EngineConfig, model: DecoderConfig) -> None:
    budget = config.scheduler.max_num_batched_tokens
    assert budget is not None
    if model.max_model_len > budget:
        message = (
            f"{model.family} computes each text whole, in one step: max_model_len={model.max_model_len} needs "
            f"max_num_batched_tokens of at least as much, and that is {budget}; lower the one or raise the other"
        )
        raise ConfigError(message, field="max_model_len", value=model.max_model_len)
