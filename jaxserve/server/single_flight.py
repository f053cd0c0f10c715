"""One computation for all who ask at the same time, or shortly after."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

_EARLY = 0.001  # seconds by which the event loop's timers may fire early


class SingleFlight[T]:
    """A value that is made on demand, and at most once in `seconds`.

    Callers that come while it is being made wait for the same result. An error is shared like a value.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._made_at = 0.0
        self._making: asyncio.Task[T] | None = None

    @property
    def seconds_left(self) -> float:
        """Seconds until the value expires; 0 or less: it has."""
        return self._made_at + self._seconds - time.monotonic()

    async def get(self, make: Callable[[], Awaitable[T]]) -> T:
        """Returns the value, made by `make` if it has expired. Cancelling a caller does not cancel `make`."""
        if self._making is None or (self._making.done() and self.seconds_left < _EARLY):
            self._made_at = time.monotonic()
            self._making = asyncio.ensure_future(_await(make))
        return await asyncio.shield(self._making)


async def _await[T](make: Callable[[], Awaitable[T]]) -> T:
    return await make()
