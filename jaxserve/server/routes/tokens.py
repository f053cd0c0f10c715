"""`/v1/models`, `/tokenize`, `/detokenize` and `/v1/responses/input_tokens`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from jaxserve.engine.pooling import list_tasks
from jaxserve.errors import InvalidRequestError, shorten
from jaxserve.server.body import read_body
from jaxserve.server.conversation import Conversation, list_template_options
from jaxserve.server.errors import ApiError
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
from jaxserve.server.tools import read_tools
from jaxserve.tokenizers import Tokenizer
from jaxserve.tokenizers.messages import require_text_parts

router = APIRouter()


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
    return make_json_response(await state.preparation.run(_write_tokens, body, state))


def _write_tokens(body: TokenizeRequest, state: ServerState) -> bytes:
    return to_json(_tokenize(body, state), is_ascii=False).encode()


def _tokenize(body: TokenizeRequest, state: ServerState) -> dict[str, Any]:
    tokenizer = _require_tokenizer(state)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", field="prompt", value=body.prompt)
    if body.messages is not None and body.add_special_tokens:
        message = "cannot be true with messages: the chat template adds them"
        raise InvalidRequestError(message, field="add_special_tokens", value=True)
    if body.prompt is not None:
        for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise InvalidRequestError("needs messages", field=name, value=getattr(body, name))
        check_length(body.prompt, state, "prompt", cuts=True)
        adds = body.add_special_tokens is not False
        token_ids = tokenizer.encode(body.prompt, add_special_tokens=adds)
    else:
        token_ids = _encode_conversation(body, state, tokenizer)
    texts = tokenizer.split_text(token_ids, skip_special_tokens=True) if body.return_token_strs else None
    return {
        "count": len(token_ids),
        "max_model_len": state.engine.max_model_len,
        "tokens": token_ids,
        "token_strs": texts,
    }


def _encode_conversation(body: TokenizeRequest, state: ServerState, tokenizer: Tokenizer) -> list[int]:
    """Returns the token ids that a chat request with the same messages and tools has."""
    from jaxserve.tokenizers.chat import encode_chat

    require_text_parts(body.messages or ())
    check_length([body.messages, body.tools], state, "messages")
    conversation = Conversation(
        messages=body.messages or (),
        tools=read_tools(body.tools),
        template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )
    return encode_chat(tokenizer, conversation.messages, **list_template_options(conversation, state))[1]


@router.post("/v1/responses/input_tokens", **document(ResponseRequest, InputTokens))
async def count_input_tokens(http: Request) -> JSONResponse:
    """The number of tokens that a response's input would have."""
    state = get_state(http)
    body = await read_body(http, ResponseRequest, state)
    state.check_model(http, body.model)
    responses.check_body(body)
    reader = responses.ResponseReader()
    with name_fields(reader.names):
        count = await state.preparation.run(_count_input, body, state, reader)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": count})


def _count_input(body: ResponseRequest, state: ServerState, reader: responses.ResponseReader) -> int:
    return count_prompt(reader.read(body, state), state)


def count_prompt(conversation: Conversation, state: ServerState) -> int:
    """Returns the number of tokens of a conversation's prompt."""
    from jaxserve.tokenizers.chat import encode_chat

    options = list_template_options(conversation, state)
    return len(encode_chat(_require_tokenizer(state), conversation.messages, **options)[1])


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
