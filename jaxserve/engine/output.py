"""From committed token ids to `RequestOutput`s: text and stop strings."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, Any

from jaxserve.engine.logprobs import LogprobReader, PromptLogprobs
from jaxserve.errors import JaxServeError
from jaxserve.request import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from jaxserve.sampling_params import OutputKind

if TYPE_CHECKING:
    from jaxserve.scheduler import Sequence
    from jaxserve.tokenizers import DetokenizerStream, Tokenizer


class StopMatcher:
    """Finds the first stop string in a growing text, looking at each character a bounded number of times."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._reach = max(map(len, stops)) - 1  # characters that may be the beginning of a stop string
        self._tail = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Adds text; returns (text that cannot belong to a stop string, the stop string found or None)."""
        text = self._tail + piece
        found = min(((at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            self._tail = ""
            return text[: found[0]], found[2]
        keep = self._num_held(text)
        self._tail = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """Returns the text held back, at the end of the text."""
        tail, self._tail = self._tail, ""
        return tail

    def _num_held(self, text: str) -> int:
        for length in range(min(self._reach, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class RequestStream:
    """The joint output of a request's sequences."""

    def __init__(self, first: Sequence, reader: LogprobReader) -> None:
        request, params = first.request, first.request.params
        self.first = first  # the sequence that computes the prompt
        self.num_open = params.n  # unfinished sequences
        self.done: list[CompletionOutput] = []  # finished completions, with OutputKind.FINAL_ONLY
        self.shows_progress = params.output_kind is not OutputKind.FINAL_ONLY
        self.prompt_token_ids = list(request.prompt_token_ids)  # shared by all outputs of the request
        self.embedding: list[float] | None = None
        self._error: JaxServeError | None = None  # a finished sequence's, with OutputKind.FINAL_ONLY
        self.prompt_logprobs: PromptLogprobs | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = PromptLogprobs(request.prompt_token_ids, params.prompt_logprobs, reader)

    def collect(self, output: RequestOutput) -> RequestOutput | None:
        """Takes a sequence's last output; returns the output to show now, or None with FINAL_ONLY until all ended."""
        self.num_open -= 1
        output.finished = self.num_open == 0
        if self.shows_progress:
            return output
        self.done += output.outputs
        output.error = self._error = output.error or self._error
        output.outputs = sorted(self.done, key=lambda completion: completion.index)
        return output if output.finished else None


class OutputStream:
    """The output of one sequence, as the user will read it."""

    def __init__(
        self,
        sequence: Sequence,
        group: RequestStream,
        tokenizer: Tokenizer | None,
        reader: LogprobReader,
        clock: Callable[[], float],
    ) -> None:
        params = sequence.request.params
        self.sequence, self.group = sequence, group
        self.num_logprobs, self._reader, self._clock = params.logprobs, reader, clock
        self._logprobs: list[TokenLogprobs] = []
        self._cumulative_logprob = 0.0
        self._is_delta = params.output_kind is OutputKind.DELTA
        self.shows_progress = params.output_kind is not OutputKind.FINAL_ONLY
        self._stops = StopMatcher(params.stop) if params.stop else None
        self._searched_from = sequence.num_prompt_tokens + params.min_tokens  # the first token searched for stops
        self._detokenizer: DetokenizerStream | None = None
        if tokenizer is not None and params.detokenize:
            prompt_ids = sequence.request.prompt_token_ids
            self._detokenizer = tokenizer.new_stream(
                params.skip_special_tokens, prompt_ids, params.spaces_between_special_tokens
            )
        self._push = self._detokenizer.push if self._detokenizer is not None else None
        self._hides_stop = not params.include_stop_str_in_output
        self._hidden = sequence.stop_ids if self._hides_stop else ()  # ids that give no text
        self._request_id, self._prompt = sequence.request.request_id, sequence.request.prompt
        self._pieces: list[str] = []
        self._first_token = sequence.num_prompt_tokens  # index of the first token in the next output
        self.end_token = sequence.num_prompt_tokens  # index after the last pushed token
        self._first_token_time: float | None = None
        self._verified: list[tuple[int, int]] = []  # (drafts, accepted) of each step with drafts
        self._num_drafts = self._num_accepted = 0  # their sums

    def push(self, run: Ids[int]) -> str | None:
        """Adds tokens, up to one that completes a stop string; returns that string, or None."""
        if self.sequence.num_draft_tokens != self._num_drafts:
            self._note_drafts()
        if self._first_token_time is None:
            self._first_token_time = self._clock()
        if self._push is None:
            self.end_token += len(run)
            return None
        for token_id in run:
            self.end_token += 1
            if token_id in self._hidden:
                continue
            piece = self._push(token_id)
            if self._stops is None:
                self._pieces.append(piece)
            elif piece and (stop := self._add(piece)) is not None:
                return stop
        return None

    def add_logprobs(self, logprobs: Any, first_line: int, run: Ids[int]) -> None:
        """Adds the log-probabilities of a run's tokens, if requested; their lines begin at `first_line`."""
        if self.num_logprobs is None:
            return
        for line, token_id in enumerate(run, first_line):
            found = self._reader.read(logprobs, line, token_id, self.num_logprobs)
            self._logprobs.append(found)
            self._cumulative_logprob += found[token_id].logprob

    def flush(self) -> str | None:
        """Adds the text held back, at the sequence's end; returns the stop string that it completes, or None."""
        if self._detokenizer is None:
            return None
        stop = self._add(self._detokenizer.flush())
        if stop is None and self._stops is not None:
            self._pieces.append(self._stops.flush())
        return stop

    def make_output(self, stop_string: str | None = None) -> RequestOutput:
        """Returns the sequence's output so far; with OutputKind.DELTA, the part since the last call."""
        sequence = self.sequence
        token_ids = sequence.token_ids[self._first_token : self.end_token]
        completion = CompletionOutput(sequence.index, "".join(self._pieces), token_ids)
        if self.num_logprobs is not None:
            completion.cumulative_logprob, completion.logprobs = self._cumulative_logprob, self._logprobs.copy()
            if self._is_delta:
                self._logprobs.clear()
        if self._is_delta:
            self._pieces.clear()
            self._first_token = self.end_token
        output = RequestOutput(
            self._request_id,
            self._prompt,
            self.group.prompt_token_ids,
            [completion],
            False,
            self.group.first.num_cached_tokens,
        )
        if self.group.prompt_logprobs is not None:
            output.prompt_logprobs = self.group.prompt_logprobs.found
        if sequence.finish_reason is not None:
            completion.finish_reason = str(sequence.finish_reason)
            completion.stop_reason = sequence.stop_token_id if stop_string is None else stop_string
            output.metrics, output.error = self._measure(), sequence.error
            output.embedding = self.group.embedding if sequence.error is None else None
        return output

    def _add(self, piece: str) -> str | None:
        if self._stops is None or self.end_token <= self._searched_from:
            self._pieces.append(piece)
            return None
        certain, stop = self._stops.push(piece)
        self._pieces.append(certain)
        if stop is not None and not self._hides_stop:
            self._pieces.append(stop)
        return stop

    def _note_drafts(self) -> None:
        """Adds a step's drafts: what the scheduler counted since the last one."""
        drafts, accepted = self.sequence.num_draft_tokens, self.sequence.num_accepted_tokens
        self._verified.append((drafts - self._num_drafts, accepted - self._num_accepted))
        self._num_drafts, self._num_accepted = drafts, accepted

    def _measure(self) -> RequestMetrics:
        sequence = self.sequence
        if sequence.num_draft_tokens != self._num_drafts:  # of a step whose run was dropped
            self._note_drafts()
        return RequestMetrics(
            arrival_time=sequence.request.arrival_time,
            first_scheduled_time=sequence.first_scheduled_time,
            first_token_time=self._first_token_time,
            finished_time=self._clock(),
            num_preemptions=sequence.num_preemptions,
            num_draft_tokens=sequence.num_draft_tokens,
            num_accepted_tokens=sequence.num_accepted_tokens,
            verified=tuple(self._verified),
        )
