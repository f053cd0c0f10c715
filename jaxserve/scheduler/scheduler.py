"""Continuous batching: requests come in, a planner says what each step computes, a committer takes what it brought."""

from __future__ import annotations

from collections.abc import Sequence as Ids

from jaxserve.errors import JaxServeError
from jaxserve.pages.manager import PageManager
from jaxserve.request import FinishReason, Request
from jaxserve.scheduler.committer import Commit, Committer
from jaxserve.scheduler.counts import SchedulerCounts
from jaxserve.scheduler.door import Door
from jaxserve.scheduler.limits import SchedulerLimits
from jaxserve.scheduler.plan import StepOutputs, StepPlan
from jaxserve.scheduler.planner import Planner
from jaxserve.scheduler.running import Batch
from jaxserve.scheduler.sequence import Sequence
from jaxserve.scheduler.unfinished import UnfinishedRequests
from jaxserve.scheduler.waiting import WaitingQueue


class Scheduler:
    """What the engine sees of the parts in this package; each part holds its own state.

    `plan` may run again before the last plan's tokens are committed.
    """

    def __init__(self, limits: SchedulerLimits, pages: PageManager) -> None:
        self.limits = limits
        self.pages = pages
        self.waiting = WaitingQueue()
        self.batch = Batch(limits.max_num_seqs, pages)
        self.door = Door(limits, self.waiting, self.batch)
        self.counts = SchedulerCounts()
        self.planner = Planner(limits, pages, self.waiting, self.batch, self.door, self.counts)
        self._unfinished = UnfinishedRequests(limits.max_model_len, pages, self.waiting, self.batch)
        self._committer = Committer(pages, self.waiting, self.batch, self._unfinished)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._unfinished)

    def add(self, request: Request) -> list[Sequence]:
        """Queues a request, or refuses what could never run; returns its n sequences.

        All but the first wait until the prompt is computed, and then find its pages by their content. The limits of the
        queue are checked before, at `door`, where there are any: a batch may be of any size.

        Raises:
            InvalidRequestError: the prompt is empty or leaves no room for an output token, or the id is in use.
            CapacityError: the sequence would not fit the empty KV pool.
        """
        return self._unfinished.add(request)

    def finish(self, request_id: str, reason: FinishReason, error: JaxServeError | None = None) -> list[Sequence]:
        """Ends what is left of a request in whatever state it is; nothing is, when it is unknown or has ended already.

        What steps in flight still compute for it is dropped at their commit.
        """
        return self._unfinished.finish(request_id, reason, error)

    def finish_sequence(self, sequence: Sequence, reason: FinishReason, error: JaxServeError | None = None) -> bool:
        """Ends one sequence; False when it has ended already."""
        return self._unfinished.finish_sequence(sequence, reason, error)

    def plan(self) -> StepPlan | None:
        """Returns the next step; None when nothing can be computed before a commit, or at all."""
        return self.planner.plan()

    def commit(self, plan: StepPlan, outputs: StepOutputs) -> Commit:
        """Takes the runs that a step brought, each as far as its sequence goes; returns what was taken."""
        return self._committer.commit(plan, outputs)

    def extend(self, sequence: Sequence, token_ids: Ids[int]) -> Commit:
        """Appends tokens that need no sampling: a running sequence then computes them as a chunk.

        In the step in flight it does not sample. Returns what was added, as a commit of it.
        """
        return self._committer.extend(sequence, token_ids)

    def cut(
        self, sequence: Sequence, num_tokens: int, reason: FinishReason, error: JaxServeError | None = None
    ) -> None:
        """Ends a sequence after its first `num_tokens` tokens.

        What follows in its last run is dropped, and so is the end that it may have met there.
        """
        self._committer.cut(sequence, num_tokens, reason, error)

    def requeue_running(self) -> None:
        """Sends every running sequence back to wait and forgets all cached pages: the device lost its state.

        Tokens in flight will not come; the same ones are sampled again, because seeds stay with their requests.
        """
        self.planner.requeue_running()
        self.pages.drop_prefix_index()
