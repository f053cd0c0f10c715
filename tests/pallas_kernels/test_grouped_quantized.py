"""Grouped products with matrices of few bits: the kernels against the definition, for any sizes of groups."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import (
    QuantizedArray,
    QuantizedFormat,
    QuantizedProducts,
    choose_grouped_impl,
    grouped_matmul,
    quantized_matmul,
)
from tests.examples import scale_examples
from tests.pallas_kernels.gpu_interpreter import watch_races

VALUES = ("float8_e4m3fn", "int4", "int8")
GROUPS, ROWS = 5, 150  # of drawn problems, whose programs are then the same
NVFP4 = QuantizedFormat("float4_e2m1fn", 16)
MXFP4 = QuantizedFormat("float4_e2m1fn", 32, scale_dtype="bfloat16")
FORMS = [
    *(QuantizedFormat(dtype, group, zeros) for dtype in VALUES for group in (32, 64, 128) for zeros in (False, True)),
    MXFP4,
    NVFP4,
    replace(MXFP4, group=128, zeros=True),
]
H200 = {"platform": "gpu", "device_kind": "NVIDIA H200"}
V6E = {"platform": "tpu", "device_kind": "TPU v6 lite"}


def make(
    num_rows: int, sizes: list[int], width: int, columns: int, form: QuantizedFormat, first: int, parts: int, seed: int
) -> tuple[np.ndarray, QuantizedArray, jax.Array]:
    """Rows and a stack of matrices with numbers near 1; scales and rows that must not be read are NaN."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_rows, width)).astype(np.float32)
    x[sum(sizes) :] = np.nan
    count = first + parts * len(sizes) + 1
    codes = rng.integers(-8, 8, (count, width, columns))
    values = jnp.asarray(codes, "int4" if form.dtype == "float4_e2m1fn" else form.dtype)
    scales = rng.uniform(0.5, 2.0, (count, width // form.group, columns)).astype(np.float32) / 6 / np.sqrt(width)
    is_read = np.zeros(count, bool)
    for part in range(parts):
        is_read[first + part * len(sizes) :][: len(sizes)] = np.asarray(sizes) > 0
    if form.scale_dtype == "bfloat16":
        scales = np.exp2(np.round(np.log2(scales)))
    scales[~is_read] = np.nan
    zeros = jnp.asarray(rng.integers(-8, 8, scales.shape), jnp.int8) if form.zeros else None
    if values.dtype != form.dtype:
        values = jax.lax.bitcast_convert_type(values, form.dtype)
    array = QuantizedArray(values, jnp.asarray(scales, form.scale_dtype), zeros)
    return x, array, jnp.asarray(sizes, jnp.int32)


@partial(jax.jit, static_argnames=("impl", "parts"))
def multiply(x: jax.Array, w: QuantizedArray, sizes: jax.Array, first: int, *, impl: str, parts: int) -> jax.Array:
    return grouped_matmul(x, w, sizes, first, parts=parts, impl=impl)


def check(
    impl: str,
    sizes: list[int],
    width: int,
    columns: int,
    form: QuantizedFormat,
    *,
    first: int = 0,
    parts: int = 1,
    num_rows: int | None = None,
    dtype: str = "bfloat16",
    seed: int = 0,
) -> None:
    """Raises AssertionError where the kernel differs from the definition with a row of some group."""
    num_rows = max(1, sum(sizes)) if num_rows is None else num_rows
    x, w, counts = make(num_rows, sizes, width, columns, form, first, parts, seed)
    rows = jnp.asarray(x, dtype)
    with watch_races() as found_races:
        found = np.asarray(multiply(rows, w, counts, first, impl=impl, parts=parts), np.float32)
        assert not found_races()
    expected = np.asarray(multiply(rows, w, counts, first, impl="reference", parts=parts), np.float32)
    used = sum(sizes)
    assert found.shape == (parts, num_rows, columns) and np.isfinite(found[:, :used]).all()
    exact = dtype == "float32"
    atol, rtol = (1e-4, 0) if exact else (3e-2, 1e-2)  # 16 bits: weights of small groups and answers are rounded
    np.testing.assert_allclose(found[:, :used], expected[:, :used], rtol=rtol, atol=atol)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, object]:
    """Sizes of up to all rows, empty groups and one group of all rows among them."""
    left, sizes = ROWS, []
    for _ in range(GROUPS):
        sizes.append(draw(st.sampled_from([0, 1, 7, 64, left]).map(lambda size, left=left: min(size, left))))
        left -= sizes[-1]
    return {
        "sizes": sizes,
        "form": draw(st.sampled_from(FORMS)),
        "first": draw(st.integers(0, 2)),
        "parts": draw(st.sampled_from([1, 2])),
        "seed": draw(st.integers(0, 2**16)),
    }


@settings(max_examples=scale_examples(40), deadline=None)
@given(problem=problems(), dtype=st.sampled_from(["bfloat16", "float32"]))
def test_any_sizes_on_a_tpu(problem: dict[str, object], dtype: str) -> None:
    check("tpu_interpret", width=128, columns=40, num_rows=ROWS, dtype=dtype, **problem)


@pytest.mark.slow
@pytest.mark.thorough
@settings(max_examples=20, deadline=None)
@given(problem=problems(), width=st.sampled_from([128, 384]))
def test_any_sizes_on_hopper(problem: dict[str, object], width: int) -> None:
    check("gpu_interpret", width=width, columns=64, num_rows=ROWS, **problem)


CASES = [  # sizes, width, columns, format, parts
    ([3, 0, 5], 640, 128, QuantizedFormat("int8", 640), 1),  # the ring goes round; a scale for a whole column
    ([40, 0, 30], 512, 64, QuantizedFormat("float8_e4m3fn", 128), 2),  # two compute warpgroups; blocks of 128
    ([1, 2], 576, 64, QuantizedFormat("int4", 32, zeros=True), 1),  # one row, two groups in a slice
    ([2, 0, 1], 320, 64, MXFP4, 2),
    ([0, 90, 0], 192, 192, QuantizedFormat("int4", 96, zeros=True), 1),  # a slice with parts of two groups
    ([0, 0], 64, 64, QuantizedFormat("int8", 64, zeros=True), 1),  # nothing at all
    ([1] * 9, 128, 128, QuantizedFormat("int8", 64, zeros=True), 2),  # a tile for nine groups
    ([64, 128, 63], 64, 128, QuantizedFormat("int4", 64), 1),  # groups that end where tiles do
    ([0, 2, 1], 2880, 64, QuantizedFormat("float8_e4m3fn", 2880, zeros=True), 1),
    ([200, 3], 768, 128, QuantizedFormat("int4", 128, zeros=True), 1),
    ([90, 3], 2880, 64, MXFP4, 1),
    ([3, 70, 1], 192, 128, NVFP4, 2),
    ([2, 1], 192, 64, QuantizedFormat("int8", 48, zeros=True), 1),
    ([2, 5], 192, 64, replace(MXFP4, group=192), 1),
    ([2, 5], 192, 64, replace(MXFP4, group=96, scale_dtype="float32", zeros=True), 1),
]
QUICK = 3  # of them run in CI


@pytest.mark.parametrize(
    "case", [*CASES[:QUICK], *(pytest.param(case, marks=pytest.mark.thorough) for case in CASES[QUICK:])]
)
def test_hopper(case: tuple[list[int], int, int, QuantizedFormat, int]) -> None:
    sizes, width, columns, form, parts = case
    check("gpu_interpret", sizes, width, columns, form, first=2, parts=parts, num_rows=sum(sizes) + 3)


@pytest.mark.parametrize(
    ("sizes", "width", "columns", "form"),
    [
        ([0, 0, 0], 128, 128, QuantizedFormat("int8", 128)),
        ([1], 2880, 96, QuantizedFormat("int4", 32, zeros=True)),
        ([3, 0, 2], 2880, 1536, MXFP4),  # blocks of few columns
        ([0, 7, 0, 130, 1], 768, 2048, QuantizedFormat("float8_e4m3fn", 128)),  # blocks of few columns
        pytest.param([2] * 9, 7168, 8, QuantizedFormat("int8", 7168, zeros=True), marks=pytest.mark.thorough),
    ],
)
def test_tpu(sizes: list[int], width: int, columns: int, form: QuantizedFormat) -> None:
    check("tpu_interpret", sizes, width, columns, form, first=1)


@pytest.mark.parametrize(
    "dtype", [VALUES[0], *(pytest.param(dtype, marks=pytest.mark.thorough) for dtype in VALUES[1:])]
)
def test_float16_rows_on_hopper(dtype: str) -> None:
    check("gpu_interpret", [2, 1], 64, 64, QuantizedFormat(dtype, 64, zeros=dtype == "int8"), dtype="float16")


@pytest.mark.parametrize(
    ("device", "width", "columns", "form", "said"),
    [
        (H200, 96, 64, QuantizedFormat("int8", 96), "multiples of 64, these are 96 and 64"),
        (H200, 128, 96, QuantizedFormat("int8", 128), "multiples of 64, these are 128 and 96"),
        (H200, 128, 128, QuantizedFormat("int4", 8), "groups of a multiple of 16 weights, these are of 8"),
        (H200, 128, 128, QuantizedFormat("bfloat16", 128), "int8, int4, float4_e2m1fn, these are bfloat16"),
        (V6E, 128, 96, QuantizedFormat("int8", 128), "96 columns would be padded to 128"),
        (V6E, 192, 128, QuantizedFormat("int8", 96), "16, 32 weights or a multiple of 64, these are of 96"),
        (V6E, 128, 128, QuantizedFormat("float8_e5m2", 128), "these are float8_e5m2"),
    ],
)
def test_obstacles_are_named(
    device: dict[str, str], width: int, columns: int, form: QuantizedFormat, said: str
) -> None:
    name, reason = choose_grouped_impl(width, columns, "bfloat16", quantized=form, **device)
    assert name == "xla" and said in reason and "slow" in reason
    _, w, sizes = make(4, [4], width, columns, form, 0, 1, 0)
    if "padded" not in said:  # that only costs memory
        with pytest.raises(ValueError, match="these are"):
            grouped_matmul(jnp.zeros((4, width), jnp.bfloat16), w, sizes, impl=f"{device['platform']}_interpret")


@pytest.mark.parametrize("device", [H200, V6E])
def test_the_experts_of_gpt_oss_have_a_kernel(device: dict[str, str]) -> None:
    assert choose_grouped_impl(2880, 2880, "bfloat16", quantized=MXFP4, **device)[0] == device["platform"]


@pytest.mark.parametrize("device", [H200, V6E])
@pytest.mark.parametrize("form", [*FORMS, QuantizedFormat("int8", 2048), QuantizedFormat("int4", 2048, zeros=True)])
def test_kernels_are_chosen_for_usual_groups(device: dict[str, str], form: QuantizedFormat) -> None:
    assert choose_grouped_impl(2048, 768, "bfloat16", quantized=form, **device)[0] == device["platform"]


@pytest.mark.parametrize("parts", [0, 2])
def test_projections_of_few_rows_are_one_group(parts: int) -> None:
    """With an order of rows, and in parts as gate and up are."""
    form = QuantizedFormat("int4", 64, zeros=True)
    x, w, _ = make(5, [5], 128, 64, form, 0, max(parts, 1), 0)
    w = replace(w.map(lambda array: array[:parts] if parts else array[0]), order=jnp.asarray(np.arange(128)[::-1]))
    rows = jnp.asarray(x, jnp.bfloat16)
    found = np.asarray(quantized_matmul(rows, w, products=QuantizedProducts("gpu_interpret")), np.float32)
    expected = np.asarray(quantized_matmul(rows, w), np.float32)
    assert found.shape == ((2, 5, 64) if parts else (5, 64))
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=3e-2)
