"""Placed parameters belong to the engine alone, whatever the caller does with what it passed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.core.weights import place_parameter
from jaxserve.core.weights.place import place_host
from jaxserve.errors import WeightsError
from tests.core.weights.checkpoints import BF16, one_device

ROWS, COLUMNS = 16, 8


def sharding() -> NamedSharding:
    return NamedSharding(one_device(), PartitionSpec())


def float_views() -> list[np.ndarray]:
    """[16, 8] float32 arrays of every alignment and layout, over memory that is 64-byte aligned or is not."""
    buffer = np.zeros(2 * ROWS * COLUMNS * 4 + 128, np.uint8)
    start = -buffer.ctypes.data % 64
    views = []
    for offset in (0, 4, 16):
        flat = buffer[start + offset :][: 2 * ROWS * COLUMNS * 4].view(np.float32)
        dense = flat[: ROWS * COLUMNS]
        views += [dense.reshape(ROWS, COLUMNS), dense.reshape(COLUMNS, ROWS).T, dense.reshape(ROWS, COLUMNS)[::-1]]
        views += [flat.reshape(ROWS, 2 * COLUMNS)[:, ::2], flat.reshape(ROWS, 2 * COLUMNS)[:, :COLUMNS]]
    return views


@pytest.mark.parametrize("case", range(15))
def test_host_arrays_stay_the_callers(case: int) -> None:
    value = float_views()[case]
    value[...] = 1
    placed = place_parameter(value, "float32", sharding(), name="w")
    value[...] = 2
    np.testing.assert_array_equal(placed, np.ones((ROWS, COLUMNS)))


@pytest.mark.parametrize("case", range(15))
def test_read_only_arrays_are_never_kept(case: int) -> None:
    """A mapped file may be changed by others while we serve."""
    value = float_views()[case]
    value[...] = 1
    view = value[...]
    view.flags.writeable = False
    placed = place_host(view, sharding())
    value[...] = 2
    np.testing.assert_array_equal(placed, np.ones((ROWS, COLUMNS)))


def test_donating_the_passed_array_does_not_delete_ours() -> None:
    value = jax.device_put(np.ones((ROWS, COLUMNS), np.float32), sharding())
    placed = place_parameter(value, "float32", sharding(), name="w")
    jax.jit(lambda x: x + 1, donate_argnums=0)(value)
    assert value.is_deleted()
    np.testing.assert_array_equal(placed, np.ones((ROWS, COLUMNS)))


@pytest.mark.parametrize("make", [np.ones, jnp.ones])
@pytest.mark.parametrize("stored", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16"])
def test_casts(make: type, stored: type, wanted: str) -> None:
    placed = place_parameter(make((ROWS, COLUMNS), stored), wanted, sharding(), name="w")
    assert str(placed.dtype) == wanted
    np.testing.assert_array_equal(placed, np.ones((ROWS, COLUMNS)))


def test_out_of_range_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"w: .*range of float16"):
        place_parameter(np.full(4, 1e6, np.float32), "float16", sharding(), name="w")
