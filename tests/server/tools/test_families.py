"""Calls that a family's template writes are read back, byte for byte, however the text is cut."""

# ruff: noqa: RUF001 - DeepSeek's marks have wide characters

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import InvalidRequestError
from jaxserve.features.grammars import GrammarCompiler
from jaxserve.presets import demo_model_dir
from jaxserve.server.events import CallEnded, ReasoningDelta
from jaxserve.server.tools import (
    constrain_calls,
    guess_reasoning_parser,
    guess_tool_parser,
    make_answer_parser,
    read_tools,
)
from jaxserve.server.tools.call_formats import CALL_FORMATS
from jaxserve.server.tools.marked_calls import KIMI
from jaxserve.tokenizers import load_tokenizer
from tests.examples import scale_examples
from tests.features.grammars.test_blanks import accepts
from tests.server.tools.helpers import CountedText, cut, join_text, read, summarise
from tests.tokenizers.call_families import CALL_FAMILIES
from tests.tokenizers.families import FAMILIES
from tests.tokenizers.test_adaptation import render_chat

PARSERS = {
    "Qwen 3": "hermes",
    "Qwen 3.5": "qwen3_coder",
    "Qwen 3 Coder": "qwen3_coder",
    "GLM 4.5": "glm45",
    "MiniMax M2": "minimax_m2",
    "DeepSeek V3": "deepseek_v3",
    "DeepSeek V3.1": "deepseek_v31",
    "Kimi K2": "kimi_k2",
    "Granite 3": "granite",
    "Command R7B": "cohere_command3",
    "Phi-4-mini": "phi4_mini_json",
    "Llama 3.2 pythonic": "pythonic",
    "Gemma 4": "gemma4",
    "FunctionGemma": "functiongemma",
    "OLMo 3": "olmo3",
    "LFM2": "lfm2",
    "Nemotron Nano 2": "nemotron_json",
}
REASONING = {
    "Qwen 3": "qwen3",
    "Qwen 3.5": "qwen3",
    "GLM 4.5": "glm45",
    "MiniMax M2": "minimax_m2",
    "DeepSeek V3.1": "deepseek_v3",
    "Granite 3": "granite",
    "Command R7B": "cohere_command3",
    "Gemma 4": "gemma4",
    "LFM2": "qwen3",
    "Nemotron Nano 2": "qwen3",
}
ENDS = {  # what ends a turn; it stops the sequence and is no part of its text
    "Qwen 3": "<|im_end|>\n",
    "Qwen 3.5": "<|im_end|>\n",
    "Qwen 3 Coder": "<|im_end|>\n",
    "GLM 4.5": "",
    "MiniMax M2": "[e~[\n",
    "DeepSeek V3": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "DeepSeek V3.1": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "Kimi K2": "<|im_end|>",
    "Granite 3": "<|end_of_text|>\n",
    "Command R7B": "<|END_OF_TURN_TOKEN|>",
    "Phi-4-mini": "<|end|>\n",
    "Llama 3.2 pythonic": "<|eot_id|>",
    "Gemma 4": "<turn|>\n",
    "FunctionGemma": "",
    "OLMo 3": "</s>",
    "LFM2": "<|im_end|>\n",
    "Nemotron Nano 2": "\n<SPECIAL_12>\n\n",
}
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "is_new": {"type": "boolean"},
        "items": {"type": "array"},
        "more": {"type": "object"},
        "nothing": {"type": "null"},
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("find_it", "g-2")]
USER = {"role": "user", "content": "u"}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "text": st.text(st.characters(codec="utf-8"), max_size=20)
    | st.sampled_from(["5", "true", "None", '{"a": 1}', " \n x\n", "\n", "</", "<param\n</parameter", "a</arg_valu"]),
    "count": st.integers(),
    "ratio": st.floats(allow_nan=False, allow_infinity=False),
    "is_new": st.booleans(),
    "items": st.lists(st.integers() | st.text(st.characters(codec="utf-8"), max_size=5) | st.none(), max_size=3),
    "more": st.dictionaries(st.text("ab\u00e9 \n", max_size=3), st.integers() | st.booleans(), max_size=3),
    "nothing": st.none(),
    "either": st.none() | st.just("x"),
}
JSON_CONSTANTS = '{"a": null, "b": null, "c": true, "d": false, "e": [], "f": {}, "g": []}'
COHERE = "<|START_RESPONSE|>b<|END_RESPONSE|>"
ARGUMENTS = st.fixed_dictionaries({}, optional=VALUES)
ONE = {"text": 'a "b" \\ \n<c>', "count": 5, "items": [1, "x"], "more": {"k": None}}


def write(name: str, calls: list[tuple[str, dict[str, Any]]], content: str = "") -> str:
    """Returns the text of a turn, as the family's template writes it behind the prompt."""
    made = [
        {"id": f"call_{at}", "type": "function", "function": {"name": function, "arguments": arguments}}
        for at, (function, arguments) in enumerate(calls)
    ]
    turn = {"role": "assistant", "content": content, "tool_calls": made}
    text = render_chat(FAMILIES[name], [USER, turn], tools=TOOLS, add_generation_prompt=False)
    prompts = (render_chat(FAMILIES[name], [USER], tools=TOOLS, add_generation_prompt=opens) for opens in (True, False))
    prompt = next(prompt for prompt in prompts if text.startswith(prompt))
    assert text.endswith(ENDS[name])
    return text[len(prompt) : len(text) - len(ENDS[name])]


def summarise_calls(name: str, parts: list[str]) -> list[Any]:
    tools = read_tools(TOOLS)
    return [
        (item[0], json.loads(item[1])) if isinstance(item, tuple) else item
        for item in summarise(read(make_answer_parser(PARSERS[name], None, tools), parts))
        if isinstance(item, tuple)
    ]


@pytest.mark.parametrize("name", PARSERS)
def test_every_cut_in_two(name: str) -> None:
    calls = [("find_it", ONE), ("g-2", {})]
    text = write(name, calls)
    for at in range(len(text) + 1):
        assert summarise_calls(name, [text[:at], text[at:]]) == calls, text[at:]
    assert summarise_calls(name, list(text)) == calls


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=scale_examples(60), deadline=None)
@given(data=st.data())
def test_whole_answers(name: str, data: st.DataObject) -> None:
    calls = data.draw(st.lists(st.tuples(st.sampled_from(["find_it", "g-2"]), ARGUMENTS), min_size=1, max_size=3))
    if "Gemma" in name:  # names have no quotes there, so blanks around them do not count
        for _, arguments in calls:
            if "more" in arguments:
                arguments["more"] = {key.strip(): value for key, value in arguments["more"].items()}
    text = write(name, calls)
    assert summarise_calls(name, cut(text, data.draw(st.lists(st.integers(0, 10_000), max_size=12)))) == calls


@pytest.mark.parametrize("name", [name for name in PARSERS if name in CALL_FAMILIES])
@settings(max_examples=scale_examples(150), deadline=None)
@given(data=st.data())
def test_broken_calls_lose_nothing(name: str, data: st.DataObject) -> None:
    text = write(name, [("find_it", {"text": "ab", "count": 1})])
    at, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 12))
    text = text[:at] + data.draw(st.sampled_from(["", "x", "<", "\n", "{", ">"])) + text[at + length :]
    parts = cut(text, data.draw(st.lists(st.integers(0, 10_000), max_size=8)))
    parser = make_answer_parser(PARSERS[name], None, read_tools(TOOLS))
    events = read(parser, parts)
    assert summarise(events) == summarise(read(make_answer_parser(PARSERS[name], None, read_tools(TOOLS)), [text]))
    if not any(isinstance(item, tuple) for item in summarise(events)):
        assert join_text(events) == text


@pytest.mark.parametrize("name", PARSERS)
def test_a_template_names_its_parser(name: str) -> None:
    assert guess_tool_parser(FAMILIES[name]) == PARSERS[name]
    assert guess_reasoning_parser(FAMILIES[name]) == REASONING.get(name)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("<｜tool▁calls▁begin｜>{{ '<｜Assistant｜><think>' }}", "deepseek_r1"),
        ("<|tool_calls_section_begin|>{{ '<think>' }}", "kimi_k2"),
        ("<functions>{{ '<think>' }}", "olmo3"),
        ("[THINK][TOOL_CALLS]", "mistral"),
        ("{{ '<think>' }}", "qwen3"),
    ],
)
def test_further_templates_of_reasoning(template: str, expected: str) -> None:
    assert guess_reasoning_parser(template) == expected


@pytest.mark.parametrize(
    ("parser", "text", "arguments"),
    [
        ("qwen3_coder", "<parameter=count>\n5\n</parameter>\n", '{"count": 5}'),
        ("qwen3_coder", "<parameter=count>5</parameter><parameter=x>5</parameter>", '{"count": 5, "x": 5}'),
        ("qwen3_coder", "<parameter=text>5</parameter>", '{"text": "5"}'),
        ("qwen3_coder", "<parameter=count>five</parameter>", '{"count": "five"}'),
        ("qwen3_coder", "<parameter=is_new>True</parameter>", '{"is_new": true}'),
        ("qwen3_coder", "<parameter=more>{'a': None}</parameter>", '{"more": {"a": null}}'),
        ("qwen3_coder", "<parameter=ratio>NaN</parameter>", '{"ratio": "NaN"}'),
        ("qwen3_coder", "<parameter=either>null</parameter>", '{"either": null}'),
        ("qwen3_coder", "<parameter=text>\n\n a\n\n</parameter>", '{"text": "\\n a\\n"}'),
        ("qwen3_coder", "", "{}"),
        ("olmo3", "count=5, text=5, x=5", '{"count": 5, "text": "5", "x": 5}'),
        ("olmo3", "a=None, b=null, c=True, d=false, e=[], f={}, g=()", JSON_CONSTANTS),
        ("olmo3", """a='it\\'s "x"', b="it's"  ,""", '{"a": "it\'s \\"x\\"", "b": "it\'s"}'),
        ("olmo3", r"a='\x41\u00e9\U0001f600\n\q\xg'", '{"a": "A\u00e9\U0001f600\\n\\\\q\\\\xg"}'),
        ("olmo3", r'a="\ud83d\ude00\/"', r'{"a": "\ud83d\ude00/"}'),
        ("olmo3", "a=[(1, 'x',), [], {'k': {}, 2: []}]", '{"a": [[1, "x"], [], {"k": {}, "2": []}]}'),
        ("olmo3", "a=New York, b=12:30, c=1e3, d=", '{"a": "New York", "b": "12:30", "c": 1e3, "d": ""}'),
        ("olmo3", "\n", "{}"),
        (
            "gemma4",
            'a:{k:[1,<|"|>x]<|"|>],<|"|>m<|"|>:None}, b : true',
            '{"a": {"k": [1, "x]"], "m": null}, "b": true}',
        ),
        ("gemma4", 'text:5,count:5,<|"|>x<|"|>:<b,y:<|"|><|<|"|>', '{"text": "5", "count": 5, "x": "<b", "y": "<|"}'),
        ("gemma4", "a:{b:,c:[]}", '{"a": {"b": "", "c": []}}'),
    ],
)
def test_values_have_the_types_of_the_schema(parser: str, text: str, arguments: str) -> None:
    begin, end = {
        "qwen3_coder": ("<tool_call>\n<function=find_it>\n", "</function>\n</tool_call>"),
        "olmo3": ("<function_calls>find_it(", ")\n</function_calls>"),
        "gemma4": ("<|tool_call>call:find_it{", "}<tool_call|>"),
    }[parser]
    for parts in ([f"Hm.\n{begin}{text}{end}"], f"Hm.\n{begin}{text}{end}"):
        found = summarise(read(make_answer_parser(parser, None, read_tools(TOOLS)), parts))
        assert found == ["Hm.", ("find_it", arguments)]


@pytest.mark.parametrize(
    ("parser", "text", "expected"),
    [
        (
            "lfm2",
            '[{"name": "find_it", "arguments": {"count": 5}}, g-2()]',
            [("find_it", '{"count": 5}'), ("g-2", "{}")],
        ),
        ("lfm2", "[find_it(a='x]'),\n  g-2(b=[1])\n]", [("find_it", '{"a": "x]"}'), ("g-2", '{"b": [1]}')]),
        ("nemotron_json", '{"name": "find_it", "arguments": {}}', [("find_it", "{}")]),
        ("nemotron_json", ' [ {"name": "g-2", "arguments": "{}"} ] ', [("g-2", "{}")]),
        ("granite4", '{"name": "g-2", "arguments": {}}', [("g-2", "{}")]),
    ],
)
def test_other_forms_of_calls_are_read(parser: str, text: str, expected: list[Any]) -> None:
    """JSON among LFM2's marks, and calls without a list around them."""
    begin, end = {
        "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
        "nemotron_json": ("<TOOLCALL>", "</TOOLCALL>"),
        "granite4": ("<tool_call>\n", "\n</tool_call>"),
    }[parser]
    text = f"Hm.{begin}{text}{end}Well."
    for parts in ([text], text):
        found = summarise(read(make_answer_parser(parser, None, read_tools(TOOLS)), parts))
        assert found == ["Hm.", *expected, "Well."]


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("pythonic", "[other(a=1)]"),
        ("pythonic", "[find_it('x')]"),
        ("pythonic", "[a link](b)"),
        ("pythonic", "So [find_it(a=1)]"),
        ("olmo3", "<function_calls>find_it(x, y)</function_calls>"),
        ("olmo3", "<function_calls>find_it</function_calls>"),
        ("lfm2", "<|tool_call_start|>find_it()<|tool_call_end|>"),
        ("nemotron_json", "<TOOLCALL>[1]</TOOLCALL>"),
        ("gemma4", "<|tool_call>find_it{}<tool_call|>"),
        ("phi4_mini_json", "functools is a module, functools[0] not"),
        ("kimi_k2", f"{KIMI.first}{KIMI.begin}functions.:0{KIMI.sep}{{}}{KIMI.end}"),
    ],
)
def test_what_is_no_call_is_content(parser: str, text: str) -> None:
    for parts in ([text], text):
        assert summarise(read(make_answer_parser(parser, None, read_tools(TOOLS)), parts)) == [text]


@pytest.mark.parametrize("value", ["[1", "[1}", "{'a'}", "{'a', 2}", "'a' 'b'", "[,1]", "(1]"])
def test_a_value_that_is_no_literal_ends_its_call(value: str) -> None:
    text = f"<function_calls>find_it(a={value})"
    events = read(make_answer_parser("olmo3", None, read_tools(TOOLS)), text)
    assert [event.is_complete for event in events if isinstance(event, CallEnded)] == [False]


@pytest.mark.parametrize(
    ("parser", "begin", "parts", "expected"),
    [
        ("glm45", "<tool_call>find_it\n<arg_key>text</arg_key>\n<arg_value>", ("<", "/d"), "</d"),
        ("gemma4", '<|tool_call>call:find_it{text:<|"|>', ("<|", '""'), '<|\\"\\"'),
        ("olmo3", "<function_calls>find_it(text='", ("\\x4", "1b"), "Ab"),
    ],
)
def test_strings_come_as_they_grow(parser: str, begin: str, parts: tuple[str, str], expected: str) -> None:
    answer = make_answer_parser(parser, None, read_tools(TOOLS))
    answer.push(begin)
    found = [[event.text for event in answer.push(part)] for part in ("ab", 'c"', *parts)]
    assert found == [["ab"], ['c\\"'], [], [expected]]


@pytest.mark.parametrize("name", [name for name in PARSERS if name in CALL_FAMILIES])
def test_work_is_linear(name: str) -> None:
    counts = []
    for size in (500, 1000):
        text = write(name, [("find_it", {"text": "<\n</x " * size, "items": ["\n<"] * size})] * 3)
        CountedText.num_seen = 0
        read(make_answer_parser(PARSERS[name], None, read_tools(TOOLS)), [CountedText(text)])
        counts.append(CountedText.num_seen / len(text))
    assert counts[1] < counts[0] * 1.2


@pytest.mark.parametrize(
    ("parser", "prompt", "text", "expected"),
    [
        ("mistral", "[/INST]", "[THINK]a[/THINK]b", [ReasoningDelta("a"), "b"]),
        ("mistral", "[/INST]", "b [THINK]", ["b [THINK]"]),
        ("glm45", "<|assistant|>", "\n<think>a</think>\nb", [ReasoningDelta("a"), "b"]),
        ("glm45", "<|assistant|>\n<think></think>", "\nb", ["\nb"]),
        ("deepseek_v3", "<think>", "a</think>b", [ReasoningDelta("a"), "b"]),
        ("deepseek_v3", "</think>", "b", ["b"]),
        ("gemma4", "<|turn>model\n", "<|channel>thought\na\n<channel|>b", [ReasoningDelta("a"), "b"]),
        ("gemma4", "<|channel>thought\n<channel|>", "b", ["b"]),
        ("gemma4", "<|turn>model\n", "<|channel>", ["<|channel>"]),
        ("granite", "", "Here is my thought process: a\n\nHere is my response: b", [ReasoningDelta("a"), "b"]),
        ("granite", "", "Here is my", ["Here is my"]),
        ("kimi_k2", "<|im_middle|>", "a</think>b", [ReasoningDelta("a"), "b"]),
        ("kimi_k2", "<think></think>", "b", ["b"]),
        ("nemotron_v3", "<|im_start|>assistant\n<think>\n", "a\n</think>\n\nb", [ReasoningDelta("a"), "b"]),
        ("nemotron_v3", "<|im_start|>assistant\n<think></think>", "b", ["b"]),
        ("olmo3", "<|im_start|>assistant\n<think>", "a</think>b", [ReasoningDelta("a"), "b"]),
        (
            "cohere_command3",
            "<|CHATBOT_TOKEN|>",
            f"<|START_THINKING|>a<|END_THINKING|>{COHERE}",
            [ReasoningDelta("a"), "b"],
        ),
        ("cohere_command3", "<|START_THINKING|><|END_THINKING|>", COHERE, ["b"]),
        ("cohere_command3", "", "<|START_RESPONSE|>b<|END_RESPON<|c", ["b<|END_RESPON<|c"]),
    ],
)
def test_reasoning_of_families(parser: str, prompt: str, text: str, expected: list[Any]) -> None:
    for parts in ([text], list(text)):
        assert summarise(read(make_answer_parser(None, parser, prompt=prompt), parts)) == expected


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(load_tokenizer(demo_model_dir()))
    yield made
    made.close()


STRICT = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "d"},
        "count": {"type": "integer"},
        "kind": {"enum": ["a", "b c"]},
        "items": {"type": "array", "items": {"$ref": "#/$defs/flag"}, "maxItems": 3},
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    },
    "required": ["text", "count"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": "boolean"}},
}
STRICT_TOOLS = [{"type": "function", "function": {"name": "find_it", "parameters": STRICT, "strict": True}}]
GOOD = [{"text": "a <b>\n", "count": 5, "kind": "b c", "items": [True], "either": None}, {"text": "", "count": -1}]
BAD = [{"text": "a", "count": "x"}, {"text": "a"}, {"text": "a", "count": 1, "kind": "c"}, {"text": "a", "x": 1}]


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_what_a_template_writes_is_in_the_grammar(compiler: GrammarCompiler, name: str, choice: str) -> None:
    tools = read_tools(STRICT_TOOLS, choice)
    assert tools is not None
    params = constrain_calls(tools, PARSERS[name], None, {})
    assert params is not None
    grammar = compiler.compile(params)
    for arguments in GOOD:
        text = write(name, [("find_it", arguments)])
        text = text[text.index(CALL_FORMATS[PARSERS[name]].opener or "") :]
        assert accepts(grammar.new_matcher(), text), text
        if choice == "auto" and CALL_FORMATS[PARSERS[name]].opener is not None:
            assert accepts(grammar.new_matcher(), f"Hm <x>. {text}")
    for arguments in BAD:
        text = write(name, [("find_it", arguments)])
        text = text[text.index(CALL_FORMATS[PARSERS[name]].opener or "") :]
        assert not accepts(grammar.new_matcher(), text), text


@pytest.mark.parametrize(
    ("parser", "schemas"),
    [
        ("qwen3_coder", [{"type": "string", "pattern": "x"}, {"$ref": "#/$defs/flag"}, {}]),
        (
            "pythonic",
            [{"type": "array", "uniqueItems": True}, {"$ref": "#/$defs/x"}, {"not": {}}, False],
        ),
        ("olmo3", [{"type": "boolean", "pattern": "x"}, {"allOf": [{}]}, {"type": "null", "anyOf": [{}]}]),
        ("gemma4", [{"type": "string", "format": "date"}, {"enum": ['<|"|>']}, {"type": "x"}, {"enum": [[1]]}]),
        ("gemma4", [{"type": "object", "properties": {"a:b": {}}}, {"type": "object", "required": ["a"]}]),
    ],
)
def test_a_schema_that_a_format_cannot_hold_is_refused(parser: str, schemas: list[Any]) -> None:
    for schema in schemas:
        parameters = {**STRICT, "properties": {"text": schema}}
        function = {"name": "f", "parameters": parameters, "strict": True}
        tools = read_tools([{"type": "function", "function": function}])
        assert tools is not None
        with pytest.raises(InvalidRequestError, match="format of calls") as caught:
            constrain_calls(tools, parser, None, {})
        assert caught.value.field == "tools[0].function.parameters.properties"
