"""Constraints on the form of the output: one frozen, validated value per request."""

from __future__ import annotations

import json as json_library
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from jaxserve.errors import InvalidRequestError, shorten

MAX_SCHEMA_BYTES = 64 * 1024
MAX_GRAMMAR_BYTES = 64 * 1024
MAX_REGEX_BYTES = 16 * 1024
MAX_WHITESPACE_BYTES = 256
MAX_NESTING = 64  # levels of objects and arrays in a schema
MAX_MEMBERS = 1_000  # per object in a schema
MAX_ITEMS = 4_096  # per array in a schema (an enum), and per choice
LARGEST_INTEGER = 2**53  # in a schema
MAX_CHOICE_BYTES = 1_024  # per text
MAX_CHOICES_BYTES = 64 * 1024  # all texts together
_CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar")
_WHITESPACE_OPTIONS = ("disable_any_whitespace", "whitespace_pattern")
# Strings, special tokens, comments and regular expressions of a Lark grammar: nothing inside them is an option. One
# without an end matches too, and llguidance refuses it later: trying again after each quote would take seconds.
LARK_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"?|<[^<>\s]+>?|(?:#|//)[^\n]*|/(?:[^/\\]|\\.)+/?')
# Options of a Lark rule that the engine cannot honour: a request has one temperature, and text is never taken back.
_UNSUPPORTED_RULE_OPTION = re.compile(r"\b(temperature|stop)\s*=", re.ASCII)


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The form that the output must have: exactly one constraint. Names are vLLM's.

    Only types, sizes and nesting are checked here; a grammar is compiled at admission.

    Raises:
        InvalidRequestError: no constraint or several, a malformed or too large one, or an unknown name.
    """

    json: str | dict[str, Any] | None = None  # a JSON Schema (draft 2020-12); normalised to its text
    json_object: bool | None = None  # any JSON object
    regex: str | None = None  # the whole output; syntax of Rust's `regex` crate, no look-around; \d, \w, \s are ASCII
    choice: Sequence[str] | None = None  # one of these texts; normalised to a tuple
    grammar: str | None = None  # llguidance's dialect of Lark; GBNF is converted to it
    disable_any_whitespace: bool = False  # json and json_object: no whitespace between the tokens of JSON
    whitespace_pattern: str | None = None  # the same: a regex for it; default: a blank, or a line break and at most 32

    def __new__(cls, *_args: Any, **options: Any) -> StructuredOutputsParams:
        """Refuses unknown names before the generated `__init__` sees them."""
        known = [f.name for f in fields(cls)]
        for name, value in options.items():
            if name == "structural_tag":
                raise _refuse(name, "is not supported; use grammar, whose rules can hold %json schemas", value)
            if name not in known:
                raise _refuse(name, f"is not known; supported: {', '.join(known)}", value)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool | None):
                raise _refuse(name, "must be true or false", getattr(self, name))
        given = [name for name in _CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = f"got {', '.join(given)}" if given else "got none"
            message = f"exactly one of {', '.join(_CONSTRAINTS)} is needed, {found}"
            raise InvalidRequestError(message, field="structured_outputs", value=given)
        self._require_whitespace_options(given[0])
        if self.json is not None:
            object.__setattr__(self, "json", _normalise_schema(self.json))
        if self.regex is not None:
            _require_text("regex", self.regex, MAX_REGEX_BYTES)
            if (len(self.regex) - len(self.regex.rstrip("\\"))) % 2:  # llguidance would drop it
                raise _refuse("regex", "ends with a backslash that escapes nothing", None)
        if self.choice is not None:
            object.__setattr__(self, "choice", _normalise_choice(self.choice))
        if self.grammar is not None:
            _require_grammar(self.grammar)

    def _require_whitespace_options(self, kind: str) -> None:
        if not kind.startswith("json"):
            for name in _WHITESPACE_OPTIONS:
                if getattr(self, name):
                    raise _refuse(name, f"applies to json and json_object only, not to {kind}", kind)
        if self.whitespace_pattern is not None:
            _require_text("whitespace_pattern", self.whitespace_pattern, MAX_WHITESPACE_BYTES)
            if self.disable_any_whitespace:
                raise _refuse("whitespace_pattern", "contradicts disable_any_whitespace", self.whitespace_pattern)

    @property
    def kind(self) -> str:
        """The name of the constraint that is set."""
        return next(name for name in _CONSTRAINTS if getattr(self, name) not in (None, False))

    @property
    def key(self) -> str:
        """JSON text that is equal for equal params. A schema's properties keep their order: it decides the output's."""
        values = (self.kind, getattr(self, self.kind), self.disable_any_whitespace, self.whitespace_pattern)
        return json_library.dumps(values, ensure_ascii=False, separators=(",", ":"))


def _refuse(name: str, message: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(message, field=f"structured_outputs.{name}", value=value)


def _require_text(name: str, text: object, max_bytes: int) -> None:
    if not isinstance(text, str) or not text:
        raise _refuse(name, f"must be a non-empty string, got {shorten(text)}", text)
    if len(text) > max_bytes or _count_bytes(name, text) > max_bytes:
        raise _refuse(name, f"at most {max_bytes} bytes, got {len(text)} characters", None)


def _count_bytes(name: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        where = f"character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}"
        raise _refuse(name, f"is not valid Unicode: {where}", None) from None


def _require_grammar(grammar: str) -> None:
    _require_text("grammar", grammar, MAX_GRAMMAR_BYTES)
    if grammar.lstrip().startswith("{"):  # llguidance would take it for its own JSON form and skip these checks
        raise _refuse("grammar", "must be a Lark grammar, got a JSON object; a schema belongs in json", None)
    found = _UNSUPPORTED_RULE_OPTION.search(LARK_LITERAL.sub('""', grammar))
    if found is not None:
        option = found[1]
        instead = "use the request's temperature" if option == "temperature" else "use suffix= or lazy"
        raise _refuse("grammar", f"the rule option {option}= is not supported; {instead}", found[0])


def _normalise_choice(choice: object) -> tuple[str, ...]:
    if isinstance(choice, str | bytes | Mapping) or not isinstance(choice, Sequence):
        raise _refuse("choice", f"must be a list of strings, got {shorten(choice)}", choice)
    if not 1 <= len(choice) <= MAX_ITEMS:
        raise _refuse("choice", f"must hold 1 to {MAX_ITEMS} strings, got {len(choice)}", None)
    total = 0
    for text in choice:
        _require_text("choice", text, MAX_CHOICE_BYTES)
        total += len(text.encode())
    if total > MAX_CHOICES_BYTES:
        raise _refuse("choice", f"at most {MAX_CHOICES_BYTES} bytes in all, got {total}", None)
    return tuple(dict.fromkeys(choice))


def _normalise_schema(schema: object) -> str:
    """Returns the schema as compact JSON text, from a dict or from JSON text."""
    if isinstance(schema, str):
        _require_text("json", schema, MAX_SCHEMA_BYTES)
        try:
            schema = json_library.loads(schema, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            reason = "too deeply nested" if isinstance(error, RecursionError) else str(error)
            raise _refuse("json", f"is not JSON: {reason}", None) from None
    if not isinstance(schema, dict):
        raise _refuse("json", f"must be a JSON object, got {shorten(schema)}", schema)
    _require_small(schema)
    text = _dump_limited(schema)
    if "x-guidance" in schema:
        raise _refuse("json", "x-guidance is not allowed; use disable_any_whitespace or whitespace_pattern", None)
    _count_bytes("json", text)
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _require_small(schema: dict[str, Any]) -> None:
    """Refuses deep nesting, long arrays, large objects and keys other than strings, without recursion."""
    stack: list[tuple[object, int]] = [(schema, 1)]
    num_values = 0
    while stack:
        value, depth = stack.pop()
        num_values += 1
        if num_values > MAX_SCHEMA_BYTES:  # every value takes a byte; a shared object counts each time
            raise _refuse("json", f"at most {MAX_SCHEMA_BYTES} bytes, got more", None)
        if not isinstance(value, dict | list | tuple):
            if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
                message = f"{shorten(value)} is beyond 2**53, where llguidance rounds; a string could hold it"
                raise _refuse("json", message, None)
            continue
        if depth > MAX_NESTING:
            raise _refuse("json", f"nested more than {MAX_NESTING} levels deep", None)
        if isinstance(value, dict):
            if len(value) > MAX_MEMBERS:
                raise _refuse("json", f"one object has {len(value)} members; at most {MAX_MEMBERS} are possible", None)
            for name in value:
                if not isinstance(name, str):
                    raise _refuse("json", f"is not JSON: the key {shorten(name)} is not a string", name)
            _require_distinct(value)
            stack += [(item, depth + 1) for item in value.values()]
        else:
            if len(value) > MAX_ITEMS:
                raise _refuse("json", f"one array has {len(value)} items; at most {MAX_ITEMS} are possible", None)
            stack += [(item, depth + 1) for item in value]


def _require_distinct(schema: dict[str, Any]) -> None:
    """Refuses `minProperties` beyond the required keys: nothing keeps a model from writing another key twice."""
    least, required = schema.get("minProperties"), schema.get("required")
    num_required = len(required) if isinstance(required, list | tuple) else 0
    if isinstance(least, int) and least > max(1, num_required):
        message = f"minProperties {least} can only be guaranteed for keys in required, which has {num_required}"
        raise _refuse("json", message, None)


def _dump_limited(schema: dict[str, Any]) -> str:
    """Returns the schema as JSON text. It is written piece by piece, so that a huge one is refused early."""
    encoder = json_library.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    pieces: list[str] = []
    size = 0
    try:
        for piece in encoder.iterencode(schema):
            pieces.append(piece)
            size += len(piece.encode("utf-8", "surrogatepass"))
            if size > MAX_SCHEMA_BYTES:
                raise _refuse("json", f"at most {MAX_SCHEMA_BYTES} bytes, got more", None)
    except InvalidRequestError:
        raise
    except (TypeError, ValueError) as error:  # ValueError: NaN or infinity, or an integer too long to print
        raise _refuse("json", f"is not JSON: {error}", None) from None
    return "".join(pieces)
