"""Configs of models that read images beside those of their text models."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.core.models.base import DecoderConfig


def drop_sections(config: DecoderConfig) -> DecoderConfig:
    """The config with one rotary position for each token; every layer that rotates must have had three."""
    layers = []
    for kind in config.layers:
        assert kind.rope is None or kind.rope.sections is not None
        layers.append(kind if kind.rope is None else replace(kind, rope=replace(kind.rope, sections=None)))
    return replace(config, layers=tuple(layers))
