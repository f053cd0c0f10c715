"""Templates in processes that can be killed: the same texts, and the next conversation is rendered whatever happens."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError, TokenizerError
from jaxserve.tokenizers.chat import encode_chat
from jaxserve.tokenizers.renderer import RenderTimeoutError, TemplateRenderer
from jaxserve.tokenizers.template import MAX_RENDERED_CHARS, render_template
from jaxserve.workers import WorkerPoolClosedError
from tests.tokenizers import test_chat
from tests.tokenizers.builders import CHAT_TEMPLATE
from tests.tokenizers.conversations import CONVERSATIONS, good_messages, odd_messages, tool_lists
from tests.tokenizers.families import FAMILIES
from tests.tokenizers.test_chat import HI, WEATHER, TextTokenizer

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
LIMIT_S = 1.0
LOOPS = "{% for a in range(9999) %}" * 4 + "{% endfor %}" * 4
DEEP = "{% set ns = namespace(x=[]) %}{% for i in range(5000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson }}"
HOSTILE = {
    "nested loops": (LOOPS, RenderTimeoutError, "takes more than 1 s"),
    "a wide format": ("{{ '%2000000000d' % 1 }}", TokenizerError, "MemoryError|more than 256 MiB"),
    "a wide format that fits": ("{{ '%20000000d' % 1 }}", InvalidRequestError, "longer than"),
    "a wide center": ("{{ 'a' | center(2000000000) }}", TokenizerError, "MemoryError|more than 256 MiB"),
    "digits": ("{{ 10 ** 5000 }}", TokenizerError, "exponent"),
    "a loop over a long text": (
        "{% for c in 'a' * 16000000 %}{% for d in 'a' * 16000000 %}{% endfor %}{% endfor %}",
        RenderTimeoutError, "takes more"),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", TokenizerError, "Recursion"),
    "a loop that calls itself": (
        "{% for x in [[1]] recursive %}{{ loop([x]) }}{% endfor %}", TokenizerError, "Recursion|crashes"),
    "a deep tojson": (DEEP, TokenizerError, "Recursion|crashes"),
    "nested brackets": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", TokenizerError, "chat_template"),
    "a list that grows": (
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        TokenizerError, "MemoryError|more than 256 MiB"),
    "an error": ("{{ 1 + 'a' }}", TokenizerError, "TypeError"),
    "a refusal": ("{{ raise_exception('no') }}", InvalidRequestError, "messages: refused by the chat template: 'no'"),
    "no Jinja": ("{% if %}", TokenizerError, "not valid Jinja"),
}  # fmt: skip


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    """Has time for all that ends: other work may share the machine. Endless templates get a limit of their own."""
    made = TemplateRenderer(time_limit_s=600.0, max_processes=1)
    made.start(CHAT_TEMPLATE)
    yield made
    made.close()


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_cost_their_own_conversation(renderer: TemplateRenderer, name: str) -> None:
    template, kind, message = HOSTILE[name]
    renderer.render("x", HI, {})
    before = renderer.process_ids
    is_endless = kind is RenderTimeoutError
    with pytest.raises(kind, match=message) as caught:
        renderer.render(template, HI, {}, limit_s=LIMIT_S if is_endless else None)
    assert type(caught.value) is kind
    assert renderer.render("{{ messages[0].content }}", HI, {}) == "hi"
    assert not is_endless or renderer.process_ids != before, "its process was killed"


@pytest.mark.parametrize(
    "text",
    ["é中\U0001f600", "\ud83d\ude00", "\udc80", "\x00\x01\u2028\r\n", "\\\"'", "\ufeff"],
    ids=ascii,
)  # fmt: skip
def test_any_text_comes_back_as_it_was(renderer: TemplateRenderer, text: str) -> None:
    for template in ("{{ messages[0].content }}|{{ x }}", f"{text}{{{{ messages[0].content }}}}{{{{ x }}}}"):
        messages = [{"role": "user", "content": text}]
        assert renderer.render(template, messages, {"x": text}) == render_template(template, messages, {"x": text})


def test_values_are_the_same_in_both_processes(renderer: TemplateRenderer) -> None:
    values = {"n": None, "t": True, "i": -(10**30), "f": 0.1, "e": 1e300, "l": [1, [2.0, "x"]], "d": {"b": 1, "a": {}}}
    for template in ("{{ v }}", "{{ v | tojson }}", "{{ v.i + 1 }} {{ v.n is none }} {{ v.f * 3 }} {{ tools }}"):
        for tools in (None, [], [{"type": "function", "function": {"name": "f", "parameters": {}}}]):
            arguments: Any = (template, HI, {"v": values})
            assert renderer.render(*arguments, tools=tools) == render_template(*arguments, tools=tools)


def test_the_tests_of_templates_hold_in_a_process_of_its_own(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render_chat(template: str, messages: Any, *, bos_token: str = "<s>", **options: Any) -> str:
        tokenizer: Any = TextTokenizer(bos_token)
        return encode_chat(tokenizer, messages, chat_template=template, render=renderer.render, **options)[0]

    monkeypatch.setattr(test_chat, "render_chat", render_chat)
    for test in (
        test_chat.test_what_templates_use,
        test_chat.test_the_sandbox_refuses,
        test_chat.test_broken_templates,
    ):
        (mark,) = (mark for mark in test.pytestmark if mark.name == "parametrize")
        for values in mark.args[1]:
            test(*values) if isinstance(values, tuple) else test(values)
    test_chat.test_a_conversation_as_text()
    test_chat.test_the_template_refuses_a_conversation()


def outcome(render: Callable[..., str], *args: Any, **options: Any) -> tuple[str, ...]:
    try:
        return ("text", render(*args, **options))
    except (InvalidRequestError, TokenizerError) as error:
        return (type(error).__name__, str(error), str(error.field))


@pytest.mark.parametrize("name", FAMILIES)
def test_templates_of_families_say_the_same_in_a_process_of_its_own(renderer: TemplateRenderer, name: str) -> None:
    for messages, offered in itertools.product(CONVERSATIONS, (None, [WEATHER])):
        expected = outcome(render_template, FAMILIES[name], messages, VARIABLES, tools=offered)
        assert outcome(renderer.render, FAMILIES[name], messages, VARIABLES, tools=offered) == expected

    @settings(max_examples=20, deadline=None, database=None)
    @given(messages=st.lists(odd_messages | good_messages, min_size=1, max_size=3), tools=tool_lists)
    def compare(messages: Any, tools: Any) -> None:
        expected = outcome(render_template, FAMILIES[name], messages, VARIABLES, tools=tools)
        assert outcome(renderer.render, FAMILIES[name], messages, VARIABLES, tools=tools) == expected

    compare()


def test_the_longest_texts_fit(renderer: TemplateRenderer) -> None:
    text = "中" * (MAX_RENDERED_CHARS - 16)
    assert renderer.render("{{ messages[0].content }}", [{"role": "user", "content": text}], {}) == text
    with pytest.raises(InvalidRequestError, match=f"{MAX_RENDERED_CHARS}"):
        renderer.render("{{ messages[0].content }}!" + "x" * 20, [{"role": "user", "content": text}], {})


def test_what_json_cannot_hold_is_refused(renderer: TemplateRenderer) -> None:
    deep: Any = []
    for _ in range(200_000):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match=r"^messages: "):
        renderer.render("x", [{"role": "user", "content": deep}], {})
    assert renderer.render("x", HI, {}) == "x"
    while deep:  # else the interpreter's own stack ends when it is freed
        deep = deep[0]


def test_a_killed_process_is_replaced(renderer: TemplateRenderer) -> None:
    (first,) = renderer.process_ids
    os.kill(first, signal.SIGKILL)
    with pytest.raises((TokenizerError, AssertionError)):
        renderer.render("x", HI, {})
        raise AssertionError("it was seen to have ended before the template was sent")
    assert renderer.render("x", HI, {}) == "x"
    assert renderer.process_ids != [first]


def test_a_hung_template_keeps_nobody_waiting_but_its_own() -> None:
    renderer = TemplateRenderer(time_limit_s=60.0)
    refusals: list[Exception] = []

    def hang() -> None:
        try:
            renderer.render(LOOPS, HI, {})
        except WorkerPoolClosedError as error:
            refusals.append(error)

    hung = threading.Thread(target=hang)
    hung.start()
    while not renderer.process_ids:
        time.sleep(0.01)
    assert renderer.render("x", HI, {}) == "x", "by a second process"
    with pytest.raises(RenderTimeoutError):
        renderer.render(LOOPS, HI, {}, limit_s=0.05, may_start=False)
    with pytest.raises(RenderTimeoutError):  # the one was killed, and no other may start
        renderer.render("x", HI, {}, may_start=False)
    processes = renderer.process_ids
    renderer.close()
    hung.join(10)
    assert refusals and processes
    assert not any(map(is_alive, processes))
    with pytest.raises(WorkerPoolClosedError):
        renderer.render("x", HI, {})


def test_a_process_has_its_limits(renderer: TemplateRenderer) -> None:
    renderer.render("x", HI, {})
    (process_id,) = renderer.process_ids
    limits = Path(f"/proc/{process_id}/limits").read_text()
    assert re.search(r"Max address space +\d+ ", limits)
    assert re.search(r"Max file size +0 ", limits)
    assert Path(f"/proc/{process_id}/oom_score_adj").read_text().strip() == "1000"
