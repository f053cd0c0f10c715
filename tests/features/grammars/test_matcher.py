"""A copied matcher goes on like the original; the end of a text, forced tokens, a spent lexer and threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from jaxserve.features.grammars import Grammar, GrammarCompiler, Matcher, MatcherError
from jaxserve.features.grammars import shards as module
from jaxserve.structured_params import StructuredOutputsParams
from jaxserve.tokenizers import Tokenizer
from tests.features.grammars.schemas import REALISTIC, make_object
from tests.features.grammars.walks import list_allowed, walk

CONSTRAINTS = {
    "json": {"json": REALISTIC["order"]},
    "tree": {"json": REALISTIC["tree"]},
    "choice": {"choice": ["positive", "negative", "neutral", "none"]},
    "regex": {"regex": "[a-c]{2,9}x?"},
    "max_tokens": {"grammar": 'start: a "." b\na[max_tokens=3]: /[a-z ]+/\nb: /[0-9]{1,3}/'},
}


@pytest.fixture(params=CONSTRAINTS)
def grammar(request: pytest.FixtureRequest, compiler: GrammarCompiler) -> Grammar:
    return compiler.compile(StructuredOutputsParams(**CONSTRAINTS[request.param]))


def check_equal(left: Matcher, right: Matcher) -> None:
    assert left.token_ids == right.token_ids
    assert (left.is_finished, left.is_accepting) == (right.is_finished, right.is_accepting)
    assert list_allowed(left) == list_allowed(right)
    assert left.forced_tokens() == right.forced_tokens()


def test_a_copy_equals_continuing(grammar: Grammar) -> None:
    for seed in range(4):
        rng = np.random.default_rng(seed)
        whole = grammar.new_matcher()
        walk(whole, rng)
        ids = whole.token_ids
        going, copied = grammar.new_matcher(), grammar.new_matcher()
        for at in range(len(ids) + 1):
            if at % 5 == 0 or at >= len(ids) - 2:
                check_equal(copied, going)
                copied = going.copy()
                check_equal(copied, going)
            if at < len(ids):
                going.accept(ids[at])
                copied.accept(ids[at])


def test_a_copy_is_independent(grammar: Grammar) -> None:
    matcher = grammar.new_matcher()
    before = list_allowed(matcher)
    walk(matcher.copy(), np.random.default_rng(0))
    assert matcher.token_ids == () and list_allowed(matcher) == before


def test_the_end(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputsParams(choice=["a", "ab"]))
    tokens, (eos, *_) = grammar.vocabulary.tokens, grammar.vocabulary.eos_token_ids
    a, b = tokens.index(b"a"), tokens.index(b"b")
    matcher = grammar.new_matcher()
    with pytest.raises(MatcherError, match="does not allow the token id"):
        matcher.accept(eos)
    matcher.accept(a)
    assert matcher.is_accepting and not matcher.is_finished and eos in list_allowed(matcher)
    matcher.accept(b)
    assert matcher.is_accepting and matcher.is_finished and list_allowed(matcher) == [eos]
    assert matcher.forced_tokens() == []
    with pytest.raises(MatcherError):
        matcher.accept(b)
    matcher.accept(eos)
    assert list_allowed(matcher) == [eos], "whatever a step in flight samples next is an end again"
    with pytest.raises(MatcherError, match="after its end"):
        matcher.accept(eos)


def test_forced_tokens_lead_on(compiler: GrammarCompiler) -> None:
    schema = make_object({"temperature": {"const": 1}, "unit": {"enum": ["celsius", "kelvin"]}})
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    matcher = compiler.compile(params).new_matcher()
    num_forced = 0
    for _ in range(40):
        if matcher.is_finished:
            break
        forced = matcher.forced_tokens()
        for token_id in forced or list_allowed(matcher)[:1]:
            assert token_id in list_allowed(matcher)
            matcher.accept(token_id)
        num_forced += len(forced)
    assert matcher.is_finished and num_forced > 3


def test_forced_tokens_do_not_wait_for_a_mask(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(StructuredOutputsParams(choice=["hello"])).new_matcher()
    assert matcher.forced_tokens() != []
    with matcher._lock:  # as while a thread computes the mask
        assert matcher.forced_tokens() == []
    assert matcher.forced_tokens() != []


def test_a_spent_lexer_is_replaced_once(demo: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two matchers share a lexer; when it stops for good both go on with a new one, and a second time they fail."""
    other = GrammarCompiler(demo, num_shards=1)
    other.warm_up()  # the worker has the real limits
    monkeypatch.setattr(module, "LIMITS", {**module.LIMITS, "max_lexer_states": 30})
    grammar = other.compile(StructuredOutputsParams(regex="([a-z]{3}[0-9]{2}){1,9}"))
    other.close()
    matchers = [grammar.new_matcher() for _ in range(2)]
    tokens = grammar.vocabulary.tokens
    failures: list[MatcherError] = []
    for matcher in matchers:
        try:
            for character in "abc12def34ghi56jkl78":
                list_allowed(matcher)
                matcher.accept(tokens.index(character.encode()))
        except MatcherError as error:
            failures.append(error)
    assert failures and all("too many states" in str(error) for error in failures)
    assert sum(matcher._was_recovered for matcher in matchers) == 2
    assert grammar.new_matcher().forced_tokens() == []


def test_threads_may_share_a_grammar(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredOutputsParams(json=REALISTIC["order"]))
    expected = [walk(grammar.new_matcher(), np.random.default_rng(seed)) for seed in range(8)]
    found: dict[int, bytes] = {}

    def run(seed: int) -> None:
        found[seed] = walk(grammar.new_matcher(), np.random.default_rng(seed))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[seed] for seed in range(8)] == expected
