"""Drafts of the tokens that come next, put beside the rows for the step that verifies them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jaxserve.runtime.device_state import RowState
from jaxserve.runtime.step_model import StepModel
from jaxserve.speculation import NO_DRAFT, LookupState
from jaxserve.speculation.corpus import Corpus

NO_ANSWER = (0, 0, 0)
_HEADER = 7  # numbers in front of the tokens


def look_up_drafts(
    rows: RowState,
    history: Int[Array, "R L"] | None,
    corpus: Corpus | None,
    row_ids: Int[Array, " S"],
    runs: Int[Array, "S W"],
    counts: Int[Array, " S"],
    *,
    model: StepModel,
) -> tuple[RowState, Int[Array, "R L"] | None, Int[Array, "S K"] | None]:
    """Adds the first `counts[s]` ids of each run to the row's tokens and looks up what may follow.

    Returns the rows, the history and the drafts; None if they are not looked up.
    """
    drafting = model.drafting
    if drafting is None or drafting.lookup is None or history is None:
        return rows, history, None
    lengths = rows.num_computed[row_ids] + (counts > 0)
    lookup = drafting.lookup.append(LookupState(history, corpus), row_ids, lengths - counts, runs, counts)
    few = slice(drafting.rows)

    def look_up() -> Int[Array, "P K"]:
        assert drafting.lookup is not None
        return drafting.lookup.propose(lookup, row_ids[few], lengths[few])

    def skip() -> Int[Array, "P K"]:
        return jnp.full((len(row_ids[few]), drafting.max_drafts), NO_DRAFT, jnp.int32)

    # With more rows than a step can verify, drafts are good for nothing. Only a CPU saves time by a branch.
    is_useful = jnp.sum(counts > 0) <= drafting.rows
    drafts = lax.platform_dependent(cpu=lambda: lax.cond(is_useful, look_up, skip), default=look_up)
    rows, drafts = set_drafts(rows, row_ids, drafts)
    return rows, lookup.history, drafts


def set_tokens(lookup: LookupState, line: Int[Array, " E"], *, model: StepModel) -> LookupState:
    """Keeps the answer of a row that has ended, then writes tokens of a row to where drafts are looked up.

    `line` is that of `pack_tokens`; `lookup` is donated. Both are one program because a row often begins where another
    ends, and the call costs more than the work.
    """
    assert model.drafting is not None and model.drafting.lookup is not None
    drafter, answer, (row, start) = model.drafting.lookup, line[:3], line[3:5]
    if drafter.remembers:
        lookup = drafter.remember(lookup, *answer)
    return drafter.set_row(lookup, row, start, line[_HEADER:], lax.bitcast_convert_type(line[5:7], jnp.uint32))


def pack_tokens(
    row: int,
    start: int,
    token_ids: Sequence[int],
    cache_salt: str,
    max_len: int,
    answer: tuple[int, int, int] = NO_ANSWER,
) -> np.ndarray:
    """Returns what `set_tokens` reads, int32 [7 + max_len].

    Args:
        row: whose tokens are written.
        start: the first one's position; at 0 the row gets its salt, too.
        token_ids: from there on.
        cache_salt: the row's.
        max_len: L of the history.
        answer: row, first position and the one after the last of an answer to keep.
    """
    line = np.zeros(_HEADER + max_len, np.int32)
    line[:5] = *answer, row, start
    line[5:7] = np.frombuffer(hashlib.blake2b(cache_salt.encode(), digest_size=8).digest(), "<i4")
    line[_HEADER + start : _HEADER + start + len(token_ids)] = token_ids
    return line


def set_drafts(
    rows: RowState, row_ids: Int[Array, " S"], drafts: Int[Array, "P K"]
) -> tuple[RowState, Int[Array, "S K"]]:
    """Puts the drafts of a step's first P rows beside them; the other rows have none."""
    padded = jnp.pad(drafts, ((0, len(row_ids) - len(drafts)), (0, 0)), constant_values=NO_DRAFT)
    return replace(rows, drafts=rows.drafts.at[row_ids].set(padded)), padded
