"""Recurrent states around a step: copies from snapshots and to them, and the tokens that a verify step leaves pending.

A verify step does not know which of its tokens stay, so its forward pass writes no state. Behind its sampling, `settle`
lets the states follow those that do. So between two steps each state is that behind its row's computed tokens, whatever
kind of step comes next.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxserve.core.layers.recurrent import PENDING, choose_slots, copy_slots
from jaxserve.core.models.decoder import Pools, settle_states
from jaxserve.core.runtime.batches import prepare_batches
from jaxserve.core.runtime.device_state import KVCache, RowState
from jaxserve.core.runtime.inputs import InputLayout, StepInputs
from jaxserve.core.runtime.step_model import StepModel
from jaxserve.core.scheduler.sequence import NOT_KEPT


def load_states(model: StepModel, cache: KVCache, inputs: StepInputs) -> KVCache:
    """Returns the cache after a step's copies from snapshots to rows."""
    if not inputs.copy_ends.size:
        return cache
    return _copy(model, cache, inputs.copy_sources, inputs.copy_targets, 0, inputs.copy_ends[0])


def save_states(model: StepModel, cache: KVCache, inputs: StepInputs, num_computed: Int[Array, " R"]) -> KVCache:
    """Returns the cache after a step's copies from rows to snapshots.

    Where rows verify drafts, those are left out whose rows do not have the wanted number of tokens.
    """
    if not inputs.copy_ends.size:
        return cache
    sources, targets, (start, end) = inputs.copy_sources, inputs.copy_targets, inputs.copy_ends
    if inputs.copy_points.size:
        index = jnp.arange(len(sources))
        is_due = (index >= start) & (index < end) & (num_computed[sources] == inputs.copy_points)
        (found,) = jnp.nonzero(is_due, size=len(sources), fill_value=0)
        sources, targets, start, end = sources[found], targets[found], 0, jnp.sum(is_due, dtype=jnp.int32)
    return _copy(model, cache, sources, targets, start, end)


def _copy(
    model: StepModel,
    cache: KVCache,
    sources: Int[Array, " C"],
    targets: Int[Array, " C"],
    start: Int[Array, ""] | int,
    end: Int[Array, ""],
) -> KVCache:
    first, last = model.layout.num_page_pools, model.layout.num_pools
    slots = [{name: each for name, each in pool.items() if name != PENDING} for pool in cache[first:last]]
    copied = copy_slots(slots, sources, targets, start, end)
    pools = (pool | after for pool, after in zip(cache[first:last], copied, strict=True))
    return (*cache[:first], *pools, *cache[last:])


def settle(
    params: Any,
    cache: KVCache,
    rows: RowState,
    packed: Int[Array, " I"],
    token_ids: Int[Array, "S W"],
    *,
    model: StepModel,
    layout: InputLayout,
) -> KVCache:
    """Returns the cache after recurrent states have followed the tokens that a verify step left its rows.

    `cache` is donated. A row that passes the point of a snapshot follows its tokens in two parts, and is copied between
    them.

    Args:
        rows: behind the step's sampling.
        packed: the step's inputs.
        token_ids: what it sampled, as `SampledTokens.ids`.
    """
    inputs = layout.views(packed)
    kept = jnp.sum(token_ids != NOT_KEPT, axis=1, dtype=jnp.int32)
    starts = rows.num_computed[inputs.row_ids] - kept
    if not inputs.copy_ends.size:
        return _follow(params, cache, inputs, starts, jnp.zeros_like(kept), kept, model=model, layout=layout)
    points = _find_points(inputs, layout)[inputs.row_ids]
    first = jnp.where((points > starts) & (points < starts + kept) & (points > 0), points - starts, kept)

    def run_part(index: jax.Array, cache: KVCache) -> KVCache:
        begin, end = jnp.where(index == 0, 0, first), jnp.where(index == 0, first, kept)
        cache = _follow(params, cache, inputs, starts, begin, end, model=model, layout=layout)
        reached = jnp.full(layout.state.rows, -1, jnp.int32).at[inputs.row_ids].set(starts + end)
        return save_states(model, cache, inputs, reached)

    return lax.fori_loop(0, 1 + jnp.any(first < kept), run_part, cache)


def _find_points(inputs: StepInputs, layout: InputLayout) -> Int[Array, " R"]:
    """Returns the tokens behind which each row's state is to be saved; 0: nowhere."""
    index = jnp.arange(len(inputs.copy_sources))
    is_save = (index >= inputs.copy_ends[0]) & (index < inputs.copy_ends[1])
    rows = jnp.where(is_save, inputs.copy_sources, layout.state.padding_row)
    return jnp.zeros(layout.state.rows, jnp.int32).at[rows].set(jnp.where(is_save, inputs.copy_points, 0))


def _follow(
    params: Any,
    cache: KVCache,
    inputs: StepInputs,
    starts: Int[Array, " S"],
    begin: Int[Array, " S"],
    end: Int[Array, " S"],
    *,
    model: StepModel,
    layout: InputLayout,
) -> Pools:
    """Returns the cache after the states have followed the tokens begin..end - 1 of each row, which had `starts`."""
    bucket, lengths = layout.bucket, end - begin
    bounds = jnp.pad(jnp.cumsum(lengths, dtype=jnp.int32), (1, 0))
    (batch, *_) = prepare_batches(
        jnp.zeros((len(model.shapes), bucket.rows, 1), jnp.int32),
        starts + end,
        bounds,
        jnp.array([0, 0, bucket.rows], jnp.int32),
        num_tokens=bucket.tokens,
        max_query_len=bucket.width,
        shapes=model.shapes,
        impl=model.impl,
    )
    slots = choose_slots(inputs.row_ids, starts + end, lengths, layout.state.padding_row)
    tokens = jnp.arange(bucket.tokens, dtype=jnp.int32) - (bounds[:-1] - begin)[batch.token_rows]
    slots = slots.replace(pending=batch.token_rows * bucket.width + tokens)
    count = model.layout.num_pools
    where = {"layout": model.layout, "mesh": model.mesh, "slots": slots}
    return (*settle_states(model.config, params, cache[:count], batch, **where), *cache[count:])
