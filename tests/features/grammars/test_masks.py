"""Masks against every token tried by hand, on a vocabulary that is small enough for that."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxserve.features.grammars import Grammar, GrammarCompiler, Matcher, MatcherError
from jaxserve.structured_params import StructuredOutputsParams
from tests.features.grammars.tiny import PIECES, TinyTokenizer
from tests.features.grammars.walks import list_allowed

TOKENS = TinyTokenizer().list_token_bytes()
LANGUAGES = {
    "words": (["and", "an", "na", "abc", "abcd"], '"and" | "an" | "na" | "abc" | "abcd"'),
    "accents": (["é", "éa", "aé"], '"é" | "éa" | "aé"'),
    "numbers": (["".join(p) for n in (1, 2, 3) for p in itertools.product("01", repeat=n)], "/[01]{1,3}/"),
    "spaces": (["a b", "a  b", "ab"], '"a" " "? " "? "b"'),
}


def compile_unforced(compiler: GrammarCompiler, rule: str) -> Grammar:
    """Without forced tokens, so that every spelling of a text is allowed."""
    return compiler.compile(StructuredOutputsParams(grammar=f'%llguidance {{"no_forcing": true}}\nstart: {rule}'))


def list_expected(texts: list[bytes], text: bytes) -> list[int]:
    ends = [1, 2] if text in texts else []
    more = [i for i in range(3, len(TOKENS)) if TOKENS[i] and any(t.startswith(text + TOKENS[i]) for t in texts)]
    return ends + more


def check_everywhere(matcher: Matcher, texts: list[bytes], text: bytes = b"") -> int:
    allowed = list_allowed(matcher)
    assert allowed == list_expected(texts, text), text
    count = 1
    for token_id in allowed:
        there = matcher.copy()
        there.accept(token_id)
        if token_id in (1, 2):
            assert there.is_finished
        else:
            count += check_everywhere(there, texts, text + TOKENS[token_id])
    return count


@pytest.mark.parametrize("name", LANGUAGES)
def test_masks_are_what_the_language_allows(tiny_compiler: GrammarCompiler, name: str) -> None:
    texts, rule = LANGUAGES[name]
    grammar = compile_unforced(tiny_compiler, rule)
    assert check_everywhere(grammar.new_matcher(), [text.encode() for text in texts]) > 10


@pytest.mark.parametrize("name", LANGUAGES)
def test_every_other_token_is_refused(tiny_compiler: GrammarCompiler, name: str) -> None:
    texts, rule = LANGUAGES[name]
    matcher = compile_unforced(tiny_compiler, rule).new_matcher()
    for token_id in set(range(-2, len(PIECES) + 40)) - set(list_expected([t.encode() for t in texts], b"")):
        with pytest.raises(MatcherError, match=f"token id {token_id} as token 1"):
            matcher.accept(token_id)
    assert check_everywhere(matcher, [text.encode() for text in texts]) > 10, "refused tokens left no trace"


def test_forced_text_has_one_spelling(tiny_compiler: GrammarCompiler) -> None:
    matcher = tiny_compiler.compile(StructuredOutputsParams(choice=["and10"])).new_matcher()
    assert list_allowed(matcher) == [PIECES.index("and")]
    assert [PIECES[i] for i in matcher.forced_tokens()][:1] == ["and"]
    matcher.accept(PIECES.index("a"))  # other spellings of the same text stay possible, as after a preemption
    matcher.accept(PIECES.index("n"))
    matcher.accept(PIECES.index("d"))
    assert list_allowed(matcher) == [PIECES.index("10")]


def test_bits_beyond_the_vocabulary_are_zero() -> None:
    for vocab_size in (len(PIECES), 32, 40, 64, 70, 12):
        compiler = GrammarCompiler(TinyTokenizer(), vocab_size=vocab_size)
        matcher = compiler.compile(StructuredOutputsParams(regex="[abcd]+")).new_matcher()
        row = np.full(4, 0xFFFFFFFF, np.uint32)
        expected = [i for i, token in enumerate(TOKENS[:vocab_size]) if token and set(token) <= set(b"abcd")]
        for _ in range(2):
            matcher.fill_mask(row)
            bits = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
            assert bits == expected
            matcher.accept(PIECES.index("a", 4))
            expected = [1, 2, *expected]
        compiler.close()


@pytest.mark.parametrize(
    "row", [np.zeros(0, np.uint32), np.zeros(4, np.uint8), np.zeros((1, 4), np.uint32), np.zeros(8, np.uint32)[::2]]
)
def test_unfit_rows_are_refused(tiny_compiler: GrammarCompiler, row: np.ndarray) -> None:
    matcher = tiny_compiler.compile(StructuredOutputsParams(regex="a")).new_matcher()
    with pytest.raises(ValueError, match="row: needs 1 contiguous uint32"):
        matcher.fill_mask(row)
