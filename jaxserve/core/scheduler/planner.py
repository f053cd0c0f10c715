"""Planning: in every step, each running sequence's computed tokens catch up with its tokens.

There are no prefill and decode modes. One rule covers chunked prefill, prefix hits, preempted sequences and newly
sampled tokens: work = num_tokens - num_computed_tokens.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from operator import add

from jaxserve.core.pages.manager import PageManager
from jaxserve.core.scheduler.adapter_slots import AdapterSlots
from jaxserve.core.scheduler.fairness import TurnOrder
from jaxserve.core.scheduler.image_rows import ImageRows
from jaxserve.core.scheduler.limits import SchedulerLimits
from jaxserve.core.scheduler.plan_builder import PlanBuilder, StepKind
from jaxserve.core.scheduler.policy import (
    can_yield,
    choose_budget,
    choose_chunk,
    choose_share,
    choose_victim,
    choose_width,
    count_need,
    count_slots,
    count_work,
    find_step_limit,
    list_kinds,
    list_promised,
    may_admit,
    must_yield,
)
from jaxserve.core.scheduler.queue_admission import QueueAdmission
from jaxserve.core.scheduler.running import Batch
from jaxserve.core.scheduler.scheduler_counts import SchedulerCounts
from jaxserve.core.scheduler.sequence import Sequence, SequenceStatus
from jaxserve.core.scheduler.state_saves import list_saves
from jaxserve.core.scheduler.step_plan import StepPlan
from jaxserve.core.scheduler.step_times import StepTimes
from jaxserve.core.scheduler.waiting import WaitingQueue
from jaxserve.core.scheduler.widths import WidthChooser
from jaxserve.request import Rank


class Planner:
    """Decides what each step computes: admits sequences, reserves their pages, and preempts when pages run out."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pages: PageManager,
        waiting: WaitingQueue,
        batch: Batch,
        adapters: AdapterSlots,
        images: ImageRows,
        queue_admission: QueueAdmission,
        turns: TurnOrder,
        times: StepTimes,
        widths: WidthChooser | None,
        counts: SchedulerCounts,
        clock: Callable[[], float],
    ) -> None:
        self.limits = limits
        self._pages = pages
        self._waiting, self._batch, self._queue_admission = waiting, batch, queue_admission
        self._adapters, self._images = adapters, images
        self._turns, self._times, self._widths, self._counts = turns, times, widths, counts
        self._clock = clock
        self._steps = itertools.count()
        self._kinds = deque(list_kinds(limits))

    def plan(self) -> StepPlan | None:
        """Returns the next step; None when nothing can be computed, or not before the next commit."""
        plan = self._plan()
        self._queue_admission.pace.note(self._clock(), self._counts.num_admitted, waits=self._waiting.num_new > 0)
        return plan

    def _plan(self) -> StepPlan | None:
        budget = choose_budget(self.limits, self._batch, self._waiting, self._times)
        width, num_drafts = self._choose_width()
        for _ in self._kinds.copy():
            builder = self._build(self._kinds[0], budget, width, num_drafts)
            self._kinds.rotate(-1)
            if not builder.is_empty:
                return self._freeze(builder)
        return self._freeze(builder) if self._pages.host.has_loads else None

    def _choose_width(self) -> tuple[int, int]:
        """Returns the tokens of each decoding row if there are no chunks, and the drafts to make for the next step."""
        if self._widths is None:
            return choose_width(self.limits, self._batch, self._waiting), 0
        limit, has_adapters = find_step_limit(self.limits, self._batch), bool(self._batch.num_by_adapter)
        width, num_drafts = self._widths.choose(len(self._batch.decoding), limit, has_adapters=has_adapters)
        return 1 if self._batch.prefilling else width, num_drafts

    def _build(self, kind: StepKind, budget: int, width: int, num_drafts: int) -> PlanBuilder:
        builder = PlanBuilder(budget, self.limits.max_prefix_updates, width, num_drafts, kind)
        self._make_way(builder)
        self._plan_decodes(builder)
        rank = None
        for sequence in self._batch.prefilling.copy():
            if sequence.request.rank != rank:
                rank = sequence.request.rank
                self._admit(builder, rank)
            if sequence.status is SequenceStatus.RUNNING:  # else just preempted for an older one
                self._plan_chunk(builder, sequence)
        self._admit(builder)
        self._share_rest(builder)
        if builder.chunks or not builder.decoding:
            builder.narrow()
        return builder

    def _freeze(self, builder: PlanBuilder) -> StepPlan:
        if self._widths is not None:
            if builder.is_empty or self._batch.prefilling:
                builder.num_drafts = 0  # the next step has chunks, so it would not verify them
            self._widths.note_plan(builder.num_drafts)
        return builder.freeze(
            next(self._steps),
            self._pages.host.take_copies(),
            tuple(list_saves(self.limits, self._pages.snapshots, builder, self._batch.by_ticket)),
            self._batch.take_finished(),
            adapters=self._adapters.highest,
            adapter_writes=self._adapters.take_writes(),
            image_writes=self._images.take_writes(),
        )

    def requeue_running(self) -> None:
        """Puts all running sequences back into the queue; tokens in flight are lost, for waiting ones too."""
        for sequence in (*self._batch.decoding, *self._batch.prefilling):
            self._batch.leave(sequence)
            self._requeue(sequence)
        for sequence in self._waiting:
            self._batch.revoke_ticket(sequence)
            sequence.num_awaited_steps = 0

    def _make_way(self, builder: PlanBuilder) -> None:
        """Preempts running sequences that must yield to the first in line, while it has no row, pages or adapter."""
        batch, pages = self._batch, self._pages
        if not (self._waiting and len(batch) and can_yield(self.limits, choose_victim(self.limits, batch))):
            return
        for victim in self._adapters.list_yielding():
            self._preempt(builder, victim)
        first = self._waiting.first
        while (
            first is not None
            and len(batch)
            and must_yield(self.limits, victim := choose_victim(self.limits, batch), first)
        ):
            need = count_need(self.limits, first)
            missing = map(add, self._count_promised(), pages.count_missing(first.pages, need))
            if not batch.is_full and pages.has_room(missing):
                return
            self._preempt(builder, victim)

    def _plan_decodes(self, builder: PlanBuilder) -> None:
        plan, width, more = builder.decoding.append, builder.width, self.limits.num_lookahead_tokens
        # A preemption removes only the current element or later ones.
        for sequence in itertools.islice(self._batch.decoding, builder.kind.most_decodes):
            start, most = sequence.num_computed_tokens, sequence.max_num_tokens
            end = start + width
            need = end if end < most else most - 1  # the last token need not be computed
            if need <= start:
                continue  # its last token may be in flight
            if more:
                need = count_slots(self.limits, sequence, need)
            if need > sequence.pages.num_reserved_tokens and not self._reserve(builder, sequence, need):
                continue
            sequence.num_computed_tokens = end
            plan(sequence)
        builder.budget -= len(builder.decoding)

    def _plan_chunk(self, builder: PlanBuilder, sequence: Sequence) -> None:
        start = sequence.num_computed_tokens
        length = self._fit_images(builder, sequence, start, choose_share(self.limits, builder, sequence))
        end = start + length
        if length and self._reserve(builder, sequence, self._count_chunk(sequence, end)):
            self._add_chunk(builder, sequence, start, end)

    def _fit_images(self, builder: PlanBuilder, sequence: Sequence, start: int, length: int) -> int:
        """Returns how many of about `length` tokens can be computed with the images that the device holds by then."""
        room = self._images.find_end(sequence, start, start + length, start + builder.budget) - start
        if room >= length:
            return room
        # If no edge lies in front of an image that must wait, or edges may cut others, a first chunk ends beside it.
        lengths = range(0) if self.limits.whole_image_tokens else builder.kind.lengths
        fits = choose_chunk(self.limits, start, length, room, lengths)
        return fits or (0 if sequence.row in builder.chunks else room)

    def _count_chunk(self, sequence: Sequence, end: int) -> int:
        """Returns how many tokens must have room for a chunk."""
        return count_slots(self.limits, sequence, end) if end == len(sequence.token_ids) else end

    def _share_rest(self, builder: PlanBuilder) -> None:
        """Gives what is left of the budget to prompts that had their share or none, the oldest first."""
        for sequence in self._batch.prefilling.copy() if builder.budget > 0 else ():
            chunk, done = builder.chunks.get(sequence.row), sequence.num_computed_tokens
            start = done if chunk is None else chunk.start
            left = count_work(self.limits, sequence, start) - (done - start)
            if chunk is None and not choose_share(self.limits, builder, sequence):
                continue
            more = choose_chunk(self.limits, done, left, builder.budget, builder.kind.lengths)
            end = done + self._fit_images(builder, sequence, done, more)
            if end == done or end - start not in builder.kind.lengths:
                continue
            if (updates := self._pages.reserve(sequence.pages, start, self._count_chunk(sequence, end))) is not None:
                builder.add_pages(sequence.row, updates)
                self._add_chunk(builder, sequence, start, end)

    def _add_chunk(self, builder: PlanBuilder, sequence: Sequence, start: int, end: int) -> None:
        chunk = builder.add_chunk(sequence, start, end, self._images.locate(sequence, start, end))
        self._turns.charge_prompt(sequence, chunk)
        sequence.num_computed_tokens = end
        if chunk.is_last:
            self._batch.start_decoding(sequence)

    def _admit(self, builder: PlanBuilder, below: Rank | None = None) -> None:
        """Admits waiting sequences, the first in line first: those of a better rank than `below`; None: all."""
        if builder.has_preempted:
            return  # running sequences need the freed pages
        pages = self._pages
        promised = self._count_promised() if self._waiting and not self._batch.is_full else []
        while not self._batch.is_full and builder.budget > 0:
            sequence = self._waiting.first
            if sequence is None or (below is not None and sequence.request.rank >= below):
                return
            if sequence.num_awaited_steps:
                return  # some of its tokens are still in flight
            if not may_admit(self.limits, self._batch, sequence, self._times):
                return
            num_cached = pages.attach_prefix(sequence.pages, sequence.sharable_tokens)
            updates = pages.list_updates(sequence.pages)
            work, need = count_work(self.limits, sequence, num_cached), count_need(self.limits, sequence)
            length = choose_chunk(self.limits, num_cached, work, builder.budget, builder.kind.lengths)
            missing = pages.count_missing(sequence.pages, need)
            has_room = self._queue_admission.has_pages = pages.has_room(map(add, promised, missing))
            if has_room and pages.load_prefix(sequence.pages):
                continue  # it waits, and those behind it go first
            fits = length and has_room and len(updates) <= builder.prefix_updates
            num_held = self._images.count_held(sequence, num_cached)  # others get rows below
            if not fits or not self._fit_images(builder, sequence, num_cached, length):
                pages.release(sequence.pages)
                return
            self._waiting.remove(sequence)
            self._batch.join(sequence, num_cached)
            if sequence.first_scheduled_time is None:
                sequence.first_scheduled_time, sequence.num_cached_tokens = self._clock(), num_cached
                self._counts.count_admission(sequence, num_cached, num_held)
            slot = self._adapters.take(sequence)
            builder.new_rows.append(sequence.make_new_row(has_lookups=self.limits.has_lookups, adapter=slot))
            if sequence.pages.states.start is not None:
                builder.state_loads.append((sequence.row, sequence.pages.states.start))
            builder.prefix_updates -= len(updates)
            builder.add_pages(sequence.row, updates)
            self._plan_chunk(builder, sequence)
            left = pages.count_missing(sequence.pages, need)
            promised = list(map(add, promised, left))

    def _count_promised(self) -> list[int]:
        """Returns the pages of each group that running sequences were promised and still lack."""
        promised = [0] * len(self._pages.groups)
        for sequence in list_promised(self.limits, self._batch):
            missing = self._pages.count_missing(sequence.pages, count_need(self.limits, sequence))
            promised = list(map(add, promised, missing))
        return promised

    def _reserve(self, builder: PlanBuilder, sequence: Sequence, num_tokens: int) -> bool:
        """Reserves pages, preempting younger sequences as needed; returns False if `sequence` itself was preempted."""
        while True:
            updates = self._pages.reserve(sequence.pages, sequence.num_settled_tokens, num_tokens)
            if updates is not None:
                builder.add_pages(sequence.row, updates)
                return True
            victim = choose_victim(self.limits, self._batch)
            builder.has_preempted = True
            self._preempt(builder, victim)
            if victim is sequence:
                return False

    def _preempt(self, builder: PlanBuilder, sequence: Sequence) -> None:
        self._queue_admission.has_pages = False
        sampling_chunk = sequence.row in builder.chunks and builder.chunks[sequence.row].is_last
        builder.remove(sequence)
        is_in_flight = sequence.num_computed_tokens >= len(sequence.token_ids)  # in the one step that can be
        was_decoding = self._batch.leave(sequence) and not sampling_chunk
        sequence.num_awaited_steps = int(was_decoding and is_in_flight)
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_preemptions += 1
        self._counts.num_preemptions += 1
        self._waiting.push(sequence)
