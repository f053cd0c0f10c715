"""The towers of families, and the functions that depend on a tower's family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.models.tower import Tower, TowerConfig
from jaxserve.errors import ConfigError
from jaxserve.families import gemma3_tower, gemma4_tower, pixtral_tower, qwen3_vl_tower
from jaxserve.families.registry import FAMILIES, spec_tree
from jaxserve.media.processors import ImageProcessor

TOWERS: Mapping[str, Tower] = {
    "gemma3": gemma3_tower.TOWER,
    "gemma4": gemma4_tower.TOWER,
    "qwen3_vl": qwen3_vl_tower.TOWER,
    "qwen3_vl_moe": qwen3_vl_tower.TOWER,
    "qwen3_5": qwen3_vl_tower.TOWER,
    "qwen3_5_moe": qwen3_vl_tower.TOWER,
    "mistral3": pixtral_tower.TOWER,
    "llava": pixtral_tower.TOWER,
}
"""The towers by the `model_type` of families that read images."""


def parse_tower(raw: Mapping[str, Any], text: DecoderConfig, processor: ImageProcessor) -> TowerConfig:
    """Returns the tower of a config.json, whose family must have one, for its text model.

    Raises:
        ConfigError: a key of `vision_config`, or one around it that is for images, is unknown or malformed, or does not
            fit the text model or the processor.
    """
    try:
        return TOWERS[text.family].parse(raw, text, processor)
    except ConfigError as error:
        if error.field in FAMILIES[text.family].ignored_keys or error.field.startswith("text_config."):
            raise
        message = str(error).removeprefix(f"{error.field}: ")
        raise ConfigError(message, field=f"vision_config.{error.field}", value=error.value) from error


def find_tower(config: TowerConfig) -> Tower:
    """Returns the functions of a tower."""
    return TOWERS[config.blocks.family]


def tower_param_specs(config: TowerConfig) -> dict[str, Any]:
    """Returns the canonical tree of ParamSpec."""
    return spec_tree(find_tower(config).table(config), config.blocks.num_layers)
