"""Checks of JSON Schemas, regular expressions and grammars before they are compiled: types, sizes and nesting."""

from __future__ import annotations

import json
import re
from typing import Any

from jaxserve.errors import InvalidRequestError, shorten

MAX_SCHEMA_BYTES = 64 * 1024
MAX_GRAMMAR_BYTES = 64 * 1024
MAX_REGEX_BYTES = 16 * 1024
MAX_NESTING = 64  # levels of objects and arrays in a schema
MAX_MEMBERS = 1_000  # per object in a schema
MAX_ITEMS = 4_096  # per array in a schema (an enum), and per choice
LARGEST_INTEGER = 2**53  # in a schema
# Strings, special tokens, comments and regular expressions of a Lark grammar: nothing inside them is an option. One
# without an end matches too, and llguidance refuses it later: trying again after each quote would take seconds.
LARK_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"?|<[^<>\s]+>?|(?:#|//)[^\n]*|/(?:[^/\\]|\\.)+/?')
# Options of a Lark rule that the engine cannot honour: a request has one temperature, and text is never taken back.
_UNSUPPORTED_RULE_OPTION = re.compile(r"\b(temperature|stop)\s*=", re.ASCII)


def require_text(field: str, text: object, max_bytes: int) -> str:
    """Returns a text that is not empty, is valid Unicode and has at most `max_bytes`.

    Raises:
        InvalidRequestError: it is none; `field` is the name in the error.
    """
    if not isinstance(text, str) or not text:
        raise _refuse(field, f"must be a non-empty string, got {shorten(text)}", text)
    if len(text) > max_bytes or _count_bytes(field, text) > max_bytes:
        raise _refuse(field, f"at most {max_bytes} bytes, got {len(text)} characters", None)
    return text


def _count_bytes(field: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        where = f"character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}"
        raise _refuse(field, f"is not valid Unicode: {where}", None) from None


def require_regex(field: str, regex: object) -> str:
    """Returns a regular expression; raises as `require_text`."""
    text = require_text(field, regex, MAX_REGEX_BYTES)
    if (len(text) - len(text.rstrip("\\"))) % 2:  # llguidance would drop it
        raise _refuse(field, "ends with a backslash that escapes nothing", None)
    return text


def require_grammar(field: str, given: object) -> str:
    """Returns a grammar in Lark or GBNF; raises as `require_text`."""
    grammar = require_text(field, given, MAX_GRAMMAR_BYTES)
    if grammar.lstrip().startswith("{"):  # llguidance would take it for its own JSON form and skip these checks
        raise _refuse(field, "must be a Lark grammar, got a JSON object; a schema belongs in json", None)
    found = _UNSUPPORTED_RULE_OPTION.search(LARK_LITERAL.sub('""', grammar))
    if found is not None:
        option = found[1]
        instead = "use the request's temperature" if option == "temperature" else "use suffix= or lazy"
        raise _refuse(field, f"the rule option {option}= is not supported; {instead}", found[0])
    return grammar


def normalise_schema(field: str, schema: object) -> str:
    """Returns a JSON Schema as compact JSON text, from a dict or from JSON text; raises as `normalise_object`."""
    text = normalise_object(field, schema)
    if '"x-guidance"' in text and "x-guidance" in json.loads(text):
        raise _refuse(field, "x-guidance is not allowed; use disable_any_whitespace or whitespace_pattern", None)
    return text


def normalise_object(field: str, given: object) -> str:
    """Returns a small JSON object as compact JSON text, from a dict or from JSON text.

    Raises:
        InvalidRequestError: it is none, or too large or too deep; `field` is the name in the error.
    """
    if isinstance(given, str):
        require_text(field, given, MAX_SCHEMA_BYTES)
        try:
            given = json.loads(given, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            reason = "too deeply nested" if isinstance(error, RecursionError) else str(error)
            raise _refuse(field, f"is not JSON: {reason}", None) from None
    if not isinstance(given, dict):
        raise _refuse(field, f"must be a JSON object, got {shorten(given)}", given)
    _require_small(field, given)
    text = _dump_limited(field, given)
    _count_bytes(field, text)
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _require_small(field: str, schema: dict[str, Any]) -> None:
    """Refuses deep nesting, long arrays, large objects and keys other than strings, without recursion."""
    stack: list[tuple[object, int]] = [(schema, 1)]
    num_values = 0
    while stack:
        value, depth = stack.pop()
        num_values += 1
        if num_values > MAX_SCHEMA_BYTES:  # every value takes a byte; a shared object counts each time
            raise _refuse(field, f"at most {MAX_SCHEMA_BYTES} bytes, got more", None)
        if not isinstance(value, dict | list | tuple):
            if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
                message = f"{shorten(value)} is beyond 2**53, where llguidance rounds; a string could hold it"
                raise _refuse(field, message, None)
            continue
        if depth > MAX_NESTING:
            raise _refuse(field, f"nested more than {MAX_NESTING} levels deep", None)
        if isinstance(value, dict):
            if len(value) > MAX_MEMBERS:
                raise _refuse(field, f"one object has {len(value)} members; at most {MAX_MEMBERS} are possible", None)
            for name in value:
                if not isinstance(name, str):
                    raise _refuse(field, f"is not JSON: the key {shorten(name)} is not a string", name)
            _require_distinct(field, value)
            stack += [(item, depth + 1) for item in value.values()]
        else:
            if len(value) > MAX_ITEMS:
                raise _refuse(field, f"one array has {len(value)} items; at most {MAX_ITEMS} are possible", None)
            stack += [(item, depth + 1) for item in value]


def _require_distinct(field: str, schema: dict[str, Any]) -> None:
    """Refuses `minProperties` beyond the required keys: nothing keeps a model from writing another key twice."""
    least, required = schema.get("minProperties"), schema.get("required")
    num_required = len(required) if isinstance(required, list | tuple) else 0
    if isinstance(least, int) and least > max(1, num_required):
        message = f"minProperties {least} can only be guaranteed for keys in required, which has {num_required}"
        raise _refuse(field, message, None)


def _dump_limited(field: str, schema: dict[str, Any]) -> str:
    """Returns it as JSON text. It is written piece by piece, so that a huge one is refused early."""
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    pieces: list[str] = []
    size = 0
    try:
        for piece in encoder.iterencode(schema):
            pieces.append(piece)
            size += len(piece.encode("utf-8", "surrogatepass"))
            if size > MAX_SCHEMA_BYTES:
                raise _refuse(field, f"at most {MAX_SCHEMA_BYTES} bytes, got more", None)
    except InvalidRequestError:
        raise
    except (TypeError, ValueError) as error:  # ValueError: NaN or infinity, or an integer too long to print
        raise _refuse(field, f"is not JSON: {error}", None) from None
    return "".join(pieces)


def _refuse(field: str, message: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(message, field=field, value=value)
