"""The launch of both TPU kernels: grid, memory spaces and aliases."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.config import VMEM_LIMIT
from pallas_kernels.tpu.pages import Ref

Operand = tuple[jax.Array | None, pl.BlockSpec]


def launch(
    kernel: Callable[..., None],
    *,
    name: str,
    num_steps: jax.Array,
    num_cores: int,
    scalars: Sequence[jax.Array],
    inputs: Sequence[Operand],
    kv_pages: jax.Array,
    out: tuple[tuple[int, ...], jnp.dtype, pl.BlockSpec],
    scratch: Sequence[object],
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Runs `kernel(step, steps, *scalars, *inputs, pool, out, *scratch)` for each of `num_steps` steps, in their order.

    `scalars` are i32 arrays in SMEM, which the block specs see behind (core, step). An input that is None stays None.
    The pool stays in HBM, and the kernel writes to it in place. Only the device knows the number of steps: steps that a
    bucket does not need cost nothing. Returns the output and the pool.

    Each core runs all steps, with its part of the KV heads: its rows of a page, and the blocks that the specs give it.
    So cores need nothing of each other, and have the same work.
    """
    is_given = [array is not None for array, _ in inputs]
    operands = [*scalars, *(array for array, _ in inputs if array is not None), kv_pages]
    page_rows = kv_pages.shape[1] // num_cores

    def run(*refs: Ref) -> None:
        rest = list(refs)
        given = [rest.pop(0) for _ in scalars]
        given += [rest.pop(0) if present else None for present in is_given]
        _, found, pool, *buffers = rest  # the pool as an output: reads must see what was written
        own = pool.at[:, pl.ds(pl.program_id(0) * page_rows, page_rows)]
        kernel(pl.program_id(1), pl.num_programs(1), *given, own, found, *buffers)

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    axes = jax.typeof(kv_pages).manual_axis_type  # under shard_map, the mesh axes over which the results vary
    shape, dtype, out_spec = out
    return pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(num_cores, jnp.maximum(num_steps, 1)),
            in_specs=[*(spec for array, spec in inputs if array is not None), in_hbm],
            out_specs=(out_spec, in_hbm),
            scratch_shapes=scratch,
        ),
        out_shape=(
            jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=axes),
            jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype, manual_axis_type=axes),
        ),
        input_output_aliases={len(operands) - 1: 1},
        # A bounds check takes more than twice as long as starting the copy that it checks.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT, disable_bounds_checks=True
        ),
        interpret=pltpu.InterpretParams(detect_races=True, num_cores_or_threads=num_cores) if interpret else False,
        name=name,
    )(*operands)


def by_core(array: jax.Array | None, num_cores: int) -> Operand:
    """Numbers [..., heads] for SMEM: each core sees those of its heads, in one axis."""
    if array is None:
        return None, pl.BlockSpec()
    parts = jnp.moveaxis(array.reshape(*array.shape[:-1], num_cores, -1), -2, 0)
    lines = parts.reshape(num_cores, 1, -1)  # the last two axes of a block must be tiles, or whole
    spec = pl.BlockSpec((None, None, lines.shape[2]), lambda core, *_: (core, 0, 0), memory_space=pltpu.SMEM)
    return lines, spec
