"""Parsers of answers that a grammar forces to be calls; see `ToolSet.structured_outputs`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jaxserve.server.tools.formats import FORCED_ARRAY, CallTextParser
from jaxserve.server.tools.pieces import CallArguments, CallStart, Piece, ToolParser, make_call_id


class ForcedCall:
    """Reads the whole answer as the arguments of one function."""

    def __init__(self, name: str, make_id: Callable[[], str] = make_call_id) -> None:
        self._name, self._make_id = name, make_id
        self._started = False

    def push(self, text: str) -> list[Piece]:
        if not text:
            return []
        arguments = CallArguments(0, text)
        if self._started:
            return [arguments]
        self._started = True
        return [CallStart(0, self._make_id(), self._name), arguments]

    def finish(self) -> list[Piece]:
        return []


def make_forced_parser(name: str | None, make_id: Callable[[], str] = make_call_id) -> ToolParser:
    """Returns the parser for a call of the named function or, without a name, for an array of calls."""
    return CallTextParser(replace(FORCED_ARRAY, make_id=make_id)) if name is None else ForcedCall(name, make_id)
