"""From committed token ids to `RequestOutput`s: text and stop strings."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, Any

from jaxserve.engine.logprobs import LogprobReader, PromptLogprobs, add_text
from jaxserve.errors import JaxServeError
from jaxserve.request import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    Task,
    TokenLogprobs,
)
from jaxserve.sampling_params import OutputKind

if TYPE_CHECKING:
    from jaxserve.core.scheduler import Sequence
    from jaxserve.tokenizers import DetokenizerStream, Tokenizer, TokenNamer


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
        self.embedding: Any = None  # see `RequestOutput.embedding`
        self._error: JaxServeError | None = None  # a finished sequence's, with OutputKind.FINAL_ONLY
        self.prompt_logprobs: PromptLogprobs | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = PromptLogprobs(request, params.prompt_logprobs, reader)

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
    """The output of one sequence, as the user will read it.

    `stop_string` is the one that was found, or None.
    """

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
        self._namer: TokenNamer | None = None
        if params.logprobs is not None:
            self._namer = reader.open_namer(
                params.skip_special_tokens, sequence.request.prompt_token_ids, params.spaces_between_special_tokens
            )
        self._cumulative_logprob = 0.0
        self._is_delta = params.output_kind is OutputKind.DELTA
        self.shows_progress = params.output_kind is not OutputKind.FINAL_ONLY
        self._stops = StopMatcher(params.stop) if params.stop else None
        self._searched_from = sequence.num_prompt_tokens + params.min_tokens  # the first token searched for stops
        self._detokenizer: DetokenizerStream | None = None
        if tokenizer is not None and params.detokenize and sequence.request.task is not Task.POOL:
            prompt_ids = sequence.request.prompt_token_ids
            self._detokenizer = tokenizer.new_stream(
                params.skip_special_tokens, prompt_ids, params.spaces_between_special_tokens
            )
        self._push = self._detokenizer.push if self._detokenizer is not None else _give_no_text
        self._hides_stop = not params.include_stop_str_in_output
        self._hidden = sequence.stop_ids if self._hides_stop else ()  # ids that give no text
        self._index = sequence.index
        self._request_id, self._prompt = sequence.request.request_id, sequence.request.prompt
        self._pieces: list[str] = []
        self._first_token = sequence.num_prompt_tokens  # index of the first token in the next output
        self.end_token = sequence.num_prompt_tokens  # index after the last pushed token
        self._first_token_time: float | None = None
        self.stop_string: str | None = None

    def push(self, run: Ids[int], logprobs: Any = None, first_line: int = 0) -> RequestOutput | None:
        """Adds a run, up to the token that completes a stop string; returns what to show of it now, if anything.

        Nothing is shown once the sequence has ended or a stop string was found: `make_last_output` shows the rest.

        Args:
            logprobs: see `StepOutputs`; None if the step has none.
            first_line: of `logprobs`, that of the run's first id.
        """
        if self._first_token_time is None:
            self._first_token_time = self._clock()
        before = self.end_token
        if self._stops is None:
            self.end_token = before + len(run)
            for token_id in run:
                if token_id not in self._hidden and (piece := self._push(token_id)):
                    self._pieces.append(piece)
        else:
            self.stop_string = self._search(run)
        if logprobs is not None and self.num_logprobs is not None:
            for line, token_id in enumerate(run[: self.end_token - before], first_line):
                text = None if self._namer is None else self._namer.name(token_id)
                found = self._reader.read(logprobs, line, token_id, self.num_logprobs, text)
                self._logprobs.append(found)
                self._cumulative_logprob += found[token_id].logprob
        if not self.shows_progress or self.stop_string is not None or self.sequence.finish_reason is not None:
            return None
        return self.make_output()

    def flush(self) -> str | None:
        """Adds the text held back, at the sequence's end; returns the stop string that it completes, or None."""
        if self._detokenizer is None:
            return None
        if self._namer is not None and self._logprobs and (rest := self._namer.flush()):
            self._logprobs[-1] = add_text(self._logprobs[-1], rest)
        stop = self._add(self._detokenizer.flush())
        if stop is None and self._stops is not None:
            self._pieces.append(self._stops.flush())
        return stop

    def make_output(self) -> RequestOutput:
        """Returns the sequence's output so far; with OutputKind.DELTA, the part that was not shown yet."""
        token_ids = self.sequence.token_ids[self._first_token : self.end_token]
        completion = CompletionOutput(self._index, "".join(self._pieces), token_ids)
        if self.num_logprobs is not None:
            completion.cumulative_logprob, completion.logprobs = self._cumulative_logprob, self._logprobs.copy()
        if self._is_delta:
            self._pieces.clear()
            self._logprobs.clear()
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
        return output

    def make_last_output(self, stop_string: str | None) -> RequestOutput:
        """Returns the output of a sequence that has ended, with the reason; see `make_output`."""
        sequence, output = self.sequence, self.make_output()
        (completion,) = output.outputs
        completion.finish_reason = str(sequence.finish_reason)
        completion.stop_reason = sequence.stop_token_id if stop_string is None else stop_string
        output.metrics, output.error = self._measure(), sequence.error
        output.embedding = self.group.embedding if sequence.error is None else None
        return output

    def _search(self, run: Ids[int]) -> str | None:
        """Adds tokens, up to one that completes a stop string; returns that string, or None."""
        for token_id in run:
            self.end_token += 1
            if token_id not in self._hidden and (piece := self._push(token_id)):
                stop = self._add(piece)
                if stop is not None:
                    return stop
        return None

    def _add(self, piece: str) -> str | None:
        if self._stops is None or self.end_token <= self._searched_from:
            self._pieces.append(piece)
            return None
        certain, stop = self._stops.push(piece)
        self._pieces.append(certain)
        if stop is not None and not self._hides_stop:
            self._pieces.append(stop)
        return stop

    def _measure(self) -> RequestMetrics:
        sequence = self.sequence
        return RequestMetrics(
            arrival_time=sequence.request.arrival_time,
            first_scheduled_time=sequence.first_scheduled_time,
            first_token_time=self._first_token_time,
            finished_time=self._clock(),
            num_preemptions=sequence.num_preemptions,
            num_draft_tokens=sum(drafts for drafts, _ in sequence.verified),
            num_accepted_tokens=sum(accepted for _, accepted in sequence.verified),
            verified=tuple(sequence.verified),
        )


class PassingStream(OutputStream):
    """A stream of deltas without stop strings and log-probabilities: there is nothing to keep of a run."""

    def push(self, run: Ids[int], logprobs: Any = None, first_line: int = 0) -> RequestOutput | None:
        """See `OutputStream.push`."""
        if self._first_token_time is None or self.sequence.finish_reason is not None:
            return super().push(run)
        self._first_token = self.end_token = self.end_token + len(run)
        text, group = "", self.group
        for token_id in run:
            if token_id not in self._hidden:
                text += self._push(token_id)
        return _make_progress(
            self._request_id,
            self._prompt,
            group.prompt_token_ids,
            group.first.num_cached_tokens,
            self._index,
            text,
            [*run],
        )


def open_stream(
    sequence: Sequence,
    group: RequestStream,
    tokenizer: Tokenizer | None,
    reader: LogprobReader,
    clock: Callable[[], float],
) -> OutputStream:
    """Returns the stream of a new sequence."""
    params = sequence.request.params
    keeps = params.stop or params.logprobs is not None or params.prompt_logprobs is not None
    passes = params.output_kind is OutputKind.DELTA and not keeps
    return (PassingStream if passes else OutputStream)(sequence, group, tokenizer, reader, clock)


def _give_no_text(token_id: int) -> str:
    """Stands in for a tokenizer's stream where there is no tokenizer, or no text is wanted."""
    return ""


def _make_progress(
    request_id: str,
    prompt: str | None,
    prompt_token_ids: list[int],
    num_cached_tokens: int,
    index: int,
    text: str,
    token_ids: list[int],
) -> RequestOutput:
    """Returns the output of one completion that goes on.

    Every row has one in every step, and to call the two classes takes half as long again as this.
    """
    completion = object.__new__(CompletionOutput)
    completion.index, completion.text, completion.token_ids = index, text, token_ids
    completion.finish_reason = completion.stop_reason = completion.cumulative_logprob = completion.logprobs = None
    output = object.__new__(RequestOutput)
    output.request_id, output.prompt, output.prompt_token_ids = request_id, prompt, prompt_token_ids
    output.outputs, output.finished, output.num_cached_tokens = [completion], False, num_cached_tokens
    output.metrics = output.error = output.prompt_logprobs = output.embedding = None
    return output
