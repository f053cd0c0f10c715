"""A recurrence over the ragged rows of a step, on states that stay in their pool.

Texts are cut into tiles at the multiples of 64 of their own positions, whatever the step's cuts. A tile of one token is
computed by the recurrence, several rows at a time. What longer tiles need beside the state in front of them is made for
a few of them at once, and the states go through these tiles one after another. So temporaries stay small, and each tile
has the same bits whatever stands beside it. In a verify step no row has more tokens than drafts and one: they are
computed by the recurrence, too, as plain steps would.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxserve.core.layers.context import StateSlots
from jaxserve.core.layers.recurrent import read_slots, write_rows, write_slots
from pallas_kernels.spec import BatchMeta

TILE = 64  # tokens
_TILES = 4  # at once
_ROWS = 8  # of one token, at once

einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
"""A product in full float32."""


class Recurrence(Protocol):
    """A rule by which the states of heads [N, ...] follow the tokens of a text. Tokens and tiles are pytrees of arrays.

    Products with states should have the same heads on both sides. Otherwise a compiler may want another layout of the
    states for them, and copies the whole pool to have it.
    """

    def take(self, ids: Int[Array, "*n"], valid: Bool[Array, "*n"]) -> Any:
        """Returns the tokens of these ids in float32, leading axes `n`; zeros where they are not valid."""
        ...

    def step(self, tokens: Any, state: Float[Array, "n N ..."]) -> tuple[Float[Array, "n N B"], jax.Array]:
        """Returns the answers of one token of each of n rows, and the states behind them."""
        ...

    def prepare(self, tokens: Any) -> Any:
        """Returns what tiles of tokens [n, TILE, ...] need beside their tokens and the state in front, leading axis n.

        Tokens of zeros behind a tile's own change nothing.
        """
        ...

    def advance(self, tokens: Any, prepared: Any, state: Float[Array, "N ..."]) -> tuple[jax.Array, jax.Array]:
        """Returns the answers [TILE, N, B] of one tile and the state behind it."""
        ...


class Decay(NamedTuple):
    """What remains of states within tiles."""

    between: Float[Array, "*n N t s"]  # exp(g_{s+1} + .. + g_t) for s <= t, else 0
    since_start: Float[Array, "*n N t"]  # exp(g_1 + .. + g_t)

    @property
    def to_end(self) -> Float[Array, "*n N s"]:
        """What remains at a tile's end."""
        return self.between[..., -1, :]


def accumulate_decay(decay: Float[Array, "n t N"]) -> Decay:
    """Returns what remains, of the logarithms g of what each token leaves.

    Each exponent is a sum of its own: a difference of long sums would lose the digits of small decays behind large.
    """
    place = jnp.arange(TILE)
    lower, strict = place[:, None] >= place, place[:, None] > place
    decay = jnp.moveaxis(decay, 1, -1)  # [n N u]
    until = lower.astype(jnp.float32)
    between = einsum("tu,nhus->nhts", until, jnp.where(strict, decay[..., None], 0.0))
    return Decay(jnp.where(lower, jnp.exp(between), 0.0), jnp.exp(einsum("tu,nhu->nht", until, decay)))


def take_valid(values: jax.Array, ids: Int[Array, "*n"], valid: Bool[Array, "*n"]) -> jax.Array:
    """Returns lines of an array [T, ...] in float32, zeros where they are not valid."""
    found = values[jnp.clip(ids, 0, len(values) - 1)].astype(jnp.float32)
    return jnp.where(jnp.expand_dims(valid, tuple(range(valid.ndim, found.ndim))), found, 0.0)


class _Tiles(NamedTuple):
    """The tiles of several tokens, each row's in the order of its text; behind `count` they are empty."""

    slots: Int[Array, " M"]  # of the state, none where the text begins with the tile
    homes: Int[Array, " M"]  # where the state goes
    starts: Int[Array, " M"]  # the first token in the step
    lengths: Int[Array, " M"]
    count: Int[Array, ""]


class _Runs(NamedTuple):
    """Rows with a few tokens each; behind `count` there are none."""

    slots: Int[Array, " S"]
    homes: Int[Array, " S"]
    starts: Int[Array, " S"]  # the first token in the step
    lengths: Int[Array, " S"]
    count: Int[Array, ""] | int


class _Singles(NamedTuple):
    """Rows with a tile of one token; behind `count` there are none."""

    slots: Int[Array, " S"]
    homes: Int[Array, " S"]
    tokens: Int[Array, " S"]
    count: Int[Array, ""] | int


def run_recurrence(
    rule: Recurrence,
    answers: jax.ShapeDtypeStruct,
    pool: jax.Array,
    offset: int,
    batch: BatchMeta,
    slots: StateSlots,
) -> tuple[Float[Array, "T N B"], jax.Array]:
    """Returns the answers that `answers` describes, zeros for padding, and the pool [L, R, N, ...] after the step."""
    num_tokens = answers.shape[0]
    out = jnp.zeros((num_tokens + TILE, *answers.shape[1:]), answers.dtype)
    run_rows = partial(_run_rows, rule, num_tokens, offset)
    if batch.max_query_len == 1:
        lengths = jnp.diff(batch.query_start_loc)
        everything = _Singles(
            slots.read, slots.write, jnp.where(lengths > 0, batch.query_start_loc[:-1], len(out)), len(lengths)
        )
        pool, out = run_rows(everything, (pool, out))
    elif batch.max_query_len is not None:
        runs, most = _list_runs(batch, slots, pool.shape[1])
        pool, out = _run_few(rule, offset, runs, most, (pool, out), leaves_pending=slots.leaves_pending)
    else:
        first, tiles, last = _cut(batch, slots, num_tokens, pool.shape[1])
        pool, out = run_rows(first, (pool, out))
        pool, out = _run_tiles(rule, offset, tiles, (pool, out))
        pool, out = run_rows(last, (pool, out))
    return out[:num_tokens], pool


def _cut(batch: BatchMeta, slots: StateSlots, num_tokens: int, nowhere: int) -> tuple[_Singles, _Tiles, _Singles]:
    """Returns the rows whose first tile has one token, the tiles of several, and the rows whose last tile has one.

    A tile that is first and last is among the first. `nowhere` is no slot.
    """
    starts, rows = batch.query_start_loc, len(batch.seq_lens)
    lengths = jnp.diff(starts)
    begin = batch.seq_lens - lengths  # in the text
    count = jnp.where(lengths > 0, (batch.seq_lens - 1) // TILE - begin // TILE + 1, 0)
    is_first = (count > 0) & (jnp.minimum(lengths, TILE - begin % TILE) == 1)
    is_last = (count > 1) & (batch.seq_lens % TILE == 1)
    inner = count - is_first - is_last
    ends = jnp.cumsum(inner)
    most = min(num_tokens // 2, num_tokens // TILE + 2 * rows)
    index = jnp.arange(-(-max(most, 1) // _TILES) * _TILES)
    row = jnp.minimum(jnp.searchsorted(ends, index, side="right", method="compare_all"), rows - 1)
    tile = begin[row] // TILE + is_first[row] + index - (ends - inner)[row]
    first = jnp.maximum(begin[row], tile * TILE)
    length = jnp.where(index < ends[-1], jnp.minimum(batch.seq_lens[row], (tile + 1) * TILE) - first, 0)
    home = jnp.where(length > 0, slots.write[row], nowhere)
    tiles = _Tiles(jnp.where(first > 0, home, nowhere), home, starts[row] + first - begin[row], length, ends[-1])
    before = _list_rows(is_first, slots.read, slots.write, starts[:-1], nowhere)
    after = _list_rows(is_last, slots.write, slots.write, starts[1:] - 1, nowhere)
    return before, tiles, after


def _list_runs(batch: BatchMeta, slots: StateSlots, nowhere: int) -> tuple[_Runs, Int[Array, ""] | int]:
    """Returns the rows that have tokens, and the most of any.

    In a verify step they are all rows and all its tokens, so that its cost can be measured on padding.
    """
    starts, lengths = batch.query_start_loc[:-1], jnp.diff(batch.query_start_loc)
    if slots.leaves_pending:
        assert batch.max_query_len is not None
        return _Runs(slots.read, slots.write, starts, lengths, len(lengths)), batch.max_query_len
    found = _find(lengths > 0)
    places = _take(slots.read, found, nowhere), _take(slots.write, found, nowhere)
    tokens = _take(starts, found, 0), _take(lengths, found, 0)
    return _Runs(*places, *tokens, jnp.sum(lengths > 0)), jnp.max(lengths)


def _list_rows(
    chosen: Bool[Array, " S"],
    read: Int[Array, " S"],
    write: Int[Array, " S"],
    tokens: Int[Array, " S"],
    nowhere: int,
) -> _Singles:
    """Returns the chosen rows, in their order."""
    found = _find(chosen)
    places = _take(read, found, nowhere), _take(write, found, nowhere)
    return _Singles(*places, _take(tokens, found, jnp.iinfo(jnp.int32).max), chosen.sum())


def _take(values: Int[Array, " S"], rows: Int[Array, " S"], absent: int) -> Int[Array, " S"]:
    return values.at[rows].get(mode="fill", fill_value=absent)


def _find(chosen: Bool[Array, " S"]) -> Int[Array, " S"]:
    """Returns the chosen rows in their order, then numbers of no row."""
    (found,) = jnp.nonzero(chosen, size=len(chosen), fill_value=len(chosen))
    return found


def _run_rows(
    rule: Recurrence, num_tokens: int, offset: int, singles: _Singles, carry: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns the pool and the answers after one token of each of these rows."""
    at_once = min(_ROWS, len(singles.homes))
    spare = -len(singles.homes) % at_once
    nowhere, beyond = carry[0].shape[1], len(carry[1])
    read, write = (jnp.pad(each, (0, spare), constant_values=nowhere) for each in singles[:2])
    tokens = jnp.pad(singles.tokens, (0, spare), constant_values=beyond)

    def run_some(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        pool, out = carry
        source, home, ids = (lax.dynamic_slice_in_dim(each, index * at_once, at_once) for each in (read, write, tokens))
        state = read_slots(pool, offset, source).astype(jnp.float32)
        answer, state = rule.step(rule.take(ids, ids < num_tokens), state)
        pool = write_slots(pool, offset, home, state)
        return pool, out.at[ids].set(answer.astype(out.dtype), mode="drop")

    return lax.fori_loop(0, (singles.count + at_once - 1) // at_once, run_some, carry)


def _run_few(
    rule: Recurrence,
    offset: int,
    runs: _Runs,
    most: Int[Array, ""] | int,
    carry: tuple[jax.Array, jax.Array],
    *,
    leaves_pending: bool,
) -> tuple[jax.Array, jax.Array]:
    """Returns the pool and the answers after the tokens of these rows, whose states are read and written once.

    No row has more than `most` tokens.
    """
    at_once = min(_ROWS, len(runs.homes))
    spare = -len(runs.homes) % at_once
    nowhere, beyond, kept = carry[0].shape[1], len(carry[1]), jnp.finfo(carry[0].dtype)
    rows = [
        jnp.pad(each, (0, spare), constant_values=value)
        for each, value in zip(runs[:4], (nowhere, nowhere, 0, 0), strict=True)
    ]

    def run_some(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        pool, out = carry
        source, home, starts, lengths = (lax.dynamic_slice_in_dim(each, index * at_once, at_once) for each in rows)
        state = read_slots(pool, offset, source).astype(jnp.float32)

        def run_token(at: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            state, out = carry
            ids, valid = starts + at, at < lengths
            answer, state = rule.step(rule.take(ids, valid), state)
            state = lax.reduce_precision(state, kept.nexp, kept.nmant)  # as between plain steps
            return state, out.at[jnp.where(valid, ids, beyond)].set(answer.astype(out.dtype), mode="drop")

        state, out = lax.fori_loop(0, most, run_token, (state, out))
        return write_rows(pool, offset, home, state, leaves_pending=leaves_pending), out

    return lax.fori_loop(0, (runs.count + at_once - 1) // at_once, run_some, carry)


def _run_tiles(
    rule: Recurrence, offset: int, tiles: _Tiles, carry: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns the pool and the answers after the tokens of the tiles."""

    def run_some(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        where = (lax.dynamic_slice_in_dim(each, index * _TILES, _TILES) for each in tiles[:4])
        slots, homes, starts, lengths = where
        valid = jnp.arange(TILE) < lengths[:, None]
        tokens = rule.take(starts[:, None] + jnp.arange(TILE), valid)
        prepared = rule.prepare(tokens)

        def run_tile(at: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            pool, out = carry
            one, mine = jax.tree.map(lambda each: each[at], (tokens, prepared))
            state = read_slots(pool, offset, slots[at][None])[0].astype(jnp.float32)
            answer, state = rule.advance(one, mine, state)
            pool = write_slots(pool, offset, homes[at][None], state[None])
            beside = lax.dynamic_slice_in_dim(out, starts[at], TILE)
            answer = jnp.where(valid[at][:, None, None], answer.astype(out.dtype), beside)
            return pool, lax.dynamic_update_slice_in_dim(out, answer, starts[at], 0)

        return lax.fori_loop(0, _TILES, run_tile, carry)

    return lax.fori_loop(0, (tiles.count + _TILES - 1) // _TILES, run_some, carry)
