"""Items of the Responses API as messages: what the model wrote in one turn is one message, and nothing vanishes."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.media.parts import IMAGE, take_images
from jaxserve.server.protocol.response_input import REASONING_MARK, InputReader
from jaxserve.server.protocol.response_tools import ResponseTools, read_response_tools
from jaxserve.tokenizers.messages import check_messages

USER = {"role": "user", "content": "hi"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def say(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def think(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def call(call_id: str, name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": '{"a": 1}', **more}


def tell(call_id: str, output: Any = "1", kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "call_id": call_id, "output": output}


def read(*items: dict[str, Any], instructions: str | None = None) -> list[dict[str, Any]]:
    """Returns the messages in short: role, reasoning, content, names of calls or the id of a result."""
    reader = InputReader(instructions)
    reader.read(list(items))
    check_messages(reader.messages)
    return [
        {
            "role": message["role"],
            "content": message["content"],
            **({"thinks": message["reasoning_content"]} if "reasoning_content" in message else {}),
            **({"calls": [made["id"] for made in message["tool_calls"]]} if "tool_calls" in message else {}),
            **({"of": message["tool_call_id"]} if "tool_call_id" in message else {}),
        }
        for message in reader.messages
    ]


def assistant(content: str = "", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def result(call_id: str, content: str = "1") -> dict[str, Any]:
    return {"role": "tool", "content": content, "of": call_id}


def test_a_turn_of_the_model_is_one_message() -> None:
    turn = think("r"), say("x"), call("a"), call("b")
    assert read(USER, *turn, tell("b"), tell("a"), say("y")) == [
        USER,
        assistant("x", thinks="r", calls=["a", "b"]),
        result("b"),
        result("a"),
        assistant("y"),
    ]
    later = read(USER, call("a"), say("x"), tell("a"), think("r"), call("b"), tell("b"))
    assert later[1:] == [assistant("x", calls=["a"]), result("a"), assistant(thinks="r", calls=["b"]), result("b")]


def test_two_messages_stay_two_each_with_its_reasoning() -> None:
    found = read(USER, think("r"), say("x"), think("s"), say("y"))
    assert found[1:] == [assistant("x", thinks="r"), assistant("y", thinks="s")]
    assert read(USER, think("r"), think("s"), call("a"), tell("a"))[1] == assistant(thinks="r\ns", calls=["a"])


def test_reasoning_that_nothing_follows_is_kept() -> None:
    assert read(USER, think("r"), USER)[1] == assistant(thinks="r")
    assert read(USER, think("r"))[1] == assistant(thinks="r")
    assert read(USER, call("a"), think("r"), tell("a"))[1] == assistant(thinks="r", calls=["a"])
    assert read(USER, {"type": "reasoning", "summary": [], "id": "rs_1"}) == [USER]


@pytest.mark.parametrize(
    "item",
    [
        {"content": [{"type": "reasoning_text", "text": "r"}], "encrypted_content": "of another server"},
        {"summary": [], "encrypted_content": f"{REASONING_MARK}r"},
        {"summary": [{"type": "summary_text", "text": "r"}], "content": None},
    ],
    ids=["content", "encrypted", "summary"],
)
def test_reasoning_comes_back_in_any_of_its_fields(item: dict[str, Any]) -> None:
    assert read(USER, {"type": "reasoning", **item}, say("x"))[1] == assistant("x", thinks="r")


def test_names_and_arguments_are_those_that_the_model_is_shown() -> None:
    reader = InputReader()
    custom = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** {", "id": "ctc_1"}
    cut = {**call("d"), "arguments": '{"a": 1', "parsed_arguments": {"a": 1}}  # as OpenAI's client for Node sends it
    results = [tell("c", kind="custom_tool_call_output"), tell("b"), tell("d")]
    reader.read([USER, call("b", "f", namespace="n"), custom, cut, *results])  # type: ignore[list-item]
    calls = reader.messages[1]["tool_calls"]
    assert [made["function"]["name"] for made in calls] == ["n__f", "patch", "f"]
    arguments = [made["function"]["arguments"] for made in check_messages(reader.messages)[1]["tool_calls"]]
    assert arguments == [{"a": 1}, {"input": "*** {"}, '{"a": 1'], "a call that was cut stays the text that it is"


def test_instructions_and_texts_in_parts() -> None:
    parts = [{"type": "input_text", "text": "1"}, {"type": "input_text", "text": "2"}]
    found = read(USER, call("a"), tell("a", parts), {"role": "developer", "content": parts}, instructions="Be brief.")
    assert found[0] == {"role": "system", "content": "Be brief."}
    assert found[3:] == [result("a", "1\n2"), {"role": "developer", "content": "1\n2"}]


def test_fields_of_messages_have_the_bodys_names() -> None:
    reader = InputReader("Be brief.")
    reader.read([USER, think("r"), call("a"), tell("a"), USER])
    assert reader.names == {
        "messages[0].content": "instructions",
        "messages[1]": "input[0]",
        "messages[2]": "input[2]",
        "messages[3].content": "input[3].output",
        "messages[3]": "input[3]",
        "messages[4]": "input[4]",
    }


# --- tools


def test_images_stay_parts_of_their_messages() -> None:
    image = {"type": "input_image", "image_url": "data:;base64,QUJD", "detail": "low"}
    text, shown = {"type": "input_text", "text": "a"}, {"type": "text", "text": "a"}
    reader = InputReader(None)
    user = {"role": "user", "content": [text, image, text]}
    reader.read([user, call("b"), tell("b", [image]), {"role": "user", "content": [text, text]}])
    assert reader.messages[0]["content"] == [shown, image, shown]
    assert reader.messages[2]["content"] == [image] and reader.messages[3]["content"] == "a\na"
    assert reader.names["messages[2].content"] == "input[2].output"
    messages, images = take_images(reader.messages, 2)
    assert [image.detail for image in images] == ["low", "low"]
    assert [part["content"] for part in check_messages(messages, reads_images=True)][2] == [IMAGE]


def read_tools(*tools: dict[str, Any], choice: Any = "auto", names: dict[str, str] | None = None) -> ResponseTools:
    return read_response_tools(tools, choice, None, {} if names is None else names)


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": PARAMETERS, **more}


SPACE = {
    "type": "namespace",
    "name": "n",
    "description": "About n.",
    "tools": [function("f", description="Does f."), {"type": "custom", "name": "g"}],
}


def test_tools_are_functions_for_the_model() -> None:
    found = read_tools(function("f", strict=False, defer_loading=False), SPACE, {"type": "custom", "name": "t"})
    assert found.tool_set is not None
    tools = {tool.name: tool for tool in found.tool_set.tools}
    assert list(tools) == ["f", "n__f", "n__g", "t"] and tools["f"].parameters == PARAMETERS
    assert tools["n__f"].description == "[n] About n.\n\nDoes f." and tools["n__g"].description is None
    assert tools["t"].parameters is not None and list(tools["t"].parameters["properties"]) == ["input"]
    kinds = {name: (tool.kind, tool.name, tool.namespace) for name, tool in found.by_name.items()}
    assert kinds["n__g"] == ("custom", "g", "n") and kinds["f"] == ("function", "f", None)
    unknown = found.find("x")
    assert (unknown.kind, unknown.name) == ("function", "x")


@pytest.mark.parametrize(
    ("choice", "expected", "shown"),
    [
        (None, ("auto", None), ["f", "n__f", "n__g"]),
        ("required", ("required", None), ["f", "n__f", "n__g"]),
        ({"type": "function", "name": "f"}, ("named", "f"), ["f", "n__f", "n__g"]),
        ({"type": "function", "name": "f", "namespace": "n"}, ("named", "n__f"), ["f", "n__f", "n__g"]),
        ({"type": "custom", "name": "g", "namespace": "n"}, ("named", "n__g"), ["f", "n__f", "n__g"]),
        (("auto", {"type": "function", "name": "f"}), ("auto", None), ["f"]),
        (("required", {"type": "namespace", "name": "n"}), ("required", None), ["n__f", "n__g"]),
        (("auto", {"type": "web_search"}, {"type": "function", "name": "f"}), ("auto", None), ["f"]),
    ],
)
def test_every_form_of_choice(choice: Any, expected: tuple[str, str | None], shown: list[str]) -> None:
    if isinstance(choice, tuple):
        choice = {"type": "allowed_tools", "mode": choice[0], "tools": list(choice[1:])}
    found = read_tools(function("f"), SPACE, choice=choice).tool_set
    assert found is not None
    assert (found.choice, found.named) == expected and [tool.name for tool in found.tools] == shown


def test_a_namespace_is_described_where_its_first_tool_is_not_allowed() -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "g", "namespace": "n"}]}
    found = read_tools(SPACE, choice=choice).tool_set
    assert found is not None and [tool.description for tool in found.tools] == ["[n] About n."]


@pytest.mark.parametrize("choice", ["auto", "none", None, {"type": "function", "name": "f"}])
def test_hosted_tools_are_left_out(choice: Any) -> None:
    hosted = {"type": "web_search"}, {"type": "image_generation"}, {"type": "web_search"}
    found = read_tools(hosted[0], function("f"), *hosted[1:], choice=choice)
    assert found.omitted == ("web_search", "image_generation")
    assert found.tool_set is not None and len(found.tool_set.tools) == 1
    with pytest.raises(InvalidRequestError) as caught:
        read_response_tools([function("f"), hosted[0]], choice, None, {}, refuses_hosted=True)
    assert caught.value.field == "tools[1].type"


def test_fields_of_tools_have_the_bodys_names() -> None:
    names: dict[str, str] = {}
    grammar = {"type": "grammar", "syntax": "regex", "definition": "a+"}
    custom = {"type": "custom", "name": "t", "format": grammar}
    read_tools({"type": "mcp"}, SPACE, custom, choice={"type": "custom", "name": "t"}, names=names)
    assert names["tools[0]"] == names["tools[0].function"] == "tools[1].tools[0]"
    assert names["tools[2].function.strict"] == "tools[2].format"
    assert names["structured_outputs.json"] == "tools[2].format.definition"
