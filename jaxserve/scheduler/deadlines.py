"""Which requests have run out of time."""

from __future__ import annotations

import heapq

_SLACK = 64  # stale entries that are not worth a clean-up


class Deadlines:
    """Deadlines of unfinished requests, the earliest on top; of requests that ended in time stale entries are left.

    They are dropped when they come up, or together when they are the most: so each costs O(log n) in all.
    """

    def __init__(self) -> None:
        self._deadlines: dict[str, float] = {}  # of requests that are not finished
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._deadlines)

    def add(self, request_id: str, deadline: float) -> None:
        """Watches a request until it is dropped."""
        self._deadlines[request_id] = deadline
        heapq.heappush(self._heap, (deadline, request_id))

    def drop(self, request_id: str) -> None:
        """Forgets a request that has ended, if it was watched."""
        if self._deadlines.pop(request_id, None) is not None and len(self._heap) > 2 * len(self._deadlines) + _SLACK:
            self._heap = [(deadline, name) for name, deadline in self._deadlines.items()]
            heapq.heapify(self._heap)

    def pop_expired(self, now: float) -> list[str]:
        """Returns the requests whose deadline has passed, the earliest first, and forgets them."""
        expired, heap = [], self._heap
        while heap and heap[0][0] <= now:
            deadline, request_id = heapq.heappop(heap)
            if self._deadlines.get(request_id) == deadline:  # else it ended, and its id may be in use again
                del self._deadlines[request_id]
                expired.append(request_id)
        return expired
