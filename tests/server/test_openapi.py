"""The server against its own OpenAPI document, and its answers against the types that OpenAI's client publishes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai.types as published
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from openai.types import chat, responses
from pydantic import BaseModel, TypeAdapter
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from jaxserve.server.app import make_api
from jaxserve.server.docs_page import write_page
from tests.examples import scale_examples
from tests.server.asgi import make_state
from tests.server.conftest import FEW_PROGRAMS
from tests.server.running import RunningServer, run_server

EXAMPLES = scale_examples(100)  # of each operation, right and wrong ones
WORK = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize")
WORK += ("/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens")
WORK += ("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/classify", "/pooling", "/v2/embed")
ENDLESS = ("GET", "/live")  # a stream that does not end: its test reads some of it
OPERATIONS = [
    *(("POST", path) for path in WORK),
    *(("GET", path) for path in ("/v1/models", "/v1/models/{name}", "/health", "/health/ready", "/health/live")),
    *(("GET", path) for path in ("/health/generate", "/ping", "/version", "/metrics")),
    ENDLESS,
]
CASES = [(*each, GenerationMode.POSITIVE) for each in OPERATIONS if each != ENDLESS]
CASES += [("POST", path, GenerationMode.NEGATIVE) for path in WORK]  # nothing can be wrong with the others
# Answers of 128 tokens at most, so that a valid body costs little.
SMALL = ("--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--max-model-len", "128", *FEW_PROGRAMS)
EVENTS = TypeAdapter(responses.ResponseStreamEvent)
CHAT = {"messages": [{"role": "user", "content": "What is two plus two?"}], "temperature": 0, "max_tokens": 40}
STORY = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}
CITY = {"name": "c", "schema": {"enum": ["Paris", "Rome"]}}
FORM = {"type": "json_schema", "json_schema": CITY}
TEXT = {"format": {"type": "json_schema", **CITY}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "now"}}], "tool_choice": "required"}
ITEMS = {"tools": [{"type": "function", "name": "now"}, {"type": "custom", "name": "note"}], "tool_choice": "required"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with run_server(*SMALL, "--max-n", "2", "--max-prompts", "4") as running:
        yield running


# --- the document


@pytest.fixture(scope="module")
def document(server: RunningServer) -> Any:
    """What the server says of itself, as schemathesis reads it."""
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_operations_do_what_the_document_says(document: Any, method: str, path: str, mode: GenerationMode) -> None:
    @settings(
        max_examples=EXAMPLES, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(document[path][method].as_strategy(generation_mode=mode))
    def call(case: schemathesis.Case) -> None:
        answer = case.call(timeout=60)
        if answer.status_code == 504 and case.body["timeout"] < 60:
            return  # the request's own deadline
        # Not every body that fits the document is served: ranges are in the engine, and depend on the model.
        case.validate_response(answer, excluded_checks=[positive_data_acceptance])

    call()


def test_the_document_names_every_operation(server: RunningServer) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    found = {(method.upper(), path) for path, each in document["paths"].items() for method in each}
    assert found == set(OPERATIONS)
    text = json.dumps(document)
    assert "422" not in text and "HTTPValidationError" not in text
    for operations in document["paths"].values():
        for operation in operations.values():
            assert operation["responses"]["200"] and operation["summary"]


@pytest.mark.parametrize("opens_metrics", [True, False])
@pytest.mark.parametrize("has_keys", [True, False])
def test_the_document_says_which_operations_need_a_key(has_keys: bool, opens_metrics: bool) -> None:
    document = make_api(make_state(allow_metrics_without_key=opens_metrics), has_keys=has_keys).openapi()
    assert document["components"]["securitySchemes"]["bearerAuth"]["scheme"] == "bearer"
    operations = {path: each for path, methods in document["paths"].items() for each in methods.values()}
    open_paths = {path for path, each in operations.items() if not each["security"]}
    assert all(each["security"] in ([], [{"bearerAuth": []}, {"apiKeyAuth": []}]) for each in operations.values())
    opened = {path for path in operations if path == "/ping" or path.startswith("/health")}
    opened |= {"/metrics"} if opens_metrics else set()
    assert open_paths == (opened if has_keys else set(operations))


def test_the_document_is_a_page_too(server: RunningServer) -> None:
    answer = httpx.get(f"{server.url}/docs")
    assert answer.headers["content-type"].startswith("text/html") and "content-security-policy" in answer.headers
    for method, path in OPERATIONS:
        assert f"<h2>{method} {path}</h2>" in answer.text
    row = "<tr><td><code>{}</code></td><td>{}</td><td>{}</td></tr>"
    assert row.format("messages", "list of object", "required") in answer.text
    assert row.format("parallel_tool_calls", "boolean | null", "") in answer.text
    assert "<script" not in answer.text and httpx.head(f"{server.url}/docs").status_code == 200


def test_text_of_the_document_stays_text_on_the_page() -> None:
    info = {"title": "<b>", "description": "a & b"}
    page = write_page({"info": info, "paths": {"/<i>": {"get": {"description": "<u>"}}}})
    assert "&lt;b&gt;" in page and "a &amp; b" in page and "<h2>GET /&lt;i&gt;</h2>" in page and "<u>" not in page


def test_a_flag_removes_the_document_and_its_page() -> None:
    for is_off in (False, True):
        app = make_api(make_state(disable_fastapi_docs=is_off))
        paths = {getattr(route, "path", "") for route in app.routes}
        assert ({"/docs", "/openapi.json"} <= paths) is not is_off and ("/docs" in paths) is not is_off


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
    "vllm": {**CHAT, "return_token_ids": True, "prompt_logprobs": 1, "service_tier": "flex"},
    "usage": {**CHAT, "stream_options": {"include_usage": True}},
}


@pytest.mark.parametrize("name", CHATS)
def test_chats_have_the_published_types(server: RunningServer, name: str) -> None:
    body = CHATS[name]
    if name != "usage":
        check(chat.ChatCompletion, ask(server, "/v1/chat/completions", body))
    chunks = stream(server, "/v1/chat/completions", {**body, "prompt_logprobs": None})  # which no chunk has room for
    assert len(chunks) > 2
    for chunk in chunks:
        check(chat.ChatCompletionChunk, chunk)


def check_completion(value: Any) -> None:
    """The type knows neither chunks, without a reason until the last, nor echoes, whose first token has no score."""
    for choice in value["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        if choice["logprobs"] is not None:
            scores, tops = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
            if scores and scores[0] is None:
                scores[0], tops[0] = 0.0, {}
    check(published.Completion, value)


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
        check_completion(ask(server, "/v1/completions", body))
    for chunk in stream(server, "/v1/completions", body):
        check_completion(chunk)


RESPONSES = {
    "plain": {"input": "What is two plus two?", "temperature": 0, "max_output_tokens": 40},
    "cut": {"input": "What is two plus two?", "max_output_tokens": 2, "instructions": "Be brief.", "user": "u"},
    "form": {"input": "A city", "max_output_tokens": 9, "text": TEXT},
    "calls": {"input": "A city", "max_output_tokens": 40, **ITEMS},
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
