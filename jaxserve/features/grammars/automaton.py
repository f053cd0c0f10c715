"""Turns grammars of a few short texts into automata, which the device follows without the host."""

from __future__ import annotations

import time
from collections.abc import Iterator

from jaxserve.features.grammars.errors import MatcherError
from jaxserve.features.grammars.matcher import Matcher
from jaxserve.features.grammars.vocabulary import Vocabulary
from jaxserve.token_automaton import MAX_STATE_TRANSITIONS, MAX_TRANSITIONS, TokenAutomaton

_TIME_LIMIT_S = 0.5  # usual grammars take 1 to 10 ms, hostile ones milliseconds per mask
_LONGEST_RUN = 1  # forced tokens in a row; the engine skips longer runs, which is faster than an automaton


def make_automaton(matcher: Matcher) -> TokenAutomaton | None:
    """Returns the automaton of a matcher at the start, found by trying every token of every text; None if unsuitable.

    States are texts, since the allowed tokens depend on the text alone, not on the tokens that spell it. An automaton
    is unsuitable if it has more than `MAX_TRANSITIONS`, or `MAX_STATE_TRANSITIONS` in one state; if a text in the
    tokenizer's own spelling has several forced tokens in a row, which the engine skips; or if it takes too long.
    """
    import numpy as np

    vocabulary = matcher.vocabulary
    mask = np.zeros(-(-len(vocabulary.tokens) // 32), np.uint32)
    states: dict[bytes, int] = {}
    runs: dict[bytes, int] = {}  # forced tokens that follow each state
    found: list[tuple[int, int, bytes]] = []
    queue = {b"": matcher}
    deadline = time.perf_counter() + _TIME_LIMIT_S
    try:
        while queue:
            text = next(iter(queue))
            matcher = queue.pop(text)
            states[text] = len(found)
            matcher.fill_mask(mask)
            tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            is_large = len(tokens) > MAX_STATE_TRANSITIONS or len(found) + len(tokens) > MAX_TRANSITIONS
            if is_large or time.perf_counter() > deadline:
                return None
            runs[text] = len(matcher.forced_tokens())
            for token in tokens:
                after = text if token in vocabulary.eos_token_ids else text + vocabulary.tokens[token]
                found.append((states[text], token, after))
                if after not in states and after not in queue:
                    queue[after] = matcher.copy()
                    queue[after].accept(token)
    except MatcherError:  # a limit of the parser; a request's matcher reports it if reached
        return None
    texts = {after for state, token, after in found if token in vocabulary.eos_token_ids}
    if any(runs.get(begun, 0) > _LONGEST_RUN for text in texts for begun in _spell(text, vocabulary)):
        return None
    return TokenAutomaton(tuple((state, token, states[after]) for state, token, after in found))


def _spell(text: bytes, vocabulary: Vocabulary) -> Iterator[bytes]:
    """Yields the part of a text before each of its tokens, in the tokenizer's own spelling."""
    begun = b""
    for token in vocabulary(text.decode(errors="replace")):
        yield begun
        begun += vocabulary.tokens[token]
