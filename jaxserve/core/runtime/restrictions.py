"""The options that a model cannot have because of what its layers keep, or because they see a whole text at once."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from jaxserve.config import CacheOptions, EngineConfig
from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.pages.manager import CHUNK_EDGE
from jaxserve.errors import ConfigError

_log = logging.getLogger(__name__)
_PAGE_SIZES = (8, 16, 32, 64, 128, 256)  # to suggest


def restrict_options(config: EngineConfig, model: DecoderConfig, platform: str) -> EngineConfig:
    """Returns the resolved options as they hold for a model on a platform.

    Where texts are computed whole, nothing can share a prefix, and a step has room for the longest text unless
    `max_num_batched_tokens` says otherwise. Where layers keep recurrent states, prefixes are shared if snapshots of
    them fit a text.

    Raises:
        ConfigError: an option means nothing for the model, or the longest text does not fit a step as it must.
    """
    if not model.kv_groups:
        message = f"no layer of {model.family} keeps keys and values in pages; such models are not served"
        raise ConfigError(message, field="model")
    if model.reads_whole:
        config = _make_room(config, model, platform)
    if model.reads_whole or model.states or not model.generates:
        config = _refuse_options(config, model)
    resolved = config.resolve(platform)
    if model.states:
        _require_tile(resolved, model)
        return _settle_snapshots(resolved, model, config.cache)
    if config.cache.mamba_block_size is not None:
        message = f"{model.family} keeps no recurrent state; leave it out"
        raise ConfigError(message, field="mamba_block_size", value=config.cache.mamba_block_size)
    return resolved


def find_state_edge(model: DecoderConfig) -> int:
    """Returns the tokens at whose multiples a cut leaves recurrent states, and attention, the bits of the whole."""
    return math.lcm(CHUNK_EDGE, *(state.edge for state, _ in model.states))


def find_snapshot_grid(config: EngineConfig, model: DecoderConfig) -> int:
    """Returns the tokens between snapshots of recurrent states, by resolved options; 0: none are taken."""
    cache = config.cache
    if not model.states or not cache.enable_prefix_caching:
        return 0
    assert cache.page_size is not None
    return cache.mamba_block_size or math.lcm(cache.page_size, find_state_edge(model))


def _settle_snapshots(config: EngineConfig, model: DecoderConfig, given: CacheOptions) -> EngineConfig:
    """Returns resolved options, without a prefix cache if it has no snapshots; ConfigError if `given` asks for one."""
    cache, edge, longest = config.cache, find_state_edge(model), model.max_model_len
    if cache.mamba_block_size is not None and (not cache.enable_prefix_caching or cache.mamba_cache_mode == "none"):
        message = "is the distance of snapshots, and without a prefix cache there are none; leave it out"
        raise ConfigError(message, field="mamba_block_size", value=cache.mamba_block_size)
    if not cache.enable_prefix_caching:
        return config
    assert cache.page_size is not None
    least, block = math.lcm(cache.page_size, edge), find_snapshot_grid(config, model)
    if block % least:
        sizes = f"{least}, {2 * least} or {3 * least}"
        message = f"must be a multiple of {least}, of pages and of the tiles of states; sizes that work: {sizes}"
        raise ConfigError(message, field="mamba_block_size", value=block)
    fields = ["mamba_block_size", "enable_prefix_caching"]  # those that ask for what cannot be, the first is named
    if cache.mamba_cache_mode == "none":
        reason = "a cached prefix needs a snapshot of the recurrent state, and mamba_cache_mode='none' keeps none"
    elif block >= longest:  # a hit leaves a token to compute
        reason = f"snapshots of the recurrent state lie {block} tokens apart, not closer than max_model_len={longest}"
        if edge < longest <= least:
            fields.insert(0, "page_size")
            fits = [size for size in _PAGE_SIZES if math.lcm(size, edge) < longest]
            reason += f", by page_size={cache.page_size}; sizes of pages that fit: {', '.join(map(str, fits))}"
        elif least < longest:
            reason += f"; a mamba_block_size of at most {(longest - 1) // least * least} fits"
    else:
        return config
    for field in fields:
        if value := getattr(given, field):
            raise ConfigError(reason, field=field, value=value)
    _log.info("prefix caching is off: %s", reason)
    return replace(config, cache=replace(cache, enable_prefix_caching=False))


def _require_tile(config: EngineConfig, model: DecoderConfig) -> None:
    """Raises ConfigError if chunks must end at multiples of more tokens than a step has."""
    budget, edge = config.scheduler.max_num_batched_tokens, find_state_edge(model)
    assert budget is not None
    if config.scheduler.deterministic and budget < edge:
        message = f"must be at least {edge} with deterministic: texts of {model.family} are cut at its multiples alone"
        raise ConfigError(message, field="max_num_batched_tokens", value=budget)


def _refuse_options(config: EngineConfig, model: DecoderConfig) -> EngineConfig:
    """Returns the options of a model that cannot have some of them, without a prefix cache if it reads texts whole."""
    given: list[tuple[str, object, object, str]] = []
    whole, state, silent = "computes each text whole, in one step", "keeps a recurrent state", "generates no text"
    if model.reads_whole or not model.generates:
        reason = whole if model.reads_whole else silent
        given.append(("speculative_config", config.speculation.speculative_config, None, reason))
    if model.reads_whole or model.states:
        reason = whole if model.reads_whole else state
        given.append(("kv_offloading_size", config.cache.kv_offloading_size, None, reason))
    if model.reads_whole:
        given.append(("enable_prefix_caching", config.cache.enable_prefix_caching or False, False, whole))
    if not model.generates:
        given.append(("max_decode_steps", config.scheduler.max_decode_steps, 1, silent))
        given.append(("deterministic", config.scheduler.deterministic, False, silent))
    for field, value, unset, reason in given:
        if value != unset:
            raise ConfigError(f"is not for {model.family}, which {reason}; leave it out", field=field, value=value)
    if not model.reads_whole:
        return config
    _log.info("prefix caching is off: %s %s", model.family, whole)
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
