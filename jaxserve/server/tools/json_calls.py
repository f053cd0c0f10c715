"""The formats in which model families write calls, as data, and one parser for all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxserve.server.events import ArgumentsDelta, CallBegun, ParserEvent, TextDelta
from jaxserve.server.tools.call_readers import CallReader, JsonCallReader, NamedCallReader, begins_name
from jaxserve.server.tools.marked_calls import DEEPSEEK, NAME, WORD, MarkedCallReader
from jaxserve.server.tools.parser_parts import BLANKS, count_overlap, make_call_id, make_short_call_id, merge_events
from jaxserve.server.tools.xml_calls import GLM_MARKS, MINIMAX_MARKS, QWEN3_CODER_MARKS, XmlCallReader

_TEXT, _CALL, _BARE = "text", "call", "bare call"  # a bare call has no opener
_MARKED = "marked call"  # its reader begins behind the word
_MARK = "mark"  # inside what may become the opener

Parameters = Mapping[str, Mapping[str, Any]]  # the schemas of functions' arguments by their names
ReaderMaker = Callable[[int, Callable[[], str], list[str], Parameters], CallReader]


@dataclass(frozen=True)
class CallFormat:
    """The text around the calls of an answer.

    `leads` are the states between text and call. Each maps the words that may come next, after any blanks, to the next
    state. The first character of an opener occurs only at the beginning of words, so when a word fails to match, no
    opener has begun inside it.
    """

    leads: Mapping[str, Mapping[str, str]]
    opener: str | None = None  # begins calls anywhere in text
    start: str = _TEXT  # state at the beginning of the answer
    named: ReaderMaker | None = None  # reads calls that begin with a name behind the opener
    marked: ReaderMaker | None = None  # reads calls behind a word of a lead
    needs_arguments: bool = False  # an object without arguments is not a call
    make_id: Callable[[], str] = make_call_id


HERMES = CallFormat(
    opener="<tool_call>",
    leads={
        "open": {"{": _CALL},
        "after": {"</tool_call>": _TEXT, "<tool_call>": "open"},
    },
)
LLAMA3_JSON = CallFormat(
    opener="<|python_tag|>",
    start="start",
    leads={
        "start": {"{": _BARE, "<|python_tag|>": "open"},
        "open": {"{": _CALL},
        "after": {";": "next", "{": _BARE, "<|python_tag|>": "open"},
        "next": {"{": _BARE, "<|python_tag|>": "open"},
    },
    needs_arguments=True,
)
MISTRAL = CallFormat(
    opener="[TOOL_CALLS]",
    leads={
        "open": {"[": "array", "{": _CALL},
        "array": {"{": _CALL},
        "after": {",": "next", "]": _TEXT},
        "next": {"{": _CALL},
    },
    named=lambda index, make_id, raw, _: NamedCallReader(index, make_id, raw),
    make_id=make_short_call_id,
)
QWEN3_CODER = CallFormat(
    opener="<tool_call>",
    leads={
        "open": {"<function=": _MARKED},
        "after": {"</tool_call>": _TEXT, "<tool_call>": "open"},
    },
    marked=partial(XmlCallReader, QWEN3_CODER_MARKS),
)
GLM = CallFormat(
    opener="<tool_call>",
    leads={"open": {}, "after": {"<tool_call>": "open"}},
    named=partial(XmlCallReader, GLM_MARKS),
)
MINIMAX_M2 = CallFormat(
    opener="<minimax:tool_call>",
    leads={
        "open": {'<invoke name="': _MARKED},
        "after": {"</minimax:tool_call>": _TEXT, '<invoke name="': _MARKED, "<minimax:tool_call>": "open"},
    },
    marked=partial(XmlCallReader, MINIMAX_MARKS),
)
DEEPSEEK_V3 = CallFormat(
    opener=DEEPSEEK.first,
    leads={
        "open": {DEEPSEEK.begin: _MARKED},
        "after": {"```": "after", DEEPSEEK.end: "after", DEEPSEEK.begin: _MARKED, DEEPSEEK.last: _TEXT},
    },
    marked=lambda index, make_id, raw, _: MarkedCallReader((WORD, DEEPSEEK.sep, NAME, "```json"), index, make_id, raw),
)
DEEPSEEK_V31 = replace(
    DEEPSEEK_V3, marked=lambda index, make_id, raw, _: MarkedCallReader((NAME, DEEPSEEK.sep), index, make_id, raw)
)
FORCED_ARRAY = CallFormat(  # what `ToolSet.structured_outputs` makes of tool_choice="required"
    start="start",
    leads={
        "start": {"[": "array"},
        "array": {"{": _CALL},
        "after": {",": "next", "]": _TEXT},
        "next": {"{": _CALL},
    },
)


class CallTextParser:
    """Separates calls from text as it comes.

    Other text is content, unchanged; blanks next to calls are dropped. An object that is incomplete when the text ends
    is a call if it has its name and the beginning of its arguments.

    Args:
        form: the format of the calls.
        names: the known functions; an object without an opener must name one of them.
        parameters: the schemas of their arguments, which say the types of values without quotes.
    """

    def __init__(
        self, form: CallFormat, names: Collection[str] | None = None, parameters: Parameters | None = None
    ) -> None:
        self._form, self._names, self._parameters = form, names, parameters or {}
        self._state = form.start
        self._reader: CallReader | None = None
        self._partial = ""  # the beginning of a word in a lead
        self._raw: list[str] = []  # text of a lead, which is content if no call follows
        self._blanks: list[str] = []  # at the end of the content; they belong to it only if more content follows
        self._after_call = False
        self._num_calls = 0
        self._out: list[ParserEvent] = []

    def push(self, text: str) -> list[ParserEvent]:
        at = 0
        while at < len(text):
            if self._reader is not None:
                at = self._read_call(self._reader, text, at)
            elif self._state == _TEXT:
                at = self._read_text(text, at)
            else:
                at = self._read_lead(text, at)
        return self._flush()

    def finish(self) -> list[ParserEvent]:
        if self._reader is not None:
            if self._reader.started:
                self._after_call = True
            else:
                self._say("".join(self._reader.raw))
        elif self._state not in (_TEXT, "after", "next"):  # those two are an envelope that was cut off
            self._say("".join(self._raw) + self._partial)
        if self._blanks and not self._after_call:
            self._out.append(TextDelta("".join(self._blanks)))
        self._reader, self._state, self._partial = None, _TEXT, ""
        self._raw, self._blanks = [], []
        return self._flush()

    def _flush(self) -> list[ParserEvent]:
        events, self._out = merge_events(self._out), []
        return events

    def _say(self, text: str) -> None:
        body = text.rstrip(BLANKS)
        if body:
            self._out.append(TextDelta("".join(self._blanks) + body if self._blanks else body))
            self._blanks.clear()
            self._after_call = False
        if len(body) < len(text):
            self._blanks.append(text[len(body) :])

    def _read_text(self, text: str, at: int) -> int:
        opener = self._form.opener
        found = -1 if opener is None else text.find(opener, at)
        if opener is not None and found >= 0:
            self._say(text[at:found])
            self._enter("open", opener)
            return found + len(opener)
        num_held = 0 if opener is None else count_overlap(text, at, opener)
        self._say(text[at : len(text) - num_held])
        if num_held:
            self._enter(_MARK)
            self._partial = text[len(text) - num_held :]
        return len(text)

    def _enter(self, state: str, word: str = "") -> None:
        if self._state == _TEXT:
            self._raw = []
        self._state, self._partial = state, ""
        self._raw.append(word)

    def _read_lead(self, text: str, at: int) -> int:
        character = text[at]
        so_far = self._partial + character
        words = {str(self._form.opener): "open"} if self._state == _MARK else self._form.leads[self._state]
        following = words.get(so_far)
        if not self._partial and character in BLANKS:
            self._raw.append(character)
        elif following in (_CALL, _BARE):
            self._begin_call(following == _BARE)
            return at
        elif following == _MARKED and self._form.marked is not None:
            self._raw.append(so_far)
            self._partial = ""
            self._reader = self._form.marked(self._num_calls, self._form.make_id, self._raw, self._parameters)
        elif following in (_TEXT, "after"):
            self._state, self._partial, self._raw = following, "", []
        elif following is not None:
            self._enter(following, so_far)
        elif any(word.startswith(so_far) for word in words):
            self._partial = so_far
        else:
            self._leave_lead(character)
            return at
        return at + 1

    def _leave_lead(self, character: str) -> None:
        """Ends a lead in which no word matches this character."""
        named = self._form.named
        if self._state == "open" and not self._partial and named is not None and begins_name(character):
            self._reader = named(self._num_calls, self._form.make_id, self._raw, self._parameters)
            return
        self._say("".join(self._raw) + self._partial)
        self._state, self._partial, self._raw = _TEXT, "", []

    def _begin_call(self, is_bare: bool) -> None:
        self._reader = JsonCallReader(
            self._num_calls,
            self._form.make_id,
            self._raw,
            names=self._names if is_bare else None,
            needs_arguments=self._form.needs_arguments,
        )

    def _read_call(self, reader: CallReader, text: str, at: int) -> int:
        was_started = reader.started
        events: list[ParserEvent] = []
        at = reader.push(text, at, events)
        if reader.started and not was_started:
            self._num_calls += 1
            self._blanks.clear()
        self._out += events
        if reader.ended:
            self._reader, self._partial = None, ""
            if reader.started:
                self._after_call, self._raw = True, []
                keeps_list = not reader.broken and not isinstance(reader, NamedCallReader)
                self._state = "after" if keeps_list else _TEXT
            else:
                self._say("".join(reader.raw))
                self._state, self._raw = _TEXT, []
        return at


class CallsOrForm:
    """Reads an answer that a grammar keeps to calls or to a form: it has calls if it begins with one."""

    def __init__(self, form: CallFormat, names: Collection[str], parameters: Parameters | None = None) -> None:
        self._opener = form.opener if form.start == _TEXT else None
        form = replace(form, opener=None) if self._opener is None else form
        self._calls = CallTextParser(form, names, parameters)
        self._held: str | None = ""  # the beginning; None: it has told which
        self._is_form = False

    def push(self, text: str) -> list[ParserEvent]:
        if self._held is not None and self._opener is not None:
            self._held += text
            if self._opener.startswith(self._held):
                return []
            text, self._held, self._is_form = self._held, None, not self._held.startswith(self._opener)
        return self._calls.push(text) if not self._is_form else [TextDelta(text)] if text else []

    def finish(self) -> list[ParserEvent]:
        held, self._held = self._held, None
        return [TextDelta(held)] if held else self._calls.finish()


class ForcedCall:
    """Reads the whole answer as the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def push(self, text: str) -> list[ParserEvent]:
        if not text:
            return []
        arguments = ArgumentsDelta(0, text)
        if self._started:
            return [arguments]
        self._started = True
        return [CallBegun(0, make_call_id(), self._name), arguments]

    def finish(self) -> list[ParserEvent]:
        return []
