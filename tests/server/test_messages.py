"""Refusals name a field that the body has, and advise what a client can do."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.refusals import CHAT, GOOD, RESPOND, TEXT
from tests.server.refusals.chats import make_tool
from tests.server.refusals.refusal import JSON

OVERLAPPING = {"oneOf": [{"type": "integer"}, {"type": "number"}]}


def refuse(http: httpx.Client, path: str, **fields: Any) -> tuple[str | None, str]:
    """Returns the field and the sentence of the error that a good body with other fields gets."""
    answer = http.post(path, content=json.dumps({**GOOD[path][1], **fields}).encode(), headers=JSON)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["param"], answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [TEXT, CHAT, RESPOND])
@pytest.mark.parametrize("stream", [False, True])
def test_constraints_that_leave_no_token_are_the_bodys_own(http: httpx.Client, path: str, stream: bool) -> None:
    """The one allowed token ends the answer, which must be longer."""
    given = {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2, "stream": stream}
    forms: list[dict[str, int]] = [{}] if path == RESPOND else [{}, {"n": 2}]
    for form in forms:
        param, message = refuse(http, path, **given, **form)
        assert param == "allowed_token_ids" and "allowed_token_ids and min_tokens together" in message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_conflict_with_tools_names_the_form_that_was_given(http: httpx.Client, stream: bool, n: int) -> None:
    tools = {"tools": [make_tool(name="f")], "tool_choice": "required", "stream": stream, "n": n}
    for field, form in (("structured_outputs", {"choice": ["a"]}), ("response_format", {"type": "json_object"})):
        param, message = refuse(http, CHAT, **tools, **{field: form})
        assert param == field and message.startswith(f"{field}: conflicts with tool_choice")


def test_one_of_is_advised_without_options_of_a_library(http: httpx.Client) -> None:
    schema = {"type": "json_schema", "name": "a", "schema": OVERLAPPING}
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": OVERLAPPING}}
    for path, fields, field in (
        (TEXT, {"structured_outputs": {"json": OVERLAPPING}}, "structured_outputs.json"),
        (CHAT, {"response_format": named}, "response_format.json_schema.schema"),
        (RESPOND, {"text": {"format": schema}}, "text.format.schema"),
    ):
        param, message = refuse(http, path, **fields)
        assert param == field and message.endswith("use anyOf") and "option" not in message


def test_null_is_named_once(http: httpx.Client) -> None:
    param, message = refuse(http, CHAT, messages=[{"role": "user", "content": None}])
    assert (param, message) == ("messages[0].content", "messages[0].content: must be a string, got None")
