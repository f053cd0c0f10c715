"""Validation, and the derived fields of a batch against plain loops."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import AttnParams, AttnShape, KVSpec, prepare_batch
from pallas_kernels.spec import BatchMeta
from tests.examples import scale_examples

PAGE_SIZE, ROWS, WIDTH, TOKENS = 4, 6, 30, 100
SHAPE = AttnShape(1, KVSpec(1, 16, PAGE_SIZE, "float32"), "float32")


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("num_kv_heads", lambda: KVSpec(0, 64, 16, "float32")),
        ("head_dim", lambda: KVSpec(1, -1, 16, "float32")),
        ("page_size", lambda: KVSpec(1, 64, 0, "float32")),
        ("int8", lambda: KVSpec(1, 64, 16, "int8")),
        ("layout", lambda: KVSpec(1, 64, 16, "float32", "tiled")),
        ("'paired' is for head_dim 64", lambda: KVSpec(1, 128, 16, "float32", "paired")),
        ("'padded' is not for head_dim 64", lambda: KVSpec(1, 64, 16, "float32", "padded")),
        ("'paired' is for keys beside values", lambda: KVSpec(1, 64, 16, "float32", "paired", value_dim=48)),
        ("value_dim must be 1 to head_dim 64", lambda: KVSpec(1, 64, 16, "float32", value_dim=65)),
        ("num_heads", lambda: AttnShape(3, KVSpec(2, 64, 16, "float32"), "float32")),
        ("window", lambda: AttnParams(scale=1.0, window=0)),
        ("softcap", lambda: AttnParams(scale=1.0, softcap=-1.0)),
        ("softcap", lambda: AttnParams(scale=1.0, softcap=float("nan"))),
    ],
)
def test_bad_specs_are_refused_by_name(field: str, make) -> None:
    with pytest.raises(ValueError, match=field):
        make()


@jax.jit
def prepare(page_table: np.ndarray, seq_lens: np.ndarray, query_start_loc: np.ndarray, dist: np.ndarray) -> BatchMeta:
    return prepare_batch(
        page_table, seq_lens, query_start_loc, dist, num_tokens=TOKENS, shape=SHAPE, max_query_len=None, impl="xla"
    )


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """(tokens already in pages, new tokens) of each row; one-token rows first, all within TOKENS."""
    num_rows = draw(st.integers(0, ROWS))
    num_single = draw(st.integers(0, num_rows))
    new = [1 if row < num_single else draw(st.integers(1, TOKENS // ROWS)) for row in range(num_rows)]
    if num_rows > num_single:  # one long row, for several tiles
        new[-1] = draw(st.integers(1, TOKENS - sum(new[:-1])))
    return [draw(st.integers(0, WIDTH * PAGE_SIZE - count)) for count in new], new


@settings(max_examples=scale_examples(100), deadline=None)
@given(rows=rows(), seed=st.integers(0, 999))
def test_derived_fields(rows: tuple[list[int], list[int]], seed: int) -> None:
    computed, new = rows
    rng = np.random.default_rng(seed)
    page_table = rng.integers(0, 1000, (ROWS, WIDTH)).astype(np.int32)
    seq_lens = rng.integers(0, 50, ROWS).astype(np.int32)
    seq_lens[: len(new)] = np.add(computed, new)
    starts = np.zeros(ROWS + 1, np.int32)
    starts[1:] = np.cumsum(new + [0] * (ROWS - len(new)))
    num_single = next((row for row, count in enumerate(new) if count > 1), len(new))
    batch = jax.tree.map(np.asarray, prepare(page_table, seq_lens, starts, np.array([num_single, len(new), len(new)])))

    tokens = [(row, computed[row] + index) for row, count in enumerate(new) for index in range(count)]
    for token, (row, position) in enumerate(tokens):
        assert (batch.token_rows[token], batch.positions[token]) == (row, position)
        assert batch.write_pages[token] == page_table[row, position // PAGE_SIZE]
        assert batch.write_offsets[token] == position % PAGE_SIZE
    padding = slice(len(tokens), None)
    assert not batch.write_pages[padding].any() and not batch.positions[padding].any()
    assert (batch.token_rows[padding] == ROWS - 1).all()

    found = []
    for tiles in batch.work:
        used = tiles.counts > 0
        assert tiles.rows.shape[0] % tiles.group == 0
        assert used.sum() <= tiles.num_groups * tiles.group < used.sum() + tiles.group, "no group is empty"
        ends = np.where(used, tiles.positions + tiles.counts, -1)
        assert (np.diff(ends) <= 0).all(), "longest context first, unused tiles last"
        for row, start, count, position in zip(tiles.rows, tiles.starts, tiles.counts, tiles.positions, strict=True):
            assert count <= tiles.tile_tokens
            found += [(int(start) + index, int(row), int(position) + index) for index in range(count)]
    assert sorted(found) == [(token, *where) for token, where in enumerate(tokens)], "every query in exactly one tile"


def test_queries_of_cross_attention_write_nowhere_before_their_row() -> None:
    table, starts = np.asarray([[3, 4, 5]], np.int32), np.asarray([0, 6], np.int32)
    shape = replace(SHAPE, causal=False)
    options = {"num_tokens": 8, "shape": shape, "max_query_len": None, "impl": "xla"}
    batch = prepare_batch(table, np.asarray([5], np.int32), starts, np.asarray([0, 0, 1], np.int32), **options)
    assert batch.write_pages.tolist() == [0, 3, 3, 3, 3, 4, 0, 0], "six queries, five keys, pages of four"
    (tiles,) = (tiles for tiles in batch.work if tiles.counts[0] > 1)
    assert tiles.ends[0] == 5 and (tiles.query_positions[0] == 4).all(), "all see all keys"


def test_a_radius_reaches_behind_a_query_and_not_behind_its_row() -> None:
    table, starts = np.asarray([[3, 4, 5]], np.int32), np.asarray([0, 6], np.int32)
    shape = replace(SHAPE, causal=False, window=2)
    assert (shape.reach, shape.span) == (2, 5)
    options = {"num_tokens": 8, "shape": shape, "max_query_len": None, "impl": "xla"}
    batch = prepare_batch(table, np.asarray([6], np.int32), starts, np.asarray([0, 0, 1], np.int32), **options)
    (tiles,) = (tiles for tiles in batch.work if tiles.counts[0] > 1)
    assert tiles.query_positions[0].tolist()[:6] == [2, 3, 4, 5, 6, 7] and tiles.ends[0] == 6


def test_shapes_that_do_not_fit_are_refused() -> None:
    table, lens, starts, dist = np.zeros((4, 2), int), np.zeros(4, int), np.zeros(4, int), np.zeros(3, int)
    with pytest.raises(ValueError, match=r"query_start_loc \[5\].*\(4,\)"):
        prepare_batch(table, lens, starts, dist, num_tokens=4, shape=SHAPE, max_query_len=1)
    with pytest.raises(ValueError, match="max_query_len"):
        prepare_batch(table, lens, np.zeros(5, int), dist, num_tokens=4, shape=SHAPE, max_query_len=0)
    options = {"num_tokens": 4, "shape": SHAPE, "max_query_len": 1, "impl": "xla", "config": "a tuning"}
    with pytest.raises(ValueError, match=r"config: .*'a tuning'"):
        prepare_batch(table, lens, np.zeros(5, int), dist, **options)
