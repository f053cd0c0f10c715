"""Continuous batching: every step, each running sequence's computed tokens catch up with its tokens.

There is no prefill mode and no decode mode. Chunked prefill, prefix hits, preempted sequences and newly sampled tokens
are one rule: work = num_tokens - num_computed_tokens.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from jaxserve.errors import InvalidRequestError, JaxServeError
from jaxserve.pages.manager import PageManager
from jaxserve.request import FinishReason, Request
from jaxserve.scheduler.batch import Batch
from jaxserve.scheduler.counts import SchedulerCounts
from jaxserve.scheduler.door import Door
from jaxserve.scheduler.plan import ChunkWork, StepOutputs, StepPlan
from jaxserve.scheduler.plan_builder import PlanBuilder, make_new_row
from jaxserve.scheduler.policy import choose_budget, choose_victim, chunk_length
from jaxserve.scheduler.requests import SchedulerLimits, find_end, let_siblings_in, make_sequences
from jaxserve.scheduler.sequence import NON_FINITE, Sequence, SequenceStatus, make_order
from jaxserve.scheduler.waiting import WaitingQueue


@dataclass(slots=True)
class Commit:
    """What a step brought: the sequences that got tokens, the run of each, and the sequences that ended."""

    sequences: list[Sequence] = field(default_factory=list)
    runs: list[Ids[int]] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Admits, plans, preempts and commits. `plan` may run again before the last plan's tokens are committed."""

    def __init__(self, limits: SchedulerLimits, pages: PageManager) -> None:
        self.limits = limits
        self.pages = pages
        self.waiting = WaitingQueue()
        self.batch = Batch(limits.max_num_seqs)
        self.door = Door(limits, self.waiting, self.batch)
        self.counts = SchedulerCounts()
        self._by_request: dict[str, list[Sequence]] = {}  # unfinished ones
        self._arrivals, self._steps = itertools.count(), itertools.count()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._by_request)

    def add(self, request: Request) -> list[Sequence]:
        """Queues a request, or refuses what could never run; returns its n sequences.

        All but the first wait until the prompt is computed, and then find its pages by their content. The limits of the
        queue are asked for before, at `door`, where there are any: a batch may be of any size.

        Raises:
            InvalidRequestError: the prompt leaves no room for an output token, or the id is in use.
            CapacityError: the sequence would not fit the empty KV pool.
        """
        if request.request_id in self._by_request:
            raise InvalidRequestError("is already running", field="request_id", value=request.request_id)
        sequences = make_sequences(request, self.limits.max_model_len, self.pages)
        for sequence in sequences:
            sequence.order = make_order(request.priority, next(self._arrivals))
        self._by_request[request.request_id] = sequences.copy()
        self.waiting.enter(sequences)
        return sequences

    def finish(self, request_id: str, reason: FinishReason, error: JaxServeError | None = None) -> list[Sequence]:
        """Ends what is left of a request in whatever state it is; nothing is, when it is unknown or has ended already.

        What steps in flight still compute for it is dropped at their commit.
        """
        sequences = self._by_request.get(request_id, []).copy()
        for sequence in reversed(sequences):  # siblings that wait go before the first, which would let them in
            self.finish_sequence(sequence, reason, error)
        return sequences

    def finish_sequence(self, sequence: Sequence, reason: FinishReason, error: JaxServeError | None = None) -> bool:
        """Ends one sequence; False when it has ended already."""
        if sequence.status is SequenceStatus.FINISHED:
            return False
        if sequence.status is SequenceStatus.RUNNING:
            self._leave_batch(sequence)
        else:
            self.waiting.remove(sequence)
        self.batch.revoke_ticket(sequence)
        sequence.status, sequence.finish_reason, sequence.error = SequenceStatus.FINISHED, reason, error
        others = self._by_request[sequence.request.request_id]
        others.remove(sequence)
        let_siblings_in(sequence, self.waiting)
        if not others:
            del self._by_request[sequence.request.request_id]
        return True

    def extend(self, sequence: Sequence, token_ids: Ids[int]) -> Commit:
        """Appends tokens that need no sampling: a running sequence then computes them as a chunk.

        In the step in flight it does not sample. Returns what was added, as a commit of it.
        """
        if not self.batch.resume_prefilling(sequence):
            return Commit()
        sequence.token_ids += token_ids
        return Commit([sequence], [token_ids])

    def cut(
        self, sequence: Sequence, num_tokens: int, reason: FinishReason, error: JaxServeError | None = None
    ) -> None:
        """Ends a sequence after its first `num_tokens` tokens.

        What follows in its last run is dropped, and so is the end that it may have met there.
        """
        self.finish_sequence(sequence, reason, error)
        del sequence.token_ids[num_tokens:]
        sequence.finish_reason, sequence.error, sequence.stop_token_id = reason, error, None

    def plan(self) -> StepPlan | None:
        """Returns the next step, or None when nothing can be computed before a commit (or at all)."""
        builder = PlanBuilder(choose_budget(self.limits, self.batch, self.waiting), self.limits.max_prefix_updates)
        self._plan_decodes(builder)
        for sequence in self.batch.prefilling.copy():
            if sequence.status is SequenceStatus.RUNNING:  # else preempted a moment ago, for an older one
                self._plan_chunk(builder, sequence)
        if not builder.has_preempted:  # else what was freed goes to those who run
            self._admit(builder)
        return None if builder.is_empty else builder.freeze(next(self._steps))

    def _plan_decodes(self, builder: PlanBuilder) -> None:
        add = builder.decoding.append
        for sequence in self.batch.decoding:  # a preemption shortens this list only behind, or at, the current place
            end = sequence.num_computed_tokens + 1
            if end >= sequence.max_num_tokens:
                continue  # its last token is in flight
            if end > sequence.pages.num_reserved_tokens and not self._reserve(builder, sequence, end):
                continue
            sequence.num_computed_tokens = end
            add(sequence)
        builder.budget -= len(builder.decoding)

    def _plan_chunk(self, builder: PlanBuilder, sequence: Sequence) -> None:
        start = sequence.num_computed_tokens
        work = len(sequence.token_ids) - start
        length = chunk_length(start, work, builder.budget)
        if length == 0 or not self._reserve(builder, sequence, start + length):
            return
        tokens = tuple(sequence.token_ids[start : start + length])
        next_token = sequence.token_ids[start + length] if length < work else 0
        chunk = ChunkWork(sequence.row, sequence.ticket, start, tokens, length == work, next_token)
        builder.add_chunk(chunk)
        sequence.num_computed_tokens = chunk.end
        if chunk.samples:
            self.batch.start_decoding(sequence)

    def _admit(self, builder: PlanBuilder) -> None:
        while self.waiting and not self.batch.is_full and builder.budget > 0:
            sequence = self.waiting.first
            if sequence.num_awaited_steps:
                return  # its tokens are not all here yet
            num_cached = self.pages.attach_prefix(sequence.pages, sequence.sharable_tokens)
            updates = self.pages.list_updates(sequence.pages)
            length = chunk_length(num_cached, len(sequence.token_ids) - num_cached, builder.budget)
            has_room = self.door.has_pages = self.pages.has_room(sequence.pages, len(sequence.token_ids))
            if length == 0 or not has_room or len(updates) > builder.prefix_updates:
                self.pages.release(sequence.pages)
                return
            self._join_batch(self.waiting.pop(), num_cached)
            builder.new_rows.append(make_new_row(sequence))
            builder.prefix_updates -= len(updates)
            builder.add_pages(sequence.row, updates)
            self._plan_chunk(builder, sequence)

    def _reserve(self, builder: PlanBuilder, sequence: Sequence, num_tokens: int) -> bool:
        """Reserves pages, preempting younger sequences as needed; False when `sequence` itself had to go."""
        while True:
            updates = self.pages.reserve(sequence.pages, sequence.num_computed_tokens, num_tokens)
            if updates is not None:
                builder.add_pages(sequence.row, updates)
                return True
            victim = choose_victim(self.batch)
            self._preempt(builder, victim)
            if victim is sequence:
                return False

    def _preempt(self, builder: PlanBuilder, sequence: Sequence) -> None:
        builder.has_preempted = True
        self.door.has_pages = False
        sampling_chunk = sequence.row in builder.chunks and builder.chunks[sequence.row].samples
        builder.remove(sequence)
        in_flight = sequence.num_computed_tokens + 1 - len(sequence.token_ids)
        was_decoding = self._leave_batch(sequence) and not sampling_chunk
        sequence.num_awaited_steps = in_flight if was_decoding else 0
        self._requeue(sequence)

    def commit(self, plan: StepPlan, outputs: StepOutputs) -> Commit:
        """Writes the runs that a step brought into the sequences that are still there to take them.

        A sentinel ends its sequence, and the page does not enter the prefix index; but MASK_LATE does nothing.
        """
        commit, runs = Commit(), outputs.split_runs()
        self._take(plan.decode_tickets, runs, commit)
        for chunk, run in zip(plan.chunks, runs, strict=True):
            sequence = self.batch.by_ticket.get(chunk.ticket)
            if sequence is None:
                continue
            ends = chunk.samples and sequence.request.embeds  # with its prompt
            if run[-1] == NON_FINITE or (chunk.samples and not ends):
                self._take((chunk.ticket,), (run,), commit)
                if sequence.siblings and len(sequence.token_ids) > sequence.num_prompt_tokens:
                    let_siblings_in(sequence, self.waiting)
            elif chunk.end >= sequence.publish_from and sequence.status is SequenceStatus.RUNNING:
                self._publish(sequence, chunk.end)
            if ends:
                self._end(sequence, FinishReason.STOP, commit)
        return commit

    def _take(self, tickets: Ids[int], runs: Iterable[Ids[int]], commit: Commit) -> None:
        """Appends each run to the sequence that has the ticket, as far as the sequence goes."""
        by_ticket, add_sequence, add_run = self.batch.by_ticket, commit.sequences.append, commit.runs.append
        for ticket, brought in zip(tickets, runs):  # noqa: B905  other rows' runs may follow
            sequence = by_ticket.get(ticket)
            if sequence is None:
                continue
            tokens, run, reason = sequence.token_ids, brought, None
            num_computed = len(tokens)
            if len(run) > 1 or run[0] in sequence.stop_ids or num_computed + 1 >= sequence.max_num_tokens:
                sequence.num_computed_tokens += len(run) - 1  # one was planned
                run, reason, error = find_end(sequence, run)
                num_computed += len(run) - 1
            if run:
                tokens.extend(run)
                add_sequence(sequence)
                add_run(run)
                if num_computed >= sequence.publish_from:  # always, where it lost its row
                    if sequence.num_awaited_steps:
                        sequence.num_awaited_steps -= 1
                    else:
                        self._publish(sequence, num_computed)
            if reason is not None:
                self._end(sequence, reason, commit, error)

    def _end(
        self, sequence: Sequence, reason: FinishReason, commit: Commit, error: JaxServeError | None = None
    ) -> None:
        if self.finish_sequence(sequence, reason, error):
            commit.finished.append(sequence)

    def _publish(self, sequence: Sequence, num_computed: int) -> None:
        self.pages.publish(sequence.pages, sequence.token_ids, num_computed)
        sequence.publish_from = self.pages.next_publish(sequence.pages)

    def requeue_running(self) -> None:
        """Sends every running sequence back to wait and forgets all cached pages: the device lost its state.

        Tokens in flight will not come; the same ones are sampled again, because seeds stay with their requests.
        """
        for sequence in (*self.batch.decoding, *self.batch.prefilling):
            self._leave_batch(sequence)
            self._requeue(sequence)
        for sequence in self.waiting:
            self.batch.revoke_ticket(sequence)
            sequence.num_awaited_steps = 0
        self.pages.drop_prefix_index()

    def _join_batch(self, sequence: Sequence, num_cached: int) -> None:
        self.batch.join(sequence)
        sequence.num_computed_tokens = num_cached
        sequence.publish_from = self.pages.next_publish(sequence.pages)
        if sequence.first_scheduled_time is None:
            sequence.first_scheduled_time = time.monotonic()
            sequence.num_cached_tokens = num_cached
            self.counts.count_admission(sequence, num_cached)

    def _leave_batch(self, sequence: Sequence) -> bool:
        self.pages.release(sequence.pages)
        sequence.publish_from = 0
        return self.batch.leave(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_preemptions += 1
        self.counts.num_preemptions += 1
        self.waiting.push(sequence)
