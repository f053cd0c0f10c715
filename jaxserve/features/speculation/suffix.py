"""Suffix decoding: the drafts are the likeliest way on from the longest match, and grow with its length.

SuffixDecoding (Oliaro et al., arXiv 2411.04975), with the rules of Snowflake's Arctic Inference, which vLLM uses:
at most floor(factor x matched tokens) drafts, each the most frequent way on, while its share of the occurrences of the
match is large enough. Trees of suffixes are replaced by comparisons of a whole row, which an accelerator does at once,
and by a hashed corpus (corpus.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Int32

from jaxserve.core.sampling.drafts import NO_DRAFT
from jaxserve.features.speculation.corpus import Corpus, find_in_corpus
from jaxserve.features.speculation.history import continue_from, measure_matches, take_last

MAX_OCCURRENCES = 16  # of the longest match in the row, the most recent ones
_ROUNDING = 1e-6  # 0.1 x 10 is 1, and 0.3 x 10 is 3


@dataclass(frozen=True)
class SuffixRule:
    """When a match gives drafts, and how many."""

    num_drafts: int  # K
    depth: int  # tokens that are compared
    factor: float  # drafts per matched token
    min_share: float  # of the occurrences of a match, those that go on as the drafts do

    def list_limits(self) -> Int32[np.ndarray, " D1"]:
        """Returns the most drafts for a match of 0 to `depth` tokens."""
        limits = [min(self.num_drafts, math.floor(matched * self.factor + _ROUNDING)) for matched in range(self.depth)]
        limits.append(min(self.num_drafts, math.floor(self.depth * self.factor + _ROUNDING)))
        return np.array(limits, np.int32)

    def list_needs(self, num_occurrences: int) -> Int32[np.ndarray, " C1"]:
        """Returns how many of 0 to `num_occurrences` occurrences must go on alike; computed here, so exact."""
        totals = range(num_occurrences + 1)
        return np.array([max(1, math.ceil(total * self.min_share - _ROUNDING)) for total in totals], np.int32)


def propose_suffix(
    tokens: Int32[Array, " L"],
    length: Int[Array, ""],
    rule: SuffixRule,
    corpus: Corpus | None,
    salt: Int[Array, " 2"] | None,
) -> Int32[Array, " K"]:
    """Returns the drafts of one row: from its own tokens, or from the corpus if more tokens match there.

    Args:
        tokens: the row's tokens by position.
        length: how many of them are known.
        rule: how many drafts a match gives.
        corpus: finished answers; None: only the row's own tokens.
        salt: the row's salt, given with `corpus`.
    """
    query = take_last(tokens, length, rule.depth)
    counts = measure_matches(tokens, length, query)
    matched = jnp.max(counts)
    starts = _find_last(counts == matched, MAX_OCCURRENCES)
    ways = continue_from(tokens, length, starts, rule.num_drafts)
    if corpus is not None and salt is not None:
        found = find_in_corpus(corpus, query, salt, rule.num_drafts)
        is_longer = found.matched > matched
        size = max(len(starts), len(found.starts))
        starts = jnp.where(is_longer, _pad(found.starts, size, -1), _pad(starts, size, -1))
        ways = jnp.where(is_longer, _pad(found.ways, size, 0), _pad(ways, size, 0))
        matched = jnp.maximum(matched, found.matched)
    limit = jnp.asarray(rule.list_limits())[matched]
    needs = jnp.asarray(rule.list_needs(starts.shape[0]))
    return follow_most(ways, starts, needs[jnp.sum(starts >= 0)], limit)


def follow_most(
    ways: Int32[Array, "C K"], starts: Int[Array, " C"], need: Int[Array, ""], limit: Int[Array, ""]
) -> Int32[Array, " K"]:
    """Returns at each place the token that most occurrences have, among those that had all tokens before it.

    Args:
        ways: what follows each occurrence; a token below zero: nothing from here on.
        starts: where it begins, all different; below zero: no occurrence. Of equally many the most recent decides.
        need: a token that fewer occurrences have ends the drafts.
        limit: the most drafts.
    """
    is_alike = starts >= 0
    goes_on = jnp.asarray(True)
    drafts = []
    for place in range(ways.shape[1]):
        column = ways[:, place]
        is_open = is_alike & (column >= 0)
        votes = jnp.sum((column[:, None] == column[None, :]) & is_open[None, :], axis=1)
        votes = jnp.where(is_open, votes, 0)
        most = jnp.max(votes)
        leader = jnp.max(jnp.where(is_open & (votes == most), starts, -1))
        token = jnp.max(jnp.where(is_open & (starts == leader), column, NO_DRAFT))
        goes_on = goes_on & (most >= need) & (place < limit)
        drafts.append(jnp.where(goes_on, token, NO_DRAFT))
        is_alike = is_open & (column == token)
    return jnp.stack(drafts)


def _find_last(is_occurrence: Bool[Array, " L"], count: int) -> Int32[Array, " C"]:
    """Returns the last `count` positions above 0 where it is true, the last one first; -1 where there are no more."""
    size = len(is_occurrence)
    positions = jnp.where(is_occurrence, jnp.arange(size), -1).at[0].set(-1)
    padded = jnp.pad(positions, (0, max(0, count - size)), constant_values=-1)
    # On a CPU only floats are selected without a sort. All positions below 2**24 are exact.
    return lax.top_k(padded.astype(jnp.float32), count)[0].astype(jnp.int32)


def _pad(values: Int[Array, "n ..."], size: int, value: int) -> Int[Array, "m ..."]:
    return jnp.pad(values, [(0, size - len(values)), *[(0, 0)] * (values.ndim - 1)], constant_values=value)
