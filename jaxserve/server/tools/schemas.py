"""JSON Schemas inside other schemas."""

from __future__ import annotations

from typing import Any

from jaxserve.errors import InvalidRequestError, shorten

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})  # name -> schema
_DATA = frozenset({"const", "enum", "default", "examples"})  # values, which may look like schemas
_DOCUMENT = ("$schema", "$id")  # what only the root of a document has


def move_schema(schema: dict[str, Any], place: str, field: str) -> dict[str, Any]:
    """Returns a schema whose references hold when it stands at `place` ("#/$defs/x") of another document.

    A reference names a path from the root ("#/$defs/y", "#/definitions/y/items", or "#", the root itself), so the place
    goes in front of it, and definitions stay where they are.

    Raises:
        InvalidRequestError: a reference names an anchor, or a part has an id of its own; `field` is where.
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
