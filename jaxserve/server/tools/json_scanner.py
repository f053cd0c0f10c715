"""Finds the end of a JSON value in text that comes in pieces."""

from __future__ import annotations

_VALUE_BEGINS = frozenset('{["-0123456789tfn')
_SCALAR = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")


def begins_value(character: str) -> bool:
    """Whether a JSON value may begin with this character."""
    return character in _VALUE_BEGINS


class JsonScanner:
    """Finds the end of a JSON value in constant memory, one pass over its text.

    It does not validate: what a model writes between the brackets is passed on unchanged.
    """

    __slots__ = ("_begun", "_depth", "_escaped", "_in_string", "done")

    def __init__(self) -> None:
        self.done = False
        self._begun = self._in_string = self._escaped = False
        self._depth = 0

    def push(self, text: str, at: int = 0) -> int:
        """Returns the index after the last character of `text[at:]` that belongs to the value, and sets `done`.

        The first character pushed must be one that begins a value.
        """
        for index in range(at, len(text)):
            character = text[index]
            if self._in_string:
                self._step_in_string(character)
            elif self._depth == 0 and self._begun:
                if character not in _SCALAR:  # any other character ends a number or a word
                    self.done = True
                    return index
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
            self._begun = True
            if self._in_string or self._depth:
                continue
            if character in '"}]':
                self.done = True
                return index + 1
        return len(text)

    def _step_in_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
