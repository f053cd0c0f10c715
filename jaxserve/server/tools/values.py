"""Arguments that are text without quotes: their types, and the JSON that they become."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from jaxserve.server.tools.parser_parts import BLANKS


def list_types(schema: Mapping[str, Any], key: str) -> set[str]:
    """Returns the types that an argument may have; none if the schema does not say."""
    properties = schema.get("properties")
    parameter = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(parameter, Mapping):
        return set()
    options = parameter.get("anyOf") or parameter.get("oneOf")
    found: set[str] = set()
    for option in options if isinstance(options, list) else [parameter]:
        kinds = option.get("type") if isinstance(option, Mapping) else None
        if kinds is None and isinstance(option, Mapping) and isinstance(option.get("enum"), list):
            kinds = ["string"] if all(isinstance(each, str) for each in option["enum"]) else None
        if kinds is None:
            return set()
        found.update([kinds] if isinstance(kinds, str) else kinds)
    return found


def write_value(text: str, types: set[str]) -> str:
    """Returns a value as JSON: of one of the types if it can be read so, else a string."""
    stripped = text.strip(BLANKS)
    for read in (_read_json, ast.literal_eval):  # some templates write Python's values
        try:
            value = read(stripped)
            written = stripped if read is _read_json else json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if not isinstance(value, str) and (not types or types & name_types(value)):
            return written
    return json.dumps(text, ensure_ascii=False)


def _read_json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def name_types(value: Any) -> set[str]:
    """Returns the types of JSON Schema that a value has."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return {"integer", "number"}
    kinds = {str: "string", float: "number", list: "array", tuple: "array", dict: "object", type(None): "null"}
    return {kinds.get(type(value), "")}
