"""Which tokens are written to where drafts are looked up, and when answers are kept; the program takes notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxserve.runtime.lookup_tokens import LookupTokens
from jaxserve.runtime.programs import Programs
from jaxserve.runtime.step_model import RowLines, SampledTokens, SampleInputs
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler.plan import ChunkWork, FinishedRow, NewRow, StepPlan
from jaxserve.speculation import LookupState

R, L = 4, 8


class Notes:
    """A fake device: the answers that were kept, and the rows as they were written."""

    def __init__(self, *, remembers: bool = True) -> None:
        self.corpus = "answers" if remembers else None
        self.rows = [[0] * L for _ in range(R)]
        self.kept: list[list[int]] = []
        self.num_calls = 0
        self.programs = Programs(set_tokens={None: self.set_tokens})
        self.tokens = LookupTokens(self.state, R)

    @property
    def state(self) -> LookupState:
        return LookupState(np.zeros((R, L), np.int32), self.corpus)  # type: ignore[arg-type]

    def set_tokens(self, state: LookupState, line: Any) -> LookupState:
        self.num_calls += 1
        ended, begin, end, row, start, stop, *_ = line.tolist()
        if end > begin:
            self.kept.append(self.rows[ended][begin:end])
        self.rows[row][start:stop] = line[-L:][start:stop].tolist()
        return state

    def tell(
        self,
        new: dict[int, tuple[int, ...]],
        chunks: list[tuple[int, int, tuple[int, ...]]],
        ended: Sequence[FinishedRow] = (),
        **step: Any,
    ) -> None:
        rows = tuple(NewRow(row, 0, SamplingParams(), 0, 0, L, token_ids=ids) for row, ids in new.items())
        work = tuple(ChunkWork(row, row, start, ids, samples=True) for row, start, ids in chunks)
        step = {"decode_rows": (), "decode_tickets": ()} | step
        plan = StepPlan(0, chunks=work, new_rows=rows, page_updates=(), finished_rows=tuple(ended), **step)
        self.tokens.tell(self.programs, plan)


def test_prompts_are_written_once_and_forced_tokens_when_they_come() -> None:
    notes = Notes()
    notes.tell({1: (5, 6, 7)}, [(1, 0, (5, 6))])
    notes.tell({}, [(1, 2, (7,))])
    assert notes.num_calls == 1 and notes.rows[1][:3] == [5, 6, 7]
    notes.tell({}, [(1, 4, (8, 9))], [])  # the token at 3 was sampled
    assert notes.num_calls == 2 and notes.rows[1][4:6] == [8, 9]
    notes.tell({1: (3,)}, [(1, 0, (3,))], [])  # another sequence, of fewer tokens
    notes.tell({}, [(1, 1, (4,))])
    assert notes.rows[1][:2] == [3, 4]


def test_where_no_answers_are_kept_tokens_wait_for_the_first_lookup() -> None:
    notes = Notes(remembers=False)
    notes.tell({0: (1, 2), 1: (3, 4), 2: (5,)}, [(0, 0, (1, 2)), (1, 0, (3, 4)), (2, 0, (5,))])
    notes.tell({}, [(1, 3, (6,))], decode_rows=(0,))  # the token at 2 was sampled, on the device
    notes.rows[1][2] = 9
    notes.tell({2: (7, 8)}, [(2, 0, (7, 8))])  # the row's first sequence has ended, and nobody has looked
    assert notes.num_calls == 0
    notes.tell({}, [], decode_rows=(1, 2), num_drafts=3)
    assert notes.rows[1][:4] == [3, 4, 9, 6] and notes.rows[2][:2] == [7, 8] and notes.num_calls == 3
    notes.tell({}, [], decode_rows=(0, 1, 2), width=4, num_drafts=3)
    assert notes.rows[0][:2] == [1, 2] and notes.num_calls == 4
    notes.tell({}, [(2, 4, (2, 2))], num_drafts=3)
    assert notes.rows[2][4:6] == [2, 2] and notes.num_calls == 5


def test_an_answer_is_kept_before_its_row_is_written() -> None:
    notes = Notes()
    notes.tell({row: (row + 1,) * 4 for row in range(3)}, [])
    before = notes.num_calls
    notes.tell({2: (9,), 0: (8,), 3: (7,)}, [], [FinishedRow(1, 0, 2), FinishedRow(0, 1, 3), FinishedRow(2, 0, 1)])
    assert sorted(notes.kept) == [[1, 1], [2, 2], [3]]
    assert [notes.rows[row][0] for row in (0, 2, 3)] == [8, 9, 7]
    assert notes.num_calls - before == 3, "each call keeps an answer and writes a row"


def test_an_answer_is_kept_when_no_row_begins() -> None:
    notes = Notes()
    notes.tell({0: (4, 5, 6)}, [])
    notes.tell({}, [], [FinishedRow(0, 1, 3)])
    assert notes.kept == [[5, 6]]


def test_without_lookups_nothing_is_told() -> None:
    LookupTokens(None, 0).tell(Programs(), StepPlan(0, (), (), (ChunkWork(0, 0, 0, (1,), True),), (), ()))


def test_a_plain_step_gets_its_drafts_from_a_program_for_its_rows() -> None:
    notes = Notes()
    selected = SampleInputs(np.zeros((2, 1)), RowLines(np.array([[3, 1, 0], [1, 1, 0]])))  # type: ignore[arg-type]
    sampled = SampledTokens(np.array([[7], [8]]))  # type: ignore[arg-type]

    def look_up(rows: str, state: LookupState, lines: RowLines, ids: Any) -> tuple[str, Any]:
        assert state.history is notes.tokens.history and np.all(lines.samples)
        return rows + " with drafts", np.stack([lines.row_ids, ids[:, 0]], axis=1)

    programs = Programs(look_up={2: look_up})
    rows, later = notes.tokens.look_up(programs, "rows", selected, sampled)  # type: ignore[arg-type]
    assert rows == "rows with drafts" and later.ids is sampled.ids  # type: ignore[comparison-overlap]
    assert later.drafts is not None and later.drafts.tolist() == [[3, 7], [1, 8]]
