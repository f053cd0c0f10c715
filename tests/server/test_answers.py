"""Outputs are read as events once, whatever the protocol; and bodies of all protocols as one kind of conversation."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from jaxserve.request import CompletionOutput, Logprob, RequestOutput
from jaxserve.sampling_params import OutputKind
from jaxserve.server import json_text
from jaxserve.server.answers import AnswerReader, ReasoningCounter, _stream
from jaxserve.server.app import make_app
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
from jaxserve.server.options import ServerConfig
from jaxserve.server.protocol.chat import ChatCompletionRequest
from jaxserve.server.protocol.responses import ResponseRequest
from jaxserve.server.routes import chat, responses
from jaxserve.server.routes.completions import CompletionWriter
from jaxserve.server.tools import make_answer_parser, read_tools
from tests.server.test_live import run, serve

TOOLS = [{"type": "function", "function": {"name": name}} for name in "fg"]
CALL = '<tool_call>{{"name": "{}", "arguments": {{"a": 1}}}}</tool_call>'
R = ReasoningDelta


def give(text: str, reason: str | None = None, index: int = 0, **more: Any) -> RequestOutput:
    completion = CompletionOutput(index, text, [1], reason, **more)
    return RequestOutput("r-0", "hi", [7, 8], [completion], finished=reason is not None)


def make_reader(n: int = 1, **options: Any) -> AnswerReader:
    return AnswerReader(n, lambda: make_answer_parser("hermes", "qwen3", read_tools(TOOLS)), **options)


def read(outputs: Sequence[RequestOutput], reader: AnswerReader | None = None) -> list[Update]:
    reader = reader or make_reader()
    return [update for output in outputs for update in reader.read(0, output)]


def list_events(outputs: Sequence[RequestOutput], reader: AnswerReader | None = None) -> list[Event]:
    return [event for update in read(outputs, reader) for event in update.events]


def test_text_is_one_event_of_each_output() -> None:
    updates = read([give("a"), give(""), give("b", "length")], AnswerReader(1))
    assert [list(update.events) for update in updates] == [
        [TextDelta("a")], [], [TextDelta("b"), AnswerEnded("length", None)],
    ]  # fmt: skip
    assert [update.begins for update in updates] == [True, False, False]
    assert [update.ended for update in updates] == [None, None, AnswerEnded("length", None)]


def test_a_call_ends_before_anything_else_comes() -> None:
    text = f"<think>x</think>Hm.{CALL.format('f')}{CALL.format('g')} So."
    for outputs in ([give(text, "stop")], [*(give(character) for character in text), give("", "stop")]):
        events = list_events(outputs)
        kinds = [event for event in events if not isinstance(event, ArgumentsDelta | TextDelta)]
        ids = [event.call_id for event in kinds if isinstance(event, CallBegun)]
        assert kinds == [
            R("x"), CallBegun(0, ids[0], "f"), CallEnded(0), CallBegun(1, ids[1], "g"), CallEnded(1),
            AnswerEnded("calls", None),
        ]  # fmt: skip
        for index in (0, 1):
            parts = [event for event in events if isinstance(event, ArgumentsDelta) and event.index == index]
            assert "".join(part.text for part in parts) == '{"a": 1}'
            assert events.index(parts[-1]) < events.index(CallEnded(index))
        assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "Hm. So."


def test_a_call_that_is_cut_off_ends_all_the_same() -> None:
    events = list_events([give('<tool_call>{"name": "f", "arguments": {"a'), give("", "length")])
    assert events[1:] == [ArgumentsDelta(0, '{"a'), CallEnded(0, is_complete=False), AnswerEnded("length", None)]


@pytest.mark.parametrize(
    ("parser", "choice", "text", "calls"),
    [
        ("hermes", "auto", '<tool_call>{"name": "f", "arguments": {"a": "b}', []),
        ("hermes", "auto", '<tool_call>{"name": "f", "arguments": {"a": {}}', ['{"a": {}}']),
        ("hermes", "auto", f'{CALL.format("f")}<tool_call>{{"name": "g", "arguments": {{"a"', ['{"a": 1}']),
        ("mistral", "auto", '[TOOL_CALLS]f{"a"', []),
        ("mistral", "auto", '[TOOL_CALLS]f{"a": 1}', ['{"a": 1}']),
        ("llama3_json", "auto", '{"name": "f", "parameters": {', []),
        ("openai", "auto", "<|channel|>commentary to=functions.f<|message|>{", []),
        ("openai", "auto", "<|channel|>commentary to=functions.f<|message|> {}", [" {}"]),
        ("openai", "auto", "<|channel|>commentary to=functions.f<|message|>x = 1", ["x = 1"]),
        ("hermes", "required", f'{CALL.format("f")}<tool_call>{{"name": "g", "arguments": {{"a"', ['{"a": 1}']),
        ("openai", "required", '[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {"a', ["{}"]),
        ("openai", {"type": "function", "function": {"name": "f"}}, '{"a": "}', []),
    ],
)
def test_a_whole_answer_has_complete_calls_only(parser: str, choice: Any, text: str, calls: list[str]) -> None:
    tools = read_tools(TOOLS, choice)
    for reason in ("length", "stop"):
        reader = AnswerReader(1, lambda: make_answer_parser(parser, None, tools))
        choices = fold(read([give(text, reason)], reader))["choices"]
        found = choices[0]["message"].get("tool_calls")
        assert (found and [each["function"]["arguments"] for each in found]) == (calls or None)
        assert choices[0]["message"]["content"] == (None if calls else "")
        assert choices[0]["finish_reason"] == ("tool_calls" if calls and reason == "stop" else reason)


def test_a_call_ends_where_the_dropped_one_behind_it_begins() -> None:
    reader = AnswerReader(1, lambda: make_answer_parser("hermes", None, read_tools(TOOLS, "auto", False)))
    events = list_events([give(CALL.format("f") + CALL.format("g"))], reader)
    assert [type(event) for event in events] == [CallBegun, ArgumentsDelta, CallEnded]


def test_reasoning_is_dropped_where_it_is_not_shown() -> None:
    outputs = [give("<think>x</think>"), give("y", "stop", stop_reason="END")]
    assert list_events(outputs, make_reader(shows_reasoning=False)) == [TextDelta("y"), AnswerEnded("stop", "END")]


MARKS = ["<think>", "</think>", "a", " b", "\n", "<", "/think>", "<|channel|>", "analysis", "<|message|>", "<|end|>"]


class Named:
    """The names of tokens that are indices in `MARKS`."""

    def name(self, token_id: int) -> str:
        return MARKS[token_id]


@pytest.mark.parametrize(
    ("parser", "texts", "expected"),
    [
        ("qwen3", "<think> a  b a </think> a", 3),
        ("qwen3", "a  b <think> a", 0),
        ("qwen3", "<think> a", 1),
        ("deepseek_r1", "a  b </think> a <think> a", 2),
        ("deepseek_r1", "a < /think> a", 2),  # a mark in pieces is known at its end
        ("openai_gptoss", "<|channel|> analysis <|message|> a  b <|end|> <|channel|> a <|message|> a", 2),
    ],
)
def test_tokens_of_reasoning_are_counted_whatever_the_outputs(parser: str, texts: str, expected: int) -> None:
    token_ids = [MARKS.index(text.replace("_", " ")) for text in texts.replace("  b", " _b").split()]
    for size in (1, 2, len(token_ids)):
        reader = AnswerReader(
            1,
            lambda: make_answer_parser(None, parser),
            lambda: ReasoningCounter(make_answer_parser(None, parser), cast(Any, Named())),
        )
        pieces = [token_ids[at : at + size] for at in range(0, len(token_ids), size)]
        outputs = [
            RequestOutput("r-0", "hi", [7], [CompletionOutput(0, "", piece, None)], finished=False) for piece in pieces
        ]
        assert sum(update.num_reasoning for update in read(outputs, reader)) == expected


def test_choices_are_numbered_across_the_prompts() -> None:
    reader = AnswerReader(2)
    given = [(1, give("a", index=1)), (0, give("b", index=1)), (1, give("c", "stop", index=1))]
    found = [update for position, output in given for update in reader.read(position, output)]
    assert [(update.choice, update.begins) for update in found] == [(3, True), (1, True), (3, False)]


def make_state() -> Any:
    return SimpleNamespace(
        engine=SimpleNamespace(max_model_len=512),
        config=ServerConfig.from_options(),
        fingerprint="f",
        token_texts=None,
        images=None,
    )


def test_bodies_of_two_protocols_are_the_same_conversation() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    more: dict[str, Any] = {"temperature": 0.5, "stop": ["x"], "seed": 3}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    one = ChatCompletionRequest(messages=messages, max_tokens=9, response_format=form, reasoning_effort="low", **more)
    other = ResponseRequest(
        input="hi",
        instructions="Be brief.",
        max_output_tokens=9,
        text={"format": {"type": "json_schema", "name": "n", "schema": schema}},
        reasoning={"effort": "low"},
        **more,
    )
    found = chat.read_conversation(one, make_state())
    assert found == responses.ResponseReader().read(other, make_state())
    assert found.messages == messages and found.reasoning_effort == "low" and found.form is not None
    assert found.params == {**more, "max_tokens": 9, "output_kind": OutputKind.FINAL_ONLY}


def make_writer(body: ChatCompletionRequest) -> chat.ChatWriter:
    conversation = chat.read_conversation(body, make_state())
    request: Any = SimpleNamespace(request_id="r-0", params=SimpleNamespace(logprobs=None))
    return chat.ChatWriter(body, "m", make_state(), conversation, request)


def fold(updates: list[Update]) -> dict[str, Any]:
    body = ChatCompletionRequest(messages=[{"role": "user", "content": "hi"}], tools=TOOLS)
    return make_writer(body).fold(updates, Account(), {})


@pytest.mark.parametrize("text", ["<think>a</think>b", f"b{CALL.format('f')}", "b"])
def test_the_chunks_of_a_chat_are_its_whole_answer(text: str) -> None:
    body = ChatCompletionRequest(messages=[{"role": "user", "content": "hi"}], tools=TOOLS)
    writer = make_writer(body)
    whole = writer.fold(read([give(text, "stop")]), Account(), {})["choices"][0]
    outputs = [*(give(character) for character in text), give("", "stop")]
    pieces = [piece for update in read(outputs) for piece in writer.write(update, Account())]
    chunks = [json.loads(piece.removeprefix(b"data: "))["choices"][0] for piece in pieces]
    for name in ("content", "reasoning", "reasoning_content"):
        joined = "".join(chunk["delta"].get(name) or "" for chunk in chunks)
        assert joined == (whole["message"].get(name) or "")
    arguments = [call["function"]["arguments"] for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
    assert "".join(arguments) == "".join(c["function"]["arguments"] for c in whole["message"].get("tool_calls", ()))
    assert chunks[-1]["finish_reason"] == whole["finish_reason"] == ("tool_calls" if arguments else "stop")


@pytest.mark.parametrize(("length", "is_long"), [(3, False), (200, True)])
@pytest.mark.parametrize("stream", [False, True])
def test_long_answers_are_written_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, length: int, is_long: bool, stream: bool
) -> None:
    writers: set[threading.Thread] = set()

    def note(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (writers.add(threading.current_thread()), function(*args))[1]

    for name in ("write", "fold"):
        monkeypatch.setattr(CompletionWriter, name, note(getattr(CompletionWriter, name)))
    monkeypatch.setattr(json_text, "MOST_HERE", 100)
    with serve() as served:

        async def test() -> None:
            body = {"prompt": [5] * length, "max_tokens": 2, "return_token_ids": True, "stream": stream}
            transport = httpx.ASGITransport(make_app(served.state))
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200 and '"prompt_token_ids":[5,' in answer.text

        run(test)
    assert writers and (threading.current_thread() in writers) is not is_long


def test_log_probabilities_of_prompts_are_bounded() -> None:
    with serve() as served:
        served.state.config = ServerConfig.from_options(max_prompt_logprobs=60)

        async def test() -> None:
            transport = httpx.ASGITransport(make_app(served.state))
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                for count, status in ((2, 200), (3, 400)):  # 20 tokens of prompts with 1 + count each
                    body = {"prompt": [[5] * 10] * 2, "max_tokens": 0, "prompt_logprobs": count}
                    answer = await client.post("/v1/completions", json=body)
                    assert answer.status_code == status, answer.text
            assert answer.json()["error"]["param"] == "prompt_logprobs"
            assert "80 log-probabilities" in answer.json()["error"]["message"]

        run(test)


def test_many_outputs_at_once_leave_turns_to_others() -> None:
    """Counts the outputs that are written between two turns of another task."""
    entries = {token: Logprob(-1.0, token + 1, "a") for token in range(21)}
    seen, num_outputs = [0], 1000

    async def give_all() -> AsyncGenerator[tuple[int, RequestOutput]]:
        for _ in range(num_outputs):
            seen[-1] += 1
            yield 0, give("a", logprobs=[entries])

    async def take_turns() -> None:
        while sum(seen) < num_outputs:
            seen.append(0)
            await asyncio.sleep(0)

    async def test() -> None:
        generation: Any = SimpleNamespace(account=Account(), describe_metrics=dict)
        writer: Any = SimpleNamespace(write=lambda update, usage: [b"x"], end=lambda usage, metrics: [])
        other = asyncio.ensure_future(take_turns())
        pieces = [piece async for piece in _stream(give_all(), generation, AnswerReader(1), writer, shows_prompt=False)]
        assert len(pieces) == num_outputs
        await other

    run(test)
    assert max(seen) <= json_text.MOST_HERE // 22 + 1
