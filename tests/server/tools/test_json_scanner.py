"""The end of a JSON value is found in one look at each character."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.server.tools.json_scanner import JsonScanner, begins_value
from tests.server.tools.helpers import CountedText, cut

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def measure(parts: list[str]) -> tuple[int, bool]:
    scanner, length = JsonScanner(), 0
    for part in parts:
        length += scanner.push(part)
        if scanner.done:
            break
    return length, scanner.done


@given(
    value=VALUES,
    indent=st.sampled_from([None, 2]),
    rest=st.sampled_from(["}", "]", ",", " ", "\n", ', "a": "}"}']),
    places=st.lists(st.integers(0, 10_000), max_size=9),
)
def test_values_end_where_json_ends_them(value: object, indent: int | None, rest: str, places: list[int]) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    assert begins_value(text[0]) or text in ("NaN", "Infinity")
    assert measure(cut(text + rest, places)) == (len(text), True)


@pytest.mark.parametrize("text", ["{", '{"a": "}', '"a\\"', "[[]", "12", "nul", '{"a": {"b": "\\\\"}'])
def test_open_values(text: str) -> None:
    assert measure([text]) == measure(list(text)) == (len(text), False)


@pytest.mark.parametrize("text", ['"' + "a\\" * 10_001 + '"', "[" * 10_000, '{"a":' * 5_000, "1" * 10_000])
def test_each_character_is_seen_once(text: str) -> None:
    CountedText.num_seen = 0
    measure([CountedText(text[at : at + 3]) for at in range(0, len(text), 3)])
    assert CountedText.num_seen == len(text)
