"""The engine's counters, and its choice of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from jaxserve.core.runtime.protocol import StepFuture
from jaxserve.core.scheduler import StepOutputs


@dataclass(slots=True)
class EngineCounts:
    """Only the engine writes the counters; any thread may read them.

    While there is work, the host either waits for the device or is busy. The less it waits, the nearer it is to being
    the bottleneck.
    """

    clock: Callable[[], float]
    num_faults: int = 0  # steps that failed on the device
    num_tokens: int = 0  # generated tokens
    wait_seconds: float = 0.0
    busy_seconds: float = 0.0
    step_seconds: float = 0.0  # from the step before the last one, or the beginning of the work, to the last one
    _busy_since: float = field(init=False)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Starts the busy time after a time without work, which is not counted."""
        self._busy_since = self.clock()

    def wait(self, future: StepFuture) -> StepOutputs:
        """Returns a step's outputs and counts the wait for them; raises what made the step fail."""
        before, start = self._busy_since, self.clock()
        self.busy_seconds += start - before
        try:
            return future.result()
        finally:
            self._busy_since = self.clock()
            self.wait_seconds += self._busy_since - start
            self.step_seconds = self._busy_since - before


@dataclass(frozen=True, slots=True)
class AttentionStats:
    """The attention chosen at the start."""

    impl: str
    reason: str  # shown to users
    fell_back: bool  # portable attention on an accelerator, without being asked for
