"""The grammar of calls whose arguments are literals, by the notation that reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.errors import InvalidRequestError, shorten
from jaxserve.features.grammars.rules import quote
from jaxserve.server.tools.literals import LiteralNotation
from jaxserve.server.tools.values import name_types

_NOTES = frozenset(("title", "description", "default", "examples", "$schema", "$id", "$defs", "definitions"))
_MEMBERS = {  # of a schema, which are enforced, by its type
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    **dict.fromkeys(
        ("integer", "number"), ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    ),
}
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")
_SCALARS = {"string": "string", "integer": "INTEGER", "number": "NUMBER", "boolean": "BOOLEAN", "null": "NULL"}
_ANY = "any"
_SEPARATOR = "SEPARATOR"
_MOST_ITEMS = 1000
# Python's strings are of one line, and their escapes those that Python and JSON write. None is half a character.
_ESCAPE = r"""\\([\\'"bfnrt\/]|x[0-9a-fA-F]{2}|u([0-9a-ceA-CEfF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))"""
_SHARED = r"""
any: string | NUMBER | BOOLEAN | NULL | "[" (any (SEPARATOR any)*)? "]" | anyobject
anyobject: "{" (anymember (SEPARATOR anymember)*)? "}"
SEPARATOR: /, ?/
INTEGER: /-?(0|[1-9][0-9]{0,18})/
NUMBER: /-?(0|[1-9][0-9]{0,19})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?/
BOOLEAN: "true" | "false" | "True" | "False"
NULL: "null" | "None"
"""


class LiteralGrammar:
    """Writes the rules of arguments, one tool after the other.

    Args:
        mark: returns a mark as a term.
        text: the rule of any text up to the end of a string, which notations without escapes need.
    """

    def __init__(self, notation: LiteralNotation, mark: Callable[[str], str], text: str) -> None:
        self._notation, self._mark = notation, mark
        self._rules: list[str] = _SHARED.strip().split("\n")
        self._known: dict[str, str] = {}  # rules by the tool and the reference of their schemas
        self._root: Mapping[str, Any] = {}  # the tool's schema
        self._field = ""
        self._members = _MEMBERS
        if notation.has_escapes:
            self._members = {**_MEMBERS, "string": _OF_STRINGS}  # a string of JSON is one of Python
            plain = r"[^\\\x00-\x1f"
            parts = (f"{each}({plain}{each}]|{_ESCAPE})*{each}" for each in notation.quotes)
            self._rules += ["string: STRING", f"STRING: {' | '.join(f'/{part}/' for part in parts)}"]
            self._rules.append("anymember: string /: ?/ any")
            self._key = f"/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ {quote(notation.assign)}"
        else:
            self._rules.append(f"string: {mark(notation.quotes[0])} {text}")
            self._key = f"/[A-Za-z_][A-Za-z0-9_ -]{{0,63}}/ {quote(notation.assign)}"
            self._rules.append(f"anymember: {self._key} any")

    def list_rules(self) -> list[str]:
        """Returns the rules that the terms of all tools need."""
        return self._rules

    def write_arguments(self, schema: Mapping[str, Any], field: str) -> str:
        """Returns the term of a call's arguments with their last bracket, in the notation's order.

        Args:
            schema: of an object. Without properties it has any arguments.
            field: the schema's name in errors.

        Raises:
            InvalidRequestError: the schema asks for something that a grammar of this format cannot hold.
        """
        self._root, self._field = schema, field
        end = quote(self._notation.end)
        self._check(schema, "type", *_MEMBERS["object"])
        if not schema.get("properties"):
            one = f"{self._key} any"
            return end if _is_closed(schema) else f"({one} ({_SEPARATOR} {one})*)? {end}"
        return f"{self._write_members(schema, self._write_argument_key)} {end}"

    def _write_value(self, schema: Any) -> str:
        """Returns the term of a value."""
        if schema is True or schema == {}:
            return _ANY
        if not isinstance(schema, Mapping):
            raise self._refuse(schema)
        reference = schema.get("$ref")
        if reference is not None:
            self._check(schema, "$ref")
            return self._write_reference(reference)
        options = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(options, list) and options:
            self._check(schema, "anyOf", "oneOf")
            return f"({' | '.join(self._write_value(option) for option in options)})"
        if "enum" in schema or "const" in schema:
            self._check(schema, "enum", "const", "type")
            types, constants = set(_list(schema.get("type", []))), schema.get("enum", [schema.get("const")])
            fitting = [constant for constant in constants if not types or types & name_types(constant)]
            if not fitting:
                raise self._refuse(schema)
            return f"({' | '.join(map(self._write_constant, fitting))})"
        types = schema.get("type")
        if types is None:
            self._check(schema)
            return _ANY
        return f"({' | '.join(self._write_type(schema, name) for name in _list(types))})"

    def _write_type(self, schema: Mapping[str, Any], name: Any) -> str:
        members = self._members
        self._check(schema, "type", *(each for kind in _list(schema["type"]) for each in members.get(kind, ())))
        if name in _SCALARS:
            own = {member: schema[member] for member in members.get(name, ()) if member in schema}
            return f"%json {json.dumps({'type': name, **own})}" if own else _SCALARS[name]
        if name == "array":
            return self._write_array(schema)
        if name != "object":
            raise self._refuse(name)
        if not schema.get("properties"):
            return '"{" "}"' if _is_closed(schema) else "anyobject"
        return f'"{{" {self._write_members(schema, self._write_key)} "}}"'

    def _write_array(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(least, int) or least > _MOST_ITEMS or (most is not None and not isinstance(most, int)):
            raise self._refuse(least)
        if most is not None and most < max(least, 1):
            return '"[" "]"'
        item = self._write_value(schema.get("items", True))
        upper = "" if most is None or most > _MOST_ITEMS else most - 1
        items = f"{item} ({_SEPARATOR} {item}){{{max(least - 1, 0)},{upper}}}"
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _write_members(self, schema: Mapping[str, Any], write_key: Callable[[str], str]) -> str:
        """Returns the term of an object's members. A rule per member says what may follow, with a comma or without."""
        properties, required = schema["properties"], schema.get("required") or ()
        names = sorted(properties, key=str.lower) if self._notation.is_sorted else list(properties)
        missing = [name for name in required if name not in properties]
        if missing:
            raise self._refuse(missing[0])
        first, later = '""', '""'
        for name in reversed(names):
            member = self._add(f"{write_key(name)} {self._write_value(properties[name])}")
            one, more = f"{member} {later}", f"{_SEPARATOR} {member} {later}"
            if name not in required:
                one, more = f"{one} | {first}", f"{more} | {later}"
            first, later = self._add(one), self._add(more)
        return first

    def _write_argument_key(self, name: str) -> str:
        if self._notation.has_escapes and not name.isidentifier():
            raise self._refuse(name)
        return self._write_key(name) if not self._notation.has_escapes else quote(name + self._notation.assign)

    def _write_key(self, name: str) -> str:
        if self._notation.has_escapes:
            return f"{self._write_constant(name)} /: ?/"
        if not name or name.strip() != name or any(character in "{}[],:<" for character in name):
            raise self._refuse(name)
        return quote(name + self._notation.assign)

    def _write_constant(self, value: Any) -> str:
        if isinstance(value, str):
            if self._notation.has_escapes:
                return f"({quote(repr(value))} | {quote(json.dumps(value, ensure_ascii=False))})"
            delimiter = self._notation.quotes[0]
            if delimiter in value:
                raise self._refuse(value)
            return f"{self._mark(delimiter)} {quote(value) if value else ''} {self._mark(delimiter)}"
        if value is None or isinstance(value, bool):
            return f"({quote(repr(value))} | {quote(json.dumps(value))})"
        if isinstance(value, int | float):
            return quote(json.dumps(value))
        raise self._refuse(value)

    def _write_reference(self, reference: Any) -> str:
        """Returns the rule of a part of the tool's schema; a rule may name itself."""
        key = f"{self._field} {reference}"
        if key not in self._known:
            part: Any = self._root
            steps = str(reference).split("/")
            for step in steps[1:]:
                part = part.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
            if steps[0] != "#" or part is None:
                raise self._refuse(reference)
            self._known[key] = self._add("")
            at = len(self._rules) - 1
            self._rules[at] += self._write_value(part)
        return self._known[key]

    def _add(self, term: str) -> str:
        name = f"part{len(self._rules)}"
        self._rules.append(f"{name}: {term}")
        return name

    def _check(self, schema: Mapping[str, Any], *enforced: str) -> None:
        """Refuses a schema with members that the grammar does not enforce."""
        unknown = sorted(schema.keys() - _NOTES - set(enforced))
        if unknown:
            raise self._refuse(unknown[0])

    def _refuse(self, what: Any) -> InvalidRequestError:
        message = (
            f"{shorten(what)} is not enforced in this model's format of calls, which a strict or forced call needs"
        )
        return InvalidRequestError(message, field=f"{self._field}.properties", value=None)


def _is_closed(schema: Mapping[str, Any]) -> bool:
    return schema.get("additionalProperties") is False


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
