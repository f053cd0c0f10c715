"""The sampler's state of each row: the tokens so far, and what the request forbids or favours.

The state lies on the device beside the rows of the persistent batch and is always donated. A row that uses none of it
has its switch off (`SamplingInputs.has_edits`), so an earlier row's line need not be reset.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import fields, replace

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int, Int32, UInt32

from jaxserve.core.sampling.automaton import WORD_BITS, advance, pack_allowed
from jaxserve.sampling_params import MAX_BAD_WORD_TOKENS
from jaxserve.token_automaton import MAX_STATE_TRANSITIONS, MAX_TRANSITIONS, TokenAutomaton

MAX_EDITS = 640  # 300 biases, 256 stop ids, and 84 for EOS ids
MAX_BAD_WORDS = 64

ANY_TOKEN = -1  # pads a short bad word on the left
_NO_TOKEN = -1  # in `recent`, where nothing was sampled yet
NO_STATE = -1  # the state of a row without an automaton, and unused transitions
_NEVER = -2  # tokens of an unused bad word: `recent` never has them


@flax.struct.dataclass
class SamplerState:
    """One line per row of the persistent batch."""

    token_stats: Int32[Array, "R V"]  # 2 x (times sampled so far) + (1 if the token is in the prompt)
    recent: Int32[Array, "R H"]  # the last MAX_BAD_WORD_TOKENS - 1 sampled tokens, newest last; -1: none
    # Edits and words are sorted by the token whose logit they change, and unused ones add -0.0 to the last logit: a
    # scatter with sorted indices, none out of range, is the cheapest on all platforms.
    edit_ids: Int32[Array, "R E"]  # tokens whose logits change, each once
    edit_values: Float32[Array, "R E"]  # what is added to the logit
    edit_until: Int32[Array, "R E"]  # at positions below this one the token is banned
    bad_words: Int32[Array, "R W L"]  # tokens of each word, padded on the left with ANY_TOKEN
    allowed: UInt32[Array, "R N"]  # bit i % 32 of word i // 32: token i may be chosen
    transitions: Int32[Array, "R T 3"]  # the row's automaton (automaton.py)
    state: Int32[Array, " R"]  # the automaton's state


@flax.struct.dataclass
class RowSetting:
    """One row's line of every field of `SamplerState`."""

    token_stats: Int32[np.ndarray, " V"]
    recent: Int32[np.ndarray, " H"]
    edit_ids: Int32[np.ndarray, " E"]
    edit_values: Float32[np.ndarray, " E"]
    edit_until: Int32[np.ndarray, " E"]
    bad_words: Int32[np.ndarray, "W L"]
    allowed: UInt32[np.ndarray, " N"]
    transitions: Int32[np.ndarray, "T 3"]
    state: Int32[np.ndarray, ""]


def sampler_state_specs(num_rows: int, num_logits: int, sharding: jax.sharding.Sharding | None = None) -> SamplerState:
    """Returns the abstract values of the state for logits [S, num_logits]; it may begin as zeros."""
    line = make_row_setting(num_logits, (), ())
    return SamplerState(
        **{
            name: jax.ShapeDtypeStruct((num_rows, *array.shape), array.dtype, sharding=sharding)
            for name, array in _lines(line).items()
        }
    )


def make_row_setting(
    num_logits: int,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    *,
    logit_bias: Mapping[int, float] | None = None,
    allowed_ids: Iterable[int] | None = None,
    suppressed_ids: Collection[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    banned_ids: Iterable[int] = (),
    banned_until: int = 0,
    automaton: TokenAutomaton | None = None,
) -> RowSetting:
    """Returns a row's line for its admission, in new numpy arrays.

    Args:
        num_logits: the width V of the logits.
        prompt_ids: the request's prompt.
        output_ids: tokens sampled before a preemption.
        logit_bias: finite values to add, by token.
        allowed_ids: the only tokens that may be chosen; None: all.
        suppressed_ids: any number of tokens that are never chosen. Ids without a logit are ignored, here and in
            `banned_ids`.
        bad_words: token lists that must not appear in the output, of 1 to MAX_BAD_WORD_TOKENS tokens each.
        banned_ids: tokens not to be chosen at positions below `banned_until`. For `min_tokens` these are the EOS and
            stop ids, until len(prompt_ids) + min_tokens.
        banned_until: the first position at which `banned_ids` may be chosen.
        automaton: what the output follows; its tokens take the place of `allowed_ids`.

    Raises:
        ValueError: another id has no logit; there are more edits, words or tokens than a line holds; or `automaton` is
            given beside `allowed_ids` or `suppressed_ids`.
    """
    output = _check_ids("output_ids", output_ids, num_logits)
    stats = 2 * np.bincount(output, minlength=num_logits).astype(np.int32)
    stats[_check_ids("prompt_ids", prompt_ids, num_logits)] |= 1
    tail = output[max(0, len(output) - MAX_BAD_WORD_TOKENS + 1) :]
    recent = np.full(MAX_BAD_WORD_TOKENS - 1, _NO_TOKEN, np.int32)
    recent[len(recent) - len(tail) :] = tail
    allowed = np.ones(num_logits, bool)
    state = NO_STATE
    if automaton is not None:
        if allowed_ids is not None or suppressed_ids:
            raise ValueError(
                "allowed_ids and automaton: a row can have one of them, and no suppressed_ids with the latter"
            )
        state = automaton.find_state(output.tolist())
        allowed_ids = automaton.list_allowed(state)
    if allowed_ids is not None:
        allowed[:] = False
        allowed[_check_ids("allowed_ids", list(allowed_ids), num_logits)] = True
    allowed[[token for token in suppressed_ids if 0 <= token < num_logits]] = False
    bias = logit_bias or {}
    banned = {token for token in banned_ids if 0 <= token < num_logits}
    _check_ids("logit_bias", list(bias), num_logits)
    edit_ids, edit_values, edit_until = _make_edits(bias, banned, banned_until, num_logits)
    words = _make_bad_words(bad_words, num_logits)
    return RowSetting(
        stats, recent, edit_ids, edit_values, edit_until, words, pack_bits(allowed), *_make_automaton(automaton, state)
    )


def pack_bits(allowed: Bool[np.ndarray, "*S V"]) -> UInt32[np.ndarray, "*S N"]:
    """Returns a token mask as 32-bit words, the first token in the lowest bit; the last word is padded with 0."""
    missing = -allowed.shape[-1] % WORD_BITS
    padded = np.pad(allowed, [(0, 0)] * (allowed.ndim - 1) + [(0, missing)])
    return np.packbits(padded, axis=-1, bitorder="little").view("<u4").astype(np.uint32)


def set_row(state: SamplerState, row: Int[Array, ""], setting: RowSetting) -> SamplerState:
    """Returns the state with one row's line replaced. Donate `state`, so that nothing else of it is copied."""
    lines = _lines(setting)
    return SamplerState(
        **{
            name: lax.dynamic_update_index_in_dim(field, lines[name], row, axis=0)
            for name, field in _lines(state).items()
        }
    )


def record(
    state: SamplerState, row_ids: Int[Array, " S"], ids: Int[Array, " S"], keep: Bool[Array, " S"]
) -> SamplerState:
    """Returns the state after each row's sampled token, for rows with `keep`: they sample, and their switch is on.

    Donate `state`: only S counts and S lines of other fields are written. Kept rows must be distinct. An id without a
    logit (a sentinel) is ignored.
    """
    num_rows, num_logits = state.token_stats.shape
    kept = keep & (ids >= 0) & (ids < num_logits)
    targets = jnp.where(kept, row_ids, num_rows)  # out of range: dropped
    shifted = jnp.concatenate([state.recent[row_ids, 1:], ids[:, None].astype(jnp.int32)], axis=1)
    states = advance(state.transitions, row_ids, state.state[row_ids], ids)
    followers = jnp.where(states == NO_STATE, num_rows, targets)
    allowed = pack_allowed(state.transitions, row_ids, states, state.allowed.shape[1])
    return replace(
        state,
        token_stats=state.token_stats.at[targets, ids].add(2, mode="drop"),
        recent=state.recent.at[targets].set(shifted, mode="drop"),
        state=state.state.at[followers].set(states, mode="drop"),
        allowed=state.allowed.at[followers].set(allowed, mode="drop"),
    )


def _lines(lines: SamplerState | RowSetting) -> dict[str, Array | np.ndarray]:
    return {field.name: getattr(lines, field.name) for field in fields(lines)}


def _make_edits(
    bias: Mapping[int, float], banned: Set[int], until: int, num_logits: int
) -> tuple[Int32[np.ndarray, " E"], Float32[np.ndarray, " E"], Int32[np.ndarray, " E"]]:
    """Returns one edit per token, also if it is both banned and biased."""
    tokens = sorted({*bias, *banned})
    if len(tokens) > MAX_EDITS:
        raise ValueError(f"{len(tokens)} biased and banned tokens are more than the {MAX_EDITS} edits of a row")
    ids = np.full(MAX_EDITS, num_logits - 1, np.int32)
    values = np.full(MAX_EDITS, -0.0, np.float32)
    untils = np.zeros(MAX_EDITS, np.int32)
    ids[: len(tokens)] = tokens
    values[: len(tokens)] = [bias.get(token, -0.0) for token in tokens]
    untils[: len(tokens)] = [until if token in banned else 0 for token in tokens]
    return ids, values, untils


def _make_bad_words(bad_words: Sequence[Sequence[int]], num_logits: int) -> Int32[np.ndarray, "W L"]:
    if len(bad_words) > MAX_BAD_WORDS:
        raise ValueError(f"bad_words: {len(bad_words)} token lists are more than the {MAX_BAD_WORDS} of a row")
    words = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), _NEVER, np.int32)
    words[:, -1] = num_logits - 1
    for line, word in zip(words, bad_words, strict=False):
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            raise ValueError(f"bad_words: a word of {len(word)} tokens; 1 to {MAX_BAD_WORD_TOKENS} will do")
        line[: -len(word)] = ANY_TOKEN
        line[-len(word) :] = _check_ids("bad_words", word, num_logits)
    return words[np.argsort(words[:, -1], kind="stable")]


def _make_automaton(
    automaton: TokenAutomaton | None, state: int
) -> tuple[Int32[np.ndarray, "T 3"], Int32[np.ndarray, ""]]:
    """Pads with unused transitions, also for the window of the last state."""
    lines = np.full((MAX_TRANSITIONS + MAX_STATE_TRANSITIONS, 3), NO_STATE, np.int32)
    if automaton is not None:
        lines[: len(automaton.transitions)] = automaton.transitions
    return lines, np.array(state, np.int32)


def _check_ids(name: str, ids: Sequence[int], num_logits: int) -> Int32[np.ndarray, " n"]:
    array = np.asarray(ids, np.int64).reshape(-1)
    wrong = array[(array < 0) | (array >= num_logits)]
    if len(wrong):
        raise ValueError(f"{name}: token id {wrong[0]} has no logit; ids from 0 to {num_logits - 1} do")
    return array.astype(np.int32)
