"""Chunk tiles: every query is in one tile, and the list is long enough for any step of its bucket."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.worklist import StepRows, TileList, list_chunk_tiles
from tests.examples import scale_examples
from tests.pallas_kernels.random_batches import draw_sizes

# Of a step: tokens, rows, tokens of a tile and its unit.
SHAPES = [
    (65, 1, 32, 1),
    (33, 8, 32, 8),
    (96, 6, 8, 8),
    (96, 6, 24, 8),
    (95, 6, 40, 8),
    (50, 15, 16, 1),
    (60, 3, 128, 8),
]


def make_tiles(lens: list[int], *, skip: int, tile_tokens: int, unit: int, num_tokens: int) -> TileList:
    """The tiles of rows behind `skip` one-token rows, which are left out."""
    query_lens = np.asarray([1] * skip + lens, np.int32)
    starts = np.concatenate([[0], np.cumsum(query_lens)])
    distribution = jnp.asarray([skip, skip, skip + len(lens)])
    seq_lens = jnp.asarray(query_lens + 100)
    arrays = jnp.asarray(starts), jnp.asarray(query_lens), seq_lens, distribution
    return list_tiles(*arrays, tile_tokens=tile_tokens, unit=unit, num_tokens=num_tokens)


@partial(jax.jit, static_argnames=("tile_tokens", "unit", "num_tokens"))
def list_tiles(*arrays: jax.Array, tile_tokens: int, unit: int, num_tokens: int) -> TileList:
    rows = StepRows(*arrays, num_tokens, None, 512)
    wanted = rows.lens_between(rows.distribution[0], rows.distribution[2])
    return list_chunk_tiles(rows, wanted, tile_tokens=tile_tokens, unit=unit)


@st.composite
def draw_steps(draw: st.DrawFn) -> tuple[tuple[int, ...], int, list[int]]:
    """A shape, how many one-token rows come first, and the lengths of the others."""
    shape = draw(st.sampled_from(SHAPES))
    skip = draw(st.integers(0, shape[1] - 1))
    return shape, skip, draw(draw_sizes(shape[0] - skip, shape[1] - skip))


@settings(max_examples=scale_examples(200))
@example(step=(SHAPES[0], 0, [65]))  # these need the longest list
@example(step=(SHAPES[1], 7, [26]))
@given(step=draw_steps())
def test_every_query_is_in_one_tile(step: tuple[tuple[int, ...], int, list[int]]) -> None:
    (num_tokens, _, tile_tokens, unit), skip, lens = step
    tiles = make_tiles(lens, skip=skip, tile_tokens=tile_tokens, unit=unit, num_tokens=num_tokens)
    found: list[tuple[int, int, int]] = []
    columns = (tiles.rows, tiles.starts, tiles.counts, tiles.positions)
    for row, start, count, position in zip(*map(np.asarray, columns), strict=True):
        assert count == 0 or start % unit + count <= tile_tokens, "read from a multiple of the unit, it is one tile"
        found += [(int(row), int(start) + place, int(position) + place) for place in range(count)]
    firsts = skip + np.cumsum([0, *lens])
    wanted = [
        (skip + index, int(firsts[index]) + place, 100 + place)
        for index, length in enumerate(lens)
        for place in range(length)
    ]
    assert sorted(found) == wanted


@pytest.mark.parametrize(("tile_tokens", "unit", "most"), [(32, 1, 9), (32, 8, 9), (8, 8, 22), (128, 8, 6)])
def test_the_list_is_not_much_longer_than_it_must_be(tile_tokens: int, unit: int, most: int) -> None:
    tiles = make_tiles([16] * 6, skip=0, tile_tokens=tile_tokens, unit=unit, num_tokens=96)
    assert tiles.rows.shape[0] == most
