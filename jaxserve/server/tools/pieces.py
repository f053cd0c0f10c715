"""The pieces of an answer, and the parser protocol that yields them."""

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

    index: int  # the call's position in the answer, from 0
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of a call's arguments. Together the parts are the JSON text of one object."""

    index: int
    text: str


Piece = Content | Reasoning | CallStart | CallArguments


class ToolParser(Protocol):
    """Reads one answer. How its text is divided among pushes only changes how the pieces are divided."""

    def push(self, text: str) -> list[Piece]:
        """Reads more text; returns what is certain so far."""
        ...

    def finish(self) -> list[Piece]:
        """Returns what was held back, at the end of the text."""
        ...


def merge_pieces(pieces: list[Piece]) -> list[Piece]:
    """Returns the pieces with adjacent ones of a kind joined."""
    if len(pieces) < 2:  # the usual case
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
    """Returns an id in OpenAI's format."""
    return "call_" + secrets.token_hex(12)


def make_short_call_id() -> str:
    """Returns an id of nine letters and digits, the only form that Mistral's templates accept."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
