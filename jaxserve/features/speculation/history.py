"""The tokens of each row by position, on the device, and where the row's last tokens occurred before.

Drafts are looked up in the step that sampled the last token, so the history cannot come from the host, which learns
tokens a step later. The host writes only what no step samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Int32, UInt32

from jaxserve.features.speculation.blocks import pack_block

# Neither equals a token, nor each other: what lies before the first token matches nothing.
_BEFORE_ROW = -1
_BEFORE_QUERY = -2
_BLOCK = 1024  # M: tokens; a CPU writes as many in a part of the time of a call

Span = tuple[int, int, Sequence[int]]  # row, position of the first token, and the tokens


class RowBlock(NamedTuple):
    """Tokens of rows, each with its place, and the salts of all rows."""

    rows: Int32[Array, " M"]  # below zero: no token
    positions: Int32[Array, " M"]
    tokens: Int32[Array, " M"]
    salts: UInt32[Array, "R 2"]  # a corpus is searched with them


def row_block_specs(num_rows: int) -> RowBlock:
    """Returns the abstract values of a block."""
    each = jax.ShapeDtypeStruct((_BLOCK,), jnp.int32)
    return RowBlock(each, each, each, jax.ShapeDtypeStruct((num_rows, 2), jnp.uint32))


def pack_rows(spans: Sequence[Span], salts: UInt32[np.ndarray, "R 2"]) -> Iterator[Int32[np.ndarray, " E"]]:
    """Yields the tokens of rows in packed blocks; one of none if there are none."""
    count = sum(len(token_ids) for _, _, token_ids in spans)
    lines = np.full((3, max(1, -(-count // _BLOCK)) * _BLOCK), -1, np.int32)
    end = 0
    for row, start, token_ids in spans:
        begin, end = end, end + len(token_ids)
        lines[0, begin:end] = row
        lines[1, begin:end] = np.arange(start, start + len(token_ids))
        lines[2, begin:end] = token_ids
    for block in np.split(lines, lines.shape[1] // _BLOCK, axis=1):
        yield pack_block(RowBlock(*block, salts))


def write_tokens(
    history: Int32[Array, "R L"],
    row_ids: Int[Array, "*N"],
    positions: Int[Array, "*N"],
    tokens: Int[Array, "*N"],
    keep: Bool[Array, "*N"],
) -> Int32[Array, "R L"]:
    """Returns the history with tokens written where `keep`; a position outside [0, L) is dropped.

    Donate `history`, so that only the written tokens cost time. Kept (row, position) pairs must be distinct.
    """
    targets = jnp.where(keep & (positions >= 0), row_ids, len(history))  # out of range: dropped, as positions are
    return history.at[targets, positions].set(tokens.astype(jnp.int32), mode="drop")


def take_last(tokens: Int32[Array, " L"], length: Int[Array, ""], depth: int) -> Int32[Array, " D"]:
    """Returns the last `depth` tokens before position `length`, the last one first, then what matches nothing."""
    positions = length - 1 - jnp.arange(depth)
    return jnp.where(positions >= 0, tokens[jnp.maximum(positions, 0)], _BEFORE_QUERY)


def measure_matches(
    tokens: Int32[Array, " L"], length: Int[Array, ""], query: Int32[Array, " D"]
) -> Int32[Array, " L"]:
    """Returns, for each position in [1, length), how many tokens before it equal the row's last ones; elsewhere 0.

    Args:
        tokens: the row's tokens by position.
        length: how many of them are known.
        query: the last D of them, from `take_last`; matches are not followed further.
    """
    size, depth = tokens.shape[0], query.shape[0]
    padded = lax.optimization_barrier(jnp.concatenate([jnp.full(depth, _BEFORE_ROW, jnp.int32), tokens]))
    is_equal = jnp.arange(size) < length
    counts = jnp.zeros(size, jnp.int32)
    for back in range(depth):  # one pass over the row: the compiler fuses the shifted comparisons
        begin = depth - 1 - back
        is_equal = is_equal & (padded[begin : begin + size] == query[back])
        counts = counts + is_equal.astype(jnp.int32)
    return counts


def continue_from(
    tokens: Int32[Array, " L"], length: Int[Array, ""], starts: Int[Array, " C"], num_drafts: int
) -> Int32[Array, "C K"]:
    """Returns the tokens from each position on. At the row's end they begin again: what follows is taken as periodic.

    An occurrence that ends at `start` equals the row's end, so the text would repeat with the period `length - start`.
    """
    period = jnp.maximum(length - starts, 1)[:, None]
    positions = starts[:, None] + jnp.arange(num_drafts) % period
    return tokens[jnp.clip(positions, 0, tokens.shape[0] - 1)]
