"""Calls whose arguments are literals behind their keys: Python's `f(a='x')` and Gemma's `f{a:<|"|>x<|"|>}`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.server.events import ArgumentsDelta, CallBegun, ParserEvent
from jaxserve.server.tools.call_readers import NAME_CHARACTERS
from jaxserve.server.tools.literals import LiteralNotation, LiteralWriter
from jaxserve.server.tools.parser_parts import BLANKS
from jaxserve.server.tools.values import list_types

_LONGEST_KEY = 1000  # characters
_NO_KEY = frozenset("()[]{},")


class LiteralCallReader:
    """Reads a call from its name to its last bracket. It is a call when its first key or its end has come."""

    def __init__(
        self,
        notation: LiteralNotation,
        index: int,
        make_id: Callable[[], str],
        raw: list[str],
        parameters: Mapping[str, Mapping[str, Any]],
        *,
        knows_names: bool = False,
    ) -> None:
        """`parameters` holds the schemas of arguments by the function's name; `knows_names`: there are no others."""
        self.started = self.ended = self.broken = False
        self.raw = raw
        self._notation, self._index, self._make_id = notation, index, make_id
        self._parameters, self._knows_names = parameters, knows_names
        self._part: list[str] = []  # of the name or of a key
        self._name: str | None = None  # None: it comes
        self._value: LiteralWriter | None = None
        self._num_values = 0
        self._needs_comma = False  # or the end
        self._out: list[str] = []  # of the arguments

    def push(self, text: str, at: int, out: list[ParserEvent]) -> int:
        """See `CallReader.push`."""
        begin, was_started = at, self.started
        while at < len(text) and not self.ended:
            if self._value is None:
                at += self._step(text[at])
                continue
            at = self._value.push(text, at, self._out)
            if self._value.ended:
                self.ended = self.broken = self._value.broken
                self._value = None
        if not self.started:
            self.raw.append(text[begin:at])
        elif not was_started:
            self.raw.clear()
            out.append(CallBegun(self._index, self._make_id(), str(self._name)))
        arguments, self._out = "".join(self._out), []
        if arguments:
            out.append(ArgumentsDelta(self._index, arguments))
        return at

    def _step(self, character: str) -> int:
        """Reads one character outside of values; returns 0 if it was not consumed."""
        if not self._part and character in BLANKS:
            return 1
        if self._name is None:
            return self._read_name(character)
        if self._needs_comma and character == ",":
            self._needs_comma = False
        elif character == self._notation.end and not self._part:
            self._end()
        elif character == self._notation.assign and not self._needs_comma:
            self._begin_value()
        elif self._needs_comma or character in _NO_KEY or len(self._part) > _LONGEST_KEY:
            return self._break()
        else:
            self._part.append(character)
        return 1

    def _read_name(self, character: str) -> int:
        if character in NAME_CHARACTERS:
            self._part.append(character)
            return 1
        name = "".join(self._part)
        if character != self._notation.begin or not name or (self._knows_names and name not in self._parameters):
            return self._break()
        self._name, self._part = name, []
        return 1

    def _start(self) -> None:
        if not self.started:
            self.started = True
            self._out.append("{")

    def _begin_value(self) -> None:
        key = "".join(self._part).rstrip(BLANKS)
        for quote in self._notation.quotes:
            if len(key) > 2 * len(quote) and key.startswith(quote) and key.endswith(quote):
                key = key[len(quote) : -len(quote)]
        self._start()
        self._out.append(f"{', ' if self._num_values else ''}{json.dumps(key, ensure_ascii=False)}: ")
        self._num_values += 1
        self._part, self._needs_comma = [], True
        self._value = LiteralWriter(self._notation, list_types(self._parameters.get(str(self._name), {}), key))

    def _end(self) -> None:
        self._start()
        self._out.append("}")
        self.ended = True

    def _break(self) -> int:
        self.ended = self.broken = True
        return 0
