"""What drafts are looked up in, and what the host writes there: the tokens that no step samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxserve.runtime.device_state import RowState
from jaxserve.runtime.drafting import hash_salt, pack_tokens
from jaxserve.runtime.programs import Programs, call_program
from jaxserve.runtime.step_model import SampledTokens, SampleInputs
from jaxserve.scheduler.plan import StepPlan
from jaxserve.speculation import AnswerQueue, CorpusShape, LookupState

_Written = tuple[int, Sequence[int], str]  # first position, token ids, and the row's salt if it is 0

_NOTHING: _Written = 0, (), ""


class LookupTokens:
    """The rows' tokens and the kept answers on the device; both None if no drafts are looked up.

    Sample programs append what they sample to `history`, which they take and give back. Those of verify steps look up
    the next drafts, too; behind other steps `look_up` does, if there are to be any.

    Args:
        state: on the device, of zeros.
        num_rows: R.
        corpus: the sizes of the corpus, if `state` has one.
    """

    def __init__(self, state: LookupState | None, num_rows: int, corpus: CorpusShape | None) -> None:
        self.history, self.corpus = (None, None) if state is None else (state.history, state.corpus)
        self._num_told = [0] * num_rows  # tokens of each row up to the last that the host knew before it was sampled
        self._unwritten: dict[int, list[_Written]] = {}  # by row
        self._answers = None if corpus is None else AnswerQueue(corpus)

    def warm_up(self, programs: Programs, padding_row: int) -> None:
        """Runs each program once."""
        if self.history is not None:
            self._write(programs, padding_row, *_NOTHING)
        if self._answers is not None:
            self._write_answers(programs, self._answers.take_block())

    def tell(self, programs: Programs, plan: StepPlan) -> None:
        """Takes the tokens of new rows and those that a grammar forced, and the answers of rows that have ended.

        Nobody reads them before drafts are looked up. By then many rows have ended, and answers share a call.
        """
        is_read = plan.num_drafts > 0 or plan.width > 1
        if self.history is None or not (plan.chunks or plan.new_rows or plan.finished_answers or is_read):
            return
        for row, written in self._list_told(plan).items():
            self._unwritten[row] = [*(self._unwritten.get(row, ()) if written[0] else ()), written]
        if is_read:
            for row in (*plan.decode_rows, *[chunk.row for chunk in plan.chunks]):
                for written in self._unwritten.pop(row, ()):
                    self._write(programs, row, *written)
        if self._answers is not None:
            self._keep_answers(programs, self._answers, plan, is_read)

    def _keep_answers(self, programs: Programs, answers: AnswerQueue, plan: StepPlan, is_read: bool) -> None:
        for answer in plan.finished_answers:
            answers.add(answer.token_ids, hash_salt(answer.cache_salt))
        while answers.fills_block or (is_read and not answers.is_empty):
            self._write_answers(programs, answers.take_block())

    def _list_told(self, plan: StepPlan) -> dict[int, _Written]:
        told: dict[int, _Written] = {each.row: (0, each.token_ids, each.cache_salt) for each in plan.new_rows}
        for chunk in plan.chunks:
            if chunk.row not in told and chunk.end > self._num_told[chunk.row]:
                told[chunk.row] = chunk.start, chunk.token_ids, ""
        for row, (start, token_ids, _) in told.items():
            self._num_told[row] = start + len(token_ids)
        return told

    def look_up(
        self, programs: Programs, rows: RowState, selected: SampleInputs, sampled: SampledTokens
    ) -> tuple[RowState, SampledTokens]:
        """Looks drafts up behind a step of width 1; returns the rows with them, and what the step brings."""
        program = programs.get("look_up", len(selected.lines))
        lookup = LookupState(self.history, self.corpus)
        rows, drafts = program(rows, lookup, selected.lines, sampled.ids)
        return rows, replace(sampled, drafts=drafts)

    def _write(self, programs: Programs, row: int, start: int, token_ids: Sequence[int], cache_salt: str) -> None:
        history: Any = self.history
        line = pack_tokens(row, start, token_ids, cache_salt, history.shape[1])
        state = call_program(programs.get("set_tokens", None), LookupState(history, self.corpus), line)
        self.history, self.corpus = state.history, state.corpus

    def _write_answers(self, programs: Programs, block: np.ndarray) -> None:
        self.corpus = call_program(programs.get("write_answers", None), self.corpus, block)
