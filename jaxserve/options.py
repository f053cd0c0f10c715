"""Options as fields of nested frozen dataclasses: declared once, then known to Python, TOML files and the command line.

A config is a dataclass of sections, a section a dataclass of options. `aliases` in a field's metadata are other names
under which the option is accepted. An option whose value is a table has a function `read` that makes it of one.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import Field, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxserve.errors import ConfigError, shorten

_TYPES: dict[str, tuple[Any, str]] = {
    "bool": (bool, "true or false"),
    "int": (int, "an integer"),
    "float": (int | float, "a number"),
    "str": (str, "a string"),
}
_ITEMS: dict[str, tuple[type, str]] = {"tuple[str, ...]": (str, "strings"), "tuple[int, ...]": (int, "integers")}


def option(
    default: Any,
    text: str,
    *aliases: str,
    choices: tuple[Any, ...] = (),
    synonyms: Mapping[str, Any] = MappingProxyType({}),
    read: Callable[[Any], Any] | None = None,
    takes_many: bool = False,
) -> Any:
    """Declares an option; `text` is its help, `synonyms` are other names of some of its values.

    `read` makes the value of what a caller gives, a table (a dictionary), and raises ConfigError. With `takes_many`,
    the flag of a list takes all words behind it.
    """
    metadata = {"help": text, "aliases": aliases, "choices": choices, "synonyms": synonyms, "read": read}
    metadata["takes_many"] = takes_many
    return field(default=default, metadata=metadata)


def list_options(config: type) -> Iterator[tuple[str, Field[Any]]]:
    """Yields (section, field) of every option of a config."""
    for section in fields(config):
        for each in fields(section.default_factory):  # type: ignore[arg-type]
            yield section.name, each


def list_tables(config: type) -> set[str]:
    """Returns the names and aliases of a config's options whose values are tables."""
    options = [f for _, f in list_options(config) if f.metadata["read"] is not None]
    return {name for f in options for name in (f.name, *f.metadata["aliases"])}


def build_config[C](config: type[C], options: Mapping[str, Any]) -> C:
    """Returns the config of flat options by name or alias.

    Raises:
        ConfigError: an option is unknown (the nearest name is suggested), given twice, mistyped or out of range.
    """
    known = {name: (section, f) for section, f in list_options(config) for name in (f.name, *f.metadata["aliases"])}
    chosen: dict[str, dict[str, Any]] = {}
    called: dict[str, str] = {}  # option to the name that the caller used
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise ConfigError(f"not an option; {hint}", field=name, value=value)
        section, f = known[name]
        if value is None and (f.default is None or "None" not in str(f.type)):
            continue  # vLLM's callers pass None for any option that is not set
        if f.name in called:
            raise ConfigError(f"given twice, also as {called[f.name]}", field=name, value=value)
        called[f.name] = name
        read = f.metadata["read"]
        checked = _check_type(name, value, str(f.type)) if read is None else read(value)
        chosen.setdefault(section, {})[f.name] = (
            f.metadata["synonyms"].get(checked, checked) if isinstance(checked, str) else checked
        )
    sections = {f.name: f.default_factory for f in fields(config)}  # type: ignore[arg-type]
    try:
        return config(**{section: sections[section](**values) for section, values in chosen.items()})  # type: ignore[operator, misc]
    except ConfigError as error:
        if (name := called.get(error.field, error.field)) == error.field:
            raise
        raise ConfigError(str(error).removeprefix(f"{error.field}: "), field=name, value=error.value) from error


def _check_type(name: str, value: Any, declared: str) -> Any:
    """Returns the value, a list as a tuple, if it has the declared type: files and callers may give anything."""
    kind = declared.removesuffix(" | None")
    if value is None and kind != declared:
        return None
    if kind.startswith("tuple"):
        each_type, text = _ITEMS[kind]
        if isinstance(value, list | tuple) and all(type(each) is each_type for each in value):
            return tuple(value)
        raise ConfigError(f"must be a list of {text}, got {shorten(value)}", field=name, value=value)
    types, text = _TYPES[kind]
    if not isinstance(value, types) or (isinstance(value, bool) and kind != "bool"):
        raise ConfigError(f"must be {text}, got {shorten(value)}", field=name, value=value)
    return value


def read_options(path: str | Path, tables: Collection[str] = ()) -> dict[str, Any]:
    """Returns the options of a TOML file as one flat dictionary; they may stand in their sections' tables.

    Args:
        tables: the options whose values are tables themselves (`list_tables`).

    Raises:
        ConfigError: the file is missing or not TOML.
    """
    try:
        document = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        form = "" if isinstance(error, OSError) else "; files of options are TOML (max_model_len = 4096)"
        name = "" if isinstance(error, OSError) else f"{path} "
        raise ConfigError(f"{name}cannot be read: {error}{form}", field="config", value=str(path)) from error
    flat: dict[str, Any] = {}
    for name, value in document.items():
        flat.update(value if isinstance(value, Mapping) and name not in tables else {name: value})
    return flat


def check_choices(options: Any) -> None:
    """Raises ConfigError for a value that is neither its option's default nor among the choices."""
    for f in fields(options):
        value, choices = getattr(options, f.name), f.metadata["choices"]
        if choices and value not in (f.default, *choices):
            raise ConfigError(f"must be one of {', '.join(choices)}, got {shorten(value)}", field=f.name, value=value)


def check_at_least(options: Any, **minima: int) -> None:
    """Raises ConfigError for an option that is neither None nor an integer of at least its minimum."""
    for name, least in minima.items():
        value = getattr(options, name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"must be an integer of at least {least}, got {shorten(value)}", field=name, value=value)
