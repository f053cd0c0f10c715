"""`/v1/messages` and `/v1/messages/count_tokens`: conversations in Anthropic's form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from json.encoder import encode_basestring_ascii as quote
from typing import Any, Never

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from jaxserve.errors import InvalidRequestError, shorten
from jaxserve.media.items import MediaItem
from jaxserve.request import Request as EngineRequest
from jaxserve.request import ServiceTier
from jaxserve.server.answers import answer
from jaxserve.server.body import read_body
from jaxserve.server.conversation import Conversation, encode_prompt
from jaxserve.server.errors import ApiError
from jaxserve.server.events import AnswerEnded, ArgumentsDelta, CallBegun, CallEnded, ReasoningDelta, TextDelta, Update
from jaxserve.server.generation import Account
from jaxserve.server.images import read_images
from jaxserve.server.openapi import document
from jaxserve.server.prompts import check_length, name_calls, name_fields, rename_field
from jaxserve.server.protocol.message_tools import read_choice, read_tool
from jaxserve.server.protocol.messages import (
    CountTokensRequest,
    Message,
    MessagesErrorBody,
    MessagesRequest,
    MessageTokens,
)
from jaxserve.server.protocol.turns import TurnReader
from jaxserve.server.routes.tokens import run_with_images
from jaxserve.server.server_state import ServerState, get_state
from jaxserve.server.stream import encode_event
from jaxserve.server.template_use import list_variables, shows_system_turns, switch_reasoning
from jaxserve.server.tools import ToolSet, read_tools

router = APIRouter()
_SIGNATURE = "jaxserve"  # of reasoning; clients send it back, and nothing reads it
_USUAL_EFFORT = "high"  # Anthropic's default
_TIERS = {ServiceTier.DEFAULT: "standard", ServiceTier.PRIORITY: "priority"}  # Anthropic has no name for flex
_NAMES = {  # the body's names of the engine's fields
    "chat_template_kwargs.reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
    "prompt": "messages",
    "tool_choice.function": "tool_choice",
}


@router.post("/v1/messages", **document(MessagesRequest, Message, streams=True, error=MessagesErrorBody))
async def create_message(http: Request) -> Response:
    """Answers a conversation in Anthropic's form."""
    state = get_state(http)
    body = await read_body(http, MessagesRequest, state)
    model = state.check_model(http, body.model)
    names = list_names(body)
    with name_fields(names):
        make_writer = partial(MessageWriter, body, model, state.engine.max_model_len)
        return await answer(http, body, state, partial(read_conversation, names), make_writer)


@router.post("/v1/messages/count_tokens", **document(CountTokensRequest, MessageTokens, error=MessagesErrorBody))
async def count_tokens(http: Request) -> JSONResponse:
    """The number of tokens that a conversation's prompt has."""
    state = get_state(http)
    body = await read_body(http, CountTokensRequest, state)
    state.check_model(http, body.model)
    names = list_names(body)
    with name_fields(names):
        count = await run_with_images(http, state, partial(_count, names, body, state))
    return JSONResponse({"input_tokens": count})


def _count(
    names: dict[str, str], body: CountTokensRequest, state: ServerState, items: Sequence[MediaItem] | None
) -> int:
    return len(encode_prompt(read_conversation(names, body, state), state, items))


def list_names(body: CountTokensRequest) -> dict[str, str]:
    """Returns the body's names of the engine's fields, but those of messages, which `read_conversation` adds."""
    names = dict(_NAMES)
    if body.structured_outputs is None:
        has_form = body.output_config is not None and body.output_config.format is not None
        form = "output_config.format"
        own = {"structured_outputs.json": f"{form}.schema", "structured_outputs": form}
        names |= own if has_form else name_calls()
    for at in range(len(body.tools or ())):
        names[f"tools[{at}].function.parameters"] = f"tools[{at}].input_schema"
        names[f"tools[{at}].function"] = f"tools[{at}]"
    return names


def read_conversation(names: dict[str, str], body: CountTokensRequest, state: ServerState) -> Conversation:
    """Returns the conversation of a body, and adds the body's names of its messages to `names`.

    Raises:
        InvalidRequestError: names the field.
    """
    if body.context_management is not None:
        body.context_management.refuse_edits()
    turns = TurnReader(partial(shows_system_turns, state), reads_images=state.images is not None)
    turns.read(body)
    names |= turns.list_images()
    cuts = body.truncate_prompt_tokens is not None
    messages, images = read_images(state.images, turns.messages)
    check_length([messages, body.tools], state, "messages", cuts=cuts)
    for at, source in enumerate(turns.sources):
        names |= {f"messages[{at}].content": source, f"messages[{at}]": source}
    thinking = body.thinking
    return Conversation(
        messages=messages,
        images=images,
        tools=_read_tools(body, state),
        form=body.read_form(),
        params=body.list_params(max_tokens=body.max_tokens, **_read_stop(body)),
        template_kwargs=_read_thinking(body, state),
        reasoning_effort=_read_effort(body, state),
        shows_reasoning=thinking is None or thinking.display != "omitted",
        continue_final_message=turns.messages[-1]["role"] == "assistant",
    )


def _read_stop(body: CountTokensRequest) -> dict[str, Any]:
    return {} if body.stop_sequences is None else {"stop": body.stop_sequences}


def _read_thinking(body: CountTokensRequest, state: ServerState) -> dict[str, bool]:
    """Returns the variables of the template; `adaptive` leaves the choice to the model."""
    thinking = body.thinking
    if thinking is None:
        return {}
    budget = thinking.budget_tokens
    if budget is not None and body.max_tokens is not None and budget < body.max_tokens - 1:
        message = f"is not enforced here; leave it out, or send max_tokens - 1, which bounds nothing, got {budget}"
        raise InvalidRequestError(message, field="thinking.budget_tokens", value=budget)
    return {} if thinking.type == "adaptive" else switch_reasoning(state, is_on=thinking.type == "enabled")


def _read_effort(body: CountTokensRequest, state: ServerState) -> str | None:
    """Returns the effort; None for the usual one where the template reads none, as clients always send it."""
    effort = body.output_config.effort if body.output_config is not None else None
    return None if effort == _USUAL_EFFORT and "reasoning_effort" not in list_variables(state) else effort


def _read_tools(body: CountTokensRequest, state: ServerState) -> ToolSet | None:
    """Returns the tools and the choice among them.

    Raises:
        InvalidRequestError: names the malformed part, or the choice that this model or this server does not have.
    """
    described = [read_tool(tool, f"tools[{at}]") for at, tool in enumerate(body.tools or ())]
    choice, parallel = read_choice(body.tool_choice)
    if described and choice in (None, "auto"):
        reason = None
        if not state.config.serving.enable_auto_tool_choice:
            reason = "is disabled here (enable_auto_tool_choice)"
        elif state.tool_parser is None:
            reason = "needs a model that can call tools, and this one's chat template shows no calls"
        if reason is not None and isinstance(body, MessagesRequest):
            raise InvalidRequestError(f"auto {reason}; use any, tool or none", field="tool_choice.type", value="auto")
    if not described and choice not in (None, "auto", "none"):
        kind = shorten((body.tool_choice or {}).get("type"))
        raise InvalidRequestError(f"{kind} needs tools, and there are none", field="tool_choice.type", value=choice)
    return read_tools(described, choice, parallel)


@dataclass(slots=True)
class _Block:
    """One block of the answer: text, thinking or a call."""

    kind: str  # text, thinking or tool_use
    index: int
    call: CallBegun | None = None
    texts: list[str] = field(default_factory=list)
    is_complete: bool = True

    def render(self, *, is_whole: bool) -> dict[str, Any]:
        """Returns the block as it begins, or as it is in the end."""
        text = "".join(self.texts) if is_whole else ""
        if self.kind == "text":
            return {"type": "text", "text": text}
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": text, "signature": _SIGNATURE if is_whole else ""}
        assert self.call is not None
        given = _parse_arguments(text) if is_whole else {}
        return {"type": "tool_use", "id": self.call.call_id, "name": self.call.name, "input": given}


class MessageWriter:
    """Writes an answer as a message: a list of blocks, each closed before the next begins."""

    done = b""

    def __init__(
        self, body: MessagesRequest, model: str, context: int, conversation: Conversation, request: EngineRequest
    ) -> None:
        """`context` is the most tokens that prompt and answer may have together."""
        self._body, self._model, self._context = body, model, context
        self._id = f"msg_{request.request_id.partition('-')[0]}"
        self._num_prompt = len(request.prompt_token_ids)
        self._tier = {} if body.service_tier is None else {"service_tier": _TIERS.get(request.service_tier)}
        self._names = list_names(body)
        self._has_begun = False
        self._blocks: list[_Block] = []
        self._open: _Block | None = None
        self._ended: AnswerEnded | None = None

    def ping(self) -> bytes:
        """Returns the event that says that the answer is still being made; the first comes behind the beginning."""
        return b"".join(self._begin(0)) + encode_event({"type": "ping"}, "ping")

    def write(self, update: Update, usage: Account) -> Iterator[bytes]:
        """Yields the events of an update."""
        if update.begins:
            yield from self._begin(update.output.num_cached_tokens)
            yield encode_event({"type": "ping"}, "ping")
        for event in update.events:
            match event:
                case TextDelta(text):
                    yield from self._add("text", text)
                case ReasoningDelta(text):
                    yield from self._add("thinking", text)
                case CallBegun():
                    yield from self._begin_block("tool_use", event)
                case ArgumentsDelta(_, text) if self._open is not None:
                    self._open.texts.append(text)
                    yield self._delta({"type": "input_json_delta", "partial_json": text})
                case CallEnded(_, is_complete) if self._open is not None:
                    self._open.is_complete = is_complete
                    yield from self._end_block()
                case AnswerEnded():
                    self._ended = event
                    yield from self._end_block()

    def end(self, usage: Account, metrics: Mapping[str, Any]) -> Iterator[bytes]:
        """Yields the events behind the last block."""
        delta = self._describe_end(usage)
        yield encode_event({"type": "message_delta", "delta": delta, "usage": self._count(usage)}, "message_delta")
        yield encode_event({"type": "message_stop"}, "message_stop")

    def fold(self, updates: Sequence[Update], usage: Account, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the whole answer. A call that the answer's end cut off is left out."""
        for update in updates:
            for _ in self.write(update, usage):
                pass
        content = [block.render(is_whole=True) for block in self._blocks if block.is_complete]
        return {**self._render({**self._count(usage), **self._tier}), "content": content, **self._describe_end(usage)}

    def render_error(self, error: ApiError) -> bytes:
        """Returns the event that ends a failed stream."""
        return encode_event(rename_field(error, self._names).messages_body, "error")

    def _begin(self, num_cached: int) -> Iterator[bytes]:
        """Yields the first event, once."""
        if self._has_begun:
            return
        self._has_begun = True
        usage = Account(prompt_tokens=self._num_prompt, cached_tokens=num_cached)
        message = self._render({**self._count(usage), **self._tier})
        yield encode_event({"type": "message_start", "message": message}, "message_start")

    def _render(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer without what is known at its end."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _count(self, usage: Account) -> dict[str, Any]:
        """Returns the counts in Anthropic's form, where tokens read from the cache are apart."""
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }

    def _describe_end(self, usage: Account) -> dict[str, Any]:
        ended = self._ended
        assert ended is not None
        if ended.reason == "calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if ended.reason == "length":
            fills_context = usage.prompt_tokens + usage.completion_tokens >= self._context
            is_asked = usage.completion_tokens >= self._body.max_tokens
            reason = "model_context_window_exceeded" if fills_context and not is_asked else "max_tokens"
            return {"stop_reason": reason, "stop_sequence": None}
        if isinstance(ended.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": ended.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _add(self, kind: str, text: str) -> Iterator[bytes]:
        """Adds text to the open block, or to a new one if that is of another kind."""
        if self._open is None or self._open.kind != kind:
            yield from self._begin_block(kind)
        assert self._open is not None
        self._open.texts.append(text)
        if kind == "thinking":
            yield self._delta({"type": "thinking_delta", "thinking": text})
        else:  # the usual event
            head = f'event: content_block_delta\ndata: {{"type":"content_block_delta","index":{self._open.index},'
            yield f'{head}"delta":{{"type":"text_delta","text":{quote(text)}}}}}\n\n'.encode()

    def _begin_block(self, kind: str, call: CallBegun | None = None) -> Iterator[bytes]:
        yield from self._end_block()
        block = self._open = _Block(kind, len(self._blocks), call)
        self._blocks.append(block)
        shown = block.render(is_whole=False)
        event = {"type": "content_block_start", "index": block.index, "content_block": shown}
        yield encode_event(event, "content_block_start")

    def _end_block(self) -> Iterator[bytes]:
        block = self._open
        if block is None:
            return
        if block.kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        self._open = None
        yield encode_event({"type": "content_block_stop", "index": block.index}, "content_block_stop")

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        assert self._open is not None
        event = {"type": "content_block_delta", "index": self._open.index, "delta": delta}
        return encode_event(event, "content_block_delta")


def _parse_arguments(text: str) -> dict[str, Any]:
    """Returns a call's arguments as an object. Text that is no JSON object is one member of it, as in prompts."""
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": text}


def _refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is not JSON")
