"""JSON in pieces: what the pieces are together, and how much one call of the encoder holds."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.server import json_text
from jaxserve.server.json_text import MOST_AT_ONCE, run_by_size, to_json

ENTRY = {"logprob": -1.5, "rank": 2, "decoded_token": "é"}
VALUES: list[Any] = [
    7,
    "é\ud800",
    [],
    {},
    {"a": [1, {"b": None}], "c": "text"},
    list(range(10 * MOST_AT_ONCE)),
    {str(number): number for number in range(3 * MOST_AT_ONCE)},
    {"choices": [{"prompt_logprobs": [None, *[{str(token): ENTRY for token in range(21)}] * 1900]}] * 3, "usage": {}},
    {"choices": [{"index": index, "token_ids": (1,) * 100} for index in range(1000)]},
    [[[list(range(MOST_AT_ONCE + 1))]], "é", [{}] * MOST_AT_ONCE],
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_the_pieces_are_the_value_and_none_is_long(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []

    def watch(encode: Callable[[Any], str]) -> Callable[[Any], str]:
        return lambda piece: (held.append(count(piece)), encode(piece))[1]

    for name in ("_encode", "_encode_ascii"):
        monkeypatch.setattr(json_text, name, watch(getattr(json_text, name)))
    for is_ascii in (True, False):
        assert to_json(value, is_ascii=is_ascii) == json.dumps(value, ensure_ascii=is_ascii, separators=(",", ":"))
    assert max(held) <= MOST_AT_ONCE + 1


def count(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + sum(map(count, value)) if isinstance(value, list | tuple) else 1


def test_what_is_no_number_in_json_is_refused() -> None:
    for value in ([float("nan")], [float("inf")] * 2 * MOST_AT_ONCE):
        with pytest.raises(ValueError, match="JSON"):
            to_json(value)


def test_only_long_answers_are_written_in_a_thread() -> None:
    async def run() -> list[threading.Thread]:
        return [await run_by_size(threading.current_thread, size) for size in (0, 100, 100_000)]

    own, second, third = asyncio.run(run())
    assert own is second is threading.current_thread() and third is not own
