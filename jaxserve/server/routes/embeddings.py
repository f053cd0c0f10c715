"""`/v1/embeddings`: texts as vectors."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from pydantic_core import to_json as encode_numbers
from starlette.responses import Response

from jaxserve.engine.pooling import require_dimensions
from jaxserve.errors import DeadlineError
from jaxserve.request import Request as EngineRequest
from jaxserve.server.body import prepare, read_body
from jaxserve.server.errors import ApiError
from jaxserve.server.generation import Generation, echo_tier, name_requests
from jaxserve.server.json_text import make_json_response, run_by_size, to_json
from jaxserve.server.openapi import document
from jaxserve.server.prompts import check_length, list_prompts, name_fields
from jaxserve.server.protocol.tokens import EmbeddingList, EmbeddingRequest
from jaxserve.server.request_context import get_context
from jaxserve.server.server_state import ServerState, get_state
from jaxserve.server.stream import run_while_connected

router = APIRouter()
_RETRY_SECONDS = 0.1  # until texts that found no room ask again
_LEAST_NORM = 1e-12


@router.post("/v1/embeddings", **document(EmbeddingRequest, EmbeddingList))
async def create_embeddings(http: Request) -> Response:
    """The embedding of each text: one vector, of the hidden states that the model's pooler reads."""
    state = get_state(http)
    body = await read_body(http, EmbeddingRequest, state)
    model = state.check_model(body.model)
    if body.dimensions is not None:
        require_dimensions(state.engine.model, body.dimensions)
    with name_fields({"prompt": "input", "prompt_token_ids": "input"}):
        requests = name_requests(await prepare(http, body, state, _make_requests), http)
        return make_json_response(await run_while_connected(http, _embed(body, model, requests, http), state))


def _make_requests(body: EmbeddingRequest, state: ServerState, options: dict[str, Any]) -> list[EngineRequest]:
    make, most = state.engine.requests.make_embedding, state.config.limits.max_prompts
    cut, prompts = body.truncate_prompt_tokens, list_prompts(body.input, most, "input")
    for each in prompts:
        check_length(each.get("prompt"), state, "input", cuts=cut is not None)
    schedule = {name: value for name, value in options.items() if name != "compile_grammar"}  # texts have none
    return [make(each, truncate_prompt_tokens=cut, prompt_name=body.prompt_name, **schedule) for each in prompts]


async def _embed(body: EmbeddingRequest, model: str, requests: Sequence[EngineRequest], http: Request) -> bytes:
    """Returns the body of the answer."""
    config, written = get_state(http).engine.model, list[bytes]()
    width, normalizes = config.embedding_size, config.pooler.normalizes
    async with aclosing(compute(requests, http)) as parts:
        async for vectors in parts:
            written += await run_by_size(partial(_write_vectors, vectors, body, normalizes), len(vectors) * width)
    total = sum(len(request.prompt_token_ids) for request in requests)
    get_context(http.scope).prompt_tokens = total
    rest = {
        "model": model,
        "usage": {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0},
        **echo_tier(body, requests[0]),
    }
    return await run_by_size(partial(_join, written, rest), len(requests) * width)


async def compute(requests: Sequence[EngineRequest], http: Request) -> AsyncGenerator[list[list[float]]]:
    """Yields the embeddings of successive texts, of as many at once as there are idle rows.

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
        generation = Generation(state, part, http, operation="embeddings", counts_refusals=False)
        try:
            found = {position: output.embedding async for position, output in generation.outputs()}
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
            yield [found[position] for position in range(len(part))]
            start += len(part)


async def _wait_for_room(request: EngineRequest) -> None:
    if request.deadline is not None and time.monotonic() > request.deadline:
        raise DeadlineError("the deadline passed while texts waited for room in the queue")
    await asyncio.sleep(_RETRY_SECONDS)


def _write_vectors(vectors: Sequence[list[float]], body: EmbeddingRequest, normalizes: bool) -> list[bytes]:
    """Returns the JSON of each vector: numbers, or base64 of 32-bit floats; `normalizes`: their length is 1."""
    found: list[bytes] = []
    for numbers in vectors:
        vector = np.asarray(numbers, np.float32)
        vector = vector[: body.dimensions]
        if body.dimensions is not None and normalizes:
            vector = vector / max(float(np.linalg.norm(vector)), _LEAST_NORM)
        if body.encoding_format == "base64":
            found.append(b'"%s"' % base64.b64encode(vector.tobytes()))
        else:
            found.append(encode_numbers(vector.tolist()))  # ten times as fast as the standard library
    return found


def _join(vectors: Sequence[bytes], rest: dict[str, Any]) -> bytes:
    """Returns the body of an answer with these vectors."""
    items = b",".join(
        b'{"object":"embedding","index":%d,"embedding":%s}' % (index, vector) for index, vector in enumerate(vectors)
    )
    return b'{"object":"list","data":[%s],%s' % (items, to_json(rest)[1:].encode())
