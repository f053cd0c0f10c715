"""Reads single keys of `quantization_config` in a config.json; errors are ConfigError and name key and value."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jaxserve.core.models.hf_config import QUANTIZATION_KEY
from jaxserve.errors import ConfigError, shorten

Settings = Mapping[str, object]


def read_block(settings: Settings, key: str) -> tuple[int, int] | None:
    """Returns the rows and the columns of a block; None without one."""
    block = settings.get(key)
    if block is None:
        return None
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise refuse(key, block, "two positive numbers")
    return block[0], block[1]


def read_group_size(settings: Settings) -> int | None:
    """Returns the columns that share a scale; None for all of them."""
    size = settings.get("group_size", settings.get("q_group_size", 128))
    if size == -1:
        return None
    if type(size) is not int or size < 1:
        raise refuse("group_size", size, "-1 and positive numbers")
    return size


def as_names(settings: Settings, key: str) -> list[str]:
    """Returns a list of names, empty without one."""
    names = settings.get(key)
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise refuse(key, names, "a list of names")
    return names


def as_mapping(settings: Settings, key: str) -> Mapping[str, object]:
    """Returns an object, empty without one."""
    value = settings.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise refuse(key, value, "an object")
    return value or {}


def check_pattern(key: str, pattern: str) -> str:
    """Returns the pattern if it is a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise refuse(key, pattern, "regular expressions") from error
    return pattern


def require(settings: Settings, key: str, *known: object) -> None:
    """Raises ConfigError for a value that is none of the known ones, None among them if the key may be missing."""
    if settings.get(key) not in known:
        raise refuse(key, settings.get(key), " and ".join(str(value) for value in known if value is not None))


def refuse(key: str, value: object, known: str) -> ConfigError:
    """Returns the error for a value that is not read; `known` says what would be."""
    return ConfigError(
        f"{shorten(value)} is not read; {known} would be", field=f"{QUANTIZATION_KEY}.{key}", value=value
    )
