"""Parts of Pallas Mosaic GPU that only the kernels for Ampere, Ada and Blackwell use.

These are warp-level products (mma.sync) and asynchronous copies (cp.async), both older than Hopper's. Blackwell has the
former only, and the interpreter neither. There, a copy is one by TMA and arrives at a barrier, and a wait is for the
barrier of the copies that cp.async would wait for. In the interpreter a product is a dot. So it finds what is read or
overwritten too early.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

from pallas_kernels.mosaic_gpu import compat

Barrier = compat.Barrier
TILE_ROWS = 64  # rows of a product's first operand: 16 in each of four warps
PART_COLUMNS = 64  # columns of a tile of keys or values that pass through registers at once
NARROW = jnp.uint8  # 8-bit floats are read as this
_COPY_TILES = 4  # a copy has a multiple of this many swizzled tiles: each warp copies its own


def choose_swizzle(rows: int, width: int, dtype: jnp.dtype) -> int:
    """The widest swizzle, in bytes, with which one copy can fill [rows, width] of shared memory and PART_COLUMNS are
    whole swizzles."""
    itemsize = jnp.dtype(dtype).itemsize
    row_tiles = rows // compat.SWIZZLE_ROWS
    wanted = _COPY_TILES // min(_COPY_TILES, row_tiles & -row_tiles)  # tiles per row that this takes
    fitting = (s for s in (128, 64, 32) if s <= PART_COLUMNS * itemsize and width * itemsize % (s * wanted) == 0)
    return next(fitting)


def start_copy(source: jax.Ref, tile: jax.Ref, loaded: jax.Ref | None) -> None:
    """Starts a copy from global to shared memory, as a group of its own.

    `loaded` is the barrier that a copy by TMA arrives at, None for one by cp.async.
    """
    if loaded is None:
        plgpu.copy_gmem_to_smem(source, tile, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
    else:
        plgpu.copy_gmem_to_smem(source, tile, loaded)


def skip_copies(count: int, *, by_tma: bool) -> None:
    """Starts `count` empty copies, so that waits need not know how many copies there are."""
    if not by_tma:

        @plgpu.inline_mgpu()
        def commit(_: object) -> None:
            for _ in range(count):
                nvvm.cp_async_commit_group()

        commit()


def wait_copies(newer: int, loaded: jax.Ref | None) -> None:
    """Waits for all copies but the last `newer` ones, then for all threads of the block. Every thread then sees the
    copies of all, and none still reads the tile before.

    `loaded` is the barrier of the awaited copies if they are by TMA, else None.
    """
    if loaded is None:
        plgpu.wait_gmem_to_smem(newer)
    else:
        compat.commit_smem()  # the tile that was read may now be overwritten
        compat.barrier_wait(loaded)


def multiply_qk(q: jax.Ref, k: jax.Ref, *, interpret: bool) -> jax.Array:
    """q [TILE_ROWS, H] @ k [keys, H].T, both in shared memory: [TILE_ROWS, keys] f32 in registers."""
    if interpret:
        return jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32)
    scores = compat.full((TILE_ROWS, k.shape[0]), 0.0)
    for column in range(0, q.shape[1], PART_COLUMNS):
        part = pl.ds(column, PART_COLUMNS)
        rows = plgpu.load(q.at[:, part], layout=_operand(plgpu.Layout.MMA_LHS, q.dtype), optimized=False)
        columns = plgpu.load(k.at[:, part].T, layout=_operand(plgpu.Layout.MMA_RHS, k.dtype), optimized=False)
        scores = plgpu.mma(scores, rows, columns)
    return scores


def multiply_pv(parts: list[jax.Array], weights: jax.Array, v: jax.Ref, *, interpret: bool) -> list[jax.Array]:
    """parts [TILE_ROWS, PART_COLUMNS] f32 each + weights [TILE_ROWS, keys] f32 in v's dtype @ v [keys, H], which is in
    shared memory."""
    weights = weights.astype(v.dtype) if interpret else _as_operand(weights, v.dtype)
    found = []
    for index, acc in enumerate(parts):
        part = v.at[:, pl.ds(index * PART_COLUMNS, PART_COLUMNS)]
        if interpret:
            found.append(acc + jnp.dot(weights, part[...], preferred_element_type=jnp.float32))
        else:
            columns = plgpu.load(part, layout=_operand(plgpu.Layout.MMA_RHS, v.dtype), optimized=False)
            found.append(plgpu.mma(acc, weights, columns))
    return found


def _operand(layout: plgpu.Layout, dtype: jnp.dtype) -> plgpu.SomeLayout:
    return layout(jnp.dtype(dtype), m_warps=4)


def _as_operand(weights: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """An f32 result as a 16-bit first operand: every lane already holds its elements, in the same order."""
    layout = _operand(plgpu.Layout.MMA_LHS, dtype)

    @plgpu.inline_mgpu(arg_types=(compat.WGMMA,), return_type=plgpu.ShapeDtypeStruct(weights.shape, dtype, layout))
    def relabel(_: object, values: mosaic.FragmentedArray) -> mosaic.FragmentedArray:
        rounded, wanted = values.astype(mosaic.utils.dtype_to_ir_type(dtype)), layout.to_mgpu()
        registers = rounded.registers.reshape(wanted.registers_shape(rounded.shape))
        return mosaic.FragmentedArray(_registers=registers, _layout=wanted, _is_signed=None)

    return relabel(weights)


def store_rows(rows: jax.Ref, out: jax.Ref) -> None:
    """Copies [rows, columns] from shared to global memory through registers, in the layout of a copy."""
    layout = _as_copied(rows.shape, rows.dtype, choose_swizzle(*rows.shape, rows.dtype))
    out[...] = plgpu.load(rows, layout=layout, optimized=False)


def zero_rows(tile: jax.Ref, swizzle: int, is_kept: Callable[[jax.Array], jax.Array]) -> None:
    """Zeroes the rows of a tile in shared memory for which `is_kept`, given i32 row numbers, is false."""
    shape = (tile.shape[0], PART_COLUMNS)
    layout = _as_copied(shape, tile.dtype, swizzle)
    rows = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
    for column in range(0, tile.shape[1], PART_COLUMNS):
        part = tile.at[:, pl.ds(column, PART_COLUMNS)]
        found = plgpu.load(part, layout=layout, optimized=False)
        part[...] = jnp.where(is_kept(rows), found, jnp.zeros((), tile.dtype))


def widen(tile: jax.Ref, wide: jax.Ref, swizzle: int) -> None:
    """Copies a tile of e4m3, seen as u8, to a tile of f16 with this swizzle.

    It shifts bits, as only Ada could convert: exponent and mantissa move to their places in f16, whose exponents are 8
    larger. NaN in 8 bits becomes 480.
    """
    layout = _as_copied((tile.shape[0], PART_COLUMNS), wide.dtype, swizzle)
    for column in range(0, tile.shape[1], PART_COLUMNS):
        part = pl.ds(column, PART_COLUMNS)
        bits = plgpu.load(tile.at[:, part], layout=layout, optimized=False).astype(jnp.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        wide[:, part] = lax.bitcast_convert_type(bits, jnp.float16) * jnp.float16(256)


def _as_copied(shape: tuple[int, ...], dtype: jnp.dtype, swizzle: int) -> plgpu.SomeLayout:
    """The layout of registers in which threads copy a tile: pieces of up to 16 bytes."""
    return plgpu.Layout.SMEM_GMEM_COPY(shape, jnp.dtype(dtype), swizzle)
