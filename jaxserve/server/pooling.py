"""Runs the texts of a request that asks for no answer: for embeddings, classes or scores."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request

from jaxserve.engine.pooled import PoolingCall
from jaxserve.errors import DeadlineError, InvalidRequestError
from jaxserve.request import Request as EngineRequest
from jaxserve.request import RequestOutput
from jaxserve.server.body import prepare
from jaxserve.server.errors import ApiError
from jaxserve.server.generation import Generation, echo_tier, name_requests
from jaxserve.server.json_text import run_by_size
from jaxserve.server.prompts import check_length, name_fields
from jaxserve.server.protocol.fields import EngineFields
from jaxserve.server.request_context import get_context
from jaxserve.server.server_state import ServerState, get_state
from jaxserve.server.stream import run_while_connected

_RETRY_SECONDS = 0.1  # until texts that found no room ask again


@dataclass(frozen=True)
class Computed[T]:
    """The answers of a request's texts, and the members that bodies of answers share."""

    answers: list[T]
    usage: dict[str, int]
    tier: dict[str, str]


async def compute_all[B: EngineFields, T](
    http: Request,
    body: B,
    make: Callable[[B, ServerState, dict[str, Any]], PoolingCall[T]],
    names: Mapping[str, str],
    *,
    operation: str,
) -> Computed[T]:
    """Returns the answers of all texts of a body.

    Args:
        make: makes the call of a body, with the options of `RequestFactory`.
        names: the body's names of the engine's fields, for errors.
        operation: what is asked for, in metrics and traces.

    Raises InvalidRequestError, and ApiError and DeadlineError as `compute`.
    """
    state = get_state(http)
    with name_fields(names):
        call = await prepare(http, body, state, make)
        requests = name_requests(call.requests, http)

        async def run() -> list[T]:
            outputs: list[RequestOutput] = []
            async with aclosing(compute(requests, http, operation=operation)) as parts:
                async for part in parts:
                    outputs += part
            return await run_by_size(partial(call.finish, outputs), count_numbers(requests, state))

        answers = await run_while_connected(http, run(), state)
    return Computed(answers, count_tokens(requests, http), echo_tier(body, requests[0]))


def count_numbers(requests: Sequence[EngineRequest], state: ServerState) -> int:
    """Returns how many numbers the model makes of texts."""
    model = state.engine.model
    vectors = sum(len(each.prompt_token_ids) for each in requests) if model.pooler.by_token else len(requests)
    return vectors * model.embedding_size


def count_tokens(requests: Sequence[EngineRequest], http: Request) -> dict[str, int]:
    """Returns the usage of texts, and notes it for the log."""
    total = sum(len(request.prompt_token_ids) for request in requests)
    get_context(http.scope).prompt_tokens = total
    return {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0}


def check_texts(texts: Sequence[str], state: ServerState, field: str, *, cuts: bool) -> None:
    """Refuses no texts, too many, and those that are certainly too long; InvalidRequestError names the field."""
    most = state.config.limits.max_prompts
    if not 1 <= len(texts) <= most:
        raise InvalidRequestError(f"must hold 1 to {most} texts, got {len(texts)}", field=field, value=len(texts))
    for text in texts:
        check_length(text, state, field, cuts=cuts)


def drop_grammar(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of texts, which have no grammar."""
    return {name: value for name, value in options.items() if name != "compile_grammar"}


async def compute(
    requests: Sequence[EngineRequest], http: Request, *, operation: str
) -> AsyncGenerator[list[RequestOutput]]:
    """Yields the outputs of successive texts, of as many at once as there are idle rows.

    So they fill rows, but not the queue, where others wait. If the queue has room for the first text, the others wait
    until there is room for them.

    Raises:
        ApiError: 429 when there is no room for the first text; the engine failed on one.
        DeadlineError: the deadline passed while texts waited for room.
    """
    state, start, is_full = get_state(http), 0, False
    while start < len(requests):
        size = 1 if is_full else max(1, state.engine.view.count_idle_rows())
        part = requests[start : start + size]
        generation = Generation(state, part, http, operation=operation, counts_refusals=False)
        try:
            found = {position: output async for position, output in generation.outputs()}
        except ApiError as refusal:
            if refusal.status != 429:
                raise
            if is_full and start == 0:
                state.metrics.count("queue_full")
                raise
            if is_full:
                await _wait_for_room(part[0])
            is_full = True
        else:
            is_full = False
            state.metrics.count_texts(operation, len(part), sum(len(each.prompt_token_ids) for each in part))
            yield [found[position] for position in range(len(part))]
            start += len(part)


async def _wait_for_room(request: EngineRequest) -> None:
    if request.deadline is not None and time.monotonic() > request.deadline:
        raise DeadlineError("the deadline passed while texts waited for room in the queue")
    await asyncio.sleep(_RETRY_SECONDS)
