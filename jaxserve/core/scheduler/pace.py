"""The rate at which waiting sequences get their first rows, and the wait that a new one may expect of it."""

from __future__ import annotations

import math

_MEMORY_S = 10.0  # seconds with a queue, after which what was seen counts a third
_STILL_S = 5.0  # seconds with a queue (they fade) and no admission, after which it is said to stand still


class QueuePace:
    """The recent rate of admissions, over times in which sequences waited.

    What an engine admits while nobody waits says nothing of what it could admit, so such times do not count; after
    `_MEMORY_S` of them the rate is unknown again. The planner writes it; any thread may ask.
    """

    def __init__(self) -> None:
        self._seconds = self._admitted = 0.0  # both fade
        self._time = self._last_wait = -math.inf
        self._count, self._waits = 0, False  # at the last plan

    def note(self, now: float, num_admitted: int, *, waits: bool) -> None:
        """Notes a plan.

        Args:
            num_admitted: sequences that were admitted since the start.
            waits: whether the plan leaves sequences waiting that were never admitted.
        """
        if self._waits:
            seconds = now - self._time
            fade = math.exp(-seconds / _MEMORY_S)
            self._seconds = self._seconds * fade + seconds
            self._admitted = self._admitted * fade + (num_admitted - self._count)
            self._last_wait = now
        elif waits and now - self._last_wait > _MEMORY_S:
            self._seconds = self._admitted = 0.0
        self._time, self._count, self._waits = now, num_admitted, waits

    def estimate(self, place: int) -> float:
        """Returns the seconds until the sequence at a place in the queue gets its row, 1 being the first.

        0 where the rate is unknown, or the place is not in the queue; infinity where the queue stands still.
        """
        if place <= 0:
            return 0.0
        if self._admitted > 0:
            return place * self._seconds / self._admitted
        return math.inf if self._seconds >= _STILL_S else 0.0
