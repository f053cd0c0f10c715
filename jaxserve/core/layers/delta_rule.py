"""The gated delta rule (Yang et al. 2025) over the ragged rows of a step, on states that stay in their pool.

A head's state S [A, B] follows each token: S = exp(g) S; d = beta (v - S^T k); S = S + k d^T; its answer is S^T q.
Texts are cut into tiles at the multiples of 64 of their own positions, whatever the step's cuts. A tile of one token is
computed by these lines, several rows at a time. In a longer one every d depends on the state in front of the tile:

    (I + L) d = beta (v - exp(G) S^T k),  L_ts = beta_t exp(G_t - G_s) k_t k_s for s < t,  G_t = g_1 + .. + g_t

Matrices of a few tiles are made at once and the states go through these tiles one after another. So temporaries stay
small, and each tile has the same bits whatever stands beside it.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxserve.core.layers.context import StateSlots
from jaxserve.core.layers.recurrent import read_slots, write_slots
from pallas_kernels.spec import BatchMeta

TILE = 64  # tokens
_TILES = 4  # at once
_ROWS = 8  # of one token, at once
_EPS = 1e-6  # inside the root of q's and k's lengths

_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class HeadSizes(NamedTuple):
    """Key heads, the value heads of each, and their numbers."""

    keys: int  # K
    group: int  # r, so that N = K r
    key_dim: int  # A
    value_dim: int  # B


class RuleInputs(NamedTuple):
    """What the rule reads of each token; a key head's channels are its query, its key and the values of its group."""

    channels: Float[Array, "T K 2A+rB"]
    decay: Float[Array, "T N"]  # g, the logarithm of what remains, float32
    beta: Float[Array, "T N"]  # float32


class _Tokens(NamedTuple):
    """Some tokens in float32, with q and k of their final lengths, for each value head; zeros where there is none.

    Products with states have the same heads on both sides. Otherwise a compiler may want another layout of the states
    for them, and copies the whole pool to have it.
    """

    q: Float[Array, "*n N A"]
    k: Float[Array, "*n N A"]
    v: Float[Array, "*n N B"]
    decay: Float[Array, "*n N"]
    beta: Float[Array, "*n N"]


class _Tiles(NamedTuple):
    """The tiles of several tokens, each row's in the order of its text; behind `count` they are empty."""

    slots: Int[Array, " M"]  # of the state, none where the text begins with the tile
    homes: Int[Array, " M"]  # where the state goes
    starts: Int[Array, " M"]  # the first token in the step
    lengths: Int[Array, " M"]
    count: Int[Array, ""]


class _Singles(NamedTuple):
    """Rows with a tile of one token; behind `count` there are none."""

    slots: Int[Array, " S"]
    homes: Int[Array, " S"]
    tokens: Int[Array, " S"]
    count: Int[Array, ""] | int


def apply_rule(
    sizes: HeadSizes, inputs: RuleInputs, pool: jax.Array, offset: int, batch: BatchMeta, slots: StateSlots
) -> tuple[Float[Array, "T N B"], jax.Array]:
    """Returns the answers in the channels' dtype, zeros for padding, and the pool [L, R, N, A, B] after the step."""
    num_tokens, dtype = len(inputs.channels), inputs.channels.dtype
    out = jnp.zeros((num_tokens + TILE, sizes.keys * sizes.group, sizes.value_dim), dtype)
    run_rows = partial(_run_rows, sizes, inputs, offset)
    if batch.max_query_len == 1:
        lengths = jnp.diff(batch.query_start_loc)
        everything = _Singles(
            slots.read, slots.write, jnp.where(lengths > 0, batch.query_start_loc[:-1], len(out)), len(lengths)
        )
        pool, out = run_rows(everything, (pool, out))
    else:
        first, tiles, last = _cut(batch, slots, num_tokens, pool.shape[1])
        pool, out = run_rows(first, (pool, out))
        pool, out = _run_tiles(sizes, inputs, offset, tiles, (pool, out))
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


def _list_rows(
    chosen: Bool[Array, " S"],
    read: Int[Array, " S"],
    write: Int[Array, " S"],
    tokens: Int[Array, " S"],
    nowhere: int,
) -> _Singles:
    """Returns the chosen rows, in their order."""
    (found,) = jnp.nonzero(chosen, size=len(chosen), fill_value=len(chosen))

    def take(values: Int[Array, " S"], absent: int) -> Int[Array, " S"]:
        return values.at[found].get(mode="fill", fill_value=absent)

    return _Singles(take(read, nowhere), take(write, nowhere), take(tokens, jnp.iinfo(jnp.int32).max), chosen.sum())


def _take_tokens(sizes: HeadSizes, inputs: RuleInputs, ids: Int[Array, "*n"], valid: Bool[Array, "*n"]) -> _Tokens:
    """Returns the tokens of these ids, of which only the valid ones are read."""
    ids = jnp.clip(ids, 0, len(inputs.channels) - 1)

    def take(values: jax.Array) -> jax.Array:
        found = values[ids].astype(jnp.float32)
        return jnp.where(jnp.expand_dims(valid, tuple(range(valid.ndim, found.ndim))), found, 0.0)

    size, channels = sizes.key_dim, take(inputs.channels)
    q, k, v = channels[..., :size], channels[..., size : 2 * size], channels[..., 2 * size :]
    q, k = (each * lax.rsqrt(jnp.sum(each * each, axis=-1, keepdims=True) + _EPS) for each in (q, k))
    q, k = (jnp.repeat(each, sizes.group, axis=-2) for each in (q * size**-0.5, k))
    return _Tokens(q, k, v.reshape(*q.shape[:-1], sizes.value_dim), take(inputs.decay), take(inputs.beta))


def _run_rows(
    sizes: HeadSizes, inputs: RuleInputs, offset: int, singles: _Singles, carry: tuple[jax.Array, jax.Array]
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
        new = _take_tokens(sizes, inputs, ids, ids < len(inputs.channels))
        state = read_slots(pool, offset, source).astype(jnp.float32)
        remains = jnp.exp(new.decay)[..., None, None]
        seen = _einsum("nhja,nhab->nhjb", jnp.stack([new.k, new.q], axis=2), state) * remains
        change = new.beta[..., None] * (new.v - seen[..., 0, :])
        answer = seen[..., 1, :] + jnp.sum(new.k * new.q, axis=-1)[..., None] * change
        pool = write_slots(pool, offset, home, remains * state + new.k[..., None] * change[..., None, :])
        return pool, out.at[ids].set(answer.astype(out.dtype), mode="drop")

    return lax.fori_loop(0, (singles.count + at_once - 1) // at_once, run_some, carry)


def _run_tiles(
    sizes: HeadSizes, inputs: RuleInputs, offset: int, tiles: _Tiles, carry: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns the pool and the answers after the tokens of the tiles."""

    def run_some(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        where = (lax.dynamic_slice_in_dim(each, index * _TILES, _TILES) for each in tiles[:4])
        slots, homes, starts, lengths = where
        valid = jnp.arange(TILE) < lengths[:, None]
        tokens = _take_tokens(sizes, inputs, starts[:, None] + jnp.arange(TILE), valid)
        matrices = _make_matrices(tokens)

        def run_tile(at: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            pool, out = carry
            one, mine = jax.tree.map(lambda each: each[at], (tokens, matrices))
            state = read_slots(pool, offset, slots[at][None])[0].astype(jnp.float32)
            answer, state = _advance(one, mine, state)
            pool = write_slots(pool, offset, homes[at][None], state[None])
            beside = lax.dynamic_slice_in_dim(out, starts[at], TILE)
            answer = jnp.where(valid[at][:, None, None], answer.astype(out.dtype), beside)
            return pool, lax.dynamic_update_slice_in_dim(out, answer, starts[at], 0)

        return lax.fori_loop(0, _TILES, run_tile, carry)

    return lax.fori_loop(0, (tiles.count + _TILES - 1) // _TILES, run_some, carry)


class _Matrices(NamedTuple):
    """What a tile needs beside its tokens and the state in front of it."""

    inverse: Float[Array, "*n N t s"]  # of I + L
    reads: Float[Array, "*n N t s"]  # exp(G_t - G_s) q_t k_s for s <= t
    since_start: Float[Array, "*n N t"]  # exp(G_t)
    to_end: Float[Array, "*n N s"]  # exp(G_end - G_s)


def _make_matrices(tokens: _Tokens) -> _Matrices:
    place = jnp.arange(TILE)
    lower, strict = place[:, None] >= place, place[:, None] > place
    # Each exponent is a sum of its own: a difference of long sums would lose the digits of small decays behind large.
    decay = jnp.moveaxis(tokens.decay, 1, -1)  # [n N u]
    until = lower.astype(jnp.float32)
    between = _einsum("tu,nhus->nhts", until, jnp.where(strict, decay[..., None], 0.0))
    remains = jnp.where(lower, jnp.exp(between), 0.0)
    alike = _einsum("ntha,nsha->nhts", tokens.k, tokens.k)
    beta = jnp.moveaxis(tokens.beta, 1, -1)[..., None]
    return _Matrices(
        inverse=invert_unit_lower(jnp.where(strict, beta * remains * alike, 0.0)),
        reads=remains * _einsum("ntha,nsha->nhts", tokens.q, tokens.k),
        since_start=jnp.exp(_einsum("tu,nhu->nht", until, decay)),
        to_end=remains[..., -1, :],
    )


def invert_unit_lower(strict: Float[Array, "*n t t"]) -> Float[Array, "*n t t"]:
    """Returns the inverse of I + L for strictly lower L, where t is a power of two.

    Inverses of blocks become those of blocks twice as large, exactly. Products of powers of L would double, too, but
    where keys are alike these grow beyond any precision before they cancel.
    """
    size = strict.shape[-1]
    place, inverse, block = jnp.arange(size), jnp.eye(size, dtype=strict.dtype), 1
    while block < size:
        pair = place // (2 * block)
        is_beside = (pair[:, None] == pair) & (place[:, None] // block % 2 == 1) & (place // block % 2 == 0)
        beside = jnp.where(is_beside, strict, 0.0)
        if block > 1:
            beside = _einsum("...ij,...jk,...kl->...il", inverse, beside, inverse)
        inverse, block = inverse - beside, 2 * block
    return inverse


def _advance(
    tokens: _Tokens, matrices: _Matrices, state: Float[Array, "N A B"]
) -> tuple[Float[Array, "t N B"], Float[Array, "N A B"]]:
    """Returns the answers of one tile and the state behind it."""
    q, k, v = (jnp.moveaxis(each, 1, 0) for each in tokens[:3])  # [N t ...]
    seen = _einsum("hta,hab->htb", jnp.concatenate([k, q], axis=1), state)
    seen *= jnp.tile(matrices.since_start, 2)[..., None]
    change = _einsum("hts,hsb->htb", matrices.inverse, tokens.beta.T[..., None] * (v - seen[:, :TILE]))
    answer = seen[:, TILE:] + _einsum("hts,hsb->htb", matrices.reads, change)
    grown = _einsum("hsa,hsb->hab", k * matrices.to_end[..., None], change)
    return jnp.moveaxis(answer, 1, 0), matrices.since_start[:, -1, None, None] * state + grown
