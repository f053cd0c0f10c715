"""The queue of sequences that wait for a row."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass
from heapq import merge
from itertools import islice

from jaxserve.core.scheduler.fairness import ArrivalOrder, TurnOrder
from jaxserve.core.scheduler.sequence import Sequence, SequenceStatus, age
from jaxserve.request import Rank, Tenant


@dataclass(slots=True)
class TenantLoad:
    """What waits of one tenant."""

    num_waiting: int = 0  # sequences in the queue
    num_new: int = 0  # sequences that were never admitted
    num_new_tokens: int = 0  # prompt tokens of never-admitted requests, once per request


class WaitingQueue:
    """Waiting sequences by `age`: a preempted sequence precedes those of its rank that arrived later.

    Siblings of a request's first sequence are counted from the start, but queued once the prompt is computed.

    Args:
        is_ready: tells of a sequence whether it can be next; those behind it go first until then.
        read_state: returns a value on which `is_ready` depends. While it is the same, those that were not ready are not
            asked again.
    """

    def __init__(
        self,
        turns: TurnOrder | None = None,
        is_ready: Callable[[Sequence], bool] = lambda sequence: True,
        read_state: Callable[[], Hashable] = object,
    ) -> None:
        self.num_new = 0  # sequences that were never admitted
        self.num_new_tokens = 0  # prompt tokens of never-admitted requests, once per request
        self.by_tenant: defaultdict[str, TenantLoad] = defaultdict(TenantLoad)  # by tenant's name
        self._new: dict[tuple[Rank, Tenant], int] = {}  # never-admitted sequences by rank and tenant, none of them 0
        self._turns = turns if turns is not None else ArrivalOrder()
        self._is_ready, self._read_state = is_ready, read_state
        self._lanes: dict[str, deque[Sequence]] = {}
        self._passed: dict[str, tuple[Hashable, int]] = {}  # by lane: a state, and how many are not ready in it

    def __len__(self) -> int:
        """Safe from any thread."""
        return sum(map(len, list(self._lanes.values())))  # a list: another thread may add a lane meanwhile

    def __bool__(self) -> bool:
        return any(self._lanes.values())

    def __iter__(self) -> Iterator[Sequence]:
        return merge(*self._lanes.values(), key=age)

    def __reversed__(self) -> Iterator[Sequence]:
        return merge(*map(reversed, self._lanes.values()), key=age, reverse=True)

    @property
    def worst_rank(self) -> Rank | None:
        """The worst rank in the queue; None if it is empty. Safe from any thread."""
        try:
            return max((lane[-1].request.rank for lane in list(self._lanes.values()) if lane), default=None)
        except IndexError:  # the lane has become empty
            return None

    @property
    def first(self) -> Sequence | None:
        """The sequence that gets the next row; None if no sequence is ready for one."""
        heads = [head for name, lane in self._lanes.items() if (head := self._find_ready(name, lane)) is not None]
        return self._turns.choose(heads) if heads else None

    def _find_ready(self, name: str, lane: deque[Sequence]) -> Sequence | None:
        state, (known, num_passed) = self._read_state(), self._passed.get(name, (None, 0))
        start = num_passed if known == state else 0
        rest = enumerate(islice(lane, start, None), start)
        place, sequence = next(((place, each) for place, each in rest if self._is_ready(each)), (len(lane), None))
        self._passed[name] = state, place
        return sequence

    def list_adapters(self) -> set[str]:
        """Returns the names of the adapters of waiting sequences. Safe from any thread."""
        waiting = [sequence for lane in list(self._lanes.values()) for sequence in list(lane)]
        return {each.request.adapter.name for each in waiting if each.request.adapter is not None}

    def count_before(self, rank: Rank, tenant: Tenant) -> int:
        """Returns how many never-admitted sequences would go before a tenant's new one. Safe from any thread."""
        found = list(self._new.items())
        own = sum(count for (other, whose), count in found if other == rank and whose == tenant)
        before = own + sum(count for (other, _), count in found if other < rank)
        for (other, whose), count in found:
            if other == rank and whose != tenant:
                before += math.ceil(min(count, (own + 1) * self._turns.count_turns(tenant, whose)))
        return before

    def enter(self, sequences: List[Sequence]) -> None:
        """Counts all sequences of a new request and queues the first."""
        self._count(sequences[0], len(sequences), sequences[0].num_prompt_tokens)
        self.push(sequences[0])

    def push(self, sequence: Sequence) -> None:
        """Queues a sequence that is already counted or has run before."""
        self.by_tenant[sequence.request.tenant.name].num_waiting += 1
        name = self._turns.find_lane(sequence)
        lane = self._lanes.setdefault(name, deque())
        if not lane:
            self._turns.enter(name, (other for other, those in self._lanes.items() if those))
        if not lane or age(lane[-1]) < age(sequence):
            lane.append(sequence)
        else:
            insort(lane, sequence, key=age)
            self._passed.pop(name, None)

    def push_siblings(self, first: Sequence) -> None:
        """Queues the other sequences of a request once the prompt is computed, or `first` has ended."""
        siblings, first.siblings = first.siblings, []
        for sequence in siblings:
            if sequence.status is SequenceStatus.WAITING:
                self.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that is admitted, or ends before; an unqueued sibling is only uncounted."""
        self._uncount(sequence)
        name = self._turns.find_lane(sequence)
        lane = self._lanes.get(name, deque())
        place = bisect_left(lane, age(sequence), key=age)
        if place < len(lane) and lane[place] is sequence:
            del lane[place]
            state, num_passed = self._passed.get(name, (None, 0))
            self._passed[name] = state, num_passed - (place < num_passed)
            self.by_tenant[sequence.request.tenant.name].num_waiting -= 1

    def _uncount(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.WAITING:
            self._count(sequence, -1, -sequence.num_prompt_tokens if sequence.index == 0 else 0)

    def _count(self, sequence: Sequence, num_sequences: int, num_tokens: int) -> None:
        request = sequence.request
        for load in (self, self.by_tenant[request.tenant.name]):
            load.num_new += num_sequences
            load.num_new_tokens += num_tokens
        key = request.rank, request.tenant
        if left := self._new.pop(key, 0) + num_sequences:
            self._new[key] = left
