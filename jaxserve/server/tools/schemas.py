"""Embedding JSON Schemas in other schemas."""

from __future__ import annotations

from typing import Any

from jaxserve.errors import InvalidRequestError, shorten

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})  # name -> schema
_DATA = frozenset({"const", "enum", "default", "examples"})  # their values are data, even if they look like schemas
_DOCUMENT = ("$schema", "$id")  # only the root of a document has these


def move_schema(schema: dict[str, Any], place: str, field: str) -> dict[str, Any]:
    """Returns a schema whose references stay valid when it is moved to `place` ("#/$defs/x") of another document.

    A reference is a path from the root ("#/$defs/y", "#/definitions/y/items", or "#", the root itself), so `place` is
    put in front of it. Definitions stay where they are.

    Raises:
        InvalidRequestError: a reference names an anchor, or a part has its own id; `field` says where.
    """
    return _move({key: value for key, value in schema.items() if key not in _DOCUMENT}, place, field)


def _move(schema: Any, place: str, field: str) -> Any:
    if isinstance(schema, list):
        return [_move(part, place, field) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _DATA:
            moved[key] = value
        elif key in _MAPS and isinstance(value, dict):
            moved[key] = {name: _move(part, place, field) for name, part in value.items()}
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            if value not in ("", "#") and not value.startswith("#/"):
                message = f"$ref {shorten(value)} names an anchor; a path as in '#/$defs/name' is supported"
                raise InvalidRequestError(message, field=field, value=value)
            moved[key] = place + value[1:]
        elif key == "$id" and isinstance(value, str):
            message = f"$id {shorten(value)} inside a schema is not supported; give it at the top or not at all"
            raise InvalidRequestError(message, field=field, value=value)
        else:
            moved[key] = _move(value, place, field)
    return moved
