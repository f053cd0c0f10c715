"""Finished answers of all requests, searched by hash: a ring of tokens, and tables of where its n-grams ended.

Every token written has a position that only grows; it lies in the ring at that position modulo the ring's size. An
answer is followed by a separator, so a match and what follows it never leave the answer. A table has one bucket per
hash and a few ways per bucket: an answer writes to the way of its number, so a bucket keeps the latest occurrences
from different answers. Buckets are hints only: an occurrence counts after its tokens and its salt were compared.

A row finds answers with its own salt only. Otherwise its speed would tell what other tenants were answered.

All of it is the same on every device: positions grow, so writing the maximum settles which of several equal n-grams of
an answer stays. Before positions leave int32 they all move down by a multiple of the ring's size (`_move_down`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Int32, UInt32

LEVELS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # lengths of n-grams that have a table, as far as matches are compared
WAYS = 4
SEPARATOR = -1  # between answers; no token is below zero
MAX_POSITION = 2**30  # where positions move down


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
    ways: Int32[Array, "C K"]  # what follows it; below zero: the answer ended


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
    recent: Int32[Array, "D *N"], salt: UInt32[Array, "2 *#N"], levels: tuple[int, ...], num_buckets: int
) -> Int32[Array, "levels *N"]:
    """Returns the buckets of n-grams with the lengths `levels`.

    Args:
        recent: their last tokens, the last one first.
        salt: the two words of the salt that goes into the hash.
        levels: lengths, ascending, at most D.
        num_buckets: a power of two.
    """
    state = jnp.full(recent.shape[1:], 0x9E3779B9, jnp.uint32)
    found = []
    for back in range(levels[-1] if levels else 0):
        state = _mix(state ^ recent[back].astype(jnp.uint32))
        if back + 1 in levels:
            bucket = _mix(_mix(state ^ salt[0]) ^ salt[1])
            found.append((bucket & jnp.uint32(num_buckets - 1)).astype(jnp.int32))
    return jnp.stack(found)


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
    buckets = hash_ngrams(query, salt, levels, num_buckets)
    ends = corpus.ends[jnp.arange(num_levels), buckets].reshape(-1)
    oldest = _find_oldest(corpus)

    before = ends[:, None] - 1 - jnp.arange(depth)
    is_equal = (before >= oldest) & (corpus.tokens[before % ring] == query)
    counts = jnp.sum(jnp.cumprod(is_equal.astype(jnp.int32), axis=1), axis=1)
    is_own = jnp.all(corpus.salts[(ends - 1) % ring] == salt, axis=1)  # one salt is the answer's
    is_found = is_own & (counts >= jnp.repeat(jnp.array(levels), WAYS))  # else another n-gram has the same bucket
    is_found &= ~_is_repeated(ends)
    matched = jnp.max(jnp.where(is_found, counts, 0))
    starts = jnp.where(is_found & (counts == matched), ends, -1)

    after = ends[:, None] + jnp.arange(num_drafts)
    ways = jnp.where(after < corpus.num_written, corpus.tokens[after % ring], SEPARATOR)
    return Found(matched, starts, _end_at_separator(ways))


def remember_answer(
    corpus: Corpus, tokens: Int32[Array, " L"], salt: UInt32[Array, " 2"], start: Int[Array, ""], end: Int[Array, ""]
) -> Corpus:
    """Returns the corpus with the answer tokens[start:end]; of one longer than the ring, its last N - 1 tokens.

    An empty answer changes nothing. Donate `corpus`.
    """
    ring = corpus.tokens.shape[0]
    size = min(tokens.shape[0], ring - 1)  # static, whatever the answer's length
    start = jnp.maximum(start, end - size)
    count = jnp.clip(end - start, 0, size)
    corpus = lax.cond(corpus.num_written < MAX_POSITION, lambda corpus: corpus, _move_down, corpus)
    begin, number = corpus.num_written, corpus.num_answers

    index = jnp.arange(size)
    answer = tokens[jnp.clip(start + index, 0, tokens.shape[0] - 1)]
    slots = jnp.where(index < count, (begin + index) % ring, ring)  # out of range: dropped
    last = jnp.where(count > 0, (begin + count) % ring, ring)
    grown = (count > 0).astype(jnp.int32)
    return replace(
        corpus,
        tokens=corpus.tokens.at[slots].set(answer, mode="drop").at[last].set(SEPARATOR, mode="drop"),
        salts=corpus.salts.at[slots].set(salt, mode="drop"),
        ends=_write_ends(corpus.ends, answer, salt, count, begin, number % WAYS),
        begins=corpus.begins.at[jnp.where(count > 0, number % len(corpus.begins), ring)].set(begin, mode="drop"),
        num_written=begin + count + grown,
        num_answers=number + grown,
    )


def _write_ends(
    ends: Int32[Array, "levels buckets ways"],
    answer: Int32[Array, " M"],
    salt: UInt32[Array, " 2"],
    count: Int[Array, ""],
    begin: Int[Array, ""],
    way: Int[Array, ""],
) -> Int32[Array, "levels buckets ways"]:
    """Returns the tables with the n-grams of an answer; those at its very end, which nothing follows, are left out."""
    num_levels, num_buckets, _ = ends.shape
    levels, size = LEVELS[:num_levels], len(answer)
    if not levels:
        return ends
    padded = jnp.concatenate([jnp.full(levels[-1], SEPARATOR, jnp.int32), answer])
    recent = jnp.stack([padded[levels[-1] - back : levels[-1] - back + size] for back in range(levels[-1])])
    buckets = hash_ngrams(recent, salt[:, None], levels, num_buckets)
    index = jnp.arange(size)
    is_whole = (index + 1 >= jnp.array(levels)[:, None]) & (index + 1 < count)
    places = jnp.arange(num_levels)[:, None] * num_buckets + buckets
    places = jnp.where(is_whole, places * WAYS + way, ends.size)
    positions = jnp.broadcast_to(begin + index + 1, places.shape)
    return ends.reshape(-1).at[places].max(positions, mode="drop").reshape(ends.shape)


def _find_oldest(corpus: Corpus) -> Int32[Array, ""]:
    """Returns the first position that still lies in the ring and belongs to one of the last A answers."""
    limit = len(corpus.begins)
    first = jnp.where(corpus.num_answers >= limit, corpus.begins[corpus.num_answers % limit], 0)
    return jnp.maximum(first, corpus.num_written - len(corpus.tokens))


def _move_down(corpus: Corpus) -> Corpus:
    """Returns the same answers at positions that are smaller by a multiple of the ring's size."""
    ring, limit = len(corpus.tokens), len(corpus.begins)
    shift = (corpus.num_written // ring - 1) * ring  # what lies in the ring stays at or above zero
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


def _end_at_separator(ways: Int32[Array, "C K"]) -> Int32[Array, "C K"]:
    """Returns the continuations with nothing after an answer's end."""
    is_inside = jnp.cumprod((ways >= 0).astype(jnp.int32), axis=1) > 0
    return jnp.where(is_inside, ways, SEPARATOR)


def _mix(state: UInt32[Array, "*N"]) -> UInt32[Array, "*N"]:
    """Returns a number in which every bit of `state` counts (the second half of MurmurHash3's finalizer)."""
    state = state * jnp.uint32(0x85EBCA6B)
    state = state ^ (state >> 13)
    state = state * jnp.uint32(0xC2B2AE35)
    return state ^ (state >> 16)
