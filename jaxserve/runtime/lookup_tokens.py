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

_Written = tuple[int, Sequence[int], str]  # first position, token ids, and the row's salt if it is 0

_NOTHING: _Written = 0, (), ""


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
        self._num_told = [0] * num_rows  # tokens of each row up to the last that the host knew before it was sampled
        self._unwritten: dict[int, list[_Written]] = {}  # by row

    def warm_up(self, programs: Programs, padding_row: int) -> None:
        """Runs the program once."""
        if self.history is not None:
            self._write(programs, padding_row, *_NOTHING)

    def tell(self, programs: Programs, plan: StepPlan) -> None:
        """Takes the tokens of new rows and those that a grammar forced, and the answers of rows that have ended.

        Where answers are kept, tokens are written at once: a call keeps an answer, then writes another row's tokens in
        its place. Else nobody reads them before drafts are looked up, and by then many rows have ended.
        """
        is_read = plan.num_drafts > 0 or plan.width > 1
        if self.history is None or not (plan.chunks or plan.new_rows or plan.finished_rows or is_read):
            return
        told = self._list_told(plan)
        if self.corpus is not None:
            self._keep_answers(programs, plan, told)
            return
        for row, written in told.items():
            self._unwritten[row] = [*(self._unwritten.get(row, ()) if written[0] else ()), written]
        if is_read:
            for row in (*plan.decode_rows, *[chunk.row for chunk in plan.chunks]):
                for written in self._unwritten.pop(row, ()):
                    self._write(programs, row, *written)

    def _list_told(self, plan: StepPlan) -> dict[int, _Written]:
        told: dict[int, _Written] = {each.row: (0, each.token_ids, each.cache_salt) for each in plan.new_rows}
        for chunk in plan.chunks:
            if chunk.row not in told and chunk.end > self._num_told[chunk.row]:
                told[chunk.row] = chunk.start, chunk.token_ids, ""
        for row, (start, token_ids, _) in told.items():
            self._num_told[row] = start + len(token_ids)
        return told

    def _keep_answers(self, programs: Programs, plan: StepPlan, told: dict[int, _Written]) -> None:
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
        history: Any = self.history
        line = pack_tokens(row, start, token_ids, cache_salt, history.shape[1], answer)
        state = call_program(programs.get("set_tokens", None), LookupState(history, self.corpus), line)
        self.history, self.corpus = state.history, state.corpus
