"""Every malformed constraint is refused by the name of its field, whatever its size."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve import structured_checks
from jaxserve.errors import InvalidRequestError
from jaxserve.structured_params import StructuredOutputsParams
from tests.examples import scale_examples


def make_nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def make_shared(depth: int) -> dict[str, Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value] * 100
    return {"enum": value}


CYCLE: dict[str, Any] = {}
CYCLE["items"] = CYCLE
REFUSED = [
    ({}, "structured_outputs", "exactly one"),
    ({"json_object": False}, "structured_outputs", "got none"),
    ({"regex": "a", "choice": ["b"]}, "structured_outputs", "got regex, choice"),
    ({"json": {}, "json_object": True}, "structured_outputs", "got json, json_object"),
    ({"structural_tag": "{}"}, "structured_outputs.structural_tag.structures", "not empty"),
    ({"structural_tag": "{}", "regex": "a"}, "structured_outputs", "got regex, structural_tag"),
    ({"jsn": {}}, "structured_outputs.jsn", "not known"),
    ({"json_object": "yes"}, "structured_outputs.json_object", "true or false"),
    ({"json": []}, "structured_outputs.json", "must be a JSON object"),
    ({"json": "true"}, "structured_outputs.json", "must be a JSON object"),
    ({"json": "{"}, "structured_outputs.json", "not JSON"),
    ({"json": '{"minimum": NaN}'}, "structured_outputs.json", "NaN"),
    ({"json": '{"minimum": 1e999}'}, "structured_outputs.json", "not JSON"),
    ({"json": {"minimum": float("inf")}}, "structured_outputs.json", "not JSON"),
    ({"json": {"minimum": 10**5000}}, "structured_outputs.json", "an integer of 16610 bits is beyond"),
    ({"json": {"minimum": -(2**53) - 1}}, "structured_outputs.json", "-9007199254740993"),
    ({"json": {"minProperties": 2}}, "structured_outputs.json", "minProperties 2"),
    ({"json": {"enum": [b"x"]}}, "structured_outputs.json", "not JSON"),
    ({"json": {1: 2}}, "structured_outputs.json", "key 1"),
    ({"json": {"const": "\ud800"}}, "structured_outputs.json", "surrogate"),
    ({"json": '"' + "a" * 70_000 + '"'}, "structured_outputs.json", "65536 bytes"),
    ({"json": {"const": "é" * 40_000}}, "structured_outputs.json", "65536 bytes"),
    ({"json": make_nested(65)}, "structured_outputs.json", "64 levels"),
    ({"json": make_nested(100_000)}, "structured_outputs.json", "64 levels"),
    ({"json": "[" * 60_000}, "structured_outputs.json", "nested"),
    ({"json": CYCLE}, "structured_outputs.json", "64 levels"),
    ({"json": make_shared(10)}, "structured_outputs.json", "65536 bytes"),
    ({"json": {"enum": list(range(4097))}}, "structured_outputs.json", "4097 items"),
    ({"json": {"properties": {str(n): {} for n in range(1001)}}}, "structured_outputs.json", "1001 members"),
    ({"json": {"x-guidance": {"lenient": True}}}, "structured_outputs.json", "x-guidance"),
    ({"regex": ""}, "structured_outputs.regex", "non-empty"),
    ({"regex": "a" * 20_000}, "structured_outputs.regex", "16384 bytes"),
    ({"regex": "a\\\\\\"}, "structured_outputs.regex", "escapes nothing"),
    ({"regex": 3}, "structured_outputs.regex", "non-empty string"),
    ({"choice": []}, "structured_outputs.choice", "1 to 4096"),
    ({"choice": "abc"}, "structured_outputs.choice", "list of strings"),
    ({"choice": ["a", ""]}, "structured_outputs.choice", "non-empty"),
    ({"choice": ["a", 1]}, "structured_outputs.choice", "non-empty"),
    ({"choice": ["a" * 2000]}, "structured_outputs.choice", "1024 bytes"),
    ({"choice": [str(n) for n in range(4097)]}, "structured_outputs.choice", "4097"),
    ({"choice": [str(n) * 200 for n in range(1000)]}, "structured_outputs.choice", "65536 bytes in all"),
    ({"grammar": '{"grammars": []}'}, "structured_outputs.grammar", "Lark"),
    ({"grammar": 'start: a\na[temperature=0.5]: "x"'}, "structured_outputs.grammar", "temperature="),
    ({"grammar": 'start: a\na[lazy, stop="."]: /.*/'}, "structured_outputs.grammar", "stop="),
    ({"grammar": 'start: a\na[capture="x", temperature=0.5]: /.*/'}, "structured_outputs.grammar", "temperature="),
    ({"grammar": "start: a\na[suffix=/b/, temperature = 1]: /.*/"}, "structured_outputs.grammar", "temperature="),
    ({"grammar": "start: a\na[temperature=+0.5]: /.*/"}, "structured_outputs.grammar", "temperature="),
    ({"grammar": 'start: a /"/\na[stop="x"]: /"/ # "'}, "structured_outputs.grammar", "stop="),
    ({"grammar": 'start: a </s>\na[stop="x"]: /b/'}, "structured_outputs.grammar", "stop="),
    ({"regex": "a", "disable_any_whitespace": True}, "structured_outputs.disable_any_whitespace", "not to regex"),
    ({"choice": ["a"], "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern", "not to choice"),
    ({"json": {}, "whitespace_pattern": ""}, "structured_outputs.whitespace_pattern", "non-empty"),
    (
        {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
        "structured_outputs.whitespace_pattern",
        "contradicts",
    ),
]


@pytest.mark.parametrize(("options", "field", "reason"), REFUSED)
def test_refused(options: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputsParams(**options)
    assert caught.value.field == field
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 400


def test_equal_constraints_have_equal_keys() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    first, second = StructuredOutputsParams(json=schema), StructuredOutputsParams(json=json.dumps(schema, indent=2))
    assert first == second and first.key == second.key and hash(first) == hash(second)
    other = StructuredOutputsParams(json={"type": "object", "properties": {"a": {}, "b": {}}})
    assert other.key != first.key, "the order of properties is the order of the output"
    assert StructuredOutputsParams(json=schema, disable_any_whitespace=True).key != first.key
    assert StructuredOutputsParams(regex="a").key != StructuredOutputsParams(grammar="a").key


def test_accepted() -> None:
    assert StructuredOutputsParams(json={}).kind == "json"
    assert StructuredOutputsParams(json=make_nested(64)).kind == "json"
    assert StructuredOutputsParams(choice=["b", "a", "b"]).choice == ("b", "a")
    text = 'start: "[stop=\\"x\\", temperature=1]" // comment'
    assert StructuredOutputsParams(grammar=text).grammar == text, "text in quotes is no option"
    text = 'start: /[temperature=1]+"/ # a[stop="x"] would be one\n// [temperature=1]'
    assert StructuredOutputsParams(grammar=text).grammar == text, "nor is a regex or a comment"


@pytest.mark.parametrize(
    "text", ['"' + '\\"' * 32_000, "/" + "\\/" * 32_000, "[" * 60_000, "[a" * 32_000, "<a" * 32_000]
)
def test_grammars_are_looked_at_in_no_time(text: str) -> None:
    """Nothing else of the process runs meanwhile."""
    start = time.process_time()
    StructuredOutputsParams(grammar=text)
    assert time.process_time() - start < 1


@settings(max_examples=scale_examples(200), deadline=None)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_schema_is_normalised_or_refused(value: Any) -> None:
    try:
        params = StructuredOutputsParams(json=value)
    except InvalidRequestError:
        return
    assert json.loads(str(params.json)) == value
    assert len(str(params.json).encode()) <= structured_checks.MAX_SCHEMA_BYTES
