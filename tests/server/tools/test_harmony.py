"""Answers in channels are read as reasoning, content and calls, whatever the cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.server.events import ReasoningDelta, TextDelta
from jaxserve.server.tools import guess_reasoning_parser, guess_tool_parser, make_answer_parser
from jaxserve.server.tools.harmony import HarmonyParser
from jaxserve.server.tools.spec import read_tools
from tests.server.tools.helpers import cut, read, summarise

R = ReasoningDelta
THINK, ANSWER = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
SAY, NEXT = "<|channel|>commentary<|message|>", "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
CASES: list[tuple[str, list[Any]]] = [
    (f"{THINK}a b{NEXT}{ANSWER}Hi \n", [R("a b"), "Hi \n"]),
    (f"{ANSWER}Hi", ["Hi"]),
    (f"{ANSWER}Hi<|return|>", ["Hi"]),
    (f"{THINK}a{NEXT}{THINK}b{NEXT}{ANSWER}c", [R("a\nb"), "c"]),
    (f"{SAY}I look.{NEXT}{ANSWER}c", ["I look.\nc"]),
    (f'{THINK}a{NEXT}{CALL}{{"x": 1}}<|call|>', [R("a"), ("f", '{"x": 1}')]),
    (f'{CALL}{{"x": 1}}', [("f", '{"x": 1}')]),
    (f"{CALL}<|call|>", [("f", "{}")]),
    (f'{CALL}{{"x"', [("f", '{"x"')]),
    (f"{CALL}{{}}<|call|><|start|>assistant{CALL}[1]", [("f", "{}"), ("f", "[1]")]),
    ('<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"x": 1}', [("f", '{"x": 1}')]),
    (' to=functions.f<|channel|>commentary json<|message|>{"x": 1}', [("f", '{"x": 1}')]),
    ("<|channel|>commentary to=g json<|message|>{}", [("g", "{}")]),
    ("<|channel|>commentary to=functions.odd<|message|>{}", [("odd", "{}")]),
    ("<|channel|>analysis to=python code<|message|>1 + 1", [R("1 + 1")]),
    (f"{THINK}a<|start|>assistant{ANSWER}b", [R("a"), "b"]),
    (f"{THINK}a{ANSWER}b", [R("a"), "b"]),
    (f"{ANSWER}1 < 2 <| <|en <b>", ["1 < 2 <| <|en <b>"]),
    (f"{THINK}a<|en", [R("a<|en")]),
    ("<|message|>b", ["b"]),
    ("plain text", ["plain text"]),
    ("\n plain", ["\n plain"]),
    ("t", ["t"]),
    ("tomorrow", ["tomorrow"]),
    ("<|channel|>fin", []),
    ("<|channel|>final" + "x" * 2000, ["final" + "x" * 2000]),
    (" <|start|>" + "x" * 2000, ["x" * 2000]),
    ("to=" + "x" * 2000, ["to=" + "x" * 2000]),
    (f"{THINK}a<|end|><|end|><|start|>assistant{ANSWER}b<|return|><|return|>", [R("a"), "b"]),
    (f"{ANSWER}b<|end|>\n<|end|><|call|> c", ["b\n c"]),
    (f"{ANSWER}<|message|>b<|constrain|>c<|endoftext|>", ["bc"]),
    (f'<|end|>{CALL}{{"x"<|message|>: 1}}<|call|><|call|>', [("f", '{"x": 1}')]),
    (THINK, []),
    (" \n", []),
    ("", []),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_examples(text: str, expected: list[Any]) -> None:
    for parts in ([text], text):
        found = summarise(read(HarmonyParser({"f", "g"}), parts))
        assert [R(item.text) if isinstance(item, ReasoningDelta) else item for item in found] == expected


def test_calls_are_content_where_none_are_read() -> None:
    assert summarise(read(HarmonyParser(None), [f"{CALL}{{}}<|call|>"])) == ["{}"]
    assert summarise(read(HarmonyParser(None), [f"{SAY}a{NEXT}{CALL}{{}}"])) == ["a\n{}"]


def test_no_mark_is_ever_part_of_a_message() -> None:
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
    for first in marks:
        for second in marks:
            for text in (f"{first}{second}a", f"{ANSWER}a{first}{second}b", f"{THINK}a{first}{'x' * 2000}{second}b"):
                found = summarise(read(HarmonyParser({"f"}), [text]))
                assert not [each for each in found if "<|" in str(each)], text


def test_a_continued_message_goes_on() -> None:
    for text in ("to=5 <", "\n b", "<|end|>"):
        parser = make_answer_parser("openai", "openai_gptoss", read_tools(TOOLS), prompt=f"{ANSWER}x", begun="x")
        assert summarise(read(parser, text)) == [text] * (text != "<|end|>")


MARKS = [THINK, ANSWER, SAY, CALL, NEXT, "<|call|>", "<|start|>", "<|", "<", "to=", " ", "\n"]


@settings(max_examples=300, deadline=None)
@given(
    texts=st.lists(st.sampled_from(MARKS) | st.text(max_size=3)),
    places=st.lists(st.integers(0, 10_000), max_size=9),
)
def test_any_cut_gives_the_same(texts: list[str], places: list[int]) -> None:
    text = "".join(texts)
    assert summarise(read(HarmonyParser({"f"}), cut(text, places))) == summarise(read(HarmonyParser({"f"}), [text]))


def test_text_comes_as_it_grows() -> None:
    parser = HarmonyParser(())
    parts = ("<|channel|>", "analysis", "<|message|>", "a", " b <", "c", "<|end|>", "<|start|>assistant", ANSWER, "d")
    found = [parser.push(part) for part in parts]
    assert found == [[], [], [], [R("a")], [R(" b ")], [R("<c")], [], [], [], [TextDelta("d")]]


TOOLS = [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g"}}]


@pytest.mark.parametrize(
    ("tools", "reasoning"), [("openai", None), (None, "openai_gptoss"), ("openai", "openai_gptoss")]
)
def test_either_name_reads_the_whole_answer(tools: str | None, reasoning: str | None) -> None:
    text = f"{THINK}a{NEXT}{SAY}b{NEXT}{CALL}{{}}"
    call = [("f", "{}")] if tools is not None else []
    said = "b" if tools is not None else "b\n{}"
    assert summarise(read(make_answer_parser(tools, reasoning, read_tools(TOOLS)), [text])) == [R("a"), said, *call]
    assert summarise(read(make_answer_parser(tools, reasoning), [text])) == [R("a"), "b\n{}"]


def test_calls_after_the_first_are_dropped_on_demand() -> None:
    parser = make_answer_parser("openai", None, read_tools(TOOLS, "auto", parallel=False))
    assert summarise(read(parser, [f"{CALL}1<|call|><|start|>assistant{CALL}2"])) == [("f", "1")]
    assert parser.saw_calls


def test_an_answer_that_a_grammar_constrains_has_no_channels() -> None:
    forced = make_answer_parser("openai", "openai_gptoss", read_tools(TOOLS, "required"))
    assert summarise(read(forced, ['[{"name": "f", "parameters": {}}]'])) == [("f", "{}")]
    assert summarise(read(make_answer_parser("openai", None, is_constrained=True), ["[1]"])) == ["[1]"]


def test_parsers_are_guessed_from_a_template() -> None:
    template = "<|start|>assistant<|channel|>commentary to=functions.x<|message|>{{ python_tag }}"
    assert (guess_tool_parser(template), guess_reasoning_parser(template)) == ("openai", "openai_gptoss")
    assert guess_reasoning_parser("{{ messages }}") is guess_reasoning_parser(None) is None
