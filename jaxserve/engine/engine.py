"""The loop: plan a step, send it to the device, commit the one before it, show the tokens."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, Protocol

from jaxserve.engine.output import OutputStream
from jaxserve.errors import DeviceStepError, JaxServeError
from jaxserve.request import FinishReason, Request, RequestOutput
from jaxserve.scheduler import Commit, Scheduler, StepPlan

if TYPE_CHECKING:
    from jaxserve.tokenizers import Tokenizer


class StepFuture(Protocol):
    """A step that the device is working on."""

    def result(self) -> Ids[int]:
        """Waits, and returns one id per row of the plan (NON_FINITE: the row's logits were not finite)."""
        ...


class Runner(Protocol):
    """The device as the engine sees it; `tests/fake_device.py` is one that can be computed by hand."""

    def dispatch(self, plan: StepPlan) -> StepFuture:
        """Starts a step behind those already started, and returns at once."""
        ...

    def reset(self) -> None:
        """Rebuilds the state that a failed step consumed: zeroed pools, no rows."""
        ...


InFlight = tuple[StepPlan, StepFuture]


class Engine:
    """Owns the loop and the output streams; knows no arrays and no files.

    With `overlap`, step N+1 is planned and dispatched while the device runs step N: the step in flight is a value that
    `step` carries over. Without, every step is committed before the next is planned; both give the same tokens.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, *, tokenizer: Tokenizer | None = None, overlap: bool = True
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._tokenizer = tokenizer
        self._overlap = overlap
        self._streams: dict[str, OutputStream] = {}
        self._in_flight: InFlight | None = None

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished or self._in_flight is not None

    def add_request(self, request: Request) -> None:
        """Queues a request; raises InvalidRequestError or CapacityError when it can never run."""
        sequence = self.scheduler.add(request)
        self._streams[request.request_id] = OutputStream(sequence, self._tokenizer)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Ends a request and returns what it had produced; None when it is unknown or has ended."""
        if self.scheduler.finish(request_id, FinishReason.ABORT) is None:
            return None
        stream = self._streams.pop(request_id)
        stream.flush()
        return stream.make_output()

    def abort_all(self) -> list[RequestOutput]:
        """Ends every request."""
        return [output for request_id in list(self._streams) if (output := self.abort_request(request_id)) is not None]

    def step(self) -> list[RequestOutput]:
        """Runs one turn of the loop; returns what became visible."""
        ready, self._in_flight = self._in_flight, None
        plan = self.scheduler.plan()
        if plan is not None:
            try:
                self._in_flight = plan, self.runner.dispatch(plan)
            except Exception as error:
                return [*self._commit(ready), *self._recover(plan, error)]
            if not self._overlap:
                ready, self._in_flight = self._in_flight, None
        return self._commit(ready)

    def drain(self) -> list[RequestOutput]:
        """Commits the step in flight without planning another; afterwards the device is idle."""
        ready, self._in_flight = self._in_flight, None
        return self._commit(ready)

    def _commit(self, ready: InFlight | None) -> list[RequestOutput]:
        if ready is None:
            return []
        plan, future = ready
        try:
            token_ids = future.result()
        except Exception as error:
            return self._recover(plan, error)
        return self._show(self.scheduler.commit(plan, token_ids))

    def _show(self, commit: Commit) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        streams = self._streams
        for sequence, token_id in zip(commit.sequences, commit.token_ids, strict=True):
            stream = streams[sequence.request.request_id]
            stop_string = stream.push(token_id)
            if stop_string is not None or sequence.finish_reason is not None:
                outputs.append(self._close(stream, stop_string))
            elif stream.shows_progress:
                outputs.append(stream.make_output())
        for sequence in commit.finished:  # those that ended without a token
            if (stream := streams.get(sequence.request.request_id)) is not None:
                outputs.append(self._close(stream, None))
        return outputs

    def _close(self, stream: OutputStream, stop_string: str | None) -> RequestOutput:
        sequence = stream.sequence
        stop_string = stop_string if stop_string is not None else stream.flush()
        if stop_string is not None:
            self.scheduler.finish(sequence.request.request_id, FinishReason.STOP)
            sequence.finish_reason = FinishReason.STOP  # also where the length limit was reached at the same token
        del self._streams[sequence.request.request_id]
        return stream.make_output(stop_string)

    def _recover(self, failed: StepPlan, error: Exception) -> list[RequestOutput]:
        """Ends the requests of a failed step, requeues all others and gives the device a fresh state.

        The failed step consumed the donated state, so a step behind it is lost as well, through no fault of its rows.
        """
        self._in_flight = None
        typed = error if isinstance(error, JaxServeError) else DeviceStepError(f"step {failed.step_id}: {error}")
        outputs = []
        for ticket in (*failed.decode_tickets, *(chunk.ticket for chunk in failed.chunks)):
            sequence = self.scheduler.batch.by_ticket.get(ticket)
            if sequence is not None:
                self.scheduler.finish(sequence.request.request_id, FinishReason.ERROR, typed)
                outputs.append(self._close(self._streams[sequence.request.request_id], None))
        self.scheduler.requeue_running()
        self.runner.reset()
        return outputs
