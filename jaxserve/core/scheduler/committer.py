"""Committing: appends the token ids that a step sampled to their sequences."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from jaxserve.core.pages.manager import PageManager
from jaxserve.core.scheduler.chains import take_drafts
from jaxserve.core.scheduler.running import Batch
from jaxserve.core.scheduler.scheduler_counts import SchedulerCounts
from jaxserve.core.scheduler.sequence import MASK_LATE, NO_TOKEN_LEFT, NON_FINITE, Sequence, SequenceStatus
from jaxserve.core.scheduler.step_plan import StepOutputs, StepPlan
from jaxserve.core.scheduler.unfinished import UnfinishedRequests
from jaxserve.core.scheduler.waiting import WaitingQueue
from jaxserve.core.scheduler.widths import WidthChooser
from jaxserve.errors import JaxServeError, NonFiniteLogitsError, NoTokenLeftError
from jaxserve.request import FinishReason, Task

# Parameters that can forbid tokens, the strictest first: the first that a request has is named if none is left.
_CONSTRAINTS = (
    "structured_outputs",
    "allowed_token_ids",
    "suppress_tokens",
    "bad_words",
    "logit_bias",
    "min_tokens",
    "extra_args",
)


@dataclass(slots=True)
class Commit:
    """The result of a commit: the sequences that got tokens, the run of each, and the sequences that ended."""

    sequences: list[Sequence] = field(default_factory=list)
    runs: list[Ids[int]] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)


class Committer:
    """Appends tokens to sequences, ends those that are complete, and offers full pages to the prefix index."""

    def __init__(
        self,
        pages: PageManager,
        waiting: WaitingQueue,
        batch: Batch,
        unfinished: UnfinishedRequests,
        widths: WidthChooser | None,
        counts: SchedulerCounts,
    ) -> None:
        self._widths, self._counts = widths, counts
        self._pages, self._waiting, self._batch, self._unfinished = pages, waiting, batch, unfinished

    def commit(self, plan: StepPlan, outputs: StepOutputs) -> Commit:
        """Appends a step's runs to the sequences that have not ended; returns what was appended.

        A sentinel ends its sequence with an error, and its page is not published; MASK_LATE only ends the run.
        """
        self._pages.commit_copies(plan.page_saves, plan.page_loads, outputs.failed_copies)
        commit, runs = Commit(), iter(self._split_runs(plan, outputs))
        self._take(plan.decode_tickets, runs, plan.width, commit)
        for chunk, run in zip(plan.chunks, runs, strict=True):
            sequence = self._batch.by_ticket.get(chunk.ticket)
            if sequence is None:
                continue
            ends = chunk.is_last and sequence.request.task is Task.POOL  # an embedding ends with its prompt
            if run[-1] == NON_FINITE or (chunk.is_last and not ends):
                self._take((chunk.ticket,), (run,), 1, commit)
                if len(sequence.token_ids) > sequence.num_prompt_tokens:
                    self._waiting.push_siblings(sequence)
            elif chunk.end >= sequence.publish_from and sequence.status is SequenceStatus.RUNNING:
                self._publish(sequence, chunk.end)
            if ends:
                self._end(sequence, FinishReason.STOP, None, commit)
        return commit

    def _split_runs(self, plan: StepPlan, outputs: StepOutputs) -> list[Ids[int]]:
        """Returns the runs, after what there is to learn of drafts."""
        if self._widths is None:
            return outputs.split_runs()
        return take_drafts(plan, outputs, self._batch.by_ticket, self._widths, self._counts)

    def extend(self, sequence: Sequence, token_ids: Ids[int], width: int) -> Commit:
        """See `Scheduler.extend`."""
        if not self._batch.resume_prefilling(sequence):
            return Commit()
        sequence.num_computed_tokens -= width - 1
        self._pages.snapshots.give_up(sequence.pages.states, sequence.num_computed_tokens)  # chunks may pass them
        sequence.token_ids += token_ids
        return Commit([sequence], [token_ids])

    def cut(self, sequence: Sequence, num_tokens: int, reason: FinishReason, error: JaxServeError | None) -> None:
        """See `Scheduler.cut`."""
        self._unfinished.finish_sequence(sequence, reason, error)
        del sequence.token_ids[num_tokens:]
        sequence.finish_reason, sequence.error, sequence.stop_token_id = reason, error, None

    def _take(self, tickets: Ids[int], runs: Iterable[Ids[int]], width: int, commit: Commit) -> None:
        """Appends each run to the sequence with its ticket, up to the sequence's end; `width` tokens were planned."""
        by_ticket, add_sequence, add_run = self._batch.by_ticket, commit.sequences.append, commit.runs.append
        for ticket, brought in zip(tickets, runs):  # noqa: B905  other rows' runs may follow
            sequence = by_ticket.get(ticket)
            if sequence is None:
                continue
            tokens, run, reason = sequence.token_ids, brought, None
            num_computed = len(tokens)
            count = len(run)
            is_run = width > 1 or count > 1
            if is_run and num_computed + count < sequence.max_num_tokens and sequence.stop_ids.isdisjoint(run):
                sequence.num_computed_tokens += count - width
                num_computed += count - 1
            elif is_run or run[0] in sequence.stop_ids or num_computed + 1 >= sequence.max_num_tokens:
                if run[0] != MASK_LATE:  # else the planned tokens were taken back when the mask was late
                    sequence.num_computed_tokens += count - (run[-1] == MASK_LATE) - width
                run, reason, error = _find_end(sequence, run)
                num_computed += len(run) - 1
            if run:
                tokens.extend(run)
                add_sequence(sequence)
                add_run(run)
                if num_computed >= sequence.publish_from:  # always true after a preemption
                    if sequence.num_awaited_steps:
                        sequence.num_awaited_steps -= 1
                    else:
                        self._publish(sequence, num_computed)
            if reason is not None:
                self._end(sequence, reason, error, commit)

    def _end(self, sequence: Sequence, reason: FinishReason, error: JaxServeError | None, commit: Commit) -> None:
        if self._unfinished.finish_sequence(sequence, reason, error):
            commit.finished.append(sequence)

    def _publish(self, sequence: Sequence, num_computed: int) -> None:
        self._pages.publish(sequence.pages, sequence.token_ids, num_computed)
        sequence.publish_from = self._pages.next_publish(sequence.pages)


def _find_end(sequence: Sequence, run: Ids[int]) -> tuple[Ids[int], FinishReason | None, JaxServeError | None]:
    """Returns the part of a run that the sequence keeps, and its finish reason and error; None if it goes on."""
    room = sequence.max_num_tokens - len(sequence.token_ids)
    if room == 0:  # only the prompt was wanted, or it fills the context
        is_finite = run[0] != NON_FINITE
        return (), *((FinishReason.LENGTH, None) if is_finite else (FinishReason.ERROR, _explain(sequence, NON_FINITE)))
    run = run[:room]
    for index, token_id in enumerate(run):
        if token_id not in sequence.stop_ids:
            continue
        if token_id >= 0:
            sequence.stop_token_id = None if token_id in sequence.request.eos_token_ids else token_id
            return run[: index + 1], FinishReason.STOP, None
        if token_id == MASK_LATE:  # `Batch.compute_again` has scheduled the token again
            return run[:index], None, None
        return run[:index], FinishReason.ERROR, _explain(sequence, token_id)
    return run, FinishReason.LENGTH if len(run) == room else None, None


def _explain(sequence: Sequence, sentinel: int) -> JaxServeError:
    name = sequence.request.request_id
    if sentinel == NO_TOKEN_LEFT:
        given = [field for field in _CONSTRAINTS if getattr(sequence.request.params, field)]
        message = f"request {name}: {' and '.join(given)} together forbid every token; loosen one"
        return NoTokenLeftError(message, field=given[0] if given else "prompt")
    return NonFiniteLogitsError(f"request {name}: the model's logits are not finite")
