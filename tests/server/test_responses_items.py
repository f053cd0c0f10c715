"""Output items of the Responses API: the events of each, whatever the pieces in which the model's text comes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import responses as published
from pydantic import TypeAdapter

from jaxserve.errors import InvalidRequestError
from jaxserve.request import CompletionOutput, RequestOutput
from jaxserve.server.answers import AnswerReader
from jaxserve.server.conversation import Conversation, make_parser
from jaxserve.server.errors import ApiError
from jaxserve.server.generation import Account
from jaxserve.server.options import ServerConfig
from jaxserve.server.protocol.response_input import InputReader
from jaxserve.server.protocol.response_items import InputText
from jaxserve.server.protocol.responses import ResponseRequest
from jaxserve.server.routes.responses import ResponseReader, ResponseWriter
from tests.server.tools.helpers import cut

EVENTS: TypeAdapter[Any] = TypeAdapter(published.ResponseStreamEvent)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "f"},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "n", "description": "About n.", "tools": [{"type": "function", "name": "g"}]},
    {"type": "web_search"},
]
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "{" /[a-z]+/ "}"'}
PATCH = '*** {"a"}\n\\é\U0001f600'
INPUTS = ["", "a", '"', "\\", "\\n", "\n\t", "é", "\U0001f600", PATCH, '{"input": "x"}']


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def make(**more: Any) -> tuple[AnswerReader, ResponseWriter]:
    """Returns a reader of one answer of hermes and qwen3, and its writer."""
    body = ResponseRequest(input="hi", **({"tools": TOOLS} | more))
    state: Any = SimpleNamespace(
        engine=SimpleNamespace(max_model_len=512),
        images=None,
        config=ServerConfig.from_options(),
        tool_parser="hermes",
        reasoning_parser="qwen3",
    )
    reader = ResponseReader()
    conversation: Conversation = reader.read(body, state)
    request: Any = SimpleNamespace(request_id="r-0", prompt="", grammar=None, tier="default")
    parser = make_parser(conversation, request, state)
    return AnswerReader(1, lambda: parser), ResponseWriter(body, "m", reader, conversation, request)


def read(*texts: str, reason: str = "stop", **more: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the events of a stream of these texts and the whole answer of all of them, both of the client's types."""
    reader, writer = make(**more)
    pieces: list[bytes] = []
    for text in (*texts, None):
        made = CompletionOutput(0, text or "", [1], reason if text is None else None)
        output = RequestOutput("r-0", "hi", [7, 8], [made], finished=text is None)
        pieces += [piece for update in reader.read(0, output) for piece in writer.write(update, Account())]
    pieces += writer.end(Account(), {})
    events = [json.loads(piece.partition(b"data: ")[2]) for piece in pieces]
    for event in events:
        EVENTS.validate_python(event, strict=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    reader, writer = make(**more)
    made = CompletionOutput(0, "".join(texts), [1], reason)
    whole = writer.fold(list(reader.read(0, RequestOutput("r-0", "hi", [7, 8], [made], finished=True))), Account(), {})
    published.Response.model_validate(whole, strict=True)
    assert forget_ids(events[-1]["response"]["output"]) == forget_ids(whole["output"])
    return events, whole


def forget_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A call's id is drawn anew by each parser."""
    return [{key: value for key, value in item.items() if key != "call_id"} for item in items]


def list_kinds(events: list[dict[str, Any]]) -> list[str]:
    """Returns the types of the events, several deltas as one."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    return [kind for before, kind in zip(["", *kinds], kinds, strict=False) if kind != before]


def test_all_items_of_an_answer_and_their_events() -> None:
    text = f"<think>r</think>x{call('f', a=1)}{call('patch', input=PATCH)}{call('n__g')}"
    events, whole = read(*text)
    assert list_kinds(events) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    reasoning, message, f, patch, g = whole["output"]
    assert reasoning["content"][0]["text"] == "r" and message["content"][0]["text"] == "x"
    assert (f["type"], f["name"], json.loads(f["arguments"])) == ("function_call", "f", {"a": 1})
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", PATCH)
    assert (g["type"], g["name"], g["namespace"]) == ("function_call", "g", "n")
    assert len({item["call_id"] for item in (f, patch, g)}) == 3
    assert {item["status"] for item in whole["output"]} == {whole["status"]} == {"completed"}
    for kind, expected in (("function_call_arguments", f["arguments"] + "{}"), ("custom_tool_call_input", PATCH)):
        deltas = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
        assert "".join(deltas) == expected


def test_an_answer_says_which_tools_the_model_has() -> None:
    events, whole = read("x", parallel_tool_calls=False, reasoning={"summary": "auto"})
    assert [tool["type"] for tool in whole["tools"]] == ["function", "custom", "namespace"]
    assert whole["parallel_tool_calls"] is False and whole["tool_choice"] == "auto"
    assert events[0]["response"]["tools"] == whole["tools"]


@pytest.mark.parametrize("name", ["f", "patch"])
def test_a_call_that_is_cut_is_incomplete_and_has_what_there_is(name: str) -> None:
    begun = call(name, input="abcdef").partition("def")[0]
    events, whole = read(*f"<think>r</think>{begun}", reason="length")
    reasoning, item = whole["output"]
    assert (reasoning["status"], item["status"], whole["status"]) == ("completed", "incomplete", "incomplete")
    assert item.get("input", "abc") == "abc" and item.get("arguments", "abc").endswith("abc")
    assert events[-1]["type"] == "response.incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}


def test_an_answer_without_text_is_an_empty_message() -> None:
    _, whole = read("")
    (message,) = whole["output"]
    assert message["content"][0]["text"] == "" and message["status"] == "completed"


@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_the_input_of_a_lark_grammar_is_the_whole_answer(reason: str, status: str) -> None:
    tools = [{"type": "custom", "name": "patch", "format": LARK}]
    _, whole = read("{", "ab", "c", reason=reason, tools=tools, tool_choice={"type": "custom", "name": "patch"})
    (item,) = whole["output"]
    assert (item["type"], item["input"], item["status"]) == ("custom_tool_call", "{abc", status)


@pytest.mark.parametrize("include", [None, ["reasoning.encrypted_content"]])
def test_what_an_answer_has_can_be_sent_back(include: list[str] | None) -> None:
    text = f"<think>r</think>x{call('f', a=1)}{call('patch', input=PATCH)}{call('n__g')}"
    _, whole = read(text, include=include)
    items = [dict(item) for item in whole["output"]]
    assert ("encrypted_content" in items[0]) is (include is not None)
    if include is not None:
        items[0].pop("content")  # as clients do that know only OpenAI's own models
    kinds = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
    results = [
        {"type": kinds[item["type"]], "call_id": item["call_id"], "output": "1"}
        for item in items
        if item["type"] in kinds
    ]
    reader = InputReader()
    reader.read([*items, *results])
    turn, *told = reader.messages
    assert (turn["reasoning_content"], turn["content"], len(told)) == ("r", "x", 3)
    called = [(made["function"]["name"], made["function"]["arguments"]) for made in turn["tool_calls"]]
    assert called == [("f", '{"a": 1}'), ("patch", {"input": PATCH}), ("n__g", "{}")]


def test_a_server_may_refuse_hosted_tools() -> None:
    config = ServerConfig.from_options(refuse_hosted_tools=True)
    state: Any = SimpleNamespace(engine=SimpleNamespace(max_model_len=512), config=config, images=None)
    with pytest.raises(InvalidRequestError) as caught:
        ResponseReader().read(ResponseRequest(input="hi", tools=TOOLS), state)
    assert caught.value.field == "tools[3].type" and "web_search" in str(caught.value)


def test_a_stream_that_fails_ends_with_the_protocols_event() -> None:
    _, writer = make()
    piece = writer.render_error(ApiError(400, "no", param="messages[0].content", code="invalid_value"))
    event = json.loads(piece.partition(b"data: ")[2])
    EVENTS.validate_python(event, strict=True)
    assert (event["type"], event["param"], event["message"]) == ("error", "input", "no")


# --- the input of a custom call


def take(text: str, *places: int) -> str:
    reader = InputText()
    return "".join([*map(reader.push, cut(text, places)), reader.finish()])


@pytest.mark.parametrize("value", INPUTS)
@pytest.mark.parametrize("is_ascii", [False, True])
def test_inputs_are_read_whatever_the_pieces(value: str, is_ascii: bool) -> None:
    text = json.dumps({"input": value}, ensure_ascii=is_ascii)
    spaced = text.replace('{"input": ', '{ "input"\n:  ', 1)
    for each in (text, spaced):
        assert {take(each, place) for place in range(len(each))} == {value}
        reader = InputText()
        assert "".join([*map(reader.push, each), reader.finish()]) == value


@given(st.text(), st.booleans(), st.lists(st.integers(0, 10_000), max_size=4))
def test_any_text_is_read_from_any_pieces(value: str, is_ascii: bool, places: list[int]) -> None:
    assert take(json.dumps({"input": value}, ensure_ascii=is_ascii), *places) == value


@pytest.mark.parametrize(
    "text", ["{}", '{"patch": "a"}', '{"input": 5}', "[", '{"inp', '{"input', "a b", " " * 300 + "x"]
)
def test_arguments_of_another_form_are_the_input_themselves(text: str) -> None:
    assert {take(text, place) for place in range(len(text) + 1)} == {text}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"input": "a', "a"),
        ('{"input": "a\\', "a\\"),
        ('{"input": "a\\u00', "a\\u00"),
        ('{"input": "a\\q"}', "a\\q"),
        ('{"input": "\\n\\q"}', "\n\\q"),
        ('{"input": "\\uzz"}', "\\uzz"),
        ('{"input": "\\ud83d"}', "\\ud83d"),
        ('{"input": "\\ud83d\\n"}', "\\ud83d\n"),
        ('{"input": "\\ud83d\\ud83d\\ude00"}', "\\ud83d\U0001f600"),
        ('{"input": "\\udc00"}', "\ufffd"),
        ('{"input": "a", "b": 1}', "a"),
    ],
)
def test_broken_inputs_lose_nothing(text: str, expected: str) -> None:
    assert take(text) == expected == "".join([*map((reader := InputText()).push, text), reader.finish()])


def test_broken_escapes_are_read_once() -> None:
    text = '{"input": "' + "\\uzzzz" * 100_000 + '"}'
    assert take(text) == "\\uzzzz" * 100_000
