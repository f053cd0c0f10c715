"""OpenAI's own Python client, unchanged, against a real server with the demo model."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.server.refusals import REFUSALS, Refusal
from tests.server.running import RunningServer

MODEL = "demo"
STORY = "Once upon a time"
ASK: Any = [{"role": "user", "content": "What is two plus two?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "hot": {"type": "boolean"}},
    "required": ["city", "hot"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "Of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time"}},
]


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    hot: bool


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return connect(server)


def connect(server: RunningServer, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", **({"max_retries": 0} | options))


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def is_idle(server: RunningServer) -> bool:
    return server.metric("jaxserve:num_requests_running") == server.metric("jaxserve:num_requests_waiting") == 0


def chat(client: openai.OpenAI, **options: Any) -> Any:
    defaults = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 24}
    return client.chat.completions.create(**(defaults | options))


def complete(client: openai.OpenAI, **options: Any) -> Any:
    return client.completions.create(
        **({"model": MODEL, "prompt": STORY, "temperature": 0, "max_tokens": 12} | options)
    )


def long_stream(client: openai.OpenAI, **options: Any) -> Any:
    return complete(client, max_tokens=900, stream=True, extra_body={"ignore_eos": True}, **options)


# --- chat


def test_chat_answers_and_its_usage_adds_up(client: openai.OpenAI) -> None:
    answer = chat(client)
    choice, usage = answer.choices[0], answer.usage
    assert choice.message.role == "assistant" and choice.message.content and choice.message.tool_calls is None
    assert choice.finish_reason in ("stop", "length")
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens <= 24 and usage.prompt_tokens > 3
    assert answer.model == MODEL and answer.system_fingerprint.startswith("jaxserve-")
    again = chat(client)
    assert again.choices[0].message.content == choice.message.content and again.id != answer.id


def test_a_streamed_chat_is_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    *body, last = chunks
    assert body[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in body) == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in body]
    assert reasons == [None] * (len(body) - 1) + [whole.choices[0].finish_reason]
    assert body[-1].choices[0].delta.content is None
    assert last.choices == [] and last.usage == whole.usage and all(chunk.usage is None for chunk in body)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chat(client, stream=True))


def test_fields_of_other_servers_that_change_nothing(client: openai.OpenAI) -> None:
    harmless = {
        "guided_json": None,
        "guided_decoding_backend": "auto",
        "no_stop_trim": False,
        "return_hidden_states": False,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "best_of": 1,
        "seed": -1,
        "request_id": "mine-7",
    }
    answer = chat(client, extra_body=harmless)
    assert answer.choices[0].message.content == chat(client).choices[0].message.content
    assert answer.id == "chatcmpl-mine-7" and complete(client, extra_body=harmless).id == "cmpl-mine-7"


@pytest.mark.parametrize("ask", [chat, complete])
def test_usage_so_far_is_in_every_chunk_where_it_is_asked_for(client: openai.OpenAI, ask: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = ask(client, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and 1 <= counts[0] < counts[-1] == last.usage.completion_tokens
    assert all(chunk.usage.prompt_tokens == last.usage.prompt_tokens for chunk in chunks)
    without = ask(client, stream=True, stream_options={"continuous_usage_stats": True})
    assert all(chunk.usage is None for chunk in without)


def test_logprobs_of_chats(client: openai.OpenAI) -> None:
    choice = chat(client, logprobs=True, top_logprobs=3).choices[0]
    tokens = choice.logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == choice.message.content + (
        "<|end|>" if choice.finish_reason == "stop" else ""
    )
    for token in tokens:
        values = [top.logprob for top in token.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert token.logprob == values[0] and sum(math.exp(value) for value in values) < 1 + 1e-5
    chunks = chat(client, logprobs=True, top_logprobs=3, stream=True)
    streamed = [t for chunk in chunks if chunk.choices[0].logprobs for t in chunk.choices[0].logprobs.content]
    assert streamed == tokens
    bare = chat(client, logprobs=True).choices[0].logprobs.content
    assert all(token.top_logprobs == [] for token in bare) and len(bare) == len(tokens)


def test_several_answers_to_one_chat(client: openai.OpenAI) -> None:
    options = {"n": 3, "seed": 5, "temperature": 3}
    answer = chat(client, **options)
    texts = [choice.message.content for choice in sorted(answer.choices, key=lambda choice: choice.index)]
    assert [choice.index for choice in answer.choices] == [0, 1, 2] and len(set(texts)) > 1
    found = ["", "", ""]
    for chunk in chat(client, stream=True, **options):
        found[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert found == texts
    first = chat(client, n=1, seed=5, temperature=3)
    assert answer.usage.prompt_tokens == first.usage.prompt_tokens
    assert answer.usage.completion_tokens > first.usage.completion_tokens


def test_labels_and_both_limits_are_taken(client: openai.OpenAI) -> None:
    labels = {"user": "u1", "metadata": {"a": "b"}, "safety_identifier": "s", "service_tier": "auto", "store": False}
    answer = chat(client, max_tokens=openai.omit, max_completion_tokens=3, **labels)
    assert answer.usage.completion_tokens <= 3 and answer.service_tier == "default"
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": ASK[0]["content"]}]}]
    assert chat(client, messages=parts).choices[0].message.content == chat(client).choices[0].message.content
    history: Any = [*ASK, chat(client).choices[0].message, {"role": "user", "content": "And three?"}]
    assert chat(client, messages=history).usage.prompt_tokens > 10


@pytest.mark.parametrize("tier", ["priority", "default", "flex"])
def test_an_answer_names_the_tier_that_it_was_served_in(client: openai.OpenAI, tier: Any) -> None:
    assert chat(client, service_tier=tier).service_tier == tier and chat(client).service_tier is None
    chunks = list(chat(client, service_tier=tier, stream=True, stream_options={"include_usage": True}))
    assert len(chunks) > 2 and {chunk.service_tier for chunk in chunks} == {tier}
    named = {"extra_body": {"service_tier": tier}}
    assert complete(client, **named).service_tier == tier
    assert {chunk.service_tier for chunk in complete(client, stream=True, **named)} == {tier}
    assert client.embeddings.create(model=MODEL, input=STORY, **named).model_extra == {"service_tier": tier}


# --- completions


def test_completions_in_every_form_of_a_prompt(client: openai.OpenAI) -> None:
    text = complete(client).choices[0].text
    ids = client.post("/../tokenize", body={"prompt": STORY}, cast_to=object)["tokens"]  # type: ignore[index]
    assert complete(client, prompt=ids).choices[0].text == text
    many = complete(client, prompt=[STORY, "The little dog", STORY])
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    assert [many.choices[0].text, many.choices[2].text] == [text, text] != [many.choices[1].text] * 2
    lists = complete(client, prompt=[ids, ids[:2]], n=2, seed=1)
    assert [choice.text for choice in lists.choices[:2]] == [text, text] and len(lists.choices) == 4
    assert lists.usage.prompt_tokens == len(ids) + 2
    pieces = ["", "", ""]
    for chunk in complete(client, prompt=[STORY, "The little dog", STORY], stream=True):
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert pieces == [choice.text for choice in many.choices]


def test_echo_with_logprobs_as_evaluation_harnesses_ask_for_it(client: openai.OpenAI) -> None:
    answer = complete(client, echo=True, logprobs=1, max_tokens=1)
    found = answer.choices[0].logprobs
    size = answer.usage.prompt_tokens + 1
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == size
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert found.token_logprobs[-1] == max(found.top_logprobs[-1].values())
    assert all(
        tops[token] == value
        for token, value, tops in list(zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True))[1:]
    )
    text = answer.choices[0].text
    assert text.startswith(STORY) and found.text_offset == sorted(found.text_offset)
    assert all(text[at:].startswith(token) for at, token in zip(found.text_offset[1:], found.tokens[1:], strict=True))
    alone = complete(client, echo=True, logprobs=1, max_tokens=0)
    assert alone.choices[0].text == STORY and alone.usage.completion_tokens == 0
    assert alone.choices[0].logprobs.token_logprobs == pytest.approx(found.token_logprobs[:-1], abs=2e-2, nan_ok=True)
    assert complete(client, echo=True, max_tokens=4).choices[0].text.startswith(STORY)


def test_offsets_count_the_special_tokens_that_an_echo_shows(client: openai.OpenAI) -> None:
    shown = {"skip_special_tokens": False}
    answer = complete(client, prompt=[1, 3, 1195, 2, 4], echo=True, logprobs=0, max_tokens=3, extra_body=shown)
    text, found = answer.choices[0].text, answer.choices[0].logprobs
    assert text.startswith("<s><|user|>") and "<|assistant|>" in text
    assert all(text[at:].startswith(token) for at, token in zip(found.text_offset, found.tokens, strict=True))


def test_stop_strings(client: openai.OpenAI) -> None:
    text = complete(client, max_tokens=40).choices[0].text
    word = text.split()[5]
    stops = [f"never-{number}" for number in range(15)] + [word]
    answer = complete(client, max_tokens=40, stop=stops)
    assert answer.choices[0].text == text[: text.index(word)]
    assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("stop", word)
    streamed = "".join(c.choices[0].text for c in complete(client, max_tokens=40, stop=stops, stream=True))
    assert streamed == answer.choices[0].text
    kept = complete(client, max_tokens=40, stop=word, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == text[: text.index(word)] + word


def test_seeds_biases_and_penalties(client: openai.OpenAI) -> None:
    warm = {"temperature": 2, "max_tokens": 24}
    texts = {complete(client, seed=seed, **warm).choices[0].text for seed in (1, 1, 1, 2, 3)}
    assert len(texts) == 3
    assert set(complete(client, logit_bias={"100": 100}).choices[0].text) <= set(
        complete(client, extra_body={"allowed_token_ids": [100]}).choices[0].text
    )
    first = complete(client, logprobs=0).choices[0].logprobs.tokens[0]
    token = client.post("/../tokenize", body={"prompt": first, "add_special_tokens": False}, cast_to=object)
    banned = complete(client, logit_bias={str(token["tokens"][0]): -100}, logprobs=0)  # type: ignore[index]
    assert banned.choices[0].logprobs.tokens[0] != first
    plain = complete(client, max_tokens=60, extra_body={"ignore_eos": True}).choices[0].text
    changed = complete(client, max_tokens=60, frequency_penalty=2, presence_penalty=2, extra_body={"ignore_eos": True})
    assert len(set(changed.choices[0].text.split())) / len(changed.choices[0].text.split()) > len(
        set(plain.split())
    ) / len(plain.split())


def test_fields_of_vllm(client: openai.OpenAI) -> None:
    def extra(**body: Any) -> Any:
        return complete(client, extra_body=body)

    text = extra().choices[0].text
    for same in ({"priority": 3}, {"cache_salt": "s"}, {"timeout": 60.0}, {"skip_special_tokens": True}):
        assert extra(**same).choices[0].text == text
    hot = {"temperature": 2, "seed": 3}
    assert complete(client, extra_body={"top_k": 1}, **hot).choices[0].text == text
    assert complete(client, extra_body={"min_p": 1.0}, **hot).choices[0].text == text
    long, unlike = (
        complete(client, max_tokens=60, extra_body=more).choices[0].text for more in ({}, {"repetition_penalty": 1.8})
    )
    assert long != unlike
    answer = extra(return_token_ids=True)
    ids = answer.choices[0].token_ids
    assert len(ids) == answer.usage.completion_tokens
    assert len(answer.choices[0].prompt_token_ids) == answer.usage.prompt_tokens
    cut = extra(stop_token_ids=[ids[3]])
    assert (cut.usage.completion_tokens, cut.choices[0].stop_reason) == (ids.index(ids[3]) + 1, ids[3])
    assert complete(client, max_tokens=30, extra_body={"ignore_eos": True}).usage.completion_tokens == 30
    assert set(extra(allowed_token_ids=[100, 200], return_token_ids=True).choices[0].token_ids) <= {100, 200, 2}
    word = text.split()[1]
    assert word not in extra(bad_words=[word]).choices[0].text.split()
    assert extra(truncate_prompt_tokens=2).usage.prompt_tokens == 2
    asked = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=40, temperature=0, extra_body={"min_tokens": 40, "return_token_ids": True}
    )
    assert asked.usage.completion_tokens == 40 == len(asked.choices[0].token_ids)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("form", "accepts"),
    [
        ({"choice": ["Rome", "Paris"]}, lambda text: text in ("Rome", "Paris")),
        ({"regex": "[0-9]{3}-[0-9]{2}"}, lambda text: len(text) == 6 and text[3] == "-"),
        ({"json": WEATHER}, Weather.model_validate_json),
        ({"json": json.dumps(WEATHER), "disable_any_whitespace": True}, lambda text: " " not in text),
        ({"json": WEATHER, "whitespace_pattern": " ?"}, Weather.model_validate_json),
        ({"grammar": 'start: "yes" | "no"'}, lambda text: text in ("yes", "no")),
    ],
    ids=["choice", "regex", "json", "json text", "whitespace", "grammar"],
)
def test_each_kind_of_structured_output(client: openai.OpenAI, form: Any, accepts: Callable[[str], object]) -> None:
    body = {"structured_outputs": form}
    answer = complete(client, max_tokens=128, extra_body=body).choices[
        0
    ]  # room for blanks, of which it likes to write all
    assert answer.finish_reason == "stop" and accepts(answer.text)
    assert accepts(chat(client, max_tokens=64, extra_body=body).choices[0].message.content)


# --- forms and tools


def test_parse_returns_the_users_own_model(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 64}
    answer = client.chat.completions.parse(response_format=Weather, **options)
    assert isinstance(answer.choices[0].message.parsed, Weather) and answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(response_format=Weather, **options) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed
    described = options | {"messages": [{"role": "user", "content": "Describe a person."}], "max_tokens": 128}
    blank = client.chat.completions.parse(response_format=Weather, **described).choices[0].message
    assert isinstance(blank.parsed, Weather)
    assert "  " not in re.sub(r"\n *", "", blank.content or ""), "one blank, or a line break and indentation"
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(response_format=Weather, **(options | {"max_tokens": 2}))


def test_any_json_object(client: openai.OpenAI) -> None:
    asked = [{"role": "user", "content": "JSON please: name: Ada, age: 36"}]
    answer = chat(client, messages=asked, response_format={"type": "json_object"}, max_tokens=64).choices[0]
    assert answer.finish_reason == "stop" and isinstance(json.loads(answer.message.content), dict)
    assert chat(client, response_format={"type": "text"}).choices[0].message.content


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
    ],
    ids=["required", "weather", "time"],
)
def test_forced_calls_are_valid_whole_and_in_pieces(client: openai.OpenAI, choice: Any, names: set[str]) -> None:
    options = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 80}
    answer = chat(client, **options).choices[0]
    (call,) = answer.message.tool_calls
    assert call.type == "function" and call.function.name in names and call.id
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        Weather.model_validate(arguments, strict=True)
    else:
        assert arguments == {}
    assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
    options |= {"model": MODEL, "messages": ASK, "temperature": 0}
    with client.chat.completions.stream(**options) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    (streamed,) = final.choices[0].message.tool_calls or []
    assert streamed.function.name == call.function.name and streamed.id != call.id
    assert json.loads(streamed.function.arguments or "") == arguments
    assert final.choices[0].finish_reason == answer.finish_reason


def test_tools_that_may_not_be_called(client: openai.OpenAI) -> None:
    answer = chat(client, tools=TOOLS, tool_choice="none").choices[0]
    assert answer.message.content and not answer.message.tool_calls


def test_a_conversation_with_the_results_of_tools(narrow: RunningServer) -> None:
    client = connect(narrow)
    called = chat(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=80)
    message = called.choices[0].message
    (call,) = message.tool_calls
    told = [*ASK, message, {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21}'}]
    options = {"messages": told, "tools": TOOLS, "max_tokens": 64}
    answer = chat(client, **options)  # auto: this template shows calls
    assert answer.usage.prompt_tokens > called.usage.prompt_tokens
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chat(client, **options, stream=True))
    message = answer.choices[0].message
    assert text == (message.content or "") and (text or message.tool_calls)


def test_tools_are_tokenized_as_chats_show_them(narrow: RunningServer) -> None:
    client, body = connect(narrow), {"messages": ASK, "tools": TOOLS}
    shown: Any = client.post("/../tokenize", body=body, cast_to=object)
    assert shown["count"] == chat(client, tools=TOOLS, max_tokens=1).usage.prompt_tokens


# --- embeddings and models


def test_embeddings(client: openai.OpenAI) -> None:
    texts = ["Once upon a time", "The little dog", "two plus two"]
    many = client.embeddings.create(model=MODEL, input=texts)  # the client asks for base64
    vectors = [item.embedding for item in many.data]
    assert [item.index for item in many.data] == [0, 1, 2] and many.usage.prompt_tokens == many.usage.total_tokens > 3
    for text, vector in zip(texts, vectors, strict=True):
        assert math.hypot(*vector) == pytest.approx(1, abs=1e-5)
        alone = client.embeddings.create(model=MODEL, input=text, encoding_format="float").data[0].embedding
        assert alone == pytest.approx(vector, abs=2e-2)
    assert math.dist(vectors[0], vectors[1]) > 0.05
    short = client.embeddings.create(model=MODEL, input=texts[0], dimensions=16).data[0].embedding
    assert len(short) == 16 and math.hypot(*short) == pytest.approx(1, abs=1e-5)
    scale = math.hypot(*vectors[0][:16])
    assert short == pytest.approx([value / scale for value in vectors[0][:16]], abs=5e-2)
    raw = client.post("/embeddings", body={"input": texts[0], "encoding_format": "base64"}, cast_to=object)
    assert len(base64.b64decode(raw["data"][0]["embedding"])) == 4 * len(vectors[0])  # type: ignore[index]
    ids = client.embeddings.create(model=MODEL, input=[[1, 100, 200], [1, 100]])
    assert len(ids.data) == 2 and ids.usage.prompt_tokens == 5


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL and client.models.retrieve(MODEL) == model


# --- errors, retries, time


CLASSES = {400: openai.BadRequestError, 404: openai.NotFoundError}  # others have none of their own
POSTS = [row for row in REFUSALS if row.method == "POST" and isinstance(row.body, dict)]
KINDS = {(row.path, row.status, row.code): row for row in reversed(POSTS)}


@pytest.mark.parametrize("row", KINDS.values(), ids=lambda row: f"{row.path} {row.code}")
def test_errors_have_the_clients_types(client: openai.OpenAI, row: Refusal) -> None:
    """One row of each path and code of the table; the client chooses the class by the status."""
    with pytest.raises(openai.APIStatusError) as caught:
        client.post(f"/..{row.path}", body=row.body, cast_to=object)
    error = caught.value
    assert type(error) is CLASSES.get(row.status, openai.APIStatusError) and error.status_code == row.status
    assert {"type": error.type, "param": error.param, "code": error.code} == row.error


def test_a_stream_that_is_refused_and_labels(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, stream=True, n=0)
    assert refused.value.param == "n"
    assert chat(client, extra_headers={"X-Request-Id": "mine-1"})._request_id == "mine-1"


def test_a_deadline_is_not_tried_again(server: RunningServer) -> None:
    client, before = connect(server, max_retries=3), server.metric("http_requests_total", status="504")
    with pytest.raises(openai.InternalServerError) as late:
        complete(client, max_tokens=900, extra_body={"ignore_eos": True, "timeout": 0.05})
    assert (late.value.status_code, late.value.code) == (504, "timeout")
    assert server.metric("http_requests_total", status="504") == before + 1


def test_the_clients_timeout_and_a_closed_stream_free_the_row(server: RunningServer) -> None:
    with pytest.raises(openai.APITimeoutError):
        complete(connect(server, timeout=0.1), max_tokens=900, extra_body={"ignore_eos": True})
    wait_for(lambda: is_idle(server))
    stream = long_stream(connect(server))
    next(iter(stream))
    assert server.metric("jaxserve:num_requests_running") == 1
    stream.close()
    wait_for(lambda: is_idle(server))


@pytest.mark.slow
def test_a_full_server_refuses_and_the_client_tries_again(narrow: RunningServer) -> None:
    client, patient = connect(narrow), connect(narrow, max_retries=20)
    streams = [long_stream(client) for _ in range(3)]
    with pytest.raises(openai.RateLimitError) as refused:
        complete(client)
    assert refused.value.code == "too_many_streams" and int(refused.value.response.headers["retry-after"]) >= 1
    found: list[str] = []
    asking = threading.Thread(target=lambda: found.append(complete(patient).choices[0].text))
    before = narrow.metric("http_requests_total", status="429")
    asking.start()
    wait_for(lambda: narrow.metric("http_requests_total", status="429") > before)
    assert not found
    for stream in streams:
        stream.close()
    asking.join(60)
    assert found == [complete(client).choices[0].text]
    wait_for(lambda: is_idle(narrow))


def test_a_full_queue_refuses_at_once(narrow: RunningServer) -> None:
    client = connect(narrow)
    rows = long_stream(client, n=8, temperature=1)
    next(iter(rows))
    waiting = threading.Thread(target=lambda: complete(client))
    waiting.start()
    wait_for(lambda: narrow.metric("jaxserve:num_requests_waiting") == 1)
    with pytest.raises(openai.RateLimitError) as refused:
        complete(client, stream=True)
    assert refused.value.code == "rate_limit_exceeded" and "retry-after" in refused.value.response.headers
    rows.close()
    waiting.join(60)
    assert not waiting.is_alive()
    wait_for(lambda: is_idle(narrow))


def test_thirty_two_at_once_are_what_each_is_alone(server: RunningServer) -> None:
    prompts = [f"{'The little dog ' * (number % 5)}{STORY} {number}" for number in range(32)]
    alone = [complete(connect(server), prompt=prompt).choices[0].text for prompt in prompts]

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def ask(number: int, prompt: str) -> str:
                made = client.completions.create(
                    model=MODEL, prompt=prompt, temperature=0, max_tokens=12, stream=bool(number % 2)
                )
                answer: Any = await made
                if number % 2:
                    return "".join([chunk.choices[0].text async for chunk in answer])
                return answer.choices[0].text

            return await asyncio.gather(*(ask(number, prompt) for number, prompt in enumerate(prompts)))

    assert asyncio.run(ask_all()) == alone
