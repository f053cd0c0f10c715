"""The sample programs: from a step's logits to its tokens, one per row, or a run per row of a verify step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxserve.logits_processor import LogitsProcessor
from jaxserve.runtime.device_state import RowState
from jaxserve.runtime.drafting import append_runs, count_sampled, look_up_drafts
from jaxserve.runtime.rows import EXTRA_FIELDS, SAMPLING_FIELDS
from jaxserve.runtime.step_model import RowLines, SampledTokens, SampleInputs, StepModel, unpack_sampling
from jaxserve.sampling import (
    SamplerState,
    SamplingInputs,
    draw_uniforms,
    is_finite,
    map_rows,
    mask_logits,
    record,
    sample,
    sample_greedy,
    shape_logits,
)
from jaxserve.scheduler.sequence import MASK_LATE, NO_TOKEN_LEFT, NON_FINITE, NOT_KEPT
from jaxserve.speculation import NO_DRAFT, Corpus, LookupState


def sample_tokens(
    rows: RowState,
    history: Int[Array, "R L"] | None,
    corpus: Corpus | None,
    selected: SampleInputs,
    *,
    model: StepModel,
    greedy: bool,
) -> tuple[RowState, Int[Array, "R L"] | None, SampledTokens]:
    """Returns the rows after a step, their tokens if drafts are looked up in them, and what each brings.

    `rows` and `history` are donated. Only a verify step reads `corpus`.

    A row brings one id, or NON_FINITE if its logits are not finite; every sample program gives a greedy row the same.

    A row of a verify step brings a run. At every position it draws what a step of one token would draw there: from its
    own parameters, uniforms and counts, whoever drafted. Drafts are accepted while they equal the draw, and the last
    draw stands. So the tokens are those of plain steps, and their distribution is the model's.
    """
    width = selected.width
    lines = selected
    if width > 1:
        lines = SampleInputs(selected.logits, RowLines(jnp.repeat(selected.lines.array, width, axis=0)))
    ids = _draw(lines, _list_positions(rows, selected).reshape(-1), model=model, greedy=greedy)
    return _end_runs(rows, history, corpus, selected, ids.reshape(-1, width), model=model)


def sample_shaped_tokens(
    rows: RowState,
    history: Int[Array, "R L"] | None,
    corpus: Corpus | None,
    sampler: SamplerState,
    selected: SampleInputs,
    mask: UInt32[Array, "N M"] | None,
    *,
    model: StepModel,
) -> tuple[RowState, Int[Array, "R L"] | None, SamplerState, SampledTokens]:
    """`sample_tokens` on logits shaped by masks, biases and penalties. `rows`, `history` and `sampler` are donated.

    A row's id is NO_TOKEN_LEFT if its parameters forbid every token, and MASK_LATE if its first line of `mask` is 0: it
    then samples nothing and keeps its last token. A run ends in front of another line of 0.
    """
    positions = _list_positions(rows, selected)
    drafts = _read_drafts(rows, selected)

    def draw_one(carry: tuple[SamplerState, Bool[Array, " S"]], at: tuple[Array, ...]) -> tuple[tuple, Array]:
        (sampler, is_open), (positions, logits, mask, draft) = carry, at
        # The sampler counts a row's tokens as long as its drafts are accepted.
        line = SampleInputs(logits, selected.lines.restrict(is_open))
        sampler, ids = _draw_shaped(sampler, line, positions, mask, model=model)
        return (sampler, is_open & (ids == draft)), ids

    def by_position(lines: Array) -> Array:
        return jnp.moveaxis(lines.reshape(*positions.shape, -1), 1, 0)

    masks = None if mask is None else by_position(mask)
    along = positions.T, by_position(selected.logits), masks, drafts.T
    (sampler, _), ids = lax.scan(draw_one, (sampler, jnp.ones(len(positions), bool)), along)
    rows, history, sampled = _end_runs(rows, history, corpus, selected, ids.T, model=model)
    return rows, history, sampler, sampled


def _list_positions(rows: RowState, selected: SampleInputs) -> Int[Array, "S W"]:
    """Returns the positions of the tokens to be sampled."""
    ends = rows.num_computed[selected.lines.row_ids]
    return ends[:, None] + jnp.arange(1 - selected.width, 1, dtype=ends.dtype)


def _read_drafts(rows: RowState, selected: SampleInputs) -> Int[Array, "S W"]:
    """Returns the drafts that each sampled token is compared with; the last one has none."""
    if rows.drafts is None:
        return jnp.full((len(selected.lines), selected.width), NO_DRAFT)
    drafts = rows.drafts[selected.lines.row_ids, : selected.width - 1]
    return jnp.pad(drafts, ((0, 0), (0, 1)), constant_values=NO_DRAFT)


def _draw(selected: SampleInputs, positions: Int[Array, " S"], *, model: StepModel, greedy: bool) -> Int[Array, " S"]:
    vocab_size = model.config.vocab_size
    if greedy:
        ids, are_finite = map_rows(partial(sample_greedy, vocab_size=vocab_size), selected.logits)
    else:
        inputs = unpack_sampling(selected.lines.sampling, positions)
        function = partial(sample, vocab_size=vocab_size)
        ids, are_finite = map_rows(function, selected.logits, inputs, draw_uniforms(inputs))
    return jnp.where(are_finite, ids, NON_FINITE)


def _draw_shaped(
    sampler: SamplerState,
    selected: SampleInputs,
    positions: Int[Array, " S"],
    mask: UInt32[Array, "S M"] | None,
    *,
    model: StepModel,
) -> tuple[SamplerState, Int[Array, " S"]]:
    vocab_size = model.config.vocab_size
    inputs = unpack_sampling(selected.lines.sampling, positions)

    def draw_row(line: SampleInputs, mask: Array | None, inputs: SamplingInputs, uniform: Array) -> tuple[Array, ...]:
        shaped = line.logits if mask is None else mask_logits(line.logits, mask)
        shaped = shape_logits(shaped, inputs, sampler, line.lines.row_ids, vocab_size=vocab_size)
        if model.processor is not None:
            shaped = _process(shaped, line, model.processor)
        return *sample(shaped, inputs, uniform, vocab_size=vocab_size), is_finite(line.logits)

    ids, are_left, are_finite = map_rows(draw_row, selected, mask, inputs, draw_uniforms(inputs))
    ids = jnp.where(are_left, ids, NO_TOKEN_LEFT)
    if mask is not None:
        ids = jnp.where(jnp.any(mask != 0, axis=1), ids, MASK_LATE)
    # `record` ignores sentinels.
    sampler = record(sampler, selected.lines.row_ids, ids, (selected.lines.samples == 1) & (inputs.has_edits == 1))
    return sampler, jnp.where(are_finite, ids, NON_FINITE)


def _end_runs(
    rows: RowState,
    history: Int[Array, "R L"] | None,
    corpus: Corpus | None,
    selected: SampleInputs,
    ids: Int[Array, "S W"],
    *,
    model: StepModel,
) -> tuple[RowState, Int[Array, "R L"] | None, SampledTokens]:
    """Ends each row's run at the first id that is not its draft, and appends it to the row's tokens.

    The row goes on behind its run, whose last id is written to `last_token` if the row samples. A verify step looks up
    what follows; plain steps leave that to a program of its own (`look_up_drafts`), as most do not need it.
    """
    drafts, width = _read_drafts(rows, selected), selected.width
    is_open = jnp.cumprod(jnp.pad(ids[:, :-1] == drafts[:, :-1], ((0, 0), (1, 0)), constant_values=True), axis=1) == 1
    # A late mask ends a run before its position; if it is the first, the sentinel tells.
    is_kept = is_open & ((ids != MASK_LATE) | (jnp.arange(width) == 0))
    runs = jnp.where(is_kept, ids, NOT_KEPT)
    num_kept = jnp.sum(is_kept, axis=1, dtype=rows.num_computed.dtype)
    if width > 1:
        num_computed = rows.num_computed[selected.lines.row_ids] - (width - num_kept)
        rows = replace(rows, num_computed=rows.num_computed.at[selected.lines.row_ids].set(num_computed))
    if selected.aux is not None:
        of_last = selected.aux.reshape(*ids.shape, -1)[jnp.arange(len(ids)), num_kept - 1]
        rows = replace(rows, aux=rows.aux.at[selected.lines.row_ids].set(of_last))
    counts = count_sampled(selected.lines.samples, runs)
    last = jnp.take_along_axis(runs, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
    last = jnp.where(counts > 0, last, rows.last_token[selected.lines.row_ids])
    rows = replace(rows, last_token=rows.last_token.at[selected.lines.row_ids].set(last))
    if history is None:
        return rows, None, SampledTokens(runs)
    brought = selected.lines, runs
    history = append_runs(rows, history, *brought, model=model)
    if width == 1:
        return rows, history, SampledTokens(runs)
    rows, later = look_up_drafts(rows, LookupState(history, corpus), *brought, model=model)
    return rows, history, SampledTokens(runs, later)


def _process(logits: Float[Array, " V"], line: SampleInputs, processor: LogitsProcessor) -> Float[Array, " V"]:
    """Runs the engine's logits processor on a row that asks for it."""
    fields = dict(zip(SAMPLING_FIELDS, line.lines.sampling, strict=True))
    columns = [lax.bitcast_convert_type(fields[name], jnp.float32) for name in EXTRA_FIELDS]
    arguments = dict(zip(processor.arguments, columns, strict=False))
    # No branch: under vmap a branch would copy the function's arrays for each row.
    processed = processor.function(logits, arguments).astype(logits.dtype)
    return jnp.where(fields["has_extra"] == 1, processed, logits)
