"""Numbers of JSON end: a model that prefers digits comes to the end of its answer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from jaxserve.features.grammars import GrammarCompiler, Matcher
from jaxserve.features.grammars.digits import MOST_EXPONENT, MOST_FRACTION, MOST_INTEGER, MOST_WHOLE
from jaxserve.structured_params import StructuredOutputsParams
from tests.features.grammars.test_blanks import accepts
from tests.features.grammars.walks import list_allowed

MAX_TOKENS = 120
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TEXT = json.dumps(SCHEMA)


def write_digits(matcher: Matcher, begin: bytes = b"", prefers: bytes = b"8") -> str:
    """Returns the text of a model that prefers one digit, and else what makes the number longer."""
    tokens, text = matcher.vocabulary.tokens, begin
    for byte in begin:
        matcher.accept(tokens.index(bytes([byte])))
    for _ in range(MAX_TOKENS):
        by_text = {tokens[token_id]: token_id for token_id in list_allowed(matcher)}
        piece = next((each for each in (prefers, b".", b"e") if each in by_text), None)
        if piece is None and matcher.is_accepting:
            return text.decode()
        piece = piece or (b"}" if b"}" in by_text else min(by_text))
        matcher.accept(by_text[piece])
        text += piece
    raise AssertionError(f"no end after {MAX_TOKENS} tokens: {text!r}")


@pytest.mark.parametrize(
    "options",
    [
        {"json": SCHEMA},
        {"json": SCHEMA, "disable_any_whitespace": True},
        {"json": {**SCHEMA, "properties": {"a": {"type": "integer", "minimum": 5}}}},
        {"grammar": f"start: %json {TEXT}"},
        {"grammar": f'start: (/[^<]*/ "<call>" %json {TEXT} "</call>")'},
    ],
)
def test_an_integer_ends(compiler: GrammarCompiler, options: dict[str, Any]) -> None:
    begin = b'8 <call>{"a":' if "call" in options.get("grammar", "") else b'{"a":'
    text = write_digits(compiler.compile(StructuredOutputsParams(**options)).new_matcher(), begin)
    value = json.loads(text.removeprefix("8 <call>").removesuffix("</call>"))["a"]
    assert str(value) == "8" * MOST_INTEGER


def test_a_number_ends_in_each_of_its_parts(compiler: GrammarCompiler) -> None:
    for schema in ({"type": "number"}, {"type": ["number", "null"]}):
        text = write_digits(compiler.compile(StructuredOutputsParams(json=schema)).new_matcher(), b"8")
        assert text == f"{'8' * MOST_WHOLE}.{'8' * MOST_FRACTION}e{'8' * MOST_EXPONENT}"


@pytest.mark.parametrize(("bound", "begin"), [("exclusiveMinimum", b"0."), ("minimum", b"-0.")])
def test_zeros_behind_the_point_end_where_a_bound_asks_for_more(
    compiler: GrammarCompiler, bound: str, begin: bytes
) -> None:
    schema = {"type": "number", bound: 0 if bound != "minimum" else -3}
    text = write_digits(compiler.compile(StructuredOutputsParams(json=schema)).new_matcher(), begin, b"0")
    assert float(text) and len(text) <= len(begin) + MOST_FRACTION + 1 + len("e000")


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer"}, "-" + "9" * MOST_INTEGER),
        ({"type": "number"}, f"-{'9' * MOST_WHOLE}.{'9' * MOST_FRACTION}E-{'9' * MOST_EXPONENT}"),
        ({"type": "string"}, '"' + "8" * 40 + '"'),
        ({"type": "string"}, '"1.' + "8" * 40 + '"'),
        ({"type": "string", "pattern": "^[0-9]{30}$"}, '"' + "8" * 30 + '"'),
        ({"type": "string", "pattern": "^x[0-9]+$"}, '"x' + "8" * 30 + '"'),
        ({"type": "array", "items": {"type": "integer"}}, str([10**18] * 5)),
        ({"type": "object", "additionalProperties": True}, f'{{"{"8" * 40}": "{"9" * 40}"}}'),
    ],
)
def test_what_is_short_enough_or_no_number_stays(compiler: GrammarCompiler, schema: dict[str, Any], text: str) -> None:
    assert accepts(compiler.compile(StructuredOutputsParams(json=schema)).new_matcher(), text)


def test_what_is_too_long_is_refused(compiler: GrammarCompiler) -> None:
    for schema, text in (
        ({"type": "integer"}, "1" * (MOST_INTEGER + 1)),
        ({"type": "number"}, "1" * (MOST_WHOLE + 1)),
        ({"type": "number"}, "0." + "1" * (MOST_FRACTION + 1)),
        ({"type": "number"}, "1e" + "1" * (MOST_EXPONENT + 1)),
        ({}, "[1, " + "1" * (MOST_WHOLE + 1) + "]"),
    ):
        assert not accepts(compiler.compile(StructuredOutputsParams(json=schema)).new_matcher(), text), text


def test_free_text_beside_json_has_no_limit(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputsParams(grammar='start: /[^<]*/ ("<" %json {"type": "integer"})?'))
    assert accepts(grammar.new_matcher(), "8" * 60)
    assert accepts(grammar.new_matcher(), "8" * 60 + "<5")


def test_the_limit_holds_along_drafts(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputsParams(json={"type": "integer"}))
    matcher, tokens = grammar.new_matcher(), grammar.vocabulary.tokens
    digit, words = tokens.index(b"8"), -(-len(tokens) // 32)
    for _ in range(MOST_INTEGER - 2):
        matcher.accept(digit)
    lines = np.zeros((5, words), np.uint32)
    matcher.fill_mask(lines[0])
    matcher.fill_along([digit] * 4, lines, matcher.version)
    assert [bool(row[digit // 32] >> (digit % 32) & 1) for row in lines] == [True, True, False, False, False]
