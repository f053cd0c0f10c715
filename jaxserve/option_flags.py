"""Command-line flags, generated from the configs' fields."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import Field
from typing import Any

from jaxserve.errors import shorten
from jaxserve.options import list_options
from jaxserve.vllm_options import list_vllm_flags, read_vllm_value

_CONVERTERS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}


def add_options(command: argparse.ArgumentParser, configs: Iterable[type]) -> None:
    """Adds the flags of all options of `configs` to a parser, by section, and vLLM's flags that have no effect."""
    groups: dict[str, Any] = {}
    for config in configs:
        for section, option in list_options(config):
            if section not in groups:
                groups[section] = command.add_argument_group(f"{section} options")
            add_flag(groups[section], option)
    for name, is_switch in list_vllm_flags():
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if is_switch else {"type": read_vllm_value}
        command.add_argument(spell_flag(name), dest=name, default=None, help=argparse.SUPPRESS, **how)
    command.epilog = "vLLM's flags that would change nothing here are accepted as well."


def add_flag(group: Any, option: Field[Any]) -> None:
    """Adds the flags of one option. An alias has a `dest` of its own, so that errors can repeat it."""
    kind, aliases = str(option.type).removesuffix(" | None"), option.metadata["aliases"]
    text = _describe(option, kind).replace("%", "%%")
    if kind == "bool":
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    elif kind == "tuple[int, ...]":
        how = {"type": read_integers, "metavar": "INT,INT,..."}
    elif kind.startswith("tuple"):
        how = {"action": "append", "metavar": "TEXT"}
        if option.metadata["takes_many"]:
            how |= {"action": "extend", "nargs": "+"}
    elif option.metadata["read"] is not None:
        how = {"type": read_object, "metavar": "JSON"}
    else:
        choices = (*option.metadata["choices"], *option.metadata["synonyms"]) or None
        how = {"type": _CONVERTERS[kind], "choices": choices, "metavar": None if choices else kind.upper()}
    group.add_argument(spell_flag(option.name), dest=option.name, default=None, help=text, **how)
    for name in aliases:
        group.add_argument(*spell_aliases(name), dest=name, default=None, help=argparse.SUPPRESS, **how)


def read_integers(text: str) -> tuple[int, ...]:
    """Returns the integers of a list like "8,16,32"; ArgumentTypeError if it is none."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be integers like 8,16,32, got {text!r}") from None


def read_object(text: str) -> dict[str, Any]:
    """Returns a JSON object; ArgumentTypeError if the text is none."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'must be a JSON object like {{"key": "value"}}, got {shorten(text)}')
    return found


def _describe(option: Field[Any], kind: str) -> str:
    """Returns an option's help with its default and its aliases."""
    notes, default = [], option.default
    if kind == "bool" and default is not None:
        notes.append(f"default: {'on' if default else 'off'}")
    elif default not in (None, "", ()) and "default:" not in option.metadata["help"]:
        notes.append(f"default: {', '.join(default) if isinstance(default, tuple) else default}")
    if option.metadata["aliases"]:
        notes.append(f"also {', '.join(flag for name in option.metadata['aliases'] for flag in spell_aliases(name))}")
    return option.metadata["help"] + (f" ({'; '.join(notes)})" if notes else "")


def spell_flag(name: str) -> str:
    """Returns the long flag of an option."""
    return f"--{name.replace('_', '-')}"


def spell_aliases(alias: str) -> list[str]:
    """Returns the flags of an alias. One of two letters is also a short flag, like vLLM's -tp."""
    return [spell_flag(alias), *([f"-{alias}"] if len(alias) == 2 else [])]
