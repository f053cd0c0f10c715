"""Tries a kernel for grouped products against XLA on the device that is to serve with it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import QuantizedArray, QuantizedFormat, grouped_matmul, quantize

_SIZES = ((40, 0, 17, 30), (1, 0, 3, 2))  # rows of each group, as in a prompt, and in decode
_MOST_COLUMNS = 512  # more would only take the host longer
_ERROR_LIMIT = 0.02  # of the largest number: rounding to 16 bits gives up to 0.004


class Matrix(NamedTuple):
    """A matrix [width, columns] that a device has, and how it is quantized."""

    width: int
    columns: int
    quantized: QuantizedFormat | None = None


def find_fault(impl: str, matrices: Sequence[Matrix], dtype: str, device: jax.Device) -> str | None:
    """Returns what is wrong with a kernel on the device, in words for users; None if it agrees with XLA."""
    for matrix, sizes in itertools.product(matrices, _SIZES):
        try:
            error = _measure_error(impl, matrix, dtype, sizes, device)
        except Exception as raised:  # whatever a compiler or a driver raises
            text = str(raised).strip() or "without a word"
            return f"{type(raised).__name__}: {text.splitlines()[0][:300]}"
        if not error <= _ERROR_LIMIT:  # NaN included
            return f"products with [{matrix.width}, {matrix.columns}] differ by {error:.3g} of the largest number"
    return None


def _measure_error(impl: str, matrix: Matrix, dtype: str, sizes: tuple[int, ...], device: jax.Device) -> float:
    """Returns the largest difference from XLA's products, as a share of the largest number."""
    rng = np.random.default_rng(0)
    width, columns, form = matrix
    if columns > _MOST_COLUMNS:
        columns = _MOST_COLUMNS + columns % 128  # the blocks of a kernel are as wide then
    x = rng.standard_normal((sum(sizes), width), np.float32)
    numbers = rng.standard_normal((len(sizes) + 1, width, columns), np.float32) / math.sqrt(width)
    w = jnp.asarray(numbers, dtype) if form is None else _quantize(numbers, form, rng)
    arrays = jax.device_put((jnp.asarray(x, dtype), w, np.int32(sizes)), device)
    expected, found = (
        np.asarray(jax.jit(partial(grouped_matmul, first=1, impl=each))(*arrays), np.float32) for each in ("xla", impl)
    )
    return float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))


def _quantize(numbers: np.ndarray, form: QuantizedFormat, rng: np.random.Generator) -> QuantizedArray:
    """Returns matrices of few bits, with a few zero points around the middle where the format has them."""
    groups = numbers.shape[1] // form.group
    w = quantize(jnp.asarray(numbers), form.dtype, (1, form.group), groups, scale_dtype=form.scale_dtype)
    return replace(w, zeros=jnp.asarray(rng.integers(-3, 4, w.scales.shape), jnp.int8)) if form.zeros else w
