"""Blocks with a recurrent state on a mesh: every device runs the same function on its own heads, or channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jaxserve.core.layers.context import LayerContext, StateSlots
from jaxserve.core.layers.memory import RecurrentState
from jaxserve.core.layers.recurrent import PENDING, keep_streams, take_streams
from jaxserve.core.sharding import DEFAULT_RULES, TENSOR_AXIS, Axes
from pallas_kernels.spec import BatchMeta

Pool = dict[str, Any]  # arrays by name, and perhaps the streams that are kept, see `PENDING`
Mix = Callable[
    [tuple[jax.Array, ...], Mapping[str, jax.Array], Mapping[str, jax.Array], BatchMeta, StateSlots],
    tuple[Float[Array, "T C"], Pool],
]
"""A function of streams, parameters, a pool and the step's rows; it returns an answer and the pool after the step."""


def run_by_head(
    mix: Mix,
    memory: RecurrentState,
    streams: tuple[jax.Array, ...],
    leaves: Mapping[str, jax.Array],
    axes: Mapping[str, Axes],
    ctx: LayerContext,
) -> tuple[Float[Array, "T C"], Pool]:
    """Returns what `mix` gives for all heads; the last axis of streams and answer is split between devices.

    `axes` are the logical axes of the parameters that `mix` reads, which are taken out of `leaves` by these names. The
    streams are kept where the step leaves them pending.
    """
    assert ctx.slots is not None
    answer, after = _run(mix, memory, streams, leaves, axes, ctx)
    if ctx.slots.leaves_pending:
        after[PENDING] = keep_streams(ctx.pool[PENDING], ctx.offset, streams)
    return answer, after


def settle_by_head(
    mix: Mix, memory: RecurrentState, leaves: Mapping[str, jax.Array], axes: Mapping[str, Axes], ctx: LayerContext
) -> Pool:
    """Returns the pool after those pending tokens that are in the batch; the other arguments are `run_by_head`'s."""
    assert ctx.slots is not None and ctx.slots.pending is not None
    _, after = _run(mix, memory, take_streams(ctx.pool[PENDING], ctx.offset, ctx.slots.pending), leaves, axes, ctx)
    return after


def _run(
    mix: Mix,
    memory: RecurrentState,
    streams: tuple[jax.Array, ...],
    leaves: Mapping[str, jax.Array],
    axes: Mapping[str, Axes],
    ctx: LayerContext,
) -> tuple[Float[Array, "T C"], Pool]:
    assert ctx.slots is not None
    pool = {array.name: ctx.pool[array.name] for array in memory.arrays}
    own = {name: leaves[name] for name in axes}
    if ctx.mesh is not None:
        split = {array.name: DEFAULT_RULES.spec((None, None, *array.axes)) for array in memory.arrays}
        last = tuple(PartitionSpec(*[None] * (each.ndim - 1), TENSOR_AXIS) for each in streams)
        of_leaves = {name: DEFAULT_RULES.spec(each) for name, each in axes.items()}
        mix = jax.shard_map(
            mix,
            mesh=ctx.mesh,
            in_specs=(last, of_leaves, split, PartitionSpec(), PartitionSpec()),
            out_specs=(PartitionSpec(None, TENSOR_AXIS), split),
            check_vma=False,  # loops whose end is known on the device state no varying axes
        )
    answer, kept = mix(streams, own, pool, ctx.batch, ctx.slots)
    return answer, {**ctx.pool, **kept}
