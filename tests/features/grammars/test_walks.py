"""Whatever allowed tokens are drawn, the text has the form that was asked for."""

from __future__ import annotations

import ast
import datetime
import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError
from jaxserve.features.grammars import GrammarCompiler
from jaxserve.structured_params import StructuredOutputsParams
from jaxserve.tokenizers import Tokenizer
from tests.features.grammars.schemas import REALISTIC, SCHEMAS
from tests.features.grammars.walks import list_allowed, walk

NUM_WALKS = 5
KINDS = ("make_llama3", "make_llama2", "make_sentencepiece")
REGEXES = {
    r"[0-9]{3}-[0-9]{4}": None,
    r"^(yes|no|maybe)$": r"(yes|no|maybe)",
    r"(?i)true|false": None,
    r"[A-Z][a-z]{1,8}( [A-Z][a-z]{1,8})?": None,
    r"-?(0|[1-9]\d{0,4})(\.\d{1,3})?": None,
    r"#[0-9a-fA-F]{6}": None,
    r"(\w{1,3}\s){2}end": None,
    r"[^a\n]{1,5}": None,
    r"日本(語|人)?|é+": None,
    r'"([^"\\]|\\["n]){0,6}"': None,
    r"a*?b": r"a*b",
    r"(a+)+b": r"a+b",
    "a/b \\{\\}\t\n?": None,
    "<\\|end\\|>|</s>": None,
}
CHOICES = [
    ["positive", "negative", "neutral"],
    ["a", "ab", "abc"],
    ['"quoted"', "back\\slash", "new\nline", "/slash/", "tab\t"],
    ["日本", "日", "😀", "é"],
    ["<|end|>", "</s>", "start: x", "{}", "A | B"],
    [" leading", "trailing ", " ", "\x7f"],
    [f"number {n}" for n in range(1500)],
]
GRAMMARS = {
    'start: "SELECT " NAME ("," " "? NAME)* ";"\nNAME: /[a-z]{1,5}/': r"SELECT [a-z]{1,5}(, ?[a-z]{1,5})*;",
    'start: expr\nexpr: expr "+" term | term\nterm: "(" expr ")" | /[0-9]{1,3}/': None,
    'start: "x=" %json {"type": "integer", "minimum": 3, "maximum": 5} "!"': r"x=[345]!",
    '%llguidance {"no_forcing": true}\nstart: "forced text " /[ab]/': r"forced text [ab]",
}


def compile_schema(compiler: GrammarCompiler, schema: dict[str, Any], **options: Any) -> Any:
    return compiler.compile(StructuredOutputsParams(json=schema, **options))


FORMATS = jsonschema.FormatChecker(["email", "ipv4", "uuid"])


@FORMATS.checks("date", raises=ValueError)
def is_date(value: object) -> bool:
    if isinstance(value, str):  # RFC 3339 has a year 0, Python has not
        datetime.date.fromisoformat("2000" + value[4:] if value.startswith("0000") else value)
    return True


def check_json(text: bytes, schema: dict[str, Any]) -> None:
    jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator, format_checker=FORMATS)


@pytest.mark.parametrize("name", REALISTIC)
def test_realistic_schemas(compiler: GrammarCompiler, demo: Tokenizer, name: str) -> None:
    grammar = compile_schema(compiler, REALISTIC[name])
    for seed in range(NUM_WALKS):
        matcher = grammar.new_matcher()
        text = walk(matcher, np.random.default_rng(seed))
        check_json(text, REALISTIC[name])
        assert demo.decode(matcher.token_ids, True).encode() == text


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, seed=st.integers(0, 2**32 - 1))
def test_generated_schemas(compiler: GrammarCompiler, schema: dict[str, Any], seed: int) -> None:
    grammar = compile_schema(compiler, schema)
    check_json(walk(grammar.new_matcher(), np.random.default_rng(seed)), schema)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer(kinds: dict[str, GrammarCompiler], kind: str) -> None:
    for name in ("person", "tree", "unicode", "pydantic"):
        grammar = compile_schema(kinds[kind], REALISTIC[name])
        for seed in range(2):
            check_json(walk(grammar.new_matcher(), np.random.default_rng(seed)), REALISTIC[name])


@pytest.mark.parametrize("kind", KINDS)
def test_forced_text_is_spelled_as_the_tokenizer_would(kinds: dict[str, GrammarCompiler], kind: str) -> None:
    compiler = kinds[kind]
    grammar = compiler.compile(StructuredOutputsParams(regex="hello world, the cat sat"))
    matcher = grammar.new_matcher()
    forced = matcher.forced_tokens()
    assert list_allowed(matcher) == [forced[0]]
    text = b"".join(grammar.vocabulary.tokens[token_id] for token_id in forced)
    assert text == b"hello world, the cat sat"[: len(text)] and len(text) > 10
    assert len(forced) < len(text) / 2, "whole words, not single letters"
    for token_id in forced:
        matcher.accept(token_id)


@pytest.mark.parametrize("options", [{}, {"disable_any_whitespace": True}, {"whitespace_pattern": " {1,2}"}])
def test_json_object_and_whitespace(compiler: GrammarCompiler, options: dict[str, Any]) -> None:
    grammar = compiler.compile(StructuredOutputsParams(json_object=True, **options))
    for seed in range(20):
        text = walk(grammar.new_matcher(), np.random.default_rng(seed))
        value = json.loads(text)
        assert isinstance(value, dict)
        outside = re.sub(rb'"(?:[^"\\]|\\.)*"', b'""', text)
        if "disable_any_whitespace" in options:
            assert not re.search(rb"\s", outside)
        if "whitespace_pattern" in options:
            assert not re.search(rb"[\t\n\r]| {3}", outside)


@pytest.mark.parametrize("regex", REGEXES)
def test_regexes(compiler: GrammarCompiler, regex: str) -> None:
    grammar = compiler.compile(StructuredOutputsParams(regex=regex))
    for seed in range(2 * NUM_WALKS):
        text = walk(grammar.new_matcher(), np.random.default_rng(seed)).decode()
        assert re.fullmatch(REGEXES[regex] or regex, text), text


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice[0].strip())
def test_choices(compiler: GrammarCompiler, choice: list[str]) -> None:
    grammar = compiler.compile(StructuredOutputsParams(choice=choice))
    texts = [walk(grammar.new_matcher(), np.random.default_rng(seed)).decode() for seed in range(4 * NUM_WALKS)]
    assert set(texts) <= set(choice)
    assert len(set(texts)) >= min(len(choice), 3), "the grammar leaves the choice to the model"


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_lark_grammars(compiler: GrammarCompiler, grammar: str) -> None:
    compiled = compiler.compile(StructuredOutputsParams(grammar=grammar))
    for seed in range(2 * NUM_WALKS):
        text = walk(compiled.new_matcher(), np.random.default_rng(seed)).decode()
        if GRAMMARS[grammar] is None:
            ast.parse(re.sub(r"\b0+(?=\d)", "", text), mode="eval")  # sums with parentheses
        else:
            assert re.fullmatch(GRAMMARS[grammar], text), text


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"if": {"type": "string"}, "then": {"minLength": 3}}, "then"),
        ({"type": "string", "format": "foo"}, "foo"),
        ({"type": "strin"}, "strin"),
        ({"$ref": "file:///etc/passwd"}, "does not fetch"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "unsatisfiable"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ],
)
def test_what_cannot_be_kept_is_refused(compiler: GrammarCompiler, schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^structured_outputs\.json: .*{reason}"):
        compile_schema(compiler, schema)
