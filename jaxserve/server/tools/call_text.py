"""Separates the calls of an answer from its text, in any format."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from jaxserve.server.events import ArgumentsDelta, CallBegun, ParserEvent, TextDelta
from jaxserve.server.tools.call_formats import BARE, CALL, MARK, MARKED, NAMED, TEXT, CallFormat, Parameters
from jaxserve.server.tools.call_readers import CallReader, JsonCallReader, NamedCallReader, begins_name
from jaxserve.server.tools.parser_parts import BLANKS, count_overlap, make_call_id, merge_events


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
        self._marks = {word: "open" for word in (form.opener, *form.synonyms) if word is not None}
        self._marks |= dict.fromkeys(form.drops, TEXT)  # to the state behind each
        self._pattern = re.compile("|".join(map(re.escape, self._marks))) if self._marks else None
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
            elif self._state == TEXT:
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
        elif self._state not in (TEXT, "after", "next"):  # those two are an envelope that was cut off
            self._say("".join(self._raw) + self._partial)
        if self._blanks and not self._after_call:
            self._out.append(TextDelta("".join(self._blanks)))
        self._reader, self._state, self._partial = None, TEXT, ""
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
        found = self._pattern.search(text, at) if self._pattern is not None else None
        if found is not None:
            self._say(text[at : found.start()])
            if self._marks[found[0]] != TEXT:
                self._enter("open", found[0])
            return found.end()
        num_held = max((count_overlap(text, at, mark) for mark in self._marks), default=0)
        self._say(text[at : len(text) - num_held])
        if num_held:
            self._enter(MARK)
            self._partial = text[len(text) - num_held :]
        return len(text)

    def _enter(self, state: str, word: str = "") -> None:
        if self._state == TEXT:
            self._raw = []
        self._state, self._partial = state, ""
        self._raw.append(word)

    def _read_lead(self, text: str, at: int) -> int:
        character = text[at]
        so_far = self._partial + character
        words = self._marks if self._state == MARK else self._form.leads[self._state]
        following = words.get(so_far)
        if not self._partial and character in BLANKS:
            self._raw.append(character)
        elif following in (CALL, BARE):
            self._begin_call(following == BARE)
            return at
        elif following == MARKED and self._form.marked is not None:
            self._raw.append(so_far)
            self._partial = ""
            self._reader = self._form.marked(self._num_calls, self._form.make_id, self._raw, self._parameters)
        elif following in (TEXT, "after"):
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
        named, may_be_name = self._form.named, self._form.leads.get(self._state, {}).get("") == NAMED
        if may_be_name and not self._partial and named is not None and begins_name(character):
            self._reader = named(self._num_calls, self._form.make_id, self._raw, self._parameters)
            return
        self._say("".join(self._raw) + self._partial)
        self._state, self._partial, self._raw = TEXT, "", []

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
                self._state = "after" if keeps_list else TEXT
            else:
                self._say("".join(reader.raw))
                self._state, self._raw = TEXT, []
        return at


class CallsOrForm:
    """Reads an answer that a grammar keeps to calls or to a form: it has calls if it begins with one."""

    def __init__(self, form: CallFormat, names: Collection[str], parameters: Parameters | None = None) -> None:
        self._opener = form.opener if form.start == TEXT else None
        form = replace(form, opener=None, synonyms=()) if self._opener is None else form
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
