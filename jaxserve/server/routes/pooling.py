"""`/rerank`, `/score`, `/classify` and `/pooling` in vLLM's fields, and `/v2/rerank` and `/v2/embed` in Cohere's."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxserve.engine import pooled
from jaxserve.engine.pooled import PoolingCall
from jaxserve.errors import InvalidRequestError
from jaxserve.pooling_params import PoolingParams
from jaxserve.request import ClassificationOutput, EmbeddingOutput, PoolingOutput, ScoringOutput
from jaxserve.server.body import read_body
from jaxserve.server.json_text import make_json_response, run_by_size, to_json
from jaxserve.server.openapi import document
from jaxserve.server.pooling import Computed, check_texts, compute_all, count_numbers, drop_grammar
from jaxserve.server.prompts import check_length, list_prompts
from jaxserve.server.protocol.pooling import (
    ClassesList,
    ClassifyRequest,
    CohereEmbeddings,
    CohereEmbedRequest,
    PairFields,
    PooledList,
    PoolingRequest,
    RerankRequest,
    RerankResponse,
    ScoreList,
    ScoreRequest,
)
from jaxserve.server.request_context import get_context
from jaxserve.server.server_state import ServerState, get_state
from jaxserve.server.template_use import find_pair_template

router = APIRouter()
# The names that prompts in models' files have, by Cohere's purpose of a text.
_PROMPTS = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage", "corpus"),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering"),
}
_INPUT = {"prompt": "input", "prompt_token_ids": "input"}


@router.post("/v2/rerank", **document(RerankRequest, RerankResponse))
@router.post("/v1/rerank", **document(RerankRequest, RerankResponse))
@router.post("/rerank", **document(RerankRequest, RerankResponse))
async def rerank(http: Request) -> Response:
    """The documents in the order of how well they answer the query, best first."""
    state = get_state(http)
    body = await read_body(http, RerankRequest, state)
    model = state.check_model(http, body.model)
    names = {"data_1[0]": "query", "data_1": "query", "data_2": "documents", "prompt": "documents"}
    found = await compute_all(http, body, _rank, names, operation="rerank")
    order = sorted(range(len(found.answers)), key=lambda index: -found.answers[index].score)  # equal ones as they came
    results = []
    for index in order[: body.top_n]:
        ranked: dict[str, Any] = {"index": index, "relevance_score": found.answers[index].score}
        results.append(ranked | ({"document": {"text": body.documents[index]}} if body.return_documents else {}))
    name = f"rerank-{get_context(http.scope).request_id}"
    return await _write({"id": name, "model": model, "usage": found.usage, "results": results, **found.tier})


def _rank(body: RerankRequest, state: ServerState, options: dict[str, Any]) -> PoolingCall[ScoringOutput]:
    return _score_pairs(body, [body.query], body.documents, ("query", "documents"), state, options)


@router.post("/v1/score", **document(ScoreRequest, ScoreList))
@router.post("/score", **document(ScoreRequest, ScoreList))
async def score(http: Request) -> Response:
    """How well two texts belong together: of one and many, or of as many pairs."""
    state = get_state(http)
    body = await read_body(http, ScoreRequest, state)
    model = state.check_model(http, body.model)
    names = _name_sides(body)
    made = dict(zip(("data_1", "data_2"), names, strict=True)) | {"prompt": names[1]}
    found = await compute_all(http, body, _score, made, operation="score")
    data = [{"index": index, "object": "score", "score": answer.score} for index, answer in enumerate(found.answers)]
    return await _write(_list(http, "score", model, data, found))


def _score(body: ScoreRequest, state: ServerState, options: dict[str, Any]) -> PoolingCall[ScoringOutput]:
    names = _name_sides(body)
    sides = [getattr(body, name) for name in names]
    firsts, seconds = ([side] if isinstance(side, str) else side for side in sides)
    return _score_pairs(body, firsts, seconds, names, state, options)


def _name_sides(body: ScoreRequest) -> tuple[str, str]:
    """Returns the names of the two fields with texts; InvalidRequestError unless one pair of them is given."""
    pairs = [("text_1", "text_2"), ("queries", "documents")]
    given = [pair for pair in pairs if any(getattr(body, name) is not None for name in pair)]
    if len(given) != 1:
        message = "or queries and documents: give one of the two pairs"
        raise InvalidRequestError(f"text_1 and text_2, {message}", field="text_1", value=None)
    for name in given[0]:
        if getattr(body, name) is None:
            raise InvalidRequestError(f"is needed beside {' and '.join({*given[0]} - {name})}", field=name, value=None)
    return given[0]


def _score_pairs(
    body: PairFields,
    firsts: Sequence[str],
    seconds: Sequence[str],
    names: tuple[str, str],
    state: ServerState,
    options: Mapping[str, Any],
) -> PoolingCall[ScoringOutput]:
    cuts = body.truncate_prompt_tokens is not None
    for texts, name in zip((firsts, seconds), names, strict=True):
        check_texts(texts, state, name, cuts=cuts or body.max_tokens_per_doc is not None)
    given = {
        "pooling_params": PoolingParams(body.use_activation),
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
        "max_tokens_per_doc": body.max_tokens_per_doc,
        "template": find_pair_template(state, body.chat_template),
    }
    engine = state.engine
    return pooled.score(engine.requests, engine.model, firsts, seconds, {**drop_grammar(options), **given})


@router.post("/classify", **document(ClassifyRequest, ClassesList))
async def classify(http: Request) -> Response:
    """The probabilities of the model's classes for each text."""
    state = get_state(http)
    body = await read_body(http, ClassifyRequest, state)
    model = state.check_model(http, body.model)
    found = await compute_all(http, body, _classify, _INPUT, operation="classify")
    classes = state.engine.model.pooler.classes
    assert classes is not None  # else it was refused
    data = [
        {
            "index": index,
            "label": classes.labels[int(np.argmax(answer.probs))],
            "probs": answer.probs,
            "num_classes": answer.num_classes,
        }
        for index, answer in enumerate(found.answers)
    ]
    return await _write(_list(http, "classify", model, data, found))


def _classify(body: ClassifyRequest, state: ServerState, options: dict[str, Any]) -> PoolingCall[ClassificationOutput]:
    prompts, given = _read_input(body, state, options)
    given["pooling_params"] = PoolingParams(body.use_activation)
    return pooled.classify(state.engine.requests, state.engine.model, prompts, given)


@router.post("/pooling", **document(PoolingRequest, PooledList))
async def pool(http: Request) -> Response:
    """What the model makes of each text, as plain numbers: an embedding, one for each class, or a vector a token."""
    state = get_state(http)
    body = await read_body(http, PoolingRequest, state)
    model = state.check_model(http, body.model)
    names = {**_INPUT, "pooling_task": "task"}
    found = await compute_all(http, body, _pool, names, operation="pooling")
    data = [{"index": index, "object": "pooling", "data": answer.data} for index, answer in enumerate(found.answers)]
    size = sum(np.size(answer.data[0]) * len(answer.data) for answer in found.answers)
    return await _write(_list(http, "pool", model, data, found), size)


def _pool(body: PoolingRequest, state: ServerState, options: dict[str, Any]) -> PoolingCall[PoolingOutput]:
    prompts, given = _read_input(body, state, options)
    given |= {"pooling_params": PoolingParams(body.use_activation, body.dimensions), "pooling_task": body.task}
    call = pooled.encode(state.engine.requests, state.engine.model, prompts, given)
    total, most = count_numbers(call.requests, state), state.config.limits.max_pooled_numbers
    if state.engine.model.pooler.by_token and total > most:
        message = (
            f"the vectors of all tokens have {total:,} numbers together, and one answer may have {most:,} "
            "(max_pooled_numbers); send the texts in several requests"
        )
        raise InvalidRequestError(message, field="input", value=total)
    return call


def _read_input(
    body: ClassifyRequest, state: ServerState, options: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the prompts of a body, and the options of `RequestFactory.make_embedding`."""
    cut, prompts = body.truncate_prompt_tokens, list_prompts(body.input, state.config.limits.max_prompts, "input")
    for each in prompts:
        check_length(each.get("prompt"), state, "input", cuts=cut is not None)
    return prompts, {**drop_grammar(options), "truncate_prompt_tokens": cut}


@router.post("/v2/embed", **document(CohereEmbedRequest, CohereEmbeddings))
async def embed(http: Request) -> Response:
    """The embedding of each text, in Cohere's form."""
    state = get_state(http)
    body = await read_body(http, CohereEmbedRequest, state)
    state.check_model(http, body.model)
    names = {"dimensions": "output_dimension", "prompt": "texts", "truncate_prompt_tokens": "max_tokens"}
    names["prompt_name"] = "input_type"
    found = await compute_all(http, body, _embed, names, operation="embeddings")
    vectors = [answer.embedding for answer in found.answers]
    forms: dict[str, list[Any]] = {}
    for form in dict.fromkeys(body.embedding_types or ["float"]):
        forms[form] = vectors if form == "float" else [_encode(vector) for vector in vectors]
    answer = {
        "id": f"embed-{get_context(http.scope).request_id}",
        "embeddings": forms,
        "texts": body.texts,
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": found.usage["prompt_tokens"]}},
        "response_type": "embeddings_by_type",
    }
    return await _write(answer, len(vectors) * len(vectors[0]))


def _embed(body: CohereEmbedRequest, state: ServerState, options: dict[str, Any]) -> PoolingCall[EmbeddingOutput]:
    model, cut = state.engine.model, body.truncate_prompt_tokens
    kept = "END" if model.reads_whole else "START"  # the end that a cut takes away
    if body.truncate in ("START", "END") and body.truncate != kept:
        message = f"this model's texts are cut at their {kept.lower()}; send {kept}, NONE or nothing"
        raise InvalidRequestError(message, field="truncate", value=body.truncate)
    if body.truncate != "NONE":
        cut = body.max_tokens or cut or -1
    elif body.max_tokens is not None:
        raise InvalidRequestError("means nothing beside truncate: NONE", field="max_tokens", value=body.max_tokens)
    check_texts(body.texts, state, "texts", cuts=cut is not None)
    requests = state.engine.requests
    given = {
        "pooling_params": PoolingParams(dimensions=body.output_dimension),
        "prompt_name": requests.choose_prompt(_PROMPTS.get(body.input_type or "", ())),
        "truncate_prompt_tokens": cut,
    }
    return pooled.embed(requests, model, body.texts, {**drop_grammar(options), **given})


def _encode(vector: Sequence[float]) -> str:
    return base64.b64encode(np.asarray(vector, np.float32).tobytes()).decode()


def _list(http: Request, kind: str, model: str, data: list[dict[str, Any]], found: Computed[Any]) -> dict[str, Any]:
    """Returns the body of an answer that is a list of objects."""
    name = f"{kind}-{get_context(http.scope).request_id}"
    head = {"id": name, "object": "list", "created": int(time.time()), "model": model}
    return {**head, "data": data, "usage": found.usage, **found.tier}


async def _write(answer: Mapping[str, Any], size: int | None = None) -> Response:
    """Returns the response with an answer of about `size` values."""
    count = size or 4 * len(answer.get("results") or answer.get("data") or ())
    return make_json_response((await run_by_size(partial(to_json, answer), count)).encode())
