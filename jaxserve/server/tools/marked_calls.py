"""Calls whose name and arguments, an object of JSON, stand between marks: DeepSeek's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxserve.server.events import ArgumentsDelta, CallBegun, ParserEvent
from jaxserve.server.tools.call_readers import NAME_CHARACTERS
from jaxserve.server.tools.json_scanner import JsonScanner
from jaxserve.server.tools.parser_parts import BLANKS

NAME, WORD = "name", "word"  # steps that read such characters as names have


@dataclass(frozen=True, slots=True)
class DeepSeekMarks:
    """The marks around DeepSeek's calls."""

    first: str = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
    begin: str = "<\uff5ctool\u2581call\u2581begin\uff5c>"
    sep: str = "<\uff5ctool\u2581sep\uff5c>"
    end: str = "<\uff5ctool\u2581call\u2581end\uff5c>"
    last: str = "<\uff5ctool\u2581calls\u2581end\uff5c>"


DEEPSEEK = DeepSeekMarks()


class MarkedCallReader:
    """Reads a call step by step: names, words that mean nothing, literal marks after any blanks, and the arguments."""

    def __init__(self, steps: Sequence[str], index: int, make_id: Callable[[], str], raw: list[str]) -> None:
        self.started = self.ended = self.broken = False
        self.raw = raw
        self._steps, self._at_step = steps, 0
        self._index, self._make_id = index, make_id
        self._part = ""  # of the step
        self._name = ""
        self._scanner: JsonScanner | None = None

    def push(self, text: str, at: int, out: list[ParserEvent]) -> int:
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

    def _step(self, character: str, out: list[ParserEvent]) -> int:
        """Reads one character before the arguments; returns 0 if it was not consumed."""
        step = self._steps[self._at_step] if self._at_step < len(self._steps) else None
        if not self._part and character in BLANKS:
            return 1
        if step in (NAME, WORD):
            if character in NAME_CHARACTERS:
                self._part += character
                return 1
            self._name = self._part if step == NAME else self._name
            self.ended = self.broken = not self._part
            self._at_step, self._part = self._at_step + 1, ""
            return 0
        if step is None:
            self.started = character == "{"
            self.ended = self.broken = not self.started
            if self.started:
                self.raw.clear()
                self._scanner = JsonScanner()
                out.append(CallBegun(self._index, self._make_id(), self._name))
            return 0
        self._part += character
        if not step.startswith(self._part):
            self.ended = self.broken = True
            self._part = self._part[:-1]
            return 0
        if self._part == step:
            self._at_step, self._part = self._at_step + 1, ""
        return 1
