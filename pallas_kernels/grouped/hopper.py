"""A grouped product for Hopper (Pallas Mosaic GPU): each tile of rows is of one group.

A block multiplies one tile of rows with some columns of its group's matrix. Tiles begin where groups do, or up to seven
rows before, so that a group of few rows reads its matrix once; rows of other groups are not written. Memory warpgroups
fill a ring of slices along K by TMA, and one or two compute warpgroups multiply 64 rows each by wgmma. A decode step,
where groups have a few rows, is bound by reading matrices: 64 rows are still a third of what the tensor cores could
multiply meanwhile, but only those of the tile are fetched. The body is in `hopper_kernel.py`, that for few bits in
`hopper_quantized.py`.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels.grouped.hopper_kernel import ALIGNMENT, DEPTH, GroupedKernel
from pallas_kernels.grouped.hopper_quantized import LEAST_GROUP, QuantizedKernel
from pallas_kernels.grouped.tiles import Spans, list_spans
from pallas_kernels.hopper.wgmma import ROWS
from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.platform import traced_core_count
from pallas_kernels.quantized import QuantizedArray, QuantizedFormat, encode_float4

_COLUMNS = 128  # of a block at most: layouts of wider plain memory take minutes to infer
_FEW_ROWS = 16  # of a tile where groups have a quarter of them on average
_LEAST_ROWS = 48  # of a group on average, from which two warpgroups share a tile


def find_obstacle(
    width: int, columns: int, dtype: jnp.dtype | str, quantized: QuantizedFormat | None = None
) -> str | None:
    """Why the kernel cannot multiply rows of `width` with matrices of `columns`, in words for users."""
    if jnp.dtype(dtype).itemsize != 2:
        return f"it multiplies 16-bit numbers, these are {jnp.dtype(dtype).name}"
    if width % DEPTH or columns % DEPTH:
        return f"it needs sizes that are multiples of {DEPTH}, these are {width} and {columns}"
    if quantized is not None and quantized.group % LEAST_GROUP:
        return f"it scales groups of a multiple of {LEAST_GROUP} weights, these are of {quantized.group}"
    return None


def multiply(
    x: jax.Array,
    w: jax.Array | QuantizedArray,
    sizes: jax.Array,
    first: jax.Array,
    parts: int,
    *,
    interpret: bool = False,
) -> jax.Array:
    """See `grouped_matmul`; raises ValueError for what `find_obstacle` names."""
    quantized = w.format if isinstance(w, QuantizedArray) else None
    obstacle = find_obstacle(*w.shape[1:], x.dtype, quantized)
    if obstacle is not None:
        raise ValueError(f"the grouped product for Hopper cannot run: {obstacle}")
    num_rows, columns = x.shape[0], w.shape[2]
    rows = _choose_rows(num_rows, sizes.shape[0])
    tiles = list_spans(sizes, num_rows, rows, ALIGNMENT)
    block = _choose_columns(columns, tiles.starts.shape[0] * parts)
    warpgroups = -(-rows // ROWS)
    common = (rows, warpgroups, block, x.shape[1] // DEPTH, sizes.shape[0])
    body = GroupedKernel(*common) if quantized is None else QuantizedKernel(*common, quantized)
    if quantized is not None and quantized.is_coded:
        w = replace(w, values=encode_float4(w.values))
    padded = jnp.pad(x, ((0, max(-num_rows % ALIGNMENT, rows - num_rows)), (0, 0)))
    run = compat.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((parts, num_rows, columns), x.dtype),
        grid=(tiles.starts.shape[0], parts, columns // block),  # blocks of a tile share its rows
        grid_names=("tile", "part", "block"),
        num_threads=warpgroups + body.num_fillers,
        thread_name="warpgroup",
        scratch_types=body.list_scratch(x.dtype),
        compiler_params=compat.compiler_params(),
        interpret=compat.interpret_params(interpret),
    )
    return run(_join(tiles), first.reshape(1), padded, *jax.tree.leaves(w))


def _choose_rows(num_rows: int, num_groups: int) -> int:
    """The rows of a tile: few groups should need a second one, which reads the matrix again."""
    if num_rows <= max(_FEW_ROWS, _FEW_ROWS // 4 * num_groups):
        return _FEW_ROWS
    return 2 * ROWS if num_rows >= max(_LEAST_ROWS * num_groups, ROWS + 1) else ROWS


def _choose_columns(columns: int, count: int) -> int:
    """The columns of a block: fewer where `count` rows of wide blocks would leave multiprocessors without any."""
    is_wide = columns % _COLUMNS == 0 and count * (columns // _COLUMNS) >= traced_core_count()
    return _COLUMNS if is_wide else DEPTH


def multiply_interpreted(
    x: jax.Array, w: jax.Array | QuantizedArray, sizes: jax.Array, first: jax.Array, parts: int
) -> jax.Array:
    """`multiply` in the interpreter, with race detection."""
    return multiply(x, w, sizes, first, parts, interpret=True)


def _join(tiles: Spans) -> jax.Array:
    """The tiles as the kernel reads them: [tiles, 4] i32, the same for all products of a layer."""
    is_tile = jnp.arange(tiles.starts.shape[0]) < tiles.count
    ends = jnp.where(is_tile, tiles.ends, tiles.starts)
    return jnp.stack([tiles.groups, tiles.origins, tiles.starts, ends], axis=1)
