"""Reasoning is told apart from the answer, with and without its first mark."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.server.events import ReasoningDelta, TextDelta
from jaxserve.server.tools.reasoning import ReasoningParser, find_place
from tests.server.tools.helpers import CountedText, cut, join_text, read, summarise

R = ReasoningDelta
CASES: list[tuple[bool, str, list[Any]]] = [
    (False, "<think>\na b\n</think>\n\nHi ", [R("a b"), "Hi "]),
    (False, " <think>a</think>b", [R("a"), "b"]),
    (False, "<think>\n\n</think>\n\nHi", ["Hi"]),
    (False, "<think></think>", []),
    (False, "Hi <think>a</think>", ["Hi <think>a</think>"]),
    (False, "a</think>b", ["a</think>b"]),
    (False, "\n Hi\n", ["\n Hi\n"]),
    (False, "<think>a <b \n", [R("a <b \n")]),
    (False, "<think>a</think>b<think>c</think>", [R("a"), "b<think>c</think>"]),
    (False, "<think>a</thin", [R("a</thin")]),
    (False, "<thin", ["<thin"]),
    (False, "<think>", []),
    (False, " \n", [" \n"]),
    (False, "", []),
    (True, "a b\n</think>\n\nHi", [R("a b"), "Hi"]),
    (True, "\n<think>\na</think>Hi", [R("a"), "Hi"]),
    (True, "</think>Hi", ["Hi"]),
    (True, "\n</think>\n Hi", ["Hi"]),
    (True, "<b></think>Hi", [R("<b>"), "Hi"]),
    (True, "<</think>Hi", [R("<"), "Hi"]),
    (True, "a </thinking> b", [R("a </thinking> b")]),
    (True, "a <think> b</think>c", [R("a <think> b"), "c"]),
    (True, "<thi", [R("<thi")]),
    (True, "", []),
]


@pytest.mark.parametrize(("starts_inside", "text", "expected"), CASES)
def test_examples(starts_inside: bool, text: str, expected: list[Any]) -> None:
    for parts in ([text], text):
        assert summarise(read(ReasoningParser(starts_inside=starts_inside), parts)) == expected


@settings(max_examples=300, deadline=None)
@given(
    starts_inside=st.booleans(),
    texts=st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n"]) | st.text(max_size=3)),
    places=st.lists(st.integers(0, 10_000), max_size=9),
)
def test_any_cut_gives_the_same_and_nothing_is_lost(starts_inside: bool, texts: list[str], places: list[int]) -> None:
    text = "".join(texts)
    events = read(ReasoningParser(starts_inside=starts_inside), cut(text, places))
    assert summarise(events) == summarise(read(ReasoningParser(starts_inside=starts_inside), [text]))
    rest = text.lstrip(" \t\n\r")
    if not starts_inside and not rest.startswith("<think>"):
        assert summarise(events) == ([text] if text else [])
    elif "</think>" not in rest:
        assert join_text(events) == rest.removeprefix("<think>").lstrip(" \t\n\r")
    else:
        begin, end = rest.removeprefix("<think>").split("</think>", 1)
        assert join_text(events) == begin.strip(" \t\n\r") + end.lstrip(" \t\n\r")


def test_reasoning_comes_as_it_grows() -> None:
    parser = ReasoningParser(starts_inside=True)
    assert [parser.push(part) for part in ("a", "b \n", "c</th", "ink>", "\n", "d ", "e")] == [
        [R("a")], [R("b")], [R(" \nc")], [], [], [TextDelta("d ")], [TextDelta("e")],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("", None), ("<|assistant|>", None), ("a<think>\n", True), ("a<think>", True), ("<think>\n\n</think>\n\n", False),
     ("<think> a", None)],
)  # fmt: skip
def test_prompts_that_say_where_the_answer_begins(prompt: str, expected: bool | None) -> None:
    assert find_place(prompt, "", "qwen3") == (expected, False)


@pytest.mark.parametrize(
    ("prompt", "begun", "expected"),
    [
        ("<|assistant|><think>\n\n</think>\n\n<think>hm", "<think>hm", (True, True)),  # Qwen 3's template
        ("<|assistant|><think>hm", "<think>hm ", (True, True)),
        ("<|assistant|><think>\nhm\n</think>\n\nSo", "<think>hm</think>So", (False, True)),
        ("<|assistant|>So", "<think>hm</think>So", (False, True)),  # DeepSeek's drops the reasoning
        ("<|assistant|><think>\nhm\n</think>\n\nSo", " So\n", (False, True)),
        ("<|assistant|>So", "So", (False, True)),
        ("<|user|><think><|assistant|>So", "So", (False, True)),
        ("<|assistant|><think>\nSo", "So", (True, True)),  # the template opened it
        ("<|assistant|><think>hm</think>", "<think>hm</think>", (False, False)),
        ("<|assistant|><think>", "<think>", (True, False)),
        ("<|assistant|>", " ", (None, False)),
    ],
)
def test_continued_messages_say_it_too(prompt: str, begun: str, expected: tuple[bool | None, bool]) -> None:
    assert find_place(prompt, begun, "qwen3") == expected


@pytest.mark.parametrize(
    ("starts_inside", "text", "expected"),
    [
        (True, " b\n</think>\n\nHi", [R(" b"), "Hi"]),
        (True, "<think> b", [R("<think> b")]),
        (False, " b <think>c</think>", [" b <think>c</think>"]),
        (False, "<think>c</think>", ["<think>c</think>"]),
    ],
)
def test_a_continued_message_keeps_its_blanks(starts_inside: bool, text: str, expected: list[Any]) -> None:
    for parts in ([text], text):
        assert summarise(read(ReasoningParser(starts_inside=starts_inside, continues=True), parts)) == expected


@pytest.mark.parametrize("unit", ["<", "</", "</think", "\n", "a ", "<think>", "</think>"])
def test_work_grows_with_the_text(unit: str) -> None:
    def count(num_units: int) -> int:
        parser, text = ReasoningParser(starts_inside=True), unit * num_units
        CountedText.num_seen = 0
        for at in range(0, len(text), 5):
            parser.push(CountedText(text[at : at + 5]))
        parser.finish()
        return CountedText.num_seen

    assert 0 < count(2000) <= 2.2 * count(1000)
