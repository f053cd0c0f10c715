"""Drafts of the tokens that come next, put beside the rows for the step that verifies them."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, UInt32

from jaxserve.runtime.device_state import RowState
from jaxserve.runtime.step_model import StepModel
from jaxserve.speculation import NO_DRAFT


def look_up_drafts(
    rows: RowState, row_ids: Int[Array, " S"], runs: Int[Array, "S W"], counts: Int[Array, " S"], *, model: StepModel
) -> tuple[RowState, Int[Array, "S K"] | None]:
    """Adds the first `counts[s]` ids of each run to the row's tokens and looks up what may follow.

    Returns the rows and the drafts; None if they are not looked up.
    """
    drafting = model.drafting
    if drafting is None or drafting.lookup is None:
        return rows, None
    lengths = rows.num_computed[row_ids] + (counts > 0)
    lookup = drafting.lookup.append(rows.lookup, row_ids, lengths - counts, runs, counts)
    few = slice(drafting.rows)

    def look_up() -> Int[Array, "P K"]:
        assert drafting.lookup is not None
        return drafting.lookup.propose(lookup, row_ids[few], lengths[few])

    def skip() -> Int[Array, "P K"]:
        return jnp.full((len(row_ids[few]), drafting.max_drafts), NO_DRAFT, jnp.int32)

    # With more rows than a step can verify, drafts are good for nothing. Only a CPU saves time by a branch.
    is_useful = jnp.sum(counts > 0) <= drafting.rows
    drafts = lax.platform_dependent(cpu=lambda: lax.cond(is_useful, look_up, skip), default=look_up)
    return set_drafts(replace(rows, lookup=lookup), row_ids, drafts)


def write_chunks(
    rows: RowState,
    row_ids: Int[Array, " T"],
    positions: Int[Array, " T"],
    tokens: Int[Array, " T"],
    num_tokens: Int[Array, ""],
    *,
    model: StepModel,
) -> RowState:
    """Returns the rows after the tokens of a mixed step, which the lookup needs: some were sent by nobody else.

    Those after the first `num_tokens` are padding, whatever their rows.
    """
    if model.drafting is None or model.drafting.lookup is None:
        return rows
    is_token = jnp.arange(len(tokens)) < num_tokens
    return replace(rows, lookup=model.drafting.lookup.write(rows.lookup, row_ids, positions, tokens, is_token))


def set_tokens(
    rows: RowState, row: Int[Array, ""], tokens: Int[Array, " L"], salt: UInt32[Array, " 2"], *, model: StepModel
) -> RowState:
    """Returns the rows with the tokens in which the drafts of one of them are looked up. `rows` is donated."""
    assert model.drafting is not None and model.drafting.lookup is not None
    return replace(rows, lookup=model.drafting.lookup.set_row(rows.lookup, row, tokens, salt))


def remember_answer(
    rows: RowState, row: Int[Array, ""], start: Int[Array, ""], end: Int[Array, ""], *, model: StepModel
) -> RowState:
    """Keeps tokens [start, end) of a row, so that later requests find drafts in them. `rows` is donated."""
    assert model.drafting is not None and model.drafting.lookup is not None
    return replace(rows, lookup=model.drafting.lookup.remember(rows.lookup, row, start, end))


def set_drafts(
    rows: RowState, row_ids: Int[Array, " S"], drafts: Int[Array, "P K"]
) -> tuple[RowState, Int[Array, "S K"]]:
    """Puts the drafts of a step's first P rows beside them; the other rows have none."""
    padded = jnp.pad(drafts, ((0, len(row_ids) - len(drafts)), (0, 0)), constant_values=NO_DRAFT)
    return replace(rows, drafts=rows.drafts.at[row_ids].set(padded)), padded
