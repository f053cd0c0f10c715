"""Admission to the queue: its limits, the wait to expect, and displacement by requests of better priority."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass

from jaxserve.core.scheduler.limits import SchedulerLimits
from jaxserve.core.scheduler.pace import QueuePace
from jaxserve.core.scheduler.running import Batch
from jaxserve.core.scheduler.sequence import SequenceStatus
from jaxserve.core.scheduler.waiting import TenantLoad, WaitingQueue
from jaxserve.errors import InvalidRequestError, QueueFullError
from jaxserve.request import DEFAULT_TENANT, Rank, Request, ServiceTier, Tenant


@dataclass(frozen=True, slots=True)
class _Excess:
    """The limit that a request would exceed."""

    name: str
    limit: int
    what: str
    waiting: int
    more: int
    text: str  # the limit as the operator set it
    whose: str  # for whom alone the queue is full; empty: for everybody


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the queue with limits of its own: what one tenant's requests may fill, or all of it."""

    tenant: Tenant | None  # None: all of it
    most_sequences: int | None
    most_tokens: int | None

    def covers(self, request: Request) -> bool:
        """Whether a request that waits fills this part."""
        return self.tenant is None or request.tenant.name == self.tenant.name

    def measure(self, requests: Iterable[Request]) -> tuple[int, int]:
        """Returns the sequences and the prompt tokens with which requests fill this part."""
        covered = [request for request in requests if self.covers(request)]
        return sum(each.params.n for each in covered), sum(len(each.prompt_token_ids) for each in covered)

    def find_excess(self, asked: tuple[int, int], load: tuple[int, int], idle: int) -> _Excess | None:
        """Returns the limit that `asked` more (sequences, prompt tokens) would exceed; None if they fit.

        Args:
            load: what waits now.
            idle: rows that sequences get without waiting.
        """
        (count, tokens), (num_new, num_tokens) = asked, load
        most = self._share(self.most_sequences)
        if most is not None and num_new + count > most + idle:
            return self._describe("max_num_queued_reqs", self.most_sequences, most, "sequences", num_new, count)
        most = self._share(self.most_tokens)
        if most is not None and num_tokens + tokens > most and num_new + count > idle:
            return self._describe("max_num_queued_tokens", self.most_tokens, most, "prompt tokens", num_tokens, tokens)
        return None

    def _share(self, most: int | None) -> int | None:
        return most if most is None or self.tenant is None else max(1, int(most * self.tenant.queue_share))

    def _describe(self, name: str, set_to: int | None, limit: int, what: str, waiting: int, more: int) -> _Excess:
        text, whose = f"{name}={set_to}", ""
        if self.tenant is not None:
            text = f"queue_share={self.tenant.queue_share:g} of {text}"
            whose = f" for tenant {self.tenant.name!r}"
        return _Excess(name, limit, what, waiting, more, text, whose)


class QueueAdmission:
    """Compares requests with the limits of the queue. It decides only; callers queue and displace requests.

    There is room for a request if the limits let it wait, or if idle rows suffice for it and all that wait. Only
    sequences that wait for their first admission count, and `n` x max_tokens is not reserved. A tenant's requests may
    fill its `queue_share` of each limit, and at least one sequence. A server also refuses what would wait too long.
    """

    def __init__(
        self, limits: SchedulerLimits, waiting: WaitingQueue, batch: Batch, clock: Callable[[], float]
    ) -> None:
        self.has_pages = True  # whether the last plan had pages for the first in line; set by the planner
        self.pace = QueuePace()  # written by the planner
        self._clock = clock
        self._most_wait: float | None = None  # None: any wait is right
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

    def bound_wait(self, seconds: float) -> None:
        """Refuses requests whose first step is expected later than in so many seconds, or after their deadline.

        The tier flex has its deadlines only.
        """
        self._most_wait = seconds

    def estimate_wait(self, rank: Rank, tenant: Tenant = DEFAULT_TENANT) -> float:
        """Returns the seconds until a new request of this rank would get a row: its place, at the recent pace.

        0 while rows are idle or the pace is unknown, infinity while the queue stands still. Safe from any thread.
        """
        return self.pace.estimate(self._waiting.count_before(rank, tenant) + 1 - self.idle_rows)

    def refuse_if_late(self, rank: Rank, tenant: Tenant = DEFAULT_TENANT, deadline: float | None = None) -> None:
        """Raises QueueFullError when a new request would wait too long (see `bound_wait`). Safe from any thread."""
        if self._most_wait is None:
            return
        most = math.inf if rank[0] == ServiceTier.FLEX else self._most_wait
        left = math.inf if deadline is None else max(0.0, deadline - self._clock())
        seconds = self.estimate_wait(rank, tenant)
        if seconds > min(most, left):
            limit = f"max_queue_wait={most:g}" if most <= left else f"its timeout leaves {left:.1f} s"
            raise QueueFullError(
                f"the first token is expected in {_say_wait(seconds)}, and {limit}; try again when fewer wait",
                limit=min(most, left),
                queued=seconds,
            )

    def refuse_if_full(self, rank: Rank, tenant: Tenant = DEFAULT_TENANT) -> None:
        """Raises QueueFullError when not even the tenant's smallest request of this rank would find room.

        Safe from any thread: only numbers are read.
        """
        worst = self._waiting.worst_rank
        for part in self._list_parts([tenant]):
            excess = part.find_excess((1, 1), *self._measure_load(part))
            if excess is not None and (worst is None or worst <= rank):
                raise _refuse(excess)

    def find_room(self, requests: List[Request]) -> list[tuple[str, QueueFullError]]:
        """Returns the requests to displace so that all of `requests` fit: (request id, its error).

        Only requests that have not begun and whose rank is larger (worse) are displaced, the worst first, and none in
        vain. A tenant that has filled its share displaces its own.

        Raises:
            InvalidRequestError: the requests together exceed the limits of an idle engine.
            QueueFullError: there is no room for them now.
        """
        parts = self._list_parts(request.tenant for request in requests)
        for part in parts:
            if (excess := part.find_excess(part.measure(requests), (0, 0), self._num_rows)) is not None:
                raise self._explain_size(excess, alone=len(requests) == 1)
        for rank, tenant, deadline in {(each.rank, each.tenant, each.deadline) for each in requests}:
            self.refuse_if_late(rank, tenant, deadline)
        displaced: dict[str, tuple[Request, QueueFullError]] = {}
        for part in parts:
            self._make_room(part, requests, displaced)
        return [(name, error) for name, (_, error) in displaced.items()]

    def _make_room(
        self, part: _Part, requests: List[Request], displaced: dict[str, tuple[Request, QueueFullError]]
    ) -> None:
        """Adds the requests to displace from one part to `displaced`; raises QueueFullError if they do not suffice."""
        asked, (load, idle) = part.measure(requests), self._measure_load(part)
        gone = part.measure(other for other, _ in displaced.values())
        load = load[0] - gone[0], load[1] - gone[1]
        full = excess = part.find_excess(asked, load, idle)
        if full is None:
            return
        rank = max((request.rank for request in requests), default=(0, 0))
        for sequence in reversed(self._waiting):
            other = sequence.request
            if excess is None or other.rank <= rank:
                break
            is_new = sequence.status is SequenceStatus.WAITING and sequence.index == 0
            if is_new and part.covers(other) and other.request_id not in displaced:
                load = load[0] - other.params.n, load[1] - sequence.num_prompt_tokens
                displaced[other.request_id] = other, _displace(other.request_id, full)
                excess = part.find_excess(asked, load, idle)
        if excess is not None:
            raise _refuse(full)

    def _list_parts(self, tenants: Iterable[Tenant]) -> list[_Part]:
        """Returns the parts of the queue that requests of these tenants fill, the whole queue last."""
        shares = [tenant for tenant in dict.fromkeys(tenants) if tenant.queue_share < 1]
        return [_Part(whose, self._most_sequences, self._most_tokens) for whose in (*shares, None)]

    def _measure_load(self, part: _Part) -> tuple[tuple[int, int], int]:
        """Returns what waits in a part, (sequences, prompt tokens), and the idle rows that others leave to it."""
        waiting, idle = self._waiting, self.idle_rows
        if part.tenant is None:
            return (waiting.num_new, waiting.num_new_tokens), idle
        own = waiting.by_tenant.get(part.tenant.name, TenantLoad())
        return (own.num_new, own.num_new_tokens), max(0, idle - (waiting.num_new - own.num_new))

    def _explain_size(self, excess: _Excess, *, alone: bool) -> InvalidRequestError:
        """Returns the error for a size that even an idle engine refuses: no retry can help."""
        is_count = excess.name == "max_num_queued_reqs"
        message = (
            f"asks for {excess.more} {excess.what} at once, which {excess.text} and max_num_seqs={self._num_rows} "
            "never let in; split it into smaller requests"
        )
        return InvalidRequestError(message, field="n" if is_count and alone else "prompt", value=excess.more)


def _say_wait(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 3600 else "an hour or more"


def _refuse(excess: _Excess) -> QueueFullError:
    message = (
        f"the queue is full{excess.whose}: {excess.waiting} {excess.what} wait, and {excess.more} more would pass "
        f"{excess.text}; try again when some of them run"
    )
    return QueueFullError(message, limit=excess.limit, queued=excess.waiting)


def _displace(request_id: str, excess: _Excess) -> QueueFullError:
    message = (
        f"request {request_id}: the queue is full{excess.whose} ({excess.text}) and one of higher priority "
        "took its place; try again"
    )
    return QueueFullError(message, limit=excess.limit, queued=excess.waiting)
