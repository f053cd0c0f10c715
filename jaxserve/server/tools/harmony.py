"""The answers of gpt-oss: messages with channels, in OpenAI's harmony format."""

from __future__ import annotations

import re
from collections.abc import Collection

from jaxserve.server.events import ArgumentsDelta, CallBegun, ParserEvent, ReasoningDelta, TextDelta
from jaxserve.server.tools.parser_parts import BLANKS, make_call_id, merge_events

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")  # the last two where a model omits the end
_STRAY = (_MESSAGE, "<|constrain|>", "<|startoftext|>", "<|endoftext|>")  # without a meaning inside a message
_MARKS = (*_ENDS, *_STRAY)
_OPENERS = ("<|start|>", "<|channel|>", _MESSAGE, "to=")  # of a header
_NO_OPENERS = tuple(mark for mark in _MARKS if mark not in _OPENERS)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")
_FUNCTIONS = "functions."
_LONGEST_HEADER = 1000  # characters; what is longer is text


class HarmonyParser:
    """Separates the channels of an answer as its text comes, special tokens included.

    The text continues `<|start|>assistant`. `analysis` is reasoning, and so is what is said to a tool other than a
    function. What is said to a function is a call; `final` and other messages are content. Messages of a kind that
    follow one another are joined by a line's end. Text without a header is content. A mark where none belongs is
    dropped: no mark is ever part of a message.

    Args:
        names: the known functions, None if calls are not read: they are content then.
        in_message: the text continues the text of a `final` message.
    """

    is_over = False  # reasoning can follow any message

    def __init__(self, names: Collection[str] | None, *, in_message: bool = False) -> None:
        self._names = names
        self._header: str | None = None if in_message else ""  # what was read of one; None in a message
        self._held = ""  # perhaps the beginning of a message's end
        self._kind: type[TextDelta | ReasoningDelta | ArgumentsDelta] = TextDelta
        self._is_empty = True  # the message has no text yet
        self._seen: set[type] = set()
        self._num_calls = 0
        self._out: list[ParserEvent] = []

    @property
    def is_inside(self) -> bool:
        """Whether the text read so far ends inside a message that is reasoning."""
        return self._header is None and self._kind is ReasoningDelta

    def push(self, text: str) -> list[ParserEvent]:
        """Reads more text; returns what is certain so far."""
        while text:
            text = self._read_message(text) if self._header is None else self._read_header(self._header + text)
        return self._flush()

    def finish(self) -> list[ParserEvent]:
        """Returns what was held back, at the end of the text; a header that was cut off is nothing."""
        header = self._header
        if header is None:
            self._say(self._held)
            self._end_message()
        elif header.strip(BLANKS) and not any(mark in header for mark in _OPENERS):
            self._begin_message("")
            self._say(header)
        return self._flush()

    def _flush(self) -> list[ParserEvent]:
        events, self._out = merge_events(self._out), []
        return events

    def _read_header(self, text: str) -> str:
        """Returns the text behind the header, which `text` begins with."""
        start = text.lstrip(BLANKS)
        stray = next((mark for mark in _NO_OPENERS if start.startswith(mark)), None)
        if stray is not None:
            self._header = ""
            return start[len(stray) :]
        begins = start.startswith(_OPENERS)
        end = text.find(_MESSAGE, 0, _LONGEST_HEADER) if begins else -1
        if end >= 0:
            self._begin_message(text[:end])
            return text[end + len(_MESSAGE) :]
        may_begin = begins or any(mark.startswith(start) for mark in (*_OPENERS, *_NO_OPENERS))
        if len(text) < _LONGEST_HEADER and may_begin:
            self._header = text
            return ""
        self._begin_message("")
        mark = next((mark for mark in _MARKS if start.startswith(mark)), None)
        return text if mark is None else start[len(mark) :]

    def _begin_message(self, header: str) -> None:
        self._header, self._held, self._is_empty = None, "", True
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = recipient[1] if recipient is not None else ""
        function = name.removeprefix(_FUNCTIONS)
        is_call = name.startswith(_FUNCTIONS) or function in (self._names or ())
        if is_call and self._names is not None:
            self._kind = ArgumentsDelta
            self._out.append(CallBegun(self._num_calls, make_call_id(), function))
        elif (name and not is_call) or (channel is not None and channel[1] == "analysis"):
            self._kind = ReasoningDelta
        else:
            self._kind = TextDelta

    def _read_message(self, text: str) -> str:
        """Returns the text behind the message, or behind what is certain of it."""
        text, self._held, at = self._held + text, "", 0
        while (found := text.find("<", at)) >= 0:
            rest = text[found : found + max(map(len, _MARKS))]
            mark = next((mark for mark in _MARKS if rest.startswith(mark)), None)
            if mark in _STRAY:
                self._say(text[:found])
                text, at = text[found + len(mark) :], 0
                continue
            if mark is not None:
                self._say(text[:found])
                self._end_message()
                self._header = ""
                opens = mark in _OPENERS
                return text[found if opens else found + len(mark) :]
            if any(mark.startswith(rest) for mark in _MARKS):  # at the end of the text
                self._say(text[:found])
                self._held = rest
                return ""
            at = found + 1
        self._say(text)
        return ""

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._kind is ArgumentsDelta:
            self._out.append(ArgumentsDelta(self._num_calls, text))
        else:
            separator = "\n" if self._is_empty and self._kind in self._seen else ""
            self._out.append(self._kind(separator + text))  # type: ignore[call-arg]
            self._seen.add(self._kind)
        self._is_empty = False

    def _end_message(self) -> None:
        if self._kind is ArgumentsDelta:
            if self._is_empty:
                self._say("{}")
            self._num_calls += 1
