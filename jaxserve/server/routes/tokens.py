"""`/v1/models`, `/tokenize`, `/detokenize` and `/v1/responses/input_tokens`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from jaxserve.engine.pooling import list_tasks
from jaxserve.errors import InvalidRequestError, shorten
from jaxserve.media.items import MediaItem
from jaxserve.request import ServiceTier
from jaxserve.server.body import read_body
from jaxserve.server.conversation import Conversation, encode_prompt
from jaxserve.server.errors import ApiError
from jaxserve.server.images import NewImagesError, read_images
from jaxserve.server.json_text import make_json_response, to_json
from jaxserve.server.openapi import document
from jaxserve.server.prompts import check_length, name_fields
from jaxserve.server.protocol.responses import ResponseRequest
from jaxserve.server.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    InputTokens,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from jaxserve.server.request_context import get_context
from jaxserve.server.routes import responses
from jaxserve.server.server_state import ServerState, get_state
from jaxserve.server.stream import run_while_connected
from jaxserve.server.tools import read_tools
from jaxserve.tokenizers import Tokenizer

router = APIRouter()
_OF_MESSAGES = (
    *("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "mm_processor_kwargs"),
)


@router.get("/v1/models", **document(None, ModelList, refusals=("401", "403", "503")))
async def list_models(http: Request) -> JSONResponse:
    """The served model, under each of its names, and the adapters that the key may use."""
    state, rights = get_state(http), get_context(http.scope).rights
    names = [name for name in state.names if state.adapters.get(name) is None or rights.may_use(name)]
    return JSONResponse({"object": "list", "data": [_describe_model(state, name) for name in names]})


@router.get("/v1/models/{name:path}", **document(None, ModelCard, refusals=("401", "403", "404", "503")))
async def get_model(http: Request, name: str) -> JSONResponse:
    """The model, by one of its names, or an adapter."""
    state = get_state(http)
    return JSONResponse(_describe_model(state, state.check_model(http, name)))


def _describe_model(state: ServerState, name: str) -> dict[str, Any]:
    adapter = state.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": state.created if adapter is None else adapter.created,
        "owned_by": "jaxserve",
        "root": state.engine_config.model.model if adapter is None else adapter.request.lora_path,
        "parent": None if adapter is None else adapter.parent,
        "max_model_len": state.engine.max_model_len,
        "tasks": list(list_tasks(state.engine.model)),
    }


@router.post("/tokenize", **document(TokenizeRequest, TokenizeResponse))
async def tokenize(http: Request) -> Response:
    """The token ids of a text or of a conversation."""
    state = get_state(http)
    body = await read_body(http, TokenizeRequest, state)
    state.check_model(http, body.model)
    return make_json_response(await run_with_images(http, state, partial(_write_tokens, body, state)))


async def run_with_images[T](http: Request, state: ServerState, count: Callable[[Sequence[MediaItem] | None], T]) -> T:
    """Returns what a function returns, run in a thread. Images that it asks for are loaded, and it runs once more.

    Args:
        count: takes the images, None while they are not loaded; raises NewImagesError if it needs them.
    """
    try:
        found: T = await state.preparation.run(count, None)
    except NewImagesError as new:
        assert state.images is not None
        longest_wait = state.config.limits.find_longest_wait(ServiceTier.DEFAULT)
        items = await run_while_connected(http, state.images.load(http, new, longest_wait), state)
        found = await state.preparation.run(count, items)
    return found


def _write_tokens(body: TokenizeRequest, state: ServerState, items: Sequence[MediaItem] | None) -> bytes:
    return to_json(_tokenize(body, state, items), is_ascii=False).encode()


def _tokenize(body: TokenizeRequest, state: ServerState, items: Sequence[MediaItem] | None = None) -> dict[str, Any]:
    tokenizer = _require_tokenizer(state)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", field="prompt", value=body.prompt)
    if body.messages is not None and body.add_special_tokens:
        message = "cannot be true with messages: the chat template adds them"
        raise InvalidRequestError(message, field="add_special_tokens", value=True)
    if body.prompt is not None:
        for name in _OF_MESSAGES:
            if getattr(body, name) is not None:
                raise InvalidRequestError("needs messages", field=name, value=getattr(body, name))
        check_length(body.prompt, state, "prompt", cuts=True)
        adds = body.add_special_tokens is not False
        token_ids = tokenizer.encode(body.prompt, add_special_tokens=adds)
    else:
        token_ids = _encode_conversation(body, state, items)
    texts = tokenizer.split_text(token_ids, skip_special_tokens=True) if body.return_token_strs else None
    return {
        "count": len(token_ids),
        "max_model_len": state.engine.max_model_len,
        "tokens": token_ids,
        "token_strs": texts,
    }


def _encode_conversation(body: TokenizeRequest, state: ServerState, items: Sequence[MediaItem] | None) -> list[int]:
    """Returns the token ids that a chat request with the same messages and tools has."""
    messages, images = read_images(state.images, body.messages or (), body.mm_processor_kwargs)
    check_length([messages, body.tools], state, "messages")
    conversation = Conversation(
        messages=messages,
        images=images,
        image_options=body.mm_processor_kwargs,
        tools=read_tools(body.tools),
        template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )
    return encode_prompt(conversation, state, items)


@router.post("/v1/responses/input_tokens", **document(ResponseRequest, InputTokens))
async def count_input_tokens(http: Request) -> JSONResponse:
    """The number of tokens that a response's input would have."""
    state = get_state(http)
    body = await read_body(http, ResponseRequest, state)
    state.check_model(http, body.model)
    responses.check_body(body)
    reader = responses.ResponseReader()
    with name_fields(reader.names):
        count = await run_with_images(http, state, partial(_count_input, body, state, reader))
    return JSONResponse({"object": "response.input_tokens", "input_tokens": count})


def _count_input(
    body: ResponseRequest, state: ServerState, reader: responses.ResponseReader, items: Sequence[MediaItem] | None
) -> int:
    return len(encode_prompt(reader.read(body, state), state, items))


@router.post("/detokenize", **document(DetokenizeRequest, DetokenizeResponse))
async def detokenize(http: Request) -> JSONResponse:
    """The text of token ids."""
    state = get_state(http)
    body = await read_body(http, DetokenizeRequest, state)
    state.check_model(http, body.model)
    most = state.engine.max_model_len
    if len(body.tokens) > most:
        raise InvalidRequestError(f"at most {most} ids, got {len(body.tokens)}", field="tokens", value=None)
    size = state.engine.model.vocab_size
    for token_id in body.tokens:
        if not 0 <= token_id < size:
            message = f"must be token ids in [0, {size}), got {shorten(token_id)}"
            raise InvalidRequestError(message, field="tokens", value=token_id)
    text = await state.preparation.run(_require_tokenizer(state).decode, body.tokens, False)
    return JSONResponse({"prompt": text})


def _require_tokenizer(state: ServerState) -> Tokenizer:
    tokenizer = state.engine.tokenizer
    if tokenizer is None:
        raise ApiError(400, "This server has no tokenizer: it takes token ids only.", code="no_tokenizer")
    return tokenizer
