"""What the engine counts of its own work, and what it runs on."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from jaxserve.scheduler import StepOutputs


class StepFuture(Protocol):
    """A step that the device is working on."""

    def result(self) -> StepOutputs:
        """Waits, and returns what the step brought."""
        ...


@dataclass(slots=True)
class EngineCounts:
    """Only the engine writes it; any thread may read.

    While there is work, the host either waits for the device or is busy. The less it waits, the nearer it is to being
    what limits the pace; what it does while the device runs costs nothing.
    """

    num_faults: int = 0  # steps that failed on the device
    num_tokens: int = 0  # of answers, as they are handed out
    wait_seconds: float = 0.0
    busy_seconds: float = 0.0
    _busy_since: float = field(default_factory=time.perf_counter)

    def begin(self) -> None:
        """Notes that there is work again: the time without any was neither."""
        self._busy_since = time.perf_counter()

    def wait(self, future: StepFuture) -> StepOutputs:
        """Returns what a step brought, and counts the time until it is there."""
        start = time.perf_counter()
        self.busy_seconds += start - self._busy_since
        try:
            return future.result()
        finally:
            self._busy_since = time.perf_counter()
            self.wait_seconds += self._busy_since - start


@dataclass(frozen=True, slots=True)
class AttentionStats:
    """Which attention runs, as it was decided at the start."""

    impl: str
    reason: str  # for users
    fell_back: bool  # to portable attention on an accelerator, where nobody asked for it
