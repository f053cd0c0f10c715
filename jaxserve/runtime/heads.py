"""A drafter with weights, which follows each step of the model and drafts what may come next.

It follows inside the forward program: whatever the model computes, it computes too, from the model's true states, and
so its pages have no holes. Most steps ask for no more, and a program of its own costs more than this work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.models.decoder import Pools
from jaxserve.models.drafters.passes import draft_logits, expand_logits, map_drafts, read_target, run_pass
from jaxserve.runtime.batches import bound_pages, prepare_batches
from jaxserve.runtime.buckets import Bucket
from jaxserve.runtime.device_state import KVCache, RowState
from jaxserve.runtime.drafting import set_drafts
from jaxserve.runtime.inputs import KEEP, StepInputs
from jaxserve.runtime.rows import SAMPLING_FIELDS
from jaxserve.runtime.step_model import RowLines, StepModel, unpack_sampling
from jaxserve.sampling import draw_uniforms, map_rows, sample, sample_greedy
from jaxserve.speculation import NO_DRAFT


class ModelStep(NamedTuple):
    """A step as the model has computed it."""

    token_ids: Int[Array, " T"]
    seq_lens: Int[Array, " S"]
    tables: Int[Array, "G S M"]  # of the model's KV groups
    aux: Float[Array, "T AD"] | None  # the inputs of the layers that the drafter reads, side by side


def follow_step(
    target_params: Any,
    params: Any,
    pools: Pools,
    rows: RowState,
    inputs: StepInputs,
    step: ModelStep,
    *,
    model: StepModel,
    bucket: Bucket,
) -> Pools:
    """Returns the drafter's pools with its keys and values of a step; `rows` are those before it.

    What a head keeps at a position is made of the model's state there and the token behind it. So the entry of a row's
    last token is written by the row's next step, from the state in `RowState.aux`. If the row ends there, nobody writes
    it; whoever finds that page in the prefix cache reads one stale key, which can spoil drafts alone.
    """
    assert model.drafting is not None and model.drafting.head is not None
    head = model.drafting.head
    drafter, lens, distribution = head.model, step.seq_lens, inputs.distribution
    token_ids, aux = step.token_ids, step.aux
    if drafter.takes_next:
        token_ids, aux, lens = _pair_with_next(rows, inputs, step, bucket)
        distribution = distribution[jnp.array([0, 0, 2])]  # chunks begin a token before their edge
    batches = prepare_batches(
        step.tables[jnp.array(head.groups)],
        lens,
        inputs.query_start_loc,
        distribution,
        num_tokens=bucket.tokens,
        max_query_len=bucket.max_query_len,
        shapes=head.shapes,
        impl=head.impl,
    )
    target = target_params, model.config
    states = read_target(drafter, params, aux)
    _, pools = run_pass(
        drafter,
        params,
        *target,
        states,
        token_ids,
        pools,
        batches,
        layout=head.layout,
        mesh=model.mesh,
        only_stores=True,
    )
    return pools


def _pair_with_next(
    rows: RowState, inputs: StepInputs, step: ModelStep, bucket: Bucket
) -> tuple[Int[Array, " T"], Float[Array, "T AD"], Int[Array, " S"]]:
    """Returns token ids and the states before them, and the length of each row's run of such pairs.

    A row that goes on has the state before its first token: its pairs lie one position before its tokens. Any other
    row's begin at its first token, so that its last one wants a token that nobody knows yet. Whatever is taken for it,
    the row's next step writes that entry anew.
    """
    assert step.aux is not None and rows.aux is not None
    before = rows.aux[inputs.row_ids]
    goes_on = (inputs.starts == KEEP) | ((inputs.continues == 1) & (inputs.starts == rows.num_computed[inputs.row_ids]))
    if bucket.is_decode:
        shifted, each_goes_on = before, goes_on
    else:
        lens = jnp.diff(inputs.query_start_loc)
        firsts = jnp.where(lens > 0, inputs.query_start_loc[:-1], bucket.tokens)
        shifted = jnp.roll(step.aux, 1, axis=0).at[firsts].set(before, mode="drop")
        each_goes_on = jnp.repeat(goes_on, lens, total_repeat_length=bucket.tokens)
    token_ids = jnp.where(each_goes_on, step.token_ids, jnp.roll(step.token_ids, -1))
    return token_ids, jnp.where(each_goes_on[:, None], shifted, step.aux), step.seq_lens - goes_on


def draft_tokens(
    target_params: Any,
    params: Any,
    cache: KVCache,
    rows: RowState,
    lines: RowLines,
    *,
    model: StepModel,
) -> tuple[KVCache, RowState, Int[Array, "S K"]]:
    """Drafts what may follow the tokens of the step just sampled; returns the state after it and each row's drafts.

    One token of each row that sampled is computed at a time, on the drafter's own guesses. `cache` and `rows` are
    donated.
    """
    drafting = model.drafting
    assert drafting is not None and drafting.head is not None
    head, drafter, few = drafting.head, drafting.head.model, slice(drafting.rows)
    is_open, row_ids, sampling = lines.samples[few] == 1, lines.row_ids[few], lines.sampling[few]
    limits = sampling[:, SAMPLING_FIELDS.index("max_num_tokens")]
    tables = rows.page_table[jnp.array(head.groups)][:, row_ids]
    # Drafts lie behind those of the step before, of which more may have been accepted than the row may keep.
    tables = bound_pages(tables, limits, head.shapes[0].spec.page_size, 2 * drafting.max_drafts + 1)
    tables = jnp.where(is_open[:, None], tables, 0)  # a row that has not sampled computes tokens of the null page
    computed = jnp.where(is_open, rows.num_computed[row_ids], 1)
    target, count = (target_params, model.config), len(row_ids)
    choose = _make_choice(params, target_params, sampling, model)

    def draft_next(carry: tuple[Pools, Array | None, Array], index: Array) -> tuple[tuple[Any, ...], Array]:
        pools, states, token_ids = carry
        batches = prepare_batches(
            tables,
            computed + index + (not drafter.takes_next),
            jnp.arange(count + 1, dtype=jnp.int32),
            jnp.full(3, count, jnp.int32),
            num_tokens=count,
            max_query_len=1,
            shapes=head.shapes,
            impl=head.impl,
        )
        states, pools = run_pass(
            drafter, params, *target, states, token_ids, pools, batches, layout=head.layout, mesh=model.mesh
        )
        token_ids = choose(states, computed + index + 1)
        return (pools, states if drafter.takes_next else None, token_ids), token_ids

    num_pools = model.layout.num_pools
    aux = None if rows.aux is None else rows.aux[row_ids]
    begin = cache[num_pools:], read_target(drafter, params, aux), rows.last_token[row_ids]
    (pools, *_), drafts = lax.scan(draft_next, begin, jnp.arange(drafting.max_drafts, dtype=jnp.int32))
    rows, drafts = set_drafts(rows, lines.row_ids, jnp.where(is_open[:, None], drafts.T, NO_DRAFT))
    return (*cache[:num_pools], *pools), rows, drafts


def _make_choice(
    params: Any, target_params: Any, sampling: Int[Array, "P F"], model: StepModel
) -> Callable[[Float[Array, "P D"], Int[Array, " P"]], Int[Array, " P"]]:
    """Returns the function that chooses drafts from states and the positions that they are for."""
    assert model.drafting is not None and model.drafting.head is not None
    head, vocab_size = model.drafting.head, model.config.vocab_size

    def choose(states: Float[Array, "P D"], positions: Int[Array, " P"]) -> Int[Array, " P"]:
        logits = draft_logits(head.model, params, target_params, model.config, states)
        if not head.draws:
            return map_drafts(head.model, params, map_rows(sample_greedy, logits)[0])
        inputs = unpack_sampling(sampling, positions)
        whole = expand_logits(head.model, params, logits, vocab_size)

        def draw(logits: Array, inputs: Any, uniform: Array) -> Array:
            return sample(logits, inputs, uniform, vocab_size=vocab_size)[0]

        return map_rows(draw, whole, inputs, draw_uniforms(inputs))

    return choose
