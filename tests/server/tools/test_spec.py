"""Tools are checked by name, and forced calls have schemas that hold."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.features.grammars.source import make_source
from jaxserve.presets import demo_model_dir
from jaxserve.server.tools import ToolSet, read_tools
from jaxserve.tokenizers import load_tokenizer

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TREE = {
    "$id": "https://example.org/tree",
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/Node"}, "size": {"$ref": "#/definitions/Size"}},
    "required": ["root"],
    "additionalProperties": False,
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/Node"}},
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "definitions": {"Size": {"enum": ["s", "m"]}},
}
NESTED = {"type": "object", "properties": {"inner": {"$ref": "#"}}, "additionalProperties": False}


def tool(name: Any, parameters: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, **more}
    return {"type": "function", "function": function if parameters is None else {**function, "parameters": parameters}}


def read(tools: list[dict[str, Any]], choice: Any = None, parallel: bool | None = True) -> ToolSet:
    toolset = read_tools(tools, choice, parallel)
    assert toolset is not None
    return toolset


def test_reading() -> None:
    toolset = read([tool("f", CITY, description="d", strict=False), tool("g-2_G")])
    assert (toolset.choice, toolset.named, toolset.parallel) == ("auto", None, True)
    assert toolset.names == {"f", "g-2_G"} and not toolset.is_forced and toolset.structured_outputs() is None
    assert toolset.describe() == [
        tool("f", CITY, description="d"),
        tool("g-2_G", {"type": "object", "properties": {}}),
    ]
    assert read([tool("f")], "none").describe() is None
    assert read([tool("f", strict=True)], "required").is_forced
    assert read([tool("f")], "auto", None).parallel and not read([tool("f")], "auto", False).parallel
    assert read([tool(f"f{n}") for n in range(128)]).tools[127].name == "f127"
    for tools in (None, []):
        assert read_tools(tools) is None and read_tools(tools, "none") is None


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        (None, "always", "tool_choice"),
        ([], "required", "tool_choice"),
        ([tool(f"f{n}") for n in range(129)], None, "tools"),
        ([{"type": "custom", "custom": {"name": "f"}}], None, "tools[0].type"),
        ([{"function": {"name": "f"}}], None, "tools[0].type"),
        ([{"type": "function"}], None, "tools[0].function"),
        ([{**tool("f"), "cache": 1}], None, "tools[0]"),
        ([tool("f", title="x")], None, "tools[0].function"),
        ([tool("f"), tool("f")], None, "tools[1].function.name"),
        ([tool("")], None, "tools[0].function.name"),
        ([tool("a b")], None, "tools[0].function.name"),
        ([tool("f\n")], None, "tools[0].function.name"),
        ([tool("é")], None, "tools[0].function.name"),
        ([tool("x" * 65)], None, "tools[0].function.name"),
        ([tool(5)], None, "tools[0].function.name"),
        ([tool("f", description=5)], None, "tools[0].function.description"),
        ([tool("f", description="\ud800")], None, "tools[0].function.description"),
        ([tool("f", strict="yes")], None, "tools[0].function.strict"),
        ([tool("f", [])], None, "tools[0].function.parameters"),
        ([tool("f", "{}")], None, "tools[0].function.parameters"),
        ([tool("f", {"type": "string"})], None, "tools[0].function.parameters.type"),
        ([tool("f", {"type": ["object", "null"]})], None, "tools[0].function.parameters.type"),
        ([tool("f", {"a": float("nan")})], None, "tools[0].function.parameters"),
        ([tool("f", {"\ud800": 1})], None, "tools[0].function.parameters"),
        ([tool("f")], "always", "tool_choice"),
        ([tool("f")], {"type": "allowed_tools", "allowed_tools": {}}, "tool_choice.type"),
        ([tool("f")], {"type": "function", "function": {"name": "g"}}, "tool_choice.function.name"),
        ([tool("f")], {"type": "function", "function": {"name": ["f"]}}, "tool_choice.function.name"),
        ([tool("f")], {"type": "function", "function": {"name": "f", "x": 1}}, "tool_choice.function"),
        ([tool("f")], {"type": "function", "name": "f"}, "tool_choice"),
    ],
)
def test_malformed_tools(tools: Any, choice: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_tools(tools, choice)
    assert caught.value.field == field and len(str(caught.value)) < 400


def allows(toolset: ToolSet, answer: Any) -> bool:
    """Whether the grammar that this becomes lets a model write the answer, and stop there."""
    from llguidance import LLMatcher, LLTokenizer

    params = toolset.structured_outputs()
    assert params is not None
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, make_source(params, load_tokenizer(demo_model_dir())))
    assert not matcher.is_error(), matcher.get_error()
    text = answer if isinstance(answer, str) else json.dumps(answer, separators=(",", ":"))
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def choose(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOOLS = [tool("f", CITY), tool("g"), tool("tree", TREE), tool("nested", NESTED)]


def test_a_named_call() -> None:
    toolset = read(TOOLS, choose("f"))
    assert toolset.is_forced and toolset.named == "f"
    assert allows(toolset, {"city": "Rome"})
    for answer in ({}, {"city": 5}, {"city": "a", "b": 1}, '{"city": "a"}', "[]", "Sure"):
        assert not allows(toolset, answer), answer
    assert allows(read(TOOLS, choose("g")), {}) and not allows(read(TOOLS, choose("g")), {"a": 1})
    assert allows(read(TOOLS, choose("tree")), {"root": {"value": 1, "next": {"value": 2}}, "size": "s"})
    assert allows(read([tool("h", {"properties": {"a": {"type": "null"}}})], choose("h")), {"a": None})
    assert not allows(read([tool("h", {"properties": {"a": {"type": "null"}}})], choose("h")), "5")


def entry(name: str, parameters: Any) -> dict[str, Any]:
    return {"name": name, "parameters": parameters}


def test_any_calls() -> None:
    toolset = read(TOOLS, "required")
    rome, tree = entry("f", {"city": "Rome"}), entry("tree", {"root": {"value": 1, "next": {"value": 2}}, "size": "m"})
    nested = entry("nested", {"inner": {"inner": {}}})
    for answer in ([rome], [rome, rome], [entry("g", {}), tree, nested]):
        assert allows(toolset, answer), answer
    for answer in (
        [],
        rome,
        [entry("h", {})],
        [entry("f", {})],
        [entry("g", {"city": "Rome"})],
        [entry("tree", {"root": {"value": "x"}})],
        [entry("tree", {"root": {"value": 1}, "size": "x"})],
        [entry("nested", {"inner": {"city": "x"}})],
        [entry("nested", [rome])],
        [{**rome, "more": 1}],
        json.dumps([rome]),
    ):
        assert not allows(toolset, answer), answer
    single = read(TOOLS, "required", False)
    assert allows(single, [rome]) and not allows(single, [rome, rome])


def test_references_move_and_data_does_not() -> None:
    data = {"$ref": "#/x"}
    schema = {
        "properties": {
            "$ref": {"type": "string", "default": data},
            "enum": {"$ref": "#/$defs/a%20b~1c"},
            "x": {"const": data, "enum": [data], "examples": [data], "anyOf": [{"$ref": "#/properties/enum"}]},
            "far": {"$ref": "https://example.org/x#/y"},
        },
        "$defs": {"a b/c": {"items": [{"$ref": ""}]}},
    }
    params = read([tool("f", schema)], "required").structured_outputs()
    assert params is not None
    moved = json.loads(str(params.json))["$defs"]["tool0"]
    assert moved == {
        "type": "object",
        "properties": {
            "$ref": {"type": "string", "default": data},
            "enum": {"$ref": "#/$defs/tool0/$defs/a%20b~1c"},
            "x": {
                "const": data,
                "enum": [data],
                "examples": [data],
                "anyOf": [{"$ref": "#/$defs/tool0/properties/enum"}],
            },
            "far": {"$ref": "https://example.org/x#/y"},
        },
        "$defs": {"a b/c": {"items": [{"$ref": ""}]}},
    }


@pytest.mark.parametrize(
    ("schema", "choice", "field", "reason"),
    [
        ({"$ref": "#node", "$defs": {"n": {"$anchor": "node"}}}, "required", "tools[1].function.parameters", "anchor"),
        ({"properties": {"a": {"$id": "x"}}}, "required", "tools[1].function.parameters", "id"),
        ({"description": "x" * 70_000}, "required", "tools", "bytes"),
        ({"description": "x" * 70_000}, choose("f"), "tools[1].function.parameters", "bytes"),
        ({"x-guidance": {}}, choose("f"), "tools[1].function.parameters", "x-guidance"),
    ],
)
def test_schemas_that_cannot_be_forced(schema: dict[str, Any], choice: Any, field: str, reason: str) -> None:
    tools = [tool("g"), tool("f", schema)]
    assert read(tools).describe() is not None
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        read(tools, choice).structured_outputs()
    assert caught.value.field == field
