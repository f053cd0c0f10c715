"""The draft programs: a drafter with weights catches up with a step, then drafts what may follow it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.models.decoder import Pools
from jaxserve.models.drafters.passes import catch_up, draft_logits, expand_logits, map_drafts, run_pass
from jaxserve.runtime.batches import bound_pages, prepare_batches
from jaxserve.runtime.buckets import Bucket
from jaxserve.runtime.device_state import KVCache, RowState
from jaxserve.runtime.drafting import set_drafts
from jaxserve.runtime.rows import SAMPLING_FIELDS
from jaxserve.runtime.step_model import SampleInputs, StepModel, StepTokens, unpack_sampling
from jaxserve.sampling import draw_uniforms, map_rows, sample, sample_greedy
from jaxserve.speculation import NO_DRAFT


def draft_tokens(
    target_params: Any,
    params: Any,
    cache: KVCache,
    rows: RowState,
    selected: SampleInputs,
    tokens: StepTokens,
    ids: Int[Array, "S W"],
    *,
    model: StepModel,
    bucket: Bucket,
    num_drafts: int,
) -> tuple[KVCache, RowState, Int[Array, "S K"] | None]:
    """Runs the drafter behind a step that brought `ids`; returns the state after it and the drafts of each row.

    First it computes all tokens of the step, with the model's true states; then one token of each row that sampled, on
    its own guesses, until there are `num_drafts` drafts. With 0 it only catches up: a hole in its pages would spoil
    all later drafts. `cache` and `rows` are donated.
    """
    assert model.drafting is not None and model.drafting.head is not None
    head, most = model.drafting.head, model.drafting.max_drafts
    drafter = head.model
    limits = selected.sampling[:, SAMPLING_FIELDS.index("max_num_tokens")]
    tables = rows.page_table[jnp.array(head.groups)][:, selected.row_ids]
    tables = bound_pages(tables, limits, head.shapes[0].spec.page_size, bucket.width + most)

    batches = prepare_batches(
        tables,
        tokens.seq_lens,
        tokens.query_start_loc,
        tokens.distribution,
        num_tokens=bucket.tokens,
        max_query_len=bucket.max_query_len,
        shapes=head.shapes,
        impl=head.impl,
    )
    count = model.layout.num_pools
    target, pools = (target_params, model.config), cache[count:]
    inputs = _shift(tokens, selected, ids) if drafter.takes_next else tokens.token_ids
    states, pools = catch_up(
        drafter, params, *target, tokens.aux, inputs, pools, batches, layout=head.layout, mesh=model.mesh
    )
    if num_drafts == 0:
        return (*cache[:count], *pools), rows, None

    computed = rows.num_computed[selected.row_ids]
    last = tokens.query_start_loc[1:] - 1 + computed - tokens.seq_lens  # where the row's run ended
    is_open = (selected.samples == 1) & (jnp.diff(tokens.query_start_loc) > 0)
    few = slice(model.drafting.rows)
    chain = _Chain(
        # A row that has not sampled computes a token of the null page.
        tables=jnp.where(is_open[few, None], tables[:, few], 0),
        computed=jnp.where(is_open, computed, 0)[few],
        last_token=rows.last_token[selected.row_ids][few],
        sampling=replace(selected, sampling=selected.sampling[few]),
    )
    first = states[jnp.maximum(last, 0)[few]]
    drafts, pools = _draft_along(chain, first, pools, target_params, params, model=model, num_drafts=num_drafts)
    drafts = jnp.pad(drafts, ((0, 0), (0, most - num_drafts)), constant_values=NO_DRAFT)
    rows, drafts = set_drafts(rows, selected.row_ids, jnp.where(is_open[few, None], drafts, NO_DRAFT))
    return (*cache[:count], *pools), rows, drafts


class _Chain(NamedTuple):
    """The rows that draft."""

    tables: Int[Array, "G P M"]
    computed: Int[Array, " P"]  # tokens that are computed
    last_token: Int[Array, " P"]
    sampling: SampleInputs


def _draft_along(
    chain: _Chain,
    states: Float[Array, "P D"],
    pools: Pools,
    target_params: Any,
    params: Any,
    *,
    model: StepModel,
    num_drafts: int,
) -> tuple[Int[Array, "P K"], Pools]:
    """Returns the drafts after `states`, those of each row's last computed token, and the pools."""
    assert model.drafting is not None and model.drafting.head is not None
    head, count = model.drafting.head, len(chain.computed)
    drafter = head.model
    choose = _make_choice(params, target_params, chain.sampling, model)

    def draft_next(carry: tuple[Pools, Array, Array], index: Array) -> tuple[tuple[Pools, Array, Array], Array]:
        pools, state, token = carry
        batches = prepare_batches(
            chain.tables,
            chain.computed + index,
            jnp.arange(count + 1, dtype=jnp.int32),
            jnp.full(3, count, jnp.int32),
            num_tokens=count,
            max_query_len=1,
            shapes=head.shapes,
            impl=head.impl,
        )
        target = target_params, model.config
        state, pools = run_pass(
            drafter, params, *target, state, token, pools, batches, layout=head.layout, mesh=model.mesh
        )
        token = choose(state, chain.computed + index + drafter.takes_next)
        return (pools, state, token), token

    # The catch-up pass of a head has drafted; a draft model has yet to compute the sampled token.
    first = [choose(states, chain.computed + 1)] if drafter.takes_next else []
    token = first[0] if first else chain.last_token
    passes = jnp.arange(1, drafter.count_passes(num_drafts) + 1, dtype=jnp.int32)
    (pools, _, _), later = lax.scan(draft_next, (pools, states, token), passes)
    return jnp.concatenate([*(each[:, None] for each in first), later.T], axis=1), pools


def _shift(tokens: StepTokens, selected: SampleInputs, ids: Int[Array, "S W"]) -> Int[Array, " T"]:
    """Returns the token after each token of the step: the one sampled there, or the one that the row has there."""
    ids = jnp.maximum(ids, 0)  # after the end of a run any token will do
    if ids.shape[1] > 1:
        return ids.reshape(-1)
    last = jnp.where(jnp.diff(tokens.query_start_loc) > 0, tokens.query_start_loc[1:] - 1, len(tokens.token_ids))
    following = jnp.where(selected.samples == 1, ids[:, 0], tokens.next_ids)
    return jnp.roll(tokens.token_ids, -1).at[last].set(following, mode="drop")


def _make_choice(
    params: Any, target_params: Any, selected: SampleInputs, model: StepModel
) -> Callable[[Float[Array, "P D"], Int[Array, " P"]], Int[Array, " P"]]:
    """Returns the function that chooses drafts from states and the positions that they are for."""
    assert model.drafting is not None and model.drafting.head is not None
    head, vocab_size = model.drafting.head, model.config.vocab_size

    def choose(states: Float[Array, "P D"], positions: Int[Array, " P"]) -> Int[Array, " P"]:
        logits = draft_logits(head.model, params, target_params, model.config, states)
        if not head.draws:
            return map_drafts(head.model, params, map_rows(sample_greedy, logits)[0])
        inputs = unpack_sampling(selected, positions)
        whole = expand_logits(head.model, params, logits, vocab_size)

        def draw(logits: Array, inputs: Any, uniform: Array) -> Array:
            return sample(logits, inputs, uniform, vocab_size=vocab_size)[0]

        return map_rows(draw, whole, inputs, draw_uniforms(inputs))

    return choose
