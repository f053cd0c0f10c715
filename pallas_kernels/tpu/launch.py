"""The launch of both TPU kernels: grid, memory spaces and aliases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu.config import VMEM_LIMIT
from pallas_kernels.tpu.pages import Ref

Operand = tuple[jax.Array | None, pl.BlockSpec]
SMEM = pl.BlockSpec(memory_space=pltpu.SMEM)  # of an input with a line for each core


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

    `scalars` are i32 arrays in SMEM. An input that is None stays None; `SMEM` ones have a line for each core, and the
    index maps of others take (core, step, *scalars). The pool stays in HBM, and the kernel writes to it in place. Only
    the device knows the number of steps: steps that a bucket does not need cost nothing. Returns the output and the
    pool.

    Each core runs all steps, with its part of the KV heads: its line, its rows of a page, its blocks. So cores need
    nothing of each other, and have the same work.
    """
    is_given = [array is not None for array, _ in inputs]
    by_core = [spec is SMEM for _, spec in inputs]
    given = [(_drop_cores(array, spec, num_cores), spec) for array, spec in inputs if array is not None]
    operands = [*scalars, *(array for array, _ in given), kv_pages]
    axis, page_rows = (1, kv_pages.shape[1] // num_cores) if num_cores > 1 else (0, 0)

    def run(*refs: Ref) -> None:
        rest = list(refs)
        arguments = [rest.pop(0) for _ in scalars]
        given = [rest.pop(0) if present else None for present in is_given]
        _, found, pool, *buffers = rest  # the pool as an output: reads must see what was written
        if num_cores > 1:
            core = pl.program_id(0)
            pool = pool.at[:, pl.ds(core * page_rows, page_rows)]
            given = [
                ref.at[core] if has_line and ref is not None else ref
                for ref, has_line in zip(given, by_core, strict=True)
            ]
        kernel(pl.program_id(axis), pl.num_programs(axis), *arguments, *given, pool, found, *buffers)

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    axes = jax.typeof(kv_pages).manual_axis_type  # under shard_map, the mesh axes over which the results vary
    shape, dtype, out_spec = out
    return pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(*(num_cores,) * axis, jnp.maximum(num_steps, 1)),
            in_specs=[*(_fit_cores(spec, num_cores) for _, spec in given), in_hbm],
            out_specs=(_fit_cores(out_spec, num_cores), in_hbm),
            scratch_shapes=scratch,
        ),
        out_shape=(
            jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=axes),
            jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype, manual_axis_type=axes),
        ),
        input_output_aliases={len(operands) - 1: 1},
        # A bounds check takes more than twice as long as starting the copy that it checks.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(*("parallel",) * axis, "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT,
            disable_bounds_checks=True,
        ),
        interpret=pltpu.InterpretParams(detect_races=True, num_cores_or_threads=num_cores) if interpret else False,
        name=name,
    )(*operands)


def _drop_cores(array: jax.Array, spec: pl.BlockSpec, num_cores: int) -> jax.Array:
    return array[0] if spec is SMEM and num_cores == 1 else array


def _fit_cores(spec: pl.BlockSpec, num_cores: int) -> pl.BlockSpec:
    """The spec for a grid without an axis of cores, if there is one core."""
    find_block = spec.index_map
    if find_block is None or num_cores > 1:
        return spec
    return replace(spec, index_map=lambda *indices: find_block(0, *indices))
