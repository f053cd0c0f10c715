"""An answer beside tools calls one of them in the model's format, or has the form that the request asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.features.grammars import GrammarCompiler
from jaxserve.presets import demo_model_dir
from jaxserve.server.events import ReasoningDelta
from jaxserve.server.tools import (
    TOOL_PARSERS,
    ToolSet,
    constrain_calls,
    has_call_grammar,
    make_answer_parser,
    read_tools,
)
from jaxserve.server.tools.call_formats import CALL_FORMATS
from jaxserve.server.tools.reasoning import REASONING_FORMATS
from jaxserve.structured_params import StructuredOutputsParams
from jaxserve.tokenizers import Tokenizer, load_tokenizer
from tests.features.grammars.test_blanks import accepts
from tests.server.tools.helpers import read
from tests.server.tools.test_spec import CITY, TREE, tool

FORMS: list[tuple[dict[str, Any], str, str]] = [  # a form, a text of it, and one that is not
    ({"json": CITY}, '{"city": "Rome"}', '{"town": "Rome"}'),
    ({"json": CITY, "disable_any_whitespace": True}, '{"city":"Rome"}', '{"city": "Rome"}'),
    ({"json": CITY, "whitespace_pattern": "_"}, '{"city":_"Rome"}', '{"city": "Rome"}'),
    ({"json_object": True}, '{"a": [1]}', "[1]"),
    ({"regex": r"\d{2}/x"}, "12/x", "1/x"),
    ({"choice": ["yes", 'a "quote"']}, 'a "quote"', "no"),
    ({"grammar": 'start: call+\ncall: "a" | B\nB: "b"'}, "abba", "c"),
    ({"grammar": 'root ::= "a" [0-9]'}, "a5", "a"),
    ({"grammar": 'start: "x" %json {"enum": [1]}'}, "x1", "1"),
]
CALLS = {  # calls of f and of tree, and their array
    "hermes": (
        '<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call>',
        '<tool_call>\n{"name": "tree", "arguments": {"root": {"value": 1, "next": {"value": 2}}}}\n</tool_call>',
        "\n",
    ),
    "llama3_json": (
        '{"name": "f", "parameters": {"city": "Rome"}}',
        '{"name": "tree", "parameters": {"root": {"value": 1}}}',
        "; ",
    ),
    "mistral": (
        '[TOOL_CALLS]f{"city": "Rome"}',
        '[TOOL_CALLS]tree[ARGS]{"root": {"value": 1}, "size": "s"}',
        "",
    ),
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(load_tokenizer(demo_model_dir()))
    yield made
    made.close()


def fits(compiler: GrammarCompiler, params: StructuredOutputsParams | None, text: str) -> bool:
    assert params is not None
    return accepts(compiler.compile(params).new_matcher(), text)


@pytest.mark.parametrize("parser", CALLS)
@pytest.mark.parametrize(("form", "good", "bad"), FORMS)
def test_a_call_or_the_form(compiler: GrammarCompiler, parser: str, form: dict[str, Any], good: str, bad: str) -> None:
    first, second, between = CALLS[parser]
    for parallel in (True, False):
        tools = read_tools([tool("f", CITY), tool("tree", TREE)], "auto", parallel)
        assert tools is not None
        params = constrain_calls(tools, parser, None, {}, form=StructuredOutputsParams(**form))
        for text in (good, first, second):
            assert fits(compiler, params, text), text
        assert fits(compiler, params, first + between + second) is parallel
        if "json_object" not in form:  # calls of llama3_json are objects, too
            assert not fits(compiler, params, first.replace("Rome", "Rome\n"))
            assert not fits(compiler, params, first.replace("city", "town"))
        assert not fits(compiler, params, bad) and not fits(compiler, params, good + first)


def test_an_array_of_calls(compiler: GrammarCompiler) -> None:
    call = '{"name": "f", "arguments": {"city": "Rome"}}'
    for parallel in (True, False):
        tools = read_tools([tool("f", CITY)], "auto", parallel)
        assert tools is not None
        params = constrain_calls(tools, "mistral", None, {}, form=StructuredOutputsParams(choice=["x"]))
        assert fits(compiler, params, f"[TOOL_CALLS] [{call}]") and not fits(compiler, params, "[TOOL_CALLS] []")
        assert fits(compiler, params, f"[TOOL_CALLS][{call}, {call}]") is parallel


def test_a_mark_that_is_a_special_token_is_that_token(compiler: GrammarCompiler) -> None:
    tools = read_tools([tool("f")])
    assert tools is not None
    tokenizer: Tokenizer = load_tokenizer(demo_model_dir())
    special = tokenizer.special_tokens["<|user|>"]
    params = constrain_calls(
        tools, "mistral", None, {"[TOOL_CALLS]": special}, form=StructuredOutputsParams(choice=["x"])
    )
    assert params is not None
    matcher = compiler.compile(params).new_matcher()
    matcher.accept(special)
    assert accepts(matcher, "f{}")
    assert not fits(compiler, params, "[TOOL_CALLS]f{}") and fits(compiler, params, "x")


def test_what_has_no_grammar_is_refused() -> None:
    tools = read_tools([tool("f", {"description": "x" * 70_000})])
    assert tools is not None
    form = StructuredOutputsParams(choice=["x"])
    assert [name for name in TOOL_PARSERS if not has_call_grammar(name)] == ["openai"]
    for parser, message in (("openai", "format openai"), ("hermes", "at most 65536 bytes")):
        with pytest.raises(InvalidRequestError, match=message) as caught:
            constrain_calls(tools, parser, None, {}, form=form)
        assert caught.value.field.startswith("structured_outputs")


BAD = {parser: first.replace("Rome", "Rome\n") for parser, (first, _, _) in CALLS.items()}


@pytest.mark.parametrize("parser", CALLS)
def test_strict_tools_hold_in_any_text(compiler: GrammarCompiler, parser: str) -> None:
    first, second, between = CALLS[parser]
    opener = CALL_FORMATS[parser].opener or ""
    for parallel in (True, False):
        tools = read_tools([tool("f", CITY, strict=True), tool("tree", TREE)], "auto", parallel)
        assert tools is not None
        params = constrain_calls(tools, parser, None, {})
        for text in ("", "Hello <b> [1]\n", "x" + opener[:-1], first, second.replace("root", "any")):
            assert fits(compiler, params, text), text
        assert fits(compiler, params, first + between + second) is parallel
        for text in (BAD[parser], first.replace("city", "town"), first.replace('"f"', '"h"').replace("]f{", "]h{")):
            assert not fits(compiler, params, text), text
        if parser != "llama3_json":
            assert fits(compiler, params, f"Let me see.\n{first}")
            assert not fits(compiler, params, f"Let me see.\n{BAD[parser]}") and not fits(compiler, params, opener)
            assert fits(compiler, params, f"a {first} b {second}") is parallel
    assert constrain_calls(read_tools([tool("f")]) or ToolSet(()), parser, None, {}) is None


@pytest.mark.parametrize("parser", CALLS)
@pytest.mark.parametrize("reasoning", REASONING_FORMATS)
def test_forced_calls_follow_reasoning(compiler: GrammarCompiler, parser: str, reasoning: str) -> None:
    first, second, between = CALLS[parser]
    marks = REASONING_FORMATS[reasoning]
    named = {"type": "function", "function": {"name": "f"}}
    for choice in ("required", named):
        tools = read_tools([tool("f", CITY), tool("tree", TREE)], choice)
        assert tools is not None
        for end, begin in (("", marks.opener), (marks.opener + "\n", ""), (marks.opener + marks.closer, None)):
            params = constrain_calls(tools, parser, reasoning, {}, read_prompt=lambda end=end: f"<|assistant|>{end}")
            thought = f"{begin}Hm {BAD[parser]}{marks.closer}\n\n" if begin is not None else ""
            assert fits(compiler, params, thought + first), (end, thought)
            assert fits(compiler, params, thought + second) is (choice == "required")
            assert fits(compiler, params, thought + first + between + second) is (choice == "required")
            for text in ("", thought, thought + "Hello", thought + BAD[parser]):
                assert not fits(compiler, params, text), text


def test_strict_tools_leave_reasoning_free(compiler: GrammarCompiler) -> None:
    tools = read_tools([tool("f", CITY, strict=True)])
    assert tools is not None
    good, bad = CALLS["hermes"][0], BAD["hermes"]
    for end, begin in (("", "<think>"), ("<think>", "")):
        params = constrain_calls(tools, "hermes", "qwen3", {}, read_prompt=lambda end=end: end)
        for text in (f"{begin}x", f"{begin}{bad}", f"{begin}{bad}</think>\n\n{good}", f"{begin}a</think>b {good}"):
            assert fits(compiler, params, text), text
        assert not fits(compiler, params, f"{begin}a</think>{bad}")
        assert fits(compiler, params, good) is (not end or begin == "")


def test_marks_of_reasoning_may_be_special_tokens(compiler: GrammarCompiler) -> None:
    tokenizer: Tokenizer = load_tokenizer(demo_model_dir())
    user, system = tokenizer.special_tokens["<|user|>"], tokenizer.special_tokens["<|system|>"]
    for choice in ("required", "auto"):
        tools = read_tools([tool("f", CITY, strict=True)], choice)
        assert tools is not None
        special = {"</think>": user, "<tool_call>": system}
        params = constrain_calls(tools, "hermes", "deepseek_r1", special)
        assert params is not None
        for thought in ("", "Hm <tool_call>"):
            matcher = compiler.compile(params).new_matcher()
            for token in tokenizer.encode(thought, add_special_tokens=False):
                matcher.accept(token)
            matcher.accept(user)
            matcher.accept(system)
            assert accepts(matcher, CALLS["hermes"][0].removeprefix("<tool_call>"))


def test_a_forced_call_may_reason_until_its_tokens_end(compiler: GrammarCompiler) -> None:
    """Nothing ends reasoning but the model, so `max_tokens` may come first: reasoning and no call are left."""
    tools = read_tools([tool("f", CITY)], "required")
    assert tools is not None
    params = constrain_calls(tools, "hermes", "qwen3", {}, read_prompt=lambda: "<think>")
    assert params is not None
    assert not fits(compiler, params, "Hm. " * 40), "the answer cannot end here"
    parser = make_answer_parser("hermes", "qwen3", tools, prompt="<think>")
    assert read(parser, ["Hm. ", "Hm."]) == [ReasoningDelta("Hm."), ReasoningDelta(" Hm.")] and not parser.saw_calls


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_strings_may_stand_between_special_tokens(compiler: GrammarCompiler, choice: str) -> None:
    tokenizer: Tokenizer = load_tokenizer(demo_model_dir())
    ids = iter(tokenizer.special_tokens[text] for text in ("<s>", "<|user|>", "<|assistant|>", "<|system|>"))
    opener, quote, thought, answer = ids
    special = {"<|tool_call>": opener, '<|"|>': quote, "<|channel>": thought, "<channel|>": answer}
    tools = read_tools([tool("f", CITY, strict=True)], choice)
    assert tools is not None
    params = constrain_calls(tools, "gemma4", "gemma4", special, read_prompt=lambda: "<|turn>model\n")
    assert params is not None
    for parts in ([thought, "thought\nHm{", answer, opener], [opener]):
        matcher = compiler.compile(params).new_matcher()
        for part in (*parts, "call:f{city:", quote, '<"} ', quote, "}<tool_call|>"):
            for token in [part] if isinstance(part, int) else tokenizer.encode(part, add_special_tokens=False):
                matcher.accept(token)
        assert matcher.is_accepting


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_marks_around_an_answer_may_be_special_tokens(compiler: GrammarCompiler, choice: str) -> None:
    tokenizer: Tokenizer = load_tokenizer(demo_model_dir())
    begin, end = tokenizer.special_tokens["<|user|>"], tokenizer.special_tokens["<|system|>"]
    tools = read_tools([tool("f", CITY, strict=True)], choice)
    assert tools is not None
    special = {"<|START_RESPONSE|>": begin, "<|END_RESPONSE|>": end}
    params = constrain_calls(tools, "cohere_command3", None, special)
    assert params is not None
    matcher = compiler.compile(params).new_matcher()
    call = '{"tool_call_id": "0", "tool_name": "f", "parameters": {"city": "x"}}'
    if choice == "auto":
        matcher.accept(begin)
        for token in tokenizer.encode("So: ", add_special_tokens=False):
            matcher.accept(token)
        assert matcher.is_accepting
        matcher.accept(end)
        assert matcher.is_accepting
    assert accepts(matcher, f"<|START_ACTION|>[\n    {call}\n]<|END_ACTION|>")


def test_what_bounds_strings_of_python_holds_in_quotes_of_json(compiler: GrammarCompiler) -> None:
    schema = {"properties": {"a": {"type": ["string", "null"], "pattern": "^x[0-9]$"}}, "required": ["a"]}
    tools = read_tools([tool("f", schema)], "required")
    assert tools is not None
    params = constrain_calls(tools, "olmo3", None, {})
    for value, is_good in (('"x1"', True), ("None", True), ('"y"', False), ("'x1'", False)):
        assert fits(compiler, params, f"<function_calls>f(a={value})</function_calls>") is is_good, value
