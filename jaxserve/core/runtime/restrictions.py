"""The options that a model cannot have because of what its layers keep, or because they see a whole text at once."""

from __future__ import annotations

import logging
from dataclasses import replace

from jaxserve.config import EngineConfig
from jaxserve.core.models.base import DecoderConfig
from jaxserve.errors import ConfigError

_log = logging.getLogger(__name__)


def restrict_options(config: EngineConfig, model: DecoderConfig, platform: str) -> EngineConfig:
    """Returns the resolved options as they hold for a model on a platform.

    Where prefixes cannot be shared there is no prefix cache. Where texts are computed whole, a step has room for the
    longest one unless `max_num_batched_tokens` says otherwise.

    Raises:
        ConfigError: an option means nothing for the model, or the longest text does not fit a step as it must.
    """
    if not model.kv_groups:
        message = f"no layer of {model.family} keeps keys and values in pages; such models are not served"
        raise ConfigError(message, field="model")
    if model.reads_whole:
        config = _make_room(config, model, platform)
    if not (model.shares_prefixes and model.generates):
        config = _refuse_options(config, model)
    return config.resolve(platform)


def _refuse_options(config: EngineConfig, model: DecoderConfig) -> EngineConfig:
    """Returns the options of a model that cannot have some of them, without a prefix cache if it shares no prefixes."""
    reason = "generates no text"
    given: list[tuple[str, object, object]] = [("speculative_config", config.speculation.speculative_config, None)]
    if not model.shares_prefixes:
        reason = "computes each text whole, in one step" if model.reads_whole else "keeps a recurrent state"
        given.append(("kv_offloading_size", config.cache.kv_offloading_size, None))
        given.append(("enable_prefix_caching", config.cache.enable_prefix_caching or False, False))
    if not model.generates:
        given.append(("max_decode_steps", config.scheduler.max_decode_steps, 1))
    if model.states:
        given.append(("nnodes", config.nodes.nnodes or 1, 1))
    if model.states or not model.generates:
        given.append(("deterministic", config.scheduler.deterministic, False))
    for field, value, unset in given:
        if value != unset:
            raise ConfigError(f"is not for {model.family}, which {reason}; leave it out", field=field, value=value)
    if model.shares_prefixes:
        return config
    _log.info("prefix caching is off: %s %s", model.family, reason)
    return replace(config, cache=replace(config.cache, enable_prefix_caching=False))


def _make_room(config: EngineConfig, model: DecoderConfig, platform: str) -> EngineConfig:
    """Returns options whose steps hold the longest text; ConfigError if those that were given do not."""
    budget = config.scheduler.max_num_batched_tokens
    if budget is None:
        budget = max(model.max_model_len, config.resolve(platform).scheduler.max_num_batched_tokens or 0)
        return replace(config, scheduler=replace(config.scheduler, max_num_batched_tokens=budget))
    if model.max_model_len > budget:
        message = (
            f"{model.family} computes each text whole, in one step: max_model_len={model.max_model_len} needs "
            f"max_num_batched_tokens of at least as much, and that is {budget}; lower the one or raise the other"
        )
        raise ConfigError(message, field="max_model_len", value=model.max_model_len)
    return config
