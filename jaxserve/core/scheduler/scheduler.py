"""Continuous batching: a planner decides what each step computes; a committer takes its results."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Ids

from jaxserve.core.pages.manager import PageManager
from jaxserve.core.scheduler.adapter_slots import AdapterSlots
from jaxserve.core.scheduler.committer import Commit, Committer
from jaxserve.core.scheduler.fairness import ArrivalOrder, FairOrder, TurnOrder
from jaxserve.core.scheduler.image_rows import ImageRows
from jaxserve.core.scheduler.limits import SchedulerLimits
from jaxserve.core.scheduler.planner import Planner
from jaxserve.core.scheduler.queue_admission import QueueAdmission
from jaxserve.core.scheduler.running import Batch
from jaxserve.core.scheduler.scheduler_counts import SchedulerCounts
from jaxserve.core.scheduler.sequence import Sequence
from jaxserve.core.scheduler.step_plan import StepOutputs, StepPlan
from jaxserve.core.scheduler.step_times import StepTimes
from jaxserve.core.scheduler.unfinished import UnfinishedRequests
from jaxserve.core.scheduler.waiting import WaitingQueue
from jaxserve.core.scheduler.widths import StepCosts, WidthChooser
from jaxserve.errors import JaxServeError
from jaxserve.request import FinishReason, Request, ServiceTier


class Scheduler:
    """The engine's interface to this package; each part holds its own state.

    `plan` may run again before the last plan is committed.

    Args:
        clock: the one clock of the engine, in seconds: arrivals, deadlines and step times are on it.
        costs: what steps of each width cost, without which no drafts are made unless a table fixes them.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pages: PageManager,
        clock: Callable[[], float] = time.monotonic,
        costs: StepCosts | None = None,
    ) -> None:
        self.limits = limits
        self.clock = clock
        self.pages = pages
        self.turns: TurnOrder = FairOrder() if limits.options.scheduling_policy == "fair" else ArrivalOrder()
        self.times = StepTimes(limits)
        self.widths = WidthChooser(limits, self.times, {} if costs is None else costs) if limits.max_drafts else None
        self.batch = Batch(limits.max_num_seqs, pages)
        self.adapters = AdapterSlots(limits, self.batch)
        self.waiting = WaitingQueue(
            self.turns,
            lambda sequence: not pages.is_loading(sequence.pages) and self.adapters.is_ready(sequence),
            lambda: (pages.host.num_arrived, self.adapters.read_state()),
        )
        self.queue_admission = QueueAdmission(limits, self.waiting, self.batch, clock)
        self.counts = SchedulerCounts()
        policies = self.queue_admission, self.turns, self.times, self.widths, self.counts
        self.images = ImageRows(limits, self.batch)
        held = self.waiting, self.batch, self.adapters, self.images
        self.planner = Planner(limits, pages, *held, *policies, clock)
        self._unfinished = UnfinishedRequests(limits, pages, self.waiting, self.batch)
        self._committer = Committer(pages, self.waiting, self.batch, self._unfinished, self.widths, self.counts)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    def add(self, request: Request) -> list[Sequence]:
        """Queues a request; returns its n sequences.

        All but the first wait until the prompt is computed, then share its pages by content. The limits of the queue
        are not checked here; see `QueueAdmission.find_room`.

        Raises:
            InvalidRequestError: the prompt is empty or leaves no room for an output token, or the id is in use.
            CapacityError: a sequence would not fit the empty KV pool.
        """
        return self._unfinished.add(request)

    def finish(self, request_id: str, reason: FinishReason, error: JaxServeError | None = None) -> list[Sequence]:
        """Ends and returns a request's unfinished sequences; [] if it is unknown or has ended.

        Tokens in flight are dropped when their step is committed.
        """
        return self._unfinished.finish(request_id, reason, error)

    def finish_sequence(self, sequence: Sequence, reason: FinishReason, error: JaxServeError | None = None) -> bool:
        """Ends one sequence; returns False if it has already ended."""
        return self._unfinished.finish_sequence(sequence, reason, error)

    def plan(self) -> StepPlan | None:
        """Returns the next step; None when nothing can be computed, or not before the next commit."""
        return self.planner.plan()

    def commit(self, plan: StepPlan, outputs: StepOutputs) -> Commit:
        """Appends a step's runs to their sequences, each up to its sequence's end; returns what was appended."""
        commit = self._committer.commit(plan, outputs)
        self.turns.charge_outputs(commit.sequences, commit.runs)
        return commit

    def add_time(self, plan: StepPlan, seconds: float, *, compiled: bool = False) -> None:
        """Notes how long a step took. Call it before its commit.

        Args:
            compiled: whether a program was compiled meanwhile; the time then says nothing of later steps.
        """
        if plan.image_writes:
            self.counts.tower_step_seconds += seconds  # which say nothing of steps without images
        elif not compiled and self.widths is None:
            tokens, each = plan.num_tokens // plan.width, seconds / plan.width
            self.times.add(tokens, plan.num_rows, each, has_adapters=plan.adapters > 0)
        elif not compiled:
            self.times.add(plan.num_tokens, plan.num_rows, seconds, plan.width, has_adapters=plan.adapters > 0)
        limit = self.limits.options.priority_itl_ms
        if limit is None or seconds <= limit / 1000 or not plan.decode_tickets:
            return
        oldest = self.batch.by_ticket.get(plan.decode_tickets[0])  # no other decoding row has a better tier
        if oldest is not None and oldest.request.service_tier == ServiceTier.PRIORITY:
            self.counts.num_tier_misses += 1

    def extend(self, sequence: Sequence, token_ids: Ids[int], width: int = 1) -> Commit:
        """Appends forced tokens to a decoding sequence, which computes them as a chunk; returns what was appended.

        The step in flight has planned `width` tokens for the sequence and must not sample for it. An empty Commit: the
        sequence was not decoding.
        """
        return self._committer.extend(sequence, token_ids, width)

    def cut(
        self, sequence: Sequence, num_tokens: int, reason: FinishReason, error: JaxServeError | None = None
    ) -> None:
        """Ends a sequence after its first `num_tokens` tokens and drops the rest.

        `reason` and `error` replace those of an end that the sequence met in the dropped tokens.
        """
        self._committer.cut(sequence, num_tokens, reason, error)

    def requeue_running(self) -> None:
        """Puts all running sequences back into the queue and empties the prefix index: the KV cache is invalid.

        Tokens and page copies in flight are lost; requests keep their seeds, so tokens are sampled again.
        """
        self.planner.requeue_running()
        self.adapters.forget()
        self.images.forget()
        self.pages.abandon_copies()
