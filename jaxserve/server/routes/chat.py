"""`/v1/chat/completions`: conversations to answer."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequestError
from jaxserve.request import CompletionOutput, RequestOutput
from jaxserve.request import Request as EngineRequest
from jaxserve.server.body import prepare, read_body
from jaxserve.server.conversation import Conversation, list_names, read_conversation
from jaxserve.server.generation import Generation, echo_tier, name_requests
from jaxserve.server.logprobs import to_prompt_logprobs
from jaxserve.server.openapi import document
from jaxserve.server.prompts import check_count, name_fields
from jaxserve.server.protocol.chat import ChatCompletion, ChatCompletionRequest
from jaxserve.server.server_state import ServerState, get_state
from jaxserve.server.stream import ChunkWriter, respond
from jaxserve.server.tools import AnswerParser, CallArguments, CallStart, Content, Piece, Reasoning

router = APIRouter()


@router.post("/v1/chat/completions", **document(ChatCompletionRequest, ChatCompletion, streams=True))
async def create_chat_completion(http: Request) -> Response:
    """Answers a conversation."""
    state = get_state(http)
    body = await read_body(http, ChatCompletionRequest, state)
    model = state.check_model(body.model)
    check_body(body, state)
    with name_fields(list_names(body)):
        conversation = await prepare(http, body, state, read_conversation)
        (request,) = name_requests([conversation.request], http)
        answer = _Answer(body, model, state, replace(conversation, request=request), http)
        return await respond(http, answer, state, streams=body.stream)


def check_body(body: ChatCompletionRequest, state: ServerState) -> None:
    """Refuses conflicting fields, and what exceeds the server's limits.

    Raises:
        InvalidRequestError: names the field.
    """
    body.check_stream()
    check_count(body, state)
    if body.top_logprobs is not None and not body.logprobs:
        message = "is only allowed when logprobs is true"
        raise InvalidRequestError(message, field="top_logprobs", value=body.top_logprobs)
    if body.stream and body.prompt_logprobs is not None:
        message = "is only allowed without stream"
        raise InvalidRequestError(message, field="prompt_logprobs", value=body.prompt_logprobs)
    if body.modalities not in (None, ["text"]):
        raise InvalidRequestError("answers are text only", field="modalities", value=body.modalities)


@dataclass(slots=True)
class _Choice:
    """The state of one completion while it is written."""

    parser: AnswerParser | None  # None: all text is content
    has_begun: bool = False


class _Answer:
    """The completions of one HTTP request."""

    def __init__(
        self, body: ChatCompletionRequest, model: str, state: ServerState, conversation: Conversation, http: Request
    ) -> None:
        self._body, self._state, self._conversation = body, state, conversation
        self._request: EngineRequest = conversation.request
        self._params = conversation.request.params
        self._generation = Generation(state, [conversation.request], http, operation="chat")
        self._choices = [_Choice(conversation.make_parser()) for _ in range(self._params.n)]
        self._head = {
            "id": f"chatcmpl-{body.request_id or self._request.request_id.partition('-')[0]}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": state.fingerprint,
            **echo_tier(body, self._request),
        }

    async def collect(self) -> dict[str, Any]:
        """Returns the whole answer."""
        found: dict[str, Any] = {}
        choices = []
        async for _, output in self._generation.outputs():
            choices = [self._render_whole(completion) for completion in output.outputs]
            if self._body.prompt_logprobs is not None:
                found["prompt_logprobs"] = to_prompt_logprobs(output.prompt_logprobs)
            if self._body.return_token_ids:
                found["prompt_token_ids"] = output.prompt_token_ids
        found |= self._generation.describe_metrics()
        return {**self._head, "choices": choices, "usage": self._usage(), **found}

    async def start_stream(self) -> AsyncGenerator[bytes]:
        """Returns the answer's pieces; raises errors that occur before the first."""
        return self._stream(await self._generation.begin())

    async def _stream(self, outputs: AsyncGenerator[tuple[int, RequestOutput]]) -> AsyncGenerator[bytes]:
        shows_usage = self._body.wants_usage or self._state.config.serving.enable_force_include_usage
        writer = ChunkWriter(self._head, shows_usage=shows_usage)
        head, tail = writer.head, writer.tail
        counts = self._body.wants_usage_so_far
        is_plain = self._params.logprobs is None and not self._body.return_token_ids and not counts
        async with aclosing(outputs):
            async for _, output in outputs:
                for completion in output.outputs:
                    choice = self._choices[completion.index]
                    if choice.has_begun and is_plain and choice.parser is None and completion.finish_reason is None:
                        if completion.text:
                            delta = f'{{"content":{quote(completion.text)}}}'
                            rest = '"logprobs":null,"finish_reason":null}'
                            yield f'{head}{{"index":{completion.index},"delta":{delta},{rest}{tail}'.encode()
                    else:
                        for each in self._render_pieces(choice, completion, output):
                            yield writer.write(each, self._usage() if counts else None)
            if shows_usage:
                yield writer.write_usage(self._usage(), self._generation.describe_metrics())

    def _render_pieces(
        self, choice: _Choice, completion: CompletionOutput, output: RequestOutput
    ) -> list[dict[str, Any]]:
        """Returns the chunks with the new part of one choice."""
        chunks = []
        if not choice.has_begun:
            choice.has_begun = True
            first = self._make_chunk(completion.index, {"role": "assistant", "content": ""})
            if self._body.return_token_ids:
                first["prompt_token_ids"] = output.prompt_token_ids
            chunks.append(first)
        is_last = completion.finish_reason is not None
        deltas = [_to_delta(piece) for piece in self._read(choice, completion.text, is_last)]
        logprobs = self._read_logprobs(completion)
        if not deltas and (logprobs or (self._body.return_token_ids and completion.token_ids)):
            deltas = [{}]  # tokens without text of their own yet
        for at, delta in enumerate(deltas):
            chunk = self._make_chunk(completion.index, delta)
            if at == 0:
                chunk["logprobs"] = logprobs
                if self._body.return_token_ids:
                    chunk["token_ids"] = completion.token_ids
            chunks.append(chunk)
        if is_last:
            chunk = self._make_chunk(completion.index, {})
            chunk["finish_reason"] = self._find_reason(choice, completion)
            chunk["stop_reason"] = completion.stop_reason
            chunks.append(chunk)
        return chunks

    def _read(self, choice: _Choice, text: str, is_last: bool) -> Sequence[Piece]:
        """Returns new text as content, calls and, if the body wants it, reasoning."""
        if choice.parser is None:
            return [Content(text)] if text else []
        pieces = choice.parser.push(text) if text else []
        if is_last:
            pieces = [*pieces, *choice.parser.finish()]
        if self._body.include_reasoning is False:
            pieces = [piece for piece in pieces if not isinstance(piece, Reasoning)]
        return pieces

    def _make_chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _render_whole(self, completion: CompletionOutput) -> dict[str, Any]:
        choice = self._choices[completion.index]
        message = _collect_message(self._read(choice, completion.text, is_last=True))
        found: dict[str, Any] = {
            "index": completion.index,
            "message": message,
            "logprobs": self._read_logprobs(completion),
            "finish_reason": self._find_reason(choice, completion),
            "stop_reason": completion.stop_reason,
        }
        if self._body.return_token_ids:
            found["token_ids"] = completion.token_ids
        return found

    def _read_logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if completion.logprobs is None:
            return None
        texts, count = self._state.token_texts, self._body.top_logprobs or 0
        return {"content": texts.to_chat(completion.token_ids, completion.logprobs, count), "refusal": None}

    def _find_reason(self, choice: _Choice, completion: CompletionOutput) -> str | None:
        if completion.finish_reason != "stop" or choice.parser is None or not choice.parser.saw_calls:
            return completion.finish_reason
        tools = self._conversation.tools
        return "stop" if tools is not None and tools.choice == "named" else "tool_calls"  # as OpenAI does

    def _usage(self) -> dict[str, Any]:
        return self._generation.account.to_usage().model_dump()


def _to_delta(piece: Piece) -> dict[str, Any]:
    match piece:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _collect_message(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Returns the message that the pieces form together."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        match piece:
            case Content(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case CallStart(_, call_id, name):
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}})
            case CallArguments(index, text):
                calls[index]["function"]["arguments"] += text
    message: dict[str, Any] = {"role": "assistant", "content": "".join(content), "refusal": None}
    if calls:
        message["tool_calls"], message["content"] = calls, message["content"] or None
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    return message
