"""JSON of answers. Long values are encoded in pieces, because a call of the encoder holds the GIL until it returns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from starlette.responses import Response

MOST_AT_ONCE = 4096  # values that one call encodes, in a few milliseconds
MOST_HERE = 1024  # values that are written on the event loop in one turn
_OPTIONS: Any = {"allow_nan": False, "separators": (",", ":")}
_encode_ascii = json.JSONEncoder(**_OPTIONS).encode
_encode = json.JSONEncoder(**_OPTIONS, ensure_ascii=False).encode


def to_json(value: Any, *, is_ascii: bool = True) -> str:
    """Returns compact JSON; between the pieces of a long value other threads run. Keys are strings."""
    return "".join(_split(value, _encode_ascii if is_ascii else _encode))


async def run_by_size[T](function: Callable[[], T], size: int) -> T:
    """Runs a function that writes so many values: on the event loop if they are few, else in a thread."""
    return function() if size <= MOST_HERE else await asyncio.to_thread(function)


def make_json_response(content: bytes) -> Response:
    """Returns the response with a body that is JSON already."""
    return Response(content, media_type="application/json")


def _split(value: Any, encode: Callable[[Any], str]) -> Iterator[str]:
    """Yields the JSON of a value in pieces, each of which holds MOST_AT_ONCE values at most."""
    if _count(value) <= MOST_AT_ONCE:
        yield encode(value)
    elif isinstance(value, dict):
        lead = "{"
        for name, member in value.items():
            yield f"{lead}{encode(name)}:"
            yield from _split(member, encode)
            lead = ","
        yield "}"
    else:
        lead = "["
        for group in _group(value):
            yield lead
            if len(group) == 1:
                yield from _split(group[0], encode)
            else:
                yield encode(group)[1:-1]
            lead = ","
        yield "]"


def _group(items: Sequence[Any]) -> Iterator[list[Any]]:
    """Yields lists of successive items, which hold MOST_AT_ONCE values together, or one item that holds more."""
    group: list[Any] = []
    total = 0
    for item in items:
        count = _count(item)
        if group and total + count > MOST_AT_ONCE:
            yield group
            group, total = [], 0
        group.append(item)
        total += count
    if group:
        yield group


def _count(value: Any) -> int:
    """Returns the number of values in a value, itself included; counting ends above MOST_AT_ONCE."""
    waiting, count = [value], 1
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            each = each.values()
        elif not isinstance(each, list | tuple):
            continue
        count += len(each)
        if count > MOST_AT_ONCE:
            break
        waiting += [member for member in each if isinstance(member, dict | list | tuple)]
    return count
