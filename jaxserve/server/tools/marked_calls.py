"""Calls whose name and arguments, an object of JSON, stand between marks: DeepSeek's and Kimi's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxserve.server.events import ParserEvent
from jaxserve.server.tools.call_readers import NAME_CHARACTERS, ObjectCallReader
from jaxserve.server.tools.parser_parts import BLANKS

NAME, WORD = "name", "word"  # steps that read such characters as names have


@dataclass(frozen=True, slots=True)
class CallMarks:
    """The marks around one family's calls: all of them, each, and its arguments."""

    first: str
    begin: str
    sep: str
    end: str
    last: str


DEEPSEEK = CallMarks(
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581sep\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
)
KIMI = CallMarks(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)


class MarkedCallReader(ObjectCallReader):
    """Reads a call step by step: names, words that mean nothing, literal marks after any blanks, and the arguments.

    Of a name with points the last part counts: Kimi writes `functions.f`.
    """

    def __init__(self, steps: Sequence[str], index: int, make_id: Callable[[], str], raw: list[str]) -> None:
        super().__init__(index, make_id, raw)
        self._steps, self._at_step = steps, 0
        self._part = ""  # of the step
        self._name = ""

    def _step(self, character: str, out: list[ParserEvent]) -> int:
        step = self._steps[self._at_step] if self._at_step < len(self._steps) else None
        if not self._part and character in BLANKS:
            return 1
        if step in (NAME, WORD):
            if character in NAME_CHARACTERS:
                self._part += character
                return 1
            part = self._part.rpartition(".")[2] if step == NAME else self._part
            self._name = part if step == NAME else self._name
            self.ended = self.broken = not part
            self._at_step, self._part = self._at_step + 1, ""
            return 0
        if step is None:
            self.ended = self.broken = character != "{"
            if not self.broken:
                self._begin_arguments(self._name, out)
            return 0
        self._part += character
        if not step.startswith(self._part):
            self.ended = self.broken = True
            self._part = self._part[:-1]
            return 0
        if self._part == step:
            self._at_step, self._part = self._at_step + 1, ""
        return 1
