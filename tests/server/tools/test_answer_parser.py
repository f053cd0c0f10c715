"""The one parser that the server uses per answer."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.errors import ConfigError
from jaxserve.server.events import ArgumentsDelta, CallBegun, ReasoningDelta, TextDelta
from jaxserve.server.tools import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    ToolSet,
    guess_tool_parser,
    make_answer_parser,
    needs_special_tokens,
    read_tools,
)
from tests.server.tools.helpers import read, summarise
from tests.test_layering import find_loaded

TOOLS = [{"type": "function", "function": {"name": name}} for name in "fg"]
F, G = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": {}}'
HERMES_TEXT = f"Hm.\n<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>"
CALLS = [("f", '{"a": 1}'), ("g", "{}")]
R = ReasoningDelta


def tools(choice: Any = "auto", parallel: bool = True) -> ToolSet | None:
    return read_tools(TOOLS, choice, parallel)


def test_without_parsers_text_is_content() -> None:
    parser = make_answer_parser()
    assert [parser.push(text) for text in ("", " a<think>", HERMES_TEXT)] == [
        [], [TextDelta(" a<think>")], [TextDelta(HERMES_TEXT)],
    ]  # fmt: skip
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("options", "text", "expected"),
    [
        (("hermes", None, tools()), HERMES_TEXT, ["Hm.", *CALLS]),
        (("hermes", None, tools(parallel=False)), HERMES_TEXT, ["Hm.", CALLS[0]]),
        (("hermes", None, None), HERMES_TEXT, [HERMES_TEXT]),
        (("hermes", None, tools("none")), HERMES_TEXT, [HERMES_TEXT]),
        ((None, None, tools()), HERMES_TEXT, [HERMES_TEXT]),
        (("llama3_json", None, tools()), F, CALLS[:1]),
        (("llama3_json", None, tools()), F.replace('"f"', '"h"'), [F.replace('"f"', '"h"')]),
        (("mistral", None, tools()), f"[TOOL_CALLS] [{F}, {G}]", CALLS),
        (("hermes", "qwen3", tools()), f"<think>\nx <tool_call>{F}\n</think>\n\n{HERMES_TEXT}",
         [R(f"x <tool_call>{F}"), "Hm.", *CALLS]),
        (("hermes", "deepseek_r1", tools()), f"x</think>\n\n<tool_call>{F}", [R("x"), CALLS[0]]),
        (("llama3_json", "deepseek_r1", tools()), f"x</think>\n\n{F}", [R("x"), CALLS[0]]),
        (("hermes", "deepseek_r1", tools()), f"x <tool_call>{F}", [R(f"x <tool_call>{F}")]),
        ((None, "qwen3", None), "<think>a</think>b", [R("a"), "b"]),
        ((None, "qwen3", None), "a</think>b", ["a</think>b"]),
        ((None, "deepseek_r1", None), "a</think>b", [R("a"), "b"]),
        ((None, "deepseek_r1", tools("required")),
         '[{"name":"f","parameters":{"a": 1}},{"name":"g","parameters":{}}]', CALLS),
        ((None, None, tools("required", False)), f"[{F},{G}]", CALLS[:1]),
        (("hermes", "deepseek_r1", tools("required")),
         f"x</think>\n\n<tool_call>\n{F}\n</tool_call>\n<tool_call>{G}</tool_call>", [R("x"), *CALLS]),
        (("hermes", None, tools("required")), f"\n\n<tool_call>\n{F}\n</tool_call>\n<tool_c", CALLS[:1]),
        ((None, "qwen3", tools({"type": "function", "function": {"name": "f"}})), '{"a": 1}', CALLS[:1]),
        ((None, None, tools({"type": "function", "function": {"name": "f"}})), '{"a": "b', [("f", '{"a": "b')]),
        ((None, None, tools({"type": "function", "function": {"name": "f"}})), "", []),
    ],
)  # fmt: skip
def test_answers(options: Any, text: str, expected: list[Any]) -> None:
    for parts in ([text], text):
        parser = make_answer_parser(*options)
        assert summarise(read(parser, parts)) == expected


def test_what_was_held_back_comes_in_order() -> None:
    parser = make_answer_parser("hermes", "qwen3", tools())
    assert parser.push("<think>a</think>b <tool") == [R("a"), TextDelta("b")]
    assert parser.finish() == [TextDelta(" <tool")]
    parser = make_answer_parser("hermes", "qwen3", tools())
    assert parser.push("<thi") == [] and parser.finish() == [TextDelta("<thi")]


def test_forced_calls_come_as_they_grow() -> None:
    parser = make_answer_parser(None, None, tools("required"))
    events = [parser.push(part) for part in ('[{"name":"', 'f","param', 'eters":{"a', '":1}', "}", "]")]
    start = events[2][0]
    assert isinstance(start, CallBegun) and start.name == "f" and start.call_id.startswith("call_")
    assert events == [[], [], [start, ArgumentsDelta(0, '{"a')], [ArgumentsDelta(0, '":1}')], [], []]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_forced_calls_have_the_ids_of_their_family(choice: Any) -> None:
    array = "{}" if choice != "required" else f"[{F}]"
    for name, text in (
        ("mistral", f"[TOOL_CALLS] [{F}]"),
        ("hermes", f"<tool_call>{F}"),
        (None, array),
    ):
        start = make_answer_parser(name, None, tools(choice)).push(text)[0]
        assert isinstance(start, CallBegun) and len(start.call_id) == (9 if name == "mistral" else 29)


@pytest.mark.parametrize(
    ("name", "prompt", "text", "expected"),
    [
        ("qwen3", "<|assistant|>\n<think>\n", "a</think>b", [R("a"), "b"]),
        ("deepseek_r1", "<think>\n\n</think>\n\n", "b", ["b"]),
        ("deepseek_r1", "<|assistant|>", "a</think>b", [R("a"), "b"]),
    ],
)
def test_the_prompt_says_where_reasoning_begins(name: str, prompt: str, text: str, expected: list[Any]) -> None:
    assert summarise(read(make_answer_parser(None, name, prompt=prompt), [text])) == expected


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
def test_a_continued_message_says_where_its_reasoning_ends(name: str) -> None:
    for begun, text, expected in (
        ("<think>hm", " so</think>\n\nYes", [R(" so"), "Yes"]),
        ("<think>hm</think>\n\nYes", " it is", [" it is"]),
        ("Yes", " it is", [" it is"]),
    ):
        for prompt in (f"<|assistant|>{begun}", f"<|assistant|><think>\n\n</think>\n\n{begun}"):
            parser = make_answer_parser(None, name, prompt=prompt, begun=begun)
            assert summarise(read(parser, text)) == expected, prompt


def test_a_grammar_of_the_request_leaves_no_room_for_marks() -> None:
    for given in (None, tools("none")):
        parser = make_answer_parser("llama3_json", "deepseek_r1", given, is_constrained=True)
        assert summarise(read(parser, [F])) == [F]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", HERMES_TEXT.removeprefix("Hm.\n"), CALLS),
        ("hermes", HERMES_TEXT, [HERMES_TEXT]),
        ("hermes", '{"a": "<tool_call>"}', ['{"a": "<tool_call>"}']),
        ("hermes", "<tool", ["<tool"]),
        ("llama3_json", f"{F}; {G}", CALLS),
        ("llama3_json", '{"a": 1}', ['{"a": 1}']),
        ("llama3_json", f"<|python_tag {F}", [f"<|python_tag {F}"]),
        ("mistral", f"[TOOL_CALLS] [{F}, {G}]", CALLS),
        ("mistral", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{}', CALLS),
        ("mistral", f"x[TOOL_CALLS] [{F}]", [f"x[TOOL_CALLS] [{F}]"]),
        ("openai", F, [F]),
    ],
)
def test_a_grammar_beside_tools_allows_calls_at_the_beginning(name: str, text: str, expected: list[Any]) -> None:
    for parts in ([text], text):
        parser = make_answer_parser(name, "qwen3", tools(), is_constrained=True)
        assert summarise(read(parser, parts)) == expected


def test_names() -> None:
    assert set(TOOL_PARSERS) == {
        "hermes", "llama3_json", "mistral", "openai", "qwen3_coder", "qwen3_xml", "mimo", "glm45", "glm47",
        "deepseek_v3", "deepseek_v31", "minimax_m2", "kimi_k2", "granite", "cohere_command3", "phi4_mini_json",
        "pythonic", "olmo3", "gemma4", "functiongemma", "lfm2", "nemotron_json", "granite4",
    }  # fmt: skip
    assert set(REASONING_PARSERS) == {
        "deepseek_r1", "deepseek_v3", "glm45", "minimax_m2", "mistral", "qwen3", "openai_gptoss", "kimi_k2",
        "granite", "cohere_command3", "gemma4", "olmo3", "nemotron_v3",
    }  # fmt: skip
    assert all(map(needs_special_tokens, [*TOOL_PARSERS, *REASONING_PARSERS])) and not needs_special_tokens(None)
    for arguments, field in ((("x", None), "tool_call_parser"), ((None, "x"), "reasoning_parser")):
        with pytest.raises(ConfigError) as caught:
            make_answer_parser(*arguments)
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, None),
        ("", None),
        ("{{ messages }}", None),
        ("... [TOOL_CALLS] [ ...", "mistral"),
        ("within <tool_call></tool_call> XML tags:\n<tool_call>\n{'name': ...", "hermes"),
        ("<tool_call>\n<function=example>", "qwen3_coder"),
        ("<tool_call>{name}\n<arg_key>", "glm45"),
        ('ns.system_prompt + "List of tools: <|tool_list_start|>["', "lfm2"),
        ('{%- set keep_past_thinking = 1 %}{{- "List of tools: [" -}}', "lfm2"),
        ("{%- if message.role == 'ipython' %}{{ '\"parameters\": ' }}", "llama3_json"),
        ('{{- \'<|python_tag|>\' + x }} {"name": f, "parameters": p}', "llama3_json"),
        ("{%- if message.role == 'ipython' %}", None),
    ],
)
def test_guesses(template: str | None, expected: str | None) -> None:
    assert guess_tool_parser(template) == expected


def test_reading_answers_loads_nothing_heavy() -> None:
    assert find_loaded("jaxserve.server.tools", "jax numpy fastapi pydantic tokenizers llguidance jinja2") == ""
