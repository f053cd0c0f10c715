"""`/v1/chat/completions`: conversations to answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequestError
from jaxserve.request import CompletionOutput
from jaxserve.request import Request as EngineRequest
from jaxserve.server.answers import answer
from jaxserve.server.body import read_body
from jaxserve.server.conversation import Conversation
from jaxserve.server.errors import ApiError
from jaxserve.server.events import (
    AnswerEnded,
    ArgumentsDelta,
    CallBegun,
    CallEnded,
    Event,
    ReasoningDelta,
    TextDelta,
    Update,
    join_texts,
)
from jaxserve.server.generation import Account
from jaxserve.server.images import read_images
from jaxserve.server.logprobs import to_prompt_logprobs
from jaxserve.server.openapi import document
from jaxserve.server.prompts import (
    check_count,
    check_length,
    name_calls,
    name_fields,
    name_form,
    read_form,
    rename_field,
)
from jaxserve.server.protocol.chat import ChatCompletion, ChatCompletionRequest
from jaxserve.server.server_state import ServerState, get_state
from jaxserve.server.stream import DONE, make_chunk_writer, render_error
from jaxserve.server.tools import read_tools

router = APIRouter()


@router.post("/v1/chat/completions", **document(ChatCompletionRequest, ChatCompletion, streams=True))
async def create_chat_completion(http: Request) -> Response:
    """Answers a conversation."""
    state = get_state(http)
    body = await read_body(http, ChatCompletionRequest, state)
    model = state.check_model(http, body.model)
    check_body(body, state)
    with name_fields(list_names(body)):
        return await answer(http, body, state, read_conversation, partial(ChatWriter, body, model, state))


def check_body(body: ChatCompletionRequest, state: ServerState) -> None:
    """Refuses conflicting fields, and what exceeds the server's limits.

    Raises:
        InvalidRequestError: names the field.
    """
    body.check_stream()
    check_count(body, state)
    if body.top_logprobs and not body.logprobs:
        message = "is only allowed when logprobs is true"
        raise InvalidRequestError(message, field="top_logprobs", value=body.top_logprobs)
    if body.stream and body.prompt_logprobs is not None:
        message = "is only allowed without stream"
        raise InvalidRequestError(message, field="prompt_logprobs", value=body.prompt_logprobs)
    if body.modalities not in (None, ["text"]):
        raise InvalidRequestError("answers are text only", field="modalities", value=body.modalities)


def list_names(body: ChatCompletionRequest) -> dict[str, str]:
    """Returns the body's names of the engine's fields."""
    names = {"logprobs": "top_logprobs", "prompt": "messages"}
    if body.reasoning_effort is not None:
        names["chat_template_kwargs.reasoning_effort"] = "reasoning_effort"
    if body.max_tokens is None:
        names["max_tokens"] = "max_completion_tokens"
    if body.response_format is None and body.structured_outputs is None:
        names |= name_calls()
    return names | name_form(body)


def read_conversation(body: ChatCompletionRequest, state: ServerState) -> Conversation:
    """Returns the conversation of a body.

    Raises:
        InvalidRequestError: names the field.
    """
    messages, images = read_images(state.images, body.messages, body.mm_processor_kwargs)
    check_length([messages, body.tools], state, "messages", cuts=body.truncate_prompt_tokens is not None)
    logprobs = {"logprobs": body.top_logprobs or 0} if body.logprobs else {}
    return Conversation(
        messages=messages,
        images=images,
        image_options=body.mm_processor_kwargs,
        tools=read_tools(body.tools, body.tool_choice, body.parallel_tool_calls),
        form=read_form(body),
        params=body.list_params(max_tokens=_read_max_tokens(body), **logprobs),
        template=body.chat_template,
        template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning_effort,
        shows_reasoning=body.include_reasoning is not False,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )


def _read_max_tokens(body: ChatCompletionRequest) -> int | None:
    both = body.max_tokens, body.max_completion_tokens
    if None not in both and both[0] != both[1]:
        message = f"conflicts with max_completion_tokens {both[1]}"
        raise InvalidRequestError(message, field="max_tokens", value=both[0])
    return both[0] if both[0] is not None else both[1]


class ChatWriter:
    """Writes an answer as a chat completion."""

    done = DONE
    ping = None

    def __init__(
        self,
        body: ChatCompletionRequest,
        model: str,
        state: ServerState,
        conversation: Conversation,
        request: EngineRequest,
    ) -> None:
        self._body, self._texts = body, state.token_texts
        self._is_named = conversation.tools is not None and conversation.tools.choice == "named"
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._chunks = make_chunk_writer(body, model, state, request, prefix="chatcmpl", kind=kind)
        self._is_plain = not (request.params.logprobs is not None or body.return_token_ids or body.wants_usage_so_far)

    def render_error(self, error: ApiError) -> bytes:
        """Returns the event that ends a failed stream."""
        return render_error(rename_field(error, list_names(self._body)))

    def write(self, update: Update, usage: Account) -> list[bytes]:
        """Returns the chunks of an update."""
        events = update.events
        if self._is_plain and not update.begins and len(events) == 1 and isinstance(events[0], TextDelta):
            choice = f'{{"index":{update.choice},"delta":{{"content":{quote(events[0].text)}}}'  # the usual chunk
            return [f'{self._chunks.head}{choice},"logprobs":null,"finish_reason":null}}{self._chunks.tail}'.encode()]
        shown = usage.to_usage() if self._body.wants_usage_so_far else None
        return [self._chunks.write(chunk, shown) for chunk in self._list_chunks(update)]

    def end(self, usage: Account, metrics: Mapping[str, Any]) -> Sequence[bytes]:
        """Returns the chunk with the usage, if it is shown."""
        return self._chunks.end(usage.to_usage(), metrics)

    def fold(self, updates: Sequence[Update], usage: Account, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the whole answer."""
        found: dict[str, Any] = {}
        output = updates[-1].output
        if self._body.prompt_logprobs is not None:
            found["prompt_logprobs"] = to_prompt_logprobs(output.prompt_logprobs)
        if self._body.return_token_ids:
            found["prompt_token_ids"] = output.prompt_token_ids
        choices = [self._render(update) for update in updates]
        return {**self._chunks.values, "choices": choices, "usage": usage.to_usage(), **found, **metrics}

    def _list_chunks(self, update: Update) -> list[dict[str, Any]]:
        """Returns the chunks' choices."""
        completion, chunks = update.completion, []
        if update.begins:
            first = _make_chunk(update.choice, {"role": "assistant", "content": ""})
            if self._body.return_token_ids:
                first["prompt_token_ids"] = update.output.prompt_token_ids
            chunks.append(first)
        deltas = [delta for event in update.events if (delta := _to_delta(event)) is not None]
        logprobs = self._read_logprobs(completion)
        if not deltas and (logprobs or (self._body.return_token_ids and completion.token_ids)):
            deltas = [{}]  # tokens without text of their own yet
        for at, delta in enumerate(deltas):
            chunk = _make_chunk(update.choice, delta)
            if at == 0:
                chunk["logprobs"] = logprobs
                if self._body.return_token_ids:
                    chunk["token_ids"] = completion.token_ids
            chunks.append(chunk)
        if (ended := update.ended) is not None:
            chunk = _make_chunk(update.choice, {})
            chunk |= {"finish_reason": self._name_reason(ended), "stop_reason": ended.stop_reason}
            chunks.append(chunk)
        return chunks

    def _render(self, update: Update) -> dict[str, Any]:
        """Returns a whole choice."""
        ended, completion = update.ended, update.completion
        assert ended is not None
        found: dict[str, Any] = {
            "index": update.choice,
            "message": _collect_message(update.events),
            "logprobs": self._read_logprobs(completion),
            "finish_reason": self._name_reason(ended),
            "stop_reason": ended.stop_reason,
        }
        if self._body.return_token_ids:
            found["token_ids"] = completion.token_ids
        return found

    def _read_logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if completion.logprobs is None:
            return None
        count = self._body.top_logprobs or 0
        return {"content": self._texts.to_chat(completion.token_ids, completion.logprobs, count), "refusal": None}

    def _name_reason(self, ended: AnswerEnded) -> str:
        if ended.reason != "calls":
            return ended.reason
        return "stop" if self._is_named else "tool_calls"  # as OpenAI does


def _make_chunk(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _to_delta(event: Event) -> dict[str, Any] | None:
    """Returns an event in OpenAI's format; None for an end, which is no delta."""
    match event:
        case TextDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return _name_reasoning(text)
        case CallBegun(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ArgumentsDelta(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case _:
            return None


def _collect_message(events: Sequence[Event]) -> dict[str, Any]:
    """Returns the message that the events form together. A call that the answer's end cut off is left out."""
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case CallBegun(index, call_id, name):
                calls[index] = {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
            case ArgumentsDelta(index, text):
                calls[index]["function"]["arguments"] += text
            case CallEnded(index, is_complete) if not is_complete:
                del calls[index]
    message: dict[str, Any] = {"role": "assistant", "content": join_texts(events, TextDelta), "refusal": None}
    if calls:
        message["tool_calls"], message["content"] = list(calls.values()), message["content"] or None
    if reasoning := join_texts(events, ReasoningDelta):
        message |= _name_reasoning(reasoning)
    return message


def _name_reasoning(text: str) -> dict[str, str]:
    """Returns reasoning under both of its names: newer clients of vLLM and the Hub's read the first."""
    return {"reasoning": text, "reasoning_content": text}
