"""`/v1/responses`: conversations to answer, in OpenAI's newer form. The stream is a list of typed events."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequestError, shorten
from jaxserve.request import Request as EngineRequest
from jaxserve.server.answers import answer
from jaxserve.server.body import read_body
from jaxserve.server.conversation import Conversation
from jaxserve.server.errors import ApiError
from jaxserve.server.events import AnswerEnded, ReasoningDelta, TextDelta, Update
from jaxserve.server.generation import Account, echo_tier
from jaxserve.server.openapi import document
from jaxserve.server.prompts import check_length, name_fields, rename_field
from jaxserve.server.protocol.responses import ResponseAnswer, ResponseRequest
from jaxserve.server.server_state import ServerState, get_state
from jaxserve.server.stream import encode_event
from jaxserve.tokenizers.checks import require_text

router = APIRouter()
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text")
_ITEM_FIELDS = {  # fields of input items, which may be the output items of an earlier answer
    "message": ("type", "role", "content", "id", "status"),
    "reasoning": ("type", "content", "summary", "id", "status"),
}


@router.post("/v1/responses", **document(ResponseRequest, ResponseAnswer, streams=True))
async def create_response(http: Request) -> Response:
    """Answers a text or a conversation."""
    state = get_state(http)
    body = await read_body(http, ResponseRequest, state)
    model = state.check_model(body.model)
    check_body(body)
    with name_fields(list_names(body)):
        return await answer(http, body, state, read_conversation, partial(ResponseWriter, body, model))


def check_body(body: ResponseRequest) -> None:
    """Refuses fields and values that are known but not supported.

    Raises:
        InvalidRequestError: names the field.
    """
    for name, options in (("text", body.text), ("reasoning", body.reasoning)):
        if options is not None:
            options.refuse_unsupported(f"{name}.")
    if body.truncation == "auto":
        raise InvalidRequestError("'auto' is not supported; use disabled", field="truncation", value="auto")
    if body.tool_choice not in (None, "auto", "none"):
        message = f"{shorten(body.tool_choice)} needs tools; use /v1/chat/completions for them"
        raise InvalidRequestError(message, field="tool_choice", value=body.tool_choice)


def read_conversation(body: ResponseRequest, state: ServerState) -> Conversation:
    """Returns the conversation of a body.

    Raises:
        InvalidRequestError: names the field.
    """
    form = None
    if body.text is not None and body.text.format is not None:
        form = body.text.format.to_response_format().to_params()
    if body.structured_outputs is not None:
        if form is not None:
            raise InvalidRequestError("conflicts with text.format; give only one", field="structured_outputs")
        form = body.structured_outputs.to_params()
    messages = _read_messages(body)
    check_length(messages, state, "messages", cuts=body.truncate_prompt_tokens is not None)
    return Conversation(
        messages=messages,
        params=body.list_params(max_tokens=body.max_output_tokens),
        form=form,
        template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
    )


def list_names(body: ResponseRequest) -> dict[str, str]:
    """Returns the body's names of the engine's fields, the most specific first."""
    names = {"messages[0].content": "instructions"} if body.instructions else {}
    if isinstance(body.input, str):
        names[f"messages[{len(names)}].content"] = "input"
    else:
        sources = [at for at, item in enumerate(body.input) if item.get("type") != "reasoning"]
        names |= {f"messages[{len(names) + number}]": f"input[{at}]" for number, at in enumerate(sources)}
    form = {}
    if body.structured_outputs is None:
        form = {"structured_outputs.json": "text.format.schema", "structured_outputs": "text.format"}
    if body.reasoning is not None and body.reasoning.effort is not None:
        form["chat_template_kwargs.reasoning_effort"] = "reasoning.effort"
    more = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
    return names | form | more


def _read_messages(body: ResponseRequest) -> list[dict[str, Any]]:
    """Returns the input as chat messages. Reasoning that a client sends back is joined to the answer that follows it.

    Raises:
        InvalidRequestError: an item is not a text message.
    """
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    reasoning: dict[str, str] = {}
    for at, item in enumerate(body.input):
        name, kind = f"input[{at}]", item.get("type", "message")
        if not isinstance(kind, str) or kind not in _ITEM_FIELDS:
            message = f"must be a message, got {shorten(kind)}"
            raise InvalidRequestError(message, field=f"{name}.type", value=kind)
        for key, value in item.items():
            if key not in _ITEM_FIELDS[kind] and value is not None:
                message = f"{shorten(key)} is not supported; {', '.join(_ITEM_FIELDS[kind])} are"
                raise InvalidRequestError(message, field=name, value=key)
        content = item.get("content")
        if isinstance(content, list):
            content = [_read_part(part, f"{name}.content[{number}]") for number, part in enumerate(content)]
        if kind == "reasoning":
            reasoning = {"reasoning_content": _join_texts(content, f"{name}.content")}
            continue
        follows = reasoning if item.get("role") == "assistant" else {}
        messages.append({"role": item.get("role"), "content": content, **follows})
        reasoning = {}
    return messages


def _join_texts(parts: Any, name: str) -> str:
    if not isinstance(parts, list | None):
        raise InvalidRequestError(f"must be a list, got {shorten(parts)}", field=name, value=parts)
    return "".join(require_text(part["text"], f"{name}[{number}].text") for number, part in enumerate(parts or ()))


def _read_part(part: Any, name: str) -> dict[str, Any]:
    if isinstance(part, dict) and part.get("type") == "refusal":
        return {"type": "text", "text": require_text(part.get("refusal"), f"{name}.refusal")}
    if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
        raise InvalidRequestError(f"only text is supported, got {shorten(part)}", field=name, value=part)
    return {"type": "text", "text": part.get("text")}


@dataclass(slots=True)
class _Item:
    """One item of the answer: reasoning or a message."""

    kind: str  # message or reasoning
    item_id: str
    index: int
    texts: list[str] = field(default_factory=list)

    @property
    def part_kind(self) -> str:
        return "output_text" if self.kind == "message" else "reasoning_text"

    def render(self, status: str) -> dict[str, Any]:
        """Returns the item in OpenAI's format."""
        content = [] if status == "in_progress" else [self.render_part()]
        found = {"id": self.item_id, "type": self.kind, "status": status, "content": content}
        return found | ({"role": "assistant"} if self.kind == "message" else {"summary": []})

    def render_part(self, text: str | None = None) -> dict[str, Any]:
        """Returns the item's only content part."""
        found = {"type": self.part_kind, "text": "".join(self.texts) if text is None else text}
        return found | ({"annotations": [], "logprobs": []} if self.kind == "message" else {})


class ResponseWriter:
    """Writes an answer as a response: a list of items, each with one content part."""

    done = b""
    ping = None

    def __init__(self, body: ResponseRequest, model: str, conversation: Conversation, request: EngineRequest) -> None:
        self._body, self._model = body, model
        self._number = request.request_id.partition("-")[0]
        self._created = time.time()
        self._tier = echo_tier(body, request)
        self._items: list[_Item] = []
        self._sequence = itertools.count()
        self._reason: str | None = None

    def write(self, update: Update, usage: Account) -> Iterator[bytes]:
        """Yields the events of an update."""
        if update.begins:
            yield self._event("response.created", response=self._render("in_progress"))
            yield self._event("response.in_progress", response=self._render("in_progress"))
        if (ended := update.ended) is not None:
            self._reason = ended.reason  # shown with all items that end in this update
        for event in update.events:
            match event:
                case TextDelta(text):
                    yield from self._add_text("message", text)
                case ReasoningDelta(text):
                    yield from self._add_text("reasoning", text)
                case AnswerEnded():
                    if not self._items:
                        yield from self._open_item("message")
                    yield from self._close_item()

    def end(self, usage: Account, metrics: Mapping[str, Any]) -> Iterator[bytes]:
        """Yields the event with the whole answer."""
        answer = self._render_whole(usage)
        yield self._event(f"response.{answer['status']}", response=answer)

    def fold(self, updates: Sequence[Update], usage: Account, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the whole answer."""
        for update in updates:
            for _ in self.write(update, usage):
                pass
        return self._render_whole(usage)

    def render_error(self, error: ApiError) -> bytes:
        """Returns the event that ends a failed stream."""
        error = rename_field(error, list_names(self._body))
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _add_text(self, kind: str, text: str) -> Iterator[bytes]:
        """Adds text to the last item, or to a new one if the last is of another kind."""
        if not self._items or self._items[-1].kind != kind:
            yield from self._close_item()
            yield from self._open_item(kind)
        item = self._items[-1]
        item.texts.append(text)
        extra = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"response.{item.part_kind}.delta", item, delta=text, **extra)

    def _open_item(self, kind: str) -> Iterator[bytes]:
        prefix = "msg" if kind == "message" else "rs"
        item = _Item(kind, f"{prefix}_{self._number}{len(self._items)}", len(self._items))
        self._items.append(item)
        shown = item.render("in_progress")
        yield self._event("response.output_item.added", output_index=item.index, item=shown)
        yield self._event("response.content_part.added", item, part=item.render_part(""))

    def _close_item(self) -> Iterator[bytes]:
        if not self._items:
            return
        item = self._items[-1]
        extra = {"logprobs": []} if item.kind == "message" else {}
        yield self._event(f"response.{item.part_kind}.done", item, text="".join(item.texts), **extra)
        yield self._event("response.content_part.done", item, part=item.render_part())
        shown = item.render(self._find_status()[0])
        yield self._event("response.output_item.done", output_index=item.index, item=shown)

    def _event(self, kind: str, inside: _Item | None = None, **values: Any) -> bytes:
        """Returns one event; `inside` is the item of an event about a content part."""
        if inside is not None:
            values |= {"item_id": inside.item_id, "output_index": inside.index, "content_index": 0}
        return encode_event({"type": kind, "sequence_number": next(self._sequence), **values}, kind)

    def _find_status(self) -> tuple[str, dict[str, str] | None]:
        if self._reason == "length":
            return "incomplete", {"reason": "max_output_tokens"}
        return "completed", None

    def _render_whole(self, usage: Account) -> dict[str, Any]:
        status, details = self._find_status()
        counts = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        output = [item.render(status) for item in self._items]
        return self._render(status) | {"incomplete_details": details, "output": output, "usage": counts}

    def _render(self, status: str) -> dict[str, Any]:
        """Returns the answer without what is known at its end."""
        body = self._body
        form = {"type": "text"}
        if body.text is not None and body.text.format is not None:
            form = body.text.format.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": f"resp_{self._number}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            **self._tier,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": form},
            "tool_choice": body.tool_choice or "auto",
            "tools": [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }
