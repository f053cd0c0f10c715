"""Finished answers of all requests, searched by hash: a ring of tokens, and tables of where its n-grams ended.

Every token written has a position that only grows; it lies in the ring at that position modulo the ring's size. An
answer lies in one piece between two separators, so a match and what follows it never leave it. A table has a bucket per
hash and a few ways per bucket: an answer writes to the way of its number, so a bucket keeps the latest occurrences
from different answers. Buckets are hints only: an occurrence counts after its tokens and its salt were compared.

A row finds answers with its own salt only. Otherwise its speed would tell what other tenants were answered.

The host decides where an answer lies and when positions move down, before they leave int32 (`answers.py`). What is
written is the same on every device: positions grow, so writing the maximum settles which of several equal n-grams of
an answer stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

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
_BLOCK = 512


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
    def block_size(self) -> int:
        """M: the most tokens that are written at once, separators included."""
        return min(_BLOCK, self.num_tokens)

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
    oldest: Int32[Array, ""]  # the first position that counts: it is in the ring, of one of the last A answers
    row_salts: UInt32[Array, "R 2"]


class AnswerBlock(NamedTuple):
    """Tokens for neighbouring slots of the ring, with what the device needs to know of each."""

    first: Int[Array, ""]  # slot
    position: Int[Array, ""]  # of the token in the first slot
    oldest: Int[Array, ""]  # as in `Corpus`, once the block is written
    shift: Int[Array, ""]  # by which all positions move down first; mostly 0
    tokens: Int32[Array, " DM"]  # D tokens before the block, as many as the longest n-gram has, then the block
    reaches: Int32[Array, " M"]  # tokens of its answer up to each; 0: a separator, or the last one, which none follows
    ways: Int32[Array, " M"]  # of its answer; below zero: the slot keeps what it has
    salts: UInt32[Array, "2 M"]  # of its answer


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
        oldest=spec(),
        row_salts=spec(num_rows, 2, dtype=jnp.uint32),
    )


def answer_block_specs(shape: CorpusShape) -> AnswerBlock:
    """Returns the abstract values of a block."""
    number, size = jax.ShapeDtypeStruct((), jnp.int32), shape.block_size
    tokens = jax.ShapeDtypeStruct((shape.levels[-1] + size,), jnp.int32)
    each = jax.ShapeDtypeStruct((size,), jnp.int32)
    salts = jax.ShapeDtypeStruct((2, size), jnp.uint32)
    return AnswerBlock(number, number, number, number, tokens, each, each, salts)


def hash_ngrams(
    recent: Sequence[Int32[Array, "*dims"]],
    salt: UInt32[Array, "2 ..."],
    levels: tuple[int, ...],
    num_buckets: int,
) -> Int32[Array, "levels ..."]:
    """Returns the buckets of n-grams with the lengths `levels`: a polynomial of their tokens, salted and mixed.

    Args:
        recent: their tokens, the last one first; as many as the longest has.
        salt: the two words of their salts, or of the one they all have.
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
    ends, slots = lax.optimization_barrier((ends, ends % ring))

    before = slots[:, None] - 1 - np.arange(depth)
    compared = lax.optimization_barrier(corpus.tokens[jnp.where(before < 0, before + ring, before)])
    is_equal = (compared == query) & (ends[:, None] - 1 - np.arange(depth) >= corpus.oldest)
    counts = jnp.min(jnp.where(is_equal, depth, np.arange(depth)), axis=1)  # up to the first unequal one
    is_own = jnp.all(corpus.salts[jnp.where(slots == 0, ring, slots) - 1] == salt, axis=1)  # one is the answer's
    is_found = is_own & (counts >= np.repeat(levels, WAYS))  # else another n-gram has the same bucket
    is_found &= ~_is_repeated(ends)
    matched = jnp.max(jnp.where(is_found, counts, 0))
    starts = jnp.where(is_found & (counts == matched), ends, -1)

    after = slots[:, None] + np.arange(num_drafts)  # ends at a separator, so never beyond the last answer
    ways = corpus.tokens[jnp.where(after >= ring, after - ring, after)]
    return Found(matched, starts, lax.optimization_barrier(ways))


def write_answers(corpus: Corpus, block: AnswerBlock) -> Corpus:
    """Returns the corpus with the tokens of a block; donate `corpus`, so that only one block of the ring is written."""
    size, is_written = len(block.ways), block.ways >= 0
    tokens = lax.dynamic_slice(corpus.tokens, [block.first], [size])
    salts = lax.dynamic_slice(corpus.salts, [block.first, 0], [size, 2])
    tokens = jnp.where(is_written, block.tokens[-size:], tokens)
    salts = jnp.where(is_written[:, None], block.salts.T, salts)
    return replace(
        corpus,
        tokens=lax.dynamic_update_slice(corpus.tokens, tokens, [block.first]),
        salts=lax.dynamic_update_slice(corpus.salts, salts, [block.first, 0]),
        ends=_write_ends(_move_down(corpus.ends, block.shift), block),
        oldest=block.oldest,
    )


def _write_ends(ends: Int32[Array, "levels buckets ways"], block: AnswerBlock) -> Int32[Array, "levels buckets ways"]:
    """Returns the tables with the n-grams that end in a block."""
    num_levels, num_buckets, _ = ends.shape
    levels, size = LEVELS[:num_levels], len(block.ways)
    tokens = lax.optimization_barrier(block.tokens)
    recent = [tokens[levels[-1] - back :][:size] for back in range(levels[-1])]
    buckets = hash_ngrams(recent, block.salts, levels, num_buckets)
    is_whole = (block.reaches >= np.array(levels)[:, None]) & (block.ways >= 0)
    places = (np.arange(num_levels)[:, None] * num_buckets + buckets) * WAYS + block.ways
    places = jnp.where(is_whole, places, ends.size)  # out of range: dropped
    positions = jnp.broadcast_to(block.position + jnp.arange(size) + 1, places.shape)
    return ends.reshape(-1).at[places].max(positions, mode="drop").reshape(ends.shape)


def _move_down(ends: Int32[Array, "*dims"], shift: Int[Array, ""]) -> Int32[Array, "*dims"]:
    def move(ends: Array) -> Array:
        return jnp.maximum(ends - shift, 0)

    # Accelerators do not branch: the host would have to wait for the predicate.
    return lax.platform_dependent(
        ends, cpu=lambda ends: lax.cond(shift > 0, move, lambda ends: ends, ends), default=move
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
