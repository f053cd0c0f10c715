"""Products with matrices of few bits.

Rows of x keep their bits, or become 8-bit numbers like the matrix's, with a scale each, where devices multiply these
(`list_row_dtypes`). Which form a product takes depends on the device, as their compilers differ (jax 0.12.0.1). Scales
of whole columns are multiplied after the product, which XLA converts on its way. Otherwise a TPU makes one product per
group and scales those, without a temporary; a GPU's compiler would write each group's partial sums to memory. So few
rows go to the kernel for grouped products where there is one. All else expands blocks of columns, small enough for a
cache: many rows share the cost.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels.backends import multiplies_fp8
from pallas_kernels.grouped.api import choose_grouped_impl, grouped_matmul
from pallas_kernels.platform import traced_platform
from pallas_kernels.quantized import (
    XLA_PRODUCTS,
    QuantizedArray,
    QuantizedFormat,
    QuantizedProducts,
    dequantize,
    quantize,
)

_CPU_COLUMNS = 512  # of a block
_GPU_BLOCK_BYTES = 8 * 2**20  # of an expanded block, which then stays in the L2 cache
Form = Callable[[jax.Array, QuantizedArray], jax.Array]
"""Multiplies x [T, K] with a matrix [K, N], in float32."""

_FP8_TPUS = ("TPU7x", "TPU v7")
_KERNEL_ROWS = 256  # at most: it reads the matrix for every 128 rows, and is no match for a library that need not


def choose_quantized_impl(
    width: int, columns: int, dtype: jnp.dtype | str, quantized: QuantizedFormat, *, platform: str, device_kind: str
) -> str:
    """The `impl` of `quantized_matmul` for a matrix on one device: "gpu" where its kernel does what XLA does slowly."""
    if platform != "gpu" or (quantized.group == width and not quantized.zeros):
        return "xla"
    choice = choose_grouped_impl(width, columns, dtype, platform=platform, device_kind=device_kind, quantized=quantized)
    return choice[0]


def list_row_dtypes(platform: str, device_kind: str = "") -> tuple[str, ...]:
    """The types of 8 bits in which a device multiplies faster than in 16; it is named as for `choose_impl`."""
    if platform == "cpu":
        return ("int8",)
    if platform == "tpu":
        return ("float8_e4m3fn",) if device_kind.startswith(_FP8_TPUS) else ("int8",)
    return ("int8", "float8_e4m3fn") if multiplies_fp8(device_kind) else ("int8",)


def quantized_matmul(
    x: jax.Array,
    w: QuantizedArray,
    dtype: jnp.dtype | None = None,
    *,
    whole: bool = False,
    products: QuantizedProducts = XLA_PRODUCTS,
) -> jax.Array:
    """Returns x [T, K] times a matrix [K, N], or matrices [parts, K, N], as [T, N] or [parts, T, N] in `dtype` or that
    of x.

    Args:
        whole: the matrix is not cut into blocks of columns, because it is small, or because it is split over a mesh,
            whose compiler would gather it first, and cannot split a kernel.
        products: how to multiply, where the matrix allows it.
    """
    dtype = x.dtype if dtype is None else dtype
    if w.order is not None:
        x, w = x[:, w.order], replace(w, order=None)
    suits = x.shape[0] <= _KERNEL_ROWS and dtype == x.dtype and not _is_scaled_after(w)
    if products.impl != "xla" and suits and not whole:
        parts = 1 if w.ndim == 2 else w.shape[0]
        matrices = w if w.ndim == 3 else w.map(lambda array: array[None])
        sizes = jnp.full(1, x.shape[0], jnp.int32)
        out = grouped_matmul(x, matrices, sizes, parts=parts, impl=products.impl)
        return out if w.ndim == 3 else out[0]
    if _is_scaled_after(w) and w.values.dtype.name in products.row_dtypes:
        return _multiply_rows(x, w, dtype)
    multiply, is_cut = _choose_form(w)
    if is_cut and not whole:
        matrices = w if w.ndim == 3 else w.map(lambda array: array[None])
        out = _multiply_blocks(x, matrices, multiply, dtype)
        return out if w.ndim == 3 else out[0]
    if w.ndim == 2:
        return multiply(x, w).astype(dtype)
    parts = (w.map(operator.itemgetter(index)) for index in range(w.shape[0]))
    return jnp.stack([multiply(x, part).astype(dtype) for part in parts])


def _is_scaled_after(w: QuantizedArray) -> bool:
    return w.scales.shape[-2] == 1 and w.zeros is None


def _multiply_rows(x: jax.Array, w: QuantizedArray, dtype: jnp.dtype) -> jax.Array:
    """Returns x [T, K] times [..., K, N], both of 8 bits, as [..., T, N]."""
    lead = w.shape[:-2]
    rows = quantize(x[..., None], w.values.dtype.name, (1, None), 1)  # each a matrix of one column
    values = jnp.broadcast_to(rows.values[..., 0], (*lead, *x.shape))
    axes = tuple(range(len(lead)))
    numbers = ((len(lead) + 1,), (len(lead),)), (axes, axes)
    kind = jnp.int32 if jnp.issubdtype(w.values.dtype, jnp.integer) else jnp.float32
    product = lax.dot_general(values, w.values, numbers, preferred_element_type=kind)
    return (product.astype(jnp.float32) * rows.scales[..., 0] * w.scales).astype(dtype)


def _choose_form(w: QuantizedArray) -> tuple[Form, bool]:
    """Returns how a matrix is multiplied with rows that keep their bits, and whether in blocks of its columns."""
    platform = traced_platform()
    if _is_scaled_after(w):
        return _scale_columns, platform == "cpu"
    return (_multiply_groups, False) if platform == "tpu" else (_expand, True)


def _dot(x: jax.Array, w: jax.Array, numbers: lax.DotDimensionNumbers = (((1,), (0,)), ((), ()))) -> jax.Array:
    """Returns a product in float32, exact where x is float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(x, w, numbers, precision=precision, preferred_element_type=jnp.float32)


def _scale_columns(x: jax.Array, w: QuantizedArray) -> jax.Array:
    return _dot(x, w.values.astype(x.dtype)) * w.scales


def _multiply_groups(x: jax.Array, w: QuantizedArray) -> jax.Array:
    groups, columns = w.scales.shape
    grouped = x.reshape(x.shape[0], groups, -1)
    values = w.values.reshape(groups, -1, columns).astype(x.dtype)
    partial_sums = _dot(grouped, values, (((2,), (1,)), ((1,), (0,))))  # [G, T, N]
    if w.zeros is not None:
        sums = jnp.sum(grouped, axis=2, dtype=jnp.float32).T
        partial_sums = partial_sums - sums[:, :, None] * w.zeros.astype(jnp.float32)[:, None]
    return jnp.sum(partial_sums * w.scales[:, None], axis=0)


def _expand(x: jax.Array, w: QuantizedArray) -> jax.Array:
    expanded = dequantize(w, x.dtype)
    if traced_platform() == "gpu":
        # XLA:GPU would transpose a whole matrix of four bits for this product, in every step (jax 0.12.0.1).
        expanded = with_layout_constraint(expanded, Layout((0, 1)))
    return _dot(x, expanded)


def _multiply_blocks(x: jax.Array, w: QuantizedArray, multiply: Form, dtype: jnp.dtype) -> jax.Array:
    """Returns x times matrices [parts, K, N], expanded block by block of their columns.

    A block is cut out of all matrices at once: XLA:CPU would copy a whole one to cut it out first.
    """
    parts, width, columns = w.shape
    block = _CPU_COLUMNS
    if traced_platform() != "cpu":
        block = max(128, _GPU_BLOCK_BYTES // (width * x.dtype.itemsize) // 128 * 128)
    whole, rest = divmod(columns, block)

    def write(out: jax.Array, part: jax.Array | int, start: jax.Array | int, size: int) -> jax.Array:
        cut = w.map(lambda array: lax.dynamic_slice(array, (part, 0, start), (1, array.shape[1], size))[0])
        return lax.dynamic_update_slice(out, multiply(x, cut).astype(dtype)[None], (part, 0, start))

    out = jnp.zeros((parts, x.shape[0], columns), dtype)
    if whole:
        out = lax.fori_loop(
            0, parts * whole, lambda index, out: write(out, index // whole, index % whole * block, block), out
        )
    for part in range(parts if rest else 0):
        out = write(out, part, whole * block, rest)
    return out
