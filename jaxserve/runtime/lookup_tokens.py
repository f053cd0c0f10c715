"""What drafts are looked up in, and what the host writes there: the tokens that no step samples."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
from jaxtyping import UInt32

from jaxserve.runtime.device_state import RowState
from jaxserve.runtime.programs import Programs, call_program
from jaxserve.runtime.step_model import SampledTokens, SampleInputs
from jaxserve.scheduler.plan import StepPlan
from jaxserve.speculation import AnswerQueue, CorpusShape, LookupState, Span, pack_rows


class LookupTokens:
    """The rows' tokens and the kept answers on the device; both None if no drafts are looked up.

    Sample programs append what they sample to `history`, which they take and give back. Those of verify steps look up
    the next drafts, too; behind other steps `look_up` does, if there are to be any.

    Args:
        state: on the device, of zeros.
        corpus: the sizes of the corpus, if `state` has one.
    """

    def __init__(self, state: LookupState | None, corpus: CorpusShape | None) -> None:
        self.history, self.corpus = (None, None) if state is None else (state.history, state.corpus)
        num_rows = 0 if state is None else len(state.history)
        self._num_told = [0] * num_rows  # tokens of each row up to the last that the host knew before it was sampled
        self._salts = np.zeros((num_rows, 2), np.uint32)  # of the rows
        self._unwritten: dict[int, list[Span]] = {}  # by row
        self._answers = None if corpus is None else AnswerQueue(corpus)

    def warm_up(self, programs: Programs) -> None:
        """Runs each program once."""
        if self.history is not None:
            self._write_rows(programs, [])
        if self._answers is not None:
            self._write_answers(programs, self._answers.take_block())

    def tell(self, programs: Programs, plan: StepPlan) -> None:
        """Takes the tokens of new rows and those that a grammar forced, and the answers of rows that have ended.

        Nobody reads them before drafts are looked up. By then many rows have ended, and what is left shares calls.
        """
        is_read = plan.num_drafts > 0 or plan.width > 1
        if self.history is None or not (plan.chunks or plan.new_rows or plan.finished_answers or is_read):
            return
        self._take_tokens(plan)
        if is_read:
            rows = *plan.decode_rows, *[chunk.row for chunk in plan.chunks]
            if spans := [span for row in rows for span in self._unwritten.pop(row, ())]:
                self._write_rows(programs, spans)
        if self._answers is not None:
            self._keep_answers(programs, self._answers, plan, is_read)

    def _keep_answers(self, programs: Programs, answers: AnswerQueue, plan: StepPlan, is_read: bool) -> None:
        for answer in plan.finished_answers:
            answers.add(answer.token_ids, hash_salt(answer.cache_salt))
        while answers.fills_block or (is_read and not answers.is_empty):
            self._write_answers(programs, answers.take_block())

    def _take_tokens(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            self._num_told[new.row] = len(new.token_ids)
            self._salts[new.row] = hash_salt(new.cache_salt)
            self._unwritten[new.row] = [(new.row, 0, new.token_ids)]
        for chunk in plan.chunks:
            if chunk.end > self._num_told[chunk.row]:
                self._num_told[chunk.row] = chunk.end
                self._unwritten.setdefault(chunk.row, []).append((chunk.row, chunk.start, chunk.token_ids))

    def look_up(
        self, programs: Programs, rows: RowState, selected: SampleInputs, sampled: SampledTokens
    ) -> tuple[RowState, SampledTokens]:
        """Looks drafts up behind a step of width 1; returns the rows with them, and what the step brings."""
        program = programs.get("look_up", len(selected.lines))
        lookup = LookupState(self.history, self.corpus)
        rows, drafts = program(rows, lookup, selected.lines, sampled.ids)
        return rows, replace(sampled, drafts=drafts)

    def _write_rows(self, programs: Programs, spans: list[Span]) -> None:
        for block in pack_rows(spans, self._salts):
            state = LookupState(self.history, self.corpus)
            state = call_program(programs.get("write_rows", None), state, block)
            self.history, self.corpus = state.history, state.corpus

    def _write_answers(self, programs: Programs, block: np.ndarray) -> None:
        self.corpus = call_program(programs.get("write_answers", None), self.corpus, block)


def hash_salt(cache_salt: str) -> UInt32[np.ndarray, " 2"]:
    """Returns what stands for a salt on the device."""
    return np.frombuffer(hashlib.blake2b(cache_salt.encode(), digest_size=8).digest(), "<u4").astype(np.uint32)
