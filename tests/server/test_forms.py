"""Fields that constrain an answer, two at a time: both hold, or the refusal names both."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import SMALL, TEMPLATE
from tests.server.refusals.refusal import CHAT, HELLO
from tests.server.running import run_server

TOOLS = {
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {
                    "type": "object",
                    "properties": {"a": {"enum": [1, 2]}},
                    "required": ["a"],
                    "additionalProperties": False,
                },
            },
        }
    ]
}
NAMED = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "object", "properties": {"b": {"enum": [3, 4]}}, "required": ["b"], "additionalProperties": False}
TAG = {"type": "tag", "begin": "<v>", "content": {"type": "regex", "pattern": "[yz]"}, "end": "</v>"}
CALL = {  # a call of `f` in the template's format
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [
            {
                "type": "tag",
                "begin": '<tool_call>\n{"name": "f", "arguments": ',
                "content": {"type": "json_schema", "json_schema": TOOLS["tools"][0]["function"]["parameters"]},
                "end": "}\n</tool_call>",
            }
        ],
        "at_least_one": True,
        "stop_after_first": True,
    },
}
Check = Callable[[dict[str, Any], dict[str, int]], bool]


def is_called(choice: dict[str, Any], _ids: dict[str, int]) -> bool:
    """Every call is complete and matches its schema, and there is nothing else."""
    calls = choice["message"].get("tool_calls") or []
    return not choice["message"]["content"] and all(
        call["function"]["name"] == "f" and json.loads(call["function"]["arguments"]).get("a") in (1, 2)
        for call in calls
    )


def has_form(pattern: str) -> Check:
    """The content has the form, or the tools that may be called instead were."""
    return lambda choice, ids: (
        re.fullmatch(pattern, choice["message"]["content"] or "") is not None
        or bool(choice["message"].get("tool_calls") and is_called(choice, ids))
    )


def lacks(*texts: str) -> Check:
    return lambda choice, ids: not {ids[text] for text in texts} & set(choice["token_ids"])


# By name: the fields, the check of an answer, and what a refusal may call them.
FIELDS: dict[str, tuple[Callable[[dict[str, int]], dict[str, Any]], Check, str]] = {
    "response_format": (
        lambda _: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        has_form(r'\{\s?"b"\s?:\s?[34]\s?\}'), "response_format"),
    "choice": (lambda _: {"structured_outputs": {"choice": ["yes", "no"]}}, has_form("yes|no"), "structured_outputs"),
    "regex": (lambda _: {"structured_outputs": {"regex": "[yz]{20}"}}, has_form("[yz]{20}"), "structured_outputs"),
    "grammar": (
        lambda _: {"structured_outputs": {"grammar": 'start: "y" | "z"'}}, has_form("y|z"), "structured_outputs"),
    "structural_tag": (
        lambda _: {"structured_outputs": {"structural_tag": {"format": TAG}}}, has_form("<v>[yz]</v>"),
        "structured_outputs"),
    "required": (lambda _: {**TOOLS, "tool_choice": "required"}, is_called, "tool"),
    "named": (lambda _: {**TOOLS, "tool_choice": NAMED}, is_called, "tool"),
    "auto": (lambda _: TOOLS, lambda choice, ids: True, "tool"),
    "none": (
        lambda _: {**TOOLS, "tool_choice": "none"}, lambda choice, _: "tool_calls" not in choice["message"], "tool"),
    "allowed_token_ids": (
        lambda ids: {"allowed_token_ids": [ids["y"], ids["z"]]},
        lambda choice, ids: set(choice["token_ids"]) <= {ids["y"], ids["z"], ids["end"]}, "allowed_token_ids"),
    "bad_words": (lambda _: {"bad_words": ["no", "{"]}, lacks("no", "{"), "bad_words"),
    "logit_bias": (
        lambda ids: {"logit_bias": {str(ids["y"]): -100, str(ids["<"]): -100}},
        lacks("y"), "logit_bias"),  # "<" begins a call, which another field may force
    "min_tokens": (
        lambda _: {"min_tokens": 3},  # a form that is complete earlier ends the answer
        lambda choice, _: True, "min_tokens"),
    "continue": (
        lambda _: {"messages": [*HELLO, {"role": "assistant", "content": "It"}], "continue_final_message": True},
        lambda choice, _: True, "continue_final_message"),
}  # fmt: skip
FORMS = ("response_format", "choice", "regex", "grammar", "structural_tag", "required", "named", "auto", "none")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Of a server whose template shows calls in the format hermes."""
    path: Path = tmp_path_factory.mktemp("template") / "tools.jinja"
    path.write_text(TEMPLATE)
    with (
        run_server(*SMALL, "--chat-template", str(path)) as running,
        httpx.Client(base_url=running.url, timeout=60) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def ids(client: httpx.Client) -> dict[str, int]:
    """Tokens by their texts."""
    found = {
        text: client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"][-1]
        for text in ("y", "z", "<", "<tool_call>", "no", "{")
    }
    body = {"messages": HELLO, "structured_outputs": {"choice": ["no"]}, "return_token_ids": True}
    end = client.post(CHAT, json=body)
    return found | {"end": end.json()["choices"][0]["token_ids"][-1]}


def shares_a_field(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return any(first[name] != second[name] for name in first.keys() & second.keys())


@pytest.mark.parametrize("form", FORMS)
def test_two_fields_hold_or_both_are_named(client: httpx.Client, ids: dict[str, int], form: str) -> None:
    num_answers = num_refusals = 0
    make, check, name = FIELDS[form]
    for other, (make_other, check_other, other_name) in FIELDS.items():
        fields, more = make(ids), make_other(ids)
        if other == form or shares_a_field(fields, more):
            continue
        shapes: list[dict[str, Any]] = [{}, {"n": 2, "logprobs": True}]
        for shape in shapes:
            body = {"messages": HELLO, "temperature": 0, "max_tokens": 40, "return_token_ids": True, **fields, **more}
            answer = client.post(CHAT, json=body | shape)
            shown = f"{form} and {other}: {answer.text[:500]}"
            streamed = client.post(CHAT, json=body | shape | {"stream": True})
            assert ('{"error":' in streamed.text) == (answer.status_code != 200), shown
            if answer.status_code == 200:
                num_answers += 1
                choices = answer.json()["choices"]
                assert all(check(each, ids) and check_other(each, ids) for each in choices), shown
                continue
            num_refusals += 1
            error = answer.json()["error"]
            assert answer.status_code == 400 and name in f"{error['param']}{error['message']}", shown
            assert other_name in f"{error['param']}{error['message']}", shown
    assert num_answers >= 4 and (num_refusals >= 2 or form in ("none", "auto")), (num_answers, num_refusals)


@pytest.mark.parametrize("form", ["response_format", "choice", "regex", "grammar"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_form_beside_tools_leaves_the_model_both(
    client: httpx.Client, ids: dict[str, int], form: str, stream: bool
) -> None:
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 60, "n": 2, "stream": stream, **TOOLS}
    body |= FIELDS[form][0](ids)
    for bias, reason in ((100, "tool_calls"), (-100, "stop")):
        answer = client.post(CHAT, json={**body, "logit_bias": {str(ids[text]): bias for text in ("<", "<tool_call>")}})
        if stream:
            lines = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            choices = [line["choices"][0] for line in lines]
            deltas = [each["delta"] for each in choices if each["index"] == 1]
            assert choices[-1]["finish_reason"] == reason
            text = "".join(delta.get("content") or "" for delta in deltas)
            calls = [call["function"].get("arguments", "") for d in deltas for call in d.get("tool_calls", ())]
        else:
            choice = answer.json()["choices"][1]
            assert choice["finish_reason"] == reason, answer.text
            text = choice["message"]["content"] or ""
            calls = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", ())]
        if bias > 0:
            assert json.loads("".join(calls))["a"] in (1, 2) and not text
        else:
            assert not calls and FIELDS[form][1]({"message": {"content": text}}, ids)


def test_a_strict_tool_leaves_other_text_as_it_is(client: httpx.Client) -> None:
    strict = {"type": "function", "function": {**TOOLS["tools"][0]["function"], "strict": True}}
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 30}
    plain, held = (client.post(CHAT, json={**body, "tools": tools}).json() for tools in (TOOLS["tools"], [strict]))
    assert held["choices"][0]["message"]["content"] == plain["choices"][0]["message"]["content"]
    streamed = client.post(CHAT, json={**body, "tools": [strict], "stream": True})
    lines = [json.loads(line[6:])["choices"] for line in streamed.text.splitlines() if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for choices in lines for choice in choices)
    assert text == plain["choices"][0]["message"]["content"]


def test_calls_inside_structural_tags_are_calls(client: httpx.Client, ids: dict[str, int]) -> None:
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 60, **TOOLS, "response_format": CALL}
    choice = client.post(CHAT, json=body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and is_called(choice, ids)
    streamed = client.post(CHAT, json=body | {"stream": True})
    assert '"arguments":' in streamed.text and '"finish_reason":"tool_calls"' in streamed.text
    strict = [{"type": "function", "function": {**TOOLS["tools"][0]["function"], "strict": True}}]
    error = client.post(CHAT, json=body | {"tools": strict}).json()["error"]
    assert error["param"] == "response_format" and "conflicts with strict tools" in error["message"]


def test_every_endpoint_takes_structural_tags(client: httpx.Client) -> None:
    tagged = {"type": "structural_tag", "format": TAG}
    common = {"temperature": 0}
    for path, body, read in (
        ("/v1/completions", {"prompt": "hi", "response_format": tagged}, lambda answer: answer["choices"][0]["text"]),
        (
            CHAT,
            {"messages": HELLO, "response_format": tagged},
            lambda answer: answer["choices"][0]["message"]["content"],
        ),
        (
            "/v1/responses",
            {"input": "hi", "structured_outputs": {"structural_tag": json.dumps(tagged)}},
            lambda answer: answer["output"][0]["content"][0]["text"],
        ),
    ):
        answer = client.post(path, json={**body, **common})
        assert answer.status_code == 200, answer.text
        assert re.fullmatch("<v>[yz]</v>", read(answer.json()))
