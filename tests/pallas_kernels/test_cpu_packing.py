"""Products with packed matrices by the CPU's library, against NumPy; in emulated tiles where there are none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.layers.context import StepContext
from jaxserve.core.layers.linear import PACKED, linear
from pallas_kernels.cpu import library, packing
from tests.examples import scale_examples
from tests.pallas_kernels.cpu_library import BUILT

pytestmark = BUILT
SHAPES = [(32, 64), (96, 576), (3, 160, 192), (1, 64, 128)]
multiply = jax.jit(packing.multiply_packed, static_argnames=("dtype", "gated"))


def draw(seed: int, *shape: int, dtype: str) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@settings(max_examples=scale_examples(50), deadline=None)
@given(
    rows=st.integers(1, 35) | st.integers(62, 66),
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(packing.DTYPES),
    wide=st.booleans(),
    transposed=st.booleans(),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_products(
    rows: int, shape: tuple[int, ...], dtype: str, wide: bool, transposed: bool, share: float, seed: int
) -> None:
    x, w = draw(seed, rows, shape[-2], dtype=dtype), draw(seed + 1, *shape, dtype=dtype)
    used = round(share * rows)
    x = x.at[used:].set(jnp.nan)  # of padding nothing is read
    packed = packing.pack(w.swapaxes(-1, -2) if transposed else w, transposed=transposed)
    assert packed.shape == packing.find_packed_shape(shape, dtype) and packed.dtype == dtype
    out = multiply(x, packed, dtype=jnp.dtype("float32" if wide else "bfloat16"), num_rows=jnp.int32(used))
    expected = np.nan_to_num(np.asarray(x, np.float64)) @ np.asarray(w, np.float64)
    assert out.shape == expected.shape and out.dtype == (jnp.float32 if wide else jnp.bfloat16)
    largest = np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=(1e-5 if wide else 2**-8) * largest)
    assert not np.asarray(out, np.float32)[..., used:, :].any()


@settings(max_examples=scale_examples(30), deadline=None)
@given(
    rows=st.integers(1, 35) | st.integers(62, 66),
    shape=st.sampled_from([(2, 32, 64), (2, 96, 320)]),
    dtype=st.sampled_from(packing.DTYPES),
    share=st.floats(0, 1),
    scale=st.sampled_from([0.1, 1.0, 30.0]),  # of gates: nearly linear, usual, far beyond what e^x holds
    seed=st.integers(0, 2**32 - 1),
)
def test_gates(rows: int, shape: tuple[int, ...], dtype: str, share: float, scale: float, seed: int) -> None:
    x, w = draw(seed, rows, shape[-2], dtype=dtype), draw(seed + 1, *shape, dtype=dtype)
    w, used = w.at[0].multiply(scale), round(share * rows)
    x = x.at[used:].set(jnp.nan)
    out = multiply(x, packing.pack(w), dtype=jnp.dtype(dtype), num_rows=jnp.int32(used), gated=True)
    gate, up = np.nan_to_num(np.asarray(x, np.float64)) @ np.asarray(w, np.float64)
    with np.errstate(over="ignore"):
        expected = gate / (1 + np.exp(-gate)) * up
    largest = np.abs(gate).max() * np.abs(up).max()
    assert out.shape == expected.shape and out.dtype == dtype
    tolerance = 1e-5 if dtype == "float32" else 2**-8
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=tolerance, atol=1e-5 * largest)
    assert not np.asarray(out, np.float32)[used:].any()


@pytest.mark.parametrize("dtype", packing.DTYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_an_answer_does_not_depend_on_other_rows(dtype: str, gated: bool) -> None:
    x, packed = draw(2, 71, 160, dtype=dtype), packing.pack(draw(3, 2, 160, 192, dtype=dtype))
    whole = multiply(x, packed, dtype=jnp.dtype("float32"), gated=gated)
    for first, count in ((0, 1), (1, 7), (40, 16), (38, 33), (3, 64)):
        others = multiply(x[first : first + count], packed, dtype=jnp.dtype("float32"), gated=gated)
        np.testing.assert_array_equal(others, whole[..., first : first + count, :])


@pytest.mark.parametrize("dtype", packing.DTYPES)
def test_columns_are_found_again(dtype: str) -> None:
    table, ids = draw(4, 192, 96, dtype=dtype), jnp.array([0, 191, 16, 15, 64, 63, 100])  # [out, in]
    found = jax.jit(packing.take_columns)(packing.pack(table, transposed=True), ids)
    np.testing.assert_array_equal(found, table[ids])


@pytest.mark.parametrize("dtype", packing.DTYPES)
def test_nan_stays_in_its_row_and_column(dtype: str) -> None:
    x, w = draw(0, 5, 64, dtype=dtype).at[1, 3].set(jnp.nan), draw(1, 64, 64, dtype=dtype).at[7, 40].set(jnp.inf)
    broken = ~np.isfinite(np.asarray(multiply(x, packing.pack(w), dtype=jnp.dtype("float32"))))
    assert broken[1].all() and broken[:, 40].all() and broken.sum() == 64 + 4
    both = packing.pack(jnp.stack([jnp.ones_like(w), w]))
    np.testing.assert_array_equal(~np.isfinite(multiply(x, both, dtype=jnp.dtype("float32"), gated=True)), broken)


def test_sizes_that_do_not_fit() -> None:
    for shape, dtype in (((48, 64), "bfloat16"), ((64, 48), "bfloat16"), ((64, 96), "float32"), ((64, 64), "float16")):
        assert packing.find_packed_shape(shape, dtype) is None
        with pytest.raises(ValueError, match="cannot be packed"):
            packing.pack(jnp.ones(shape, dtype))
    assert packing.find_packed_shape((2, 2, 64, 64), "float32") is None
    assert packing.find_packed_shape((96, 64), "float32", transposed=True) is None
    assert packing.find_packed_shape((64, 96), "float32", transposed=True) == (1, 96, 64)


@pytest.mark.parametrize("num_rows", [None, 3])
def test_linear_multiplies_packed_matrices(num_rows: int | None) -> None:
    x, w, bias = (draw(seed, *shape, dtype="float32") for seed, shape in enumerate([(5, 64), (2, 64, 128), (2, 128)]))
    context = StepContext(mesh=None, num_rows=None if num_rows is None else jnp.int32(num_rows))
    out = linear(context, {"weight": {PACKED: packing.pack(w)}, "bias": bias}, x)
    expected = linear(StepContext(mesh=None), {"weight": w, "bias": bias}, x)
    np.testing.assert_allclose(out[:, :num_rows], expected[:, :num_rows], atol=1e-4)
    if num_rows is not None:
        np.testing.assert_array_equal(out[:, num_rows:], jnp.broadcast_to(bias[:, None], (2, 2, 128)))


def test_a_fault_is_found() -> None:
    assert packing.find_fault("float32") is None and packing.find_fault("bfloat16") is None
    right = packing.pack
    with mock.patch.object(packing, "pack", lambda w: right(jnp.roll(w, 1, axis=-1))):
        for dtype in packing.DTYPES:
            assert "they differ by" in (packing.find_fault(dtype) or "")


_EMULATED = """
import sys; from pathlib import Path; from pallas_kernels.cpu import library, packing
library._FLAGS = (*library._FLAGS, "-mno-amx-tile", "-mno-amx-bf16", "-mno-avx512f")
obstacle = library.load(Path(sys.argv[1]))
print(obstacle, library.has_tiles(), [packing.find_fault(dtype) for dtype in packing.DTYPES])
"""


@pytest.mark.thorough
@pytest.mark.skipif(not library.has_tiles(), reason="other tests call the emulation where there are no tiles")
def test_the_emulation_gives_what_tiles_give(tmp_path: Path) -> None:
    command = (sys.executable, "-c", _EMULATED, str(tmp_path))
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == "None False [None, None]\n"
