"""What many ask for and one look answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

_EARLY = 0.001  # seconds that the event loop's timers may fire before their time


class SingleFlight[T]:
    """A value that is made at most once in so many seconds, and only when somebody asks.

    Whoever asks while it is made waits for the same one; an error is shared like a value.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._made_at = 0.0
        self._making: asyncio.Task[T] | None = None

    @property
    def seconds_left(self) -> float:
        """Until the value is made anew for the next who asks; 0 or less: at once."""
        return self._made_at + self._seconds - time.monotonic()

    async def get(self, make: Callable[[], Awaitable[T]]) -> T:
        """Returns the value, made by `make` if there is no fresh one. Who leaves early does not end the making."""
        if self._making is None or (self._making.done() and self.seconds_left < _EARLY):
            self._made_at = time.monotonic()
            self._making = asyncio.ensure_future(_await(make))
        return await asyncio.shield(self._making)


async def _await[T](make: Callable[[], Awaitable[T]]) -> T:
    return await make()
