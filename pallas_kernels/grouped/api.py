"""The public call, and which implementation answers it.

An implementation is a module with `multiply(x, w, sizes, first, parts)` and, where it cannot do everything,
`find_obstacle(width, columns, dtype, quantized) -> str | None`, in words for users.
"""

from __future__ import annotations

from importlib import import_module

import jax
import jax.numpy as jnp

from pallas_kernels.backends import choose_impl
from pallas_kernels.mosaic_gpu.toolkit import find_compiler_obstacle
from pallas_kernels.platform import traced_device_kind, traced_platform
from pallas_kernels.quantized import QuantizedArray, QuantizedFormat

_HOMES = {  # by name: a module and its function
    "reference": ("reference", "multiply"),
    "xla": ("xla", "multiply"),
    "cpu": ("cpu", "multiply"),
    "gpu": ("hopper", "multiply"),
    "gpu_interpret": ("hopper", "multiply_interpreted"),
    "tpu": ("tpu", "multiply"),
    "tpu_interpret": ("tpu", "multiply_interpreted"),
}
_PORTABLE = ("reference", "xla")  # these take values of any type
_VALUES = ("float8_e4m3fn", "int8", "int4", "float4_e2m1fn")  # of quantized matrices that the kernels read
_DEVICES = {"gpu": "Hopper", "tpu": "TPUs from v5e on"}  # of the kernels


def grouped_matmul(
    x: jax.Array,  # [M, K]
    w: jax.Array | QuantizedArray,  # [matrices, K, N]
    sizes: jax.Array,  # [G] i32
    first: int | jax.Array = 0,
    *,
    parts: int = 1,
    impl: str | None = None,
) -> jax.Array:
    """Multiplies the rows of each group with the group's matrix; returns [parts, M, N] in x's dtype.

    Rows are sorted by group: the first `sizes[0]` belong to group 0, and so on. Part p of group g has the matrix
    `w[first + p * G + g]`; gate and up of an expert are two parts, computed in one launch. `w` can be the stack of all
    layers, which would be copied if it were sliced. Rows behind the last group's may hold anything, and so does the
    result there. Matrices of empty groups are not read.

    Args:
        impl: the implementation; None for the best one on the device that is traced for.

    Raises:
        ValueError: shapes or dtypes do not fit each other, or the implementation is unknown or cannot do them.
    """
    if x.ndim != 2 or w.ndim != 3 or sizes.ndim != 1 or x.shape[1] != w.shape[1] or parts * sizes.shape[0] > w.shape[0]:
        raise ValueError(
            f"x {x.shape} wants w [>= {parts} * G, {x.shape[-1]}, N] and sizes [G], got {w.shape} and {sizes.shape}"
        )
    if isinstance(w, QuantizedArray):
        if w.order is not None:
            raise ValueError("quantized w must have no order of its rows")
    elif x.dtype != w.dtype:
        raise ValueError(f"x is {x.dtype} and w is {w.dtype}; they must be of one dtype")
    if impl is None:
        impl, _ = choose_grouped_impl(
            *w.shape[1:],
            x.dtype,
            platform=traced_platform(),
            device_kind=traced_device_kind(),
            quantized=w.format if isinstance(w, QuantizedArray) else None,
        )
    if impl not in _HOMES:
        raise ValueError(f"impl must be one of {', '.join(_HOMES)} or None, got {impl!r}")
    if isinstance(w, QuantizedArray) and impl not in _PORTABLE and (obstacle := _find_values_obstacle(w.format)):
        raise ValueError(f"impl {impl!r} cannot run: {obstacle}")
    home, function = _HOMES[impl]
    multiply = getattr(import_module(f"pallas_kernels.grouped.{home}"), function)
    return multiply(x, w, sizes.astype(jnp.int32), jnp.asarray(first, jnp.int32), parts)


def choose_grouped_impl(
    width: int,
    columns: int,
    dtype: jnp.dtype | str,
    *,
    platform: str,
    device_kind: str = "",
    quantized: QuantizedFormat | None = None,
) -> tuple[str, str]:
    """The implementation that `impl=None` means for matrices [width, columns] on a device, and the reason for users.

    `platform` and `device_kind` are those of `choose_impl`, and the kernels run where those of attention do. `dtype` is
    that of rows. `quantized`: how matrices are stored, if they are `QuantizedArray`s.
    """
    name, _ = choose_impl(platform, device_kind)
    if name in _DEVICES:
        obstacle = _find_obstacle(name, width, columns, dtype, quantized)
        if obstacle is None:
            return name, f"a Pallas kernel for grouped products, compiled for {device_kind}"
        return "xla", f"portable grouped products, which are slow here: {obstacle}"
    if platform == "cpu":
        obstacle = _find_obstacle("cpu", width, columns, dtype, quantized)
        if obstacle is None:
            return "cpu", "C++ kernel for grouped products, compiled on this machine"
        return "xla", f"portable grouped products, a loop over tiles of rows: {obstacle}"
    kernels = " and ".join(_DEVICES.values())
    return "xla", f"portable grouped products, which are slow here: the kernels are for {kernels}"


def _find_obstacle(
    name: str, width: int, columns: int, dtype: jnp.dtype | str, quantized: QuantizedFormat | None
) -> str | None:
    """Why a device's kernel cannot, or must not, multiply such matrices."""
    module = import_module(f"pallas_kernels.grouped.{_HOMES[name][0]}")
    obstacle = module.find_obstacle(width, columns, dtype, quantized)
    if obstacle is None and quantized is not None:
        obstacle = _find_values_obstacle(quantized)
    return find_compiler_obstacle() if obstacle is None and name == "gpu" else obstacle


def _find_values_obstacle(quantized: QuantizedFormat) -> str | None:
    if quantized.dtype in _VALUES:
        return None
    return f"it reads weights of {', '.join(_VALUES)}, these are {quantized.dtype}"
