"""The public call, and which implementation answers it."""

from __future__ import annotations

from importlib import import_module

import jax
import jax.numpy as jnp

from pallas_kernels.backends import choose_impl
from pallas_kernels.platform import traced_device_kind, traced_platform

_HOMES = {  # by name: a module and its function
    "reference": ("reference", "multiply"),
    "xla": ("xla", "multiply"),
    "tpu": ("tpu", "multiply"),
    "tpu_interpret": ("tpu", "multiply_interpreted"),
}


def grouped_matmul(
    x: jax.Array,  # [M, K]
    w: jax.Array,  # [matrices, K, N]
    sizes: jax.Array,  # [G] i32
    first: int | jax.Array = 0,
    *,
    impl: str | None = None,
) -> jax.Array:
    """Multiplies the rows of each group with the group's matrix; returns [M, N] in x's dtype.

    Rows are sorted by group: the first `sizes[0]` belong to group 0, and so on. Group g has the matrix
    `w[first + g]`, so that `w` can be the stack of all layers, which would be copied if it were sliced. Rows behind the
    last group's are zero in the result, whatever they hold, and matrices of empty groups are not read.

    Args:
        impl: the implementation; None for the best one on the device that is traced for.

    Raises:
        ValueError: shapes or dtypes do not fit each other, or the implementation is unknown.
    """
    if x.ndim != 2 or w.ndim != 3 or sizes.ndim != 1 or x.shape[1] != w.shape[1] or sizes.shape[0] > w.shape[0]:
        raise ValueError(f"x {x.shape} wants w [>= G, {x.shape[-1]}, N] and sizes [G], got {w.shape} and {sizes.shape}")
    if x.dtype != w.dtype:
        raise ValueError(f"x is {x.dtype} and w is {w.dtype}; they must be of one dtype")
    name = choose_grouped_impl(traced_platform(), traced_device_kind())[0] if impl is None else impl
    if name not in _HOMES:
        raise ValueError(f"impl must be one of {', '.join(_HOMES)} or None, got {impl!r}")
    module, function = _HOMES[name]
    multiply = getattr(import_module(f"pallas_kernels.grouped.{module}"), function)
    return multiply(x, w, sizes.astype(jnp.int32), jnp.asarray(first, jnp.int32))


def choose_grouped_impl(platform: str, device_kind: str = "") -> tuple[str, str]:
    """The implementation that `impl=None` means on a device, and the reason for users; arguments as `choose_impl`'s."""
    if choose_impl(platform, device_kind)[0] == "tpu":
        return "tpu", f"a Pallas kernel for grouped products, compiled for {device_kind}"
    if platform == "cpu":
        return "xla", "portable grouped products: a loop over tiles of rows"
    return (
        "xla",
        f"portable grouped products, which are slow here: there is no kernel for {device_kind or platform} yet",
    )
