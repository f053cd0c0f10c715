"""Tokens that a verify step leaves pending: the state follows those that stay, as if they had been computed alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.layers.context import LayerContext
from jaxserve.core.layers.gated_delta import GatedDeltaConfig
from jaxserve.core.layers.mamba2 import Mamba2Config
from jaxserve.core.layers.memory import Mixer, RecurrentState
from jaxserve.core.layers.norm import NormConfig
from jaxserve.core.layers.recurrent import PENDING, choose_slots
from jaxserve.core.layers.short_conv import ShortConvConfig
from jaxserve.core.models.blocks import mix, settle

HIDDEN, LAYERS, LAYER, SLOTS, ROWS, WIDTH = 12, 3, 1, 11, 10, 4  # more rows than are computed at once
NORM = NormConfig(1e-6)
MIXERS: dict[str, Mixer] = {
    "gated delta": GatedDeltaConfig(2, 4, 8, 4, 4, "silu"),
    "state space": Mamba2Config(2, 4, 8, 16, 4, "silu"),
    "convolution": ShortConvConfig(16, 3, bias=True),
}


def make_leaves(mixer: Mixer) -> dict[str, Any]:
    random = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape) / np.sqrt(shape[0]), jnp.float32)

    match mixer:
        case GatedDeltaConfig():
            channels, heads = mixer.num_key_heads * mixer.head_channels, mixer.num_value_heads
            wide = {"qkvz": mixer.num_key_heads * mixer.head_columns, "ba": 2 * heads}
            own = {"out_norm": draw(mixer.value_dim), "decay": draw(heads), "decay_bias": draw(heads)}
            size = heads * mixer.value_dim
        case Mamba2Config():
            channels, heads, size = mixer.num_groups * mixer.group_channels, mixer.num_heads, 4 * 8
            wide = {"zxbcdt": mixer.num_groups * mixer.group_columns}
            own = {name: draw(heads) for name in ("decay", "decay_bias", "skip")}
            own |= {"out_norm": draw(size), "conv_bias": draw(channels)}
        case ShortConvConfig():
            channels = size = mixer.num_channels
            bcx = {"weight": jnp.stack([draw(HIDDEN, size) for _ in range(3)]), "bias": draw(3, size)}
            return {"bcx": bcx, "conv": draw(3, size), "conv_bias": draw(size), "o": {"weight": draw(size, HIDDEN)}}
    projections = {name: {"weight": draw(HIDDEN, columns)} for name, columns in wide.items()}
    return projections | own | {"conv": draw(mixer.conv_size, channels), "o": {"weight": draw(size, HIDDEN)}}


def make_pool(memory: RecurrentState) -> dict[str, Any]:
    """States of all layers, those of nobody NaN, and streams of a step that nobody may read."""
    memory, random = memory.with_dtype("float32"), np.random.default_rng(1)
    pool: dict[str, Any] = {}
    for array in memory.arrays:
        values = random.standard_normal((LAYERS, SLOTS, *array.shape)).astype(np.float32)
        values[:, ROWS:] = np.nan
        pool[array.name] = jnp.asarray(values)
    shapes = ((LAYERS, *each.shape[:-1], ROWS * WIDTH + 5, each.shape[-1]) for each in memory.streams)
    return pool | {PENDING: tuple(jnp.full(shape, np.nan, jnp.float32) for shape in shapes)}


def make_context(pool: Any, row_ids: np.ndarray, lengths: np.ndarray, num_tokens: int, **slots: Any) -> LayerContext:
    """Every row has 60 tokens in front of the step."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    token_rows = np.searchsorted(starts[1:], np.arange(num_tokens), side="right")
    batch: Any = SimpleNamespace(
        seq_lens=jnp.asarray(60 + lengths, jnp.int32),
        query_start_loc=jnp.asarray(starts),
        token_rows=jnp.asarray(np.minimum(token_rows, len(row_ids) - 1)),
        max_query_len=num_tokens // len(row_ids),
    )
    pending = slots.pop("pending", None)
    chosen = choose_slots(jnp.asarray(row_ids), batch.seq_lens, jnp.asarray(lengths), SLOTS, **slots)
    return LayerContext(None, None, batch, pool, LAYER, None, chosen.replace(pending=pending))


@pytest.mark.parametrize("name", MIXERS)
def test_states_follow_the_tokens_that_stay(name: str) -> None:
    """None of a row, some, or all; answers are those of single tokens. Other states keep their bits, padding too."""
    mixer = MIXERS[name]
    leaves, memory = make_leaves(mixer), mixer.memory
    assert isinstance(memory, RecurrentState)
    pool = make_pool(memory)
    row_ids, kept = np.array([7, 2, 9, 0, 5, 4, 8, 1, 3, SLOTS], np.int32), np.arange(10) % (WIDTH + 1)
    x = jnp.asarray(np.random.default_rng(2).standard_normal((ROWS, WIDTH, HIDDEN)), jnp.float32)

    ctx = make_context(pool, row_ids, np.full(ROWS, WIDTH), ROWS * WIDTH, leaves_pending=True)
    found, held = mix(mixer, NORM, leaves, x.reshape(-1, HIDDEN), ctx)
    for array in memory.arrays:
        np.testing.assert_array_equal(held[array.name], pool[array.name])

    places = [row * WIDTH + place for row in range(ROWS) for place in range(kept[row])]
    pending = jnp.asarray([*places, *[0] * (ROWS * WIDTH - len(places))])
    settled = settle(mixer, NORM, leaves, make_context(held, row_ids, kept, ROWS * WIDTH, pending=pending))

    wanted, answers = {name: each for name, each in pool.items() if name != PENDING}, []
    for place in range(WIDTH):
        going = np.where(kept > place, row_ids, SLOTS)  # a row that has ended is padding
        answer, after = mix(mixer, NORM, leaves, x[:, place], make_context(wanted, going, np.ones(ROWS, int), ROWS))
        wanted = after
        answers.append(answer)
    for array in memory.arrays:
        np.testing.assert_allclose(settled[array.name], wanted[array.name], rtol=1e-6, atol=1e-6)
        others = [slot for slot in range(SLOTS) if slot not in row_ids[kept > 0]]
        np.testing.assert_array_equal(settled[array.name][:, others], pool[array.name][:, others])
    for row, count in enumerate(kept[:-1]):
        for place in range(count):
            mine = found.reshape(ROWS, WIDTH, HIDDEN)[row, place]
            np.testing.assert_allclose(mine, answers[place][row], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MIXERS)
def test_a_state_that_is_not_finite_stays_in_its_row(name: str) -> None:
    mixer = MIXERS[name]
    leaves, memory = make_leaves(mixer), mixer.memory
    assert isinstance(memory, RecurrentState)
    pool = make_pool(memory)
    broken = {array.name: pool[array.name].at[LAYER, 4].set(jnp.nan) for array in memory.arrays}
    row_ids, x = np.arange(ROWS, dtype=np.int32), np.random.default_rng(2).standard_normal((ROWS * WIDTH, HIDDEN))
    found = []
    for states in (pool, pool | broken):
        ctx = make_context(states, row_ids, np.full(ROWS, WIDTH), ROWS * WIDTH, leaves_pending=True)
        answers, held = mix(mixer, NORM, leaves, jnp.asarray(x, jnp.float32), ctx)
        pending = jnp.arange(ROWS * WIDTH)
        after = settle(
            mixer, NORM, leaves, make_context(held, row_ids, np.full(ROWS, WIDTH), ROWS * WIDTH, pending=pending)
        )
        rows = [answers.reshape(ROWS, -1), *(after[array.name][LAYER, :ROWS] for array in memory.arrays)]
        found.append([np.delete(np.asarray(each), 4, axis=0) for each in rows])
        assert states is pool or np.isnan(answers.reshape(ROWS, -1)[4]).any()
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
