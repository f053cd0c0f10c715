"""`/v1/responses`: conversations to answer, in OpenAI's newer form. The stream is a list of typed events."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
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
from jaxserve.server.events import (
    AnswerEnded,
    ArgumentsDelta,
    CallBegun,
    CallEnded,
    ReasoningDelta,
    TextDelta,
    Update,
)
from jaxserve.server.generation import Account, echo_tier
from jaxserve.server.images import read_images
from jaxserve.server.openapi import document
from jaxserve.server.prompts import check_length, name_calls, name_fields, rename_field
from jaxserve.server.protocol.response_input import InputReader
from jaxserve.server.protocol.response_items import CallItem, ItemEvent, OutputItem, TextItem
from jaxserve.server.protocol.response_tools import ResponseTools, read_response_tools
from jaxserve.server.protocol.responses import HIDDEN_REASONING, ResponseAnswer, ResponseRequest
from jaxserve.server.server_state import ServerState, get_state
from jaxserve.server.stream import encode_event

router = APIRouter()
_log = logging.getLogger(__name__)
_NAMES = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}


@router.post("/v1/responses", **document(ResponseRequest, ResponseAnswer, streams=True))
async def create_response(http: Request) -> Response:
    """Answers a text or a conversation."""
    state = get_state(http)
    body = await read_body(http, ResponseRequest, state)
    model = state.check_model(http, body.model)
    check_body(body)
    reader = ResponseReader()
    with name_fields(reader.names):
        response = await answer(http, body, state, reader.read, partial(ResponseWriter, body, model, reader))
    if reader.tools.omitted:
        response.headers["x-omitted-tools"] = ", ".join(reader.tools.omitted)
        _log_omitted(reader.tools, state)
    return response


def _log_omitted(tools: ResponseTools, state: ServerState) -> None:
    """Writes one line for each type, when it is first left out."""
    for kind in tools.omitted:
        if kind not in state.omitted_tools:
            state.omitted_tools.add(kind)
            _log.warning("tools of type %s are left out of prompts: hosted tools do not run here", kind)


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
    for at, name in enumerate(body.include or ()):
        if name != HIDDEN_REASONING:
            message = f"{shorten(name)} is not supported; {HIDDEN_REASONING} is"
            raise InvalidRequestError(message, field=f"include[{at}]", value=name)


class ResponseReader:
    """Reads a body as a conversation.

    Attributes:
        names: the body's names of the engine's fields, the most specific first; complete once the body is read.
        tools: those of the body.
    """

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.tools = ResponseTools()

    def read(self, body: ResponseRequest, state: ServerState) -> Conversation:
        """Returns the conversation of a body.

        Raises:
            InvalidRequestError: names the field.
        """
        self.names.clear()
        form = None
        if body.text is not None and body.text.format is not None:
            self.names["response_format"] = "text.format"
            form = body.text.format.to_response_format().to_params()
        if body.structured_outputs is not None:
            if form is not None:
                raise InvalidRequestError("conflicts with text.format; give only one", field="structured_outputs")
            form = body.structured_outputs.to_params()
        given = InputReader(body.instructions)
        given.read(body.input)
        self.names |= given.names
        self.tools = read_response_tools(
            body.tools,
            body.tool_choice,
            body.parallel_tool_calls,
            self.names,
            refuses_hosted=state.config.serving.refuse_hosted_tools,
        )
        self._name_options(body)
        cuts = body.truncate_prompt_tokens is not None
        messages, images = read_images(state.images, given.messages, body.mm_processor_kwargs)
        check_length([messages, body.tools], state, "messages", cuts=cuts)
        return Conversation(
            messages=messages,
            images=images,
            image_options=body.mm_processor_kwargs,
            tools=self.tools.tool_set,
            call_form=self.tools.input_form,
            params=body.list_params(max_tokens=body.max_output_tokens),
            form=form,
            template_kwargs=body.chat_template_kwargs,
            reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        )

    def _name_options(self, body: ResponseRequest) -> None:
        """Adds the names of other fields, behind the more specific ones of messages and tools."""
        names = {}
        if body.reasoning is not None and body.reasoning.effort is not None:
            names["chat_template_kwargs.reasoning_effort"] = "reasoning.effort"
        if body.structured_outputs is None:
            if body.text is not None and body.text.format is not None:
                names |= {"structured_outputs.json": "text.format.schema", "structured_outputs": "text.format"}
            else:
                names |= name_calls()
        for inner, outer in {**names, **_NAMES}.items():
            self.names.setdefault(inner, outer)


class ResponseWriter:
    """Writes an answer as a response: a list of items."""

    done = b""
    ping = None

    def __init__(
        self,
        body: ResponseRequest,
        model: str,
        reader: ResponseReader,
        conversation: Conversation,
        request: EngineRequest,
    ) -> None:
        self._body, self._model, self._reader = body, model, reader
        self._is_raw = conversation.call_form is not None
        self._number = request.request_id.partition("-")[0]
        self._created = time.time()
        self._tier = echo_tier(body, request)
        self._hides = HIDDEN_REASONING in (body.include or ())
        self._items: list[OutputItem] = []
        self._sequence = itertools.count()
        self._reason: str | None = None

    def write(self, update: Update, usage: Account) -> Iterator[bytes]:
        """Yields the events of an update."""
        return itertools.starmap(self._encode, self._list_events(update))

    def end(self, usage: Account, metrics: Mapping[str, Any]) -> Iterator[bytes]:
        """Yields the event with the whole answer."""
        answer = self._render_whole(usage)
        yield self._encode(f"response.{answer['status']}", {"response": answer})

    def fold(self, updates: Sequence[Update], usage: Account, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the whole answer."""
        for update in updates:
            for _ in self._list_events(update):
                pass
        return self._render_whole(usage)

    def render_error(self, error: ApiError) -> bytes:
        """Returns the event that ends a failed stream."""
        error = rename_field(error, self._reader.names)
        return self._encode("error", {"code": error.code, "message": error.message, "param": error.param})

    def _list_events(self, update: Update) -> Iterator[ItemEvent]:
        if update.begins:
            yield "response.created", {"response": self._render("in_progress")}
            yield "response.in_progress", {"response": self._render("in_progress")}
        if (ended := update.ended) is not None:
            self._reason = ended.reason
        for event in update.events:
            match event:
                case TextDelta(text):
                    yield from self._add_text("message", text)
                case ReasoningDelta(text):
                    yield from self._add_text("reasoning", text)
                case CallBegun(_, call_id, name):
                    tool = self._reader.tools.find(name)
                    place = self._make_id("fc" if tool.kind == "function" else "ctc"), len(self._items)
                    yield from self._begin(CallItem(tool, call_id, *place, is_raw=self._is_raw))
                case ArgumentsDelta(_, text):
                    yield from self._items[-1].add(text)
                case CallEnded(_, is_complete):  # a raw input is whole where the grammar, and so the answer, ended
                    is_whole = self._reason != "length" if self._is_raw else is_complete
                    yield from self._end("completed" if is_whole else "incomplete")
                case AnswerEnded(reason):
                    if not self._items:
                        yield from self._begin(TextItem("message", self._make_id("msg"), 0))
                    yield from self._end("incomplete" if reason == "length" else "completed")

    def _add_text(self, kind: str, text: str) -> Iterator[ItemEvent]:
        """Adds text to the last item, or to a new one if the last is of another kind or has ended."""
        last = self._items[-1] if self._items else None
        if not (isinstance(last, TextItem) and last.kind == kind and last.status == "in_progress"):
            item_id = self._make_id("msg" if kind == "message" else "rs")
            yield from self._begin(TextItem(kind, item_id, len(self._items), hides=self._hides))
        yield from self._items[-1].add(text)

    def _begin(self, item: OutputItem) -> Iterator[ItemEvent]:
        yield from self._end("completed")
        self._items.append(item)
        yield from item.begin()

    def _end(self, status: str) -> Iterator[ItemEvent]:
        if self._items and self._items[-1].status == "in_progress":
            yield from self._items[-1].end(status)

    def _make_id(self, prefix: str) -> str:
        return f"{prefix}_{self._number}{len(self._items)}"

    def _encode(self, kind: str, values: Mapping[str, Any]) -> bytes:
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
        output = [item.render() for item in self._items]
        return self._render(status) | {"incomplete_details": details, "output": output, "usage": counts}

    def _render(self, status: str) -> dict[str, Any]:
        """Returns the answer without what is known at its end."""
        body = self._body
        form = {"type": "text"}
        omitted = self._reader.tools.omitted
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
            "tools": [tool for tool in body.tools or () if tool.get("type") not in omitted],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
        }
