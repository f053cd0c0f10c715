"""Which tokens are written to where drafts are looked up, and when; the programs take notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jaxserve.core.runtime.feature import DeviceState
from jaxserve.core.runtime.programs import Programs
from jaxserve.core.runtime.step_arrays import RowLines, SampledTokens, SelectedLines
from jaxserve.core.scheduler.step_plan import ChunkWork, FinishedAnswer, NewRow, StepPlan
from jaxserve.features.speculation import CorpusShape, LookupState, answer_block_specs, row_block_specs, unpack_block
from jaxserve.features.speculation.lookup_tokens import LookupTokens, hash_salt
from jaxserve.sampling_params import SamplingParams

R, L = 4, 8
SHAPE = CorpusShape(num_tokens=600, num_answers=9, depth=4)


class Notes:
    """A fake device: the answers that were kept, and the rows as they were written."""

    def __init__(self, *, keeps_answers: bool = True) -> None:
        self.corpus = "answers" if keeps_answers else None
        self.rows = [[0] * L for _ in range(R)]
        self.row_salts: list[list[int]] = []
        self.kept: list[list[int]] = []  # by call
        self.salts: list[list[int]] = []  # of each kept token
        self.num_calls = 0
        self.device = DeviceState(Programs())
        self.device.programs.add("write_rows", None, self.write_rows)
        self.device.programs.add("write_answers", None, self.write_answers)
        self.tokens = LookupTokens(SHAPE if keeps_answers else None)
        self.tokens.reset(self.state)

    @property
    def state(self) -> LookupState:
        return LookupState(np.zeros((R, L), np.int32), self.corpus)  # type: ignore[arg-type]

    def write_rows(self, state: LookupState, line: Any) -> LookupState:
        self.num_calls += 1
        block = unpack_block(line, row_block_specs(R))
        for index in np.flatnonzero(np.asarray(block.rows) >= 0):
            self.rows[block.rows[index]][block.positions[index]] = int(block.tokens[index])
        self.row_salts = np.asarray(block.salts).tolist()
        return state

    def write_answers(self, corpus: str, line: Any) -> str:
        block = unpack_block(line, answer_block_specs(SHAPE))
        tokens = np.asarray(block.tokens)[-len(block.ways) :]
        is_token = (np.asarray(block.ways) >= 0) & (tokens > 0)
        self.kept.append(tokens[is_token].tolist())
        self.salts += np.asarray(block.salts)[:, is_token].T.tolist()
        return corpus

    def tell(
        self,
        new: dict[int, tuple[int, ...]],
        chunks: list[tuple[int, int, tuple[int, ...]]],
        ended: Sequence[FinishedAnswer] = (),
        salt: str = "",
        **step: Any,
    ) -> None:
        params = SamplingParams()
        rows = tuple(NewRow(row, 0, params, 0, 0, L, token_ids=ids, cache_salt=salt) for row, ids in new.items())
        work = tuple(ChunkWork(row, row, start, ids, is_last=True) for row, start, ids in chunks)
        step = {"decode_rows": (), "decode_tickets": ()} | step
        plan = StepPlan(0, chunks=work, new_rows=rows, page_updates=(), finished_answers=tuple(ended), **step)
        self.tokens.prepare(self.device, plan)


@pytest.mark.parametrize("keeps_answers", [False, True])
def test_tokens_wait_for_the_first_lookup(keeps_answers: bool) -> None:
    notes = Notes(keeps_answers=keeps_answers)
    notes.tell({0: (1, 2), 1: (3, 4), 2: (5,)}, [(0, 0, (1, 2)), (1, 0, (3, 4)), (2, 0, (5,))])
    notes.tell({}, [(1, 3, (6,))], decode_rows=(0,))  # the token at 2 was sampled, on the device
    notes.rows[1][2] = 9
    notes.tell({2: (7, 8)}, [(2, 0, (7, 8))])  # the row's first sequence has ended, and nobody has looked
    assert notes.num_calls == 0
    notes.tell({}, [], decode_rows=(1, 2), num_drafts=3)
    assert notes.rows[1][:4] == [3, 4, 9, 6] and notes.rows[2][:2] == [7, 8] and notes.num_calls == 1
    notes.tell({}, [], decode_rows=(0, 1, 2), width=4, num_drafts=3)
    assert notes.rows[0][:2] == [1, 2] and notes.num_calls == 2
    notes.tell({}, [(2, 4, (2, 2))], num_drafts=3)
    assert notes.rows[2][4:6] == [2, 2] and notes.num_calls == 3
    notes.tell({}, [], decode_rows=(0, 1, 2), num_drafts=3)
    assert notes.num_calls == 3, "nothing waits"


def test_a_row_keeps_the_salt_of_its_admission() -> None:
    notes = Notes()
    notes.tell({0: (1, 2)}, [(0, 0, (1, 2))], salt="mine")
    notes.tell({1: (3,)}, [(1, 0, (3,))])
    notes.tell({}, [(0, 2, (4,))], decode_rows=(1,), num_drafts=3)
    assert notes.rows[0][:3] == [1, 2, 4]
    assert notes.row_salts[:2] == [hash_salt("mine").tolist(), hash_salt("").tolist()]


def test_answers_wait_for_the_first_lookup_and_share_a_call() -> None:
    notes = Notes()
    notes.tell({0: (1, 2)}, [(0, 0, (1, 2))], [FinishedAnswer((3, 4, 5), "mine")])
    notes.tell({}, [], [FinishedAnswer((6, 7))], decode_rows=(0,))
    assert notes.kept == []
    notes.tell({}, [], [FinishedAnswer((8,))], decode_rows=(0,), num_drafts=3)
    assert notes.kept == [[3, 4, 5, 6, 7, 8]]
    mine, others = hash_salt("mine").tolist(), hash_salt("").tolist()
    assert notes.salts == [mine] * 3 + [others] * 3 and mine != others
    notes.tell({}, [], decode_rows=(0,), width=4, num_drafts=3)
    assert len(notes.kept) == 1, "nothing waits"


def test_answers_are_written_once_they_fill_a_block() -> None:
    notes = Notes()
    notes.tell({}, [], [FinishedAnswer((1,) * 400)])
    assert notes.kept == []
    notes.tell({}, [], [FinishedAnswer((2,) * 150)])
    assert notes.kept == [[1] * 400 + [2] * 109]  # with three separators
    notes.tell({}, [], num_drafts=1)
    assert notes.kept[1:] == [[2] * 41]


def test_programs_are_warmed_up() -> None:
    for keeps_answers in (False, True):
        notes = Notes(keeps_answers=keeps_answers)
        notes.tokens.warm_up(notes.device)
        assert notes.num_calls == 1 and notes.kept == [[]] * keeps_answers
        assert notes.rows == [[0] * L for _ in range(R)]


def test_a_plain_step_gets_its_drafts_from_a_program_for_its_rows() -> None:
    notes = Notes()
    selected = SelectedLines(np.zeros((2, 1)), RowLines(np.array([[3, 1, 0], [1, 1, 0]])))  # type: ignore[arg-type]
    sampled = SampledTokens(np.array([[7], [8]]))  # type: ignore[arg-type]

    def look_up(rows: str, state: LookupState, lines: RowLines, ids: Any) -> tuple[str, Any]:
        assert state is notes.tokens.state and np.all(lines.is_sampled)
        return rows + " with drafts", np.stack([lines.row_ids, ids[:, 0]], axis=1)

    notes.device.programs.add("look_up", 2, look_up)
    notes.device.rows = "rows"  # type: ignore[assignment]
    later = notes.tokens.draft(notes.device, None, selected, sampled)
    assert notes.device.rows == "rows with drafts" and later.ids is sampled.ids  # type: ignore[comparison-overlap]
    assert later.drafts is not None and later.drafts.tolist() == [[3, 7], [1, 8]]
    assert notes.tokens.draft(notes.device, None, selected, later) is later, "a verify step has looked them up"
