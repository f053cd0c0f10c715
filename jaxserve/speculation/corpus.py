"""Finished answers of all requests, searched by hash: a ring of tokens, and tables of where its n-grams ended.

Every token written has a position that only grows; it lies in the ring at that position modulo the ring's size. An
answer lies in one piece between two separators, so a match and what follows it never leave it. A table has a bucket per
hash and a few ways per bucket: an answer writes to the way of its number, so a bucket keeps the latest occurrences
from different answers. Buckets are hints only: an occurrence counts after its tokens and its salt were compared.

A row finds answers with its own salt only. Otherwise its speed would tell what other tenants were answered.

All of it is the same on every device: positions grow, so writing the maximum settles which of several equal n-grams of
an answer stays. Before positions leave int32 they all move down by a multiple of the ring's size (`_move_down`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Int32, UInt32

LEVELS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # lengths of n-grams that have a table, as far as matches are compared
WAYS = 4
SEPARATOR = -1  # between answers; no token is below zero
_BASE = 0x9E3779B1  # of the polynomial that is an n-gram's hash: odd
_SHORT_BLOCK = 512
MAX_POSITION = 2**30


@dataclass(frozen=True)
class CorpusShape:
    """The sizes of a corpus."""

    num_tokens: int  # N: of the ring, separators included
    num_answers: int  # A: older ones do not count
    depth: int  # the most tokens that a match is compared over

    @property
    def levels(self) -> tuple[int, ...]:
        """The lengths of n-grams that have a table."""
        return tuple(level for level in LEVELS if level <= self.depth)

    @property
    def num_buckets(self) -> int:
        """Buckets of a table: with the ways, two places or more for each token of the ring."""
        return 1 << max(0, (2 * self.num_tokens // WAYS - 1).bit_length())


@flax.struct.dataclass
class Corpus:
    """The answers and the rows' salts. Zeros are an empty corpus."""

    tokens: Int32[Array, " N"]
    salts: UInt32[Array, "N 2"]  # of each token
    ends: Int32[Array, "levels buckets ways"]  # position after an occurrence; 0: none
    begins: Int32[Array, " A"]  # first position of the answer with this number modulo A
    num_written: Int32[Array, ""]  # tokens so far: the next position
    num_answers: Int32[Array, ""]  # answers so far: the next number
    row_salts: UInt32[Array, "R 2"]


@flax.struct.dataclass
class Found:
    """The occurrences of a row's longest match."""

    matched: Int32[Array, ""]  # tokens; 0: none
    starts: Int32[Array, " C"]  # position after each occurrence, all different; -1: fewer than C
    ways: Int32[Array, "C K"]  # what follows it; below zero: the answer ended, and the rest means nothing


def corpus_specs(shape: CorpusShape, num_rows: int, sharding: jax.sharding.Sharding | None = None) -> Corpus:
    """Returns the abstract values of a corpus."""

    def spec(*dims: int, dtype: jnp.dtype | type = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    return Corpus(
        tokens=spec(shape.num_tokens),
        salts=spec(shape.num_tokens, 2, dtype=jnp.uint32),
        ends=spec(len(shape.levels), shape.num_buckets, WAYS),
        begins=spec(shape.num_answers),
        num_written=spec(),
        num_answers=spec(),
        row_salts=spec(num_rows, 2, dtype=jnp.uint32),
    )


def hash_ngrams(
    recent: Sequence[Int32[Array, "*dims"]], salt: UInt32[Array, " 2"], levels: tuple[int, ...], num_buckets: int
) -> Int32[Array, "levels ..."]:
    """Returns the buckets of n-grams with the lengths `levels`: a polynomial of their tokens, salted and mixed.

    Args:
        recent: their tokens, the last one first; as many as the longest has.
        salt: the two words of their salt.
        levels: lengths, ascending.
        num_buckets: a power of two.
    """
    shape = (-1, *[1] * recent[0].ndim)
    powers = [pow(_BASE, back + 1, 2**32) for back in range(levels[-1])]
    state = jnp.zeros((len(levels), *recent[0].shape), jnp.uint32)
    for back, power in enumerate(powers):
        factors = np.array([power if back < level else 0 for level in levels], np.uint32)
        state = state + factors.reshape(shape) * (recent[back].astype(jnp.uint32) + jnp.uint32(_BASE))
    buckets = _mix(_mix(state ^ salt[0]) ^ salt[1])
    return (buckets & jnp.uint32(num_buckets - 1)).astype(jnp.int32)


def find_in_corpus(corpus: Corpus, query: Int32[Array, " D"], salt: UInt32[Array, " 2"], num_drafts: int) -> Found:
    """Returns the occurrences of the longest match among answers of this salt, at most C = levels x ways.

    Args:
        corpus: the answers.
        query: the row's last D tokens, the last one first, padded with numbers below `SEPARATOR`.
        salt: of the row.
        num_drafts: K.
    """
    num_levels, num_buckets, _ = corpus.ends.shape
    levels = LEVELS[:num_levels]
    depth, ring = query.shape[0], corpus.tokens.shape[0]
    buckets = lax.optimization_barrier(hash_ngrams(query, salt, levels, num_buckets))
    ends = corpus.ends[np.arange(num_levels), buckets].reshape(-1)
    # Without barriers the compiler would work these out again for each token that is compared.
    ends, slots, oldest = lax.optimization_barrier((ends, ends % ring, _find_oldest(corpus)))

    before = slots[:, None] - 1 - np.arange(depth)
    compared = lax.optimization_barrier(corpus.tokens[jnp.where(before < 0, before + ring, before)])
    is_equal = (compared == query) & (ends[:, None] - 1 - np.arange(depth) >= oldest)
    counts = jnp.min(jnp.where(is_equal, depth, np.arange(depth)), axis=1)  # up to the first unequal one
    is_own = jnp.all(corpus.salts[jnp.where(slots == 0, ring, slots) - 1] == salt, axis=1)  # one is the answer's
    is_found = is_own & (counts >= np.repeat(levels, WAYS))  # else another n-gram has the same bucket
    is_found &= ~_is_repeated(ends)
    matched = jnp.max(jnp.where(is_found, counts, 0))
    starts = jnp.where(is_found & (counts == matched), ends, -1)

    after = slots[:, None] + np.arange(num_drafts)  # ends at a separator, so never beyond the last answer
    ways = corpus.tokens[jnp.where(after >= ring, after - ring, after)]
    return Found(matched, starts, lax.optimization_barrier(ways))


def remember_answer(
    corpus: Corpus,
    tokens: Int32[Array, " L"],
    salt: UInt32[Array, " 2"],
    start: Int[Array, ""],
    end: Int[Array, ""],
    max_position: int = MAX_POSITION,
) -> Corpus:
    """Returns the corpus with the answer tokens[start:end]; of one longer than the ring, its last N - 2 tokens.

    Args:
        corpus: donated, so that one block of the ring is written.
        tokens: of the row, by position.
        salt: of the row.
        start: the first token of the answer.
        end: the position after the last one; an empty answer changes nothing.
        max_position: where positions move down.
    """
    sizes = [min(size, len(corpus.tokens)) for size in (_SHORT_BLOCK, len(tokens) + 2)]

    def write_short(*operands: Any) -> Corpus:
        """Writes a short block if that will do: a CPU takes its n-grams one by one."""
        is_short = end - start <= sizes[0] - 2
        return lax.cond(is_short, partial(_write_answer, sizes[0]), partial(_write_answer, sizes[1]), *operands)

    # Accelerators do not branch: the host would have to wait for the predicate.
    move, move_if_far = partial(_move_down, max_position), partial(_move_down_if_far, max_position)
    corpus = lax.platform_dependent(corpus, cpu=move_if_far, default=move)
    operands = (corpus, tokens, salt, start, end)
    if sizes[1] <= sizes[0]:
        return _write_answer(sizes[1], *operands)
    return lax.platform_dependent(*operands, cpu=write_short, default=partial(_write_answer, sizes[1]))


def _write_answer(
    size: int,
    corpus: Corpus,
    tokens: Int32[Array, " L"],
    salt: UInt32[Array, " 2"],
    start: Int[Array, ""],
    end: Int[Array, ""],
) -> Corpus:
    """`remember_answer`, with a block of static size: the answer and its two separators."""
    ring, limit = len(corpus.tokens), len(corpus.begins)
    count = jnp.clip(end - start, 0, size - 2)
    # An answer that would not fit before the ring's end begins at slot 0 instead, so its tokens lie in one piece.
    rest = -corpus.num_written % ring
    begin = corpus.num_written + jnp.where(rest < count + 2, rest, 0)
    first = jnp.minimum(begin % ring, ring - size)  # the block's first slot
    index = jnp.arange(size) - (begin % ring - first) - 1  # into the answer; its separators are at -1 and `count`
    padded = jnp.pad(tokens, (size, size), constant_values=SEPARATOR)
    answer = lax.dynamic_slice(padded, [size + end - count + index[0]], [size])
    is_token = (index >= 0) & (index < count)
    is_written = (count > 0) & (index >= -1) & (index <= count)
    block = jnp.where(is_token, answer, SEPARATOR)
    block = jnp.where(is_written, block, lax.dynamic_slice(corpus.tokens, [first], [size]))
    salts = jnp.where(is_written[:, None], salt, lax.dynamic_slice(corpus.salts, [first, 0], [size, 2]))

    number = corpus.num_answers
    grown = (count > 0).astype(jnp.int32)
    return replace(
        corpus,
        tokens=lax.dynamic_update_slice(corpus.tokens, block, [first]),
        salts=lax.dynamic_update_slice(corpus.salts, salts, [first, 0]),
        ends=_write_ends(corpus.ends, answer, salt, index, count, begin + 1, number % WAYS),
        begins=corpus.begins.at[jnp.where(count > 0, number % limit, limit)].set(begin, mode="drop"),
        num_written=jnp.where(count > 0, begin + count + 2, corpus.num_written),
        num_answers=number + grown,
    )


def _write_ends(
    ends: Int32[Array, "levels buckets ways"],
    answer: Int32[Array, " M"],
    salt: UInt32[Array, " 2"],
    index: Int[Array, " M"],
    count: Int[Array, ""],
    begin: Int[Array, ""],
    way: Int[Array, ""],
) -> Int32[Array, "levels buckets ways"]:
    """Returns the tables with the n-grams of an answer; those at its very end, which nothing follows, are left out.

    Args:
        ends: the tables.
        answer: the answer's tokens, among others.
        salt: of the answer.
        index: of each token in the answer; outside [0, count): it is no token of it.
        count: tokens of the answer.
        begin: position of the first one.
        way: which way of a bucket is written.
    """
    num_levels, num_buckets, _ = ends.shape
    levels, size = LEVELS[:num_levels], len(answer)
    padded = lax.optimization_barrier(jnp.pad(answer, (levels[-1], 0)))
    recent = [padded[levels[-1] - back :][:size] for back in range(levels[-1])]
    buckets = hash_ngrams(recent, salt, levels, num_buckets)
    is_whole = (index + 1 >= np.array(levels)[:, None]) & (index + 1 < count)
    places = (np.arange(num_levels)[:, None] * num_buckets + buckets) * WAYS + way
    places = jnp.where(is_whole, places, ends.size)  # out of range: dropped
    positions = jnp.broadcast_to(begin + index + 1, places.shape)
    return ends.reshape(-1).at[places].max(positions, mode="drop").reshape(ends.shape)


def _find_oldest(corpus: Corpus) -> Int32[Array, ""]:
    """Returns the first position that still lies in the ring and belongs to one of the last A answers."""
    limit = len(corpus.begins)
    first = jnp.where(corpus.num_answers >= limit, corpus.begins[corpus.num_answers % limit], 0)
    return jnp.maximum(first, corpus.num_written - len(corpus.tokens))


def _move_down_if_far(max_position: int, corpus: Corpus) -> Corpus:
    move = partial(_move_down, max_position)
    return lax.cond(corpus.num_written < max_position, lambda corpus: corpus, move, corpus)


def _move_down(max_position: int, corpus: Corpus) -> Corpus:
    """Returns the same answers, from `max_position` on at positions that are smaller by a multiple of the ring."""
    ring, limit = len(corpus.tokens), len(corpus.begins)
    is_far = corpus.num_written >= max_position
    shift = jnp.where(is_far, (corpus.num_written // ring - 1) * ring, 0)  # what lies in the ring stays above zero
    return replace(
        corpus,
        ends=jnp.maximum(corpus.ends - shift, 0),
        begins=jnp.maximum(corpus.begins - shift, 0),
        num_written=corpus.num_written - shift,
        num_answers=corpus.num_answers % (limit * WAYS) + limit * WAYS * (corpus.num_answers >= limit * WAYS),
    )


def _is_repeated(numbers: Int32[Array, " C"]) -> Bool[Array, " C"]:
    """Returns which numbers occurred before in the list."""
    index = jnp.arange(len(numbers))
    return jnp.any((numbers[:, None] == numbers[None, :]) & (index[None, :] < index[:, None]), axis=1)


def _mix(state: UInt32[Array, "*N"]) -> UInt32[Array, "*N"]:
    """Returns a number in which every bit of `state` counts (the finalizer of MurmurHash3)."""
    state = (state ^ (state >> 16)) * jnp.uint32(0x85EBCA6B)
    state = state ^ (state >> 13)
    state = state * jnp.uint32(0xC2B2AE35)
    return state ^ (state >> 16)
