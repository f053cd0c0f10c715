"""Frugal templates: the texts of `render_template`, and never more work than was paid for, whatever the template."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxserve
from jaxserve.errors import InvalidRequestError, TokenizerError
from jaxserve.tokenizers.frugal import BUDGET, MAX_CONVERSATION, FrugalTemplate
from jaxserve.tokenizers.renderer import RenderTimeoutError, TemplateRenderer
from jaxserve.tokenizers.template import render_template
from tests.tokenizers.families import FAMILIES
from tests.tokenizers.test_chat import HI, WEATHER, call, calling

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
TURNS = [
    {"role": "user", "content": " What is a <b> & a KV cache? "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt keeps keys."},
    {"role": "user", "content": "\u00e9\u4e2d\U0001f600"},
]
USUAL = [{"role": "system", "content": "Be brief."}, *TURNS]
WITH_TOOLS = [
    TURNS[0],
    *calling(call({"city": "Rome", "days": [1, None, 2.5]}, id="call_0123")),
    {"role": "tool", "tool_call_id": "call_0123", "content": "5", "name": "f"},
    {"role": "assistant", "content": "so", "reasoning_content": "hm"},
    TURNS[2],
]


def outcome(render: Callable[..., str], *args: Any, **options: Any) -> tuple[str, ...]:
    try:
        return ("text", render(*args, **options))
    except (InvalidRequestError, TokenizerError) as error:
        return (type(error).__name__, str(error), str(error.field))


def read_demo_template() -> str:
    path = Path(jaxserve.__file__).with_name("demo") / "tokenizer_config.json"
    return json.loads(path.read_text(encoding="utf-8"))["chat_template"]


@pytest.mark.parametrize("template", [*FAMILIES.values(), read_demo_template()], ids=[*FAMILIES, "demo"])
def test_families_are_frugal(template: str) -> None:
    made, rendered = FrugalTemplate(template), 0
    for messages, tools in itertools.product((USUAL, TURNS, WITH_TOOLS), (None, [WEATHER])):
        expected = outcome(render_template, template, messages, VARIABLES, tools=tools)
        text, units = made.render(messages, VARIABLES, tools=tools)
        assert text == (expected[1] if expected[0] == "text" else None)
        rendered += text is not None
        assert units < BUDGET / 8
    assert rendered >= 2


# What templates use, each with every one of the values below as `v`; `u` is undefined.
EXPRESSIONS = """
v; v | string; v | tojson; v | tojson(indent=2, sort_keys=true); v ~ v; [v, v]; (v, 1); {'a': v}; v + v
v | length; v | first; v | last; v | list; v | count; v[:2]; v[::-1]; v[-1:]; v[0]; v[-1]; v['a']; v.a; v.a.b is defined
v | sort; v | sort(attribute='a', reverse=true); v | join('-'); v | join(', ', attribute='a'); v | dictsort
v | dictsort(by='value'); v | items | list; v | map(attribute='a') | join; v | map(attribute='a', default='x') | list
v | map('upper') | list; v | map('tojson') | join(' '); v | selectattr('a') | list; v | rejectattr('a') | first
v | selectattr('a', 'equalto', 1) | map(attribute='a') | list; v | select('string') | reject('eq', 'a') | join('/')
v.strip(); v.lstrip('a'); v.rstrip('a '); v.split('a'); v.split(); v.split('a', 1)[-1]; v.rsplit('a', 1); v.splitlines()
v.upper(); v.lower(); v.title(); v.capitalize(); v.replace('a', 'bb'); v.startswith('a'); v.endswith('a'); v.find('a')
v | trim; v | trim('a'); v | upper; v | lower; v | capitalize; v | replace('a', '<b>'); v | int; v | int(5); v | float
v | default('x'); u | default(v); v | d('x', true); v | safe; '<' ~ v | safe; v | safe + '<'; (v | safe).strip()
'a' in v; 'a' not in v; v in ['a', 1]; v in 'cab'; v in [v]; v == 'a'; v != v; v == [v]; v < 3; 1 < v < 9; 1 < v <= v
v is string; v is mapping; v is iterable; v is sequence; v is number; v is none; v is not none; v is defined
v is boolean; v is integer; v is float; v is true; v is false; v is eq 1; v is in ['a']; u is undefined; u is defined
v + 1; 1 - v; v * 2; v * 2.5; v % 2; v // 2; v / 2; -v; 7 % v; v - v; 'y' if v else 'n'; 'y' if u; v and 'a'; v or 'b'
v.get('a'); v.get('b', v); {'a': 1}.get(v); v.items() | list; v.keys() | first; 'a' in v.keys(); v.values() | length
v.keys() | list; range(v | length) | list; v[v]; [1, 'a'] + [v]; ['a', v][1]; 'abc'[v:]; u; not v
strftime_now('%Y'); namespace(a=v).a; {'a': 1}[v]; {v: 1}; v.upper
""".replace("\n", "; ").split("; ")
BLOCKS = [
    "{% for x in v %}{{ x }}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.length }}{{ loop.first }}"
    "{{ loop.last }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.depth }}{% else %}none{% endfor %}",
    "{% for x in v if x %}{{ x }}{{ loop.length }}{{ loop.last }}{% else %}none{% endfor %}",
    "{% for x in v %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ x }}{% if loop.index == 3 %}{% break %}"
    "{% endif %}{% else %}none{% endfor %}",
    "{% for k, x in v | items %}{{ k }}{{ x }}{{ loop.length }}{{ loop.nextitem }}{% else %}none{% endfor %}",
    "{% for k, x in v.items() if x %}{{ k }}{{ x }}{{ loop.revindex0 }}{% endfor %}",
    "{% for k in v.keys() %}{{ k }}{% endfor %}{% for x in v.values() %}{{ x }}{{ loop.length }}{% endfor %}",
    "{% for x in v | selectattr('a', 'defined') %}{{ x }}{{ loop.length }}{{ loop.last }}{% endfor %}",
    "{% for x in range(v | length) %}{{ x }}{% for y in range(x) %}{{ x + y }}{{ loop.index }}{% endfor %}{% endfor %}",
    "{% for c in v %}{% for d in v %}{{ c == d }}{{ c in v }}{{ c ~ d }}{% endfor %}{{ loop.index }}{% endfor %}",
    "{% macro m(x, y='d') %}{{ x }}-{{ y }}{% endmacro %}{{ m(v, y=v) }}{% for x in v %}{{ m(x) }}{% endfor %}",
    "{% macro m(n) %}{{ n }}{% if n > 0 %}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(v | length) }}",
    "{% set x %}a{{ v }}b{% endset %}{{ x }}{% set x, y = 'p', v %}{{ x }}{{ y }}{% set x = x ~ y %}{{ x }}",
    "{% set ns = namespace(n=0, x=v) %}{% for x in v %}{% set ns.n = ns.n + 1 %}{% set ns.x = x %}{% endfor %}"
    "{{ ns.n }}{{ ns.x }}{{ x }}",
    "{% if v %}a{% elif u %}b{% else %}c{% endif %}{% generation %}{{ v }}{% endgeneration %}{{- v -}}\n  {# x #}",
]
VALUES: list[Any] = [
    "", "a", "ab\na  a", "<&>'\"\\", "\u0390\u00df\U0001f600", "12", None, True, 0, 7, -3, 2.5, 1 << 40, 1 << 90,
    [], ["a", "b", "c"], [1, 2, 3, 4], [{"a": 1}, {"a": 2}], [{"b": [3]}], [[1, [2]], []], {}, {"a": "x"},
    {"b": 1, "a": {"b": []}},
]  # fmt: skip


@pytest.mark.parametrize("template", [*(f"{{{{ {part} }}}}" for part in EXPRESSIONS if part), *BLOCKS])
def test_operations_mean_the_same(template: str) -> None:
    made, texts = FrugalTemplate(template), 0
    for value in VALUES:
        text, _ = made.render([], {"v": value})
        if text is not None:
            assert ("text", text) == outcome(render_template, template, [], {"v": value}), value
            texts += 1
    assert texts


@pytest.mark.parametrize("template", ["{{ raise_exception('no ' ~ v) }}", "{{ u.a }}", "{{ v.x.y }}", "{{ none + 1 }}"])
def test_failures_are_for_the_other_process(template: str) -> None:
    text, units = FrugalTemplate(template).render(HI, {"v": "a"})
    assert text is None and units < BUDGET / 100


texts = st.text(alphabet='ab <>\n\u00e9\U0001f600\\"', max_size=8) | st.sampled_from(
    ["<think>a</think>b", "<tool_response>x</tool_response>", "%s", "{{ x }}"]
)
scalars = (
    st.none() | st.booleans() | st.integers(-3, 1 << 70) | st.floats(allow_nan=False, allow_infinity=False) | texts
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
parts = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "image"])}, optional={"text": texts}), max_size=3
)
contents = texts | texts | parts | st.none() | values
calls = st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"name": texts, "arguments": values | st.dictionaries(texts, scalars)})},
        optional={"id": texts | st.just("123456789"), "type": st.just("function")},
    ),
    max_size=2,
)
roles = st.sampled_from(["user", "assistant", "tool", "system", "ipython"])
odd_messages = st.fixed_dictionaries(
    {},
    optional={
        "role": roles | scalars,
        "content": contents,
        "tool_calls": calls | scalars,
        "reasoning_content": scalars,
    },
)
good_messages = st.fixed_dictionaries(
    {"role": roles, "content": texts}, optional={"tool_calls": calls, "reasoning_content": texts, "name": texts}
)
schemas = st.recursive(
    st.fixed_dictionaries({"type": st.sampled_from(["string", "integer"]) | st.just(["string", "null"])},
                          optional={"enum": st.lists(texts), "nullable": st.booleans()}),
    lambda inner: st.fixed_dictionaries({"type": st.just("array"), "items": inner})
    | st.fixed_dictionaries({"type": st.just("object"), "properties": st.dictionaries(texts, inner, max_size=3)},
                            optional={"required": st.lists(texts, max_size=2)}),
    max_leaves=6,
)  # fmt: skip
tools = st.none() | st.lists(
    st.fixed_dictionaries({"type": st.just("function"),
                           "function": st.fixed_dictionaries({"name": texts, "parameters": schemas},
                                                             optional={"description": texts})}) | values,
    max_size=2,
)  # fmt: skip
variables = st.fixed_dictionaries(
    {"bos_token": texts},
    optional={"eos_token": texts, "add_generation_prompt": st.booleans(), "enable_thinking": scalars},
)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=100, deadline=None)
@given(
    messages=st.lists(good_messages, min_size=1, max_size=5) | st.lists(odd_messages | good_messages, max_size=4),
    tools=tools,
    variables=variables,
)
def test_random_conversations(name: str, messages: Any, tools: Any, variables: Any) -> None:
    text, units = _make(name).render(messages, variables, tools=tools)
    if text is not None:  # or else the other process says what `render_template` says
        assert ("text", text) == outcome(render_template, FAMILIES[name], messages, variables, tools=tools)
    assert units <= BUDGET


@functools.cache
def _make(name: str) -> FrugalTemplate:
    return FrugalTemplate(FAMILIES[name])


@pytest.mark.parametrize(
    "odd",
    [object(), {1, 2}, b"a", 1 << 64, functools.reduce(lambda inner, _: [inner], range(40), [])],
    ids=lambda odd: type(odd).__name__,
)
def test_odd_values_are_for_the_other_process(odd: Any) -> None:
    made = FrugalTemplate("{{ messages[0].role }}")
    assert made.render([{"role": "user", "content": odd}], {}) == (None, 0)
    assert made.render(HI, {"x": odd}) == made.render(HI, {}, tools=[odd]) == (None, 0)


def test_long_conversations_are_for_the_other_process() -> None:
    made = FrugalTemplate("{{ messages | length }}")
    for content, most in (("a", MAX_CONVERSATION // 4), ([0], MAX_CONVERSATION // 256)):
        assert made.render([{"content": content * (most * 9 // 10)}], {})[0] == "1"
        assert made.render([{"content": content * most}], {}) == (None, 0)


def test_threads_have_a_purse_each() -> None:
    made, number = (
        FrugalTemplate("{% for m in messages %}{% for n in messages %}{{ n.role[0] }}{% endfor %}{% endfor %}"),
        8,
    )
    messages = TURNS * 13
    _, units = made.render(messages, {})
    assert BUDGET / 2 < units < BUDGET
    results: list[tuple[str | None, int]] = []
    barrier = threading.Barrier(number)

    def run() -> None:
        barrier.wait(10)
        results.extend(made.render(messages, {}) for _ in range(5))

    threads = [threading.Thread(target=run) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [("uau" * 13 * 39, units)] * 5 * number


def test_the_renderer_asks_a_process_only_where_it_must() -> None:
    template = FAMILIES["Qwen 3"] + "{% for m in messages %}" * 3 + "{{ m.role[0] }}" + "{% endfor %}" * 3
    renderer = TemplateRenderer(time_limit_s=30.0, max_processes=1)
    try:
        with pytest.raises(RenderTimeoutError):  # nothing is compiled and no process runs
            renderer.render(template, USUAL, VARIABLES, limit_s=0.01)
        renderer.start(template)
        (process,) = renderer.process_ids
        os.kill(process, signal.SIGSTOP)
        expected = render_template(template, USUAL, VARIABLES, tools=[WEATHER])
        assert renderer.render(template, USUAL, VARIABLES, tools=[WEATHER], limit_s=0.01) == expected
        with pytest.raises(RenderTimeoutError):  # a template that somebody brings
            renderer.render(template + " ", USUAL, VARIABLES, limit_s=0.01)
        for messages in (USUAL * 6, [{"role": "user"}]):  # too dear; a failure
            expected = outcome(render_template, template, messages, VARIABLES)
            assert outcome(renderer.render, template, messages, VARIABLES) == expected
        for other in ("{{ 'a' | center(3) }}", "{{ 'b' }}"):
            renderer.start(other)
            assert renderer.render(other, USUAL, VARIABLES) == render_template(other, USUAL, VARIABLES)
    finally:
        renderer.close()


@pytest.mark.parametrize("name", ["Llama 3", "gpt-oss"])
def test_the_renderer_says_what_the_sandbox_says(name: str) -> None:
    renderer = TemplateRenderer(time_limit_s=30.0, max_processes=1)
    renderer.start(FAMILIES[name])

    @settings(max_examples=40, deadline=None, database=None)
    @given(messages=st.lists(odd_messages | good_messages, min_size=1, max_size=3), tools=tools)
    def compare(messages: Any, tools: Any) -> None:
        expected = outcome(render_template, FAMILIES[name], messages, VARIABLES, tools=tools)
        assert outcome(renderer.render, FAMILIES[name], messages, VARIABLES, tools=tools) == expected

    try:
        compare()
    finally:
        renderer.close()
