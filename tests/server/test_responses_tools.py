"""Tools through OpenAI's newer interface: its own client and typed events, against a real server."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, TypeAdapter

from tests.server.running import RunningServer

MODEL = "demo"
ASK = "What is the weather in Paris?"
EVENTS: TypeAdapter[Any] = TypeAdapter(openai.types.responses.ResponseStreamEvent)


class Weather(BaseModel, extra="forbid"):
    city: Literal["Paris", "Rome"]
    hot: bool


WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": Weather.model_json_schema(),
    "strict": True,
}
TIME: dict[str, Any] = {"type": "function", "name": "get_time", "parameters": None, "strict": None}
SPACE = {
    "type": "namespace",
    "name": "atlas",
    "description": "Facts about cities.",
    "tools": [WEATHER, {"type": "custom", "name": "note"}],
}
CODE = {"type": "grammar", "syntax": "regex", "definition": r'[A-C]{2}\n"\d{3}"'}
PATCH = {"type": "grammar", "syntax": "lark", "definition": 'start: "{\\"" CODE "\\n}"\nCODE: /[A-C]{3}/'}


def custom(form: Any = None) -> dict[str, Any]:
    return {"type": "custom", "name": "write", "format": form or {"type": "text"}}


def connect(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return connect(server)


def respond(client: openai.OpenAI, **options: Any) -> Any:
    return client.responses.create(
        **({"model": MODEL, "input": ASK, "temperature": 0, "max_output_tokens": 80} | options)
    )


def forget_ids(item: Any) -> dict[str, Any]:
    found: dict[str, Any] = item.model_dump(exclude={"id", "call_id"}, exclude_none=True)
    return found


def ask_both(client: openai.OpenAI, **options: Any) -> tuple[Any, list[Any]]:
    """Returns the items of the whole answer, which those of the stream are, and the types of the stream's events."""
    whole = respond(client, **options)
    events = list(respond(client, stream=True, **options))
    for event in events:
        EVENTS.validate_python(event.model_dump(exclude_unset=True, by_alias=True), strict=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response
    assert list(map(forget_ids, final.output)) == list(map(forget_ids, whole.output))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump() for item in done] == [item.model_dump() for item in final.output]
    return whole.output, [event.type.removeprefix("response.") for event in events]


FUNCTION: dict[str, Any] = {"type": "function", "name": "get_weather"}
ALLOWED: dict[str, Any] = {"type": "allowed_tools", "mode": "required", "tools": [FUNCTION]}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "get_time"}),
        (FUNCTION, {"get_weather"}),
        ({"type": "function", "name": "get_time"}, {"get_time"}),
        (ALLOWED, {"get_weather"}),
    ],
    ids=["required", "weather", "time", "allowed"],
)
def test_forced_calls_are_valid_whole_and_in_pieces(client: openai.OpenAI, choice: Any, names: set[str]) -> None:
    tools = [WEATHER, TIME]
    (call,), kinds = ask_both(client, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    assert call.type == "function_call" and call.name in names and call.call_id and call.status == "completed"
    arguments = json.loads(call.arguments)
    if call.name == "get_weather":
        Weather.model_validate(arguments, strict=True)
    else:
        assert arguments == {}
    assert kinds[2] == "output_item.added" and set(kinds[3:-3]) == {"function_call_arguments.delta"}
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]


def test_the_clients_own_reader_of_calls(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Weather, name="get_weather")
    answer = client.responses.parse(
        model=MODEL,
        input=ASK,
        temperature=0,
        max_output_tokens=80,
        tools=[{"type": "function", **tool["function"]}],  # type: ignore[list-item]
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (call,) = answer.output
    assert call.type == "function_call" and call.parsed_arguments


@pytest.mark.parametrize("form", [None, CODE, PATCH], ids=["text", "regex", "lark"])
def test_the_input_of_a_custom_tool_has_its_form(client: openai.OpenAI, form: Any) -> None:
    choice = {"type": "custom", "name": "write"}
    (call,), kinds = ask_both(client, tools=[WEATHER, custom(form)], tool_choice=choice)
    assert (call.type, call.name) == ("custom_tool_call", "write")
    assert set(kinds[3:-3]) <= {"custom_tool_call_input.delta"} and kinds[-3] == "custom_tool_call_input.done"
    if form is CODE:
        assert re.fullmatch(CODE["definition"], call.input) and call.status == "completed"
    elif form is PATCH:
        assert re.fullmatch(r'\{"[A-C]{3}\n\}', call.input) and call.status == "completed"


def test_a_regex_holds_where_any_tool_must_be_called(client: openai.OpenAI) -> None:
    (call,), _ = ask_both(client, tools=[custom(CODE)], tool_choice="required", parallel_tool_calls=False)
    assert re.fullmatch(CODE["definition"], call.input)


def test_calls_come_back_with_their_namespace(client: openai.OpenAI) -> None:
    choice = {"type": "function", "name": "get_weather", "namespace": "atlas"}
    (call,), _ = ask_both(client, tools=[SPACE, TIME], tool_choice=choice)
    assert (call.name, call.namespace) == ("get_weather", "atlas")
    Weather.model_validate_json(call.arguments, strict=True)
    choice = {"type": "custom", "name": "note", "namespace": "atlas"}
    (call,), _ = ask_both(client, tools=[SPACE, TIME], tool_choice=choice)
    assert (call.type, call.name, call.namespace) == ("custom_tool_call", "note", "atlas")


def test_a_call_that_is_cut_is_shown_as_far_as_it_came(client: openai.OpenAI) -> None:
    (call,), kinds = ask_both(client, tools=[WEATHER], tool_choice=FUNCTION, max_output_tokens=19)
    assert call.status == "incomplete" and call.arguments.startswith("{") and not call.arguments.endswith("}")
    assert kinds[-1] == "incomplete"


def test_tools_that_may_not_be_called(client: openai.OpenAI) -> None:
    answer = respond(client, tools=[WEATHER], tool_choice="none")
    assert answer.output_text and answer.tool_choice == "none" and answer.tools[0].name == "get_weather"


def test_a_conversation_with_calls_and_their_results(narrow: RunningServer) -> None:
    client, tools = connect(narrow), [WEATHER, custom(CODE), SPACE | {"tools": [TIME]}]
    called = respond(client, tools=tools, tool_choice="required", parallel_tool_calls=False)
    written = respond(client, tools=tools, tool_choice={"type": "custom", "name": "write"})
    (first,), (second,) = called.output, written.output
    results = [
        {"type": f"{item.type.removesuffix('_call')}_call_output", "call_id": item.call_id, "output": "21 degrees"}
        for item in (first, second)
    ]
    told = [{"role": "user", "content": ASK}, first, second, *results]
    answer, _ = ask_both(client, input=told, tools=tools)  # auto, strict: this template shows calls
    assert answer[-1].status in ("completed", "incomplete")
    counted = client.responses.input_tokens.count(model=MODEL, input=told, tools=tools)  # type: ignore[arg-type]
    asked = client.responses.input_tokens.count(model=MODEL, input=ASK, tools=tools)  # type: ignore[arg-type]
    bare = client.responses.input_tokens.count(model=MODEL, input=ASK)
    assert counted.input_tokens > asked.input_tokens > bare.input_tokens


def test_what_agents_always_send_is_taken(narrow: RunningServer) -> None:
    body = {
        "model": MODEL,
        "instructions": "Be brief.",
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": ASK}]}],
        "tools": [{**WEATHER, "strict": False}, {"type": "web_search", "external_web_access": True}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "text": {"verbosity": "medium"},
        "prompt_cache_key": "k",
        "client_metadata": {"x-turn": "a" * 1000},
        "max_output_tokens": 3,
    }
    for stream in (False, True):
        answer = httpx.post(f"{narrow.url}/v1/responses", json={**body, "stream": stream}, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-omitted-tools"] == "web_search"
    lines = [line for line in narrow.lines if "tools of type web_search are left out" in line]
    assert len(lines) == 1, "one line for each type"
    plain = httpx.post(f"{narrow.url}/v1/responses", json={**body, "tools": [TIME]}, timeout=60)
    assert plain.status_code == 200 and "x-omitted-tools" not in plain.headers
