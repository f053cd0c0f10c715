"""The forward pass of a step, and the programs that only some steps need.

forward: unpacks the inputs, advances the rows, runs the layers (writing and reading KV) and computes one line of logits
per row, or one per token of a verify step. Features may follow (feature.py). The sample programs (sample.py) then
choose the tokens. Everything before and after them runs on the host. Log-probabilities of tokens and of prompts,
and embeddings, are programs of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.core.layers.pooling import finish_rows, pool_rows
from jaxserve.core.layers.recurrent import choose_slots
from jaxserve.core.models.decoder import compute_logits, normalize_last
from jaxserve.core.models.decoder import forward as run_layers
from jaxserve.core.runtime.batches import bound_pages, find_last_keys, prepare_batches
from jaxserve.core.runtime.buckets import Bucket
from jaxserve.core.runtime.device_state import KVCache, RowState
from jaxserve.core.runtime.feature import ForwardedStep, StepFeature
from jaxserve.core.runtime.inputs import KEEP, ON_DEVICE, InputLayout, StepInputs
from jaxserve.core.runtime.rows import SAMPLING_FIELDS, SampleVariant
from jaxserve.core.runtime.sample import sample_tokens
from jaxserve.core.runtime.states import load_states, save_states
from jaxserve.core.runtime.step_arrays import HiddenStates, RowLines, SampledTokens, SelectedLines
from jaxserve.core.runtime.step_model import StepModel
from jaxserve.core.sampling import (
    LogprobArrays,
    SamplerState,
    compute_logprobs,
    gather_logprobs,
    gather_prompt_logprobs,
)
from pallas_kernels.spec import BatchMeta


def forward(
    params: Any,
    cache: KVCache,
    rows: RowState,
    packed: Int[Array, " I"],
    feature_params: tuple[Any, ...],
    *,
    model: StepModel,
    layout: InputLayout,
) -> tuple[KVCache, RowState, SelectedLines, HiddenStates]:
    """Runs a step up to the logits; returns the cache and the rows after it. `cache` and `rows` are donated.

    Recurrent states are copied from snapshots before it, and to them behind it; a verify step writes none (states.py).
    """
    inputs = layout.views(packed)
    cache = load_states(model, cache, inputs)
    cache, rows, selected, hidden = run_forward(params, cache, rows, inputs, feature_params, model=model, layout=layout)
    if layout.bucket.width == 1:
        cache = save_states(model, cache, inputs, rows.num_computed)
    return cache, rows, selected, hidden


def run_forward(
    params: Any,
    cache: KVCache,
    rows: RowState,
    inputs: StepInputs,
    feature_params: tuple[Any, ...],
    *,
    model: StepModel,
    layout: InputLayout,
) -> tuple[KVCache, RowState, SelectedLines, HiddenStates]:
    """`forward` on unpacked inputs, without the copies."""
    bucket, before = layout.bucket, rows
    rows, seq_lens = _advance(rows, inputs)
    groups, num_rows, width = rows.page_table.shape
    table = rows.page_table.reshape(-1).at[inputs.page_entries].set(inputs.page_ids)
    page_table = table.reshape(groups, num_rows, width)
    tables = page_table[:, inputs.row_ids]
    if bucket.width > 1:
        limits = inputs.sampling[:, SAMPLING_FIELDS.index("max_num_tokens")]
        tables = bound_pages(tables, limits, model.shapes[0].spec.page_size, bucket.width)
    batches = prepare_batches(
        tables,
        seq_lens,
        inputs.query_start_loc,
        inputs.distribution,
        num_tokens=bucket.tokens,
        max_query_len=bucket.max_query_len,
        shapes=model.shapes,
        impl=model.impl,
        last_keys=_list_last_keys(model, inputs, seq_lens, bucket),
    )
    tokens = _token_ids(rows, inputs, bucket)
    slots = None
    if model.config.states:
        lengths = jnp.diff(inputs.query_start_loc)
        slots = choose_slots(inputs.row_ids, seq_lens, lengths, num_rows - 1, leaves_pending=bucket.width > 1)
    rotary_positions = _find_rotary_positions(inputs, batches[0], layout) if layout.state.has_image_positions else None
    changed = params
    for feature, own in zip(model.features, feature_params, strict=True):
        changed = feature.precede_forward(own, changed, inputs, bucket)
    count = model.layout.num_pools
    hidden, pools, captured = run_layers(
        model.config,
        changed,
        tokens,
        cache[:count],
        batches,
        layout=model.layout,
        mesh=model.mesh,
        slots=slots,
        rotary_positions=rotary_positions,
        aux_layers=model.aux_layers,
    )
    ends = jnp.maximum(inputs.query_start_loc[1:] - 1, 0)
    if model.generates:
        last = hidden if bucket.width > 1 else hidden[ends]
        logits = compute_logits(model.config, params, last)
    elif model.config.pooler.by_token:
        last, logits = hidden, None
    else:
        normalize = partial(normalize_last, model.config, params)
        last = pool_rows(model.config.pooler.pooling_types, normalize, hidden, inputs.query_start_loc)
        logits = None
    lines = RowLines.join(inputs.row_ids, inputs.is_sampled, inputs.sampling)
    states = HiddenStates(last, hidden if bucket.is_mixed and model.generates else None)
    rows = replace(rows, page_table=page_table)
    step = ForwardedStep(
        model.config, params, model.mesh, bucket, before, inputs, tokens, seq_lens, tables, captured, ends
    )
    rows, feature_pools, handed = _follow(model.features, feature_params, cache[count:], rows, step)
    return (*pools, *feature_pools), rows, SelectedLines(logits, lines, handed), states


def _follow(
    features: Sequence[StepFeature], params: tuple[Any, ...], pools: KVCache, rows: RowState, step: ForwardedStep
) -> tuple[RowState, KVCache, tuple[Any, ...]]:
    """Lets each feature follow the forward pass; returns the rows, the features' pools and what they hand over."""
    followed, handed = [], []
    for feature, own in zip(features, params, strict=True):
        given, pools = pools[: feature.num_pools], pools[feature.num_pools :]
        rows, its_pools, each = feature.follow_forward(own, given, rows, step)
        followed += its_pools
        handed.append(each)
    return rows, tuple(followed), tuple(handed)


def compute_step_logprobs(
    selected: SelectedLines, token_ids: Int[Array, "S W"], *, model: StepModel, max_logprobs: int
) -> LogprobArrays | Float[Array, "S V"]:
    """Returns log-probabilities of the sampled and the `max_logprobs` likeliest tokens; of all tokens if it is -1."""
    vocab_size = model.config.vocab_size
    if max_logprobs < 0:
        return compute_logprobs(selected.logits, vocab_size=vocab_size)
    return gather_logprobs(selected.logits, token_ids.reshape(-1), max_logprobs, vocab_size=vocab_size)


def compute_prompt_logprobs(
    params: Any, hidden: Float[Array, "T D"], targets: Int[Array, " T"], *, model: StepModel, max_logprobs: int
) -> LogprobArrays:
    """Returns log-probabilities of `targets[t]` and the `max_logprobs` likeliest tokens after each token of a step."""
    logits = partial(compute_logits, model.config, params)
    return gather_prompt_logprobs(hidden, logits, targets, max_logprobs, vocab_size=model.config.vocab_size)


def embed(params: Any, last: Float[Array, "N D"], *, model: StepModel) -> Float[Array, "N E"]:
    """Returns the rows' or tokens' vectors, f32, of `HiddenStates.last`; `params` are those of `embedding_params`."""
    if not model.pools_rows:
        last = normalize_last(model.config, params, last).astype(jnp.float32)
    return finish_rows(model.config.pooler, params, last)


def embedding_params(params: Any) -> dict[str, Any]:
    """Returns the parameters that embeddings need of a model whose hidden states are known."""
    return {name: leaf for name, leaf in params.items() if name == "final_norm" or name.startswith("dense_")}


def head_params(params: Any) -> dict[str, Any]:
    """Returns the parameters that logits need."""
    return {name: leaf for name, leaf in params.items() if name in ("embed", "lm_head", "final_norm")}


def decode_loop(
    params: Any,
    cache: KVCache,
    rows: RowState,
    sampler: SamplerState,
    packed: Int[Array, " I"],
    feature_params: tuple[Any, ...],
    *,
    model: StepModel,
    layout: InputLayout,
    num_steps: int,
    variant: SampleVariant,
) -> tuple[KVCache, RowState, SamplerState, SampledTokens]:
    """Runs `num_steps` steps of a decode bucket; returns the state after them and each row's ids.

    `cache`, `rows` and `sampler` are donated. A row that has computed all but its last token is padding from then on:
    its ids mean nothing, and it writes to no page of its own. Recurrent states are copied to snapshots behind the last.
    """
    inputs = layout.views(packed)
    limits = inputs.sampling[:, SAMPLING_FIELDS.index("max_num_tokens")]
    padding = layout.state.padding_row
    nothing = (None,) * len(model.features)  # none takes part in sampling: drafts are never in a loop
    where = {"model": model, "layout": layout}

    def run_step(carry: tuple[KVCache, RowState, SamplerState], _: None) -> tuple[Any, Array]:
        cache, rows, sampler = carry
        is_open = rows.num_computed[inputs.row_ids] + 1 < limits
        open_inputs = inputs._replace(
            row_ids=jnp.where(is_open, inputs.row_ids, padding), is_sampled=jnp.where(is_open, inputs.is_sampled, 0)
        )
        rows = replace(rows, num_computed=rows.num_computed.at[padding].set(0))
        cache, rows, selected, _ = run_forward(params, cache, rows, open_inputs, feature_params, **where)
        rows, _, after, sampled = sample_tokens(
            rows, nothing, sampler, nothing, selected, None, model=model, variant=variant
        )
        return (cache, rows, after), sampled.ids

    (cache, rows, sampler), ids = lax.scan(run_step, (cache, rows, sampler), length=num_steps)
    cache = save_states(model, cache, inputs, rows.num_computed)
    return cache, rows, sampler, SampledTokens(ids[:, :, 0].T)


def _advance(rows: RowState, inputs: StepInputs) -> tuple[RowState, Int[Array, " S"]]:
    """Returns the rows after this step's tokens, and the length of each row of the step [S]."""
    computed = jnp.where(inputs.starts == KEEP, rows.num_computed[inputs.row_ids], inputs.starts)
    seq_lens = computed + jnp.diff(inputs.query_start_loc)
    return replace(rows, num_computed=rows.num_computed.at[inputs.row_ids].set(seq_lens)), seq_lens


def _find_rotary_positions(
    inputs: StepInputs, batch: BatchMeta, layout: InputLayout
) -> Int[Array, " T"] | Int[Array, "3 T"]:
    """Returns the rotary positions of a step: one of each token, or three where images may be computed."""
    deltas = inputs.sampling[:, SAMPLING_FIELDS.index("rope_delta")]
    positions = batch.positions + deltas[batch.token_rows]
    return positions + inputs.rotary_shifts.reshape(3, -1) if layout.bucket.is_mixed else positions


def _list_last_keys(
    model: StepModel, inputs: StepInputs, seq_lens: Int[Array, " S"], bucket: Bucket
) -> list[Int[Array, " T"] | None]:
    """Returns the last key that each token sees in each KV group; None where masks are causal."""
    mutual = [bucket.is_mixed and group.memory.mutual_images for group in model.config.kv_groups]
    keys = find_last_keys(inputs.token_ids, seq_lens, inputs.query_start_loc) if any(mutual) else None
    return [keys if each else None for each in mutual]


def _token_ids(rows: RowState, inputs: StepInputs, bucket: Bucket) -> Int[Array, " T"]:
    """Returns the token ids, with each decode row's last sampled token and its drafts, which only the device knows."""
    num_rows, num_tokens = bucket.rows, bucket.tokens
    last = rows.last_token[inputs.row_ids]  # decode rows come first, so row s of the step is token s
    if bucket.width > 1:
        drafts = jnp.maximum(rows.drafts[inputs.row_ids, : bucket.width - 1], 0)  # any token where there is none
        return jnp.concatenate([last[:, None], drafts], axis=1).reshape(-1)
    last = jnp.pad(last, (0, max(0, num_tokens - num_rows)))[:num_tokens]
    return jnp.where(inputs.token_ids == ON_DEVICE, last, inputs.token_ids)
