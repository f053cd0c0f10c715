"""Products with quantized matrices, in every form that a device may get, against their definition in float64."""

from __future__ import annotations

from collections.abc import Iterator
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
    QuantizedProducts,
    dequantize,
    grouped_matmul,
    list_row_dtypes,
    quantize,
    quantized_matmul,
    quantized_products,
)
from tests.examples import scale_examples
from tests.pallas_kernels.random_batches import draw_sizes

VALUES = ("int4", "int8", "float8_e4m3fn", "float4_e2m1fn", "bfloat16")
PLATFORMS = ("cpu", "gpu", "tpu")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_products, "_CPU_COLUMNS", 16)
    monkeypatch.setattr(quantized_products, "_GPU_BLOCK_BYTES", 1)  # 128 columns


@pytest.fixture(params=PLATFORMS)
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The form that a platform gets, run on this one."""
    monkeypatch.setattr(quantized_products, "traced_platform", lambda: request.param)
    yield request.param


def make(
    seed: int, shape: tuple[int, ...], groups: int, dtype: str, *, zeros: bool = False, ordered: bool = False
) -> tuple[QuantizedArray, np.ndarray]:
    """A quantized array, and its matrices in float64 for columns of x as they stand."""
    rng = np.random.default_rng(seed)
    *lead, width, columns = shape
    values = np.asarray(jnp.asarray(rng.integers(-8, 8, shape), dtype), np.float64)
    scales = rng.uniform(0.1, 2.0, (*lead, groups, columns)).astype(np.float32)
    scales.flat[0] = 2.0**-30
    points = rng.integers(-8, 8, scales.shape).astype(np.int8)
    points.flat[:2] = -8, 7
    order = rng.permutation(width).astype(np.int32)
    shift = np.repeat(points, width // groups, axis=-2) if zeros else 0
    meant = (values - shift) * np.repeat(scales.astype(np.float64), width // groups, axis=-2)
    if ordered:
        meant = meant[..., np.argsort(order), :]
    array = QuantizedArray(
        jnp.asarray(values, dtype),
        jnp.asarray(scales),
        jnp.asarray(points) if zeros else None,
        jnp.asarray(order) if ordered else None,
    )
    return array, meant


@st.composite
def matrices(draw: st.DrawFn) -> tuple[int, int, int]:
    """K, G and N: groups of one row up to all of them, and columns that fill blocks or do not."""
    groups, size = draw(st.sampled_from([1, 1, 2, 3, 7])), draw(st.sampled_from([1, 5, 16]))
    return groups * size, groups, draw(st.sampled_from([1, 15, 16, 17, 40, 130]))


@settings(max_examples=12, deadline=None)
@given(matrices(), st.sampled_from(VALUES), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 2**16))
def check_products(
    matrix: tuple[int, int, int], dtype: str, zeros: bool, ordered: bool, whole: bool, seed: int
) -> None:
    width, groups, columns = matrix
    array, meant = make(seed, (width, columns), groups, dtype, zeros=zeros, ordered=ordered)
    x = np.random.default_rng(seed + 1).standard_normal((3, width)).astype(np.float32)
    found = jax.jit(lambda x, w: quantized_matmul(x, w, whole=whole))(x, array)
    assert found.dtype == jnp.float32
    scale = np.abs(x.astype(np.float64)) @ np.abs(meant) + np.abs(x).sum() * 32  # zeros are subtracted from sums
    assert (np.abs(found - x @ meant) <= 1e-6 * scale).all()


def test_any_matrix(platform: str) -> None:
    check_products()


def test_16_bits_round_as_a_dequantized_matrix_does(platform: str) -> None:
    array, meant = make(0, (64, 40), 4, "int8", zeros=True)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((5, 64)), jnp.bfloat16)
    found = np.asarray(quantized_matmul(x, array, jnp.float32), np.float64)
    wide = np.asarray(x, np.float64)
    assert np.abs(found - wide @ meant).max() <= 0.01 * (np.abs(wide) @ np.abs(meant)).max()
    assert quantized_matmul(x, array).dtype == jnp.bfloat16


@settings(max_examples=scale_examples(25), deadline=None)
@given(st.sampled_from(["int8", "float8_e4m3fn"]), st.sampled_from([1, 3, 40]), st.booleans(), st.integers(0, 2**16))
def test_rows_in_the_type_of_the_matrix(dtype: str, num_rows: int, ordered: bool, seed: int) -> None:
    """Each row is divided by its largest number, rounded as the matrix was, and scaled back after the product."""
    array, meant = make(seed, (48, 20), 1, dtype, ordered=ordered)
    x = np.random.default_rng(seed).standard_normal((num_rows, 48)).astype(np.float32)
    x *= 2.0 ** np.arange(num_rows)[:, None]
    x[0] = 0.0
    found = jax.jit(partial(quantized_matmul, products=QuantizedProducts(row_dtypes=(dtype,))))(x, array)
    most = {"int8": np.float32(127), "float8_e4m3fn": np.float32(448)}[dtype]
    scales = np.abs(x).max(axis=1, keepdims=True) / most
    scaled = x / np.where(scales > 0, scales, 1)
    rounded = np.round(scaled) if dtype == "int8" else scaled.astype(jnp.float8_e4m3fn).astype(np.float32)
    expected = (rounded.astype(np.float64) * scales) @ meant
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    plain = jax.jit(partial(quantized_matmul, products=QuantizedProducts(row_dtypes=("int4",))))(x, array)
    np.testing.assert_allclose(plain, x @ meant, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_groups_keep_rows_as_they_are() -> None:
    array, meant = make(0, (48, 20), 4, "int8")
    x = np.random.default_rng(0).standard_normal((3, 48)).astype(np.float32)
    found = quantized_matmul(jnp.asarray(x), array, products=QuantizedProducts(row_dtypes=("int8",)))
    np.testing.assert_allclose(found, x @ meant, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("platform", "kind", "expected"),
    [
        ("cpu", "cpu", ("int8",)),
        ("gpu", "NVIDIA H200", ("int8", "float8_e4m3fn")),
        ("gpu", "NVIDIA L4", ("int8", "float8_e4m3fn")),
        ("gpu", "NVIDIA A100-SXM4-40GB", ("int8",)),
        ("tpu", "TPU v6 lite", ("int8",)),
        ("tpu", "TPU7x", ("float8_e4m3fn",)),
    ],
)
def test_types_that_devices_multiply(platform: str, kind: str, expected: tuple[str, ...]) -> None:
    assert list_row_dtypes(platform, kind) == expected


@pytest.mark.parametrize("value", [2.0**-9, 448.0, -448.0])
def test_the_ends_of_8_bit_floats(platform: str, value: float) -> None:
    array = QuantizedArray(jnp.full((16, 3), value, jnp.float8_e4m3fn), jnp.full((1, 3), 3.0, jnp.float32))
    found = quantized_matmul(jnp.ones((1, 16), jnp.float32), array)
    np.testing.assert_allclose(found, np.full((1, 3), 16 * 3.0 * value), rtol=1e-6)


@settings(max_examples=scale_examples(25), deadline=None)
@given(
    st.sampled_from([(1, 1), (30, 6)]).flatmap(lambda shape: draw_sizes(*shape)),
    st.sampled_from([1, 4]),
    st.sampled_from(VALUES),
    st.booleans(),
    st.integers(0, 2),
)
def test_experts(sizes: list[int], groups: int, dtype: str, zeros: bool, first: int) -> None:
    array, meant = make(7, (2 + 2 * len(sizes) + 1, 16, 24), groups, dtype, zeros=zeros)
    x = np.random.default_rng(3).standard_normal((30, 16)).astype(np.float32)
    counts = jnp.asarray(sizes, jnp.int32)
    found = {
        impl: np.asarray(grouped_matmul(jnp.asarray(x), array, counts, first, parts=2, impl=impl))
        for impl in ("xla", "reference")
    }
    owners = np.repeat(np.arange(len(sizes)), sizes)
    for part in range(2):
        for row, owner in enumerate(owners):
            expected = x[row] @ meant[first + part * len(sizes) + owner]
            for out in found.values():
                np.testing.assert_allclose(out[part, row], expected, rtol=0, atol=1e-3)


def test_experts_that_no_kernel_multiplies_are_refused() -> None:
    x, sizes = jnp.ones((2, 16)), jnp.asarray([1, 1])
    array, _ = make(0, (2, 16, 24), 1, "bfloat16")
    with pytest.raises(ValueError, match="int8, int4, float4_e2m1fn, these are bfloat16"):
        grouped_matmul(x, array, sizes, impl="tpu_interpret")
    with pytest.raises(ValueError, match="no order of its rows"):
        grouped_matmul(x, replace(array, order=jnp.arange(16)), sizes)


def test_dequantize_keeps_the_rows_as_they_stand() -> None:
    array, meant = make(0, (2, 16, 24), 4, "int4", zeros=True)
    np.testing.assert_allclose(dequantize(array, jnp.float32), meant, rtol=1e-6)


@settings(max_examples=scale_examples(40), deadline=None)
@given(
    st.sampled_from(["float8_e4m3fn", "int8", "int4"]),
    st.sampled_from([(None, None), (1, None), (1, 4), (8, 8), (5, 3)]),
    st.sampled_from([(2, 24, 20), (24, 7), (16, 16)]),
    st.integers(0, 2**16),
)
def test_matrices_in_few_bits(
    dtype: str, block: tuple[int | None, int | None], shape: tuple[int, ...], seed: int
) -> None:
    """The scale of a block is its largest number through the type's; values are the nearest ones."""
    matrix = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    matrix[..., :4, :3] = 0.0
    columns, rows = block
    width, size = shape[-2], shape[-2] if rows is None else int(np.gcd(rows, shape[-2]))
    found = jax.device_get(jax.jit(lambda w: quantize(w, dtype, block, width // size))(matrix))
    largest = {"float8_e4m3fn": 448.0, "int8": 127.0, "int4": 7.0}[dtype]
    row_block = np.arange(width) // (rows or width)
    column_block = np.arange(shape[-1]) // (columns or shape[-1])
    for place in np.ndindex(shape):
        *lead, row, column = place
        inside = matrix[tuple(lead)][np.ix_(row_block == row_block[row], column_block == column_block[column])]
        scale = np.abs(inside).max() / largest or 1.0
        assert np.isclose(found.scales[(*lead, row // size, column)], scale, rtol=1e-6)
        step = abs(matrix[place]) / 8 + scale * 2.0**-9 if dtype.startswith("float") else scale
        value = float(found.values[place]) * scale
        assert abs(value - matrix[place]) <= 0.5 * step * 1.001
    assert str(found.values.dtype) == dtype


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([(2, 64, 5), (96, 7)]), st.integers(-8, 8), st.integers(0, 2**16))
def test_powers_of_two_as_scales(shape: tuple[int, ...], exponent: int, seed: int) -> None:
    """The largest number of 32 becomes 4 to 6, and every other the nearest value."""
    matrix = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 2.0**exponent
    matrix[..., :32, 0] = 0.0
    groups = shape[-2] // 32
    program = partial(quantize, dtype="float4_e2m1fn", block=(1, 32), groups=groups, scale_dtype="bfloat16")
    found = jax.jit(program)(matrix)
    assert found.scales.dtype == jnp.bfloat16 and found.values.dtype == jnp.float4_e2m1fn
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    largest = np.abs(matrix).reshape(*shape[:-2], groups, 32, shape[-1]).max(axis=-2)
    scales = np.where(largest > 0, 2.0 ** (np.floor(np.log2(np.maximum(largest, 1e-30))) - 2), 1.0)
    np.testing.assert_array_equal(np.asarray(found.scales, np.float32), scales)
    scaled = matrix / np.repeat(scales, 32, axis=-2)
    nearest = np.abs(np.abs(scaled)[..., None] - magnitudes).min(axis=-1)
    np.testing.assert_allclose(np.abs(np.asarray(found.values, np.float32) - scaled), nearest, atol=1e-6)


def test_values_may_be_held_in_a_wider_type() -> None:
    matrix = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
    narrow, wide = quantize(matrix, "int4", (1, 4), 4), quantize(matrix, "int4", (1, 4), 4, "int8")
    assert wide.values.dtype == jnp.int8
    np.testing.assert_array_equal(narrow.values.astype(jnp.int8), wide.values)
