"""Automata against the matcher that they stand for: in every state the same tokens."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.features.grammars import Grammar, GrammarCompiler
from jaxserve.features.grammars.automaton import make_automaton
from jaxserve.structured_params import StructuredOutputsParams
from jaxserve.token_automaton import MAX_TRANSITIONS, TokenAutomaton
from tests.examples import scale_examples
from tests.features.grammars.walks import list_allowed

SMALL = {
    "yes or no": {"choice": ["yes", "no"]},
    "prefixes of each other": {"choice": ["a", "ab", "abc", "b"]},
    "letters": {"choice": ["A", "B", "C", "D"]},
    "accents": {"choice": ["é", "éa", "aé"]},
    "numbers": {"regex": "[1-9]|10"},
    "optional": {"regex": "(ab?c|b)(0|10)?"},
    "digits": {"regex": "[1-3][0-2]"},
}
OTHERS = {
    "endless": {"regex": "[ab]+"},
    "digits": {"regex": r"\d{6}"},
    "any character": {"regex": "."},
    "many choices": {"choice": [f"choice {n} of many" for n in range(200)]},
    "a forced text, to jump over": {"choice": ["the quick brown fox", "a cat"]},
}


def compile_one(compiler: GrammarCompiler, options: dict) -> Grammar:
    return compiler.compile(StructuredOutputsParams(**options))


def walk(grammar: Grammar, automaton: TokenAutomaton, rng: random.Random) -> bytes:
    """One text by random tokens; the automaton allows in each state what the matcher does."""
    matcher, ids = grammar.new_matcher(), []
    while True:
        allowed = list_allowed(matcher)
        assert automaton.list_allowed(automaton.find_state(ids)) == allowed, ids
        ids.append(rng.choice(allowed))
        matcher.accept(ids[-1])
        if ids[-1] in grammar.vocabulary.eos_token_ids:
            return b"".join(grammar.vocabulary.tokens[token] for token in ids[:-1])


@pytest.mark.parametrize("name", SMALL)
def test_it_allows_what_the_matcher_allows(kinds: dict[str, GrammarCompiler], compiler, name: str) -> None:
    rng = random.Random(0)
    grammars = [compile_one(one, SMALL[name]) for one in (compiler, *kinds.values())]
    followed = [grammar for grammar in grammars if grammar.automaton is not None]
    assert followed, "every tokenizer spells it with several forced tokens"
    for grammar in followed:
        texts = {walk(grammar, grammar.automaton, rng).decode() for _ in range(40)}
        if "choice" in SMALL[name]:
            assert texts == set(SMALL[name]["choice"])
        else:
            assert len(texts) > 3 and all(re.fullmatch(SMALL[name]["regex"], text) for text in texts)


@settings(max_examples=scale_examples(60), deadline=None)
@given(choices=st.lists(st.text("ab1", min_size=1, max_size=4), min_size=1, max_size=8), seed=st.integers(0, 2**32))
def test_choices(compiler: GrammarCompiler, choices: list[str], seed: int) -> None:
    grammar = compile_one(compiler, {"choice": choices})
    if grammar.automaton is not None:
        rng = random.Random(seed)
        assert {walk(grammar, grammar.automaton, rng).decode() for _ in range(5)} <= set(choices)


def test_states_are_where_their_transitions_begin(compiler: GrammarCompiler) -> None:
    automaton = compile_one(compiler, SMALL["digits"]).automaton
    states = [state for state, _, _ in automaton.transitions]
    assert states == sorted(states) and all(states.index(state) == state for state in states)
    assert automaton.transitions == tuple(sorted(automaton.transitions)) and len(states) <= MAX_TRANSITIONS
    assert {after for _, _, after in automaton.transitions} <= set(states)


@pytest.mark.parametrize("name", OTHERS)
def test_others_need_masks(compiler: GrammarCompiler, name: str) -> None:
    assert compile_one(compiler, OTHERS[name]).automaton is None


def test_other_kinds_have_none(compiler: GrammarCompiler) -> None:
    assert compile_one(compiler, {"json": {"enum": ["a", "b"]}}).automaton is None


def test_tokens_that_may_not_come_change_nothing(compiler: GrammarCompiler) -> None:
    grammar = compile_one(compiler, SMALL["yes or no"])
    first = grammar.automaton.list_allowed(0)
    foreign = next(token for token in range(300) if token not in first)
    assert grammar.automaton.find_state([foreign, *first[:1]]) == grammar.automaton.find_state(first[:1]) != 0


def test_what_takes_long_needs_masks(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = compile_one(compiler, SMALL["digits"])
    assert make_automaton(grammar.new_matcher()) == grammar.automaton
    monkeypatch.setattr("jaxserve.features.grammars.automaton._TIME_LIMIT_S", -1.0)
    assert make_automaton(grammar.new_matcher()) is None
