"""What drafts are looked up in, and what the host writes there: the tokens that no step samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxserve.runtime.device_state import RowState
from jaxserve.runtime.drafting import NO_ANSWER, pack_tokens
from jaxserve.runtime.programs import Programs, call_program
from jaxserve.runtime.step_model import SampledTokens, SampleInputs
from jaxserve.scheduler.plan import StepPlan
from jaxserve.speculation import LookupState

_NOTHING: tuple[int, Sequence[int], str] = 0, (), ""


class LookupTokens:
    """The rows' tokens and the kept answers on the device; both None if no drafts are looked up.

    Sample programs append what they sample to `history`, which they take and give back. Those of verify steps look up
    the next drafts, too; behind other steps `look_up` does, if there are to be any.

    Args:
        state: on the device, of zeros.
        num_rows: R.
    """

    def __init__(self, state: LookupState | None, num_rows: int) -> None:
        self.history, self.corpus = (None, None) if state is None else (state.history, state.corpus)
        self._num_told = [0] * num_rows  # tokens of each row up to the last that the host has written

    def warm_up(self, programs: Programs, padding_row: int) -> None:
        """Runs the program once."""
        if self.history is not None:
            self._write(programs, padding_row, *_NOTHING)

    def tell(self, programs: Programs, plan: StepPlan) -> None:
        """Keeps the answers of rows that have ended, and writes the tokens of new rows and those that a grammar forced.

        A call does one of each. An answer is kept before another row's tokens take its place.
        """
        if self.history is None:
            return
        told = {each.row: (0, each.token_ids, each.cache_salt) for each in plan.new_rows}
        for chunk in plan.chunks:
            if chunk.row not in told and chunk.end > self._num_told[chunk.row]:
                told[chunk.row] = chunk.start, chunk.token_ids, ""
        ended = {each.row: (each.row, each.start, each.end) for each in plan.finished_rows}
        others = [row for row in told if row not in ended]
        for row, answer in ended.items():
            written = row if row in told or not others else others.pop()
            self._write(programs, written, *told.pop(written, _NOTHING), answer)
        for row, tokens in told.items():
            self._write(programs, row, *tokens)

    def look_up(
        self, programs: Programs, rows: RowState, selected: SampleInputs, sampled: SampledTokens
    ) -> tuple[RowState, SampledTokens]:
        """Looks drafts up behind a step of width 1; returns the rows with them, and what the step brings."""
        program = programs.get("look_up", len(selected.lines))
        lookup = LookupState(self.history, self.corpus)
        rows, drafts = program(rows, lookup, selected.lines, sampled.ids)
        return rows, replace(sampled, drafts=drafts)

    def _write(
        self,
        programs: Programs,
        row: int,
        start: int,
        token_ids: Sequence[int],
        cache_salt: str,
        answer: tuple[int, int, int] = NO_ANSWER,
    ) -> None:
        self._num_told[row] = start + len(token_ids)
        history: Any = self.history
        line = pack_tokens(row, start, token_ids, cache_salt, history.shape[1], answer)
        state = call_program(programs.get("set_tokens", None), LookupState(history, self.corpus), line)
        self.history, self.corpus = state.history, state.corpus
