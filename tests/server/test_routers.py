"""What routers make of a body, and what endpoint pickers read: neither changes an answer.

The bodies are those that vllm-router 0.1.17 passed on for the ones beside them, and for `/v1/responses` what SGLang's
gateway adds. Both read a body into a type of their own and write it out again with all its defaults.
"""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer

QUESTION = {"role": "user", "content": "What is two plus two?"}
SAID = {"role": "assistant", "content": "It is four."}
CHAT, STORY, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
COMPLETION_DEFAULTS = {
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
}
CHAT_DEFAULTS = {
    **COMPLETION_DEFAULTS,
    "logprobs": False,
    "continue_final_message": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "include_reasoning": True,
}
REWRITTEN: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # (path, the client's fields, the router's)
    (CHAT, {"messages": [QUESTION]}, {"stream": False, **CHAT_DEFAULTS}),
    (CHAT, {"messages": [QUESTION], "stream": True}, CHAT_DEFAULTS),
    (
        CHAT,
        {"messages": [{**SAID, "reasoning_content": "r"}, QUESTION]},
        {"messages": [{**SAID, "reasoning": "r", "tool_calls": None}, QUESTION], **CHAT_DEFAULTS},
    ),
    (STORY, {"prompt": "Once upon a time"}, {"stream": False, "echo": False, **COMPLETION_DEFAULTS}),
    (STORY, {"prompt": "Once upon a time", "stream": True}, {"echo": False, **COMPLETION_DEFAULTS}),
    (
        RESPONSE,
        {"input": "What is two plus two?", "store": False, "top_p": 1.0},
        {"stream": None, "priority": 0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    ),
]
OTHER_VALUES: dict[str, tuple[Any, ...]] = {
    "no_stop_trim": (True, 0, 1, "false", [], {}),
    "return_hidden_states": (True, 0, 1, "false"),
    "separate_reasoning": (False, 1, 0, "true"),
    "stream_reasoning": (False, 1.0, "true", [True]),
}
OTHERS = [
    (path, name, value) for path in (CHAT, STORY, RESPONSE) for name, values in OTHER_VALUES.items() for value in values
]


def ask(server: RunningServer, path: str, body: dict[str, Any]) -> httpx.Response:
    limit = "max_output_tokens" if path == RESPONSE else "max_tokens"
    return httpx.post(f"{server.url}{path}", json={"temperature": 0.0, limit: 12, **body}, timeout=60)


def read_answer(answer: httpx.Response) -> Any:
    """What an answer or a stream says, without what differs from one request to the next."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        found = answer.json()
        return found["choices"] if "choices" in found else found["output"][0]["content"]
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(event)["choices"][0] for event in events]
    texts = [choice["delta"].get("content") or "" if "delta" in choice else choice["text"] for choice in choices]
    return "".join(texts), choices[-1]["finish_reason"]


@pytest.mark.parametrize(("path", "sent", "added"), REWRITTEN)
def test_a_rewritten_body_has_the_answer_of_the_clients_own(
    server: RunningServer, path: str, sent: dict[str, Any], added: dict[str, Any]
) -> None:
    own = read_answer(ask(server, path, sent))
    assert own and read_answer(ask(server, path, sent | added)) == own


@pytest.mark.parametrize(("path", "name", "value"), OTHERS)
def test_other_values_of_those_fields_are_refused_by_name(
    server: RunningServer, path: str, name: str, value: Any
) -> None:
    body = next(sent for each, sent, _ in REWRITTEN if each == path)
    answer = ask(server, path, body | {name: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == name
    assert "is not supported" in answer.json()["error"]["message"]


def test_null_is_as_good_as_nothing(server: RunningServer) -> None:
    body = {"messages": [QUESTION], **dict.fromkeys(OTHER_VALUES)}
    assert read_answer(ask(server, CHAT, body)) == read_answer(ask(server, CHAT, {"messages": [QUESTION]}))


@pytest.mark.parametrize("kind", ["text/plain", "application/openmetrics-text"])
def test_a_scrape_has_what_endpoint_pickers_read(server: RunningServer, kind: str) -> None:
    page = httpx.get(f"{server.url}/metrics", headers={"accept": kind}).text
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert re.search(rf"^jaxserve:{name}\{{[^}}]*\}} [0-9.]+$", page, flags=re.M), name
    (row,) = re.findall(r"^jaxserve:cache_config_info\{(.*)\} 1(?:\.0)?$", page, flags=re.M)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', row))
    assert labels["block_size"] == labels["page_size"] and int(labels["block_size"]) > 0
    assert int(labels["num_gpu_blocks"]) == int(labels["num_pages"]) - 1, "the null page holds no request's tokens"
