"""Structural tags: free text, and wherever a trigger appears a tag whose content has its form."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.features.grammars import GrammarCompiler, Matcher, MatcherError
from jaxserve.features.grammars.structural_tags import write_structural_tag
from jaxserve.structured_params import StructuredOutputsParams
from jaxserve.tokenizers import Tokenizer
from tests.features.grammars.walks import wander

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
ROME = '{"city": "Rome"}'
ANY = {"type": "any_text"}
WORD = {"type": "regex", "pattern": "[a-z]+"}


def tag(begin: Any, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def row(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(parts)}


def triggered(**options: Any) -> dict[str, Any]:
    tags = [tag("<f>", const("x"), "</f>"), tag("<fg>", const("y"), "</f>")]
    return {"type": "triggered_tags", "triggers": ["<f"], "tags": tags, **options}


X, Y = "<f>x</f>", "<fg>y</f>"
STRUCTURES = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=f>", "schema": CITY, "end": "</function>"},
        {"begin": "<function=g>", "end": "</function>"},
        {"begin": "[x]", "schema": {"type": "boolean"}, "end": ""},
    ],
    "triggers": ["<function=", "[x"],
}
OPENING = re.compile(r"<function=(.)>\s*|\[x\]\s*")
SPECIAL = {
    "type": "triggered_tags",
    "triggers": ["<f", "<|system|>"],
    "tags": [
        tag("<f>", WORD, {"type": "token", "token": 5}),
        tag("<|system|>x", const("q<|user|>w"), ""),
    ],
}
# A format, texts of it, and others.
FORMATS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "tag": (tag("<a>", ANY, "</a>"), ["<a></a>", "<a>b <a></a>"], ["", "<a>", "<a></a>b", "b<a></a>"]),
    "ends": (tag("<a>", WORD, ["!", "</a>"]), ["<a>b!", "<a>b</a>"], ["<a>b", "<a>!", "<a>b!</a>"]),
    "greedy regex": (tag("<a>", {"type": "regex", "pattern": ".*"}, "</a>"), ["<a>b</a>"], ["<a>", "<a>b</a></a>"]),
    "triggered": (triggered(), ["", "a", X, f"a{X}b{Y} <"], ["<f", "<f>", "<f>y</f>", "a<fx", f"{X}<f>"]),
    "at least one": (triggered(at_least_one=True), [X, X + Y, f"{X} a{Y}b"], ["", "a", f"a{X}"]),
    "only one": (triggered(stop_after_first=True), ["", "a", f"a{X}"], [X + Y, f"{X}a"]),
    "one": (triggered(at_least_one=True, stop_after_first=True), [X, Y], ["", f"a{X}", f"{X}a", X + Y]),
    "excludes": (triggered(excludes=["no"]), ["n", f"a{X}"], ["no", f"no{X}", f"{X}no"]),
    "in a tag": (tag("<r>", triggered(excludes=["</r>"]), "</r>"), ["<r></r>", f"<r>a{X}b</r>"], ["<r>", f"<r>{X}"]),
    "separated": (
        {"type": "tags_with_separator", "tags": triggered()["tags"], "separator": ","},
        ["", X, f"{X},{Y},{X}"],
        [",", X + Y, f"{X},", "a"],
    ),
    "unseparated": (
        {"type": "tags_with_separator", "tags": triggered()["tags"], "separator": "", "at_least_one": True},
        [X, X + Y],
        ["", f"{X},{Y}"],
    ),
    "separated once": (
        {"type": "tags_with_separator", "tags": triggered()["tags"], "separator": ",", "stop_after_first": True},
        ["", X],
        [f"{X},{Y}"],
    ),
    "dispatch": (
        {"type": "dispatch", "rules": [["<f>", const("1")], ["<g>", const("q")]]},
        ["", "a<f>1b<g>q<f>1"],
        ["<f>", "<f>q"],
    ),
    "dispatch once": (
        {"type": "dispatch", "rules": [["<f>", const("1")]], "loop": False},
        ["", "a<f>1"],
        ["<f>1b"],
    ),
    "reasoning first": (
        row(tag("<think>", ANY, "</think>"), triggered()),
        ["<think></think>", f"<think><fx</think>a{X}"],
        ["a", "<think>", "<think></think><fx"],
    ),
    "text before a text": (
        row({"type": "any_text", "excludes": ["no"]}, const("END"), WORD, const("z")),
        ["ENDaz", "a ENDabz"],
        ["noENDaz", "ENDz", "END"],
    ),
    "repeated": (
        row(
            {"type": "optional", "content": const("?")},
            {"type": "plus", "content": const("!")},
            {"type": "star", "content": const(".")},
            {"type": "repeat", "min": 1, "max": 2, "content": const("-")},
        ),
        ["!-", "?!!..--"],
        ["?-", "!", "!---"],
    ),
    "endless": ({"type": "repeat", "min": 2, "max": -1, "content": const("ab")}, ["abab", "ababab"], ["ab"]),
    "either": (
        {
            "type": "or",
            "elements": [
                {"type": "grammar", "grammar": 'root ::= "yes" | "no"'},
                {"type": "grammar", "grammar": "start: X\nX: /[0-9]/"},
                const('a "quoted"\n/text\\\x7f\u2028'),
            ],
        },
        ["yes", "4", 'a "quoted"\n/text\\\x7f\u2028'],
        ["", "x", "yes4"],
    ),
    "any JSON": ({"type": "json_schema", "json_schema": True}, ["[1]", "null"], ["", "a"]),
    "special tokens": (
        tag("<|user|>", SPECIAL, "\n<|assistant|>!"),
        [
            "<|user|>\n<|assistant|>!",
            "<|user|>a<f>bc<|system|>c\n<|assistant|>!",
            "<|user|><|system|>xq<|user|>w\n<|assistant|>!",
        ],
        ["<|user|>", "<|user|>a<|assistant|>!", "<|user|>a<f>\n<|assistant|>!"],
    ),
    "a token": (row(const("a"), {"type": "token", "token": "<|user|>"}, const("b")), ["a<|user|>b"], ["ab"]),
}  # fmt: skip


def fits(matcher: Matcher, tokenizer: Tokenizer, text: str) -> bool:

    for token in tokenizer.encode(text, add_special_tokens=False, allow_special=True):
        try:
            matcher.accept(token)
        except MatcherError:
            return False
    return matcher.is_accepting


def check(compiler: GrammarCompiler, demo: Tokenizer, given: Any, good: list[str], bad: list[str]) -> None:
    grammar = compiler.compile(StructuredOutputsParams(structural_tag=given))
    assert [text for text in good if not fits(grammar.new_matcher(), demo, text)] == []
    assert [text for text in bad if fits(grammar.new_matcher(), demo, text)] == []


@pytest.mark.parametrize("name", FORMATS)
def test_formats(compiler: GrammarCompiler, demo: Tokenizer, name: str) -> None:
    given, good, bad = FORMATS[name]
    check(compiler, demo, {"type": "structural_tag", "format": given}, good, bad)


def test_structures(compiler: GrammarCompiler, demo: Tokenizer) -> None:
    call = f"<function=f>{ROME}</function>"
    good = ["", "a <b>", call, f"a{call}b<function=g>3</function> <func", "[x]true"]
    bad = ["<function=", "<function=h>", "<function=f>{}</function>", "[x", "[x]1", f"{call}[x]"]
    for given in (STRUCTURES, json.dumps(STRUCTURES)):  # vLLM's field has text
        check(compiler, demo, given, good, bad)


def test_walks_fit_the_schemas(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputsParams(structural_tag=STRUCTURES))
    texts = [grammar.vocabulary(text) for text in ("<function=", "f>", "g>", "[x", "<")]
    seen = 0
    for seed in range(40):
        text = wander(grammar.new_matcher(), np.random.default_rng(seed), texts).decode()
        at = 0
        while (begun := OPENING.search(text, at)) is not None:
            value, at = json.JSONDecoder().raw_decode(text, begun.end())
            jsonschema.validate(value, CITY if begun[1] == "f" else {} if begun[1] else {"type": "boolean"})
            seen += 1
    assert seen > 20


FIELD = "structured_outputs.structural_tag"
REFUSED: list[tuple[Any, str, str]] = [  # a format, the field's end, a reason
    (None, ".structures", "list that is not empty"),
    ({}, ".format.type", "must be one of const_string"),
    ([], ".format", "must be an object"),
    ({"type": "qwen_xml_parameter", "json_schema": {}}, ".format.type", "must be one of"),
    ({"type": "any_tokens"}, ".format.type", "must be one of"),
    (const(""), ".format.value", "non-empty"),
    ({**const("a"), "values": 1}, ".format.values", "not supported here"),
    ({**ANY, "max_tokens": 5}, ".format.max_tokens", "not supported here"),
    ({**ANY, "excludes": [""]}, ".format.excludes[0]", "non-empty"),
    ({"type": "json_schema"}, ".format.json_schema", "JSON object"),
    ({"type": "json_schema", "json_schema": {}, "style": "glm_xml"}, ".format.style", "must be json"),
    ({"type": "json_schema", "json_schema": {}, "any_order": True}, ".format.any_order", "order of the schema"),
    ({"type": "json_schema", "json_schema": {"x-guidance": {}}}, ".format.json_schema", "x-guidance"),
    ({"type": "regex", "pattern": "a\\"}, ".format.pattern", "escapes nothing"),
    ({"type": "grammar", "grammar": 'start: a\na[stop="x"]: /b/'}, ".format.grammar", "stop="),
    (row(), ".format.elements", "not empty"),
    (row(ANY, WORD), ".format.elements[1]", "without an end"),
    ({"type": "star", "content": ANY}, ".format.content", "cannot be repeated"),
    ({"type": "repeat", "min": 2, "max": 1, "content": WORD}, ".format.max", "at least min"),
    ({"type": "repeat", "min": True, "max": 1, "content": WORD}, ".format.min", "whole number"),
    (tag("<a>", ANY, ""), ".format.end", "has no end"),
    (tag("<a>", ANY, None), ".format.end", "non-empty"),
    (tag("<a>", WORD, ["b", ""]), ".format.end[1]", "non-empty"),
    (tag(5, WORD, "b"), ".format.begin", "non-empty"),
    (tag({"type": "tok"}, WORD, "b"), ".format.begin.type", "must be token"),
    (tag({"type": "token", "token": 1.5}, WORD, "b"), ".format.begin.token", "special token"),
    (triggered(triggers=[]), ".format.triggers", "not empty"),
    (triggered(triggers=[""]), ".format.triggers[0]", "non-empty"),
    (triggered(triggers=["<f", "<"]), ".format.triggers[1]", "overlaps"),
    (triggered(triggers=["<f", "<f"]), ".format.triggers[1]", "overlaps"),
    (triggered(triggers=["<f", "<g"]), ".format.triggers[1]", "no tag begins"),
    (triggered(triggers=["<g"]), ".format.tags[0].begin", "starts with a trigger"),
    (triggered(tags=[]), ".format.tags", "not empty"),
    (triggered(tags=[const("a")]), ".format.tags[0].type", "must be tag"),
    (triggered(at_least_one=1), ".format.at_least_one", "true or false"),
    ({"type": "dispatch", "rules": [["a"]]}, ".format.rules[0]", "must be [text, format]"),
    ({"type": "dispatch", "rules": [["a", ANY]]}, ".format.rules[0][1]", "has no end"),
]


@pytest.mark.parametrize(("given", "field", "reason"), REFUSED)
def test_refused(given: Any, field: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        StructuredOutputsParams(structural_tag={"format": given} if given is not None else {})
    assert caught.value.field == FIELD + field and reason in str(caught.value)


def test_other_shapes_are_refused() -> None:
    deep: dict[str, Any] = const("a")
    for _ in range(40):
        deep = row(deep)
    for given, field, reason in (
        ({"type": "json", "format": ANY}, f"{FIELD}.type", "must be structural_tag"),
        ({**STRUCTURES, "format": ANY}, f"{FIELD}.structures", "not supported here"),
        ({**STRUCTURES, "triggers": ["<function="]}, f"{FIELD}.structures[2].begin", "starts with a trigger"),
        ({**STRUCTURES, "structures": [{"begin": "[x]"}]}, f"{FIELD}.structures[0].end", "non-empty"),
        ("{", FIELD, "not JSON"),
        ({"format": const("a" * 70_000)}, FIELD, "65536 bytes"),
        ({"format": deep}, FIELD, "64 levels"),
        ({"format": const("\ud800")}, FIELD, "surrogate"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            StructuredOutputsParams(structural_tag=given)
        assert caught.value.field == field and reason in str(caught.value)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (const("a<|end|>"), "the token in it that ends an answer"),
        (row(const("a"), {"type": "token", "token": 2}), "the token in it that ends an answer"),
        (row(const("a"), {"type": "token", "token": "<|call|>"}), "is no special token"),
        (row(const("a"), {"type": "token", "token": 77}), "is no special token"),
        (tag("<r>", triggered(), "<f"), "hide each other"),
        (tag("<r>", triggered(), "</r><f>"), "hide each other"),
        (triggered(triggers=["<|user|><"], tags=[tag("<|user|><f>", WORD, "!")]), "must end with its special token"),
        ({"type": "regex", "pattern": "("}, "invalid regex"),
        ({"type": "grammar", "grammar": "start: a"}, "a"),
        ({"type": "json_schema", "json_schema": {"type": "nope"}}, "nope"),
        (
            row({"type": "json_schema", "json_schema": {"allOf": [{"type": "string"}, {"type": "null"}]}}),
            "incompatible",
        ),
    ],
)
def test_refused_by_the_compiler(compiler: GrammarCompiler, given: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(reason)) as caught:
        compiler.compile(StructuredOutputsParams(structural_tag={"format": given}))
    assert caught.value.field == FIELD


def test_a_grammar_is_little_longer_than_its_tag(demo: Tokenizer) -> None:
    """It is written in the server's process, before the one that can be killed sees it."""
    names = [f"<{number:04}" for number in range(500)]
    tags = [tag(f"{name}<|user|>", const("a"), ".") for name in names]
    for triggers in (names, [f"{name}<|user|>" for name in names]):
        given = json.dumps(
            {"format": triggered(triggers=triggers, tags=tags, excludes=[f"no {at}" for at in range(500)])}
        )
        assert len(write_structural_tag(given, demo)) < 10 * len(given)
