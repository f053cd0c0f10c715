"""Reads JSON objects from untrusted files: strictly, and every failure is a ValueError with a plain reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxserve.core.models.hf_config import MODELOPT, QUANTIZATION_KEY
from jaxserve.errors import ConfigError, shorten
from jaxserve.files import read_regular
from jaxserve.gguf_file import is_gguf

MODELOPT_FILE = "hf_quant_config.json"
MAX_JSON_BYTES = 2**24  # per config file; published ones take some kilobytes
_MAX_VALUES = 1_000_000  # per config file
_MAX_DIGITS = 40  # per integer; Python itself stops at 4,300, with advice that does not apply here


def parse_json_object(data: bytes, max_values: int = _MAX_VALUES) -> dict[str, Any]:
    """Returns the JSON object in `data` (UTF-8).

    Raises ValueError for anything else: bad UTF-8 or JSON, another kind of value, nesting too deep to parse, an object
    at any depth that holds a key twice (the parser would silently keep the last), or more than about `max_values` keys
    and values. These are counted before parsing, because as objects they take many times the memory of their text.
    """
    if sum(data.count(mark) for mark in b",:[{") > max_values:
        raise ValueError(f"holds more than {max_values:,} values")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_reject_doubled_keys, parse_int=_parse_int)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at line {error.lineno} column {error.colno}") from error
    if not isinstance(value, dict):
        raise ValueError(f"holds a {type(value).__name__} where an object is expected")
    return value


def read_hf_config(path: Path) -> dict[str, Any]:
    """Returns the `config.json` in the directory `path`, checked only to be an object; of a GGUF file one made of it.

    If it does not say how the weights are quantized, ModelOpt's file of its own does, where there is one.

    Raises ConfigError naming the file when it is absent, unreadable or malformed.
    """
    if is_gguf(path):
        from jaxserve.core.weights.gguf_config import read_gguf_config

        return read_gguf_config(path)
    file = path / "config.json"
    if not file.exists():
        raise ConfigError(f"there is no config.json in {path}; it is part of every checkpoint", field=str(file))
    config, beside = read_config_file(file), path / MODELOPT_FILE
    if config.get(QUANTIZATION_KEY) or not beside.is_file():
        return config
    return config | {QUANTIZATION_KEY: _read_modelopt_file(beside)}


def read_generation_config(path: Path) -> dict[str, Any]:
    """Returns the `generation_config.json` in the directory `path`, or {} if there is none.

    Raises ConfigError naming the file when it is unreadable or malformed.
    """
    file = path / "generation_config.json"
    return read_config_file(file) if file.exists() else {}


def _read_modelopt_file(file: Path) -> dict[str, Any]:
    """Returns the settings as ModelOpt writes them into config.json since."""
    found = read_config_file(file).get("quantization")
    if not isinstance(found, dict):
        raise ConfigError("has no object `quantization`, which says how the weights are quantized", field=str(file))
    return {"quant_method": MODELOPT, **found}


def read_config_list(file: Path) -> list[Any]:
    """Returns the JSON array in a file; ConfigError naming the file for anything else."""
    found = _read_file(file, lambda data: parse_json_object(b'{"list":%b}' % data)).get("list")
    if not isinstance(found, list):
        raise ConfigError(f"holds a {type(found).__name__} where a list is expected", field=str(file))
    return found


def read_config_file(file: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; ConfigError naming the file for anything else."""
    return _read_file(file, parse_json_object)


def _read_file(file: Path, parse: Callable[[bytes], dict[str, Any]]) -> dict[str, Any]:
    try:
        return parse(read_regular(file, MAX_JSON_BYTES))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", field=str(file)) from error
    except ValueError as error:
        raise ConfigError(str(error), field=str(file)) from error


def _parse_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"holds a number of {len(digits)} digits")
    return int(digits)


def _reject_doubled_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        seen: set[str] = set()
        doubled = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"holds the key {shorten(doubled)} twice")
    return entries
