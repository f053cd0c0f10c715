"""Parts of Pallas Mosaic GPU that all GPU kernels use, in one place: its API moves between JAX releases.

Kernels import this module and call what they need through it (`compat.barrier_wait`), so that a test can break one
operation on purpose and see the race detector notice. What only one kind of GPU has is in `hopper/wgmma.py` and
`ampere/compat.py`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layout import count_bits

SMEM = plgpu.SMEM
SmemUnion = plgpu.RefUnion  # unpacks into references that share memory, as their lifetimes do not meet
Barrier = plgpu.Barrier
kernel = plgpu.kernel
barrier_wait = plgpu.barrier_wait
barrier_arrive = plgpu.barrier_arrive
commit_smem = plgpu.commit_smem
copy_gmem_to_smem = plgpu.copy_gmem_to_smem
copy_smem_to_gmem = plgpu.copy_smem_to_gmem
wait_smem_to_gmem = plgpu.wait_smem_to_gmem
set_max_registers = plgpu.set_max_registers
layout_cast = plgpu.layout_cast

WGMMA = plgpu.Layout.WGMMA  # how a warpgroup's registers hold [rows, columns], rows a multiple of 64
# How they hold states: 4 numbers of a line each, and sums within a warp, over rows or over columns.
TURNED = plgpu.Layout.TILED(Tiling(((8, 64), (16,), (4,))), warp_dims=(-3,), lane_dims=(-4, -2), vector_dim=-1)
BY_ROW = plgpu.Layout.TILED(Tiling(((32, 16), (8, 4))), warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1)
SWIZZLE_BYTES = 128  # the widest swizzle
SWIZZLE_ROWS = 8  # rows of a tile of swizzled shared memory: a slice's start and size are multiples of it


def tile_transforms(width: int, dtype: jnp.dtype | str, swizzle: int | None = None) -> tuple[object, ...]:
    """How a tile [rows, width] lies in shared memory, so that TMA fills it and wgmma reads it without bank conflicts.

    `swizzle` in bytes is by default the widest that fits a row: 128, or 64 for 64 elements of 8 bits. Slices of columns
    must be whole swizzles.
    """
    bits = count_bits(dtype)
    if swizzle is None:
        swizzle = SWIZZLE_BYTES if width * bits % (8 * SWIZZLE_BYTES) == 0 else SWIZZLE_BYTES // 2
    if width * bits % (8 * swizzle):
        raise ValueError(
            f"a row of {width} {jnp.dtype(dtype).name} must be a multiple of the swizzle of {swizzle} bytes"
        )
    return plgpu.TilingTransform((SWIZZLE_ROWS, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle)


def tile_smem(shape: tuple[int, ...], dtype: jnp.dtype | str, swizzle: int | None = None) -> object:
    """Shared memory for tiles [..., rows, width] that TMA and wgmma use."""
    return SMEM(shape, jnp.dtype(dtype), transforms=tile_transforms(shape[-1], dtype, swizzle))


def compiler_params(**options: object) -> plgpu.CompilerParams:
    """Compiles `exp2`, `tanh` and division to the fast instructions: their error is far below that of 16-bit weights.

    Reductions along a row of a tile stay within a warp, so they need no scratch memory.
    """
    return plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, **options)


def interpret_params(interpret: bool) -> plgpu.InterpretGPUParams | None:
    """The `interpret` argument of `kernel`: the interpreter with race detection, or None for the device."""
    return plgpu.InterpretGPUParams(detect_races=True) if interpret else None


def full(shape: tuple[int, ...], value: float, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """A constant tile [rows, columns], or column [rows] that goes with a tile, in registers."""
    layout = WGMMA if len(shape) == 2 else WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def iota(shape: tuple[int, int], axis: int) -> jax.Array:
    """i32 indices along an axis of a tile in registers."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA)


def spread(column: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A column [rows] over the columns of a tile."""
    return lax.broadcast_in_dim(column, shape, (0,))


def smem_bytes(*tiles: tuple[tuple[int, ...], jnp.dtype | str]) -> int:
    """Bytes of shared memory of tiles (shape, dtype)."""
    return sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in tiles)


def load_tile(tile: jax.Ref) -> jax.Array:
    """A tile [rows, columns] of global memory in registers."""
    return plgpu.load(tile, layout=WGMMA, optimized=False)


def load_column(column: jax.Ref) -> jax.Array:
    """A column [rows] of global memory in registers, in the layout that goes with a tile."""
    return plgpu.load(column, layout=WGMMA.reduce(1), optimized=False)


def load_row(row: jax.Ref) -> jax.Array:
    """A row [columns] of shared memory in registers, in the layout that goes with a tile."""
    return plgpu.load(row, layout=WGMMA.reduce(0))


def load_as(tile: jax.Ref, layout: Any) -> jax.Array:
    """A part of global memory in registers."""
    return plgpu.load(tile, layout=layout, optimized=False)
