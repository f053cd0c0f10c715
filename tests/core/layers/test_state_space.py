"""The state space of Mamba-2 against its recurrence in float64, over random ragged steps."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.layers.ragged import TILE
from jaxserve.core.layers.recurrent import choose_slots
from jaxserve.core.layers.state_space import GroupSizes, SpaceInputs, apply_space
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

SIZES = GroupSizes(groups=2, heads=3, head_dim=8, state_size=16)
G, N, P, A = SIZES.groups, SIZES.groups * SIZES.heads, SIZES.head_dim, SIZES.state_size
RATES = -np.array([0.0, 0.5, 2.0, 4.0, 0.25, 8.0], np.float32)  # the first head forgets nothing
SKIP = np.linspace(-1, 1, N, dtype=np.float32)


class Text(NamedTuple):
    """The tokens of a text, in float32 [t, ...]."""

    x: np.ndarray
    b: np.ndarray
    c: np.ndarray
    steps: np.ndarray


def draw_text(random: np.random.Generator, length: int) -> Text:
    """Random tokens, now and then all alike; no decay, a total one, or some. What decays comes in large steps."""
    x = random.standard_normal((length, N, P)).astype(np.float32)
    b, c = random.standard_normal((2, length, G, A)).astype(np.float32)
    if random.random() < 0.4:
        b[:] = b[:1]
    decays, plain = draw_decays(random, (length, N)), random.random((length, N)).astype(np.float32)
    steps = np.where(RATES < 0, decays / np.where(RATES < 0, RATES, 1), plain)
    return Text(x / np.maximum(steps, 1)[..., None], b / A, c, steps)


def recur(text: Text, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The answers [t, N, P] and the state [N, P, A] behind a text, by the definition, in float64."""
    x, b, c, steps = (each.astype(np.float64) for each in text)
    b, c = (np.repeat(each, SIZES.heads, axis=1) for each in (b, c))
    answers = np.zeros(x.shape)
    for t in range(len(x)):
        state = state * np.exp(steps[t] * RATES)[:, None, None]
        state = state + (steps[t][:, None] * x[t])[:, :, None] * b[t][:, None]
        answers[t] = np.einsum("npa,na->np", state, c[t]) + SKIP[:, None] * x[t]
    return answers, state


def apply(channels: Any, steps: Any, *rest: Any) -> tuple[jax.Array, jax.Array]:
    return apply_space(SIZES, SpaceInputs(channels, steps, jnp.asarray(RATES), jnp.asarray(SKIP)), *rest)


def pack(text: Text) -> tuple[np.ndarray, ...]:
    return np.concatenate([text.x.reshape(len(text.x), G, -1), text.b, text.c], axis=-1), text.steps


SPACE = Rule(apply, pack, (N, P, A))


def test_ragged_steps_equal_the_recurrence() -> None:
    """200 steps: rows begin, go on by tokens or chunks, and are idle; what they leave is the state of their tokens."""
    random = np.random.default_rng(0)
    pool: Any = make_pool(SPACE)
    positions, states = [0] * SLOTS, [np.zeros((N, P, A))] * SLOTS
    for _ in range(200):
        chunks, expected = [], []
        for row, length in zip(random.permutation(SLOTS).tolist(), split_step(random), strict=False):
            if random.random() < 0.2 or positions[row] > 400:
                positions[row], states[row] = 0, np.zeros((N, P, A))
            text = draw_text(random, length)
            chunks.append(Chunk(row, text, positions[row]))
            answers, states[row] = recur(text, states[row])
            expected.append(answers)
            positions[row] += length
        found, pool = run(SPACE, chunks, pool)
        for chunk, got, want in zip(chunks, found, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=MOST)
            np.testing.assert_allclose(np.asarray(pool)[LAYER, chunk.row], states[chunk.row], rtol=0, atol=MOST)
    assert np.isnan(np.asarray(pool)[0]).all(), "another layer's states are not touched"


def test_rows_that_decode_equal_the_recurrence() -> None:
    check_decoding(SPACE, draw_text, recur)


@pytest.mark.parametrize("begin", [0, 63, 64])
def test_cuts_on_the_grid_give_the_bits_of_the_whole(begin: int) -> None:
    """Beside any neighbours, and where a tile has a single token."""
    random = np.random.default_rng(2)
    text, other, ahead = (draw_text(random, length) for length in (193, 100, begin))
    pool = make_pool(SPACE)
    if begin:
        _, pool = run(SPACE, [Chunk(3, ahead, 0)], pool)
    (whole,), left = run(SPACE, [Chunk(3, text, begin)], pool)
    for cuts in ([TILE], [2 * TILE], [TILE, 2 * TILE, 3 * TILE]):
        edges = [0, *(edge - begin % TILE for edge in cuts), 193]
        pieces, mine = [], pool
        for first, last in itertools.pairwise(edges):
            if first == last:
                continue
            beside = [Chunk(row, cut(other, 0, 30 * row + 1), 7) for row in (0, 1)]
            (*_, found), mine = run(SPACE, [*beside, Chunk(3, cut(text, first, last), begin + first)], mine)
            pieces.append(found)
        np.testing.assert_array_equal(np.concatenate(pieces), whole)
        np.testing.assert_array_equal(np.asarray(mine)[LAYER, 3], np.asarray(left)[LAYER, 3])


def test_a_kernel_gives_the_answers_of_xla() -> None:
    """In chunks and single tokens, over the same channels."""
    random, sizes = np.random.default_rng(5), GroupSizes(groups=1, heads=2, head_dim=32, state_size=16)
    channels = random.standard_normal((12, 1, 96)).astype(np.float32) / 8
    steps, rates, skip = random.random((12, 2)), -random.random(2), random.random(2)
    inputs = SpaceInputs(*(jnp.asarray(each, jnp.float32) for each in (channels, steps, rates, skip)))
    pool = jnp.asarray(random.standard_normal((2, 3, 2, 32, 16)).astype(np.float32))
    row_ids, seq_lens, starts = (jnp.asarray(each) for each in ([0, 2, 3], [7, 80, 0], [0, 7, 8, 8]))
    slots = choose_slots(row_ids, seq_lens, jnp.diff(starts), 3)
    batch: Any = SimpleNamespace(seq_lens=seq_lens, query_start_loc=starts, max_query_len=None)
    with compile_quickly():
        (want, after), (got, found) = (
            jax.jit(lambda impl=impl: apply_space(sizes, inputs, pool, 1, batch, slots, impl))()
            for impl in ("xla", "gpu_interpret")
        )
    np.testing.assert_allclose(got, want, atol=MOST)
    np.testing.assert_allclose(found, after, atol=MOST)
