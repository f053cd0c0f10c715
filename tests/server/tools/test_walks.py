"""Whatever a model draws from the masks of strict tools, what is read back are calls that fit their schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema
import numpy as np
import pytest

from jaxserve.features.grammars import GrammarCompiler
from jaxserve.presets import demo_model_dir
from jaxserve.server.events import ArgumentsDelta, CallBegun
from jaxserve.server.tools import TOOL_PARSERS, ToolSet, constrain_calls, has_call_grammar, make_answer_parser
from jaxserve.server.tools.call_formats import CALL_FORMATS
from jaxserve.server.tools.marked_calls import DEEPSEEK, KIMI
from jaxserve.server.tools.reasoning import REASONING_FORMATS
from jaxserve.server.tools.spec import Tool
from jaxserve.tokenizers import load_tokenizer
from tests.features.grammars.test_blanks import accepts
from tests.features.grammars.walks import EndlessWalkError, wander
from tests.server.tools.helpers import read

FORMATS = [name for name in TOOL_PARSERS if has_call_grammar(name)]
BEGINNINGS = {"pythonic": "[f0("}  # without an opener a call is the whole answer, and chance would not begin it
LITERAL_FORMATS = ("pythonic", "olmo3", "lfm2", "gemma4", "functiongemma")
VALUES: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "integer"},
    {"type": "number", "minimum": -3},
    {"type": "boolean"},
    {"enum": ["red", "green", "a b"], "type": "string"},
    {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    {"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"], "additionalProperties": False},
]
CLOSERS = (KIMI.last, DEEPSEEK.last, "\n</parameter>", "</parameter>", "</arg_value>", ">", "</arg_key>", "<", "\n")
LITERAL_CLOSERS = ("'", '<|"|>', "<escape>", "=", ":", "}", "]", *(")" * 4))


@dataclass(frozen=True, slots=True)
class Found:
    """What random walks of one format came to."""

    walks: int = 0
    calls: int = 0
    strict_calls: int = 0
    with_text: int = 0  # walks that have calls and other text


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(load_tokenizer(demo_model_dir()))
    yield made
    made.close()


def draw_tools(rng: np.random.Generator, choice: str) -> ToolSet:
    tools = []
    for at in range(int(rng.integers(1, 4))):
        keys = ["a", "city", "size_2"][: int(rng.integers(0, 4))]
        schema = {
            "type": "object",
            "properties": {key: VALUES[int(rng.integers(len(VALUES)))] for key in keys},
            "required": [key for key in keys if rng.random() < 0.6],
            "additionalProperties": False,
        }
        tools.append(Tool(f"f{at}", None, schema, at == 0 or bool(rng.random() < 0.5)))
    return ToolSet(tuple(tools), choice, parallel=bool(rng.random() < 0.5))  # type: ignore[arg-type]


def walk_tools(
    compiler: GrammarCompiler, parser: str, choice: str, seed: int, num_walks: int, tools: ToolSet | None = None
) -> Found:
    """Draws tools, unless they are given, and walks along their masks; fails where what is read back does not fit."""
    rng = np.random.default_rng([seed, FORMATS.index(parser)])
    tools = draw_tools(rng, choice) if tools is None else tools
    reasoning = str(rng.choice(list(REASONING_FORMATS))) if rng.random() < 0.5 else None
    params = constrain_calls(tools, parser, reasoning, {})
    assert params is not None
    grammar = compiler.compile(params)
    opener = CALL_FORMATS[parser].opener
    closers = LITERAL_CLOSERS if parser in LITERAL_FORMATS else CLOSERS
    texts = [*closers, *([opener] * 3 if opener else ())]  # what a model writes, and chance does not
    texts += [REASONING_FORMATS[reasoning].closer] * 2 if reasoning else []
    ids = [grammar.vocabulary(text) for text in texts]
    found = Found()
    for _ in range(num_walks):
        matcher, begun = grammar.new_matcher(), BEGINNINGS.get(parser, "")
        begun = begun if begun and rng.random() < 0.5 else ""
        for token_id in grammar.vocabulary(begun):
            matcher.accept(token_id)
        try:
            text = begun + wander(matcher, rng, ids).decode()
        except EndlessWalkError:  # chance did not write the end of a text
            continue
        found = add_found(found, text, tools, read(make_answer_parser(parser, reasoning, tools), [text]))
    return found


def add_found(found: Found, text: str, tools: ToolSet, events: list[Any]) -> Found:
    calls = [
        (event.name, "".join(e.text for e in events if isinstance(e, ArgumentsDelta) and e.index == event.index))
        for event in events
        if isinstance(event, CallBegun)
    ]
    by_name = {tool.name: tool for tool in tools.tools}
    assert calls or not tools.is_forced, text
    assert tools.parallel or len(calls) <= 1, text
    for name, arguments in calls:
        tool = by_name[name]
        value = json.loads(arguments)
        assert isinstance(value, dict), text
        if tool.strict or tools.is_forced:
            jsonschema.validate(value, tool.arguments_schema)
    return Found(
        found.walks + 1,
        found.calls + len(calls),
        found.strict_calls + sum(by_name[name].strict for name, _ in calls),
        found.with_text + bool(calls and any(not isinstance(event, CallBegun | ArgumentsDelta) for event in events)),
    )


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("parser", FORMATS)
def test_calls_fit_their_schemas(compiler: GrammarCompiler, parser: str, choice: str) -> None:
    found = [walk_tools(compiler, parser, choice, seed, 4) for seed in range(2)]
    assert sum(each.walks for each in found) >= 6, "nearly all walks end"
    assert sum(each.calls for each in found), "the walks come to calls"


LITERAL = {
    "properties": {
        "tree": {"$ref": "#/$defs/tree"},
        "pair": {"type": "array", "items": {"type": ["number", "string"]}, "minItems": 2, "maxItems": 2},
        "none": {"type": "array", "maxItems": 0},
        "one": {"enum": [1, "it's", None, True], "type": ["integer", "string", "null"]},
        "any": {"title": "Any"},
        "size": {"type": "integer", "minimum": 3, "maximum": 50},
    },
    "required": ["pair", "tree"],
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"leaf": {"const": "x"}, "inner": {"$ref": "#/$defs/tree"}, "more": {"type": "object"}},
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize("parser", LITERAL_FORMATS)
@pytest.mark.parametrize("schema", [LITERAL, {"type": "object"}, {"type": "object", "additionalProperties": False}])
def test_literals_fit_nested_schemas(compiler: GrammarCompiler, parser: str, schema: dict[str, Any]) -> None:
    found = walk_tools(
        compiler, parser, "required", 0, 6, ToolSet((Tool("f0", None, schema),), "required", parallel=False)
    )
    assert found.calls >= 6


def test_names_of_any_arguments_end_where_their_mark_begins(compiler: GrammarCompiler) -> None:
    tools = ToolSet((Tool("f", None, {"type": "object"}),), "required")
    params = constrain_calls(tools, "minimax_m2", None, {})
    assert params is not None
    argument = '<parameter name="city">Rome</parameter>'
    call = f'<minimax:tool_call>\n<invoke name="f">\n{argument}\n</invoke>\n</minimax:tool_call>'
    assert accepts(compiler.compile(params).new_matcher(), call)


@pytest.mark.thorough
@pytest.mark.parametrize("parser", FORMATS)
def test_strict_tools_in_ten_thousand_walks(compiler: GrammarCompiler, parser: str) -> None:
    """All formats together: what is rare comes up in many walks only. Three CPU seconds for each."""
    most, each = -(-10_000 // len(FORMATS)), 20
    found = [walk_tools(compiler, parser, "auto", 100 + at, each) for at in range(-(-most // each))]
    total = {name: sum(getattr(walked, name) for walked in found) for name in Found.__slots__}
    print(parser, total)
    assert total["walks"] > 0.98 * most and total["strict_calls"] > 100
