"""Runs the engine requests of one HTTP request, and accounts for their tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request as HttpRequest

from jaxserve.request import Request, RequestMetrics, RequestOutput, ServiceTier
from jaxserve.sampling_params import OutputKind
from jaxserve.server.acceptance import describe_acceptance
from jaxserve.server.errors import to_api_error
from jaxserve.server.metrics import Tally
from jaxserve.server.protocol.fields import EngineFields
from jaxserve.server.request_context import get_context
from jaxserve.server.server_state import Phase, ServerState, not_serving


@dataclass(slots=True)
class Account:
    """Token counts of one HTTP request, over all its engine requests."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0  # of these, as `AnswerReader` counts them

    def to_usage(self) -> dict[str, Any]:
        """Returns the counts in OpenAI's format (`Usage`)."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


@dataclass(slots=True)
class _Running:
    """What is recorded of one engine request while it runs."""

    position: int  # its index among the HTTP request's
    request: Request
    tally: Tally  # what it counts in
    last_time: dict[int, float] = field(default_factory=dict)  # by completion: when its last chunk came
    num_tokens: dict[int, int] = field(default_factory=dict)  # by completion


class Generation:
    """The engine requests of one HTTP request, run together. Leaving `outputs` early aborts the unfinished ones.

    Args:
        counts_refusals: False if the caller tries again when the queue is full.
    """

    def __init__(
        self,
        state: ServerState,
        requests: Sequence[Request],
        http: HttpRequest,
        *,
        operation: str = "text_completion",
        counts_refusals: bool = True,
    ) -> None:
        self._state = state
        self._requests = requests
        self._http = http
        self._operation, self._counts_refusals = operation, counts_refusals
        self._records = {
            request.request_id: _Running(at, request, state.metrics.find_tally(request))
            for at, request in enumerate(requests)
        }
        self._engine = state.engine
        self._is_taken = False
        self._measured: RequestMetrics | None = None  # of the request that ended last
        self.account = Account(prompt_tokens=sum(len(request.prompt_token_ids) for request in requests))

    def describe_metrics(self) -> dict[str, Any]:
        """Returns the key `metrics` of the answer, complete when the last output has come; {} if no option asks for it.

        As in vLLM, only the answer of one sequence tells of its drafts.
        """
        level = self._state.config.serving.per_request_spec_decode_metrics
        drafter = self._state.engine_config.speculation.speculative_config
        if level == "none":
            return {}
        if drafter is None or self._measured is None or len(self._requests) > 1 or self._requests[0].params.n > 1:
            return {"metrics": {"speculative_decoding": None}}
        is_detailed, most = level == "detailed", drafter.num_speculative_tokens
        found = describe_acceptance(self._measured, most, is_detailed=is_detailed)
        return {"metrics": {"speculative_decoding": found}}

    async def begin(self, patience: float | None = None) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Returns `outputs` once the first has come, so that an error before it still sets the HTTP status.

        `patience`: the most seconds to wait for it; None: no limit.
        """
        return await begin_reading(self.outputs(), patience)

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Yields (position of the request, output) as they come.

        Raises:
            ApiError: the engine refused a request or failed on it; the others are aborted.
        """
        metrics, records = self._state.metrics, self._records
        running = dict(records)
        try:
            async with aclosing(self._engine.stream(self._requests)) as outputs:
                async for output in outputs:
                    self._count_taken()
                    record = records[output.request_id]
                    self._observe(record, output)
                    if output.finished:
                        del running[output.request_id]
                        self._finish(record, output)
                    if output.error is not None:
                        raise output.error
                    if output.finished and output.outputs[-1].finish_reason == "abort":
                        raise not_serving(Phase.DRAINING)
                    yield record.position, output
        except Exception as error:
            refusal = to_api_error(error, self._state.retry_after())
            if refusal.status == 429 and self._counts_refusals:
                metrics.count("queue_full")
            if self._is_taken or refusal.status >= 500:  # otherwise the engine refused them all
                self._count_taken()
                for _ in running:
                    metrics.end_request("error")
            running.clear()
            raise refusal from error
        finally:
            if running:
                self._count_taken()
            for record in running.values():
                metrics.end_request("abort")
                self._trace(record, None)
            context, account = get_context(self._http.scope), self.account
            context.prompt_tokens, context.output_tokens = account.prompt_tokens, account.completion_tokens
            if (tier := self._requests[0].service_tier) != ServiceTier.DEFAULT:  # the same for all
                context.service_tier = str(tier)

    def _count_taken(self) -> None:
        """Counts the requests once the engine has accepted them."""
        if not self._is_taken:
            self._is_taken = True
            for record in self._records.values():
                self._state.metrics.start_request(record.tally, record.request)

    def _observe(self, record: _Running, output: RequestOutput) -> None:
        """Counts an output's tokens and, for a stream, the time since its last output."""
        streams = record.request.params.output_kind is OutputKind.DELTA
        metrics, now = self._state.metrics, time.monotonic() if streams else 0.0
        for completion in output.outputs:
            count, index = len(completion.token_ids), completion.index
            if not count:
                continue
            self.account.completion_tokens += count
            before = record.num_tokens.get(index, 0)
            record.num_tokens[index] = before + count
            if not streams:
                continue
            if before:
                metrics.observe_gap(record.tally, now - record.last_time[index], count)
            else:
                num_prompt = len(output.prompt_token_ids) if not record.last_time else 0
                metrics.observe_first_token(record.tally, now - record.request.arrival_time, num_prompt, count)
            record.last_time[index] = now

    def _finish(self, record: _Running, output: RequestOutput) -> None:
        counts = list(record.num_tokens.values())
        streamed = sum(counts) if record.last_time else 0
        self.account.cached_tokens += output.num_cached_tokens
        self._measured = output.metrics
        params, adapter = record.request.params, record.request.adapter
        if adapter is not None:
            is_served = self._state.adapters.get(adapter.name) is not None
            self._state.metrics.count_adapter(adapter.name, sum(counts), is_served=is_served)
        self._state.metrics.finish_request(
            record.tally, output, params.max_tokens, params.n, num_tokens=counts, num_streamed=streamed
        )
        self._trace(record, output)

    def _trace(self, record: _Running, output: RequestOutput | None) -> None:
        total, headers = sum(record.num_tokens.values()), self._http.headers
        self._state.tracer.trace_request(record.request, output, total, operation=self._operation, headers=headers)


async def begin_reading[T](outputs: AsyncGenerator[T], patience: float | None = None) -> AsyncGenerator[T]:
    """Returns the same outputs once the first has come; raises its error instead, if there is one.

    After `patience` seconds it returns them all the same, and its error is raised where they are read.
    """
    first = asyncio.ensure_future(_read_first(outputs))
    try:
        await asyncio.wait((first,), timeout=patience)
        if first.done():
            first.result()
    except BaseException:
        first.cancel()
        await asyncio.wait((first,))
        await outputs.aclose()
        raise
    return _continue(first, outputs)


async def _read_first[T](outputs: AsyncGenerator[T]) -> T:
    return await anext(outputs)


async def _continue[T](first: Awaitable[T], rest: AsyncGenerator[T]) -> AsyncGenerator[T]:
    async with aclosing(rest):
        yield await first
        async for each in rest:
            yield each


def make_request_options(http: HttpRequest, body: EngineFields, state: ServerState) -> dict[str, Any]:
    """Returns the options that `RequestFactory` takes beside prompt and parameters: `RequestOptions`.

    Raises:
        InvalidRequestError: the priority is better than the server allows.
        ApiError: 403 when the key may not have the tier or the priority; 429 when the queue has no room for them,
            before any text is tokenized.
    """
    context = get_context(http.scope)
    limits, rights = state.config.limits, context.rights
    tier, priority = rights.choose_tier(body.service_tier), rights.choose_priority(body.priority, limits.max_priority)
    adapter = state.adapters.get(body.model)
    if adapter is not None:
        context.adapter = adapter.request.lora_name
    state.refuse_if_full(rights, (tier, priority))
    seconds = min((each for each in (body.timeout, limits.request_timeout) if each is not None), default=None)
    return {
        "cache_salt": context.salt + (body.cache_salt or ""),
        "priority": priority,
        "service_tier": tier,
        "tenant": rights.tenant,
        "lora_request": None if adapter is None else adapter.request,
        "deadline": None if seconds is None else context.arrival + seconds,
    }


def echo_tier(body: EngineFields, request: Request) -> dict[str, str]:
    """Returns the member of an answer that names the tier it was served in, if the body named one."""
    return {} if body.service_tier is None else {"service_tier": str(request.service_tier)}


def name_requests(requests: Sequence[Request], http: HttpRequest) -> list[Request]:
    """Returns the requests with unique ids made from the HTTP request's, and with its arrival time."""
    context = get_context(http.scope)
    return [
        replace(request, request_id=f"{context.request_id}-{at}", arrival_time=context.arrival)
        for at, request in enumerate(requests)
    ]
