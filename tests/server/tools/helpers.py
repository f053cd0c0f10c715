"""Reads whole answers, and compares them whatever the cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from jaxserve.server.tools import CallArguments, CallStart, Content, Piece, Reasoning


class Parser(Protocol):
    def push(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]: ...


def read(parser: Parser, parts: Iterable[str]) -> list[Piece]:
    pieces: list[Piece] = []
    for part in parts:
        pieces += parser.push(part)
    return pieces + parser.finish()


def summarise(pieces: Sequence[Piece]) -> list[Any]:
    """Content and reasoning as joined text, calls as [name, arguments]: what does not depend on the cut."""
    found: list[Any] = []
    num_calls = 0
    for piece in pieces:
        if isinstance(piece, CallStart):
            assert piece.index == num_calls, "calls are numbered in order"
            num_calls += 1
            found.append([piece.name, ""])
        elif isinstance(piece, CallArguments):
            assert piece.index == num_calls - 1 and isinstance(found[-1], list), "arguments follow their call"
            found[-1][1] += piece.text
        else:
            assert piece.text, "no empty pieces"
            kind = type(piece)
            if found and isinstance(found[-1], kind):
                found[-1] = kind(found[-1].text + piece.text)
            else:
                found.append(piece)
    return [
        tuple(item) if isinstance(item, list) else item.text if isinstance(item, Content) else item for item in found
    ]


def join_text(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Content | Reasoning))


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
