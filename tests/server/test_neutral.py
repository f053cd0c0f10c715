"""Values that change nothing are taken: the answer is the one without them, whole and streamed, for any n."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from jaxserve.server.protocol.foreign import (
    COHERE_FIELDS,
    EMBEDDING_FIELDS,
    POOLING_FIELDS,
    SAMPLING_FIELDS,
    TOKENIZE_FIELDS,
)
from tests.server.refusals import CHAT, EMBED, GOOD, HELLO, RESPOND, TEXT, check_error
from tests.server.refusals.refusal import JSON

NEUTRAL: dict[str, list[dict[str, Any]]] = {
    TEXT: [{"suffix": ""}, {"best_of": 1}, dict.fromkeys(SAMPLING_FIELDS.keys() - {"request_id"})],
    CHAT: [
        {"verbosity": "medium"},
        {"reasoning_effort": "medium", "chat_template_kwargs": {}},
        {"top_logprobs": 0},
        {"top_logprobs": 0, "logprobs": False},
        {"function_call": "none", "functions": []},
        {"tool_choice": "auto", "tools": []},
        {"tool_choice": "none"},
        {"prompt_cache_retention": "in_memory"},
        {"add_special_tokens": False, "documents": [], "mm_processor_kwargs": {}},
        dict.fromkeys(SAMPLING_FIELDS),
    ],
    RESPOND: [
        {"text": {"verbosity": "medium"}},
        {"top_logprobs": 0},
        {"n": 1},
        {"stream_options": {"include_obfuscation": False}},
        dict.fromkeys(SAMPLING_FIELDS),
    ],
    EMBED: [
        dict.fromkeys(EMBEDDING_FIELDS),
        {"normalize": True, "embed_dtype": "float32", "endianness": "native", "add_special_tokens": True},
    ],
    **{key: [dict.fromkeys(POOLING_FIELDS), {"encoding_format": "float"}] for key in ("/rerank", "/score", "/pooling")},
    "/v2/embed": [dict.fromkeys(COHERE_FIELDS)],
    "/tokenize": [dict.fromkeys(TOKENIZE_FIELDS)],
}
WHOLE_NUMBERS: dict[str, tuple[str, ...]] = {
    TEXT: ("max_tokens", "n", "seed", "top_k", "min_tokens", "priority", "logprobs", "prompt_logprobs", "best_of"),
    CHAT: ("max_tokens", "max_completion_tokens", "n", "seed", "top_k", "min_tokens", "priority"),
    RESPOND: ("max_output_tokens", "seed", "top_k", "min_tokens", "priority"),
    EMBED: ("dimensions", "priority", "truncate_prompt_tokens"),
    "/rerank": ("top_n", "priority", "truncate_prompt_tokens"),
}


def ask(http: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    return http.post(path, content=json.dumps(body).encode(), headers=JSON)


def read(answer: httpx.Response) -> str | dict[int, str]:
    """Returns an answer without its ids and times; of a stream, the text of each choice: chunks come as steps end."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        texts: dict[int, str] = {}
        for line in answer.text.splitlines():
            event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
            if event.get("type") == "response.output_text.delta":
                texts[0] = texts.get(0, "") + event["delta"]
            for choice in event.get("choices", ()):
                text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
                texts[choice["index"]] = texts.get(choice["index"], "") + text
        return texts
    return re.sub(r'"(id|item_id|created|created_at)":("[^"]*"|[\d.]+)|"cached_tokens":\d+', "", answer.text)


@pytest.mark.parametrize("path", NEUTRAL)
def test_neutral_values_change_nothing(http: httpx.Client, path: str) -> None:
    model, body = GOOD[path]
    if "temperature" in model.model_fields:
        body = {**body, "temperature": 0}
    forms: list[dict[str, Any]] = [{}]
    forms += [{"stream": True}] if "stream" in model.model_fields else []
    forms += [{"n": 2}, {"n": 2, "stream": True}] if path in (TEXT, CHAT) else []
    for form in forms:
        plain = read(ask(http, path, body | form))
        for values in NEUTRAL[path]:
            changed = {**body, **form, **values}
            changed |= {"best_of": changed.get("n", 1)} if "best_of" in values else {}
            assert read(ask(http, path, changed)) == plain, (form, values)


@pytest.mark.parametrize("path", WHOLE_NUMBERS)
def test_whole_numbers_may_have_a_point(http: httpx.Client, path: str) -> None:
    for field in WHOLE_NUMBERS[path]:
        body = {**GOOD[path][1], field: 2.0}
        if field == "max_completion_tokens":
            del body["max_tokens"]
        if field == "best_of":
            body["n"] = 2.0
        assert ask(http, path, body).status_code == 200, field
        for wrong in (2.5, "2", True):
            assert check_error(ask(http, path, {**body, field: wrong}))["param"] == field


@pytest.mark.parametrize("path", [TEXT, CHAT, RESPOND])
def test_top_p_of_zero_is_greedy(http: httpx.Client, path: str) -> None:
    for form in ({}, {"stream": True}):
        found = [
            read(ask(http, path, {**GOOD[path][1], **form, **values}))
            for values in ({"temperature": 0, "top_p": 0.5}, {"temperature": 2, "top_p": 0})
        ]
        if path == RESPOND and not form:  # which repeats both values
            found = [re.sub(r'"(temperature|top_p)":[^,]*', "", str(each)) for each in found]
        assert found[0] == found[1]


def test_an_empty_prompt_is_the_beginning_of_a_text(http: httpx.Client) -> None:
    body = {"max_tokens": 4, "temperature": 0}
    begin = ask(http, "/tokenize", {"prompt": ""}).json()["tokens"]
    assert len(begin) == 1
    expected = ask(http, TEXT, {**body, "prompt": begin}).json()["choices"][0]["text"]
    for prompt in ("", [""], ["", "a"]):
        assert ask(http, TEXT, {**body, "prompt": prompt}).json()["choices"][0]["text"] == expected
    for n in (1, 2):
        stream = ask(http, TEXT, {**body, "prompt": "", "n": n, "stream": True}).text
        assert stream.count('"finish_reason":"length"') == n
    refused = ask(http, TEXT, {**body, "prompt": "", "add_special_tokens": False})
    assert check_error(refused)["param"] == "prompt"


def test_refusals_in_a_conversation_are_read_as_text(http: httpx.Client) -> None:
    def answer(path: str, **message: Any) -> str | dict[int, str]:
        messages = [*HELLO, {"role": "assistant", **message}, *HELLO]
        rest = {"messages": messages, "max_tokens": 4} if path == CHAT else {"input": messages, "max_output_tokens": 4}
        return read(ask(http, path, {**rest, "temperature": 0}))

    for path in (CHAT, RESPOND):
        expected = answer(path, content="No.")
        assert answer(path, content=[{"type": "refusal", "refusal": "No."}]) == expected
    assert answer(CHAT, content=None, refusal="No.") == answer(CHAT, content="No.")


@pytest.mark.parametrize("path", [TEXT, CHAT, RESPOND, EMBED])
def test_the_tier_scale_is_refused_with_the_nearest(http: httpx.Client, path: str) -> None:
    refused = ask(http, path, {**GOOD[path][1], "service_tier": "scale"})
    message = refused.json()["error"]["message"]
    assert check_error(refused)["param"] == "service_tier" and "'priority', which is the nearest" in message
