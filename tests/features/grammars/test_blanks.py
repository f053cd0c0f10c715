"""Between the tokens of JSON there is room to indent, and an end for models that write nothing but blanks."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError
from jaxserve.features.grammars import GrammarCompiler, Matcher
from jaxserve.features.grammars.blanks import MOST_BLANKS
from jaxserve.structured_params import StructuredOutputsParams
from tests.features.grammars.walks import ENDINGS, list_allowed

MAX_TOKENS = 600
MOST = 34  # a line break of two characters and 32 blanks
# OpenAI's example of structured outputs.
STEP = {
    "type": "object",
    "properties": {"explanation": {"type": "string", "maxLength": 8}, "output": {"type": "string", "maxLength": 8}},
    "required": ["explanation", "output"],
    "additionalProperties": False,
}
MATHS = {
    "type": "object",
    "properties": {
        "steps": {"type": "array", "items": STEP, "minItems": 3, "maxItems": 9},
        "final_answer": {"type": "string", "maxLength": 8},
    },
    "required": ["steps", "final_answer"],
    "additionalProperties": False,
}
FORM = {
    "type": "object",
    "properties": {
        "first": {"enum": ["red", "green"]},
        "second": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
    },
    "required": ["first", "second"],
    "additionalProperties": False,
}
FORM_TEXT = json.dumps(FORM)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    # Whole code points: JSON text of anything else is no UTF-8.
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text("ab é", max_size=3), values, max_size=3),
    max_leaves=10,
)


def write_blanks(matcher: Matcher) -> str:
    """Returns the text of a model that prefers the longest blank there is, and else what ends something."""
    tokens, text = matcher.vocabulary.tokens, b""
    for _ in range(MAX_TOKENS):
        if matcher.is_accepting:
            return text.decode()
        by_text = {tokens[token_id]: token_id for token_id in list_allowed(matcher)}
        blanks = [piece for piece in by_text if piece.isspace()]
        endings = [piece for piece in ENDINGS if piece in by_text]
        piece = max(blanks, key=len) if blanks else (endings or sorted(by_text))[0]
        matcher.accept(by_text[piece])
        text += piece
    raise AssertionError(f"no end after {MAX_TOKENS} tokens: {text!r}")


def accepts(matcher: Matcher, text: str) -> bool:
    """Whether a text is one of the grammar's, in the tokens that the masks allow."""
    tokens, rest = matcher.vocabulary.tokens, text.encode()
    while rest:
        fitting = [
            token_id for token_id in list_allowed(matcher) if tokens[token_id] and rest.startswith(tokens[token_id])
        ]
        if not fitting:
            return False
        chosen = max(fitting, key=lambda token_id: len(tokens[token_id]))
        matcher.accept(chosen)
        rest = rest[len(tokens[chosen]) :]
    return matcher.is_accepting


@pytest.mark.parametrize(
    "options",
    [
        {"json": FORM},
        {"grammar": f"start: %json {FORM_TEXT}"},
        {"grammar": f'start: "" %json\n{FORM_TEXT}  // %json {{"type": 1\n'},
        {"grammar": f'start: %json {FORM_TEXT} | "%json {{" %json{FORM_TEXT}'},
    ],
)
def test_blanks_have_an_end(compiler: GrammarCompiler, options: dict[str, Any]) -> None:
    text = write_blanks(compiler.compile(StructuredOutputsParams(**options)).new_matcher())
    assert json.loads(text.removeprefix("%json {")).keys() == {"first", "second"}
    gaps = re.findall(r"\s+", text)
    assert gaps and all(len(gap) <= MOST and gap.count("\n") <= 1 for gap in gaps), gaps


@pytest.mark.parametrize("options", [{"json_object": True}, {"grammar": "start: %json true"}])
def test_where_a_value_begins_blanks_have_an_end_too(compiler: GrammarCompiler, options: dict[str, Any]) -> None:
    grammar = compiler.compile(StructuredOutputsParams(**options))
    gaps = ((" ", True), ("\t", True), ("\n", True), ("\n" + "\t" * 32, True), ("\r\n  ", True))
    for gap, fits in (*gaps, ("  ", False), ("\n" + " " * 33, False), ("\n\n", False), (" \n", False)):
        assert accepts(grammar.new_matcher(), f'{{"a":{gap}1}}') == fits, repr(gap)


def test_what_a_request_says_about_blanks_holds(compiler: GrammarCompiler) -> None:
    own = {"x-guidance": {"whitespace_pattern": "_"}, **FORM}
    for options in ({"json": FORM, "whitespace_pattern": "_"}, {"grammar": f"start: %json {json.dumps(own)}"}):
        matcher = compiler.compile(StructuredOutputsParams(**options)).new_matcher()
        assert accepts(matcher, '{_"first":_"red","second":[true,_false]_}')


def test_a_schema_in_a_grammar_that_is_no_json_is_refused(compiler: GrammarCompiler) -> None:
    for text in ('{"type": }', "[" * 5000, "nothing"):
        with pytest.raises(InvalidRequestError, match=r"^structured_outputs\.grammar: "):
            compiler.compile(StructuredOutputsParams(grammar=f"start: %json {text}"))


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(value=VALUES, indent=st.sampled_from([None, 2, 4]))
def test_whatever_python_writes_is_accepted(compiler: GrammarCompiler, value: Any, indent: int | None) -> None:
    grammar = compiler.compile(StructuredOutputsParams(json={}))
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    assert accepts(grammar.new_matcher(), text), text


def test_eight_levels_are_indented(compiler: GrammarCompiler) -> None:
    value: Any = 1
    for _ in range(4):
        value = {"a": [value]}
    grammar = compiler.compile(StructuredOutputsParams(json_object=True))
    text = json.dumps(value, indent=2)
    assert "\n" + " " * 16 + "1" in text and accepts(grammar.new_matcher(), text)
    assert accepts(grammar.new_matcher(), text.replace("\n", "\r\n"))


def test_the_blanks_of_a_nested_text_have_an_end_together(compiler: GrammarCompiler) -> None:
    """Those of one gap after the other would fill the context."""
    compact = StructuredOutputsParams(json=MATHS, disable_any_whitespace=True)
    least = len(write_blanks(compiler.compile(compact).new_matcher()))
    text = write_blanks(compiler.compile(StructuredOutputsParams(json=MATHS)).new_matcher())
    assert len(json.loads(text)["steps"]) == 3
    assert sum(map(str.isspace, text)) <= MOST_BLANKS + 2 * least
    long = {"a": "  " * 300, "b": [True] * 300}
    matcher = compiler.compile(StructuredOutputsParams(json_object=True)).new_matcher()
    assert accepts(matcher, json.dumps(long)), "in strings, and one behind each comma"


def test_the_limit_of_blanks_holds_along_drafts_and_in_copies(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputsParams(json={"type": "array", "items": {"enum": [1]}}))
    tokens = grammar.vocabulary.tokens
    line, blank, comma, value, begin = (tokens.index(text) for text in (b"\n", b" ", b",", b"1", b"["))
    gap, words = [line, *[blank] * 32], -(-len(tokens) // 32)
    text = [begin, *gap, value, comma, *gap, value, comma, *gap, value, comma, *gap]
    plain, rows = grammar.new_matcher(), []
    for token in text:
        rows.append(np.zeros(words, np.uint32))
        plain.fill_mask(rows[-1])
        plain.accept(token)
    rows.append(np.zeros(words, np.uint32))
    plain.fill_mask(rows[-1])
    left = [bool(row[blank // 32] >> (blank % 32) & 1) for row in rows]
    assert left[-6] and not left[-1]
    for count in (len(text) - 8, len(text) - 3):
        drafted = grammar.new_matcher()
        for token in text[:count]:
            drafted.accept(token)
        for matcher in (drafted, drafted.copy()):
            lines = np.zeros((9, words), np.uint32)
            matcher.fill_mask(lines[0])
            matcher.fill_along(text[count:], lines, matcher.version)
            num_equal = sum(map(np.array_equal, lines, rows[count:]))
            first_refused = next(at for at in range(count, len(rows)) if not left[at])
            assert num_equal >= first_refused - count + 1
