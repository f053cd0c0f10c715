"""Everything taken from Pallas Mosaic GPU, in one place: its API moves between JAX releases.

Kernels import this module and call what they need through it (`compat.barrier_wait`), so that a test can break one
operation on purpose and see the race detector notice.

On the interpreter: it runs copies, barriers and wgmma with both operands in shared memory, and finds races between
them; it has no wgmma with an operand in registers and no accumulator that starts from a value. `multiply_pv` is
therefore emulated there, by a read of shared memory and a dot. Everything that can race stays as on the device.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as _interpreter
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

SMEM = plgpu.SMEM
SmemUnion = plgpu.RefUnion  # of references whose lifetimes do not meet; unpacks into them
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

WGMMA = plgpu.Layout.WGMMA  # of a [rows, columns] array in the registers of a warpgroup, rows a multiple of 64
WGMMA_ROWS = 64  # rows of one wgmma; the first operand has this many, or a multiple
MAX_SMEM_BYTES = 232_448  # of one block on sm_90; what is left of 228 KiB after the block's own 1 KiB
SM_SMEM_BYTES = 233_472  # 228 KiB of an SM, shared by its blocks
SWIZZLE_BYTES = 128  # the widest swizzle
SWIZZLE_ROWS = 8  # rows of a tile of swizzled shared memory: a slice's start and size are multiples of it


def tile_transforms(width: int, dtype: jnp.dtype | str, swizzle: int | None = None) -> tuple[object, ...]:
    """How a tile [rows, width] lies in shared memory, so that TMA fills it and wgmma reads it without bank conflicts.

    `swizzle` in bytes is by default the widest that a row has: 128, or 64 for 64 elements of 8 bits. Slices of columns
    are of whole swizzles.
    """
    itemsize = jnp.dtype(dtype).itemsize
    if swizzle is None:
        swizzle = SWIZZLE_BYTES if width * itemsize % SWIZZLE_BYTES == 0 else SWIZZLE_BYTES // 2
    if width * itemsize % swizzle:
        raise ValueError(
            f"a row of {width} {jnp.dtype(dtype).name} must be a multiple of the swizzle of {swizzle} bytes"
        )
    return plgpu.TilingTransform((SWIZZLE_ROWS, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def tile_smem(shape: tuple[int, ...], dtype: jnp.dtype | str, swizzle: int | None = None) -> object:
    """Shared memory for tiles [..., rows, width] that TMA and wgmma use."""
    return SMEM(shape, jnp.dtype(dtype), transforms=tile_transforms(shape[-1], dtype, swizzle))


def compiler_params(**options: object) -> plgpu.CompilerParams:
    """`exp2`, `tanh` and division by the fast instructions: their error is far below that of 16-bit weights.

    Reductions along a row of a tile stay within a warp, so they need no scratch memory.
    """
    return plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, **options)


def interpret_params(interpret: bool) -> plgpu.InterpretGPUParams | None:
    """What `kernel(interpret=...)` wants: the interpreter with race detection, or None for the device."""
    return plgpu.InterpretGPUParams(detect_races=True) if interpret else None


def found_races() -> bool:
    """Whether the interpreter saw a race in the kernel it ran last. (From JAX 0.12 on it raises, too.)"""
    return bool(_interpreter.get_races().races_found)


def reset_interpreter() -> None:
    """The interpreter cannot be used after an exception in a kernel before this was called."""
    _interpreter.reset_gpu_interpret_mode_state()


def full(shape: tuple[int, ...], value: float, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """A constant tile [rows, columns], or column [rows] to go with one, in registers."""
    layout = WGMMA if len(shape) == 2 else WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def iota(shape: tuple[int, int], axis: int) -> jax.Array:
    """i32 indices along an axis of a tile in registers."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA)


def spread(column: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """A column [rows] over the columns of a tile."""
    return lax.broadcast_in_dim(column, shape, (0,))


def multiply_qk(q: jax.Ref, k: jax.Ref) -> jax.Array:
    """q [rows, H] @ k [keys, H].T, both in shared memory: [rows, keys] f32 in registers, complete."""

    def product(acc: jax.Ref) -> jax.Array:
        plgpu.wgmma(acc, q, k.T)
        return acc[...]

    return pl.run_scoped(product, plgpu.ACC((q.shape[0], k.shape[0]), jnp.float32))


def multiply_pv(acc: jax.Array, weights: jax.Array, v: jax.Ref, *, interpret: bool) -> jax.Array:
    """acc [rows, H] f32 + weights [rows, keys] @ v [keys, H]; the first two in registers, v in shared memory.

    Complete on return, so that v's slot may be given back.
    """
    if interpret:
        added = jnp.dot(weights, v[...], preferred_element_type=jnp.float32)
        commit_smem()  # wgmma would have read through the async proxy, a plain read must be made visible to TMA
        return acc + added

    def product(ref: jax.Ref) -> None:
        plgpu.wgmma(ref, weights, v)

    return pl.run_state(product)(plgpu.ACC.init(acc))


def smem_bytes(*tiles: tuple[tuple[int, ...], jnp.dtype | str]) -> int:
    """Bytes of shared memory of tiles (shape, dtype)."""
    return sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in tiles)


def load_narrow(tile: jax.Ref) -> jax.Array:
    """An 8-bit tile of shared memory in registers, in a layout that conversion to 16 bits makes WGMMA's."""
    return plgpu.load(tile, layout=plgpu.Layout.WGMMA_UPCAST_2X)


def load_tile(tile: jax.Ref) -> jax.Array:
    """A tile [rows, columns] of global memory in registers."""
    return plgpu.load(tile, layout=WGMMA, optimized=False)


def load_column(column: jax.Ref) -> jax.Array:
    """A column [rows] of global memory in registers, to go with a tile."""
    return plgpu.load(column, layout=WGMMA.reduce(1), optimized=False)
