"""A grouped product for TPUs (Pallas): tiles of rows visit the matrices of the groups in them.

Tiles lie on a fixed grid, as blocks of a TPU's pipeline must, and a tile with rows of several groups is visited once
for each. The pipeline copies a block only where its index changes, so a decode step reads each matrix once. The scheme
is that of megablox (Gale et al. 2022, as in jax's `ops.tpu.megablox`), without its loop over K: a visit has all of K.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped.tiles import choose_rows, list_visits
from pallas_kernels.grouped.tpu_quantized import QuantizedBlock, find_group_obstacle
from pallas_kernels.layout import LANES, pad_row, pads_little
from pallas_kernels.quantized import QuantizedArray, QuantizedFormat, encode_float4
from pallas_kernels.tpu.config import VMEM_LIMIT

Index = jax.Array | int

_BLOCK_BYTES = 4 * 2**20  # of a matrix; two are in memory at once


def find_obstacle(
    width: int, columns: int, dtype: jnp.dtype | str, quantized: QuantizedFormat | None = None
) -> str | None:
    """Why the kernel should not multiply with matrices [width, columns], in words for users."""
    del dtype
    if not pads_little(columns):
        return f"rows of {columns} columns would be padded to {pad_row(columns)} in memory"
    return None if quantized is None else find_group_obstacle(width, quantized)


def multiply(
    x: jax.Array,
    w: jax.Array | QuantizedArray,
    sizes: jax.Array,
    first: jax.Array,
    parts: int,
    *,
    interpret: bool = False,
) -> jax.Array:
    """See `grouped_matmul`; raises ValueError for groups that `find_obstacle` names."""
    num_rows, width = x.shape
    least = 32 // x.dtype.itemsize  # rows of a tile of the memory
    rows = choose_rows(num_rows, sizes.shape[0], least=least)
    padded = jnp.pad(x, ((0, -num_rows % rows), (0, 0)))
    visits = list_visits(sizes, num_rows, rows)
    arrays = jax.tree.leaves(w)
    columns = _choose_columns(width, w.shape[2], arrays[0].dtype.itemsize)
    block = None
    if isinstance(w, QuantizedArray):
        if (obstacle := find_group_obstacle(width, w.format)) is not None:
            raise ValueError(f"the grouped product for TPUs cannot run: {obstacle}")
        block = QuantizedBlock(w.format, width, columns, x.dtype)
        if interpret and w.format.is_coded:
            arrays[0] = encode_float4(w.values)  # XLA:CPU fails to compile it in the interpreter's loop (jax 0.12.0.1)

    def find_matrix(part: Index, block: Index, visit: Index, *scalars: jax.Ref) -> tuple[Index, Index, Index]:
        groups, *_, first = scalars
        return first[0] + part * sizes.shape[0] + groups[visit], 0, block

    return pl.pallas_call(
        partial(_visit, rows=rows, block=block),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(parts, pl.cdiv(w.shape[2], columns), jnp.maximum(visits.count, 1)),
            in_specs=[
                pl.BlockSpec((rows, width), lambda part, block, visit, *scalars: (scalars[1][visit], 0)),
                *(pl.BlockSpec((None, array.shape[1], columns), find_matrix) for array in arrays),
            ],
            out_specs=pl.BlockSpec(
                (None, rows, columns), lambda part, block, visit, *scalars: (part, scalars[1][visit], block)
            ),
            scratch_shapes=[] if block is None else block.list_scratch(),
        ),
        out_shape=jax.ShapeDtypeStruct((parts, padded.shape[0], w.shape[2]), x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        interpret=interpret,
        name="grouped_matmul",
    )(visits.groups, visits.tiles, visits.starts, visits.ends, first.reshape(1), padded, *arrays)[:, :num_rows]


def _visit(
    groups: jax.Ref,
    tiles: jax.Ref,
    starts: jax.Ref,
    ends: jax.Ref,
    first: jax.Ref,
    x_ref: jax.Ref,  # [rows, K]
    *refs: jax.Ref,  # the matrix [K, columns], or what it is quantized to; the output [rows, columns]; scratch
    rows: int,
    block: QuantizedBlock | None,
) -> None:
    """Writes the rows of the visit's group; those of groups before it stay in the block."""
    del groups, first  # only the blocks' indices need them
    visit = pl.program_id(2)
    precision = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None
    if block is None:
        w_ref, out_ref = refs
        product = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32, precision=precision)
    else:
        count = 2 + block.format.zeros
        w_refs, (out_ref, *scratch) = refs[:count], refs[count:]
        product = block.multiply(x_ref, w_refs, scratch, precision)
    row = tiles[visit] * rows + lax.broadcasted_iota(jnp.int32, product.shape, 0)
    is_own = (row >= starts[visit]) & (row < ends[visit])
    out_ref[...] = jnp.where(is_own, product, out_ref[...].astype(jnp.float32)).astype(out_ref.dtype)


def _choose_columns(width: int, columns: int, itemsize: int) -> int:
    """The columns of a block: as many whole lanes as its bytes allow, or fewer that fill the last block better."""
    fit = max(LANES, _BLOCK_BYTES // (width * itemsize) // LANES * LANES)
    return pad_row(pl.cdiv(columns, pl.cdiv(pad_row(columns), fit)))


def multiply_interpreted(
    x: jax.Array, w: jax.Array | QuantizedArray, sizes: jax.Array, first: jax.Array, parts: int
) -> jax.Array:
    """`multiply` in the interpreter, for tests."""
    return multiply(x, w, sizes, first, parts, interpret=True)
