"""Packed integers that are decoded where they are indexed: any part is that part of the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.models.layouts import stack_matrices
from jaxserve.core.models.matrix_formats import MatrixFormat
from jaxserve.features.quantization.byte_rows import ByteRows
from jaxserve.features.quantization.packings import PACKINGS

ROWS, COLUMNS = 24, 40
FORMS = [
    (packing, bits) for packing, bits in [("compressed", 4), ("compressed", 8), ("gptq", 4), ("gptq", 8), ("awq", 4)]
]


def make_rows(packing: str, bits: int) -> ByteRows:
    form = MatrixFormat(packing, f"int{bits}", (1, COLUMNS))
    shape = PACKINGS[packing].tensors(form, ROWS, COLUMNS)["values"].shape
    words = np.random.default_rng(0).integers(-(2**31), 2**31, shape, np.int32)
    rows = PACKINGS[packing].decoders["values"](form, words)
    assert isinstance(rows, ByteRows)
    return rows


def make_part(first: int, size: int) -> slice:
    return slice(first, first + size)


@pytest.mark.parametrize(("packing", "bits"), FORMS)
@given(data=st.data())
def test_parts_are_parts_of_the_whole(packing: str, bits: int, data: st.DataObject) -> None:
    rows = make_rows(packing, bits)
    whole = np.asarray(rows)
    assert whole.shape == rows.shape == (ROWS, COLUMNS) and whole.dtype == rows.dtype == np.int8
    assert whole.min() == -(2 ** (bits - 1)) or bits == 8
    rows_part, columns = (
        data.draw(st.builds(make_part, st.integers(0, size - 1), st.integers(1, size))) for size in whole.shape
    )
    np.testing.assert_array_equal(rows[rows_part][:, columns], whole[rows_part, columns])
    order = np.array(data.draw(st.lists(st.integers(0, len(rows[rows_part]) - 1), min_size=1, max_size=5)))
    np.testing.assert_array_equal(rows[rows_part][order, columns], whole[rows_part][order, columns])


@pytest.mark.parametrize(("packing", "bits"), FORMS)
def test_experts_are_turned(packing: str, bits: int) -> None:
    rows = make_rows(packing, bits)
    stacked = stack_matrices([rows, rows])
    np.testing.assert_array_equal(stacked[1:2, 3:30, 5:21], np.asarray(rows).T[None, 3:30, 5:21])
