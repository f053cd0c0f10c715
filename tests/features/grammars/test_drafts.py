"""Masks along drafts equal those of a matcher that accepts the drafts one at a time, and leave no trace."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.features.grammars import Grammar, GrammarCompiler, Matcher, MatcherError
from jaxserve.features.grammars import shards as module
from jaxserve.structured_params import StructuredOutputsParams
from jaxserve.tokenizers import Tokenizer
from tests.features.grammars.schemas import REALISTIC, SCHEMAS
from tests.features.grammars.tiny import PIECES
from tests.features.grammars.walks import list_allowed, pick

NO_DRAFT, GARBAGE = -4, 0xDEADBEEF
CONSTRAINTS = {
    "order": {"json": REALISTIC["order"]},
    "tree": {"json": REALISTIC["tree"]},
    "unicode": {"json": REALISTIC["unicode"]},
    "object": {"json_object": True},
    "choice": {"choice": ["positive", "negative", "neutral", "none", "no"]},
    "regex": {"regex": r"[a-c]{2,9}x?|([0-9]{3}-)+end"},
    "sum": {"grammar": 'start: expr\nexpr: expr "+" term | term\nterm: "(" expr ")" | /[0-9]{1,3}/'},
    "max_tokens": {"grammar": 'start: a "." b\na[max_tokens=3]: /[a-z ]+/\nb: /[0-9]{1,3}/'},
    "forced": {"grammar": '%llguidance {"no_forcing": true}\nstart: "forced text " /[ab]/'},
}


def make_lines(matcher: Matcher, count: int) -> np.ndarray:
    """Returns `count` lines, the first with the mask here, the others with garbage."""
    lines = np.full((count, -(-len(matcher.vocabulary.tokens) // 32) + 1), GARBAGE, np.uint32)
    matcher.fill_mask(lines[0])
    return lines


def walk_along(matcher: Matcher, drafts: list[int]) -> list[np.ndarray]:
    """Returns the complete lines."""
    lines = make_lines(matcher, len(drafts) + 1)
    counts = [1]
    matcher.fill_along(drafts, lines, matcher.version, lambda count: bool(counts.append(count) or True))
    assert counts == list(range(1, len(counts) + 1))
    return list(lines[: len(counts)])


def expect_along(matcher: Matcher, drafts: list[int]) -> list[np.ndarray]:
    """Returns the same from a copy that accepts one draft at a time."""
    matcher = matcher.copy()
    lines = [make_lines(matcher, 1)[0]]
    for draft in drafts:
        if draft not in list_allowed(matcher) or draft in matcher.vocabulary.eos_token_ids:
            break
        matcher.accept(draft)
        if matcher.is_finished:
            break
        lines.append(make_lines(matcher, 1)[0])
    return lines


def check_equal(left: Matcher, right: Matcher) -> None:
    assert (left.token_ids, left.version) == (right.token_ids, right.version)
    assert (left.is_finished, left.is_accepting) == (right.is_finished, right.is_accepting)
    assert left.forced_tokens() == right.forced_tokens()
    assert list_allowed(left) == list_allowed(right)


def draw_drafts(matcher: Matcher, rng: np.random.Generator, count: int) -> list[int]:
    """Returns tokens that may follow each other; one of them may be replaced by something else."""
    ends, tokens = set(matcher.vocabulary.eos_token_ids), matcher.vocabulary.tokens
    there, drafts = matcher.copy(), []
    while len(drafts) < count and not there.is_finished:
        drafts.append(pick(list_allowed(there), ends, tokens, rng, hurry=bool(rng.random() < 0.3)))
        there.accept(drafts[-1])
    drafts += [int(rng.integers(len(tokens))) for _ in range(count - len(drafts))]
    if rng.random() < 0.4:
        wrong = [NO_DRAFT, -1, len(tokens), 2**31 - 1, min(ends), int(rng.integers(len(tokens)))]
        drafts[int(rng.integers(count))] = wrong[int(rng.integers(len(wrong)))]
    return drafts


def check_text(grammar: Grammar, rng: np.random.Generator, most: int = 50) -> int:
    """Writes a text with drafts at each of its tokens, beside a matcher that has none; returns the lines made."""
    drafting, plain = grammar.new_matcher(), grammar.new_matcher()
    ends, tokens, num_lines = set(grammar.vocabulary.eos_token_ids), grammar.vocabulary.tokens, 0
    for step in range(most):
        drafts = draw_drafts(plain, rng, int(rng.integers(1, 8)))
        found, expected = walk_along(drafting, drafts), expect_along(plain, drafts)
        assert len(found) == len(expected)
        np.testing.assert_array_equal(found, expected)
        check_equal(drafting, plain)
        num_lines += len(found)
        token_id = pick(list_allowed(plain), ends, tokens, rng, hurry=step > most // 2)
        drafting.accept(token_id)
        plain.accept(token_id)
        check_equal(drafting, plain)
        if plain.is_finished:
            return num_lines
    return num_lines


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_masks_along_drafts(compiler: GrammarCompiler, name: str) -> None:
    grammar = compiler.compile(StructuredOutputsParams(**CONSTRAINTS[name]))
    assert sum(check_text(grammar, np.random.default_rng(seed)) for seed in range(6)) > 20


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, seed=st.integers(0, 2**32 - 1))
def test_generated_schemas(compiler: GrammarCompiler, schema: dict[str, object], seed: int) -> None:
    check_text(compiler.compile(StructuredOutputsParams(json=schema)), np.random.default_rng(seed), most=25)


def test_where_a_walk_ends(tiny_compiler: GrammarCompiler) -> None:
    a, b, c = (PIECES.index(text, 4) for text in "abc")
    matcher = tiny_compiler.compile(StructuredOutputsParams(regex="[ab]{1,3}c?")).new_matcher()
    for drafts, count in [
        ([a, b, a, b], 4),  # a fourth letter is not allowed
        ([c, a], 1),
        ([a, 1, a], 2),  # an end of the text
        ([a, 2], 2),
        ([a, NO_DRAFT, a], 2),
        ([len(PIECES), a], 1),
        ([2**31 - 1, a], 1),
        ([a, c, 1], 2),  # complete for good: only an end may follow
        ([], 1),
    ]:
        assert len(walk_along(matcher, drafts)) == count, drafts
    for token_id in (a, c):
        matcher.accept(token_id)
    assert matcher.is_finished and len(walk_along(matcher, [1, a])) == 1
    assert matcher.is_finished and list_allowed(matcher) == [1, 2]
    matcher.accept(1)
    assert len(walk_along(matcher, [1, a])) == 1 and matcher.token_ids == (a, c, 1)


def test_a_forced_text_is_drafted_in_its_own_spelling(tiny_compiler: GrammarCompiler) -> None:
    matcher = tiny_compiler.compile(StructuredOutputsParams(choice=["and10"])).new_matcher()
    assert len(walk_along(matcher, [PIECES.index("and"), PIECES.index("10", 10)])) == 2
    assert len(walk_along(matcher, [PIECES.index("a", 4), PIECES.index("n")])) == 1, "a row can only draw `and`"


def test_a_walk_for_other_tokens_does_nothing(tiny_compiler: GrammarCompiler) -> None:
    a = PIECES.index("a", 4)
    matcher = tiny_compiler.compile(StructuredOutputsParams(regex="[ab]+")).new_matcher()
    lines = make_lines(matcher, 3)
    version = matcher.version
    matcher.accept(a)
    matcher.fill_along([a, a], lines, version)
    assert (lines[1:] == GARBAGE).all() and matcher.token_ids == (a,)


def test_unfit_lines_are_refused(tiny_compiler: GrammarCompiler) -> None:
    matcher = tiny_compiler.compile(StructuredOutputsParams(regex="[ab]+")).new_matcher()
    with pytest.raises(ValueError, match=r"lines: .*3, got 2"):
        matcher.fill_along([4, 4], np.zeros((2, 4), np.uint32), 0)
    with pytest.raises(ValueError, match="row: needs 1 contiguous uint32"):
        matcher.fill_along([4], np.zeros((2, 4), np.uint8), 0)


def test_a_walk_ends_when_told_and_accept_waits_for_one_mask(tiny_compiler: GrammarCompiler) -> None:
    a = PIECES.index("a", 4)
    matcher = tiny_compiler.compile(StructuredOutputsParams(regex="[ab]+")).new_matcher()
    lines, is_inside, goes, accepted = make_lines(matcher, 5), threading.Event(), threading.Event(), threading.Event()

    def hold(count: int) -> bool:
        is_inside.set()
        assert goes.wait(30)
        return count < 3

    def accept() -> None:
        matcher.accept(a)
        accepted.set()

    walker = threading.Thread(target=matcher.fill_along, args=([a] * 4, lines, 0, hold))
    walker.start()
    assert is_inside.wait(30)
    assert matcher.forced_tokens() == [], "which never waits"
    other = threading.Thread(target=accept)
    other.start()
    assert not accepted.wait(0.05), "the parser is at a draft"
    goes.set()
    walker.join()
    other.join()
    assert matcher.token_ids == (a,)
    assert (lines[2] != GARBAGE).any() and (lines[3:] == GARBAGE).all()


@pytest.fixture
def frail(demo: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Grammar:
    """A grammar whose lexer is spent after some ten characters."""
    other = GrammarCompiler(demo, num_shards=1)
    other.warm_up()  # the worker has the real limits
    monkeypatch.setattr(module, "LIMITS", {**module.LIMITS, "max_lexer_states": 30})
    grammar = other.compile(StructuredOutputsParams(regex="([a-z]{3}[0-9]{2}){1,9}"))
    other.close()
    return grammar


def test_grammars_that_cannot_roll_back_walk_on_copies(compiler: GrammarCompiler) -> None:
    for name, rolls_back in [("max_tokens", False), ("regex", True)]:
        matcher = compiler.compile(StructuredOutputsParams(**CONSTRAINTS[name])).new_matcher()
        token_ids = draw_drafts(matcher, np.random.default_rng(1), 3)
        for _ in range(2):
            assert len(walk_along(matcher, token_ids)) > 1
            assert matcher._rolls_back is rolls_back and matcher._may_walk


@pytest.mark.parametrize("rolls_back", [True, None])
def test_an_error_in_a_walk_costs_lines_only(frail: Grammar, rolls_back: bool | None) -> None:
    ids = [frail.vocabulary.tokens.index(bytes([character])) for character in b"abc12def34ghi56jkl78"]
    matcher = frail.new_matcher()
    matcher.accept(ids[0])
    matcher._rolls_back = rolls_back  # True: as after a first walk
    lines = make_lines(matcher, len(ids))
    counts: list[int] = []
    matcher.fill_along(ids[1:], lines, matcher.version, lambda count: not counts.append(count))
    assert 1 < counts[-1] < len(ids) - 1, "the limit is met on the way"
    assert not lines[counts[-1]].any() or (lines[counts[-1]] == GARBAGE).all()
    assert matcher.token_ids == (ids[0],) and not matcher._was_recovered
    assert not matcher._native.is_error()
    assert set(ids[1:3]) < set(list_allowed(matcher)), "the state is that behind the first letter"
    assert not set(ids[3:5]) & set(list_allowed(matcher))
    assert walk_along(matcher, ids[1:3])[1:] == [], "it walks no more"
    matcher.accept(ids[1])
    assert matcher.token_ids == tuple(ids[:2]) and list_allowed(matcher)
    assert not matcher.copy()._may_walk


def test_a_matcher_that_cannot_come_back_fails(frail: Grammar, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [frail.vocabulary.tokens.index(bytes([character])) for character in b"abc12def34ghi56jkl78"]
    matcher = frail.new_matcher()
    matcher.accept(ids[0])
    matcher._rolls_back = True  # as after a first walk
    lines = make_lines(matcher, len(ids))

    def refuse() -> None:
        raise MatcherError("the grammar does not compile again")

    monkeypatch.setattr(matcher._shards, "compile", refuse)
    matcher.fill_along(ids[1:], lines, matcher.version)
    for use in (lambda: matcher.fill_mask(lines[0]), lambda: matcher.accept(ids[1])):
        with pytest.raises(MatcherError, match="does not compile again"):
            use()
