"""A model's reasoning before its answer, between the marks of its family: `<think>` ... `</think>`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.server.events import ParserEvent, ReasoningDelta, TextDelta
from jaxserve.server.tools.parser_parts import BLANKS, count_overlap, merge_events


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around reasoning. The first character of each occurs in it once."""

    opener: str = "<think>"
    closer: str = "</think>"
    starts_inside: bool = False  # the text begins inside, unless the prompt says
    drops: tuple[str, ...] = ()  # marks around the answer behind it, which are no content


COHERE_ANSWER = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {  # by vLLM's names
    "cohere_command3": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>", drops=COHERE_ANSWER),
    "deepseek_r1": ReasoningFormat(starts_inside=True),
    "deepseek_v3": ReasoningFormat(),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>"),
    "glm45": ReasoningFormat(),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "kimi_k2": ReasoningFormat(starts_inside=True),
    "minimax_m2": ReasoningFormat(starts_inside=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "nemotron_v3": ReasoningFormat(starts_inside=True),
    "olmo3": ReasoningFormat(starts_inside=True),
    "qwen3": ReasoningFormat(),
}


def find_place(prompt: str, begun: str, parser: str) -> tuple[bool | None, bool]:
    """Returns where an answer begins: inside reasoning or not, and whether it goes on behind text that has begun.

    The first is None where nothing says: the opening mark may follow.

    Args:
        prompt: the rendered conversation.
        begun: the content of the message that the answer continues. Templates may have moved its marks.
        parser: a name in `REASONING_FORMATS`.
    """
    marks = REASONING_FORMATS[parser]
    inside = _find_inside(prompt, marks)
    if inside is not None or not begun.strip(BLANKS):
        return (marks.starts_inside or None) if inside is None else inside, False
    opened, closed = begun.rfind(marks.opener), begun.rfind(marks.closer)
    if opened != closed:
        return opened > closed, True
    return bool(_find_inside(prompt.rstrip(BLANKS).removesuffix(begun.strip(BLANKS)), marks)), True


def _find_inside(prompt: str, marks: ReasoningFormat) -> bool | None:
    """Returns whether a prompt ends with the opening mark (True) or the closing one (False); None if with neither."""
    end = prompt[-100:].rstrip(BLANKS)
    if end.endswith(marks.opener):
        return True
    return False if end.endswith(marks.closer) else None


class ReasoningParser:
    """Separates reasoning from the answer as the text comes. Blanks next to the marks are dropped.

    The opening mark counts only at the beginning of the text. Everything after the closing mark is content; without it
    everything is reasoning.

    Args:
        marks: those of the family.
        starts_inside: the prompt ends inside reasoning, so the text may begin without the opening mark.
        continues: the text goes on behind other text, so its blanks count, and no opening mark follows.
    """

    def __init__(
        self, marks: ReasoningFormat = REASONING_FORMATS["qwen3"], *, starts_inside: bool, continues: bool = False
    ) -> None:
        self._opener, self._closer = marks.opener, marks.closer
        self._starts_inside = starts_inside
        self._state = "begin"  # then "gap" after the opening mark, "inside", "behind" the closing mark, "content"
        if continues:
            self._state = "inside" if starts_inside else "content"
        self._blanks: list[str] = []  # they may turn out to be next to a mark
        self._partial = ""  # the beginning of a mark
        self._out: list[ParserEvent] = []

    @property
    def is_inside(self) -> bool:
        """Whether the text read so far ends inside reasoning."""
        return self._state in ("gap", "inside") or (self._state == "begin" and self._starts_inside)

    @property
    def is_over(self) -> bool:
        """Whether no reasoning can follow."""
        return self._state in ("behind", "content")

    @property
    def is_done(self) -> bool:
        """Whether all further text is content as it is."""
        return self._state == "content"

    def push(self, text: str) -> list[ParserEvent]:
        """Reads more text; returns what is certain so far."""
        at = 0
        while at < len(text) and self._state != "content":
            if self._state == "begin":
                at = self._read_begin(text, at)
            elif self._state == "inside":
                at = self._read_inside(text, at)
            elif text[at] in BLANKS:
                at += 1
            else:
                self._state = "inside" if self._state == "gap" else "content"
        self._add(TextDelta, text[at:])
        return self._flush()

    def finish(self) -> list[ParserEvent]:
        """Returns what was held back, at the end of the text."""
        held = "".join(self._blanks) + self._partial
        if self._state == "inside":
            self._add(ReasoningDelta, held)
        elif self._state == "begin" and self._starts_inside:
            self._add(ReasoningDelta, self._partial)
        elif self._state == "begin":
            self._add(TextDelta, held)
        self._blanks, self._partial, self._state = [], "", "content"
        return self._flush()

    def _add(self, kind: type[TextDelta | ReasoningDelta], text: str) -> None:
        if text:
            self._out.append(kind(text))

    def _flush(self) -> list[ParserEvent]:
        events, self._out = merge_events(self._out), []
        return events

    def _read_begin(self, text: str, at: int) -> int:
        character = text[at]
        partial = self._partial + character
        if not self._partial and character in BLANKS:
            self._blanks.append(character)
        elif partial == self._opener:
            self._state, self._partial, self._blanks = "gap", "", []
        elif self._opener.startswith(partial):
            self._partial = partial
        else:
            self._leave_begin()
            return at
        return at + 1

    def _leave_begin(self) -> None:
        """Handles a text that does not begin with the opening mark."""
        held, self._partial = self._partial, ""
        if not self._starts_inside:
            self._add(TextDelta, "".join(self._blanks) + held)
            self._state, self._blanks = "content", []
            return
        self._state, self._blanks = "inside", []
        if self._closer.startswith(held):
            self._partial = held
        else:
            self._say(held)

    def _read_inside(self, text: str, at: int) -> int:
        if self._partial:
            partial = self._partial + text[at]
            if partial == self._closer:
                self._close()
            elif self._closer.startswith(partial):
                self._partial = partial
            else:
                self._say(self._partial)
                self._partial = ""
                return at
            return at + 1
        found = text.find(self._closer, at)
        if found >= 0:
            self._say(text[at:found])
            self._close()
            return found + len(self._closer)
        end = len(text) - count_overlap(text, at, self._closer)
        self._say(text[at:end])
        self._partial = text[end:]
        return len(text)

    def _close(self) -> None:
        self._state, self._partial, self._blanks = "behind", "", []

    def _say(self, text: str) -> None:
        body = text.rstrip(BLANKS)
        if body:
            self._out.append(ReasoningDelta("".join(self._blanks) + body if self._blanks else body))
            self._blanks.clear()
        if len(body) < len(text):
            self._blanks.append(text[len(body) :])
