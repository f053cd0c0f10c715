"""The host's side of lookups: it writes the tokens that no step samples to where drafts are looked up."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import UInt32

from jaxserve.core.runtime.feature import DeviceState, FeatureHost
from jaxserve.core.runtime.programs import Programs, call_program
from jaxserve.core.runtime.step_arrays import SampledTokens, SelectedLines
from jaxserve.core.scheduler.step_plan import StepPlan
from jaxserve.features.speculation import AnswerQueue, CorpusShape, LookupState, Span, pack_rows


class LookupTokens(FeatureHost):
    """The rows' tokens and the kept answers on the device, and those that wait to be written there.

    Args:
        corpus: the sizes of the corpus of answers; None: there is none.
    """

    state: LookupState  # since the first `reset`

    def __init__(self, corpus: CorpusShape | None) -> None:
        self._corpus = corpus

    def reset(self, state: LookupState) -> None:
        """See `FeatureHost.reset`."""
        self.state, num_rows = state, len(state.history)
        self._num_told = [0] * num_rows  # tokens of each row up to the last that the host knew before it was sampled
        self._salts = np.zeros((num_rows, 2), np.uint32)  # of the rows
        self._unwritten: dict[int, list[Span]] = {}  # by row
        self._answers = None if self._corpus is None else AnswerQueue(self._corpus)

    def warm_up(self, device: DeviceState) -> None:
        """See `FeatureHost.warm_up`."""
        self._write_rows(device.programs, [])
        if self._answers is not None:
            self._write_answers(device.programs, self._answers.take_block())

    def prepare(self, device: DeviceState, plan: StepPlan) -> None:
        """Takes the tokens of new rows and those that a grammar forced, and the answers of rows that have ended.

        Nobody reads them before drafts are looked up. By then many rows have ended, and what is left shares calls.
        """
        is_read = plan.num_drafts > 0 or plan.width > 1
        if not (plan.chunks or plan.new_rows or plan.finished_answers or is_read):
            return
        self._take_tokens(plan)
        if is_read:
            rows = *plan.decode_rows, *[chunk.row for chunk in plan.chunks]
            if spans := [span for row in rows for span in self._unwritten.pop(row, ())]:
                self._write_rows(device.programs, spans)
        if self._answers is not None:
            self._keep_answers(device.programs, self._answers, plan, is_read)

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

    def sample_state(self, width: int) -> tuple[Any, Any]:
        """See `FeatureHost.sample_state`."""
        return split_lookup(self.state, width)

    def keep(self, kept: Any) -> None:
        """See `FeatureHost.keep`."""
        self.state = LookupState(kept, self.state.corpus)

    def draft(self, device: DeviceState, params: Any, selected: SelectedLines, sampled: SampledTokens) -> SampledTokens:
        """Looks drafts up behind a step of width 1; the sample program of a verify step has done so."""
        if sampled.drafts is not None:
            return sampled
        program = device.programs.get("look_up", len(selected.lines))
        device.rows, drafts = program(device.rows, self.state, selected.lines, sampled.ids)
        return replace(sampled, drafts=drafts)

    def _write_rows(self, programs: Programs, spans: list[Span]) -> None:
        for block in pack_rows(spans, self._salts):
            self.state = call_program(programs.get("write_rows", None), self.state, block)

    def _write_answers(self, programs: Programs, block: np.ndarray) -> None:
        corpus = call_program(programs.get("write_answers", None), self.state.corpus, block)
        self.state = LookupState(self.state.history, corpus)


def split_lookup(state: LookupState, width: int) -> tuple[Any, Any]:
    """Returns what sample programs donate and what they read; those of rows of one token look nothing up."""
    return state.history, state.corpus if width > 1 else None


def hash_salt(cache_salt: str) -> UInt32[np.ndarray, " 2"]:
    """Returns what stands for a salt on the device."""
    return np.frombuffer(hashlib.blake2b(cache_salt.encode(), digest_size=8).digest(), "<u4").astype(np.uint32)
