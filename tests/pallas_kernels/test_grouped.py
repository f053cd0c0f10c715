"""Grouped products against their definition, for any sizes of groups."""

from __future__ import annotations

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import QuantizedFormat
from pallas_kernels.cpu import library
from pallas_kernels.grouped.api import choose_grouped_impl, grouped_matmul
from pallas_kernels.grouped.tiles import choose_rows, count_most_tiles, list_spans, list_tiles, list_visits
from tests.examples import scale_examples
from tests.pallas_kernels.cpu_library import BUILT, needs_library
from tests.pallas_kernels.gpu_interpreter import watch_races
from tests.pallas_kernels.random_batches import draw_sizes

DTYPES = {"float32": 1e-5, "bfloat16": 2e-2}


def make(num_rows: int, sizes: list[int], width: int, columns: int, dtype: str, first: int, seed: int = 0):
    """Rows and a stack of matrices; what must not be read is NaN."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_rows, width)).astype(np.float32)
    count = max(first, MOST_BEFORE) + len(sizes) + 1  # the same for drawn ones
    w = rng.standard_normal((count, width, columns)).astype(np.float32) / np.sqrt(width)
    x[sum(sizes) :] = np.nan
    w[:first], w[first + len(sizes) :] = np.nan, np.nan
    for group, size in enumerate(sizes):
        if size == 0:
            w[first + group] = np.nan
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype), jnp.asarray(sizes, jnp.int32)


def multiply_rows(x: jax.Array, w: jax.Array, sizes: list[int], first: int) -> np.ndarray:
    """The definition, a row at a time, in float64."""
    out, row = np.zeros((x.shape[0], w.shape[2])), 0
    wide_x, wide_w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    for group, size in enumerate(sizes):
        out[row : row + size] = wide_x[row : row + size] @ wide_w[first + group]
        row += size
    return out


SHAPES = [(1, 3), (60, 12), (240, 4)]  # rows and groups: tiles of 8 rows and of 64
MOST_BEFORE = 3  # groups of the stack


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, list[int], int]:
    num_rows, num_groups = draw(st.sampled_from(SHAPES))
    return num_rows, draw(draw_sizes(num_rows, num_groups)), draw(st.integers(0, MOST_BEFORE))


@st.composite
def draw_lists(draw: st.DrawFn) -> tuple[int, list[int]]:
    """Rows, and the sizes of groups that have all of them or fewer."""
    num_rows, num_groups = draw(st.sampled_from([(1, 1), (1, 20), (37, 6), (300, 20)]))
    return num_rows, draw(draw_sizes(num_rows, num_groups))


@pytest.mark.parametrize("impl", ["xla", "tpu_interpret"])
@settings(max_examples=scale_examples(40), deadline=None)
@given(problem=problems(), dtype=st.sampled_from(sorted(DTYPES)))
def test_any_sizes(impl: str, problem: tuple[int, list[int], int], dtype: str) -> None:
    num_rows, sizes, first = problem
    x, w, counts = make(num_rows, sizes, 16, 24, dtype, first)
    got = np.asarray(grouped_matmul(x, w, counts, first, impl=impl)[0], np.float64)
    used = sum(sizes)
    assert got.shape == (num_rows, 24)
    np.testing.assert_allclose(got[:used], multiply_rows(x, w, sizes, first)[:used], rtol=0, atol=DTYPES[dtype])


@pytest.mark.parametrize(
    ("sizes", "width", "columns"),
    [
        ([0, 0, 0, 0], 96, 96),  # nothing at all
        ([300, 0, 0], 96, 32),  # all rows in one group
        ([1], 2880, 96),
        ([0, 7, 0, 130, 1, 64], 96, 2880),
        ([2] * 24, 7168, 8),
        ([1] * 5 + [0] * 123, 96, 96),  # few rows for many groups: the tiles of one row
    ],
)
@pytest.mark.parametrize("impl", ["xla", "reference", "tpu_interpret"])
def test_shapes_of_models(sizes: list[int], width: int, columns: int, impl: str) -> None:
    x, w, counts = make(max(1, sum(sizes)), sizes, width, columns, "float32", 0)
    used = sum(sizes)
    got = grouped_matmul(x, w, counts, impl=impl)[0, :used]
    np.testing.assert_allclose(got, multiply_rows(x, w, sizes, 0)[:used], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("sizes", "width", "columns"),
    [
        ([3, 0, 5], 64, 64),  # one slice along K, one warpgroup
        ([70, 0, 30, 1], 512, 128),  # the ring goes round; two warpgroups, tiles with rows of several groups
        ([0, 0], 64, 64),
        ([1] * 9, 128, 192),  # blocks of 64 columns; a tile for nine groups
        ([64, 128, 63], 64, 128),  # groups that end where tiles do, and next to it
    ],
)
def test_hopper(sizes: list[int], width: int, columns: int) -> None:
    used, first = sum(sizes), 2
    x, w, counts = make(max(1, used + 3), sizes, width, columns, "bfloat16", first)
    with watch_races() as found_races:
        got = np.asarray(grouped_matmul(x, w, counts, first, impl="gpu_interpret"), np.float64)[0, :used]
        assert not found_races()
    np.testing.assert_allclose(got, multiply_rows(x, w, sizes, first)[:used], rtol=0, atol=4e-2)


@pytest.mark.parametrize(
    ("width", "columns", "dtype", "said"),
    [(96, 64, "bfloat16", "multiples of 64"), (64, 96, "float16", "multiples of 64"), (64, 64, "float32", "16-bit")],
)
def test_what_the_hopper_kernel_cannot_do_is_named(width: int, columns: int, dtype: str, said: str) -> None:
    x, w, counts = make(4, [4], width, columns, dtype, 0)
    with pytest.raises(ValueError, match=said):
        grouped_matmul(x, w, counts, impl="gpu_interpret")
    name, reason = choose_grouped_impl(width, columns, dtype, platform="gpu", device_kind="NVIDIA H200")
    assert name == "xla" and said in reason and "slow" in reason
    name, reason = choose_grouped_impl(64, 96, dtype, platform="tpu", device_kind="TPU v6 lite")
    assert name == "xla" and "96 columns would be padded to 128" in reason


@pytest.mark.parametrize(
    ("platform", "kind", "name", "said"),
    [
        ("gpu", "NVIDIA H100 80GB HBM3", "gpu", "H100"),
        ("gpu", "NVIDIA A100-SXM4-40GB", "xla", "kernels are for Hopper and TPUs"),
        ("tpu", "TPU v5 lite", "tpu", "v5 lite"),
        ("tpu", "TPU v4", "xla", "kernels are for"),
        needs_library("cpu", "", "cpu", "C++ kernel"),
    ],
)
def test_which_implementation_a_device_gets(platform: str, kind: str, name: str, said: str) -> None:
    found, reason = choose_grouped_impl(128, 128, "bfloat16", platform=platform, device_kind=kind)
    assert found == name and said in reason


@pytest.mark.parametrize("impl", ["xla", "reference", "tpu_interpret", "gpu_interpret", needs_library("cpu")])
def test_two_parts_in_one_call(impl: str) -> None:
    sizes = [5, 0, 3]
    x, w, counts = make(8, sizes * 2, 64, 128, "bfloat16", 1)
    x, w = x.at[:].set(1.5), jnp.nan_to_num(w)
    got = np.asarray(grouped_matmul(x[:8], w, counts[:3], 1, parts=2, impl=impl), np.float64)
    for part in (0, 1):
        np.testing.assert_allclose(got[part], multiply_rows(x[:8], w, sizes, 1 + 3 * part), rtol=0, atol=5e-2)


@BUILT
@settings(max_examples=scale_examples(40), deadline=None)
@given(problem=problems(), dtype=st.sampled_from(sorted(DTYPES)), columns=st.sampled_from([64, 320, 576]))
def test_the_cpu_kernel(problem: tuple[int, list[int], int], dtype: str, columns: int) -> None:
    num_rows, sizes, first = problem
    sizes[0] += 130  # more than a product has
    x, w, counts = make(num_rows + 130, sizes, 66, columns, dtype, first)
    used = sum(sizes)
    with mock.patch.object(library, "max_product_rows", lambda dtype: 1000):
        got = np.asarray(grouped_matmul(x, w, counts, first, impl="cpu"), np.float64)[0, :used]
    np.testing.assert_allclose(got, multiply_rows(x, w, sizes, first)[:used], rtol=0, atol=DTYPES[dtype])


@BUILT
def test_many_rows_are_left_to_xla_on_a_cpu() -> None:
    def calls(num_rows: int) -> bool:
        x, w, counts = jnp.ones((num_rows, 64)), jnp.ones((2, 64, 64)), jnp.ones(2, jnp.int32)
        return library.GROUPED in jax.jit(grouped_matmul).lower(x, w, counts).as_text()

    most = 8 * library.max_product_rows("float32")
    assert calls(most) and not calls(most + 1)


@BUILT
@pytest.mark.parametrize(
    ("width", "columns", "dtype", "said"),
    [(65, 64, "float32", "an even width"), (64, 96, "float32", "64 columns"), (64, 96, "float16", "are float16")],
)
def test_what_the_cpu_kernel_cannot_do_is_named(width: int, columns: int, dtype: str, said: str) -> None:
    name, reason = choose_grouped_impl(width, columns, dtype, platform="cpu")
    assert name == "xla" and "loop over tiles" in reason and said in reason
    assert choose_grouped_impl(64, 96, "bfloat16", platform="cpu")[0] == "cpu"
    name, reason = choose_grouped_impl(64, 96, "bfloat16", platform="cpu", quantized=QuantizedFormat("int8", 64))
    assert name == "xla" and "these weights are int8" in reason


def test_a_stack_may_be_entered_anywhere_by_a_traced_number() -> None:
    x, w, counts = make(9, [4, 0, 5], 16, 8, "float32", 6)
    got = jax.jit(lambda first: grouped_matmul(x, w, counts, first))(jnp.int32(6))[0]
    np.testing.assert_allclose(got, multiply_rows(x, w, [4, 0, 5], 6), rtol=0, atol=1e-5)


@settings(max_examples=scale_examples(40), deadline=None)
@given(groups=draw_lists(), rows=st.sampled_from([1, 2, 16]))
def test_tiles_cover_each_group_once(groups: tuple[int, list[int]], rows: int) -> None:
    num_rows, sizes = groups
    tiles = list_tiles(jnp.asarray(sizes, jnp.int32), num_rows, rows)
    count = int(tiles.count)
    assert count == sum(-(-size // rows) for size in sizes) <= count_most_tiles(num_rows, len(sizes), rows)
    covered = []
    ends = np.cumsum(sizes)
    all_groups, starts = map(np.asarray, tiles[:2])
    for group, start in zip(all_groups[:count].tolist(), starts[:count].tolist(), strict=True):
        covered += [(group, row) for row in range(start, min(start + rows, ends[group]))]
    assert covered == [(group, row) for group, end in enumerate(ends) for row in range(end - sizes[group], end)]
    assert len(set(starts[count:].tolist())) <= 1, "behind the last tile it is repeated"


@settings(max_examples=scale_examples(40), deadline=None)
@given(groups=draw_lists(), rows=st.sampled_from([2, 16]))
def test_visits_cover_each_row_once_tile_by_tile(groups: tuple[int, list[int]], rows: int) -> None:
    num_rows, sizes = groups
    visits = list_visits(jnp.asarray(sizes, jnp.int32), num_rows, rows)
    count = int(visits.count)
    assert count <= visits.tiles.shape[0]
    lists = [np.asarray(field)[:count].tolist() for field in visits[:4]]
    covered = []
    for group, tile, start, end in zip(*lists, strict=True):
        covered += [(group, row) for row in range(max(start, tile * rows), min(end, (tile + 1) * rows))]
    ends = np.cumsum(sizes)
    assert covered == [(group, row) for group, end in enumerate(ends) for row in range(end - sizes[group], end)]
    assert lists[1] == sorted(lists[1]), "a tile's visits are neighbours"


@settings(max_examples=scale_examples(40), deadline=None)
@given(groups=draw_lists(), rows=st.sampled_from([8, 64]))
def test_spans_cover_each_row_once(groups: tuple[int, list[int]], rows: int) -> None:
    num_rows, sizes = groups
    spans = list_spans(jnp.asarray(sizes, jnp.int32), num_rows, rows, 8)
    count = int(spans.count)
    assert count <= spans.starts.shape[0]
    covered = []
    for group, origin, start, end in zip(*(np.asarray(field)[:count].tolist() for field in spans[:4]), strict=True):
        assert origin % 8 == 0 and origin <= start < end <= origin + rows
        covered += [(group, row) for row in range(start, end)]
    ends = np.cumsum(sizes)
    assert covered == [(group, row) for group, end in enumerate(ends) for row in range(end - sizes[group], end)]


def test_rows_of_a_tile() -> None:
    assert [choose_rows(rows, 128) for rows in (1, 128, 2000, 16384, 10**6)] == [8, 8, 16, 128, 128]


@pytest.mark.parametrize(
    ("x", "w", "sizes", "impl", "said"),
    [
        ((4, 8), (2, 9, 3), (2,), None, "wants w"),
        ((4, 8), (2, 8, 3), (3,), None, "wants w"),
        ((4, 8), (2, 8, 3), (2,), "mxu", "impl must be one of"),
    ],
)
def test_bad_calls(x: tuple[int, ...], w: tuple[int, ...], sizes: tuple[int, ...], impl: str | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        grouped_matmul(jnp.zeros(x), jnp.zeros(w), jnp.zeros(sizes, jnp.int32), impl=impl)
    with pytest.raises(ValueError, match="one dtype"):
        grouped_matmul(jnp.zeros((4, 8)), jnp.zeros((2, 8, 3), jnp.bfloat16), jnp.zeros(2, jnp.int32))
