"""Errors on the paths of Messages have Anthropic's form, wherever they are made, and name the body's own fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.conftest import SMALL
from tests.server.refusals import HELLO
from tests.server.refusals.refusal import JSON
from tests.server.running import RunningServer, run_server
from tests.server.test_security import write_tenant

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
GOOD: dict[str, Any] = {"messages": HELLO, "max_tokens": 3}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
FORM = {"type": "json_schema", "schema": {"type": "object"}}


def check_error(answer: httpx.Response, status: int, kind: str) -> str:
    """Returns the sentence of an error in Anthropic's form."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"type", "error"} and body["type"] == "error", answer.text
    assert set(body["error"]) - {"details"} == {"type", "message"} and body["error"]["type"] == kind, answer.text
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    sentence: str = body["error"]["message"]
    assert 10 < len(sentence) <= 600
    return sentence


def test_clients_are_told_to_go_on_without_a_thread(http: httpx.Client) -> None:
    answer = http.post(PATH, json={**GOOD, "thread": {"type": "create"}})
    assert check_error(answer, 400, "invalid_request_error").startswith("thread: is not supported; nothing is stored")
    details = answer.json()["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert "details" not in http.post(PATH, json={**GOOD, "speed": "fast"}).json()["error"]


LARGE_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 400_000}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens: "),
    ({"nonsense": 1}, "'nonsense'"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type: "),
    ({"messages": [{"role": "user", "content": [LARGE_IMAGE]}]}, "messages[0].content[0].type: must be text"),
    ({"system": [{"type": "image"}]}, "system[0].type: "),
    ({"system": 1}, "system"),
    ({"stop": "x"}, "stop: is not supported; send stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"n": 2}, "n: "),
    ({"stream_options": {"include_usage": True}}, "stream_options: "),
    ({"container": "x"}, "container: "),
    ({"mcp_servers": [{"url": "https://x.example"}]}, "mcp_servers: "),
    ({"speed": "fast"}, "speed: "),
    ({"diagnostics": {"previous_message_id": "msg_1"}}, "diagnostics: "),
    ({"service_tier": "scale"}, "service_tier"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"thinking": {"type": "adaptive", "budget_tokens": 1}}, "thinking.budget_tokens: "),
    ({"output_config": {"effort": "low"}}, "output_config.effort: "),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nope"}}}}, "output_config.format.schema"),
    ({"output_config": {"format": FORM}, "structured_outputs": {"regex": "a"}}, "structured_outputs: conflicts with"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0]: "),
    ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management.edits[0]: "),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type: "),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.type: "),
    ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type: "),
    ({"tools": [TOOL], "tool_choice": {"type": "any", "name": "f"}}, "tool_choice: "),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name: "),
    (
        {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": 1}},
        "tool_choice.disable_parallel_tool_use: ",
    ),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: "),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema: "),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0]: "),
    ({"tools": [{**TOOL, "name": "?"}], "tool_choice": {"type": "any"}}, "tools[0].name: "),
    ({"tools": [TOOL, TOOL], "tool_choice": {"type": "any"}}, "tools[1].name: "),
    ({"tools": [{**TOOL, "input_schema": []}], "tool_choice": {"type": "any"}}, "tools[0].input_schema"),
    ({"tools": [{**TOOL, "input_schema": {"type": "array"}}], "tool_choice": {"type": "any"}}, "tools[0].input_schema"),
    ({"tools": [TOOL] * 129, "tool_choice": {"type": "any"}}, "tools: at most 128"),
    ({"tools": [TOOL], "tool_choice": {"type": "any"}, "output_config": {"format": FORM}}, "output_config.format: "),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "named"), REFUSED)
def test_refusals_name_the_field(http: httpx.Client, fields: dict[str, Any], named: str, stream: bool) -> None:
    body = {**GOOD, **fields, "stream": stream}
    sentence = check_error(http.post(PATH, json=body), 400, "invalid_request_error")
    assert named in sentence
    assert not any(word in sentence for word in ("tools[0].function", "response_format", "parameters"))


def test_refusals_of_the_whole_server_have_the_form(http: httpx.Client) -> None:
    check_error(http.post(PATH, content=b"{", headers=JSON), 400, "invalid_request_error")
    check_error(http.post(PATH, content=b"{}", headers={"content-type": "text/plain"}), 415, "invalid_request_error")
    check_error(http.post(PATH, content=b"x" * 2**21, headers=JSON), 413, "request_too_large")
    check_error(http.get(PATH), 405, "invalid_request_error")
    check_error(http.get(f"{PATH}/batches"), 404, "not_found_error")
    check_error(http.post(COUNT, json={**GOOD, "model": "nope"}), 404, "not_found_error")
    foreign = check_error(http.post(PATH, json=GOOD, headers={"origin": "https://x.example"}), 403, "permission_error")
    assert "origin" in foreign
    late = http.post(PATH, json={**GOOD, "timeout": 1e-6})
    check_error(late, 504, "timeout_error")
    long = {**GOOD, "messages": [{"role": "user", "content": "word " * 1100}]}
    assert check_error(http.post(PATH, json=long), 400, "invalid_request_error").startswith("prompt is too long: ")
    assert http.post(COUNT, json=long).json()["input_tokens"] > 1024
    assert http.head("/").status_code == 200 and not http.head("/").content
    for path in ("/v1/messagesx", "/v1/chat/completions"):  # OpenAI's form elsewhere
        assert "type" not in http.get(path).json() and "request-id" not in http.get(path).headers


def test_values_that_change_nothing_are_taken(http: httpx.Client) -> None:
    plain = http.post(PATH, json={**GOOD, "temperature": 0}).json()
    given: dict[str, Any] = {
        "system": [],
        "speed": "standard",
        "diagnostics": {"previous_message_id": None},
        "mcp_servers": [],
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "high", "format": None},
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]},
        "tools": [],
        "tool_choice": {"type": "auto"},
        "metadata": {"user_id": None},
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
    answer = http.post(f"{PATH}?beta=true", json={**GOOD, **given, "temperature": 0}, headers=headers).json()
    assert answer["content"] == plain["content"]
    tool = {**TOOL, "type": "custom", "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}
    tool |= {"defer_loading": False, "input_examples": [], "strict": False}
    chosen = http.post(PATH, json={**GOOD, "tools": [tool], "tool_choice": {"type": "none"}})
    assert chosen.status_code == 200, chosen.text


KEY, CRAWLER = "key-of-everybody-1", "key-of-a-tenant-2"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Has keys, a tenant that may only use flex, and a page of another origin."""
    tenants = tmp_path_factory.mktemp("keys") / "tenants.toml"
    tenants.touch(0o600)
    tenants.write_text(write_tenant("crawler", CRAWLER, 'tiers = ["flex"]'))
    flags = ("--api-key", KEY, "--tenants", str(tenants), "--allowed-origins", "https://page.example")
    with run_server(*SMALL, *flags) as running:
        yield running


def test_keys_tenants_and_tiers(keyed: RunningServer) -> None:
    with httpx.Client(base_url=keyed.url, timeout=60) as http:
        for path in (PATH, COUNT):
            for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": KEY, "authorization": "Bearer wrong"}):
                answer = http.post(path, json=GOOD, headers=headers)
                check_error(answer, 401, "authentication_error")
            for headers in ({"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}, {"X-Api-Key": CRAWLER}):
                assert http.post(path, json=GOOD, headers=headers).status_code == 200
        refused = http.post(PATH, json={**GOOD, "service_tier": "standard_only"}, headers={"x-api-key": CRAWLER})
        assert "flex" in check_error(refused, 403, "permission_error")
        page = {"origin": "https://page.example", "x-api-key": KEY}
        shown = http.post(PATH, json=GOOD, headers=page)
        assert shown.headers["access-control-allow-origin"] == "https://page.example"
        assert "request-id" in shown.headers["access-control-expose-headers"]
        assert http.head("/").status_code == 200
        metrics = http.get("/metrics", headers={"x-api-key": KEY}).text
    assert "tenant_requests_total{" in metrics and 'tenant="crawler"' in metrics
    routes = [line for line in metrics.splitlines() if PATH in line]
    assert any(f'"{PATH}"' in line for line in routes) and any(f'"{COUNT}"' in line for line in routes)
    logged = [line for line in keyed.lines if f"POST {PATH}" in line or f'"{PATH}"' in line]
    assert logged and not any(KEY in line for line in keyed.lines)


def test_a_full_server_is_overloaded(narrow: RunningServer) -> None:
    """It bears three requests at once."""
    endless = {**GOOD, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=narrow.url, timeout=60) as http:
        streams = [http.stream("POST", PATH, json=endless) for _ in range(3)]
        try:
            lines = [opened.__enter__().iter_lines() for opened in streams]
            assert [next(each) for each in lines] == ["event: message_start"] * 3
            full = http.post(PATH, json=GOOD)
            check_error(full, 429, "overloaded_error")
            assert int(full.headers["retry-after"]) >= 1
        finally:
            for opened in streams:
                opened.__exit__(None, None, None)


def test_a_stream_that_fails_ends_with_an_error(http: httpx.Client) -> None:
    body = {**GOOD, "max_tokens": 900, "ignore_eos": True, "stream": True, "timeout": 0.5}
    with http.stream("POST", PATH, json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    if answer.status_code == 200:  # else it failed before its first token
        assert lines[-2] == "event: error"
        error = json.loads(lines[-1].removeprefix("data: "))
        assert error["type"] == "error" and error["error"]["type"] == "timeout_error"
