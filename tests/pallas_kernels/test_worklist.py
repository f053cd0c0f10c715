"""Chunk tiles: every query is in one tile, and the list is long enough for any step of its bucket."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.worklist import StepRows, TileList, list_chunk_tiles
from tests.examples import scale_examples

MAX_ROWS, MAX_TOKENS = 6, 96


def make_tiles(lens: list[int], *, skip: int, tile_tokens: int, unit: int) -> TileList:
    """The tiles of rows behind `skip` one-token rows, which are left out."""
    query_lens = np.asarray([1] * skip + lens, np.int32)
    starts = np.concatenate([[0], np.cumsum(query_lens)])
    distribution = jnp.asarray([skip, skip, skip + len(lens)])
    seq_lens = jnp.asarray(query_lens + 100)
    num_tokens = max(sum(lens) + skip, 1)  # no more than there are: the list is as short as it can be
    rows = StepRows(jnp.asarray(starts), jnp.asarray(query_lens), seq_lens, distribution, num_tokens, None, 512)
    wanted = rows.lens_between(skip, skip + len(lens))
    return list_chunk_tiles(rows, wanted, tile_tokens=tile_tokens, unit=unit)


@st.composite
def list_steps(draw: st.DrawFn) -> tuple[list[int], int]:
    skip = draw(st.integers(0, 9))
    lens: list[int] = []
    most = draw(st.integers(1, MAX_ROWS))
    while len(lens) < most and (left := MAX_TOKENS - skip - sum(lens)) > 0:
        lens.append(draw(st.one_of(st.integers(1, left), st.integers(1, min(left, 9)))))
    return lens, skip


@settings(max_examples=scale_examples(200))
@example(step=([65], 0), tile_tokens=32, unit=1)  # these need the longest list
@example(step=([26], 7), tile_tokens=32, unit=8)
@given(step=list_steps(), tile_tokens=st.sampled_from([8, 16, 24, 32, 40, 128]), unit=st.sampled_from([1, 8]))
def test_every_query_is_in_one_tile(step: tuple[list[int], int], tile_tokens: int, unit: int) -> None:
    lens, skip = step
    tiles = make_tiles(lens, skip=skip, tile_tokens=tile_tokens, unit=unit)
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
    assert make_tiles([16] * 6, skip=0, tile_tokens=tile_tokens, unit=unit).rows.shape[0] == most
