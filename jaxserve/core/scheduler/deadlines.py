"""A heap of the requests' deadlines, which finds those that have passed."""

from __future__ import annotations

import heapq

_SLACK = 64  # stale entries that are not worth a clean-up


class Deadlines:
    """The deadlines of unfinished requests in a heap, the earliest on top.

    A request that ended in time leaves a stale entry. It is removed when it reaches the top, or when stale entries
    outnumber the others: an amortized O(log n) per request.
    """

    def __init__(self) -> None:
        self._deadlines: dict[str, float] = {}  # unfinished requests only
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._deadlines)

    def add(self, request_id: str, deadline: float) -> None:
        """Adds a request's deadline, on the clock of `pop_expired`."""
        self._deadlines[request_id] = deadline
        heapq.heappush(self._heap, (deadline, request_id))

    def drop(self, request_id: str) -> None:
        """Removes a request that has ended; unknown ids are ignored."""
        if self._deadlines.pop(request_id, None) is not None and len(self._heap) > 2 * len(self._deadlines) + _SLACK:
            self._heap = [(deadline, name) for name, deadline in self._deadlines.items()]
            heapq.heapify(self._heap)

    def pop_expired(self, now: float) -> list[str]:
        """Removes and returns the ids of requests whose deadline has passed, the earliest first."""
        expired, heap = [], self._heap
        while heap and heap[0][0] <= now:
            deadline, request_id = heapq.heappop(heap)
            if self._deadlines.get(request_id) == deadline:  # else it ended, and its id may be in use again
                del self._deadlines[request_id]
                expired.append(request_id)
        return expired
