"""Drafts of the tokens that come next, put beside the rows for the step that verifies them."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxserve.runtime.device_state import RowState
from jaxserve.runtime.step_model import RowLines, StepModel
from jaxserve.speculation import NO_DRAFT, LookupState


def count_sampled(samples: Int[Array, " S"], runs: Int[Array, "S W"]) -> Int[Array, " S"]:
    """Returns how many tokens each row got in a step; `runs` as in `SampledTokens.ids`."""
    return jnp.where(samples == 1, jnp.sum(runs >= 0, axis=1), 0)


def append_runs(
    rows: RowState,
    history: Int[Array, "R L"],
    lines: RowLines,
    runs: Int[Array, "S W"],
    *,
    model: StepModel,
) -> Int[Array, "R L"]:
    """Returns the history with the tokens that a step brought its rows, which have computed all but the last."""
    assert model.drafting is not None and model.drafting.lookup is not None
    counts = count_sampled(lines.samples, runs)
    positions = rows.num_computed[lines.row_ids] + (counts > 0) - counts
    return model.drafting.lookup.append(LookupState(history, None), lines.row_ids, positions, runs, counts).history


def look_up_drafts(
    rows: RowState,
    lookup: LookupState,
    lines: RowLines,
    runs: Int[Array, "S W"],
    *,
    model: StepModel,
) -> tuple[RowState, Int[Array, "S K"]]:
    """Looks up what may follow the tokens of a step's rows, `runs` included, which `lookup` has.

    Returns the rows, with their drafts, and the drafts. `rows` is donated.
    """
    drafting = model.drafting
    assert drafting is not None and drafting.lookup is not None
    few = slice(drafting.rows)
    lengths = rows.num_computed[lines.row_ids] + (count_sampled(lines.samples, runs) > 0)
    return set_drafts(rows, lines.row_ids, drafting.lookup.propose(lookup, lines.row_ids[few], lengths[few]))


def set_drafts(
    rows: RowState, row_ids: Int[Array, " S"], drafts: Int[Array, "P K"]
) -> tuple[RowState, Int[Array, "S K"]]:
    """Puts the drafts of a step's first P rows beside them; the other rows have none."""
    padded = jnp.pad(drafts, ((0, len(row_ids) - len(drafts)), (0, 0)), constant_values=NO_DRAFT)
    return replace(rows, drafts=rows.drafts.at[row_ids].set(padded)), padded
