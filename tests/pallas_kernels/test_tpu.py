"""The TPU kernels in their interpreter, on the shared cases, against the oracle; the pool after them too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels import gather_logical
from pallas_kernels.testing.case import LAYER, Case, Inputs, largest_error, make_inputs
from pallas_kernels.testing.cases import CASES
from pallas_kernels.testing.reference import attend_by_formula
from pallas_kernels.testing.runner import run_case
from pallas_kernels.tpu.attention import choose_layout, find_obstacle
from pallas_kernels.tpu.config import ChunkConfig, DecodeConfig, TpuConfig, count_step_pages
from tests.pallas_kernels.tpu_faults import find_race, quick_interpreter

# Compiling takes the time: of each shape that must not break unseen, one. `test_groups` has a decode step with a
# window, a soft cap and sinks, and `test_two_cores` one with 8-bit pages.
QUICK = {
    "decode",
    "decode all padding",
    "mixed",
    "mixed all padding",
    "heads of 96, window",
    "mixed latents 20 of 320, sinks",
}
TPU_CASES = [case.with_layout(choose_layout(case.spec)) for case in CASES]
TPU_CASES = [case for case in TPU_CASES if find_obstacle(case.shape) is None]
MORE = {"drafts verified, 3:1, window, sinks", "mixed fp8 4:2 of 64, window, softcap"}  # in CI, on the newest jax only
THOROUGH = [pytest.mark.slow, pytest.mark.thorough]
assert {case.name for case in TPU_CASES} >= QUICK | MORE, "a case was renamed"


def mark(case: Case) -> list[pytest.MarkDecorator]:
    if case.name in QUICK:
        return []
    return THOROUGH[:1] if case.name in MORE else THOROUGH


@pytest.fixture(autouse=True)
def _quick_interpreter() -> Any:
    with quick_interpreter():
        yield


def small_config(case: Case) -> TpuConfig:
    """The least blocks: rows have several, and tiles too, so that every hand-over happens."""
    pages = count_step_pages(case.spec.page_size)
    tokens = pages * case.spec.page_size
    decode = DecodeConfig(pages, tokens, num_buffers=2, rows_per_step=2, short_tokens=tokens)
    return TpuConfig(decode, ChunkConfig(pages, tokens, 32))


def group_config(case: Case, together: int) -> TpuConfig:
    """Rows of at most one step of keys are short, and as many stand together; a longer one has several steps."""
    decode = small_config(case).decode
    decode = replace(
        decode,
        pages_per_block=together * decode.pages_per_block,
        rows_per_step=max(together, decode.rows_per_step),
        rows_together=together,
    )
    return replace(small_config(case), decode=decode)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=mark(case)) for case in TPU_CASES])
def test_cases(case: Case) -> None:
    check_case(case, small_config(case))


@pytest.mark.parametrize(
    ("name", "together"),
    [
        ("decode 8:1 of 128, window, softcap, sinks", 4),
        pytest.param("mixed", 2, marks=THOROUGH),
        pytest.param("decode", 2, marks=THOROUGH),
        pytest.param("decode all padding", 4, marks=THOROUGH),
        pytest.param("decode fp8 4:4 of 64, window", 2, marks=THOROUGH),
        pytest.param("decode latents fp8", 4, marks=THOROUGH),
        pytest.param("drafts verified, 3:1, window, sinks", 8, marks=THOROUGH),
        pytest.param("mixed fp8 8:2 of 128", 2, marks=THOROUGH),
        pytest.param("pages wider than a block", 2, marks=THOROUGH),
    ],
)
def test_groups(name: str, together: int) -> None:
    """Short rows share blocks, also with long ones, with padding and with each other only."""
    case = find_case(name)
    config = group_config(case, together)
    check_case(case, config)


@pytest.mark.parametrize(
    ("name", "together"),
    [
        ("decode fp8 8:2 of 128", 4),
        pytest.param("mixed", 1, marks=THOROUGH),
        pytest.param("decode", 2, marks=THOROUGH),
        pytest.param("decode sinks", 4, marks=THOROUGH),
        pytest.param("decode fp8 4:4 of 64, window", 2, marks=THOROUGH),
        pytest.param("mixed fp8 4:2 of 64, window, softcap", 2, marks=THOROUGH),
        pytest.param("mixed fp8 8:2 of 128", 1, marks=THOROUGH),
        pytest.param("mixed 8:2 of 128 bfloat16, sinks", 1, marks=THOROUGH),
    ],
)
def test_two_cores(name: str, together: int) -> None:
    """Each has half of the KV heads, and neither waits for the other."""
    case = find_case(name)
    check_case(case, replace(group_config(case, together), num_cores=2))


def take_rows(inputs: Inputs, rows: Sequence[int]) -> Inputs:
    """A decode batch of these rows of another, in this order; padding has what other rows had."""
    order = [*rows, *(row for row in range(len(inputs.seq_lens)) if row not in rows)]
    starts = np.minimum(np.arange(len(order) + 1), len(rows)).astype(np.int32)
    return replace(
        inputs,
        q=inputs.q[order],
        k=inputs.k[order],
        v=inputs.v[order],
        page_table=inputs.page_table[order],
        seq_lens=inputs.seq_lens[order],
        query_start_loc=starts,
        distribution=np.full(3, len(rows), np.int32),
    )


NEIGHBOURS = [
    ("decode sinks", [(6, 5, 4, 3, 2, 1, 0), (3,), (4, 1), (0, 6, 2, 5)]),
    ("decode 8:1 of 128, window, softcap, sinks", [(2, 6, 0, 1, 5), (5,)]),
]


@pytest.mark.parametrize(
    ("name", "orders"),
    [
        pytest.param(name, orders, id=name, marks=THOROUGH if name == "decode sinks" else [])
        for name, orders in NEIGHBOURS
    ],
)
def test_neighbours_change_no_bit_of_a_row(name: str, orders: list[tuple[int, ...]]) -> None:
    """Alone, among others, and at other places of a group, which then has other rows to wait for."""
    case = find_case(name)
    inputs, config = make_inputs(case), group_config(case, 4)
    lengths = [computed + new for computed, new in case.rows]
    assert min(lengths) <= config.decode.short_tokens < max(lengths), "short rows and long ones"

    def run(rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        out, pool = run_case(case, take_rows(inputs, rows), impl="tpu_interpret", config=config)
        assert not find_race()
        return np.asarray(out).view(np.uint16), np.asarray(pool).view(np.uint16)

    out, pool = run(range(len(lengths)))
    for rows in orders:
        found, found_pool = run(rows)
        for place, row in enumerate(rows):
            np.testing.assert_array_equal(found[place], out[row])
            last = inputs.page_table[row, (lengths[row] - 1) // case.spec.page_size] + LAYER * inputs.num_pages
            np.testing.assert_array_equal(found_pool[last], pool[last])


def test_nan_in_a_short_row_stays_in_it() -> None:
    """Its keys and values lie in the block of its neighbours, and later in that of others."""
    case = find_case("decode 8:1 of 128, window, softcap, sinks")
    inputs, config, row = make_inputs(case), group_config(case, 4), 2
    pages = inputs.kv_pages.copy()
    pages[LAYER * inputs.num_pages + inputs.page_table[row, 0]] = np.nan
    clean, _ = run_case(case, inputs, impl="tpu_interpret", config=config)
    out, _ = run_case(case, replace(inputs, kv_pages=pages), impl="tpu_interpret", config=config)
    clean, out = (np.asarray(each, np.float32) for each in (clean, out))
    assert np.isnan(out[row]).all()
    np.testing.assert_array_equal(np.delete(out, row, 0), np.delete(clean, row, 0))


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["chunks and others, window", "drafts verified"])
def test_default_blocks(name: str) -> None:
    """What they depend on beside the shape: windows, and the longest row. The rest is in test_long_cases.py."""
    check_case(find_case(name), None)


@pytest.mark.slow
@pytest.mark.thorough
def test_more_buffers_than_blocks() -> None:
    """The ring runs several rows ahead; its last copies are for rows that do not exist."""
    case = find_case("decode one row of many")
    small = small_config(case)
    check_case(replace(case, rows=((70, 1), (3, 1))), replace(small, decode=replace(small.decode, num_buffers=4)))


def check_case(case: Case, config: TpuConfig | None) -> None:
    inputs = make_inputs(case)
    out, pool = run_case(case, inputs, impl="tpu_interpret", config=config)
    expected, expected_pool = attend_by_formula(case, inputs)
    assert out.dtype == inputs.q.dtype and not find_race()
    assert largest_error(case, out, expected, inputs.num_tokens) < 1
    check_pool(case, inputs, pool, expected_pool)


def check_pool(case: Case, inputs: Inputs, pool: jax.Array, expected: jax.Array) -> None:
    """Every row's tokens are what they should be; no other page has changed by a bit."""
    before, after = (np.asarray(array).view(np.uint8) for array in (inputs.kv_pages, pool))
    may_change = set()
    for row, (computed, new) in enumerate(case.rows):
        table, size = inputs.page_table[row], case.spec.page_size
        may_change |= {
            int(page) + LAYER * inputs.num_pages for page in table[computed // size : -(-(computed + new) // size)]
        }
        first = 0 if case.window is None else max(0, computed - case.window + 1) // size  # older pages are stale
        # Whole tables, because each length would be a program of its own.
        length, offset = case.table_width * size, LAYER * inputs.num_pages
        held = [gather_logical(array, table, length, case.spec, page_offset=offset) for array in (pool, expected)]
        for found, wanted in zip(*held, strict=True):
            mine = slice(first * size, computed + new)
            np.testing.assert_array_equal(found[mine].view(np.uint8), wanted[mine].view(np.uint8))
    untouched = [page for page in range(before.shape[0]) if page not in may_change]
    np.testing.assert_array_equal(after[untouched], before[untouched])


def find_case(name: str) -> Case:
    return next(case for case in TPU_CASES if case.name == name)


def test_nan_in_one_row_stays_in_it() -> None:
    """Neither a row's pages nor its new tokens reach rows whose tiles share a block with its own."""
    case = find_case("mixed")
    inputs, row = make_inputs(case), 5
    begin, end = inputs.query_start_loc[row : row + 2]
    pages, v = inputs.kv_pages.copy(), inputs.v.copy()
    pages[LAYER * inputs.num_pages + inputs.page_table[row, 0]] = np.nan
    v[begin:end] = np.nan
    config = small_config(case)
    out, _ = run_case(case, replace(inputs, kv_pages=pages, v=v), impl="tpu_interpret", config=config)
    clean, _ = run_case(case, inputs, impl="tpu_interpret", config=config)
    assert np.isnan(out[begin:end]).all()
    np.testing.assert_array_equal(np.delete(out, slice(begin, end), 0), np.delete(clean, slice(begin, end), 0))


def test_two_steps_follow_each_other() -> None:
    """A chunk, then one token: what the first step wrote, right behind older tokens, the second reads."""
    first = replace(find_case("mixed"), name="chunk", rows=((37, 40),))
    second = replace(find_case("decode"), name="token", rows=((77, 1),))
    inputs = make_inputs(first)
    following = make_inputs(second, seed=1)
    following = replace(following, page_table=inputs.page_table, num_pages=inputs.num_pages)
    _, pool = run_case(first, inputs, impl="tpu_interpret", config=small_config(first))
    following = replace(following, kv_pages=np.asarray(pool))
    out, _ = run_case(second, following, impl="tpu_interpret", config=small_config(second))
    expected_pool = attend_by_formula(first, inputs)[1]
    expected, _ = attend_by_formula(second, replace(following, kv_pages=expected_pool))
    assert largest_error(second, out, expected, 1) < 1
