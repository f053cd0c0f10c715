"""The sample programs: from a step's logits to its tokens, one per row, or a run per row of a verify step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxserve.core.runtime.device_state import RowState
from jaxserve.core.runtime.feature import SampledStep
from jaxserve.core.runtime.rows import EXTRA_FIELDS, SAMPLING_FIELDS, SampleVariant
from jaxserve.core.runtime.step_arrays import RowLines, SampledTokens, SelectedLines, unpack_sampling
from jaxserve.core.runtime.step_model import StepModel
from jaxserve.core.sampling import (
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
from jaxserve.core.sampling.drafts import NO_DRAFT
from jaxserve.core.scheduler.sequence import MASK_LATE, NO_TOKEN_LEFT, NON_FINITE, NOT_KEPT
from jaxserve.logits_processor import LogitsProcessor


def sample_tokens(
    rows: RowState,
    kept: tuple[Any, ...],
    sampler: SamplerState | None,
    read: tuple[Any, ...],
    selected: SelectedLines,
    mask: UInt32[Array, "N M"] | None,
    *,
    model: StepModel,
    variant: SampleVariant,
) -> tuple[RowState, tuple[Any, ...], SamplerState | None, SampledTokens]:
    """Returns the rows after a step, what features keep, the sampler's state, and what the step brings each row.

    `rows`, `kept` and `sampler` are donated.

    A row brings one id, or NON_FINITE if its logits are not finite; every sample program gives a greedy row the same.
    With FULL and MASKED, logits are shaped by masks, biases and penalties. Then a row's id is NO_TOKEN_LEFT if its
    parameters forbid every token, and MASK_LATE if its first line of `mask` is 0: it samples nothing and keeps its last
    token. A run ends in front of another line of 0.

    A row of a verify step brings a run. At every position it draws what a step of one token would draw there: from its
    own parameters, uniforms and counts, whoever drafted. Drafts are accepted while they equal the draw, and the last
    draw stands. So the tokens are those of plain steps, and their distribution is the model's.

    Args:
        kept: of each feature, as `read` is; see `StepFeature.split_state`.
        sampler: None for GREEDY and RANDOM.
        mask: for MASKED only.
    """
    if variant <= SampleVariant.RANDOM:
        ids = _draw_lines(rows, selected, model=model, greedy=variant is SampleVariant.GREEDY)
    else:
        assert sampler is not None
        sampler, ids = _draw_shaped_lines(rows, sampler, selected, mask, model=model)
    rows, kept, sampled = _end_runs(rows, kept, read, selected, ids, model=model)
    return rows, kept, sampler, sampled


def _draw_lines(rows: RowState, selected: SelectedLines, *, model: StepModel, greedy: bool) -> Int[Array, "S W"]:
    width = selected.width
    lines = selected
    if width > 1:
        lines = SelectedLines(selected.logits, RowLines(jnp.repeat(selected.lines.array, width, axis=0)))
    ids = _draw(lines, _list_positions(rows, selected).reshape(-1), model=model, greedy=greedy)
    return ids.reshape(-1, width)


def _draw_shaped_lines(
    rows: RowState,
    sampler: SamplerState,
    selected: SelectedLines,
    mask: UInt32[Array, "N M"] | None,
    *,
    model: StepModel,
) -> tuple[SamplerState, Int[Array, "S W"]]:
    positions = _list_positions(rows, selected)
    drafts = _read_drafts(rows, selected)

    def draw_one(carry: tuple[SamplerState, Bool[Array, " S"]], at: tuple[Array, ...]) -> tuple[tuple, Array]:
        (sampler, is_open), (positions, logits, mask, draft) = carry, at
        # The sampler counts a row's tokens as long as its drafts are accepted.
        line = SelectedLines(logits, selected.lines.restrict(is_open))
        sampler, ids = _draw_shaped(sampler, line, positions, mask, model=model)
        return (sampler, is_open & (ids == draft)), ids

    def by_position(lines: Array) -> Array:
        return jnp.moveaxis(lines.reshape(*positions.shape, -1), 1, 0)

    masks = None if mask is None else by_position(mask)
    along = positions.T, by_position(selected.logits), masks, drafts.T
    (sampler, _), ids = lax.scan(draw_one, (sampler, jnp.ones(len(positions), bool)), along)
    return sampler, ids.T


def _list_positions(rows: RowState, selected: SelectedLines) -> Int[Array, "S W"]:
    """Returns the positions of the tokens to be sampled."""
    ends = rows.num_computed[selected.lines.row_ids]
    return ends[:, None] + jnp.arange(1 - selected.width, 1, dtype=ends.dtype)


def _read_drafts(rows: RowState, selected: SelectedLines) -> Int[Array, "S W"]:
    """Returns the drafts that each sampled token is compared with; the last one has none."""
    if rows.drafts is None:
        return jnp.full((len(selected.lines), selected.width), NO_DRAFT)
    drafts = rows.drafts[selected.lines.row_ids, : selected.width - 1]
    return jnp.pad(drafts, ((0, 0), (0, 1)), constant_values=NO_DRAFT)


def _draw(selected: SelectedLines, positions: Int[Array, " S"], *, model: StepModel, greedy: bool) -> Int[Array, " S"]:
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
    selected: SelectedLines,
    positions: Int[Array, " S"],
    mask: UInt32[Array, "S M"] | None,
    *,
    model: StepModel,
) -> tuple[SamplerState, Int[Array, " S"]]:
    vocab_size = model.config.vocab_size
    inputs = unpack_sampling(selected.lines.sampling, positions)

    def draw_row(line: SelectedLines, mask: Array | None, inputs: SamplingInputs, uniform: Array) -> tuple[Array, ...]:
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
    sampler = record(sampler, selected.lines.row_ids, ids, (selected.lines.is_sampled == 1) & (inputs.has_edits == 1))
    return sampler, jnp.where(are_finite, ids, NON_FINITE)


def _end_runs(
    rows: RowState,
    kept: tuple[Any, ...],
    read: tuple[Any, ...],
    selected: SelectedLines,
    ids: Int[Array, "S W"],
    *,
    model: StepModel,
) -> tuple[RowState, tuple[Any, ...], SampledTokens]:
    """Ends each row's run at the first id that is not its draft; then each feature follows.

    The row goes on behind its run, whose last id is written to `last_token` if the row samples.
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
    counts = count_sampled(selected.lines.is_sampled, runs)
    last = jnp.take_along_axis(runs, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
    last = jnp.where(counts > 0, last, rows.last_token[selected.lines.row_ids])
    rows = replace(rows, last_token=rows.last_token.at[selected.lines.row_ids].set(last))
    later, followed = None, []
    handed = selected.handed or (None,) * len(model.features)
    for feature, given, other, each in zip(model.features, kept, read, handed, strict=True):
        step = SampledStep(selected.lines, runs, num_kept, each)
        rows, own, drafted = feature.follow_sample(rows, given, other, step)
        followed.append(own)
        later = later if drafted is None else drafted
    return rows, tuple(followed), SampledTokens(runs, later)


def count_sampled(is_sampled: Int[Array, " S"], runs: Int[Array, "S W"]) -> Int[Array, " S"]:
    """Returns how many tokens each row got in a step; `runs` as in `SampledTokens.ids`."""
    return jnp.where(is_sampled == 1, jnp.sum(runs >= 0, axis=1), 0)


def _process(logits: Float[Array, " V"], line: SelectedLines, processor: LogitsProcessor) -> Float[Array, " V"]:
    """Runs the engine's logits processor on a row that asks for it."""
    fields = dict(zip(SAMPLING_FIELDS, line.lines.sampling, strict=True))
    columns = [lax.bitcast_convert_type(fields[name], jnp.float32) for name in EXTRA_FIELDS]
    arguments = dict(zip(processor.arguments, columns, strict=False))
    # No branch: under vmap a branch would copy the function's arrays for each row.
    processed = processor.function(logits, arguments).astype(logits.dtype)
    return jnp.where(fields["has_extra"] == 1, processed, logits)
