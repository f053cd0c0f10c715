"""Prompt lookup: what followed the row's last tokens when they occurred before.

Prompt Lookup Decoding (Saxena, 2023), with vLLM's bounds on the length of a match.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32

from jaxserve.core.sampling.drafts import NO_DRAFT
from jaxserve.features.speculation.history import continue_from, measure_matches, take_last


def propose_ngram(
    tokens: Int32[Array, " L"], length: Int[Array, ""], min_match: int, max_match: int, num_drafts: int
) -> Int32[Array, " K"]:
    """Returns what followed the longest match of at most `max_match` tokens; of equal ones the most recent.

    Args:
        tokens: the row's tokens by position.
        length: how many of them are known.
        min_match: a shorter match gives no draft.
        max_match: tokens that are compared.
        num_drafts: K; all K are drafted or none, because an occurrence near the end is continued periodically.
    """
    counts = measure_matches(tokens, length, take_last(tokens, length, max_match))
    longest = jnp.max(counts)
    start = jnp.max(jnp.where(counts == longest, jnp.arange(len(tokens)), 0))
    drafts = continue_from(tokens, length, start[None], num_drafts)[0]
    return jnp.where(longest >= min_match, drafts, NO_DRAFT)
