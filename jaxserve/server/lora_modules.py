"""The option `lora_modules`: adapters that a server has from its start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from jaxserve.errors import ConfigError, shorten

_KEYS = ("name", "path", "base_model_name")
_LONGEST_NAME = 256


def read_lora_modules(given: Sequence[str]) -> dict[str, tuple[str, str | None]]:
    """Returns (path, name of the base model or None) by name, of values like name=path or {"name": ..., "path": ...}.

    Raises:
        ConfigError: a value is neither, or a name is given twice.
    """
    found: dict[str, tuple[str, str | None]] = {}
    for text in given:
        name, path, base = _read_module(text)
        if name in found:
            raise ConfigError(f"{name!r} is given twice", field="lora_modules", value=text)
        check_name(name)
        found[name] = path, base
    return found


def _read_module(text: str) -> tuple[str, str, str | None]:
    if not text.startswith("{"):
        name, equals, path = text.partition("=")
        if name and equals and path:
            return name, path, None
    else:
        try:
            value: Any = json.loads(text)
        except ValueError:
            value = {}
        is_right = isinstance(value, dict) and value.keys() <= set(_KEYS)
        if is_right and all(isinstance(value.get(key), str) and value[key] for key in _KEYS[:2]):
            return value["name"], value["path"], value.get("base_model_name")
    message = f'must be name=path or {{"name": ..., "path": ..., "base_model_name": ...}}, got {shorten(text)}'
    raise ConfigError(message, field="lora_modules", value=text)


def check_name(name: str) -> None:
    """Raises ConfigError for a text that cannot name an adapter."""
    if not name or not name.isprintable() or len(name) > _LONGEST_NAME:
        message = f"a name has 1 to {_LONGEST_NAME} printable characters, got {shorten(name)}"
        raise ConfigError(message, field="lora_name", value=name)
