"""Answers of the engine to one HTTP request: the reader of its outputs, and the response that a protocol writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jaxserve.errors import InvalidRequestError, TokenizerError
from jaxserve.request import Request, RequestOutput, TokenLogprobs
from jaxserve.server import json_text
from jaxserve.server.body import prepare
from jaxserve.server.conversation import Conversation, make_parser, make_request
from jaxserve.server.errors import ApiError
from jaxserve.server.events import AnswerEnded, ReasoningDelta, Update
from jaxserve.server.generation import Account, Generation, name_requests
from jaxserve.server.json_text import make_json_response, run_by_size, to_json
from jaxserve.server.protocol.fields import SamplingFields
from jaxserve.server.server_state import ServerState
from jaxserve.server.stream import PING_SECONDS, EventStream, run_while_connected
from jaxserve.server.tools import AnswerParser
from jaxserve.tokenizers.tokenizer import TokenNamer


class ReasoningCounter:
    """Counts the tokens of a choice inside reasoning, without its marks.

    It has a parser of its own, which reads the tokens one by one, so that the count depends on them alone. The text of
    outputs comes in other pieces, and is held back in front of stop strings.
    """

    def __init__(self, parser: AnswerParser, namer: TokenNamer) -> None:
        self._parser, self._namer = parser, namer

    @property
    def is_over(self) -> bool:
        """Whether no reasoning can follow."""
        return not self._parser.may_reason

    def count(self, token_ids: Sequence[int]) -> int:
        """Returns how many of the next tokens are reasoning."""
        found = 0
        for token_id in token_ids:
            if not self._parser.may_reason:
                break
            was_reasoning = self._parser.is_reasoning
            self._parser.push(self._namer.name(token_id))
            found += was_reasoning and self._parser.is_reasoning
        return found


class AnswerReader:
    """Reads the outputs of one HTTP request's engine requests as events. Its choices are numbered across them.

    Args:
        n: completions of each request.
        make_parser: makes the parser of a choice.
        make_counter: makes its counter of reasoning; None: there is no reasoning.
        shows_reasoning: False drops it.
    """

    def __init__(
        self,
        n: int,
        make_parser: Callable[[], AnswerParser] = AnswerParser,
        make_counter: Callable[[], ReasoningCounter | None] = lambda: None,
        *,
        shows_reasoning: bool = True,
    ) -> None:
        self._n, self._make_parser, self._make_counter = n, make_parser, make_counter
        self._shows_reasoning = shows_reasoning
        self._parsers: dict[int, AnswerParser] = {}  # by choice
        self._counters: dict[int, ReasoningCounter | None] = {}  # by choice

    def read(self, position: int, output: RequestOutput) -> Iterator[Update]:
        """Yields what an output of the request at this position adds to each of its choices."""
        for completion in output.outputs:
            index = position * self._n + completion.index
            parser, reason = self._parsers.get(index), completion.finish_reason
            if begins := parser is None:
                parser = self._parsers[index] = self._make_parser()
                self._counters[index] = self._make_counter()
            events = parser.push(completion.text)
            if reason is not None:
                events += parser.finish()
                reason = "calls" if reason == "stop" and parser.saw_calls else reason
                events.append(AnswerEnded(reason, completion.stop_reason))
            if not self._shows_reasoning:
                events = [event for event in events if not isinstance(event, ReasoningDelta)]
            num_reasoning = 0
            if (counter := self._counters[index]) is not None:
                num_reasoning = counter.count(completion.token_ids)
                self._counters[index] = None if counter.is_over else counter
            yield Update(index, begins, events, completion, output, num_reasoning)


class Writer(Protocol):
    """A protocol's form of an answer, whole or as a stream.

    `usage` counts the tokens of the HTTP request so far; `metrics` are what `Generation.describe_metrics` returns.
    """

    done: bytes  # behind the last event of every stream
    ping: Callable[[], bytes] | None  # makes a piece for a stream that nothing has come for; None: it waits in silence

    def render_error(self, error: ApiError) -> bytes:
        """Returns the event that ends a failed stream."""
        ...

    def write(self, update: Update, usage: Account) -> Iterable[bytes]:
        """Returns the server-sent events that an update becomes."""
        ...

    def end(self, usage: Account, metrics: Mapping[str, Any]) -> Iterable[bytes]:
        """Returns the server-sent events behind the last update."""
        ...

    def fold(self, updates: Sequence[Update], usage: Account, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the whole answer, of one update for each choice. Its texts may come in several deltas each."""
        ...


async def answer[B: SamplingFields](
    http: HttpRequest,
    body: B,
    state: ServerState,
    read: Callable[[B, ServerState], Conversation],
    make_writer: Callable[[Conversation, Request], Writer],
) -> Response:
    """Returns the response to a body that `read` reads as a conversation.

    Raises:
        InvalidRequestError, TokenizerError: the conversation cannot be answered.
        ApiError: as `respond`, and as `prepare`.
    """

    def make(body: B, state: ServerState, options: dict[str, Any]) -> tuple[Conversation, Request]:
        conversation = read(body, state)
        return conversation, make_request(conversation, state, options)

    conversation, request = await prepare(http, body, state, make)
    if conversation.images:  # a long answer must not hold their data
        body.drop_conversation()
        conversation = replace(conversation, images=())
    (request,) = name_requests([request], http)
    parse = partial(make_parser, conversation, request, state)
    count = partial(_make_counter, parse, request, state)
    reader = AnswerReader(request.params.n, parse, count, shows_reasoning=conversation.shows_reasoning)
    return await respond(http, body, state, [request], reader, make_writer(conversation, request), operation="chat")


def _make_counter(
    make_parser: Callable[[], AnswerParser], request: Request, state: ServerState
) -> ReasoningCounter | None:
    """Returns a counter for one choice; None if it has no reasoning, or the tokenizer gives tokens no text."""
    parser, tokenizer = make_parser(), state.engine.tokenizer
    if not parser.may_reason or tokenizer is None:
        return None
    try:
        return ReasoningCounter(parser, TokenNamer(tokenizer, False, request.prompt_token_ids))
    except TokenizerError:
        return None


async def respond(
    http: HttpRequest,
    body: SamplingFields,
    state: ServerState,
    requests: Sequence[Request],
    reader: AnswerReader,
    writer: Writer,
    *,
    operation: str,
) -> Response:
    """Runs the requests and returns the response, streamed or whole.

    Raises:
        InvalidRequestError: the prompts have too many log-probabilities.
        ApiError: the engine refused a request, or failed on it before the first output.
    """
    _check_prompt_logprobs(requests, state)
    generation = Generation(state, requests, http, operation=operation)
    if not body.stream:
        return make_json_response(await run_while_connected(http, _collect(generation, reader, writer), state))
    patience = None if writer.ping is None else PING_SECONDS
    outputs = await run_while_connected(http, generation.begin(patience), state)
    shows_prompt = bool(body.return_token_ids or getattr(body, "echo", False))
    pieces = _stream(outputs, generation, reader, writer, shows_prompt=shows_prompt)
    return EventStream(pieces, state, end=writer.done, render_error=writer.render_error, ping=writer.ping)


async def _collect(generation: Generation, reader: AnswerReader, writer: Writer) -> bytes:
    """Returns the whole answer as JSON."""
    outputs = [numbered async for numbered in generation.outputs()]

    def write() -> bytes:
        updates = [update for numbered in outputs for update in reader.read(*numbered)]
        generation.account.reasoning_tokens = sum(update.num_reasoning for update in updates)
        found = writer.fold(updates, generation.account, generation.describe_metrics())
        return to_json(found, is_ascii=False).encode()

    return await run_by_size(write, sum(_measure(output, shows_prompt=True) for _, output in outputs))


async def _stream(
    outputs: AsyncGenerator[tuple[int, RequestOutput]],
    generation: Generation,
    reader: AnswerReader,
    writer: Writer,
    *,
    shows_prompt: bool,
) -> AsyncGenerator[bytes]:
    usage = generation.account

    def write(position: int, output: RequestOutput) -> list[bytes]:
        updates = list(reader.read(position, output))
        usage.reasoning_tokens += sum(update.num_reasoning for update in updates)
        return [piece for update in updates for piece in writer.write(update, usage)]

    written = 0  # since the event loop's last turn: many outputs may be there at once
    async with aclosing(outputs):
        async for position, output in outputs:
            size = _measure(output, shows_prompt=shows_prompt)
            written += size
            if written > json_text.MOST_HERE:
                written = 0
                await asyncio.sleep(0)
            for piece in await run_by_size(partial(write, position, output), size):
                yield piece
        for piece in writer.end(usage, generation.describe_metrics()):
            yield piece


def _measure(output: RequestOutput, *, shows_prompt: bool) -> int:
    """Returns about how many values an output becomes: token ids and log-probabilities."""
    size = len(output.prompt_token_ids) if shows_prompt else 0
    if output.prompt_logprobs:
        size += _count_entries(output.prompt_logprobs)
    for completion in output.outputs:
        size += len(completion.token_ids)
        if completion.logprobs:
            size += _count_entries(completion.logprobs)
    return size


def _count_entries(found: Sequence[TokenLogprobs | None]) -> int:
    return len(found) * len(found[-1] or ())  # about as many at each token


def _check_prompt_logprobs(requests: Sequence[Request], state: ServerState) -> None:
    """Refuses prompts whose log-probabilities would fill memory, and keep a thread busy for seconds."""
    asked = [(len(each.prompt_token_ids), each.params.prompt_logprobs) for each in requests]
    total = sum(length * (1 + count) for length, count in asked if count is not None)
    most = state.config.limits.max_prompt_logprobs
    if total > most:
        message = (
            f"the prompts have {total:,} log-probabilities together, and one answer may have {most:,} "
            "(max_prompt_logprobs); ask for fewer at each token, or send the prompts in several requests"
        )
        raise InvalidRequestError(message, field="prompt_logprobs", value=total)
