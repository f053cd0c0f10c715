"""The grammar of calls that write each argument between marks, by the marks that read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.errors import InvalidRequestError, shorten
from jaxserve.features.grammars.rules import quote
from jaxserve.server.tools.values import list_types
from jaxserve.server.tools.xml_calls import XmlMarks

_ROOT = frozenset(
    ("type", "properties", "required", "additionalProperties", "title", "description", "$schema", "$id", "$defs",
     "definitions")
)  # fmt: skip
_NOTES = frozenset(("type", "title", "description", "default", "examples", "anyOf", "oneOf"))


def write_arguments(
    schema: Mapping[str, Any], field: str, marks: XmlMarks, mark: Callable[[str], str], text: str
) -> str:
    """Returns the terms of a call's arguments, in the order of the schema.

    Args:
        schema: of an object. Without properties it has any arguments.
        field: the schema's name in errors.
        mark: returns a mark as a term.
        text: the rule of any text up to the end of a value.

    Raises:
        InvalidRequestError: the schema asks for something that a grammar of this format cannot hold.
    """
    unknown = sorted(schema.keys() - _ROOT)
    if unknown:
        message = f"{shorten(unknown[0])} is not enforced in this model's format of calls, which a strict or forced"
        raise InvalidRequestError(f"{message} call needs; give the arguments as properties", field=field, value=None)
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    if not properties:
        if schema.get("additionalProperties") is False:
            return ""
        return f'({mark(marks.key)} /[^<>"\\n]+/ {_open_value(marks, mark)} {text} "\\n")*'
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    terms = []
    for key, value in properties.items():
        if any(character in key for character in "<>\n"):
            raise InvalidRequestError(f"{shorten(key)} cannot be written in this model's format", field=field)
        term = f"{mark(marks.key)} {quote(key)} {_open_value(marks, mark)} "
        term += f'{_write_value(schema, key, value, definitions, field, marks, mark, text)} "\\n"'
        terms.append(f"{term} " if key in required else f"({term})? ")
    return "".join(terms)


def _open_value(marks: XmlMarks, mark: Callable[[str], str]) -> str:
    gap = quote(marks.gap) if marks.gap else ""
    return f"{mark(marks.key_end)} {gap} {mark(marks.value) if marks.value else ''}"


def _write_value(
    schema: Mapping[str, Any],
    key: str,
    value: Any,
    definitions: Mapping[str, Any],
    field: str,
    marks: XmlMarks,
    mark: Callable[[str], str],
    text: str,
) -> str:
    types = list_types(schema, key)
    end = f"{quote(chr(10)) if marks.has_lines else ''} {mark(marks.value_end)}"
    if types and "string" not in types:
        return f"%json {json.dumps({**value, **definitions})} {end}"
    texts = value.get("enum", [value["const"]] if "const" in value else None) if isinstance(value, Mapping) else None
    if types == {"string"} and texts and all(isinstance(each, str) and each.strip() == each for each in texts):
        return f"({' | '.join(map(quote, texts))}) {end}" if "" not in texts else f"({_join(texts)})? {end}"
    options = [value, *(value.get("anyOf") or value.get("oneOf") or ())] if isinstance(value, Mapping) else []
    if "string" not in types or any(each.keys() - _NOTES for each in options):
        message = f"{shorten(key)}: only a plain type, or an enum of texts, is enforced in this model's format of calls"
        raise InvalidRequestError(message, field=f"{field}.properties", value=None)
    return text


def _join(texts: list[str]) -> str:
    return " | ".join(quote(text) for text in texts if text)
