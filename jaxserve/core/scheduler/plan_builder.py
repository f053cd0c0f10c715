"""A mutable `StepPlan` under construction."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxserve.core.pages.host_tier import PageCopy
from jaxserve.core.pages.manager import PageUpdate
from jaxserve.core.scheduler.sequence import Sequence
from jaxserve.core.scheduler.step_plan import (
    ChunkImages,
    ChunkWork,
    FinishedAnswer,
    ImageWrite,
    NewRow,
    StateCopy,
    StateSave,
    StepPlan,
)


class StepKind(NamedTuple):
    """What a step may compute."""

    most_decodes: int | None  # decoding rows; None: all
    lengths: range  # of chunks


ANY_STEP = StepKind(None, range(1, sys.maxsize))


@dataclass(slots=True)
class PlanBuilder:
    """Collects a step's work. Work can be removed: a preemption may hit a sequence that is already planned."""

    budget: int  # tokens left
    prefix_updates: int  # page-table entries left for cached prefixes
    width: int = 1  # tokens planned for each decoding row
    num_drafts: int = 0  # drafts to make for each row's next step
    kind: StepKind = ANY_STEP
    decoding: list[Sequence] = field(default_factory=list)
    chunks: dict[int, ChunkWork] = field(default_factory=dict)  # by row
    work: dict[int, int] = field(default_factory=dict)  # by row of a chunk: the tokens left to compute, chunk included
    new_rows: list[NewRow] = field(default_factory=list)
    page_updates: list[tuple[int, int, int, int]] = field(default_factory=list)
    state_loads: list[StateCopy] = field(default_factory=list)
    has_preempted: bool = False

    @property
    def is_empty(self) -> bool:
        return not self.decoding and not self.chunks

    def add_chunk(self, sequence: Sequence, start: int, end: int, images: ChunkImages | None = None) -> ChunkWork:
        """Adds tokens [start, end) of a sequence, in place of its shorter chunk, and takes them from the budget."""
        row, ids = sequence.row, sequence.token_ids
        before = self.chunks.get(row)
        self.budget -= end - (start if before is None else before.end)
        next_token = ids[end] if end < len(ids) else 0
        chunk = ChunkWork(row, sequence.ticket, start, tuple(ids[start:end]), end == len(ids), next_token, images)
        self.chunks[row], self.work[row] = chunk, len(ids) - start
        return chunk

    def count_partial(self, least_work: int = 0) -> int:
        """Returns how many rows with more than `least_work` tokens to compute have a chunk that leaves some."""
        return sum(self.work[row] > least_work for row, chunk in self.chunks.items() if not chunk.is_last)

    def add_pages(self, row: int, updates: Iterable[PageUpdate]) -> None:
        self.page_updates += [(group, row, index, page) for group, index, page in updates]

    def remove(self, sequence: Sequence) -> None:
        """Removes the sequence's work, if any. Its page updates stay: the row's next owner overwrites them."""
        if (chunk := self.chunks.pop(sequence.row, None)) is not None:
            sequence.num_computed_tokens = chunk.start
            self.budget += len(chunk.token_ids)
        elif sequence in self.decoding:
            self.decoding.remove(sequence)
            sequence.num_computed_tokens -= self.width
            self.budget += 1

    def narrow(self) -> None:
        """Leaves each decoding row one token. Its pages stay: the next steps use them."""
        for sequence in self.decoding if self.width > 1 else ():
            sequence.num_computed_tokens -= self.width - 1
        self.width = 1

    def freeze(
        self,
        step_id: int,
        copies: tuple[tuple[PageCopy, ...], tuple[PageCopy, ...]],
        state_saves: tuple[StateSave, ...] = (),
        finished_answers: tuple[FinishedAnswer, ...] = (),
        adapters: int = 0,
        adapter_writes: tuple[tuple[int, int], ...] = (),
        image_writes: tuple[ImageWrite, ...] = (),
    ) -> StepPlan:
        """Returns the finished plan, with the saves and loads of `copies`; the others are fields of `StepPlan`."""
        return StepPlan(
            step_id=step_id,
            decode_rows=tuple([sequence.row for sequence in self.decoding]),
            decode_tickets=tuple([sequence.ticket for sequence in self.decoding]),
            chunks=tuple(self.chunks.values()),
            new_rows=tuple(self.new_rows),
            page_updates=tuple(self.page_updates),
            page_saves=copies[0],
            page_loads=copies[1],
            width=self.width,
            num_drafts=self.num_drafts,
            finished_answers=finished_answers,
            state_loads=tuple(self.state_loads),
            state_saves=state_saves,
            adapters=adapters,
            adapter_writes=adapter_writes,
            image_writes=image_writes,
        )
