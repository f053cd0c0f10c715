"""Incremental readers of a single call: each reads text until the call ends, or proves not to be a call."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Protocol

from jaxserve.server.events import ArgumentsDelta, CallBegun, ParserEvent
from jaxserve.server.tools.json_scanner import JsonScanner, begins_value
from jaxserve.server.tools.parser_parts import BLANKS

_NAME, _OTHER = "name", "other"
_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")  # model families differ; the first one in a call counts
_KEY = "key"
# Transitions by state: character -> next state. `begins_value` says which characters begin a value.
_STEPS = {
    "open": {"{": "first key"},
    "first key": {'"': _KEY, "}": "end"},
    "next key": {'"': _KEY},
    "colon": {":": "value"},
    "value": {},
    "after": {",": "next key", "}": "end"},
}
NAME_CHARACTERS = frozenset("_-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


class CallReader(Protocol):
    """A reader of one call, as the answer's parser uses it."""

    started: bool  # it is certainly a call: its name is known and its arguments have begun
    ended: bool  # the following text is not part of it
    broken: bool  # it ended before its form was complete
    raw: list[str]  # all its text until it is started

    def push(self, text: str, at: int, out: list[ParserEvent]) -> int:
        """Adds what is certain to `out`; returns the index after the last character of the call."""
        ...


def begins_name(character: str) -> bool:
    """Whether a function's name may begin with this character."""
    return character in NAME_CHARACTERS


class JsonCallReader:
    """Reads `{"name": "f", "arguments": {...}}`, with keys in any order, unknown ones included.

    Arguments are passed on as they come once the name is known. Arguments given as a string that holds an object are
    accepted too, when the string ends.
    """

    def __init__(
        self,
        index: int,
        make_id: Callable[[], str],
        raw: list[str],
        *,
        names: Collection[str] | None = None,
        needs_arguments: bool = False,
    ) -> None:
        self.started = self.ended = self.broken = False
        self.raw = raw
        self._index, self._make_id = index, make_id
        self._names, self._needs_arguments = names, needs_arguments
        self._state = "open"
        self._role = _KEY  # what the value being scanned is
        self._scanner: JsonScanner | None = None
        self._value: list[str] = []  # parts of that value, if it is needed as a whole
        self._name: str | None = None
        self._arguments: str | None = None  # complete, if they ended before the name was known
        self._has_arguments = False

    def push(self, text: str, at: int, out: list[ParserEvent]) -> int:
        begin = at
        while at < len(text) and not self.ended:
            if self._scanner is not None:
                end = self._scanner.push(text, at)
                self._take(text[at:end], out)
                at = end
                if self._scanner.done:
                    self._scanner = None
                    self._close_value(out)
            else:
                at += self._step(text[at], out)
        if not self.started:
            self.raw.append(text[begin:at])
        return at

    def _step(self, character: str, out: list[ParserEvent]) -> int:
        """Reads one character between values; returns 0 if it was not consumed."""
        if character in BLANKS:
            return 1
        if self._state == "value" and begins_value(character):
            self._begin_value(character, out)
            return 0
        following = _STEPS[self._state].get(character)
        if following is None:
            self._break()
            return 0
        if following == _KEY:
            self._role, self._scanner = _KEY, JsonScanner()
            return 0
        if following == "end":
            self._end(out)
        self._state = following
        return 1

    def _begin_value(self, character: str, out: list[ParserEvent]) -> None:
        is_arguments = self._role in _ARGUMENTS
        if (self._role == _NAME and character != '"') or (is_arguments and character not in '{"n'):
            self._break()
            return
        self._scanner = JsonScanner()
        if is_arguments and character == "{" and self._name is not None:
            self._start(out)
            self._role = "streamed"

    def _take(self, part: str, out: list[ParserEvent]) -> None:
        if self._role == "streamed":
            out.append(ArgumentsDelta(self._index, part))
        elif self._role != _OTHER:
            self._value.append(part)

    def _close_value(self, out: list[ParserEvent]) -> None:
        value, role = "".join(self._value), self._role
        self._value.clear()
        self._state = "colon" if role == _KEY else "after"
        if role == _KEY:
            self._role = self._find_role(_decode(value))
        elif role == _NAME:
            self._name = _decode(value)
            if not self._name or (self._names is not None and self._name not in self._names):
                self._break()
            elif self._arguments is not None:
                self._start(out)
        elif role in _ARGUMENTS:
            self._arguments = _read_arguments(value)
            if self._arguments is None:
                self._break()
            elif self._name is not None:
                self._start(out)

    def _find_role(self, key: str | None) -> str:
        if key in _NAMES and self._name is None:
            return _NAME
        if key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            return str(key)
        return _OTHER

    def _start(self, out: list[ParserEvent]) -> None:
        assert self._name is not None
        self.started = True
        self.raw.clear()
        out.append(CallBegun(self._index, self._make_id(), self._name))
        if self._arguments is not None:
            out.append(ArgumentsDelta(self._index, self._arguments))

    def _end(self, out: list[ParserEvent]) -> None:
        self.ended = True
        if self.started:
            return
        if self._name is None or self._needs_arguments:
            self.broken = True
        else:
            self._arguments = "{}"
            self._start(out)

    def _break(self) -> None:
        self.ended = self.broken = True


class ObjectCallReader(ABC):
    """Reads a call whose arguments are an object of JSON behind its name. Subclasses read what is before the object."""

    def __init__(self, index: int, make_id: Callable[[], str], raw: list[str]) -> None:
        self.started = self.ended = self.broken = False
        self.raw = raw
        self._index, self._make_id = index, make_id
        self._scanner: JsonScanner | None = None

    def push(self, text: str, at: int, out: list[ParserEvent]) -> int:
        """See `CallReader.push`."""
        begin = at
        while at < len(text) and not self.ended:
            if self._scanner is not None:
                end = self._scanner.push(text, at)
                out.append(ArgumentsDelta(self._index, text[at:end]))
                at, self.ended = end, self._scanner.done
            else:
                at += self._step(text[at], out)
        if not self.started:
            self.raw.append(text[begin:at])
        return at

    @abstractmethod
    def _step(self, character: str, out: list[ParserEvent]) -> int:
        """Reads one character before the arguments; returns 0 if it was not consumed."""

    def _begin_arguments(self, name: str, out: list[ParserEvent]) -> None:
        self.started = True
        self.raw.clear()
        self._scanner = JsonScanner()
        out.append(CallBegun(self._index, self._make_id(), name))


class NamedCallReader(ObjectCallReader):
    """Reads `f{...}`, `f[ARGS]{...}` and `f[CALL_ID]x[ARGS]{...}`, the calls of newer Mistral models."""

    def __init__(self, index: int, make_id: Callable[[], str], raw: list[str]) -> None:
        super().__init__(index, make_id, raw)
        self._name: list[str] = []
        self._tag = ""
        self._reads = "name"  # then perhaps "id", then "arguments"

    def _step(self, character: str, out: list[ParserEvent]) -> int:
        if self._tag or (character == "[" and self._reads != "arguments"):
            return self._step_in_tag(self._tag + character)
        if character == "{" and self._reads != "id":
            self._begin_arguments("".join(self._name), out)
            return 0
        if self._reads == "arguments":
            belongs = character in BLANKS
        else:
            belongs = character in NAME_CHARACTERS
            if self._reads == "name":
                self._name.append(character)
        if not belongs:
            self.ended = self.broken = True
        return int(belongs)

    def _step_in_tag(self, tag: str) -> int:
        following = {"[ARGS]": "arguments"} if self._reads == "id" else {"[ARGS]": "arguments", "[CALL_ID]": "id"}
        if tag in following:
            self._reads, self._tag = following[tag], ""
        elif any(known.startswith(tag) for known in following):
            self._tag = tag
        else:
            self.ended = self.broken = True
            return 0
        return 1


def _decode(text: str) -> str | None:
    """Returns the value of a JSON string; None if it is invalid or cannot be encoded as UTF-8."""
    try:
        value = json.loads(text)
        value.encode()
    except ValueError:
        return None
    return str(value)


def _read_arguments(text: str) -> str | None:
    """Returns arguments that came before the name or in another form, as an object; None if they are invalid."""
    if text == "null":
        return "{}"
    if not text.startswith('"'):
        return text if text.startswith("{") else None
    inner = _decode(text)
    try:
        return inner if inner is not None and isinstance(json.loads(inner), dict) else None
    except (ValueError, RecursionError):
        return None
