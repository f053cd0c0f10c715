"""An answer beside tools calls one of them in the model's format, or has the form that the request asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.features.grammars import GrammarCompiler
from jaxserve.presets import demo_model_dir
from jaxserve.server.tools import TOOL_PARSERS, allow_calls, read_tools
from jaxserve.structured_params import StructuredOutputsParams
from jaxserve.tokenizers import Tokenizer, load_tokenizer
from tests.features.grammars.test_blanks import accepts
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


def fits(compiler: GrammarCompiler, params: StructuredOutputsParams, text: str) -> bool:
    return accepts(compiler.compile(params).new_matcher(), text)


@pytest.mark.parametrize("parser", CALLS)
@pytest.mark.parametrize(("form", "good", "bad"), FORMS)
def test_a_call_or_the_form(compiler: GrammarCompiler, parser: str, form: dict[str, Any], good: str, bad: str) -> None:
    first, second, between = CALLS[parser]
    for parallel in (True, False):
        tools = read_tools([tool("f", CITY), tool("tree", TREE)], "auto", parallel)
        assert tools is not None
        params = allow_calls(StructuredOutputsParams(**form), tools, parser, {})
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
        params = allow_calls(StructuredOutputsParams(choice=["x"]), tools, "mistral", {})
        assert fits(compiler, params, f"[TOOL_CALLS] [{call}]") and not fits(compiler, params, "[TOOL_CALLS] []")
        assert fits(compiler, params, f"[TOOL_CALLS][{call}, {call}]") is parallel


def test_a_mark_that_is_a_special_token_is_that_token(compiler: GrammarCompiler) -> None:
    tools = read_tools([tool("f")])
    assert tools is not None
    tokenizer: Tokenizer = load_tokenizer(demo_model_dir())
    special = tokenizer.special_tokens["<|user|>"]
    params = allow_calls(StructuredOutputsParams(choice=["x"]), tools, "mistral", {"[TOOL_CALLS]": special})
    matcher = compiler.compile(params).new_matcher()
    matcher.accept(special)
    assert accepts(matcher, "f{}")
    assert not fits(compiler, params, "[TOOL_CALLS]f{}") and fits(compiler, params, "x")


def test_what_has_no_grammar_is_refused() -> None:
    tools = read_tools([tool("f", {"description": "x" * 70_000})])
    assert tools is not None
    form = StructuredOutputsParams(choice=["x"])
    assert set(TOOL_PARSERS) == {*CALLS, "openai"}
    for parser, message in (("openai", "format openai"), ("hermes", "at most 65536 bytes")):
        with pytest.raises(InvalidRequestError, match=message) as caught:
            allow_calls(form, tools, parser, {})
        assert caught.value.field.startswith("structured_outputs")
