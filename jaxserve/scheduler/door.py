"""Admission to the queue: its limits, idle rows, and displacement by requests of better priority."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

from jaxserve.errors import InvalidRequestError, QueueFullError
from jaxserve.request import Rank, Request
from jaxserve.scheduler.limits import SchedulerLimits
from jaxserve.scheduler.running import Batch
from jaxserve.scheduler.sequence import SequenceStatus
from jaxserve.scheduler.waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class _Excess:
    """The limit that a request would exceed."""

    name: str
    limit: int
    what: str
    waiting: int
    more: int


class Door:
    """Compares requests with the limits of the queue. It decides only; callers queue and displace requests.

    There is room for a request if the limits let it wait, or if idle rows suffice for it and all that wait. Only
    sequences that wait for their first admission count, and `n` x max_tokens is not reserved.
    """

    def __init__(self, limits: SchedulerLimits, waiting: WaitingQueue, batch: Batch) -> None:
        self.has_pages = True  # whether the last plan had pages for the first in line; set by the planner
        self._waiting, self._batch, self._num_rows = waiting, batch, limits.max_num_seqs
        self._most_sequences = limits.options.max_num_queued_reqs
        self._most_tokens = limits.options.max_num_queued_tokens

    @property
    def idle_rows(self) -> int:
        """Rows that new sequences get without waiting for another to end; 0 while pages are short."""
        return self._num_rows - len(self._batch) if self.has_pages or not self._waiting else 0

    def bound_sequences(self, default: int) -> None:
        """Limits the waiting sequences to `default`, unless an option sets the limit."""
        if self._most_sequences is None:
            self._most_sequences = default

    def refuse_if_full(self, rank: Rank) -> None:
        """Raises QueueFullError when not even the smallest request of this rank would find room.

        Safe from any thread: only numbers are read.
        """
        excess = self._find_excess(1, 1, self._waiting.num_new, self._waiting.num_new_tokens, self.idle_rows)
        worst = self._waiting.worst_rank
        if excess is not None and (worst is None or worst <= rank):
            raise _refuse(excess)

    def find_room(self, requests: List[Request]) -> list[tuple[str, QueueFullError]]:
        """Returns the requests to displace so that all of `requests` fit, the worst first: (request id, its error).

        Only requests that have not begun and whose rank is larger (worse) are displaced, and none in vain.

        Raises:
            InvalidRequestError: the requests together exceed the limits of an idle engine.
            QueueFullError: there is no room for them now.
        """
        count = sum(request.params.n for request in requests)
        tokens = sum(len(request.prompt_token_ids) for request in requests)
        if (excess := self._find_excess(count, tokens, 0, 0, self._num_rows)) is not None:
            raise self._explain_size(excess, alone=len(requests) == 1)
        waiting, idle = self._waiting, self.idle_rows
        num_new, num_tokens = waiting.num_new, waiting.num_new_tokens
        full = excess = self._find_excess(count, tokens, num_new, num_tokens, idle)
        displaced: list[str] = []
        rank = max((request.rank for request in requests), default=(0, 0))
        for sequence in reversed(waiting) if full is not None else ():
            other = sequence.request
            if excess is None or other.rank <= rank:
                break
            if sequence.status is SequenceStatus.WAITING and sequence.index == 0:
                num_new -= other.params.n
                num_tokens -= sequence.num_prompt_tokens
                displaced.append(other.request_id)
                excess = self._find_excess(count, tokens, num_new, num_tokens, idle)
        if excess is not None:
            raise _refuse(full or excess)
        return [(name, _displace(name, full)) for name in displaced if full is not None]

    def _find_excess(self, count: int, tokens: int, num_new: int, num_tokens: int, idle: int) -> _Excess | None:
        most_sequences, most_tokens = self._most_sequences, self._most_tokens
        if most_sequences is not None and num_new + count > most_sequences + idle:
            return _Excess("max_num_queued_reqs", most_sequences, "sequences", num_new, count)
        if most_tokens is not None and num_tokens + tokens > most_tokens and num_new + count > idle:
            return _Excess("max_num_queued_tokens", most_tokens, "prompt tokens", num_tokens, tokens)
        return None

    def _explain_size(self, excess: _Excess, *, alone: bool) -> InvalidRequestError:
        """Returns the error for a size that even an idle engine refuses: no retry can help."""
        is_count = excess.name == "max_num_queued_reqs"
        message = (
            f"asks for {excess.more} {excess.what} at once, which {excess.name}={excess.limit} and "
            f"max_num_seqs={self._num_rows} never let in; split it into smaller requests"
        )
        return InvalidRequestError(message, field="n" if is_count and alone else "prompt", value=excess.more)


def _refuse(excess: _Excess) -> QueueFullError:
    message = (
        f"the queue is full: {excess.waiting} {excess.what} wait, and {excess.more} more would pass "
        f"{excess.name}={excess.limit}; try again when some of them run"
    )
    return QueueFullError(message, limit=excess.limit, queued=excess.waiting)


def _displace(request_id: str, excess: _Excess) -> QueueFullError:
    message = (
        f"request {request_id}: the queue is full ({excess.name}={excess.limit}) and one of higher priority "
        "took its place; try again"
    )
    return QueueFullError(message, limit=excess.limit, queued=excess.waiting)
