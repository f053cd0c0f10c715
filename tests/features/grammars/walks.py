"""Random outputs of a grammar: what a model would write that knows nothing but the masks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from jaxserve.features.grammars import Matcher

MAX_TOKENS = 600
HASTE = 40  # tokens after which the walk prefers what ends strings, lists and objects
ENDINGS = tuple(b'" @ } ] , : Z z M S D true null 0 1'.split())  # the first that is allowed


class EndlessWalkError(AssertionError):
    """A walk that chance did not lead to an end."""


def read_bits(row: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def list_allowed(matcher: Matcher) -> list[int]:
    row = np.zeros(-(-len(matcher.vocabulary.tokens) // 32), np.uint32)
    matcher.fill_mask(row)
    return read_bits(row)


def walk(matcher: Matcher, rng: np.random.Generator) -> bytes:
    """Accepts random allowed tokens up to EOS; returns their bytes."""
    vocabulary = matcher.vocabulary
    ends = set(vocabulary.eos_token_ids)
    text = b""
    for step in range(MAX_TOKENS):
        allowed = list_allowed(matcher)
        assert allowed, f"a dead end after {text!r}"
        assert bool(ends & set(allowed)) == matcher.is_accepting
        token_id = pick(allowed, ends, vocabulary.tokens, rng, hurry=step > HASTE)
        matcher.accept(token_id)
        if token_id in ends:
            assert matcher.is_finished
            return text
        text += vocabulary.tokens[token_id]
    raise AssertionError(f"no end after {MAX_TOKENS} tokens: {text!r}")


def pick(allowed: list[int], ends: set[int], tokens: list[bytes], rng: np.random.Generator, *, hurry: bool) -> int:
    """A uniform choice, but of bytes rather than tokens now and then, so that rare ends and escapes come up."""
    if hurry or rng.random() < 0.3:
        by_text = {tokens[token_id]: token_id for token_id in allowed if token_id not in ends}
        if hurry and ends & set(allowed):
            return min(ends & set(allowed))
        found = [by_text[text] for text in ENDINGS if text in by_text]
        if found:
            return found[0] if hurry else found[int(rng.integers(len(found)))]
        if hurry:
            return min(allowed, key=lambda token_id: (tokens[token_id].isspace(), len(tokens[token_id])))
    return allowed[int(rng.integers(len(allowed)))]


def wander(matcher: Matcher, rng: np.random.Generator, texts: Sequence[Sequence[int]]) -> bytes:
    """As `walk`, but now and then it writes one of these texts of token ids, as far as the masks allow."""
    vocabulary = matcher.vocabulary
    ends = set(vocabulary.eos_token_ids)
    ids: list[int] = []
    in_turn = itertools.cycle(texts)
    while len(ids) < MAX_TOKENS:
        hurry = len(ids) > HASTE
        wanted = None
        if rng.random() < (0.6 if hurry else 0.2):  # in turn, as one of them may be all that ends a text
            wanted = next(in_turn) if hurry else texts[int(rng.integers(len(texts)))]
        allowed = list_allowed(matcher)
        assert allowed, f"a dead end after {ids}"
        if hurry and ends & set(allowed):
            return b"".join(vocabulary.tokens[token_id] for token_id in ids)
        for token_id in wanted or [pick(allowed, ends, vocabulary.tokens, rng, hurry=hurry)]:
            if token_id not in list_allowed(matcher):
                break
            if token_id in ends:
                return b"".join(vocabulary.tokens[token_id] for token_id in ids)
            matcher.accept(token_id)
            ids.append(token_id)
    raise EndlessWalkError(f"no end after {MAX_TOKENS} tokens: {ids}")
