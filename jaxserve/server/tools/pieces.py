"""What an answer is made of, and what reads it from a model's text."""

from __future__ import annotations

import itertools
import secrets
import string
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a function; its arguments follow."""

    index: int  # of the call in this answer, from 0
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of a call's arguments: together they are the JSON text of one object."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments


class ToolParser(Protocol):
    """Reads one answer. How its text is cut into pushes changes nothing but how the pieces are cut."""

    def push(self, text: str) -> list[Piece]:
        """Takes the next text; returns what is certain by now."""
        ...

    def finish(self) -> list[Piece]:
        """Returns what was held back, now that no more text comes."""
        ...


def merge_pieces(pieces: list[Piece]) -> list[Piece]:
    """Returns the pieces with neighbours of one kind joined; none has empty text."""
    if len(pieces) < 2:  # nearly always
        return pieces
    merged: list[Piece] = []
    for (kind, index), group in itertools.groupby(pieces, key=lambda piece: (type(piece), getattr(piece, "index", 0))):
        if kind is CallStart:
            merged += group
            continue
        text = "".join(piece.text for piece in group if not isinstance(piece, CallStart))
        merged.append(CallArguments(index, text) if kind is CallArguments else kind(text))
    return merged


def make_call_id() -> str:
    """Returns an id as OpenAI's look."""
    return "call_" + secrets.token_hex(12)


def make_short_call_id() -> str:
    """Returns an id of nine letters and digits: Mistral's templates refuse every other form."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
