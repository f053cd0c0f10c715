"""Calls that write each argument between marks, as in XML: Qwen 3 Coder's, GLM's and MiniMax's.

A value is text without escapes. Its type is that of the tool's schema, so `5` is a string or a number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.server.events import ArgumentsDelta, CallBegun, ParserEvent
from jaxserve.server.tools.call_readers import NAME_CHARACTERS
from jaxserve.server.tools.parser_parts import BLANKS
from jaxserve.server.tools.values import list_types, write_value

_LONGEST_KEY = 1000  # characters


@dataclass(frozen=True, slots=True)
class XmlMarks:
    """The marks of one format. The first character of `key_end` and of `value_end` occurs in it once."""

    name_end: str  # "" if the name ends with its last character
    key: str
    key_end: str
    value: str  # between key and value, after any blanks; "" if the value follows
    value_end: str
    end: str
    has_lines: bool = False  # a value stands between two line breaks
    gap: str = "\n"  # behind `key_end`, as templates write it


QWEN3_CODER_MARKS = XmlMarks(">", "<parameter=", ">", "", "</parameter>", "</function>", has_lines=True)
GLM_MARKS = XmlMarks("", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")
MINIMAX_MARKS = XmlMarks('">', '<parameter name="', '">', "", "</parameter>", "</invoke>", gap="")


class XmlCallReader:
    """Reads a call from its name to its last mark. Values that are strings are passed on as they come."""

    def __init__(
        self,
        marks: XmlMarks,
        index: int,
        make_id: Callable[[], str],
        raw: list[str],
        parameters: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """`parameters` holds the schemas of the arguments by the function's name."""
        self.started = self.ended = self.broken = False
        self.raw = raw
        self._marks, self._index, self._make_id, self._parameters = marks, index, make_id, parameters
        self._state = "name"  # then "name end", "gap", "key", "to value", "value"
        self._part: list[str] = []  # of a name, a mark, a key, or a value that is needed as a whole
        self._held = ""  # perhaps the beginning of a mark in a value
        self._name = ""
        self._schema: Mapping[str, Any] = {}
        self._num_values = 0
        self._types: set[str] = set()  # of the value
        self._streams = False
        self._is_first = True  # the value has no text yet
        self._out: list[str] = []  # of the arguments

    def push(self, text: str, at: int, out: list[ParserEvent]) -> int:
        begin, was_started = at, self.started
        while at < len(text) and not self.ended:
            at = self._read_value(text, at) if self._state == "value" else at + self._step(text[at])
        if not self.started:
            self.raw.append(text[begin:at])
        elif not was_started:
            self.raw.clear()
            out.append(CallBegun(self._index, self._make_id(), self._name))
        if self._out:
            out.append(ArgumentsDelta(self._index, "".join(self._out)))
            self._out = []
        return at

    def _step(self, character: str) -> int:
        """Reads one character outside of values; returns 0 if it was not consumed."""
        if self._state == "name":
            if character in NAME_CHARACTERS:
                self._part.append(character)
                return 1
            self._name, self._part = "".join(self._part), []
            self._state = "name end"
            if not self._name:
                self._break()
            elif not self._marks.name_end:
                self._start()
            return 0
        if self._state == "key":
            return self._read_key(character)
        if not self._part and character in BLANKS:
            return 1
        words = {
            "name end": {self._marks.name_end: self._start},
            "gap": {self._marks.key: self._begin_key, self._marks.end: self._end},
            "to value": {self._marks.value: self._begin_value},
        }[self._state]
        partial = "".join(self._part) + character
        if partial in words:
            self._part = []
            words[partial]()
        elif any(word.startswith(partial) for word in words):
            self._part.append(character)
        else:
            self._break()
            return 0
        return 1

    def _start(self) -> None:
        self.started, self._state = True, "gap"
        self._out.append("{")
        self._schema = self._parameters.get(self._name, {})

    def _begin_key(self) -> None:
        self._state = "key"

    def _read_key(self, character: str) -> int:
        self._part.append(character)
        key_end = self._marks.key_end
        if character == key_end[-1] and "".join(self._part[-len(key_end) :]) == key_end:
            key = "".join(self._part[: -len(key_end)])
            self._part = []
            self._open_value(key)
        elif len(self._part) > _LONGEST_KEY:
            self._break()
        return 1

    def _open_value(self, key: str) -> None:
        self._out.append(f"{', ' if self._num_values else ''}{json.dumps(key, ensure_ascii=False)}: ")
        self._num_values += 1
        self._types = list_types(self._schema, key)
        self._streams = self._types == {"string"}
        self._state = "to value"
        if not self._marks.value:
            self._begin_value()

    def _begin_value(self) -> None:
        self._state, self._is_first, self._held = "value", True, ""
        if self._streams:
            self._out.append('"')

    def _read_value(self, text: str, at: int) -> int:
        mark = self._marks.value_end
        if self._held:
            partial = self._held + text[at]
            ending = partial.removeprefix("\n") if self._marks.has_lines else partial
            if ending == mark:
                self._close_value()
            elif mark.startswith(ending):
                self._held = partial
            else:
                self._take(self._held)
                self._held = ""
                return at
            return at + 1
        if self._is_first and self._marks.has_lines and text[at] == "\n":
            self._is_first = False
            return at + 1
        found = text.find(mark[0], at)
        end = found if found >= 0 else len(text)
        num_held = int(self._marks.has_lines and end > at and text[end - 1] == "\n")
        self._take(text[at : end - num_held])
        self._held = text[end - num_held : end + 1]
        self._is_first = False
        return min(end + 1, len(text))

    def _take(self, text: str) -> None:
        if not text:
            return
        self._is_first = False
        if self._streams:
            self._out.append(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._part.append(text)

    def _close_value(self) -> None:
        self._held, self._state = "", "gap"
        if self._streams:
            self._out.append('"')
        else:
            self._out.append(write_value("".join(self._part), self._types))
            self._part = []

    def _end(self) -> None:
        self._out.append("}")
        self.ended = True

    def _break(self) -> None:
        self.ended = self.broken = True
