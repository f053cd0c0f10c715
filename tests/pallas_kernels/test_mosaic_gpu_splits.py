"""The work list of the GPU's decode kernel: every visible tile in exactly one unit, within the static slots."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ampere.config import UnitConfig
from pallas_kernels.hopper.decode import DecodeConfig
from pallas_kernels.mosaic_gpu.splits import (
    FIRST_TILE,
    LENGTH,
    NUM_QUERIES,
    NUM_TILES,
    ROW,
    SplitList,
    count_unit_slots,
    list_splits,
)

NUM_ROWS, TILE = 5, 64


def make_splits(
    rows: list[tuple[int, int]], *, num_kv_heads: int = 1, num_blocks: int = 8, min_split_tiles: int = 1, **options: int
) -> SplitList:
    """The list for rows of (tokens, new tokens among them), padded to NUM_ROWS."""
    lens = np.zeros((2, NUM_ROWS), np.int32)
    for index, row in enumerate(rows):
        lens[:, index] = row
    return list_splits(
        jnp.asarray(lens[1]),
        jnp.asarray(lens[0]),
        num_slots=count_unit_slots(NUM_ROWS, num_kv_heads, num_blocks),
        num_kv_heads=num_kv_heads,
        num_blocks=num_blocks,
        tile_tokens=TILE,
        min_split_tiles=min_split_tiles,
        unit_cost=3,
        max_queries=8,
        window=options.get("window"),
    )


def tiles_of(splits: SplitList, row: int) -> list[int]:
    """The tiles of the row's units, in their order; also checks that the units name the row."""
    units = np.asarray(splits.units)
    first, count = int(splits.row_first_unit[row]), int(splits.row_num_units[row])
    mine = units[first : first + count]
    assert (mine[:, ROW] == row).all()
    return [tile for unit in mine for tile in range(unit[FIRST_TILE], unit[FIRST_TILE] + unit[NUM_TILES])]


rows_of_a_step = st.lists(
    st.tuples(st.integers(1, 20_000), st.integers(0, 8)).map(lambda row: (max(row), row[1])), max_size=NUM_ROWS
)


@settings(max_examples=40, deadline=None)
@given(
    rows=rows_of_a_step,
    window=st.sampled_from([None, 1, 63, 64, 65, 1000]),
    num_kv_heads=st.sampled_from([1, 3, 8]),
    num_blocks=st.sampled_from([1, 8, 264]),
    min_split_tiles=st.sampled_from([1, 8]),
)
def test_every_visible_tile_is_in_exactly_one_unit(
    rows: list[tuple[int, int]], window: int | None, num_kv_heads: int, num_blocks: int, min_split_tiles: int
) -> None:
    options = {} if window is None else {"window": window}
    splits = make_splits(
        rows, num_kv_heads=num_kv_heads, num_blocks=num_blocks, min_split_tiles=min_split_tiles, **options
    )
    units = np.asarray(splits.units)
    for row, (length, num_queries) in enumerate(rows):
        oldest = 0 if window is None else max(0, length - num_queries - window + 1)
        wanted = list(range(oldest // TILE, -(-length // TILE))) if num_queries else []
        assert tiles_of(splits, row) == wanted
    assert int(jnp.sum(splits.row_num_units)) == int(np.sum(units[:, NUM_TILES] > 0)) <= len(units)
    for unit in units[units[:, NUM_TILES] > 0]:
        assert tuple(unit[[LENGTH, NUM_QUERIES]]) == rows[unit[ROW]]


@settings(max_examples=30, deadline=None)
@given(rows=rows_of_a_step)
def test_units_of_a_row_are_of_nearly_equal_length_and_not_too_short(rows: list[tuple[int, int]]) -> None:
    splits = make_splits(rows, min_split_tiles=8)
    units = np.asarray(splits.units)
    for row in range(len(rows)):
        first, count = int(splits.row_first_unit[row]), int(splits.row_num_units[row])
        lengths = units[first : first + count, NUM_TILES]
        if count > 1:
            assert lengths.max() - lengths.min() <= 1
            assert lengths.sum() > 8 * (count - 1)  # as many units as the shortest split length allows, at most


def test_rows_without_queries_have_no_units() -> None:
    splits = make_splits([(100, 1), (500, 0), (100, 1)])
    assert (splits.row_num_units > 0).tolist() == [True, False, True, False, False]
    assert not np.asarray(splits.units)[int(jnp.sum(splits.row_num_units)) :].any()


def test_one_long_row_fills_the_device() -> None:
    splits = make_splits([(64_000, 1)], num_kv_heads=2, num_blocks=264, min_split_tiles=4)
    assert 2 * int(splits.row_num_units[0]) in range(200, 265)


@pytest.mark.parametrize("config", [DecodeConfig(), UnitConfig()])
def test_one_row_of_a_chat_fills_the_device(config: DecodeConfig | UnitConfig) -> None:
    """4,096 tokens of the 8B shape: 64 of 264 blocks worked while the shortest unit was 512 tokens long."""
    shortest = -(-config.min_split_tokens // TILE)
    splits = make_splits([(4096, 1)], num_kv_heads=8, num_blocks=264, min_split_tiles=shortest)
    assert 8 * int(splits.row_num_units[0]) in range(200, 265)


def test_rows_that_fill_the_device_are_not_cut() -> None:
    splits = make_splits([(4096, 1)] * NUM_ROWS, num_kv_heads=8, num_blocks=40)
    assert splits.row_num_units.tolist() == [1] * NUM_ROWS


def test_a_long_row_among_short_ones_is_cut() -> None:
    splits = make_splits([(64_000, 1), *[(640, 1)] * 4], num_kv_heads=4, num_blocks=40)
    assert int(splits.row_num_units[0]) > 4
    assert max(splits.row_num_units.tolist()[1:]) <= 2
