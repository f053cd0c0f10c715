"""Drafts beside the rows, for the step that verifies them."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxserve.core.runtime.device_state import RowState
from jaxserve.core.sampling.drafts import NO_DRAFT


def set_drafts(
    rows: RowState, row_ids: Int[Array, " S"], drafts: Int[Array, "P K"]
) -> tuple[RowState, Int[Array, "S K"]]:
    """Puts the drafts of a step's first P rows beside them; the other rows have none."""
    padded = jnp.pad(drafts, ((0, len(row_ids) - len(drafts)), (0, 0)), constant_values=NO_DRAFT)
    return replace(rows, drafts=rows.drafts.at[row_ids].set(padded)), padded
