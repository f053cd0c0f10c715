"""Reads whole answers, and compares them whatever the cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from jaxserve.server.events import ArgumentsDelta, CallBegun, CallEnded, Event, ReasoningDelta, TextDelta


class Parser(Protocol):
    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


def read(parser: Parser, parts: Iterable[str]) -> list[Event]:
    events: list[Event] = []
    for part in parts:
        events += parser.push(part)
    return events + parser.finish()


def summarise(events: Sequence[Event]) -> list[Any]:
    """Content and reasoning as joined text, calls as [name, arguments]: what does not depend on the cut."""
    found: list[Any] = []
    num_calls = 0
    for event in events:
        if isinstance(event, CallBegun):
            assert event.index == num_calls, "calls are numbered in order"
            num_calls += 1
            found.append([event.name, ""])
        elif isinstance(event, CallEnded):
            assert event.index == num_calls - 1 and isinstance(found[-1], list), "nothing comes before its end"
            found[-1] = tuple(found[-1])
        elif isinstance(event, ArgumentsDelta):
            assert event.index == num_calls - 1 and isinstance(found[-1], list), "arguments follow their call"
            found[-1][1] += event.text
        else:
            assert event.text, "no empty events"
            kind = type(event)
            if found and isinstance(found[-1], kind):
                found[-1] = kind(found[-1].text + event.text)
            else:
                found.append(event)
    return [
        tuple(item) if isinstance(item, list) else item.text if isinstance(item, TextDelta) else item for item in found
    ]


def join_text(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta | ReasoningDelta))


def cut(text: str, places: Iterable[int]) -> list[str]:
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(edges)]


class CountedText(str):
    """Text that counts how many of its characters are looked at, alone or in a search or a slice."""

    __slots__ = ()
    num_seen = 0

    def __getitem__(self, key: Any) -> Any:
        part = str.__getitem__(self, key)
        CountedText.num_seen += len(part)
        return part if isinstance(key, int | slice) and len(part) <= 1 else CountedText(part)

    def find(self, part: str, at: int = 0) -> int:  # type: ignore[override]
        found = str.find(self, part, at)
        CountedText.num_seen += (found if found >= 0 else len(self)) - at + len(part)
        return found

    def rfind(self, part: str, at: int = 0) -> int:  # type: ignore[override]
        CountedText.num_seen += len(self) - at
        return str.rfind(self, part, at)

    def rstrip(self, characters: str | None = None) -> str:
        CountedText.num_seen += len(self)
        return CountedText(str.rstrip(self, characters))
