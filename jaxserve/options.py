"""Options as fields of nested frozen dataclasses: declared once, then known to Python, TOML files and the command line.

A config is a dataclass of sections, a section a dataclass of options. `aliases` in a field's metadata are other names
under which the option is accepted.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import Field, field, fields
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError, shorten

_TYPES: dict[str, tuple[Any, str]] = {
    "bool": (bool, "true or false"),
    "int": (int, "an integer"),
    "float": (int | float, "a number"),
    "str": (str, "a text"),
}


def option(default: Any, text: str, *aliases: str, choices: tuple[Any, ...] = ()) -> Any:
    """Declares an option; `text` is its help."""
    return field(default=default, metadata={"help": text, "aliases": aliases, "choices": choices})


def list_options(config: type) -> Iterator[tuple[str, Field[Any]]]:
    """Yields (section, field) of every option of a config."""
    for section in fields(config):
        for each in fields(section.default_factory):  # type: ignore[arg-type]
            yield section.name, each


def build_config[C](config: type[C], options: Mapping[str, Any]) -> C:
    """Builds a config from flat options by name or alias.

    Raises:
        ConfigError: an option is unknown (the nearest name is suggested), given twice, or out of range.
    """
    names = {
        name: (section, f.name) for section, f in list_options(config) for name in (f.name, *f.metadata["aliases"])
    }
    types = {each.name: str(each.type) for _, each in list_options(config)}
    chosen: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(names))}"
            raise ConfigError(f"not an option; {hint}", field=name, value=value)
        section, canonical = names[name]
        if canonical in chosen.setdefault(section, {}):
            raise ConfigError(f"given twice, also by an alias of {canonical}", field=name, value=value)
        chosen[section][canonical] = _check_type(name, value, types[canonical])
    sections = {f.name: f.default_factory for f in fields(config)}  # type: ignore[arg-type]
    return config(**{section: sections[section](**values) for section, values in chosen.items()})  # type: ignore[operator, misc]


def _check_type(name: str, value: Any, declared: str) -> Any:
    """Returns the value as its option is declared: files and callers may give anything."""
    kind = declared.removesuffix(" | None")
    if value is None and kind != declared:
        return None
    if kind.startswith("tuple"):
        if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
            return tuple(value)
        raise ConfigError(f"must be a list of texts, got {shorten(value)}", field=name, value=value)
    types, text = _TYPES[kind]
    if not isinstance(value, types) or (isinstance(value, bool) and kind != "bool"):
        raise ConfigError(f"must be {text}, got {shorten(value)}", field=name, value=value)
    return value


def read_options(path: str | Path) -> dict[str, Any]:
    """Returns the options of a TOML file, flat, whether they stand in the sections' tables or not.

    Raises:
        ConfigError: the file is missing or no TOML.
    """
    try:
        document = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}", field="config", value=str(path)) from error
    flat: dict[str, Any] = {}
    for name, value in document.items():
        flat.update(value if isinstance(value, Mapping) else {name: value})
    return flat


def check_choices(options: Any) -> None:
    """Refuses values that are not among the choices of their option."""
    for f in fields(options):
        value, choices = getattr(options, f.name), f.metadata["choices"]
        if choices and value not in choices:
            raise ConfigError(f"must be one of {', '.join(choices)}, got {shorten(value)}", field=f.name, value=value)


def check_at_least(options: Any, **minima: int) -> None:
    """Refuses what is no integer, or is below its minimum. None, where it is allowed, passes."""
    for name, least in minima.items():
        value = getattr(options, name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"must be an integer of at least {least}, got {shorten(value)}", field=name, value=value)
