"""The protocol of parsers, and what they share: marks in text that comes in pieces, joined events, ids of calls."""

from __future__ import annotations

import itertools
import secrets
import string
from typing import Protocol

from jaxserve.server.events import ArgumentsDelta, CallBegun, ParserEvent

BLANKS = " \t\n\r"


class ToolParser(Protocol):
    """Reads one answer. How its text is divided among pushes only changes how the events are divided."""

    def push(self, text: str) -> list[ParserEvent]:
        """Reads more text; returns what is certain so far."""
        ...

    def finish(self) -> list[ParserEvent]:
        """Returns what was held back, at the end of the text."""
        ...


def count_overlap(text: str, at: int, mark: str) -> int:
    """Returns how many characters at the end of `text[at:]` may be the beginning of the mark.

    The mark's first character must occur in it once.
    """
    begin = text.rfind(mark[0], max(at, len(text) - len(mark) + 1))
    return len(text) - begin if begin >= 0 and mark.startswith(text[begin:]) else 0


def merge_events(events: list[ParserEvent]) -> list[ParserEvent]:
    """Returns the events with adjacent ones of a kind joined."""
    if len(events) < 2:  # the usual case
        return events
    merged: list[ParserEvent] = []
    for (kind, index), group in itertools.groupby(events, key=lambda event: (type(event), getattr(event, "index", 0))):
        if kind is CallBegun:
            merged += group
            continue
        text = "".join(event.text for event in group if not isinstance(event, CallBegun))
        merged.append(ArgumentsDelta(index, text) if kind is ArgumentsDelta else kind(text))
    return merged


def make_call_id() -> str:
    """Returns an id in OpenAI's format."""
    return "call_" + secrets.token_hex(12)


def make_short_call_id() -> str:
    """Returns an id of nine letters and digits, the only form that Mistral's templates accept."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
