"""One completion of a request while it is being worked on."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from jaxserve.errors import JaxServeError
from jaxserve.pages.manager import SequencePages
from jaxserve.request import FinishReason, Request
from jaxserve.scheduler.plan import NewRow, RowHistory

# Sentinels, which the device brings in place of a token id: the row's logits are not finite; its parameters forbid
# every token; it did not sample, because its mask came too late.
NON_FINITE, NO_TOKEN_LEFT, MASK_LATE = -1, -2, -3
_ARRIVALS = 2**48  # sequences that one priority can count: more than an engine meets in its life


class SequenceStatus(Enum):
    WAITING = auto()  # never admitted
    RUNNING = auto()  # has a row and pages
    PREEMPTED = auto()  # lost both; waits to be computed again
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """Work to do = num_tokens - num_computed_tokens; a step lets the second catch up. This package alone writes it.

    `num_computed_tokens` counts what has been *planned*: the device may still be at it. `token_ids` holds what has been
    *committed*. While a row decodes, the difference is the tokens in flight.
    """

    request: Request
    pages: SequencePages
    max_num_tokens: int  # prompt and output together
    token_ids: list[int] = field(init=False)
    stop_ids: frozenset[int] = field(init=False)  # every value that ends the sequence, the sentinels among them
    index: int = 0  # among the request's sequences
    siblings: list[Sequence] = field(default_factory=list)  # of the first: those that wait for its prompt's pages
    status: SequenceStatus = SequenceStatus.WAITING
    order: int = -1  # by priority, then by arrival; preemption takes the largest
    ticket: int = -1
    row: int = -1
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # at the first admission: of the prompt, found in the prefix cache
    num_awaited_steps: int = 0  # of a preempted sequence: those that sampled for it and are not committed yet
    publish_from: int = 0  # computed tokens from which a full page can enter the prefix index
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: JaxServeError | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        sentinels = NON_FINITE, NO_TOKEN_LEFT, MASK_LATE
        self.stop_ids = frozenset((*self.request.eos_token_ids, *self.request.params.stop_token_ids, *sentinels))

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def sharable_tokens(self) -> list[int]:
        """Those whose computed pages it may take over: none while the log-probabilities of its prompt are wanted."""
        wants_all = self.request.params.prompt_logprobs is not None and len(self.token_ids) == self.num_prompt_tokens
        return [] if wants_all and self.index == 0 else self.token_ids

    def make_new_row(self) -> NewRow:
        """Returns what begins its life in the row that it just got."""
        request = self.request
        return NewRow(
            self.row,
            self.num_computed_tokens,
            request.params,
            request.seed,
            self.index,
            self._make_history(),
            request.embeds,
        )

    def _make_history(self) -> RowHistory | None:
        request = self.request
        if not request.params.shapes_logits and request.automaton is None:
            return None
        stop_ids = (*request.eos_token_ids, *request.params.stop_token_ids)
        return RowHistory(tuple(self.token_ids), self.num_prompt_tokens, stop_ids, request.bad_words, request.automaton)


def make_order(priority: int, arrival: int) -> int:
    """Returns one number that sorts by priority, the smallest first, and then by arrival."""
    return priority * _ARRIVALS + arrival


def age(sequence: Sequence) -> int:
    """Sort key of waiting and running sequences: the first in it runs first, goes last, and so always progresses.

    Within a priority it is the order of arrival; a sequence of smaller priority counts as older.
    """
    return sequence.order
