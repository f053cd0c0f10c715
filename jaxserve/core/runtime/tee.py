"""A runner that tells somebody else of each call: a recording, or the other nodes of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from jaxserve.core.runtime.protocol import ParamUpdates, Runner, StartedStep, StepFuture
from jaxserve.core.runtime.step_counts import StepCounts
from jaxserve.core.scheduler.step_plan import StepOutputs, StepPlan


class CallSink(Protocol):
    """Who is told. `start`, `sample`, `reset` and `write_params` come before the call is made."""

    def start(self, plan: StepPlan) -> None:
        """A step is started."""
        ...

    def sample(self, step_id: int, mask: Any) -> None:
        """A started step is sampled; `mask` as in `StartedStep.sample`."""
        ...

    def finish(self, step_id: int, outputs: StepOutputs) -> None:
        """A step's outputs have arrived."""
        ...

    def fail(self, step_id: int, error: BaseException) -> None:
        """The call before, or the wait for the step, raised an error."""
        ...

    def reset(self) -> None:
        """The state is rebuilt."""
        ...

    def write_params(self, updates: ParamUpdates) -> None:
        """Parameters are replaced."""
        ...

    def end_write(self) -> None:
        """They were replaced."""
        ...

    def warm_thread(self) -> None:
        """A program is run on the calling thread."""
        ...


class TeeRunner:
    """A `Runner` that makes the calls of another, and tells a sink of them."""

    def __init__(self, runner: Runner, sink: CallSink) -> None:
        self._runner, self._sink = runner, sink

    @property
    def counts(self) -> StepCounts:
        """See `Runner.counts`."""
        return self._runner.counts

    @property
    def num_programs(self) -> int:
        """See `Runner.num_programs`."""
        return self._runner.num_programs

    @property
    def num_compiles(self) -> int:
        """See `Runner.num_compiles`."""
        return self._runner.num_compiles

    def start(self, plan: StepPlan) -> TeeStep:
        """See `Runner.start`."""
        self._sink.start(plan)
        return TeeStep(self._sink, plan.step_id, _attempt(self._sink, plan.step_id, self._runner.start, plan))

    def reset(self) -> None:
        """See `Runner.reset`."""
        self._sink.reset()
        self._runner.reset()

    def write_params(self, updates: ParamUpdates) -> None:
        """See `Runner.write_params`."""
        self._sink.write_params(updates)
        self._runner.write_params(updates)
        self._sink.end_write()

    def warm_thread(self) -> None:
        """See `Runner.warm_thread`."""
        self._sink.warm_thread()
        self._runner.warm_thread()


class TeeStep:
    """A `StartedStep` whose calls the sink is told of."""

    __slots__ = ("_sink", "_started", "_step_id")

    def __init__(self, sink: CallSink, step_id: int, started: StartedStep) -> None:
        self._sink, self._step_id, self._started = sink, step_id, started

    def sample(self, mask: Any = None) -> TeeFuture:
        """See `StartedStep.sample`."""
        self._sink.sample(self._step_id, mask)
        return TeeFuture(self._sink, self._step_id, _attempt(self._sink, self._step_id, self._started.sample, mask))


class TeeFuture:
    """A `StepFuture` whose result the sink is told of."""

    __slots__ = ("_future", "_sink", "_step_id")

    def __init__(self, sink: CallSink, step_id: int, future: StepFuture) -> None:
        self._sink, self._step_id, self._future = sink, step_id, future

    def wait(self) -> None:
        """See `StepFuture.wait`."""
        _attempt(self._sink, self._step_id, self._future.wait)

    def result(self) -> StepOutputs:
        """See `StepFuture.result`."""
        outputs: StepOutputs = _attempt(self._sink, self._step_id, self._future.result)
        self._sink.finish(self._step_id, outputs)
        return outputs


def _attempt(sink: CallSink, step_id: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function, and tells the sink what it raises."""
    try:
        return function(*arguments)
    except BaseException as error:
        sink.fail(step_id, error)
        raise
