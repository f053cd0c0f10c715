"""Parts of Pallas Mosaic GPU that only Hopper's kernels use: wgmma, and the sizes of shared memory.

The interpreter runs wgmma with both operands in shared memory, and finds its races. It has no wgmma with an operand in
registers, and no accumulator that starts from a value. So `multiply_pv` is emulated there, by a read of shared memory
and a dot. Everything that can race stays as on the device.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import compat

ROWS = 64  # rows of one wgmma; the first operand has this many
MAX_SMEM_BYTES = 232_448  # limit of one block: 228 KiB less 1 KiB that the SM keeps per block
SM_SMEM_BYTES = 233_472  # 228 KiB per SM, shared by its blocks

_NARROW = plgpu.Layout.WGMMA_UPCAST_2X


def _do_nothing() -> None: ...


def hide_zero(index: jax.Array) -> jax.Array:
    """0, from a tile's number, in a way that compilers do not see through: of an operand that never moves they would
    keep the addresses of all parts in registers, from tile to tile."""
    return lax.shift_right_logical(index, 30)


def multiply_qk(q: jax.Ref, k: jax.Ref, while_running: Callable[[], None] = _do_nothing) -> jax.Array:
    """q [rows, H] @ k [keys, H].T, both in shared memory: [rows, keys] f32 in registers, complete.

    `while_running` is called when the product has begun.
    """

    def product(acc: jax.Ref) -> jax.Array:
        plgpu.wgmma(acc, q, k.T)
        while_running()
        return acc[...]

    return pl.run_scoped(product, plgpu.ACC((q.shape[0], k.shape[0]), jnp.float32))


def multiply_parts(q: jax.Ref, k: jax.Ref) -> jax.Array:
    """(q[0] + q[1]) @ k.T as in `multiply_qk`, for q [2, rows, H] and k of 8 bits."""

    def product(acc: jax.Ref) -> jax.Array:
        plgpu.wgmma(acc, q.at[0], k.T)
        plgpu.wgmma(acc, q.at[1], k.T)
        return acc[...]

    return pl.run_scoped(product, plgpu.ACC((q.shape[1], k.shape[0]), jnp.float32))


def multiply_pv(
    acc: jax.Array,
    weights: jax.Array,
    v: jax.Ref,
    while_running: Callable[[], None] = _do_nothing,
    *,
    interpret: bool,
) -> jax.Array:
    """acc [rows, H] f32 + weights [rows, keys] @ v [keys, H]; the first two in registers, v in shared memory.

    Complete on return, so that v's slot may be given back. `while_running` as in `multiply_qk`.
    """
    if interpret:
        added = jnp.dot(weights, v[...], preferred_element_type=jnp.float32)
        compat.commit_smem()  # wgmma would read through the async proxy; a plain read must be made visible to TMA
        while_running()
        return acc + added

    def product(ref: jax.Ref) -> None:
        plgpu.wgmma(ref, weights, v)
        while_running()

    return pl.run_state(product)(plgpu.ACC.init(acc))


def multiply_both[T](
    scores: tuple[jax.Ref, jax.Ref],  # q [rows, H] and k [keys, H] in shared memory
    values: tuple[jax.Array, jax.Array, jax.Ref],  # as in multiply_pv: acc, weights, v
    between: Callable[[], None],
    while_running: Callable[[], None],
    use: Callable[[jax.Array], T],
    *,
    interpret: bool,
) -> tuple[jax.Array, T]:
    """Two products that run one behind the other: q @ k.T as in `multiply_qk`, then acc + weights @ v.

    `between` is called when the first has begun, `while_running` when both have. `use` gets the first one's result
    while the second runs. Returns the second's and what `use` returned.
    """
    (q, k), (acc, weights, v) = scores, values
    if interpret:
        found = multiply_qk(q, k)
        between()
        acc = multiply_pv(acc, weights, v, while_running, interpret=True)
        return acc, use(found)

    def products(first: jax.Ref, second: jax.Ref) -> tuple[jax.Array, T]:
        plgpu.wgmma(first, q, k.T)
        between()
        second[...] = acc
        plgpu.wgmma(second, weights, v)
        while_running()
        used = use(plgpu.wgmma_accumulator_load(first, wait_n=1))
        return lax.optimization_barrier((plgpu.wgmma_accumulator_load(second, wait_n=0), used))

    accumulators = [plgpu.ACC((q.shape[0], k.shape[0]), jnp.float32), plgpu.ACC(acc.shape, jnp.float32)]
    return pl.run_scoped(products, *accumulators)


def add_product(acc: jax.Ref, left: jax.Ref, right: jax.Ref) -> None:
    """Begins acc [rows, N] f32 += left [rows, K] @ right [K, N], both in shared memory, and waits for the product begun
    before: what that one read may be overwritten."""
    plgpu.wgmma(acc, left, right)
    plgpu.wgmma_wait(1)


def load_narrow(tile: jax.Ref) -> jax.Array:
    """An 8-bit or 4-bit tile of shared memory in registers, in a layout that conversion to 16 bits makes WGMMA's."""
    return plgpu.load(tile, layout=_NARROW)


def load_narrow_row(row: jax.Ref, dtype: jnp.dtype) -> jax.Array:
    """A row [columns] of shared memory, int8, bf16 or f32, as `dtype` in the layout that goes with `load_narrow`'s."""
    return widen_exactly(plgpu.load(row, layout=_NARROW.reduce(0)), dtype)


def narrow_iota(shape: tuple[int, int]) -> jax.Array:
    """i32 indices of rows in the layout of `load_narrow`."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_NARROW)


def widen_exactly(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Values in 16 or 32 bits, which hold them all. The steps are those that the compiler has instructions for:
    integers become bfloat16 first, 8-bit floats float16."""
    if values.dtype.itemsize == 1:
        is_integer = jnp.issubdtype(values.dtype, jnp.integer)
        values = values.astype(jnp.bfloat16 if is_integer else jnp.float16)
    return values if values.dtype == dtype else values.astype(jnp.float32).astype(dtype)
