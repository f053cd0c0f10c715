"""Products of few rows by the CPU's library, against NumPy."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.layers.context import StepContext
from jaxserve.core.layers.linear import linear
from pallas_kernels.cpu import library, product
from tests.examples import scale_examples
from tests.pallas_kernels.cpu_library import BUILT

pytestmark = BUILT
SHAPES = [(2, 64), (66, 576), (3, 130, 192), (1, 64, 512)]  # less and more than a strip of columns or a block of rows
TABLES = [(64, 32), (576, 64), (128, 544)]  # [out, in]
multiply = jax.jit(product.multiply_few_rows, static_argnames=("dtype", "transposed"))


def draw(seed: int, *shape: int, dtype: str = "bfloat16") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@settings(max_examples=scale_examples(50), deadline=None)
@given(
    rows=st.integers(1, 33) | st.integers(62, 66),
    shape=st.sampled_from([*SHAPES, *TABLES]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    wide=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_products(rows: int, shape: tuple[int, ...], dtype: str, wide: bool, seed: int) -> None:
    transposed = shape in TABLES
    x, w = draw(seed, rows, shape[-1 if transposed else -2], dtype=dtype), draw(seed + 1, *shape, dtype=dtype)
    out = multiply(x, w, dtype=jnp.float32 if wide else jnp.bfloat16, transposed=transposed)
    matrix = np.asarray(w, np.float64)
    expected = np.asarray(x, np.float64) @ (matrix.T if transposed else matrix)
    assert out.shape == expected.shape and out.dtype == (jnp.float32 if wide else jnp.bfloat16)
    largest = np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=(1e-5 if wide else 2**-8) * largest)


@pytest.mark.parametrize("transposed", [False, True])
def test_nan_stays_in_its_row_and_column(transposed: bool) -> None:
    x, w = draw(0, 5, 64).at[1, 3].set(jnp.nan), draw(1, 64, 64).at[7, 40].set(jnp.inf)
    out = np.asarray(multiply(x, w.T if transposed else w, dtype=jnp.float32, transposed=transposed))
    broken = ~np.isfinite(out)
    assert broken[1].all() and broken[:, 40].all() and broken.sum() == 64 + 4


def test_linear_takes_it_for_few_rows_of_what_it_suits() -> None:
    def calls(rows: int, shape: tuple[int, ...], dtype: str = "bfloat16", few_rows: int = 8, **options: bool) -> bool:
        context = StepContext(mesh=None, few_rows=few_rows)
        x = jnp.ones((rows, shape[-1 if options else -2]), dtype)
        program = jax.jit(lambda x, w: linear(context, {"weight": w}, x, **options))
        name = library.TABLE_PRODUCT if options else library.PRODUCT
        return f"{name}_" in program.lower(x, jnp.ones(shape, dtype)).as_text()

    for dtype in ("float32", "bfloat16"):
        assert calls(8, (64, 192), dtype) and calls(1, (3, 64, 192), dtype)
        assert not calls(9, (64, 192), dtype) and not calls(8, (64, 192), dtype, few_rows=0)
        assert calls(8, (192, 64), dtype, transposed=True) and calls(1, (64, 32), dtype, transposed=True)
        most = library.max_table_rows(dtype)
        assert most >= 8 and calls(most, (192, 64), dtype, few_rows=most + 1, transposed=True)
        assert not calls(most + 1, (192, 64), dtype, few_rows=most + 1, transposed=True)
        assert not calls(8, (192, 66), dtype, transposed=True) and not calls(8, (90, 64), dtype, transposed=True)
        assert calls(16, (2048, 4096), dtype, few_rows=32) and not calls(17, (2048, 4096), dtype, few_rows=32)
        assert not calls(8, (63, 192), dtype) and not calls(8, (64, 90), dtype)
    assert not calls(8, (64, 192), "float16")


def test_a_fault_is_found() -> None:
    assert product.find_fault(4, "float32") is None and product.find_fault(4, "bfloat16") is None
    right = product.multiply_few_rows

    for broken in (False, True):  # with a matrix [in, out], and with one [out, in]

        def multiply(x: jax.Array, w: jax.Array, dtype: jnp.dtype, *, transposed: bool, broken: bool = broken) -> Any:
            return right(x, w, dtype, transposed=transposed) * (1.01 if transposed is broken else 1.0)

        with mock.patch.object(product, "multiply_few_rows", multiply):
            assert "differ by 0.0" in (product.find_fault(4, "bfloat16") or "")
    assert library.max_product_rows("bfloat16") >= 2 and not library.max_product_rows("float16")


@pytest.mark.parametrize("shape", [(66, 576), *TABLES[1:]])
@pytest.mark.parametrize("rows", [2, 7, 32])
def test_an_answer_does_not_depend_on_other_rows(rows: int, shape: tuple[int, int]) -> None:
    transposed = shape in TABLES
    x, w = draw(2, rows, shape[1 if transposed else 0]), draw(3, *shape)
    whole = multiply(x, w, dtype=jnp.float32, transposed=transposed)
    for row in {1, rows - 1}:
        zeros = jnp.zeros_like(x).at[row].set(x[row])
        others = multiply(zeros, w, dtype=jnp.float32, transposed=transposed)
        np.testing.assert_array_equal(others[row], whole[row])
        alone = multiply(x[row : row + 1], w, dtype=jnp.float32, transposed=transposed)
        np.testing.assert_array_equal(alone[0], whole[row])
