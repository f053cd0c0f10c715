"""Constraints on the form of the output: one frozen, validated value per request."""

from __future__ import annotations

import json as json_library
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from jaxserve.errors import InvalidRequestError, shorten
from jaxserve.structural_tag import read_structural_tag
from jaxserve.structured_checks import (
    MAX_ITEMS,
    normalise_object,
    normalise_schema,
    require_grammar,
    require_regex,
    require_text,
)

MAX_WHITESPACE_BYTES = 256
MAX_CHOICE_BYTES = 1_024  # per text
MAX_CHOICES_BYTES = 64 * 1024  # all texts together
_CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_WHITESPACE_OPTIONS = ("disable_any_whitespace", "whitespace_pattern")


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
    structural_tag: str | dict[str, Any] | None = None  # text with tags in it (`structural_tag.py`); its JSON text
    disable_any_whitespace: bool = False  # json and json_object: no whitespace between the tokens of JSON
    whitespace_pattern: str | None = None  # the same: a regex for it; default: a blank, or a line break and at most 32

    def __new__(cls, *_args: Any, **options: Any) -> StructuredOutputsParams:
        """Refuses unknown names before the generated `__init__` sees them."""
        known = [f.name for f in fields(cls)]
        for name, value in options.items():
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
        for name, normalise in _NORMALISED.items():
            if getattr(self, name) is not None:
                object.__setattr__(self, name, normalise(_name(name), getattr(self, name)))
        if self.structural_tag is not None:
            read_structural_tag(str(self.structural_tag), _name("structural_tag"))

    def _require_whitespace_options(self, kind: str) -> None:
        if not kind.startswith("json"):
            for name in _WHITESPACE_OPTIONS:
                if getattr(self, name):
                    raise _refuse(name, f"applies to json and json_object only, not to {kind}", kind)
        if self.whitespace_pattern is not None:
            require_text(_name("whitespace_pattern"), self.whitespace_pattern, MAX_WHITESPACE_BYTES)
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


def _name(option: str) -> str:
    return f"structured_outputs.{option}"


def _refuse(option: str, message: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(message, field=_name(option), value=value)


def _normalise_choice(field: str, choice: object) -> tuple[str, ...]:
    if isinstance(choice, str | bytes | Mapping) or not isinstance(choice, Sequence):
        raise _refuse("choice", f"must be a list of strings, got {shorten(choice)}", choice)
    if not 1 <= len(choice) <= MAX_ITEMS:
        raise _refuse("choice", f"must hold 1 to {MAX_ITEMS} strings, got {len(choice)}", None)
    total = 0
    for text in choice:
        require_text(field, text, MAX_CHOICE_BYTES)
        total += len(text.encode())
    if total > MAX_CHOICES_BYTES:
        raise _refuse("choice", f"at most {MAX_CHOICES_BYTES} bytes in all, got {total}", None)
    return tuple(dict.fromkeys(choice))


_NORMALISED: dict[str, Callable[[str, object], Any]] = {
    "json": normalise_schema,
    "regex": require_regex,
    "choice": _normalise_choice,
    "grammar": require_grammar,
    "structural_tag": normalise_object,
}
