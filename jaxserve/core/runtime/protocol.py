"""The calls by which an engine runs steps. Whoever has the same calls in the same order has the same tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from jaxserve.core.scheduler.step_plan import StepOutputs, StepPlan

if TYPE_CHECKING:
    from jaxserve.core.runtime.step_counts import StepCounts
    from jaxserve.core.weights import CheckpointUpdate

type ParamUpdates = "Mapping[str, Any] | CheckpointUpdate"  # arrays by canonical name, or files that have them


class StepFuture(Protocol):
    """A step in flight."""

    def wait(self) -> None:
        """Waits for the step and leaves its outputs on the device; raises what made it fail."""
        ...

    def result(self) -> StepOutputs:
        """Waits for the step and returns its outputs; raises what made it fail."""
        ...


class StartedStep(Protocol):
    """A step whose forward pass was dispatched, and whose tokens are not sampled yet."""

    def sample(self, mask: Any = None) -> StepFuture:
        """Starts the sampling.

        Args:
            mask: allowed tokens as bits, uint32 [rows of the plan x its width, words of the vocabulary], a row's lines
                in the order of its tokens. A row whose first line is 0 does not sample: its mask is late. Another line
                of 0 ends the row's run in front of its position. The array is not written afterwards.
        """
        ...


class Runner(Protocol):
    """The engine's interface to the device; `tests/fake_device.py` implements it without one."""

    @property
    def counts(self) -> StepCounts:
        """The steps run so far."""
        ...

    @property
    def num_programs(self) -> int:
        """Compiled programs that steps can use."""
        ...

    @property
    def num_compiles(self) -> int:
        """XLA compilations of this process since the runner was ready."""
        ...

    def start(self, plan: StepPlan) -> StartedStep:
        """Dispatches a step after those already started, and returns at once."""
        ...

    def reset(self) -> None:
        """Rebuilds the state that a failed step consumed: zeroed pools, no rows."""
        ...

    def warm_thread(self) -> None:
        """Runs a program on the calling thread, which will run the steps, and waits for it."""
        ...

    def write_params(self, updates: ParamUpdates) -> None:
        """Replaces parameters by canonical name. No step may be in flight."""
        ...
