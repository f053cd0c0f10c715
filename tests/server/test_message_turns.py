"""Bodies of Messages become messages for templates, or are refused in the body's own words."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.server.protocol.messages import CountTokensRequest
from jaxserve.server.protocol.turns import TurnReader
from jaxserve.server.template_use import _has_turns

ASK = {"role": "user", "content": "Hi."}
CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "1"}
CALLED = {"role": "assistant", "content": [CALL]}


def read(*turns: Any, shows_system: bool = True, **fields: Any) -> TurnReader:
    reader = TurnReader(lambda: shows_system)
    reader.read(CountTokensRequest.model_validate({"messages": list(turns), **fields}))
    return reader


def list_pairs(reader: TurnReader) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in reader.messages]


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def test_a_conversation_with_calls_keeps_everything() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "whatever"}
    said = {
        "role": "assistant",
        "content": [thought, text("I see.", citations=None), {**CALL, "caller": {"type": "direct"}}],
    }
    found = read(
        ASK,
        said,
        {"role": "user", "content": [RESULT, text("Go on.", cache_control={"type": "ephemeral"}), text("Now.")]},
        system=[text("x-anthropic-billing-header: cch=1;"), text("Be brief."), text("Be kind.")],
    )
    function = {"name": "f", "arguments": {"a": 1}}
    assert found.messages == [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "Hi."},
        {
            "role": "assistant",
            "content": "I see.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "1"},
        {"role": "user", "content": "Go on.\nNow."},
    ]
    assert found.sources == [
        "system",
        "messages[0].content",
        "messages[1].content",
        "messages[2].content[0]",
        "messages[2].content",
    ]


def test_results_that_failed_say_so() -> None:
    for content, shown in ((None, "Error: "), ([text("a"), text("b")], "Error: a\nb")):
        failed = {"role": "user", "content": [{**RESULT, "content": content, "is_error": True}]}
        assert read(ASK, CALLED, failed).messages[-1]["content"] == shown


def test_a_system_message_in_the_middle_stays_or_joins_its_neighbour() -> None:
    """The turns before it are the same either way, and the same as without it."""
    turns = [ASK, {"role": "assistant", "content": "Yes."}]
    told = {"role": "system", "content": "Be brief."}
    more = {"role": "user", "content": "More."}
    before = [("user", "Hi."), ("assistant", "Yes.")]
    assert list_pairs(read(*turns, told, more)) == [*before, ("system", "Be brief."), ("user", "More.")]
    assert list_pairs(read(*turns, told, more, shows_system=False)) == [*before, ("user", "Be brief.\nMore.")]
    assert list_pairs(read(*turns, more, told, shows_system=False)) == [*before, ("user", "More.\nBe brief.")]
    results = {"role": "user", "content": [RESULT]}
    assert list_pairs(read(ASK, CALLED, results, told, shows_system=False))[-2:] == [
        ("tool", "1"),
        ("user", "Be brief."),
    ]
    leading = list_pairs(read(told, told, ASK, system="One.", shows_system=False))
    assert leading == [("system", "One.\nBe brief.\nBe brief."), ("user", "Hi.")]


@pytest.mark.parametrize(
    ("rendered", "shows"),
    [
        ("U Mark one.\nA Mark two.\nS Mark three.\nU Mark four.", True),
        ("U Mark one.\nA Mark two.\nMark three.\n\nMark four.", False),  # joined to its neighbour
        ("S Mark three.\nU Mark one.\nA Mark two.\nU Mark four.", False),  # moved in front
        ("U Mark one.\nA Mark two.\nU Mark four.", False),  # left out
        ("", False),  # refused
    ],
)
def test_a_template_shows_a_turn_only_where_it_is(rendered: str, shows: bool) -> None:
    assert _has_turns(rendered) is shows


REFUSED: list[tuple[list[Any], str]] = [
    ([], "messages"),
    ([{"role": "system", "content": "Be brief."}], "messages"),
    ([{"role": "tool", "content": "x"}], "messages[0].role"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": 1}], "messages[0].content"),
    ([{"role": "user", "content": []}], "messages[0].content"),
    ([{**ASK, "name": "x"}], "messages[0]"),
    ([{"role": "user", "content": [{"type": "image"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": ["text"]}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [CALL]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [text("x", citations=[{}])]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [RESULT]}], "messages[0].content[0].tool_use_id"),
    (
        [ASK, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}],
        "messages[1].content[0].type",
    ),
    ([ASK, {"role": "assistant", "content": [{"type": "thinking"}]}], "messages[1].content[0].thinking"),
    ([ASK, CALLED], "messages[1].content[0].id"),
    ([ASK, CALLED, ASK], "messages[1].content[0].id"),
    ([ASK, CALLED, {"role": "system", "content": "x"}], "messages[1].content[0].id"),
    ([ASK, {"role": "assistant", "content": [CALL, CALL]}], "messages[1].content[1].id"),
    ([ASK, {"role": "assistant", "content": [{**CALL, "id": ""}]}], "messages[1].content[0].id"),
    ([ASK, {"role": "assistant", "content": [{**CALL, "name": ""}]}], "messages[1].content[0].name"),
    ([ASK, {"role": "assistant", "content": [{**CALL, "input": "{}"}]}], "messages[1].content[0].input"),
    ([ASK, {"role": "assistant", "content": [{**CALL, "input": {"a": "\ud800"}}]}], "messages[1].content[0].input"),
    ([ASK, CALLED, {"role": "user", "content": [RESULT, RESULT]}], "messages[2].content[1].tool_use_id"),
    ([ASK, CALLED, {"role": "user", "content": [text("x"), RESULT]}], "messages[2].content[1].type"),
    ([ASK, CALLED, {"role": "user", "content": [{**RESULT, "is_error": 1}]}], "messages[2].content[0].is_error"),
    (
        [ASK, CALLED, {"role": "user", "content": [{**RESULT, "content": [{"type": "image"}]}]}],
        "messages[2].content[0].content[0].type",
    ),
]


@pytest.mark.parametrize(("turns", "field"), REFUSED)
def test_what_cannot_be_shown_is_refused(turns: list[Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(*turns)
    assert refused.value.field == field
