"""Structured outputs that cannot be kept."""

from __future__ import annotations

from typing import Any

from tests.server.refusals.refusal import Row


def nest(depth: int) -> dict[str, Any]:
    """Returns a JSON schema of objects within objects."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


_FORMS: list[dict[str, Any]] = [
    *({"json": schema} for schema in ("", "{", "[]", "NaN", "5")),
    {"json": {"type": "nope"}},
    {"json": {"type": 5}},
    {"json": {"properties": 5}},
    {"json": {"required": "a", "type": "object"}},
    {"json": {"enum": []}},
    {"json": {"enum": list(range(5000))}},
    {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
    *(
        {"json": {"$ref": target}}
        for target in ("#/nope", "#", "file:///etc/passwd", "http://127.0.0.1:1/x", "x.json", 5)
    ),
    {"json": nest(70)},
    {"json": {"type": "object", "properties": {str(number): {} for number in range(1001)}}},
    {"json": {"description": "Q" * 70_000}},
    {"json": {"type": "string", "pattern": "("}},
    {"json": {"type": "string", "pattern": "(?=a)"}},
    {"json": {"x-guidance": {}}},
    {"json": {"not": {"type": "string"}}},
    *(
        {"regex": text}
        for text in ("", "(", ")", "[", "a{2,1}", "(?=a)", "(?<!a)b", "\\1", "a\\", "(" * 5000, "[" * 1000)
    ),
    {"regex": "Q" * 20_000},
    {"regex": "((((a{1,100}){1,100}){1,100}){1,100})"},
    {"choice": []},
    {"choice": [""]},
    {"choice": ["a"] * 5000},
    {"choice": ["Q" * 2000]},
    {"choice": ["a" * 1000 + str(number) for number in range(100)]},
    *({"grammar": text} for text in ("", "{}", "start", "start: start", "start: a", "start: (", "a: b", "%%%")),
    {"grammar": "start: " + "(" * 3000},
    {"grammar": "start: " + "Q" * 3000},
    {"grammar": "Q" * 70_000},
    {"grammar": 'start: "a"[temperature=2]'},
    {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "},
]


def _name(form: dict[str, Any]) -> str:
    """Returns the last field, which is the wrong one."""
    return f"structured_outputs.{list(form)[-1]}"


def _trigger(triggers: list[Any], begin: str = "<f>", **more: Any) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": {"type": "object"}}
    tags = [{"type": "tag", "begin": begin, "content": content, "end": "</f>", **more}]
    return {"format": {"type": "triggered_tags", "triggers": triggers, "tags": tags}}


_NESTED: dict[str, Any] = {"type": "any_text"}
for _ in range(70):
    _NESTED = {"type": "or", "elements": [_NESTED]}
# Structural tags that cannot be kept, and where the error is.
TAGS: list[tuple[dict[str, Any], str]] = [
    ({}, ".structures"),
    ({"structures": []}, ".structures"),
    ({"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}]}, ".triggers"),
    ({"structures": [{"begin": "<f>", "schema": {}}], "triggers": ["<f"]}, ".structures[0].end"),
    ({"structures": [{"begin": "", "schema": {}, "end": ""}], "triggers": ["<f"]}, ".structures[0].begin"),
    ({"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": ["<f"], "format": {}}, ".format.type"),
    ({"format": {"type": "any_tokens"}}, ".format.type"),
    ({"format": _NESTED}, ""),
    ({"format": {"type": "const_string", "value": "Q" * 70_000}}, ""),
    ({"format": {"type": "regex", "pattern": "("}}, ""),
    ({"format": {"type": "regex", "pattern": "((((a{1,100}){1,100}){1,100}){1,100})"}}, ""),
    ({"format": {"type": "grammar", "grammar": "start: a"}}, ""),
    ({"format": {"type": "grammar", "grammar": "start: (\n}\nx: %lark {"}}, ""),
    ({"format": {"type": "json_schema", "json_schema": nest(60)}}, ""),
    ({"format": {"type": "json_schema", "json_schema": {"type": "nope"}}}, ""),
    ({"format": {"type": "json_schema", "json_schema": {"x-guidance": {}}}}, ".format.json_schema"),
    ({"format": {"type": "token", "token": "<|nope|>"}}, ""),
    ({"format": {"type": "const_string", "value": "<|end|>"}}, ""),
    (_trigger([]), ".format.triggers"),
    (_trigger([""]), ".format.triggers[0]"),
    (_trigger([5]), ".format.triggers[0]"),
    (_trigger(["<f", "f"]), ".format.triggers[1]"),
    (_trigger(["<f", "<g"]), ".format.triggers[1]"),
    (_trigger(["<g"]), ".format.tags[0].begin"),
    (_trigger(["<f"], end=[]), ".format.tags[0].end"),
    (_trigger(["<f"], end=None, content={"type": "any_text"}), ".format.tags[0].end"),
    (_trigger(["<f"], content={"type": "regex", "pattern": ")"}), ""),
    (_trigger(["<f"], depth=1), ".format.tags[0].depth"),
]

FORMS: list[Row] = [
    *(({"structured_outputs": form}, _name(form)) for form in _FORMS),
    *(
        ({"structured_outputs": {"structural_tag": given}}, f"structured_outputs.structural_tag{name}")
        for given, name in TAGS
    ),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": "("}}, "structured_outputs.json"),
]
