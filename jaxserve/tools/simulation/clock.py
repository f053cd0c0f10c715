"""The time of a simulation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class VirtualClock:
    """Seconds since the beginning of the trace. Only the device and jumps over idle time move it."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def advance_to(self, seconds: float) -> None:
        """Sets the time, unless it is later already."""
        self.now = max(self.now, seconds)
