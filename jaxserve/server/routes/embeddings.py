"""`/v1/embeddings`: texts as vectors."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from pydantic_core import to_json as encode_numbers
from starlette.responses import Response

from jaxserve.engine import pooled
from jaxserve.engine.pooled import PoolingCall
from jaxserve.pooling_params import PoolingParams
from jaxserve.request import EmbeddingOutput, RequestOutput
from jaxserve.request import Request as EngineRequest
from jaxserve.server.body import prepare, read_body
from jaxserve.server.generation import echo_tier, name_requests
from jaxserve.server.json_text import make_json_response, run_by_size, to_json
from jaxserve.server.openapi import document
from jaxserve.server.pooling import compute, count_tokens, drop_grammar
from jaxserve.server.prompts import check_length, list_prompts, name_fields
from jaxserve.server.protocol.tokens import EmbeddingList, EmbeddingRequest
from jaxserve.server.server_state import ServerState, get_state
from jaxserve.server.stream import run_while_connected

router = APIRouter()


@router.post("/v1/embeddings", **document(EmbeddingRequest, EmbeddingList))
async def create_embeddings(http: Request) -> Response:
    """The embedding of each text: one vector, of the hidden states that the model's pooler reads."""
    state = get_state(http)
    body = await read_body(http, EmbeddingRequest, state)
    model = state.check_model(http, body.model)
    with name_fields({"prompt": "input", "prompt_token_ids": "input"}):
        call = await prepare(http, body, state, _make_call)
        requests = name_requests(call.requests, http)
        return make_json_response(await run_while_connected(http, _embed(body, model, call, requests, http), state))


def _make_call(body: EmbeddingRequest, state: ServerState, options: dict[str, Any]) -> PoolingCall[EmbeddingOutput]:
    most = state.config.limits.max_prompts
    cut, prompts = body.truncate_prompt_tokens, list_prompts(body.input, most, "input")
    for each in prompts:
        check_length(each.get("prompt"), state, "input", cuts=cut is not None)
    params = PoolingParams(dimensions=body.dimensions)
    given = {"pooling_params": params, "prompt_name": body.prompt_name, "truncate_prompt_tokens": cut}
    return pooled.embed(state.engine.requests, state.engine.model, prompts, {**drop_grammar(options), **given})


async def _embed(
    body: EmbeddingRequest,
    model: str,
    call: PoolingCall[EmbeddingOutput],
    requests: Sequence[EngineRequest],
    http: Request,
) -> bytes:
    """Returns the body of the answer."""
    width, written = get_state(http).engine.model.embedding_size, list[bytes]()
    async with aclosing(compute(requests, http, operation="embeddings")) as parts:
        async for part in parts:
            written += await run_by_size(partial(_write_vectors, call, part, body), len(part) * width)
    rest = {"model": model, "usage": count_tokens(requests, http), **echo_tier(body, requests[0])}
    return await run_by_size(partial(_join, written, rest), len(requests) * width)


def _write_vectors(
    call: PoolingCall[EmbeddingOutput], outputs: Sequence[RequestOutput], body: EmbeddingRequest
) -> list[bytes]:
    """Returns the JSON of each vector: numbers, or base64 of 32-bit floats."""
    vectors = (answer.embedding for answer in call.finish(outputs))
    if body.encoding_format == "base64":
        return [b'"%s"' % base64.b64encode(np.asarray(vector, np.float32).tobytes()) for vector in vectors]
    return [encode_numbers(vector) for vector in vectors]  # ten times as fast as the standard library


def _join(vectors: Sequence[bytes], rest: dict[str, Any]) -> bytes:
    """Returns the body of an answer with these vectors."""
    items = b",".join(
        b'{"object":"embedding","index":%d,"embedding":%s}' % (index, vector) for index, vector in enumerate(vectors)
    )
    return b'{"object":"list","data":[%s],%s' % (items, to_json(rest)[1:].encode())
