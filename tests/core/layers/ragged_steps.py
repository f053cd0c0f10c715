"""Steps of ragged rows for tests of recurrences: what is nobody's is NaN, and states lie among other layers' states."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core.layers.recurrent import choose_slots

TOKENS, ROWS, SLOTS, LAYERS, LAYER = 320, 6, 9, 2, 1
MOST = 1e-5  # error

Text = tuple[np.ndarray, ...]
"""The tokens of a text, in float32 [t, ...]."""


class Chunk(NamedTuple):
    """Some tokens of a row's text in a step."""

    row: int
    text: Text
    start: int


class Rule(NamedTuple):
    """A recurrence: how it runs a step, how its arguments are made of a text, and the shape of a row's state."""

    apply: Callable[..., tuple[jax.Array, jax.Array]]  # of arguments, pool, layer, batch and slots
    pack: Callable[[Any], Text]
    state: tuple[int, ...]


def make_pool(rule: Rule) -> np.ndarray:
    """Nobody's states, which a text that begins must not see."""
    return np.full((LAYERS, SLOTS, *rule.state), np.nan, np.float32)


def cut(text: Any, start: int, stop: int) -> Any:
    """Some tokens of a text, of its type."""
    return type(text)(*(each[start:stop] for each in text))


def run(
    rule: Rule, chunks: list[Chunk], pool: Any, num_tokens: int = TOKENS, num_rows: int = ROWS
) -> tuple[list[np.ndarray], Any]:
    """The answers of each chunk, and the pool."""
    parts = [rule.pack(chunk.text) for chunk in chunks]
    arrays = [np.full((num_tokens, *part.shape[1:]), np.nan, np.float32) for part in parts[0]]
    row_ids, seq_lens = np.full(num_rows, SLOTS, np.int32), np.zeros(num_rows, np.int32)
    starts, at = np.zeros(num_rows + 1, np.int32), 0
    for index, (chunk, part) in enumerate(zip(chunks, parts, strict=True)):
        end = at + len(part[0])
        for array, values in zip(arrays, part, strict=True):
            array[at:end] = values
        row_ids[index], seq_lens[index], at = chunk.row, chunk.start + len(part[0]), end
        starts[index + 1 :] = at
    out, pool = _run_step(rule.apply, arrays, pool, (row_ids, seq_lens, starts), 1 if num_tokens == num_rows else None)
    ends = np.cumsum([len(part[0]) for part in parts])
    found = np.asarray(out)
    assert not found[ends[-1] :].any(), "padding has no answer"
    return np.split(found[: ends[-1]], ends[:-1]), pool


def _run(apply: Any, arrays: Any, pool: Any, rows: Any, longest: int | None) -> tuple[jax.Array, jax.Array]:
    row_ids, seq_lens, starts = rows
    slots = choose_slots(row_ids, seq_lens, jnp.diff(starts), SLOTS)
    batch = SimpleNamespace(seq_lens=seq_lens, query_start_loc=starts, max_query_len=longest)
    return apply(*arrays, pool, LAYER, batch, slots)


_run_step = jax.jit(_run, static_argnums=(0, 4))


def split_step(random: np.random.Generator) -> list[int]:
    """Lengths of a step's chunks: single tokens and long chunks in any order."""
    lengths: list[int] = []
    for _ in range(int(random.integers(1, ROWS + 1))):
        room = TOKENS - sum(lengths) - ROWS
        longest = int(random.choice([1, 2, 65, 200]))
        lengths.append(int(random.integers(1, max(2, min(longest, room) + 1))))
    return lengths


def draw_decays(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Logarithms of what remains: nothing decays, all of it, or some."""
    decays = {
        0: lambda: 0.0,
        1: lambda: -30.0,
        2: lambda: -random.random(shape),
        3: lambda: random.choice([0.0, -1e-3, -30.0], shape),
    }
    return np.broadcast_to(decays[int(random.integers(4))](), shape).astype(np.float32)


def check_decoding(rule: Rule, draw_text: Callable[..., Any], recur: Callable[..., Any]) -> None:
    """Steps of one token for some or all rows give the answers and states of a recurrence from zeros.

    Args:
        draw_text: (random, tokens) -> inputs.
        recur: (inputs, state) -> the answers and the state behind them, in float64.
    """
    random = np.random.default_rng(1)
    pool, states = make_pool(rule), [np.zeros(rule.state)] * SLOTS
    for step in range(20):
        rows = list(range(step % 2, SLOTS)) if step else list(range(SLOTS))
        texts = {row: draw_text(random, 1) for row in rows}
        chunks = [Chunk(row, text, step) for row, text in texts.items()]
        found, pool = run(rule, chunks, pool, num_tokens=SLOTS + 1, num_rows=SLOTS + 1)
        for row, got in zip(rows, found, strict=True):
            want, states[row] = recur(texts[row], states[row])
            np.testing.assert_allclose(got, want, atol=MOST)
            np.testing.assert_allclose(np.asarray(pool)[LAYER, row], states[row], atol=MOST)
