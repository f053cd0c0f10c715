"""Events of an answer become Anthropic's, in its order, and the same answer whole."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request

from jaxserve.request import CompletionOutput, RequestOutput
from jaxserve.sampling_params import OutputKind, SamplingParams
from jaxserve.server import answers
from jaxserve.server.answers import AnswerReader, respond
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
)
from jaxserve.server.generation import Account
from jaxserve.server.protocol.messages import MessagesRequest
from jaxserve.server.routes.messages import MessageWriter
from tests.server.asgi import Client, make_scope
from tests.server.test_live import run, serve

CONTEXT = 100
USAGE = Account(prompt_tokens=10, cached_tokens=4, completion_tokens=5, reasoning_tokens=2)
ENDED = AnswerEnded("stop", None)
CALLED = AnswerEnded("calls", None)


def make_writer(max_tokens: int = 50, **fields: Any) -> MessageWriter:
    body = MessagesRequest.model_validate({"messages": [], "max_tokens": max_tokens, **fields})
    request = SimpleNamespace(request_id="r1-0", prompt_token_ids=[1] * 10, service_tier=0)
    return MessageWriter(body, "m", CONTEXT, Conversation(messages=()), cast(Any, request))


def update(*events: Event, begins: bool = False) -> Update:
    output = RequestOutput("r1-0", "hi", [1] * 10, [], finished=False, num_cached_tokens=4)
    return Update(0, begins, events, CompletionOutput(0, "", [1], None), output)


def parse(pieces: Sequence[bytes]) -> list[dict[str, Any]]:
    found = []
    for block in b"".join(pieces).decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def write(writer: MessageWriter, *events: Event, usage: Account = USAGE) -> list[dict[str, Any]]:
    """Returns the events of a stream in which each event is an output of its own."""
    pieces = [piece for at, event in enumerate(events) for piece in writer.write(update(event, begins=at == 0), usage)]
    return parse([*pieces, *writer.end(usage, {})])


def fold(*events: Event, usage: Account = USAGE, **fields: Any) -> dict[str, Any]:
    return make_writer(**fields).fold([update(*events, begins=True)], usage, {})


def call(index: int, text: str, *, is_complete: bool = True) -> tuple[Event, ...]:
    return CallBegun(index, f"c{index}", "f"), ArgumentsDelta(index, text), CallEnded(index, is_complete)


def test_blocks_follow_one_another() -> None:
    events = (ReasoningDelta("a"), ReasoningDelta("b"), TextDelta('"c'), *call(0, '{"x":1}'), *call(1, "{}"), CALLED)
    found = write(make_writer(), *events)
    kinds = [each["type"].removeprefix("content_block_") for each in found]
    assert kinds == [
        *("message_start", "ping", "start", "delta", "delta", "delta", "stop", "start", "delta", "stop"),
        *("start", "delta", "stop", "start", "delta", "stop", "message_delta", "message_stop"),
    ]
    assert [each["index"] for each in found if "index" in each] == [0] * 5 + [1] * 3 + [2] * 3 + [3] * 3
    deltas = [each["delta"]["type"] for each in found if each["type"] == "content_block_delta"]
    assert deltas == ["thinking_delta"] * 2 + ["signature_delta", "text_delta", "input_json_delta", "input_json_delta"]
    begun = found[0]["message"]
    assert begun["usage"]["input_tokens"] == 6 and begun["usage"]["cache_read_input_tokens"] == 4
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens_details"] == {"thinking_tokens": 2}
    whole = fold(*events)
    signature = next(each["delta"]["signature"] for each in found if each.get("delta", {}).get("signature"))
    assert whole["content"] == [
        {"type": "thinking", "thinking": "ab", "signature": signature},
        {"type": "text", "text": '"c'},
        {"type": "tool_use", "id": "c0", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {}},
    ]
    assert {**begun, **found[-2]["delta"], "usage": found[-2]["usage"]} == {**whole, "content": []}


@pytest.mark.parametrize(
    "text", ['{"a": NaN}', '{"a": nope}', "[1]", "text", '{"a": ' + "1" * 5000 + "}", '{"a": ' * 100_000]
)
def test_arguments_that_are_no_object_are_kept_as_text(text: str) -> None:
    (block,) = fold(*call(0, text), CALLED)["content"]
    assert block["input"] == {"arguments": text}
    deltas = [
        each["delta"]["partial_json"]
        for each in write(make_writer(), *call(0, text), CALLED)
        if "delta" in each and "partial_json" in each["delta"]
    ]
    assert deltas == [text]


def test_a_call_that_is_cut_is_in_the_stream_alone() -> None:
    events = (TextDelta("a"), *call(0, '{"x"', is_complete=False), AnswerEnded("length", None))
    answer = fold(*events)
    assert [block["type"] for block in answer["content"]] == ["text"] and answer["stop_reason"] == "max_tokens"
    assert write(make_writer(), *events)[-3]["type"] == "content_block_stop"


def test_an_answer_without_text_has_no_block() -> None:
    assert fold(ENDED)["content"] == []
    assert [each["type"] for each in write(make_writer(), ENDED)][2:] == ["message_delta", "message_stop"]


def test_reasons() -> None:
    full = Account(prompt_tokens=60, completion_tokens=40)
    assert fold(ENDED)["stop_reason"] == "end_turn"
    assert fold(AnswerEnded("stop", 7))["stop_reason"] == "end_turn"  # a stop token
    stopped = fold(AnswerEnded("stop", "END"))
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "END")
    cut = AnswerEnded("length", None)
    assert fold(cut, max_tokens=5)["stop_reason"] == "max_tokens"
    assert fold(cut, max_tokens=9)["stop_reason"] == "max_tokens"  # the server's own limit
    assert fold(cut, usage=full, max_tokens=50)["stop_reason"] == "model_context_window_exceeded"
    assert fold(cut, usage=full, max_tokens=40)["stop_reason"] == "max_tokens"


def test_a_ping_in_front_of_the_first_output_begins_the_message() -> None:
    writer = make_writer()
    early = parse([writer.ping()])
    assert [each["type"] for each in early] == ["message_start", "ping"]
    assert early[0]["message"]["usage"]["input_tokens"] == 10  # what is cached is not known yet
    assert [each["type"] for each in parse([writer.ping()])] == ["ping"]
    kinds = [each["type"] for each in write(writer, TextDelta("a"), ENDED)]
    assert "message_start" not in kinds and kinds[-1] == "message_stop"


def test_an_error_is_an_event_with_the_bodys_names() -> None:
    (event,) = parse([make_writer().render_error(ApiError(504, "too late", param="stop"))])
    assert event == {"type": "error", "error": {"type": "timeout_error", "message": "too late"}}


@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_begins_before_a_late_first_output(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Its head and a ping are there while the engine works on the prompt; an error is an event then."""
    monkeypatch.setattr(answers, "PING_SECONDS", 0.01)
    with serve() as served:
        served.gate.clear()

        async def test() -> None:
            client = Client()
            http = Request(make_scope("/v1/messages"), client.receive, client.send)
            await http.body()
            params = SamplingParams(max_tokens=2, output_kind=OutputKind.DELTA)
            deadline = time.monotonic() + 0.5 if fails else None
            request = served.llm.requests.make({"prompt_token_ids": [5] * 10}, params, deadline=deadline)
            body = MessagesRequest.model_validate({"messages": [], "max_tokens": 2, "stream": True})
            writer = MessageWriter(body, "m", CONTEXT, Conversation(messages=()), request)
            reader = AnswerReader(1)
            response = await respond(http, body, served.state, [request], reader, writer, operation="chat")
            serving = asyncio.ensure_future(response(http.scope, client.receive, client.send))
            while len(client.answer.messages) < 2:
                await asyncio.sleep(0.001)
            assert client.answer.status == 200
            early = parse([client.answer.messages[1]["body"]])
            assert [each["type"] for each in early] == ["message_start", "ping"]
            while fails and time.monotonic() < (deadline or 0):
                await asyncio.sleep(0.01)
            served.gate.set()
            await serving
            found = parse([client.answer.body])
            assert [each["type"] for each in found].count("message_start") == 1
            if fails:
                assert found[-1]["type"] == "error" and found[-1]["error"]["type"] == "timeout_error"
            else:
                assert found[-1]["type"] == "message_stop"

        run(test)
