"""Anthropic's own Python client against a real server, whose every event has the client's published type."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.server.conftest import SMALL
from tests.server.running import RunningServer, run_server

MODEL = "demo"
ASK = "What is two plus two?"
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
# Shows tools, calls and results, and begins the answer inside reasoning, or behind it where it is switched off.
TEMPLATE = """{{ bos_token }}{% if tools %}<|system|>
{{- tools | tojson }}<tool_call>{"name":"f"}</tool_call><|end|>{% endif %}
{%- for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}
{{- '<|' + ('user' if m.role == 'tool' else m.role) + '|>' }}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|><think>{% if not enable_thinking %}</think>{% endif %}{% endif %}"""
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"name": "weather", "description": "The weather.", "input_schema": {**CITY, "additionalProperties": False}},
    {"name": "now", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}},
]


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    hot: bool


@pytest.fixture(scope="module")
def client(server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[anthropic.Anthropic]:
    """A client of a server whose template knows tools and reasoning."""
    path = tmp_path_factory.mktemp("template") / "agent.jinja"
    path.write_text(TEMPLATE)
    with run_server(*SMALL, "--chat-template", str(path), "--reasoning-parser", "qwen3") as running:
        yield anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0)


def ask(client: anthropic.Anthropic, **options: Any) -> Any:
    extra = {"temperature": 0, **options.pop("extra_body", {})}  # which the client has no argument for
    given = {"model": MODEL, "messages": [{"role": "user", "content": ASK}], "max_tokens": 64}
    return client.messages.create(**(given | options), extra_body=extra)


def stream(client: anthropic.Anthropic, **options: Any) -> tuple[list[Any], Message]:
    """Returns the raw events, checked for type and order, and the message that they make."""
    extra = {"temperature": 0, **options.pop("extra_body", {})}
    given = {"model": MODEL, "messages": [{"role": "user", "content": ASK}], "max_tokens": 64, **extra}
    with client.with_streaming_response.messages.create(
        model=MODEL, max_tokens=1, messages=[], extra_body={**given, **options, "stream": True}
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    values = []
    for name, data in zip(lines[::2], lines[1::2], strict=True):
        values.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {values[-1]['type']}"
    assert values[1] == {"type": "ping"}
    events = [EVENTS.validate_python(value, strict=True) for value in values if value["type"] != "ping"]
    check_order(events)
    with client.messages.stream(
        **({"model": MODEL, "messages": given["messages"], "max_tokens": 64} | options), extra_body=extra
    ) as reader:
        for _ in reader:
            pass
        return events, reader.get_final_message()


def check_order(events: list[Any]) -> None:
    """A block is closed before the next begins, and blocks are numbered."""
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    is_open, number = False, 0
    for event in events[1:-2]:
        assert event.index == number
        if event.type == "content_block_start":
            assert not is_open
            is_open = True
        else:
            assert is_open
        if event.type == "content_block_stop":
            is_open, number = False, number + 1
    assert not is_open


def to_json(turns: list[Any]) -> list[Any]:
    """The blocks of answers among the turns, as the client sends them."""
    found: list[Any] = TypeAdapter(list[Any]).dump_python(turns, mode="json")
    return found


def describe(message: Message) -> Any:
    """What is equal in a whole answer and a streamed one."""
    shown = message.model_dump(exclude={"id"})
    for name in ("input_tokens", "cache_read_input_tokens"):  # the second answer finds pages of the first
        shown["usage"].pop(name)
    for block in shown["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return shown


def test_an_answer_is_the_chats(client: anthropic.Anthropic, http: httpx.Client) -> None:
    answer = ask(client)
    body = {"messages": [{"role": "user", "content": ASK}], "temperature": 0, "max_tokens": 64}
    chat = http.post("/v1/chat/completions", json=body).json()
    assert [block.text for block in answer.content] == [chat["choices"][0]["message"]["content"]]
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("end_turn", None, "assistant")
    assert answer.id.startswith("msg_") and answer.model == MODEL and answer._request_id
    counted = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert counted == chat["usage"]["prompt_tokens"]
    assert answer.usage.output_tokens == chat["usage"]["completion_tokens"]
    Message.model_validate(answer.model_dump(), strict=True)


def test_a_stream_tells_the_same(client: anthropic.Anthropic) -> None:
    whole = ask(client)
    events, made = stream(client)
    assert describe(made) == describe(whole)
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    assert text == whole.content[0].text


def test_system_blocks_and_turns_are_one_conversation(client: anthropic.Anthropic) -> None:
    """The first block of Claude Code is not shown; blocks and text are alike; neighbours of a role are one turn."""
    cached = {"cache_control": {"type": "ephemeral"}}
    told = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=ab12;"}]
    told += [{"type": "text", "text": "Be brief.", **cached}]
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": ASK, **cached}]}]
    counts = {
        client.messages.count_tokens(model=MODEL, system=system, messages=parts).input_tokens
        for system in ("Be brief.", told, [{**told[0], "text": told[0]["text"] + "cd34"}, told[1]])
    }
    assert len(counts) == 1
    assert ask(client, system=told, messages=parts).content == ask(client, system="Be brief.").content
    first = ask(client)
    turns = [{"role": "user", "content": ASK}, {"role": "assistant", "content": first.content}]
    turns += [{"role": "user", "content": "And three?"}]
    usage = ask(client, messages=turns).usage
    assert usage.input_tokens + usage.cache_read_input_tokens > first.usage.output_tokens


def test_a_system_message_in_the_middle_is_a_turn(
    client: anthropic.Anthropic, agent: anthropic.Anthropic, http: httpx.Client
) -> None:
    """The demo's template shows one; the other client's refuses it there, so it is text of the user's turn."""
    turns: list[Any] = [{"role": "user", "content": ASK}, {"role": "assistant", "content": "Four."}]
    more: Any = {"role": "user", "content": "And three?"}
    told: Any = {"role": "system", "content": "Be brief."}
    joined: Any = {"role": "user", "content": "Be brief.\nAnd three?"}
    for each, shows in ((client, True), (agent, False)):
        counts = [
            each.messages.count_tokens(model=MODEL, messages=[*turns, *rest]).input_tokens
            for rest in ([told, more], [joined])
        ]
        assert (counts[0] == counts[1]) is not shows
    asked: Any = {"messages": [*turns, told, more], "model": MODEL}
    shown = http.post("/tokenize", json=asked).json()
    assert shown["count"] == client.messages.count_tokens(**asked).input_tokens


def test_tokens_are_counted_without_an_answer(client: anthropic.Anthropic) -> None:
    for options in ({}, {"system": "Be brief."}):
        messages: Any = [{"role": "user", "content": ASK}]
        counted = client.messages.count_tokens(model=MODEL, messages=messages, **options).input_tokens
        usage = ask(client, max_tokens=1, **options).usage
        assert usage.input_tokens + usage.cache_read_input_tokens == counted


def test_cached_tokens_are_not_input_tokens(client: anthropic.Anthropic) -> None:
    long: Any = [{"role": "user", "content": f"{time.time()} " + "The dog sat under the tall tree. " * 20}]
    total = client.messages.count_tokens(model=MODEL, messages=long).input_tokens
    first, second = (ask(client, messages=long, max_tokens=2).usage for _ in range(2))
    assert (first.input_tokens, first.cache_read_input_tokens) == (total, 0)
    assert second.cache_read_input_tokens > 0
    assert second.input_tokens + second.cache_read_input_tokens == total
    (start, *_, end, _), _ = stream(client, messages=long, max_tokens=2)
    assert start.message.usage.cache_read_input_tokens == second.cache_read_input_tokens
    assert end.usage.cache_read_input_tokens == second.cache_read_input_tokens


def test_an_answer_continues_the_last_message(client: anthropic.Anthropic) -> None:
    text = ask(client).content[0].text
    begun = " ".join(text.split()[:3])
    turns = [{"role": "user", "content": ASK}, {"role": "assistant", "content": begun}]
    assert begun + ask(client, messages=turns).content[0].text == text


def test_reasons_to_stop(client: anthropic.Anthropic) -> None:
    text = ask(client).content[0].text
    word = text.split()[2]
    for read in (lambda **more: ask(client, **more), lambda **more: stream(client, **more)[1]):
        cut = read(stop_sequences=["never", word])
        assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", word)
        assert cut.content[0].text == text.partition(word)[0]
        assert read(max_tokens=3).stop_reason == "max_tokens"
        endless = {"temperature": 0, "ignore_eos": True}
        full = read(max_tokens=4096, extra_body=endless)
        assert full.stop_reason == "model_context_window_exceeded"


def test_a_form_is_enforced(client: anthropic.Anthropic) -> None:
    schema = anthropic.transform_schema(Weather)
    form: Any = {"format": {"type": "json_schema", "schema": schema}, "effort": "high"}
    assert Weather.model_validate_json(ask(client, output_config=form).content[0].text)
    parsed = client.messages.parse(
        model=MODEL, max_tokens=64, messages=[{"role": "user", "content": ASK}], output_format=Weather
    )
    assert isinstance(parsed.parsed_output, Weather)


def test_fields_of_agents_are_taken(client: anthropic.Anthropic) -> None:
    """Claude Code sends these in every request, with `?beta=true`."""
    answer = client.beta.messages.create(
        model=MODEL,
        max_tokens=8,
        messages=[{"role": "user", "content": ASK}],
        betas=["claude-code-20250219", "context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        thinking={"type": "adaptive"},
        metadata={"user_id": "user_1"},
        service_tier="standard_only",
        output_config={"effort": "high"},
    )
    assert answer.content[0].type == "text" and answer.usage.service_tier == "standard"
    assert client.with_options(auth_token="x").messages.create(
        model=MODEL, max_tokens=1, messages=[{"role": "user", "content": ASK}]
    )


def test_forced_calls(client: anthropic.Anthropic) -> None:
    for choice, name in (({"type": "any"}, None), ({"type": "tool", "name": "weather"}, "weather")):
        options = {"tools": TOOLS, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
        whole = ask(client, **options)
        (call,) = whole.content
        assert whole.stop_reason == "tool_use" and call.type == "tool_use"
        assert call.name == (name or call.name) and call.input in ({"city": "Paris"}, {"city": "Rome"}, {})
        events, made = stream(client, **options)
        assert describe(made) == describe(whole)
        parts = [event.delta.partial_json for event in events if event.type == "content_block_delta"]
        assert json.loads("".join(parts)) == call.input
    cut = ask(client, tools=TOOLS, tool_choice={"type": "tool", "name": "weather"}, max_tokens=2)
    assert cut.stop_reason == "max_tokens" and cut.content == []


def test_tools_to_the_end(agent: anthropic.Anthropic) -> None:
    """Calls and results go round, two tools at once, with reasoning; the model may choose."""
    asked = [{"role": "user", "content": ASK}]
    single = {"type": "any", "disable_parallel_tool_use": True}
    called = ask(agent, tools=TOOLS, tool_choice=single, messages=asked)
    assert called.stop_reason == "tool_use"
    calls = [*called.content, called.content[0].model_copy(update={"id": "toolu_2"})]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"} for call in calls]
    failed = {**results[-1], "content": [{"type": "text", "text": "no network"}], "is_error": True}
    thought = {"type": "thinking", "thinking": "I look it up.", "signature": "anything"}
    before = [*asked, {"role": "assistant", "content": [thought, *calls]}]
    for turn in (results, [*results[:-1], failed], [*results, {"type": "text", "text": "Say it in one word."}]):
        turns = [*before, {"role": "user", "content": turn}]
        answer = ask(agent, tools=TOOLS, messages=turns, max_tokens=8)
        assert answer.stop_reason in ("end_turn", "max_tokens", "tool_use")
        counted = agent.messages.count_tokens(model=MODEL, messages=turns, tools=TOOLS)  # type: ignore[arg-type]
        assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
        made = stream(agent, tools=TOOLS, messages=to_json(turns), max_tokens=8)[1]
        assert describe(made)["content"] == describe(answer)["content"]


def test_thinking(agent: anthropic.Anthropic) -> None:
    """The template begins inside reasoning, and the model never ends it: all is thinking."""
    whole = ask(agent, thinking={"type": "enabled", "budget_tokens": 7}, max_tokens=8)
    (block,) = whole.content
    assert block.type == "thinking" and block.thinking and block.signature
    assert whole.usage.output_tokens_details.thinking_tokens > 0
    events, made = stream(agent, thinking={"type": "enabled", "budget_tokens": 7}, max_tokens=8)
    assert describe(made)["content"] == describe(whole)["content"]
    assert [event.delta.type for event in events if event.type == "content_block_delta"][-1] == "signature_delta"
    hidden = ask(agent, thinking={"type": "enabled", "budget_tokens": 7, "display": "omitted"}, max_tokens=8)
    assert hidden.content == []
    for kind in ("disabled", "adaptive"):
        assert ask(agent, thinking={"type": kind}, max_tokens=8).content[0].type == "text"


def test_a_stream_that_is_left_ends_its_request(client: anthropic.Anthropic, server: RunningServer) -> None:
    before = server.metric("jaxserve:request_success_total", finished_reason="abort")
    with client.messages.stream(
        model=MODEL,
        max_tokens=900,
        messages=[{"role": "user", "content": ASK}],
        extra_body={"ignore_eos": True},
    ) as reader:
        next(iter(reader.text_stream))
    deadline = time.monotonic() + 30
    while server.metric("jaxserve:request_success_total", finished_reason="abort") == before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(client, model="nope")
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as long:
        ask(client, messages=[{"role": "user", "content": "word " * 1100}])
    assert long.value.body["error"]["message"].startswith("prompt is too long")  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError) as wrong:
        ask(client, tools=TOOLS, tool_choice={"type": "tool", "name": "nope"})
    assert "tool_choice.name: " in str(wrong.value)
