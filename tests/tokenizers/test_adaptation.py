"""A template shows every message of a conversation, or the conversation is refused."""

# ruff: noqa: RUF001 - DeepSeek's marks have wide characters

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from jaxserve.errors import InvalidRequestError, TokenizerError
from jaxserve.tokenizers.adaptation import Answer, TemplateForm, describe_form, shorten_id
from jaxserve.tokenizers.chat import encode_chat, make_form
from tests.tokenizers.families import FAMILIES
from tests.tokenizers.test_chat import WEATHER, TextTokenizer, call, calling

USER = {"role": "user", "content": "u0x"}
ANSWER = {"role": "assistant", "content": "a0x"}
ASK = {"role": "user", "content": "v0x"}
TURNS: dict[str, list[dict[str, Any]]] = {
    "system": [{"role": "system", "content": "s0x"}],
    "developer": [{"role": "developer", "content": "d0x"}],
    "calls": [
        *calling(call({"k": "c0x"}, id="call_0123456789")),
        {"role": "tool", "tool_call_id": "call_0123456789", "content": "r0x", "name": "f"},
        {"role": "assistant", "content": "b0x"},
        {"role": "user", "content": "w0x"},
    ],
}
LATER = {"role": "system", "content": "l0x"}
MARKS = ("s0x", "d0x", "u0x", "a0x", "l0x", "v0x", "c0x", "r0x", "b0x", "w0x")
REFUSES = {"Llama 2": "calls", "Gemma 3": "calls", "ChatML": "calls"}  # of these parts, families show none


def render_chat(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    tokenizer: Any = TextTokenizer("<s>")
    tokenizer.named_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return encode_chat(tokenizer, messages, chat_template=template, **options)[0]


def list_conversations() -> list[list[dict[str, Any]]]:
    parts = [
        (TURNS["system"], []),
        (TURNS["developer"], []),
        ([USER, ANSWER],),
        ([LATER], []),
        ([ASK],),
        (TURNS["calls"], []),
    ]
    return [list(itertools.chain(*chosen)) for chosen in itertools.product(*parts)]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_mark_is_in_the_prompt_or_the_request_is_refused(name: str) -> None:
    num_shown = num_refused = 0
    for messages in list_conversations():
        marks = [mark for mark in MARKS if mark in json.dumps(messages)]
        try:
            text = render_chat(FAMILIES[name], messages, tools=[WEATHER])
        except (InvalidRequestError, TokenizerError):
            num_refused += 1
            assert name in REFUSES and "c0x" in marks, messages
            continue
        num_shown += 1
        assert all(mark in text for mark in marks), (messages, text)
        places = [text.index(mark) for mark in marks if mark not in ("s0x", "d0x")]
        assert places == sorted(places), text
    assert num_shown and bool(num_refused) is (name in REFUSES)


def test_developers_are_the_system_where_only_that_is_shown() -> None:
    messages = [*TURNS["developer"], {"role": "developer", "content": "more"}, USER]
    text = render_chat(FAMILIES["Qwen 3"], messages)
    assert text.startswith("<|im_start|>system\nd0x\n\nmore<|im_end|>\n<|im_start|>user\nu0x")
    shown = render_chat("{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}", messages)
    assert shown == "developer=d0x;developer=more;user=u0x;"


def test_later_instructions_change_no_earlier_turn() -> None:
    for name in ("DeepSeek V3", "DeepSeek V3.1"):
        before = render_chat(FAMILIES[name], [*TURNS["system"], USER, ANSWER], add_generation_prompt=False)
        text = render_chat(FAMILIES[name], [*TURNS["system"], USER, ANSWER, LATER, ASK])
        assert text.startswith(before) and "<｜User｜>l0x\n\nv0x" in text
        assert "<｜User｜>l0x" in render_chat(FAMILIES[name], [USER, ANSWER, LATER])


def test_arguments_are_text_where_the_template_joins_text() -> None:
    arguments = {"a": 'é "x"', "b": [1, None]}
    for name in ("DeepSeek V3", "DeepSeek V3.1"):
        for given in (arguments, json.dumps(arguments)):
            text = render_chat(FAMILIES[name], [USER, *calling(call(given))])
            assert json.dumps(arguments, ensure_ascii=False) in text
        assert '{"a": "cut' in render_chat(FAMILIES[name], [USER, *calling(call('{"a": "cut'))])
    joined = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}NAME"
    joined += "{{ '=' ~ c.function.arguments }}{% endfor %}{% endfor %}"
    text = render_chat(joined.replace("NAME", "{{ c.function.name }}"), [USER, *calling(call(arguments))])
    assert json.loads(text.partition("=")[2]) == arguments
    with pytest.raises(InvalidRequestError, match="does not show calls"):
        render_chat(joined, [USER, *calling(call(arguments))])


def test_text_beside_calls_is_a_turn_of_its_own_where_it_would_vanish() -> None:
    turn = {"role": "assistant", "content": "Let me see.", "tool_calls": [call({"k": "c0x"})]}
    text = render_chat(FAMILIES["DeepSeek V3"], [USER, turn])
    assert "<｜Assistant｜>Let me see.<｜end▁of▁sentence｜><｜Assistant｜><｜tool▁calls▁begin｜>" in text
    assert "c0x" in text


def test_ids_have_nine_characters_where_the_template_asks_for_them() -> None:
    source = FAMILIES["Mistral"].replace("'[RESULT] {", "'[RESULT] ' + message.tool_call_id + ' {")
    text = render_chat(source, [USER, *TURNS["calls"]], tools=[WEATHER])
    short = shorten_id("call_0123456789")
    assert len(short) == 9 and short.isalnum() and text.count(short) == 2
    kept = [USER, *calling(call({"k": 1}, id="aB3456789")), {**TURNS["calls"][1], "tool_call_id": "aB3456789"}]
    assert render_chat(source, kept, tools=[WEATHER]).count("aB3456789") == 2
    assert len({shorten_id(f"call_{number}") for number in range(500)}) == 500


def test_ids_have_the_name_where_the_template_shows_no_other() -> None:
    again = [*calling(call({"k": 2}, id="call_b")), {**TURNS["calls"][1], "tool_call_id": "call_b", "content": "r1x"}]
    text = render_chat(FAMILIES["Kimi K2"], [USER, *TURNS["calls"], *again], tools=[WEATHER])
    name = TURNS["calls"][0]["tool_calls"][0]["function"]["name"]
    for number, result in enumerate(("r0x", "r1x")):
        assert f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>" in text
        assert f"## Return of functions.{name}:{number}\n{result}" in text
    assert "call_" not in text.replace("tool_call_", "").replace("tool_calls_", "")


def test_what_is_left_out_is_refused() -> None:
    only_turns = "{% for m in messages if m.role in ['user', 'assistant'] %}{{ m.content }};{% endfor %}"
    only_users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    for source in ("{{ messages[-1].content }}", only_users):
        assert render_chat(source, [USER]) == "u0x"
        with pytest.raises(InvalidRequestError, match="does not show earlier turns"):
            render_chat(source, [USER, ANSWER, ASK])
        assert "turns before the last message are refused" in describe_form(make_form(source, {}))
    for messages, field in (
        ([*TURNS["system"], USER], "messages[0].role"),
        ([USER, *TURNS["calls"]], "messages[1]"),
    ):
        with pytest.raises(InvalidRequestError, match="chat template") as caught:
            render_chat(only_turns, messages)
        assert caught.value.field == field
    assert render_chat(only_turns, [USER, ANSWER, LATER, ASK]) == "u0x;a0x;l0x\n\nv0x;"


def test_a_refusal_of_the_template_keeps_its_words() -> None:
    source = "{{ raise_exception('no system') if messages[0].role == 'system' }}{{ messages[0].content }}"
    with pytest.raises(InvalidRequestError, match="refused by the chat template: 'no system'"):
        render_chat(source, [*TURNS["system"], USER])


def test_what_the_log_says() -> None:
    def describe(name: str) -> list[str]:
        return describe_form(make_form(FAMILIES[name], {"bos_token": "", "eos_token": ""}))

    assert describe("gpt-oss") == ["text beside calls is a message of its own"]
    assert describe("Qwen 3") == ["messages of role developer are shown as system"]
    assert describe("DeepSeek V3") == [
        "messages of role developer are shown as system",
        "messages of role system at the beginning are joined",
        "a later message of role system joins the next one of the user",
        "arguments of calls are given as text",
        "text beside calls is a message of its own",
    ]
    assert "ids of calls are mapped to nine letters and digits" in describe("Mistral")
    assert "ids of calls are mapped to functions.name:0, for the name is not shown" in describe("Kimi K2")
    assert describe("ChatML") == ["calls and messages of role tool are refused"]


def test_a_question_is_asked_once() -> None:
    num_asked = 0

    def render(_messages: Any) -> str:
        nonlocal num_asked
        num_asked += 1
        return ""

    form = TemplateForm("test_a_question_is_asked_once", render)
    assert [form.ask_leading(["system"]) for _ in range(3)] == [Answer.LEFT_OUT] * 3 and num_asked == 1
