"""The state of one completion of an unfinished request."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from enum import Enum, auto

from jaxserve.core.pages.manager import SequencePages
from jaxserve.core.scheduler.step_plan import NewRow, RowHistory
from jaxserve.errors import JaxServeError
from jaxserve.request import FinishReason, Rank, Request, Task

# Sentinels in place of a token id: the row's logits are not finite; its parameters forbid every token; its mask was
# late, so it did not sample. What follows a run is NOT_KEPT.
NON_FINITE, NO_TOKEN_LEFT, MASK_LATE, NOT_KEPT = -1, -2, -3, -5
_ARRIVALS = 2**48  # sequences per rank, more than any engine sees
_PRIORITIES = 2**33  # more than there are


class SequenceStatus(Enum):
    WAITING = auto()  # never admitted
    RUNNING = auto()  # has a row and pages
    PREEMPTED = auto()  # lost both; waits to be recomputed
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence. Work = num_tokens - num_computed_tokens. Only this package writes it.

    `num_computed_tokens` counts *planned* tokens, which the device may still be computing; a step may bring fewer, and
    its commit corrects the count. `token_ids` holds the *committed* ones.
    """

    request: Request
    pages: SequencePages
    max_num_tokens: int  # prompt and output together
    token_ids: list[int] = field(init=False)
    stop_ids: frozenset[int] = field(init=False)  # EOS, stop ids and sentinels
    index: int = 0  # among the request's sequences
    siblings: list[Sequence] = field(default_factory=list)  # sequences that wait for this one to compute the prompt
    status: SequenceStatus = SequenceStatus.WAITING
    order: int = -1  # by tier, priority, then arrival; the largest is preempted first
    ticket: int = -1
    row: int = -1
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the first admission
    num_charged_tokens: int = 0  # leading prompt tokens that its tenant has paid for
    num_awaited_steps: int = 0  # uncommitted steps that sample for a preempted sequence
    drafts: Ids[int] = ()  # of the step after the last one committed; below zero: none from here on
    publish_from: int = 0  # computed tokens that fill the next page to publish
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: JaxServeError | None = None
    verified: list[tuple[int, int]] = field(default_factory=list)  # (drafts, right ones) of each step with drafts

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        sentinels = NON_FINITE, NO_TOKEN_LEFT, MASK_LATE
        self.stop_ids = frozenset((*self.request.eos_token_ids, *self.request.params.stop_token_ids, *sentinels))

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_settled_tokens(self) -> int:
        """Tokens that are certainly computed when the next step begins, whatever the steps in flight bring."""
        return min(self.num_computed_tokens, len(self.token_ids) - 1)

    @property
    def needs_each_step(self) -> bool:
        """Whether the host takes part in every token: it makes a mask, or reads log-probabilities."""
        return self.request.grammar is not None or self.request.params.logprobs is not None

    @property
    def sharable_tokens(self) -> list[int]:
        """The tokens to look up in the prefix cache: none while prompt log-probabilities must be computed."""
        wants_all = self.request.params.prompt_logprobs is not None and len(self.token_ids) == self.num_prompt_tokens
        return [] if wants_all and self.index == 0 else self.token_ids

    def make_new_row(self, *, has_lookups: bool, adapter: int = 0) -> NewRow:
        """Returns the sequence's `NewRow`, with its tokens if drafts are looked up in them. It must have a row.

        Args:
            adapter: the slot of its adapter, 0 without one.
        """
        request = self.request
        return NewRow(
            self.row,
            self.num_computed_tokens,
            request.params,
            request.seed,
            self.index,
            self.max_num_tokens,
            self._make_history(),
            request.task is Task.POOL,
            tuple(self.token_ids) if has_lookups else (),
            request.salt if has_lookups else "",
            adapter,
            0 if request.images is None else request.images.rope_delta,
        )

    def _make_history(self) -> RowHistory | None:
        request = self.request
        if not request.params.shapes_logits and request.automaton is None:
            return None
        stop_ids = (*request.eos_token_ids, *request.params.stop_token_ids)
        return RowHistory(tuple(self.token_ids), self.num_prompt_tokens, stop_ids, request.bad_words, request.automaton)


def make_order(rank: Rank, arrival: int) -> int:
    """Returns one number that sorts by rank, then arrival."""
    tier, priority = rank
    return (tier * _PRIORITIES + priority) * _ARRIVALS + arrival


def age(sequence: Sequence) -> int:
    """Returns the sort key of sequences: the smallest is admitted first and preempted last, so it always progresses.

    A smaller rank counts as older; within a rank, the order is that of arrival.
    """
    return sequence.order
