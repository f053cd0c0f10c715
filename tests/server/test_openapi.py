"""The server against its own OpenAPI document, and its answers against the types that OpenAI's client publishes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai.types as published
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from openai.types import chat, responses
from pydantic import BaseModel, TypeAdapter
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.server.running import RunningServer, run_server

EXAMPLES = 25  # of each operation
# Answers of 128 tokens at most, so that a valid body costs little.
SMALL = ("--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--max-model-len", "128")
EVENTS = TypeAdapter(responses.ResponseStreamEvent)
CHAT = {"messages": [{"role": "user", "content": "What is two plus two?"}], "temperature": 0, "max_tokens": 40}
STORY = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
FORM = {"type": "json_schema", "json_schema": {"name": "c", "schema": {"enum": ["Paris", "Rome"]}}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "now"}}], "tool_choice": "required"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with run_server(*SMALL, "--max-n", "2", "--max-prompts", "4") as running:
        yield running


# --- the document


@pytest.fixture(scope="module")
def document(server: RunningServer) -> Any:
    """What the server says of itself, `/live` aside: its answer does not end, and a test of its own reads it."""
    config = schemathesis.Config.from_dict({"generation": {"deterministic": True}})
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json", config=config)
    return schema.exclude(path="/live")


operations = schemathesis.pytest.from_fixture("document")


@operations.parametrize()
@settings(
    max_examples=EXAMPLES, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
def test_operations_do_what_the_document_says(case: schemathesis.Case) -> None:
    # Not every body that fits the document is served: ranges are in the engine, and depend on the model.
    case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=60)


def test_the_document_names_every_operation(server: RunningServer) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    paths = {
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"),
        *("/v1/models", "/v1/models/{name}", "/health", "/health/ready", "/health/live", "/ping", "/version"),
        *("/metrics", "/live"),
    }
    assert set(document["paths"]) == paths
    text = json.dumps(document)
    assert "422" not in text and "HTTPValidationError" not in text
    for operations in document["paths"].values():
        for operation in operations.values():
            assert operation["responses"]["200"] and operation["summary"]


def test_the_live_view_is_a_stream_that_can_be_left(server: RunningServer) -> None:
    with httpx.stream("GET", f"{server.url}/live", timeout=10) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line[6:]) for line, _ in zip(_data_lines(answer), range(2), strict=False)]
    assert [event["state"] for event in events] == ["ready", "ready"] and events[0]["time"] < events[1]["time"]
    assert events[0]["rows"]["running"] == [] and events[0]["pages"]["used"] == 0


# --- the published types


def _data_lines(answer: httpx.Response) -> Iterator[str]:
    return (line for line in answer.iter_lines() if line.startswith("data: "))


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


def ask(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{server.url}{path}", json={"model": "demo", **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    return json.loads(answer.text, parse_constant=refuse)


def stream(server: RunningServer, path: str, body: dict[str, Any]) -> list[Any]:
    """Returns the values of all events, which must be framed as server-sent events are."""
    answer = httpx.post(f"{server.url}{path}", json={"model": "demo", **body, "stream": True}, timeout=60)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("\n\n")
    found = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        *name, data = block.split("\n")
        assert data.startswith("data: ") and len(name) < 2
        if data != "data: [DONE]":
            found.append(json.loads(data[6:], parse_constant=refuse))
            assert not name or name[0] == f"event: {found[-1]['type']}"
    return found


def check(kind: type[BaseModel], value: Any) -> None:
    """Every value has exactly the type that the client publishes, without conversions."""
    kind.model_validate(value, strict=True)


CHATS = {
    "plain": CHAT,
    "logprobs": {**CHAT, "logprobs": True, "top_logprobs": 3},
    "several": {**CHAT, "n": 2, "temperature": 2, "seed": 3},
    "form": {**CHAT, "response_format": FORM},
    "calls": {**CHAT, **TOOLS, "parallel_tool_calls": False},
    "vllm": {**CHAT, "return_token_ids": True, "prompt_logprobs": 1, "service_tier": "auto"},
    "usage": {**CHAT, "stream_options": {"include_usage": True}},
}


@pytest.mark.parametrize("name", CHATS)
def test_chats_have_the_published_types(server: RunningServer, name: str) -> None:
    body = CHATS[name]
    if name != "usage":
        check(chat.ChatCompletion, ask(server, "/v1/chat/completions", body))
    chunks = stream(server, "/v1/chat/completions", body)
    assert len(chunks) > 2
    for chunk in chunks:
        check(chat.ChatCompletionChunk, chunk)


COMPLETIONS = {
    "plain": STORY,
    "echo": {**STORY, "echo": True, "logprobs": 2},
    "scores": {**STORY, "echo": True, "logprobs": 1, "max_tokens": 0},
    "several": {**STORY, "prompt": ["Once", "Twice"], "n": 2, "temperature": 2, "seed": 1},
    "vllm": {**STORY, "return_token_ids": True, "prompt_logprobs": 1},
    "usage": {**STORY, "stream_options": {"include_usage": True}},
}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions_have_the_published_types(server: RunningServer, name: str) -> None:
    body = COMPLETIONS[name]
    if name != "usage":
        check(published.Completion, ask(server, "/v1/completions", body))
    for chunk in stream(server, "/v1/completions", body):
        for choice in chunk["choices"]:  # the type knows whole answers only: until the last chunk there is no reason
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        check(published.Completion, chunk)


RESPONSES = {
    "plain": {"input": "What is two plus two?", "temperature": 0, "max_output_tokens": 40},
    "cut": {"input": "What is two plus two?", "max_output_tokens": 2, "instructions": "Be brief.", "user": "u"},
    "form": {
        "input": "A city",
        "max_output_tokens": 9,
        "text": {"format": {**FORM["json_schema"], "type": "json_schema"}},
    },
}


@pytest.mark.parametrize("name", RESPONSES)
def test_responses_have_the_published_types(server: RunningServer, name: str) -> None:
    check(responses.Response, ask(server, "/v1/responses", RESPONSES[name]))
    for event in stream(server, "/v1/responses", RESPONSES[name]):
        EVENTS.validate_python(event, strict=True)


@pytest.mark.parametrize("form", ["float", "base64"])
def test_embeddings_and_models_have_the_published_types(
    server: RunningServer, form: Literal["float", "base64"]
) -> None:
    found = ask(server, "/v1/embeddings", {"input": ["a", "b"], "encoding_format": form})
    if form == "base64":  # which the client unpacks before its types are looked at
        for item in found["data"]:
            assert isinstance(item["embedding"], str)
            item["embedding"] = [0.0]
    check(published.CreateEmbeddingResponse, found)
    listed = httpx.get(f"{server.url}/v1/models").json()
    check(published.Model, listed["data"][0])
    assert listed["object"] == "list"
