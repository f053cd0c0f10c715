"""The loop: plan a step, dispatch it, commit the step before it, return its outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, Any

from jaxserve.core.runtime.protocol import Runner, StartedStep, StepFuture
from jaxserve.core.scheduler import Commit, Deadlines, Scheduler, Sequence, StepPlan
from jaxserve.engine.engine_counts import AttentionStats, EngineCounts
from jaxserve.engine.grammars import MASK_TIMEOUT, GrammarRows
from jaxserve.engine.logprobs import LogprobReader
from jaxserve.engine.output import OutputStream, RequestStream, open_stream
from jaxserve.engine.prompt_outputs import hand_out_prompts
from jaxserve.errors import DeadlineError, DeviceStepError, JaxServeError, QueueFullError
from jaxserve.request import FinishReason, Request, RequestOutput

if TYPE_CHECKING:
    from jaxserve.tokenizers import Tokenizer


InFlight = tuple[StepPlan, StepFuture]


class Engine:
    """Owns the loop and the output streams; knows no device arrays and no files.

    With `overlap`, step N+1 is planned and dispatched while the device runs step N. Without it, every step is committed
    before the next is planned. Both give the same tokens.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        vocab_size: int = 0,
        tokenizer: Tokenizer | None = None,
        overlap: bool = True,
        attention: AttentionStats | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.attention = attention
        self.counts = EngineCounts(scheduler.clock)
        waits = scheduler.limits.options.deterministic or scheduler.limits.keeps_states
        self._grammars = GrammarRows(vocab_size, None if waits else MASK_TIMEOUT)
        self._deadlines = Deadlines()
        self._clock = scheduler.clock
        self._tokenizer = tokenizer
        self._overlap = overlap
        self._reader = LogprobReader(tokenizer)
        self._streams: dict[Sequence, OutputStream] = {}
        self._requests: dict[str, list[OutputStream]] = {}  # unfinished ones
        self._in_flight: InFlight | None = None
        self._num_compiles = runner.num_compiles  # at the last commit

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished or self._in_flight is not None

    def add_request(self, request: Request) -> None:
        """Queues a request; raises InvalidRequestError or CapacityError if it can never run."""
        if not self.has_unfinished:
            self.counts.begin()
        sequences = self.scheduler.add(request)
        if request.deadline is not None:
            self._deadlines.add(request.request_id, request.deadline)
        group = RequestStream(sequences[0], self._reader)
        streams = [open_stream(sequence, group, self._tokenizer, self._reader, self._clock) for sequence in sequences]
        self._requests[request.request_id] = streams
        self._streams.update(zip(sequences, streams, strict=True))
        self._grammars.add(sequences)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Ends a request and returns its last output; None if it is unknown or has ended."""
        return self._end_request(request_id, FinishReason.ABORT)

    def _end_request(
        self, request_id: str, reason: FinishReason, error: JaxServeError | None = None
    ) -> RequestOutput | None:
        ended = self.scheduler.finish(request_id, reason, error)
        streams = [self._streams[sequence] for sequence in ended]
        if not streams:
            return None
        for stream in streams:
            stream.flush()
        outputs = [self._close(stream, None) for stream in streams]
        last = outputs[-1]
        assert last is not None  # the last to end is always shown
        if streams[0].group.shows_progress:
            last.outputs = sorted((o.outputs[0] for o in outputs if o), key=lambda completion: completion.index)
        return last

    def abort_all(self) -> list[RequestOutput]:
        """Ends every request and returns their last outputs."""
        return [output for request_id in list(self._requests) if (output := self.abort_request(request_id)) is not None]

    def step(self) -> list[RequestOutput]:
        """Ends requests past their deadline and runs one turn of the loop; returns the new outputs."""
        if self._deadlines and (late := self._deadlines.pop_expired(self._clock())):
            return [*self._end_late(late), *self._turn()]
        return self._turn()

    def _end_late(self, request_ids: list[str]) -> list[RequestOutput]:
        outputs = []
        for request_id in request_ids:
            error = DeadlineError(f"request {request_id}: its deadline passed before it was finished")
            outputs.append(self._end_request(request_id, FinishReason.TIMEOUT, error))
        return [output for output in outputs if output is not None]

    def displace(self, displaced: Iterable[tuple[str, QueueFullError]]) -> list[RequestOutput]:
        """Ends the requests that `find_room` displaced, each with its error; returns their last outputs."""
        outputs = [self._end_request(name, FinishReason.ERROR, error) for name, error in displaced]
        return [output for output in outputs if output is not None]

    def _turn(self) -> list[RequestOutput]:
        ready, self._in_flight = self._in_flight, None
        plan = self.scheduler.plan()
        if plan is None:
            return self._commit(ready)
        if self._grammars.is_needed(plan, self.scheduler.batch):
            plan = dataclasses.replace(plan, is_masked=True)
        try:
            started = self.runner.start(plan)
            if not plan.is_masked:
                self._in_flight = plan, started.sample()
        except Exception as error:
            return [*self._commit(ready), *self._recover(plan, error)]
        if plan.is_masked:
            return self._step_masked(plan, started, ready)
        if not self._overlap:
            ready, self._in_flight = self._in_flight, None
        return self._commit(ready)

    def _step_masked(self, plan: StepPlan, started: StartedStep, ready: InFlight | None) -> list[RequestOutput]:
        """Commits the step before, then masks and samples this one, whose forward pass runs meanwhile."""
        num_faults = self.counts.num_faults
        outputs = self._commit(ready)
        if self.counts.num_faults > num_faults:
            return outputs  # the recovery reset the device and requeued this step's rows
        try:
            masks = self._grammars.make_masks(plan, self.scheduler.batch)
            future = started.sample(masks.mask)
        except Exception as error:
            return [*outputs, *self._recover(plan, error)]
        for sequence in masks.late:
            self.scheduler.batch.compute_again(sequence, plan.width)
        for sequence, token_ids in masks.jumps:
            outputs += self._show(self.scheduler.extend(sequence, token_ids, plan.width))
        for sequence, error in masks.failed:
            self.scheduler.finish_sequence(sequence, FinishReason.ERROR, error)
            outputs += self._show(Commit(finished=[sequence]))
        if self._overlap:
            self._in_flight = plan, future
            return outputs
        return [*outputs, *self._commit((plan, future))]

    def reset(self) -> None:
        """Resets the device's state: running sequences are requeued; the step in flight and cached pages are lost."""
        self._in_flight = None
        self.scheduler.requeue_running()
        self.runner.reset()

    def drain(self) -> list[RequestOutput]:
        """Commits the step in flight without planning another, and returns its outputs; the device is then idle."""
        ready, self._in_flight = self._in_flight, None
        return self._commit(ready)

    def _commit(self, ready: InFlight | None) -> list[RequestOutput]:
        if ready is None:
            return []
        plan, future = ready
        try:
            outputs = self.counts.wait(future)
        except Exception as error:
            return self._recover(plan, error)
        num_compiles, self._num_compiles = self._num_compiles, self.runner.num_compiles
        self.scheduler.add_time(plan, self.counts.step_seconds, compiled=self._num_compiles != num_compiles)
        hand_out_prompts(plan, outputs, self.scheduler.batch.by_ticket, self._streams)
        lines = None if outputs.logprobs is None else outputs.find_lines(plan)
        return self._show(self.scheduler.commit(plan, outputs), outputs.logprobs, lines)

    def _show(
        self, commit: Commit, logprobs: Any = None, lines: Mapping[int, int] | None = None
    ) -> list[RequestOutput]:
        """Returns the outputs of a commit. Line `lines[ticket]` of `logprobs` is that of the run's first id."""
        outputs: list[RequestOutput] = []
        streams, has_grammars = self._streams, bool(self._grammars)
        self.counts.num_tokens += sum(map(len, commit.runs))
        for sequence, brought in zip(commit.sequences, commit.runs, strict=True):
            stream = streams[sequence]
            run = self._follow_grammar(sequence, brought) if has_grammars else brought
            output = stream.push(run) if lines is None else stream.push(run, logprobs, lines[sequence.ticket])
            if output is None and (sequence.finish_reason is not None or stream.stop_string is not None):
                output = self._close(stream, stream.flush() if stream.stop_string is None else stream.stop_string)
            if output is not None:
                outputs.append(output)
        for sequence in commit.finished:  # sequences that ended without a token
            stream = streams.get(sequence)
            if stream is not None and (output := self._close(stream, stream.flush())) is not None:
                outputs.append(output)
        return outputs

    def _follow_grammar(self, sequence: Sequence, run: Ids[int]) -> Ids[int]:
        """Returns the part of a run that the sequence's grammar accepts; ends the sequence where the grammar does."""
        count, reason, error = self._grammars.accept(sequence, run)
        if reason is None:
            return run
        precedes = count < len(run) or sequence.error is not None  # the grammar's end precedes the scheduler's
        if precedes or sequence.finish_reason is FinishReason.LENGTH:  # a form that is complete was not cut
            self._cut(sequence, len(sequence.token_ids) - len(run) + count, reason, error)
        else:
            self.scheduler.finish_sequence(sequence, reason, error)
        return run[:count]

    def _cut(
        self, sequence: Sequence, num_tokens: int, reason: FinishReason, error: JaxServeError | None = None
    ) -> None:
        """Ends a sequence after its first `num_tokens` tokens and drops the rest."""
        self.counts.num_tokens -= len(sequence.token_ids) - num_tokens
        self.scheduler.cut(sequence, num_tokens, reason, error)

    def _close(self, stream: OutputStream, stop_string: str | None) -> RequestOutput | None:
        """Ends a sequence's stream; returns the output to show now, if any."""
        sequence = stream.sequence
        if stop_string is not None:
            self._cut(sequence, stream.end_token, FinishReason.STOP)
        del self._streams[sequence]
        self._grammars.drop(sequence)
        request_id = sequence.request.request_id
        self._requests[request_id].remove(stream)
        if not self._requests[request_id]:
            del self._requests[request_id]
            self._deadlines.drop(request_id)
        return stream.group.collect(stream.make_last_output(stop_string))

    def _recover(self, failed: StepPlan, error: Exception) -> list[RequestOutput]:
        """Ends the sequences of a failed step, requeues all others and resets the device; returns the new outputs.

        The failed step consumed the donated state, so a step dispatched after it is lost too; its rows are requeued.
        """
        self.counts.num_faults += 1
        typed = error if isinstance(error, JaxServeError) else DeviceStepError(f"step {failed.step_id}: {error}")
        outputs = []
        for ticket in failed.tickets:
            sequence = self.scheduler.batch.by_ticket.get(ticket)
            if sequence is not None:
                self.scheduler.finish_sequence(sequence, FinishReason.ERROR, typed)
                stream = self._streams[sequence]
                outputs.append(self._close(stream, stream.flush()))
        self.reset()
        return [output for output in outputs if output is not None]
