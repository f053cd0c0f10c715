"""Chat templates render as in transformers, in a sandbox, and nobody but the template writes special tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError, TokenizerError
from jaxserve.tokenizers import Tokenizer, load_tokenizer, renderer, template
from jaxserve.tokenizers.chat import encode_chat
from tests.examples import scale_examples
from tests.tokenizers import builders
from tests.tokenizers.builders import CHAT_TEMPLATE

HI = [{"role": "user", "content": "hi"}]
KINDS = ("llama3", "llama2", "sentencepiece")
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


class TextTokenizer:
    """What `encode_chat` asks of a tokenizer where only the text matters: no special tokens, one id per character."""

    chat_template = None
    special_pattern = re.compile("(?!)")

    def __init__(self, bos_token: str) -> None:
        self.named_tokens = {"bos_token": bos_token}

    def encode(self, text: str, **_options: Any) -> list[int]:
        return list(map(ord, text))


def render_chat(template: str, messages: Sequence[Mapping[str, Any]], *, bos_token: str = "<s>", **options: Any) -> str:
    """The text of `encode_chat`."""
    tokenizer: Any = TextTokenizer(bos_token)
    return encode_chat(tokenizer, messages, chat_template=template, **options)[0]


def call(arguments: Any, name: str = "f", **more: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def calling(*calls: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": None, "tool_calls": list(calls), **more}]


def test_a_conversation_as_text() -> None:
    messages = [{"role": "system", "content": " be brief "}, *HI]
    expected = "<s><|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    assert render_chat(CHAT_TEMPLATE, messages, bos_token="<s>", add_generation_prompt=False) == expected
    assert render_chat(CHAT_TEMPLATE, messages, bos_token="<s>") == expected + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ {'a': '<b>&é', 'b': [1, none, true]} | tojson }}", '{"a": "<b>&é", "b": [1, null, true]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),  # trim_blocks and lstrip_blocks
        ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}"
         "{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}", "013"),
        ("{% generation %}a{{ bos_token }}{% endgeneration %}b", "a<s>b"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ tools is none }}{{ tools is defined }}{{ missing is defined }}{{ missing }}", "TrueTrueFalse"),
        ("{{ enable_thinking }}{{ date_string }}", "True26 Jul"),
        ("{{ messages[0]['content'].split('i')[0] + messages[0].role }}", "huser"),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
        ("{{ 5000 * 5000 }}{{ 2 ** 10 }}{{ '=' * 3 }}", "250000001024==="),
        ("{{ dict(a=1).items() | list }}", "[('a', 1)]"),
    ],
)  # fmt: skip
def test_what_templates_use(source: str, expected: str) -> None:
    assert (
        render_chat(source, HI, bos_token="<s>", defaults={"enable_thinking": True, "date_string": "26 Jul"})
        == expected
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ ().__class__.__base__.__subclasses__() }}",
        "{{ ''.__class__.__mro__[1] }}",
        "{{ messages[0].__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__ }}",
        "{{ self.__init__ }}{{ self._TemplateReference__context.environment.loader.x }}",
        "{{ (messages | map(attribute='__class__') | list)[0].x }}",
        "{{ '{0.__class__.__mro__}'.format(()) }}",
        "{{ '%s' | attr('format') | attr('__globals__') | attr('x') }}{{ ().__class__.x }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends 'x' %}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** 10 * [1, 2] }}",
        "{{ 2 ** (2 ** 30) }}",
    ],
)
def test_the_sandbox_refuses(source: str) -> None:
    with pytest.raises(TokenizerError) as caught:
        render_chat(source, HI)
    assert caught.value.field == "chat_template"
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "expression",
    ["messages.__class__", "messages[0].__dict__", "raise_exception.__globals__", "strftime_now.__code__", "self._x"],
)
def test_internals_are_undefined(expression: str) -> None:
    assert render_chat("{{ " + expression + " }}{{ (" + expression + ") is defined }}", HI) == "False"


@pytest.mark.parametrize(
    "source",
    ["{% if %}", "{{ a", "{% endfor %}", "{% nonsense %}", "{{ 1 | nonsense }}", "{% generation %}", "{{ 1 / 0 }}",
     "{{ none + 1 }}", "{{ missing.attribute }}", "{{ strftime_now(5) }}", "{{ [].x.y }}",
     "{{ {} | tojson(5, 'x', 5) }}"],
)  # fmt: skip
def test_broken_templates(source: str) -> None:
    with pytest.raises(TokenizerError, match="chat_template"):
        render_chat(source, HI)


def test_the_template_refuses_a_conversation() -> None:
    source = "{% if messages[0].role != 'system' %}{{ raise_exception('System first!') }}{% endif %}ok"
    with pytest.raises(InvalidRequestError, match="System first!") as caught:
        render_chat(source, HI)
    assert caught.value.field == "messages"
    assert render_chat(source, [{"role": "system", "content": ""}]) == "ok"


def test_a_template_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "_LIMIT_S", 0.5)
    renderer._get_shared.cache_clear()
    try:
        with pytest.raises(InvalidRequestError, match=r"^chat_template: takes more than"):
            render_chat("{% for a in range(9999) %}" * 4 + "{% endfor %}" * 4, HI)
        renderer._get_shared().close()
    finally:
        renderer._get_shared.cache_clear()
    assert render_chat("{{ messages[0].content }}", HI) == HI[0]["content"]


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MAX_RENDERED_CHARS", 1000)
    source = "{% for i in range(99999) %}{% for j in range(99999) %}0123456789{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequestError, match="1000 characters"):
        render_chat(source, HI, render=template.render_template)
    assert render_chat("{{ messages[0].content }}", [{"role": "user", "content": "x" * 1000}]) == "x" * 1000


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (None, "messages"),
        ({"role": "user", "content": "hi"}, "messages"),
        (["hi"], "messages[0]"),
        ([*HI, {"content": "hi"}], "messages[1].role"),
        ([{"role": "", "content": "hi"}], "messages[0].role"),
        ([{"role": "end", "content": "hi"}], "messages[0].role"),
        ([{"role": ["user"], "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "a\ud800"}], "messages[0].content"),
        ([{"role": "user", "content": "a", "name": "\udfff"}], "messages[0].name"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "a", 5: 1}], "messages[0]"),
        ([{"role": "user", "content": "a", "tool_calls": [call("{}")]}], "messages[0]"),
        ([{"role": "user", "content": "a", "tool_call_id": "x"}], "messages[0]"),
        ([{"role": "user", "content": "a", "reasoning_content": "x"}], "messages[0]"),
        ([{"role": "assistant", "content": "a", "refusal": "no"}], "messages[0]"),
        ([{"role": "assistant", "content": "a", "function_call": {"name": "f"}}], "messages[0]"),
        ([{"role": "assistant", "content": "a", "audio": {"id": "x"}}], "messages[0]"),
        ([{"role": "assistant", "content": "a", "provider_specific_fields": {"signature": "x"}}], "messages[0]"),
        ([{"role": "assistant", "content": "a", "provider_specific_fields": {"reasoning": "x"}}], "messages[0]"),
        ([{"role": "assistant", "content": "a", "provider_specific_fields": "a"}], "messages[0]"),
        ([{"role": "assistant", "parsed": {"a": 1}, "reasoning": "x"}], "messages[0]"),
        ([{"role": "user", "content": "a", "provider_specific_fields": {}}], "messages[0]"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content"),
        ([{"role": "assistant", "content": "a", "reasoning": 5}], "messages[0].reasoning"),
        ([{"role": "tool", "tool_call_id": "x"}], "messages[0].content"),
        ([{"role": "tool", "tool_call_id": 5, "content": "a"}], "messages[0].tool_call_id"),
        ([*HI, *calling("x")], "messages[1].tool_calls[0]"),
        ([{"role": "assistant", "content": "a", "tool_calls": {"id": 1}}], "messages[0].tool_calls"),
        (calling({"id": "a", "type": "function"}), "messages[0].tool_calls[0]"),
        (calling(call("{}", extra=1)), "messages[0].tool_calls[0]"),
        (calling(call("{}", type="custom")), "messages[0].tool_calls[0].type"),
        (calling(call("{}", id=5)), "messages[0].tool_calls[0].id"),
        (calling(call("{}", name="")), "messages[0].tool_calls[0].function.name"),
        (calling({"function": {"arguments": "{}"}}), "messages[0].tool_calls[0].function.name"),
        (calling({"function": {"name": "f", "strict": True}}), "messages[0].tool_calls[0].function"),
        *(
            (calling(call("{}"), call(arguments)), "messages[0].tool_calls[1].function.arguments")
            for arguments in (5, [], {"a": {1, 2}}, {5: 1}, {"a": float("nan")}, "\ud800")
        ),
    ],
)
def test_malformed_messages(messages: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render_chat(CHAT_TEMPLATE, messages)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"a": "b',
        "[]",
        '"a"',
        "nonsense",
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": "\\ud800"}',
        '{"\\udc00": 1}',
        '{"a": ' * 65 + "1" + "}" * 65,
        '{"a":' * 100_000,
        '{"a": ' + "9" * 5000 + "}",
    ],
)
def test_arguments_may_be_any_text(text: str) -> None:
    """A model may have written no JSON, or been cut off; clients send it back as it was."""
    messages = calling(call(text))
    whole = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name }}={{ c.function.arguments"
    assert render_chat(whole + " }}{% endfor %}{% endfor %}", messages) == f"f={text}"
    written = render_chat(whole + " | tojson }}{% endfor %}{% endfor %}", messages)
    assert json.loads(written.removeprefix("f=")) == text
    for members in (" | items", ".items()"):
        source = "{% for m in messages %}{% for k, v in m.tool_calls[0].function.arguments" + members
        assert render_chat(source + " %}{{ k }}={{ v }}{% endfor %}{% endfor %}", messages) == f"arguments={text}"


def test_calls_reach_the_template_as_objects() -> None:
    source = "{{ messages | tojson }}"
    messages = [
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None, "function_call": None,
         "tool_calls": [call('{"b": [1, null], "a": "é"}', index=0)], "reasoning": "hm",
         "provider_specific_fields": {"reasoning": "hm", "refusal": None}, "parsed": None},  # LiteLLM repeats others
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "5"}], "name": "f"},
        {"role": "assistant", "content": "done", "tool_calls": None, "reasoning_content": "r", "reasoning": "s"},
        {"role": "assistant", "content": "[1]", "parsed": [1], "tool_calls": [
            {"function": {"name": "g", "arguments": "{}", "parsed_arguments": {"a": 1}}}]},  # by OpenAI's client
        {"role": "assistant", "tool_calls": [{"function": {"name": "g", "arguments": {"x": 1.5}}},
                                             call(""), call(None)]},
    ]  # fmt: skip
    assert json.loads(render_chat(source, messages)) == [
        {"role": "assistant", "content": "", "reasoning_content": "hm",
         "tool_calls": [call({"b": [1, None], "a": "é"})]},
        {"role": "tool", "tool_call_id": "call_1", "content": "5", "name": "f"},
        {"role": "assistant", "content": "done", "reasoning_content": "r"},
        {"role": "assistant", "content": "[1]",
         "tool_calls": [{"type": "function", "function": {"name": "g", "arguments": {}}}]},
        {"role": "assistant", "content": "",
         "tool_calls": [{"type": "function", "function": {"name": "g", "arguments": {"x": 1.5}}},
                        call({}), call({})]},
    ]  # fmt: skip
    assert list(json.loads(render_chat("{{ messages[0].tool_calls[0].function | tojson }}", messages))) == [
        "name", "arguments",
    ]  # fmt: skip


def test_tools_reach_the_template() -> None:
    source = "{% if tools is not none %}{{ tools | tojson }}{% endif %}"
    assert json.loads(render_chat(source, HI, tools=[WEATHER])) == [WEATHER]
    assert render_chat(source, HI, tools=[]) == render_chat(source, HI) == ""


def test_going_on_with_the_last_message() -> None:
    def cut(content: str, source: str = CHAT_TEMPLATE) -> str:
        messages = [*HI, {"role": "assistant", "content": content}]
        return render_chat(source, messages, add_generation_prompt=False, continue_final_message=True)

    start = "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert cut("Sure, ") == start + "Sure, "
    assert cut("m") == start + "m"  # also where the closing mark holds the same letters
    assert cut("") == start
    assert cut("\ue000") == start + "\ue000"
    assert cut("ab", "{% for m in messages %}{{ m.content }}/{{ m.content }};{% endfor %}") == "hi/hi;ab/ab"
    with pytest.raises(InvalidRequestError, match="not written by the chat template") as caught:
        cut("a" * 8, "{% for m in messages %}{{ m.content[:7] }}{% endfor %}")
    assert caught.value.field == "messages[1].content"


@pytest.mark.parametrize(
    ("messages", "prompt", "field"),
    [
        ([{"role": "assistant", "content": "a"}], True, "continue_final_message"),
        (HI, False, "messages[0].role"),
        ([*HI, *calling(call("{}"))], False, "messages[1].tool_calls"),
    ],
)
def test_what_cannot_be_continued(messages: Any, prompt: bool, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render_chat(CHAT_TEMPLATE, messages, add_generation_prompt=prompt, continue_final_message=True)
    assert caught.value.field == field


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render_chat("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"
    assert render_chat("{{ messages[0].content }}.", [{"role": "user", "content": []}]) == "."


@pytest.mark.parametrize(
    "options",
    [
        {"messages": []},
        {"tools": []},
        {"add_generation_prompt": False},
        {"bos_token": "x"},
        {"enable_thinking": "yes"},
        {"date_string": 5},
        {"x": object()},
        {"x": float("nan")},
        {"x": "\ud800"},
        {"y": 1},
        {"enable_thinking": True, "z": 1},
    ],
)
def test_variables_are_checked(options: dict[str, Any]) -> None:
    source = "{{ x }}{{ enable_thinking }}{{ date_string }}{{ bos_token }}{% for y in messages %}{{ y }}{% endfor %}"
    for rendered in (source, CHAT_TEMPLATE):
        with pytest.raises(InvalidRequestError) as caught:
            render_chat(rendered, HI, variables=options)
        assert caught.value.field.startswith("chat_template_kwargs.")
        assert caught.value.field.removeprefix("chat_template_kwargs.") in options


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("{{ messages }}{{ tools }}{{ add_generation_prompt }}", ""),
        ("{% if not date_string is defined %}{% set date_string = 5 %}{% endif %}{{ date_string }}", "date_string"),
        ("{% if clear_thinking is defined and not clear_thinking %}{% endif %}", "clear_thinking"),
        ("{% set thinking = thinking or false %}{{ thinking }}", "thinking"),
        ("{% macro f(a) %}{{ a }}{{ documents }}{% endmacro %}{{ f(1) }}{{ strftime_now('%Y') }}", "documents"),
        ("{% set a = 1 %}{{ a }}{{ namespace(b=2).b }}{{ range(3) }}{{ raise_exception }}", ""),
        ("{% generation %}{{ builtin_tools | join }}{% endgeneration %}", "builtin_tools"),
        ("{% if false %}{{ reasoning_effort }}{% endif %}", "reasoning_effort"),
    ],
)
def test_a_template_says_what_it_reads(source: str, names: str) -> None:
    assert template.find_variables(source) == frozenset(names.split())
    types = {"date_string": "x", "reasoning_effort": "x", "documents": [{"text": "x"}], "builtin_tools": ["x"]}
    values = {name: types.get(name, True) for name in names.split()}
    assert render_chat(source, HI, variables=values) == render_chat(source, HI, defaults={**values, "not_read": 1})
    with pytest.raises(InvalidRequestError, match=rf"^chat_template_kwargs\.not_read: .*{names or 'none'}"):
        render_chat(source, HI, variables={"not_read": 1})


def test_documents_reach_a_template_that_reads_them(tokenizers: dict[str, Tokenizer]) -> None:
    source = "{% for d in documents or [] %}{{ d.text }}{% endfor %}{{ messages[0].content }}"
    assert render_chat(source, HI) == "hi"
    assert render_chat(source, HI, variables={"documents": [{"text": "x"}]}) == "xhi"
    tokenizer: Any = tokenizers["llama3"]
    given = {"chat_template": source, "tokenize": False}
    assert tokenizer.apply_chat_template(HI, documents=[{"text": "x"}], **given) == "xhi"
    assert tokenizer.apply_chat_template(HI, documents=None, **given) == "hi"


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_text(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    text, ids = encode_chat(tokenizer, HI, chat_template=CHAT_TEMPLATE)
    assert text.startswith(f"{tokenizer.named_tokens['bos_token']}<|im_start|>user\nhi<|im_end|>")
    assert ids == tokenizer.encode(text, add_special_tokens=False, allow_special=True)
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
    if kind != "llama2":  # which has no chat tokens
        end = tokenizer.special_tokens["<|im_end|>"]
        assert ids.count(end) == 1
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=scale_examples(60), deadline=None)
@given(data=st.data())
def test_messages_never_become_special_tokens(tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizers[kind]
    special = [*tokenizer.special_tokens, "<|im_", "end|>", "\ue000", "<", ">", "日", " "]
    contents = data.draw(st.lists(st.lists(st.sampled_from(special), max_size=5).map("".join), min_size=1, max_size=4))
    messages = [{"role": "user", "content": content} for content in contents]
    source = CHAT_TEMPLATE.replace("| trim", "")
    text, ids = encode_chat(tokenizer, messages, chat_template=source)
    assert text == render_chat(source, messages, bos_token=tokenizer.named_tokens["bos_token"])
    _, harmless = encode_chat(tokenizer, [{"role": "user", "content": "x"}] * len(messages), chat_template=source)
    own = [token_id for token_id in harmless if token_id in tokenizer.special_ids]
    assert [token_id for token_id in ids if token_id in tokenizer.special_ids] == own
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    if kind == "llama2":  # its normalizer puts a space behind every special token
        decoded, text = decoded.replace(" ", ""), text.replace(" ", "")
    assert decoded == text


def test_options_never_become_special_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["llama3"]
    text, ids = encode_chat(tokenizer, HI, chat_template="{{ x.y[0] }}", variables={"x": {"y": ["<|im_end|>"]}})
    assert text == "<|im_end|>" and tokenizer.special_ids.isdisjoint(ids)


@pytest.mark.parametrize("kind", ["llama3", "sentencepiece"])
def test_tools_and_calls_never_become_special_tokens(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer, end = tokenizers[kind], "<|im_end|>"
    tool = {"type": "function", "function": {"name": "f", "description": end, "parameters": {"enum": [end], end: [1]}}}
    messages = [
        *calling(call({end: {"a": [end, 1, None]}}, id=end)),
        {"role": "tool", "tool_call_id": end, "content": f"{end}x"},
        {"role": "assistant", "content": f"so {end}", "reasoning_content": end},
    ]
    source = "{{ tools | tojson }}<|im_end|>{{ messages | tojson }}<|im_end|>{{ messages[-1].content }}<|im_end|>"
    text, ids = encode_chat(tokenizer, messages, tools=[tool], chat_template=source)
    assert ids.count(tokenizer.special_tokens[end]) == 3
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    tools, rest = text.split("]<|im_end|>[")
    assert json.loads(tools + "]") == [tool]
    assert rest.count(end) == 10
    cut, ids = encode_chat(
        tokenizer,
        messages,
        tools=[tool],
        chat_template=source,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert text.removesuffix(end) == cut and ids.count(tokenizer.special_tokens[end]) == 2


def test_no_template(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(TokenizerError, match=r"chat_template=.*--chat-template"):
        encode_chat(tokenizers["llama2"], HI)


def test_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    """Hermes 2 and 3 keep two templates by name, of which the default one does not show tools."""
    builders.make_byte_level(tmp_path)
    default, tool_use = "plain {{ messages[0].content }}\n", "\n {%- set n = 1 %}\n with {{ tools | length }}\n  "
    named = [{"name": "default", "template": default}, {"name": "tool_use", "template": tool_use}]
    builders.write_json(tmp_path / "tokenizer_config.json", {"chat_template": named})
    tokenizer = load_tokenizer(tmp_path)
    for tools, source in ((None, default), ([], default), ([WEATHER], tool_use)):
        assert encode_chat(tokenizer, HI, tools=tools)[0] == render_chat(source, HI, tools=tools)
