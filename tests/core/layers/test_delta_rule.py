"""The gated delta rule and its convolution against recurrences in float64, over random ragged steps."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.layers.convolution import convolve
from jaxserve.core.layers.delta_rule import HeadSizes, RuleInputs, apply_rule, invert_unit_lower
from jaxserve.core.layers.ragged import TILE
from jaxserve.core.layers.recurrent import choose_slots
from tests.core.layers.ragged_steps import (
    LAYER,
    MOST,
    SLOTS,
    Chunk,
    Rule,
    check_decoding,
    cut,
    draw_decays,
    make_pool,
    run,
    split_step,
)
from tests.pallas_kernels.compiling import compile_quickly

SIZES = HeadSizes(keys=2, group=2, key_dim=16, value_dim=8)
N, A, B = SIZES.keys * SIZES.group, SIZES.key_dim, SIZES.value_dim


class Text(NamedTuple):
    """The tokens of a text, in float32 [t, ...]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    decay: np.ndarray
    beta: np.ndarray


def draw_text(random: np.random.Generator, length: int) -> Text:
    """Random tokens; now and then with equal keys, with betas near 1 or of 2, and with no decay or a total one."""
    q, k = random.standard_normal((2, length, SIZES.keys, A)).astype(np.float32)
    if random.random() < 0.4:
        k[:] = k[:1]
    kinds = {0: lambda: random.random((length, N)), 1: lambda: 0.999, 2: lambda: 2.0}
    beta = np.broadcast_to(kinds[int(random.integers(3))](), (length, N)).astype(np.float32)
    decay = draw_decays(random, (length, N))
    return Text(q, k, random.standard_normal((length, N, B)).astype(np.float32), decay, beta)


def recur(text: Text, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The answers [t, N, B] and the state [N, A, B] behind a text, by the definition, in the state's dtype."""
    text = Text(*(each.astype(state.dtype) for each in text))
    unit = [each / np.sqrt((each * each).sum(-1, keepdims=True) + state.dtype.type(1e-6)) for each in (text.q, text.k)]
    q, k = (np.repeat(each, SIZES.group, axis=1) for each in unit)
    answers = np.zeros(text.v.shape, state.dtype)
    for t in range(len(q)):
        state = state * np.exp(text.decay[t])[:, None, None]
        change = text.beta[t][:, None] * (text.v[t] - np.einsum("nab,na->nb", state, k[t]))
        state = state + k[t][:, :, None] * change[:, None]
        answers[t] = np.einsum("nab,na->nb", state, q[t]) / np.sqrt(A)
    return answers, state


def apply(channels: Any, decay: Any, beta: Any, *rest: Any) -> tuple[jax.Array, jax.Array]:
    return apply_rule(SIZES, RuleInputs(channels, decay, beta), *rest)


def pack(text: Text) -> tuple[np.ndarray, ...]:
    channels = np.concatenate([text.q, text.k, text.v.reshape(len(text.v), SIZES.keys, -1)], axis=-1)
    return channels, text.decay, text.beta


RULE = Rule(apply, pack, (N, A, B))


def test_ragged_steps_equal_the_recurrence() -> None:
    """200 steps: rows begin, go on by tokens or chunks, and are idle; what they leave is the state of their tokens.

    Where beta is 2 and nothing decays, no error does, either: from there on a text may be off by 16 times as much as
    the definition in float32 has been. Tiles of equal keys were off by up to 15 times that, in another order of sums on
    each processor. All other texts have the whole accuracy.
    """
    random = np.random.default_rng(0)
    pool: Any = make_pool(RULE)
    positions, states, rounded = [0] * SLOTS, [np.zeros((N, A, B))] * SLOTS, [np.zeros((N, A, B), np.float32)] * SLOTS
    num_tight, loss = 0, [0.0] * SLOTS  # of float32, since a row has met a beta of 2
    for _ in range(200):
        chunks, expected = [], []
        for row, length in zip(random.permutation(SLOTS).tolist(), split_step(random), strict=False):
            if random.random() < 0.2 or positions[row] > 400:
                positions[row], states[row], rounded[row] = 0, np.zeros((N, A, B)), np.zeros((N, A, B), np.float32)
                loss[row] = 0.0
            text = draw_text(random, length)
            chunks.append(Chunk(row, text, positions[row]))
            answers, states[row] = recur(text, states[row])
            near, rounded[row] = recur(text, rounded[row])
            if loss[row] or text.beta.max() == 2:
                possible = max(np.abs(near - answers).max(), np.abs(rounded[row] - states[row]).max())
                loss[row] = max(loss[row], possible)
            expected.append((answers, max(MOST, 16 * loss[row])))
            num_tight += expected[-1][1] == MOST
            positions[row] += length
        found, pool = run(RULE, chunks, pool)
        for chunk, got, (want, most) in zip(chunks, found, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=most)
            np.testing.assert_allclose(np.asarray(pool)[LAYER, chunk.row], states[chunk.row], rtol=0, atol=most)
    assert num_tight > 400
    assert np.isnan(np.asarray(pool)[0]).all(), "another layer's states are not touched"


def test_rows_that_decode_equal_the_recurrence() -> None:
    check_decoding(RULE, draw_text, recur)


@pytest.mark.parametrize("begin", [0, 63, 64])
def test_cuts_on_the_grid_give_the_bits_of_the_whole(begin: int) -> None:
    """Beside any neighbours, and where a tile has a single token."""
    random = np.random.default_rng(2)
    text, other = draw_text(random, 193), draw_text(random, 100)
    ahead, earlier = draw_text(random, begin), np.zeros((0, N, B))
    pool = make_pool(RULE)
    if begin:
        (earlier,), pool = run(RULE, [Chunk(3, ahead, 0)], pool)
    assert len(earlier) == begin
    (whole,), left = run(RULE, [Chunk(3, text, begin)], pool)
    for cuts in ([TILE], [2 * TILE], [TILE, 2 * TILE, 3 * TILE]):
        edges = [0, *(cut - begin % TILE for cut in cuts), 193]
        pieces, mine = [], pool
        for first, last in itertools.pairwise(edges):
            if first == last:
                continue
            beside = [Chunk(row, cut(other, 0, 30 * row + 1), 7) for row in (0, 1)]
            (*_, found), mine = run(RULE, [*beside, Chunk(3, cut(text, first, last), begin + first)], mine)
            pieces.append(found)
        np.testing.assert_array_equal(np.concatenate(pieces), whole)
        np.testing.assert_array_equal(np.asarray(mine)[LAYER, 3], np.asarray(left)[LAYER, 3])


def test_a_state_that_is_not_finite_stays_in_its_row() -> None:
    random = np.random.default_rng(3)
    bad, good = draw_text(random, 70), draw_text(random, 70)
    bad.v[3] = np.nan
    (found, kept), pool = run(RULE, [Chunk(0, bad, 0), Chunk(1, good, 0)], make_pool(RULE))
    assert np.isnan(found).any() and np.isfinite(kept).all()
    (after,), pool = run(RULE, [Chunk(0, good, 0)], pool)
    np.testing.assert_array_equal(after, kept)


def test_a_kernel_gives_the_answers_of_xla() -> None:
    """In chunks and single tokens, over the same channels."""
    random, sizes = np.random.default_rng(5), HeadSizes(keys=1, group=2, key_dim=128, value_dim=128)
    channels = random.standard_normal((12, 1, 512)).astype(np.float32)
    decay, beta = random.random((2, 12, 2)).astype(np.float32)
    inputs = RuleInputs(jnp.asarray(channels), jnp.asarray(-decay), jnp.asarray(beta))
    pool = jnp.asarray(random.standard_normal((2, 3, 2, 128, 128)).astype(np.float32))
    row_ids, seq_lens, starts = (jnp.asarray(each) for each in ([0, 2, 3], [7, 80, 0], [0, 7, 8, 8]))
    slots = choose_slots(row_ids, seq_lens, jnp.diff(starts), 3)
    batch: Any = SimpleNamespace(seq_lens=seq_lens, query_start_loc=starts, max_query_len=None)
    with compile_quickly():
        (want, after), (got, found) = (
            jax.jit(lambda impl=impl: apply_rule(sizes, inputs, pool, 1, batch, slots, impl))()
            for impl in ("xla", "tpu_interpret")
        )
    np.testing.assert_allclose(got, want, atol=MOST)
    np.testing.assert_allclose(found, after, atol=MOST)


def test_the_inverse_holds_where_keys_are_alike() -> None:
    """Products of powers are wrong by 1e10 there."""
    for beta in (0.5, 0.999, 2.0):
        strict = np.tril(np.full((TILE, TILE), beta, np.float32), -1)
        found = np.asarray(invert_unit_lower(jnp.asarray(strict)))
        np.testing.assert_allclose(found, np.linalg.inv(strict.astype(np.float64) + np.eye(TILE)), atol=1e-6)


def test_a_convolution_goes_on_where_a_text_was_cut() -> None:
    random = np.random.default_rng(4)
    weight = random.standard_normal((4, 5)).astype(np.float32)
    texts = [random.standard_normal((length, 5)).astype(np.float32) for length in (30, 9, 17)]
    whole = [
        sum(weight[3 - back] * np.pad(text, ((back, 0), (0, 0)))[: len(text)].astype(np.float64) for back in range(4))
        for text in texts
    ]
    kept: Any = jnp.zeros((4, 3, 5), jnp.float32)  # the last row has no token
    at, bits = [0, 0, 0], [np.zeros((0, 5), np.float32)] * 3
    while any(start < len(text) for start, text in zip(at, texts, strict=True)):
        takes = [min(int(random.integers(0, 6)), len(text) - start) for start, text in zip(at, texts, strict=True)]
        starts = np.cumsum([0, *takes, 0])
        x = np.full((20, 5), np.nan, np.float32)
        x[: starts[-1]] = np.concatenate([t[s : s + n] for t, s, n in zip(texts, at, takes, strict=True)])
        token_rows = np.pad(np.repeat(np.arange(3), takes), (0, 20 - starts[-1]), constant_values=3)
        batch: Any = SimpleNamespace(query_start_loc=jnp.asarray(starts), token_rows=jnp.asarray(token_rows))
        found, kept = convolve(jnp.asarray(weight), jnp.asarray(x), kept, batch)
        for row, take in enumerate(takes):
            bits[row] = np.concatenate([bits[row], np.asarray(found)[starts[row] : starts[row] + take]])
        at = [start + take for start, take in zip(at, takes, strict=True)]
    assert not np.asarray(kept[3]).any()
    for row, expected in enumerate(whole):
        np.testing.assert_allclose(bits[row], expected, atol=1e-5)
        np.testing.assert_array_equal(np.asarray(kept)[row], texts[row][-3:])
