"""OpenAI's newer interface, through its own Python client and through the client's typed events."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.server.running import RunningServer

MODEL = "demo"
ASK = "What is two plus two?"


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    hot: bool


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def respond(client: openai.OpenAI, **options: Any) -> Any:
    return client.responses.create(
        **({"model": MODEL, "input": ASK, "temperature": 0, "max_output_tokens": 64} | options)
    )


def test_an_answer_is_the_chats(client: openai.OpenAI) -> None:
    answer = respond(client)
    messages: Any = [{"role": "user", "content": ASK}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=64)
    assert answer.output_text == chat.choices[0].message.content and answer.status == "completed"
    assert answer.usage.input_tokens == chat.usage.prompt_tokens  # type: ignore[union-attr]
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert answer.id.startswith("resp_") and answer.error is None and answer.incomplete_details is None
    assert answer.store is False and answer.created_at > 1e9


def test_the_tokens_of_an_input_are_counted_without_an_answer(client: openai.OpenAI) -> None:
    told: dict[str, Any] = {"instructions": "Be brief."}
    listed: dict[str, Any] = {"input": [{"role": "user", "content": [{"type": "input_text", "text": ASK}]}]}
    for options in ({}, told, listed, told | listed):
        counted = client.responses.input_tokens.count(**({"model": MODEL, "input": ASK} | options))
        assert counted.object == "response.input_tokens"
        assert counted.input_tokens == respond(client, max_output_tokens=1, **options).usage.input_tokens
        stream = list(respond(client, max_output_tokens=1, stream=True, **options))
        assert stream[-1].response.usage.input_tokens == counted.input_tokens
    long = client.responses.input_tokens.count(model=MODEL, input="word " * 1100)
    assert long.input_tokens > 1024, "an input beyond the context can be counted"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.input_tokens.count(model=MODEL, input=[{"role": "user", "content": [{"type": "x"}]}])  # type: ignore[list-item,typeddict-item]
    assert caught.value.param == "input[0].content[0]"
    with pytest.raises(openai.NotFoundError):
        client.responses.input_tokens.count(model="nope", input=ASK)


def test_instructions_and_lists_are_conversations(client: openai.OpenAI) -> None:
    text = respond(client).output_text
    parts = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": ASK}]}]
    assert respond(client, input=parts).output_text == text
    assert respond(client, input=[{"role": "user", "content": ASK}]).output_text == text
    told = respond(client, instructions="Be brief.")
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK}]
    assert told.output_text == respond(client, input=system).output_text and told.instructions == "Be brief."
    first = respond(client)
    history = [{"role": "user", "content": ASK}, *first.output, {"role": "user", "content": "And three?"}]
    assert respond(client, input=history).usage.input_tokens > first.usage.total_tokens


def test_events_of_a_stream_tell_the_same_answer(client: openai.OpenAI) -> None:
    whole = respond(client)
    events = list(respond(client, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == whole.output_text == events[-4].text
    final = events[-1].response
    assert final.output_text == whole.output_text and final.usage == whole.usage
    assert len({event.response.id for event in (events[0], events[1], events[-1])}) == 1
    assert final.output[0].id == events[2].item.id == events[4].item_id


def test_the_clients_own_reader_of_events(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model=MODEL, input=ASK, temperature=0, max_output_tokens=64, text_format=Weather
    ) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.output_parsed == Weather.model_validate_json(deltas)


def test_parse_returns_the_users_own_model(client: openai.OpenAI) -> None:
    answer = client.responses.parse(model=MODEL, input=ASK, temperature=0, max_output_tokens=64, text_format=Weather)
    assert isinstance(answer.output_parsed, Weather)
    form = {"format": {"type": "json_schema", "name": "weather", "schema": Weather.model_json_schema(), "strict": True}}
    raw = respond(client, text=form)
    assert raw.output_text == answer.output_text and raw.text.format.type == "json_schema"
    text = respond(client, text={"format": {"type": "text"}}).output_text
    assert text == respond(client).output_text


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_short_is_incomplete(client: openai.OpenAI, stream: bool) -> None:
    answer = respond(client, max_output_tokens=3, stream=stream)
    if stream:
        *_, last = answer
        assert last.type == "response.incomplete"
        answer = last.response
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 3 and answer.output[0].status == "incomplete"


def test_sampling_and_labels(client: openai.OpenAI) -> None:
    answer = respond(
        client, top_p=0.9, user="u1", metadata={"a": "b"}, safety_identifier="s", service_tier="auto", store=False
    )
    assert answer.metadata == {"a": "b"} and answer.user == "u1" and (answer.temperature, answer.top_p) == (0, 0.9)
    assert answer.service_tier == "default" and respond(client).service_tier is None
    events = list(respond(client, service_tier="flex", stream=True))
    assert [event.response.service_tier for event in events if hasattr(event, "response")] == ["flex"] * 3
    hot = {"temperature": 3.0, "extra_body": {"seed": 4}}
    assert respond(client, **hot).output_text == respond(client, **hot).output_text
    assert respond(client, temperature=3.0, extra_body={"top_k": 1}).output_text == respond(client).output_text


def test_several_at_once(server: RunningServer) -> None:
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def ask() -> str:
                async with client.responses.stream(
                    model=MODEL, input=ASK, temperature=0, max_output_tokens=64
                ) as stream:
                    async for _ in stream:
                        pass
                    return (await stream.get_final_response()).output_text

            return await asyncio.gather(*(ask() for _ in range(16)))

    assert len(set(asyncio.run(ask_all()))) == 1
