"""The work list of the Hopper prefill kernel: every key tile of every tile of queries in exactly one unit, and when
tiles are split."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.hopper.prefill_plan import ChunkUnits, PrefillConfig, count_slots, list_units, plan_tiles
from pallas_kernels.hopper.prefill_static import (
    BEGIN,
    COUNT,
    END,
    FIRST,
    NUM_UNITS,
    ORIGIN,
    POSITION,
    ROW,
    SLOT,
    WHOLE,
)
from pallas_kernels.spec import AttnShape, KVSpec
from pallas_kernels.worklist import StepRows, TileList
from tests.examples import scale_examples
from tests.pallas_kernels.random_batches import draw_sizes

NUM_ROWS = 6
DEVICE = PrefillConfig()


def plan(
    rows: list[tuple[int, int]],
    *,
    config: PrefillConfig = DEVICE,
    num_kv_heads: int = 8,
    window: int | None = None,
    num_rows: int = NUM_ROWS,
    num_tokens: int | None = None,
) -> tuple[TileList, ChunkUnits]:
    """The list for rows of (tokens in pages, new tokens); the bucket is no larger than they need, or `num_tokens`."""
    new = np.zeros(num_rows, np.int32)
    old = np.zeros(num_rows, np.int32)
    for index, row in enumerate(rows):
        old[index], new[index] = row
    shape = AttnShape(4 * num_kv_heads, KVSpec(num_kv_heads, 128, 64, "bfloat16"), "bfloat16", window)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    num_tokens = max(1, int(starts[-1])) if num_tokens is None else num_tokens
    arrays = map(jnp.asarray, (starts, new, np.where(new > 0, old + new, 0), np.zeros(3, np.int32)))
    return list_tiles_and_units(*arrays, num_tokens=num_tokens, shape=shape, config=config)


@partial(jax.jit, static_argnames=("num_tokens", "shape", "config"))
def list_tiles_and_units(
    *arrays: jax.Array, num_tokens: int, shape: AttnShape, config: PrefillConfig
) -> tuple[TileList, ChunkUnits]:
    step = StepRows(*arrays, num_tokens, None, 65536)
    tiles = plan_tiles(step, step.query_lens, shape)
    return tiles, list_units(tiles, step, shape, config)


def count_key_tiles(tiles: TileList, window: int | None, keys: int) -> dict[tuple[int, int], range]:
    """The key tiles that each tile of queries sees, by its row and the position of its first query."""
    found = {}
    for row, count, position in zip(*map(np.asarray, (tiles.rows, tiles.counts, tiles.positions)), strict=True):
        if count > 0:
            oldest = 0 if window is None else max(0, position - window + 1)
            found[int(row), int(position)] = range(oldest // keys, -(-int(position + count) // keys))
    return found


SMALL = PrefillConfig(keys=64, num_sms=9, min_split_tiles=1, unit_cost=0)
SHAPES = [(1, 8, DEVICE), (90, 1, DEVICE), (300, 8, DEVICE), (300, 32, DEVICE), (200, 1, SMALL), (96, 8, SMALL)]


@st.composite
def draw_steps(draw: st.DrawFn) -> tuple[tuple[int, int, PrefillConfig], list[tuple[int, int]]]:
    """A shape, which is T, K and a configuration, and rows that fill it or less."""
    shape = draw(st.sampled_from(SHAPES))
    old = draw(st.lists(st.integers(0, 20_000), min_size=NUM_ROWS, max_size=NUM_ROWS))
    return shape, list(zip(old, draw(draw_sizes(shape[0], NUM_ROWS)), strict=True))


@settings(max_examples=scale_examples(60), deadline=None)
@given(step=draw_steps(), window=st.sampled_from([None, 1, 128, 129, 5000]))
def test_every_key_tile_is_in_exactly_one_unit(
    step: tuple[tuple[int, int, PrefillConfig], list[tuple[int, int]]], window: int | None
) -> None:
    (num_tokens, num_kv_heads, config), rows = step
    tiles, found = plan(rows, config=config, num_kv_heads=num_kv_heads, window=window, num_tokens=num_tokens)
    units = np.asarray(found.units)
    used = units[units[:, COUNT] > 0]
    assert not units[len(used) :, COUNT].any(), "used units come first"
    wanted = count_key_tiles(tiles, window, config.keys)
    seen: dict[tuple[int, int], list[int]] = {tile: [] for tile in wanted}
    slots: dict[tuple[int, int], list[int]] = {tile: [] for tile in wanted}
    for unit in used:
        tile = int(unit[ROW]), int(unit[POSITION])
        assert unit[BEGIN] < unit[END] and 0 <= unit[POSITION] - unit[ORIGIN] < 8 + tiles.tile_tokens
        seen[tile] += range(unit[BEGIN], unit[END])
        slots[tile].append(int(unit[SLOT]))
    assert seen == {tile: list(span) for tile, span in wanted.items()}
    check_joins(found, used, {tile: taken for tile, taken in slots.items() if len(taken) > 1})
    assert all(taken == [WHOLE] for taken in slots.values() if len(taken) == 1)


def check_joins(found: ChunkUnits, units: np.ndarray, slots: dict[tuple[int, int], list[int]]) -> None:
    """Split tiles have slots of their own, in order, and a join each."""
    taken = [slot for each in slots.values() for slot in each]
    if found.joins is None:
        assert not taken
        return
    assert sorted(taken) == list(range(len(taken))) and len(taken) <= found.num_slots
    joins = np.asarray(found.joins)
    used = joins[joins[:, NUM_UNITS] > 0]
    assert not joins[len(used) :, NUM_UNITS].any()
    first = {int(unit[SLOT]): unit for unit in units if unit[SLOT] != WHOLE}
    assert sorted(list(range(join[SLOT], join[SLOT] + join[NUM_UNITS])) for join in used) == sorted(slots.values())
    for join in used:
        columns = [FIRST, COUNT, POSITION, ORIGIN]
        assert (join[columns] == first[int(join[SLOT])][columns]).all()


def count_blocks(found: ChunkUnits, num_kv_heads: int = 8) -> int:
    return num_kv_heads * int((np.asarray(found.units)[:, COUNT] > 0).sum())


def test_a_chats_turn_fills_the_device() -> None:
    """64 new tokens behind 32k: 16 blocks of 132 worked while tiles were not split."""
    _, found = plan([(32_768, 64)])
    units = np.asarray(found.units)
    longest = (units[:, END] - units[:, BEGIN]).max()
    assert count_blocks(found) in range(120, 133)
    assert 16 * 257 / (132 * (longest + DEVICE.unit_cost)) > 0.85  # the share of the device's time by the cost model


def test_a_turn_among_short_prompts_is_split_and_they_are_not() -> None:
    _, found = plan([(32_768, 64), (0, 40), (0, 60), (0, 33)])
    units = np.asarray(found.units)
    units = units[units[:, COUNT] > 0]
    assert (units[units[:, ROW] == 0, SLOT] >= 0).all() and (units[:, ROW] == 0).sum() > 8
    assert (units[units[:, ROW] > 0, SLOT] == WHOLE).all()


@pytest.mark.parametrize("rows", [[(0, 64)], [(300, 40)], [(0, 30), (100, 30)]])
def test_short_rows_are_not_split(rows: list[tuple[int, int]]) -> None:
    _, found = plan(rows)
    assert found.joins is not None and not np.asarray(found.joins)[:, NUM_UNITS].any()


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "num_kv_heads", "splits"),
    [
        (288, 256, 8, True),  # 255 rows that decode, and 33 tokens
        (512, 1, 8, True),  # 16 tiles of 8 heads are 128 blocks
        (544, 1, 8, False),
        (544, 512, 8, True),
        (2048, 256, 8, False),
        (2048, 256, 1, True),  # one head of eight devices: 57 blocks
        (8192, 256, 1, False),
    ],
)
def test_buckets_split_whose_chunk_cannot_fill_the_device(
    num_tokens: int, num_rows: int, num_kv_heads: int, splits: bool
) -> None:
    options = {"num_tokens": num_tokens, "num_rows": num_rows, "num_kv_heads": num_kv_heads}
    tiles, found = jax.eval_shape(lambda: plan([(32_768, 32)], **options))
    assert (found.joins is not None) == splits
    assert found.num_slots == (count_slots(num_kv_heads, DEVICE) if splits else 0)
    assert found.units.shape[0] == tiles.rows.shape[0] + found.num_slots


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8, 32])
def test_partial_answers_are_bounded_by_the_device(num_kv_heads: int) -> None:
    """Two waves of blocks, each 128 rows of 128 columns in float32: 17 MB whatever the heads."""
    size = count_slots(num_kv_heads, DEVICE) * num_kv_heads * 128 * 128 * 4
    assert size <= 19e6


@pytest.mark.parametrize("options", [{"num_sms": 0}, {"min_split_tiles": 0}, {"unit_cost": -1}])
def test_config_refuses(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"PrefillConfig.{next(iter(options))}"):
        PrefillConfig(**options)
