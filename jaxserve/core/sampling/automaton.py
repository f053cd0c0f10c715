"""Automata of rows whose text is one of a few: the device follows them, so the host sends no masks.

A row's line lists its transitions (state, token, next state), sorted by state. A state's number is the index of its
first transition, so its transitions lie in a window that begins there.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32, UInt32

from jaxserve.token_automaton import MAX_STATE_TRANSITIONS

WORD_BITS = 32  # tokens per word of a bit mask


def advance(
    transitions: Int32[Array, "R T 3"], row_ids: Int[Array, " S"], states: Array, ids: Array
) -> Int[Array, " S"]:
    """Returns each row's state after its token `ids[s]`; a token without a transition keeps the state."""
    found, is_of_state = _find_window(transitions, row_ids, states)
    is_taken = is_of_state & (found[:, :, 1] == ids[:, None])
    following = jnp.sum(jnp.where(is_taken, found[:, :, 2], 0), axis=1)
    return jnp.where(jnp.any(is_taken, axis=1), following, states)


def pack_allowed(
    transitions: Int32[Array, "R T 3"], row_ids: Int[Array, " S"], states: Int[Array, " S"], num_words: int
) -> UInt32[Array, "S N"]:
    """Returns the tokens that each row's state allows; bit i % 32 of word i // 32 is token i."""
    found, is_of_state = _find_window(transitions, row_ids, states)
    tokens = jnp.where(is_of_state, found[:, :, 1], 0)
    bits = jnp.where(is_of_state, jnp.uint32(1) << (tokens % WORD_BITS).astype(jnp.uint32), 0)
    lines = jnp.zeros((len(row_ids), num_words), jnp.uint32)
    return lines.at[jnp.arange(len(row_ids))[:, None], tokens // WORD_BITS].add(bits)  # a state has each token once


def _find_window(
    transitions: Int32[Array, "R T 3"], row_ids: Int[Array, " S"], states: Int[Array, " S"]
) -> tuple[Int32[Array, "S W 3"], Bool[Array, "S W"]]:
    window = jnp.maximum(states, 0)[:, None] + jnp.arange(MAX_STATE_TRANSITIONS)
    found = transitions[row_ids[:, None], window]
    return found, found[:, :, 0] == states[:, None]
