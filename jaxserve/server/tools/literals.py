"""Rewrites literals of Python and of Gemma's notation as JSON while they come."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass

from jaxserve.server.tools.parser_parts import BLANKS, count_overlap
from jaxserve.server.tools.values import write_value

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "0": "\0", "\n": ""}
_ESCAPES |= {character: character for character in "\\'\"/"}
_CODES = {"x": 4, "u": 6, "U": 10}  # the length of an escape of a code point, by the letter behind the backslash
_HEX = frozenset("0123456789abcdefABCDEF")


@dataclass(frozen=True, slots=True)
class LiteralNotation:
    """A way to write calls and their arguments. The first character of each of `quotes` occurs in it once."""

    begin: str  # the bracket before the arguments
    end: str
    assign: str  # between key and value
    quotes: tuple[str, ...]  # a string stands between two of one kind
    brackets: str  # that begin lists and objects
    has_escapes: bool = False  # strings have backslashes as Python's; else they have none
    is_sorted: bool = False  # members are in the order of their names


PYTHON = LiteralNotation("(", ")", "=", ("'", '"'), "[({", has_escapes=True)
GEMMA4 = LiteralNotation("{", "}", ":", ('<|"|>',), "[{", is_sorted=True)
FUNCTIONGEMMA = LiteralNotation("{", "}", ":", ("<escape>",), "[{", is_sorted=True)
_CLOSERS = {"[": "]", "(": ")", "{": "}"}


class LiteralWriter:
    """Writes one value as JSON. Strings are passed on as they come, other scalars when they end.

    Text without quotes that is no number or constant is a string.

    Args:
        types: the value may have; none: any. They say what text without quotes is.
    """

    def __init__(self, notation: LiteralNotation, types: Collection[str] = ()) -> None:
        self.ended = self.broken = False
        self._notation, self._types = notation, set(types)
        self._closers = frozenset(_CLOSERS[bracket] for bracket in (*notation.brackets, notation.begin))
        self._quote = ""  # the text is in a string that ends with it
        self._held = ""  # perhaps the beginning of a quote or of an escape
        self._word: list[str] = []  # text without quotes
        self._open: list[str] = []  # the closing brackets of the lists and objects around
        self._has_value = False  # a string, a list or an object has ended
        self._is_key = False  # an object's key comes
        self._needs_value = True  # the place has a key, so it has a value
        self._needs_comma = False

    def push(self, text: str, at: int, out: list[str]) -> int:
        """Adds JSON to `out`; returns the index of the first character behind the value, and sets `ended` there."""
        while at < len(text) and not self.ended:
            if not self._quote:
                at += self._step(text[at], out)
            elif self._notation.has_escapes:
                at = self._read_escaped(text, at, out)
            else:
                at = self._read_plain(text, at, out)
        return at

    def _step(self, character: str, out: list[str]) -> int:
        """Reads one character outside of strings; returns 0 if it was not consumed."""
        if self._held:
            return self._step_in_quote(self._held + character, out)
        is_between = not self._word and not self._has_value
        if (character in BLANKS and not self._word) or (is_between and self._begin_value(character, out)):
            return 1
        if character == ":" and self._is_key:
            return self._end_key(out)
        if character == "," or character in self._closers:
            return self._end_value(character, out)
        if self._has_value:
            return self._break()
        self._word.append(character)
        return 1

    def _begin_value(self, character: str, out: list[str]) -> bool:
        """Begins a string, a list or an object, if this is its first character."""
        if any(quote.startswith(character) for quote in self._notation.quotes):
            self._step_in_quote(character, out)
            return True
        if character not in self._notation.brackets or self._is_key:
            return False
        self._begin(out)
        out.append("{" if character == "{" else "[")
        self._open.append(_CLOSERS[character])
        self._is_key, self._needs_value = character == "{", False
        return True

    def _step_in_quote(self, partial: str, out: list[str]) -> int:
        if partial in self._notation.quotes:
            self._quote, self._held = partial, ""
            self._begin(out)
            out.append('"')
        elif any(quote.startswith(partial) for quote in self._notation.quotes):
            self._held = partial
        else:
            self._word.append(self._held)
            self._held = ""
            return 0
        return 1

    def _begin(self, out: list[str]) -> None:
        if self._needs_comma:
            out.append(", ")
        self._needs_comma = False

    def _end_key(self, out: list[str]) -> int:
        if not self._has_value:
            self._begin(out)
            out.append(_quote("".join(self._word).rstrip(BLANKS)))
        out.append(": ")
        self._word, self._has_value, self._is_key, self._needs_value = [], False, False, True
        return 1

    def _end_value(self, character: str, out: list[str]) -> int:
        """Ends a value before a comma or a bracket, which may end the list or object around it."""
        word = "".join(self._word).rstrip(BLANKS)
        is_closer = character != ","
        is_outside = not self._open
        if is_closer and not is_outside and character != self._open[-1]:
            return self._break()
        if self._is_key and (word or self._has_value):  # a key without a value
            return self._break()
        if word or (self._needs_value and not self._has_value):
            self._begin(out)
            out.append(write_value(word, self._types if is_outside else set()))
        elif not self._has_value and not is_closer:  # [, 1]
            return self._break()
        self._word, self._needs_value = [], False
        if is_outside:
            self.ended = True
            return 0
        if is_closer:
            self._open.pop()
            out.append("}" if character == "}" else "]")
            self._needs_comma, self._is_key, self._has_value = False, False, True
        else:
            self._needs_comma, self._is_key, self._has_value = True, self._open[-1] == "}", False
        return 1

    def _read_plain(self, text: str, at: int, out: list[str]) -> int:
        quote = self._quote
        if self._held:
            partial = self._held + text[at]
            if partial == quote:
                self._end_string(out)
            elif quote.startswith(partial):
                self._held = partial
            else:
                out.append(_escape(self._held))
                self._held = ""
                return at
            return at + 1
        found = text.find(quote, at)
        if found >= 0:
            out.append(_escape(text[at:found]))
            self._end_string(out)
            return found + len(quote)
        end = len(text) - count_overlap(text, at, quote)
        out.append(_escape(text[at:end]))
        self._held = text[end:]
        return len(text)

    def _read_escaped(self, text: str, at: int, out: list[str]) -> int:
        if self._held:
            return at + self._step_in_escape(text[at], out)
        found = _STOPS[self._quote].search(text, at)
        end = found.start() if found is not None else len(text)
        out.append(_escape(text[at:end]))
        if found is None:
            return end
        if found[0] == "\\":
            self._held = "\\"
        else:
            self._end_string(out)
        return end + 1

    def _step_in_escape(self, character: str, out: list[str]) -> int:
        kind = (self._held + character)[1]
        if len(self._held) > 1 and character not in _HEX:
            out.append(_escape(self._held))
            self._held = ""
            return 0
        self._held += character
        if len(self._held) == _CODES.get(kind, 2):
            out.append(_decode(self._held))
            self._held = ""
        return 1

    def _end_string(self, out: list[str]) -> None:
        out.append('"')
        self._quote, self._held, self._has_value = "", "", True

    def _break(self) -> int:
        self.ended = self.broken = True
        return 0


_STOPS = {quote: re.compile(rf"[{quote}\\]") for quote in PYTHON.quotes}


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escape(text: str) -> str:
    return _quote(text)[1:-1]


def _decode(escape: str) -> str:
    """Returns the text of one of Python's escapes inside a string of JSON; an unknown one is text."""
    if escape[1] not in _CODES:
        return _escape(_ESCAPES.get(escape[1], escape))
    code = int(escape[2:], 16)
    if 0xD800 <= code < 0xE000:  # half a character, as JSON writes those beyond 16 bits
        return f"\\u{code:04x}"
    return _escape(chr(code) if code <= 0x10FFFF else escape)
