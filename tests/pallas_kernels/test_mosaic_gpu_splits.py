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
    COUNT,
    FIRST_TILE,
    FIXED_BYTES,
    LENGTH,
    NUM_QUERIES,
    NUM_TILES,
    ROW,
    SplitList,
    count_unit_slots,
    fix_units,
    list_splits,
    plan_splits,
)
from pallas_kernels.spec import AttnShape, KVSpec
from pallas_kernels.worklist import StepRows
from tests.examples import scale_examples

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


def find_units(splits: SplitList, row: int) -> tuple[int, int]:
    """The row's first unit, and how many it has."""
    first, count = (int(np.asarray(column)[row]) for column in (splits.row_first_unit, splits.row_num_units))
    return first, count


def tiles_of(splits: SplitList, row: int) -> list[int]:
    """The tiles of the row's units, in their order; also checks that the units name the row."""
    units = np.asarray(splits.units)
    first, count = find_units(splits, row)
    mine = units[first : first + count]
    assert (mine[:, ROW] == row).all()
    return [tile for unit in mine for tile in range(unit[FIRST_TILE], unit[FIRST_TILE] + unit[NUM_TILES])]


rows_of_a_step = st.lists(
    st.tuples(st.integers(1, 20_000), st.integers(0, 8)).map(lambda row: (max(row), row[1])), max_size=NUM_ROWS
)


@settings(max_examples=scale_examples(40), deadline=None)
@given(
    rows=rows_of_a_step,
    window=st.sampled_from([None, 1, 63, 64, 65, 1000]),
    device=st.sampled_from([(1, 1), (3, 8), (1, 264), (8, 264)]),  # KV heads, and blocks at once
    min_split_tiles=st.sampled_from([1, 8]),
)
def test_every_visible_tile_is_in_exactly_one_unit(
    rows: list[tuple[int, int]], window: int | None, device: tuple[int, int], min_split_tiles: int
) -> None:
    options = {} if window is None else {"window": window}
    num_kv_heads, num_blocks = device
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


@settings(max_examples=scale_examples(30), deadline=None)
@given(rows=rows_of_a_step)
def test_units_of_a_row_are_of_nearly_equal_length_and_not_too_short(rows: list[tuple[int, int]]) -> None:
    splits = make_splits(rows, min_split_tiles=8)
    units = np.asarray(splits.units)
    for row in range(len(rows)):
        first, count = find_units(splits, row)
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


SPEC, CONFIG = KVSpec(1, 128, 64, "bfloat16"), DecodeConfig()
WINDOWS = st.sampled_from([None, 1, 63, 64, 65, 1023, 1024, 1025, 3000])


def fix(lengths: list[int], window: int | None, max_len: int = 20_032, num_new: int = 1) -> tuple[SplitList, StepRows]:
    """The fixed list for rows of these lengths with `num_new` tokens each; length 0 is no row."""
    lens = jnp.asarray(lengths, jnp.int32)
    new = jnp.where(lens > 0, num_new, 0)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(new)])
    rows = StepRows(starts, new, lens, jnp.full(3, len(lengths)), num_new * len(lengths), num_new, max_len)
    shape = AttnShape(4, SPEC, "bfloat16", window, fixed_splits=True)
    return plan_splits(rows, new, shape, CONFIG, max_query_len=num_new), rows


def units_of(splits: SplitList, row: int) -> list[list[int]]:
    """Tiles, lengths and queries of the row's units, in their order."""
    first, count = find_units(splits, row)
    return np.asarray(splits.units)[first : first + count, FIRST_TILE : NUM_QUERIES + 1].tolist()


@settings(max_examples=scale_examples(40), deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20_000), min_size=NUM_ROWS, max_size=NUM_ROWS),
    window=WINDOWS,
    num_new=st.sampled_from([1, 3]),
)
def test_fixed_units_of_a_row_do_not_depend_on_the_others(lengths: list[int], window: int | None, num_new: int) -> None:
    lengths = [max(length, num_new) if length else 0 for length in lengths]
    splits, rows = fix(lengths, window, num_new=num_new)
    unit_tokens, num_slots = fix_units(rows, AttnShape(4, SPEC, "bfloat16", window), num_new)
    units = np.asarray(splits.units)
    num_units = int(splits.row_num_units.sum())
    assert num_units == int((units[:, NUM_TILES] > 0).sum()) <= num_slots == len(units)
    assert (units[:, COUNT] == num_units).all()
    for row, length in enumerate(lengths):
        mine = units_of(splits, row)
        oldest = 0 if window is None else max(0, length - num_new - window + 1)
        assert tiles_of(splits, row) == (list(range(oldest // TILE, -(-length // TILE))) if length else [])
        for first, count, *_ in mine:  # no unit goes past a multiple, and all but a row's ends are at one
            assert first * TILE // unit_tokens == ((first + count) * TILE - 1) // unit_tokens
        assert all(first * TILE % unit_tokens == 0 for first, *_ in mine[1:])
        for place in (0, NUM_ROWS - 1):
            alone, _ = fix([length if index == place else 0 for index in range(NUM_ROWS)], window, num_new=num_new)
            assert units_of(alone, place) == mine


@settings(max_examples=scale_examples(40), deadline=None)
@given(
    num_rows=st.sampled_from([1, 8, 256]),
    max_len=st.sampled_from([64, 512, 8192, 131_072]),
    window=WINDOWS,
    num_new=st.sampled_from([1, 4]),
    ends=st.integers(0, 2000),
)
def test_fixed_slots_hold_the_longest_rows_in_bounded_memory(
    num_rows: int, max_len: int, window: int | None, num_new: int, ends: int
) -> None:
    """Rows of any length take no more units than the slots, at whatever place of a unit their window begins."""
    splits, rows = fix([max(num_new, max_len - ends)] * num_rows, window, max_len, num_new)
    unit_tokens, num_slots = fix_units(rows, AttnShape(4, SPEC, "bfloat16", window), num_new)
    assert int(splits.row_num_units.sum()) <= num_slots
    slot_bytes = 64 * SPEC.head_dim * 4
    assert num_slots * slot_bytes <= FIXED_BYTES or (unit_tokens >= max_len and num_slots == num_rows)
    assert splits.num_blocks is not None and 1 <= splits.num_blocks <= num_slots


def test_fixed_blocks_fill_the_device_once() -> None:
    splits, _ = fix([8192] * 256, None, 8192)
    assert splits.num_blocks == CONFIG.num_sms * CONFIG.ctas_per_sm
