"""Each family's calls are found as they come, and everything else stays the text that it was."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.server.events import ArgumentsDelta, CallBegun, TextDelta
from jaxserve.server.tools.call_formats import FORCED_ARRAY, HERMES, LLAMA3_JSON, MISTRAL, CallFormat
from jaxserve.server.tools.call_text import CallTextParser
from tests.examples import scale_examples
from tests.server.tools.helpers import CountedText, cut, join_text, read, summarise

FORMATS = {"hermes": HERMES, "llama3_json": LLAMA3_JSON, "mistral": MISTRAL, "forced": FORCED_ARRAY}
ARGUMENTS = '{"a": "x} \\" [\\\\", "b": {"c": [1, {"d": null}]}, "é\\n\\u00e9": "日本 😀 </tool_call> [TOOL_CALLS];"}'
F = ("f", ARGUMENTS)
BOTH = f'{{"name": "f", "arguments": {ARGUMENTS}}}'
LLAMA = f'{{"name": "f", "parameters": {ARGUMENTS}}}'
G = '{"name": "g", "arguments": {}}'
CALL_G = ("g", "{}")

CALLS = {
    "hermes": [
        (f"<tool_call>\n{BOTH}\n</tool_call>", [F]),
        (f"<tool_call>{BOTH}</tool_call>", [F]),
        (f"\n\n<tool_call>\n{BOTH}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>\n", [F, CALL_G]),
        (f"Let me see. \n<tool_call>\n{BOTH}\n</tool_call>", ["Let me see.", F]),
        (f"a <tool_call>{G}</tool_call> b\n<tool_call>{G}</tool_call> c ", ["a", CALL_G, " b", CALL_G, " c "]),
        (f"<tool_call>{G}\n<tool_call>{BOTH}", [CALL_G, F]),
        (f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "f"}}</tool_call>', [F]),
        (f'<tool_call>{{"id": 1.5e3, "x": [{{"name": "no"}}], "name" : "f" , "parameters":{ARGUMENTS}, "y": null }}',
         [F]),
        ('<tool_call>{"name": "g"}</tool_call>', [CALL_G]),
        ('<tool_call>{"name": "g", "arguments": null}</tool_call>', [CALL_G]),
        ('<tool_call>{"arguments": null, "name": "g"}</tool_call>', [CALL_G]),
        ('<tool_call>{"name": "g", "arguments": "{\\"a\\": \\"\\\\u00e9\\"}"}</tool_call>',
         [("g", '{"a": "\\u00e9"}')]),
        ('<tool_call>{"name": "\\u0067", "arguments": {}, "arguments": {"a": 1}, "name": "h"}</tool_call>', [CALL_G]),
        ('<tool_call>{"name": "g", "name": "h", "arguments": {}}</tool_call>', [CALL_G]),
    ],
    "llama3_json": [
        (LLAMA, [F]),
        (f" \n{BOTH}\n", [F]),
        (f"<|python_tag|>{LLAMA}", [F]),
        (f"<|python_tag|> {LLAMA}; {G} ;{LLAMA}", [F, CALL_G, F]),
        (f"{G}\n{G}<|python_tag|>{G};", [CALL_G, CALL_G, CALL_G]),
        (f"I will call it: <|python_tag|>{LLAMA}", ["I will call it:", F]),
        ('<|python_tag|>{"name": "unknown", "parameters": {}}', [("unknown", "{}")]),
        (f"{G} and then?", [CALL_G, " and then?"]),
    ],
    "mistral": [
        (f"[TOOL_CALLS] [{BOTH}]", [F]),
        (f"[TOOL_CALLS][{BOTH}, {G} ,{BOTH}]", [F, CALL_G, F]),
        (f"Hm: [TOOL_CALLS] [{G}] done [1]", ["Hm:", CALL_G, " done [1]"]),
        (f'[TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}, "id": "123456789"}}]', [F]),
        (f"[TOOL_CALLS]{G}", [CALL_G]),
        (f"[TOOL_CALLS]f{ARGUMENTS}", [F]),
        (f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]g[ARGS]{{}}", [F, CALL_G]),
        (f"Hm: [TOOL_CALLS] f[CALL_ID]aB3[ARGS] {ARGUMENTS}\n[TOOL_CALLS]g{{}}\n", ["Hm:", F, CALL_G]),
    ],
    "forced": [
        (f"[{LLAMA}]", [F]),
        (f"[{LLAMA},{G}]", [F, CALL_G]),
    ],
}  # fmt: skip
NO_CALLS = {
    "hermes": [
        "",
        " \n",
        "plain <b>text</b>\n",
        "<tool_call>",
        "a\n<tool_cal",
        "<tool_call>\n{",
        "<tool_call>f(1)</tool_call>",
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a\\x", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": nonsense}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "text"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}, "name": null}</tool_call>',
        '<tool_call>{"name" "f"}',
        '<tool_call>{"name": "f" "arguments": {}}',
        "<tool_call>{,}",
        '<tool_call>{"name": "f", }',
        '<tool_call>{"arguments": {"a": [1, 2',
        '<tool_call>{"name": "f"',
        '<tool_call>{"name": "f", "arguments"',
        '<tool_call>{"name": "f", "arguments": "{',
        "</tool_call>",
    ],
    "llama3_json": [
        '{"name": "Bob", "age": 5}',
        '{"name": "Bob", "parameters": {}}',
        '{"name": "f"}',
        '{"a": {"name": "f", "parameters": {}}}',
        f"See {LLAMA}",
        f"[{LLAMA}]",
        '<|python_tag|>print("hi")',
        '<|python_tag|>{"name": "f"}',
        "<|python_",
        "{}",
    ],
    "mistral": [
        "[TOOL_CALLS]",
        "[TOOL_CALLS] []",
        "[TOOL_CALLS] [5]",
        "[TOOL_CALLS] I think so",
        "[TOOL_CALLS]f",
        "[TOOL_CALLS]f[ARGS]",
        "[TOOL_CALLS]f[ARGS]5",
        "[TOOL_CALLS]f[ARG]{}",
        "[TOOL_CALLS]f[CALL_ID]a{}",
        "[TOOL_CALLS]f[CALL_ID]a[CALL_ID]b[ARGS]{}",
        "[TOOL_CALL]f{}",
        f"[{BOTH}]",
    ],
    "forced": ["5", "[", "[]", "[5]", "[TOOL_CALLS]"],
}


def make(name: str) -> CallTextParser:
    return CallTextParser(FORMATS[name], {"f", "g"})


def list_cases(cases: dict[str, list[Any]]) -> list[Any]:
    return [(name, case) for name, group in cases.items() for case in group]


@pytest.mark.parametrize(("name", "case"), list_cases(CALLS))
def test_calls(name: str, case: tuple[str, list[Any]]) -> None:
    text, expected = case
    assert summarise(read(make(name), [text])) == expected
    assert summarise(read(make(name), text)) == expected, "character by character"
    for item in expected:
        if isinstance(item, tuple):
            assert isinstance(json.loads(item[1]), dict)


@pytest.mark.parametrize(("name", "text"), list_cases(NO_CALLS))
def test_what_is_no_call_stays_as_it_is(name: str, text: str) -> None:
    expected = [text] if text else []
    assert summarise(read(make(name), [text])) == expected
    assert summarise(read(make(name), text)) == expected, "character by character"


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=scale_examples(200), deadline=None)
@given(data=st.data())
def test_any_cut_gives_the_same(name: str, data: st.DataObject) -> None:
    texts = [*(text for text, _ in CALLS[name]), *NO_CALLS[name], "x", "\n"]
    text = "".join(data.draw(st.lists(st.sampled_from(texts), max_size=3)))
    text = text[: data.draw(st.integers(0, len(text)))]
    parts = cut(text, data.draw(st.lists(st.integers(0, 10_000), max_size=12)))
    assert summarise(read(make(name), parts)) == summarise(read(make(name), [text]))


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<", "[", "]", "{", "}",
    '"', "\\", ",", ":", ";", " ", "\n", "f",
    '"name"', '"arguments"', '"f"', "null", "1", "é", "\u2028", '"name": "f", ',
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=scale_examples(300), deadline=None)
@given(data=st.data())
def test_no_text_is_lost_or_doubled(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=30)))
    parts = cut(text, data.draw(st.lists(st.integers(0, 10_000), max_size=8)))
    events = read(make(name), parts)
    assert summarise(events) == summarise(read(make(name), [text]))
    if not any(isinstance(event, CallBegun) for event in events):
        assert join_text(events) == text
    else:
        left = iter(text)  # what comes out stands in the text, in this order and at most once
        shown = [event.text for event in events if isinstance(event, TextDelta | ArgumentsDelta) and event.text != "{}"]
        assert all(character in left for character in "".join(shown))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
WORDS = st.text(st.characters(exclude_characters="<[{", codec="utf-8")).map(str.strip).filter(bool)


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
@settings(max_examples=scale_examples(100), deadline=None)
@given(data=st.data())
def test_whole_answers(name: str, data: st.DataObject) -> None:
    content = data.draw(WORDS | st.just(""))
    objects = data.draw(st.lists(st.dictionaries(st.text(), JSON), min_size=1, max_size=3))
    is_ascii, indent = data.draw(st.booleans()), data.draw(st.sampled_from([None, 1]))
    arguments = [json.dumps(value, ensure_ascii=is_ascii, indent=indent) for value in objects]
    calls = [f'{{"name": "f", "arguments": {text}}}' for text in arguments]
    text = (
        content
        + {
            "hermes": "\n".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in calls),
            "llama3_json": ("<|python_tag|>" if content else "") + "; ".join(calls),
            "mistral": f"[TOOL_CALLS] [{', '.join(calls)}]",
        }[name]
    )
    parts = cut(text, data.draw(st.lists(st.integers(0, 10_000), max_size=12)))
    expected = [content] if content else []
    assert summarise(read(make(name), parts)) == [*expected, *(("f", text) for text in arguments)]


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "forced"])
def test_arguments_come_as_they_grow(name: str) -> None:
    text = next(text for text, expected in CALLS[name] if expected == [F])
    parser, seen, begin = make(name), "", text.index(ARGUMENTS)
    for at, character in enumerate(text):
        seen += "".join(event.text for event in parser.push(character) if isinstance(event, ArgumentsDelta))
        assert seen == ARGUMENTS[: max(0, at + 1 - begin)]


def test_content_comes_as_it_grows() -> None:
    parser = make("hermes")
    assert [parser.push(part) for part in ("Hel", "lo <", "b", "> \n", "x")] == [
        [TextDelta("Hel")], [TextDelta("lo")], [TextDelta(" <b")], [TextDelta(">")], [TextDelta(" \nx")],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", 'So <tool_call>{"name": "f", "arguments": {"a": "b', ["So", ("f", '{"a": "b')]),
        ("hermes", f"<tool_call>{G}\n</tool", [CALL_G]),
        ("hermes", f"<tool_call>{G[:-1]}", [CALL_G]),
        ("hermes", f'<tool_call>{G}</tool_call><tool_call>{{"name": "f"', [CALL_G, '<tool_call>{"name": "f"']),
        ("llama3_json", f"{G}; ", [CALL_G]),
        ("llama3_json", '{"name": "f", "parameters": {', [("f", "{")]),
        ("mistral", f"[TOOL_CALLS] [{G},", [CALL_G]),
        ("mistral", '[TOOL_CALLS]f{"a"', [("f", '{"a"')]),
    ],
)
def test_text_that_was_cut_off(name: str, text: str, expected: list[Any]) -> None:
    assert summarise(read(make(name), [text])) == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", f"<tool_call>{G[:-1]} oops</tool_call>", [CALL_G, "oops</tool_call>"]),
        ("hermes", f"<tool_call>oops<tool_call>{G}</tool_call>", ["<tool_call>oops", CALL_G]),
        ("hermes", f'<tool_call>{{"name": <tool_call>{G}</tool_call>', ['<tool_call>{"name":', CALL_G]),
        ("hermes", f"<tool_call>{G} oops", [CALL_G, " oops"]),
        ("mistral", f"[TOOL_CALLS] [{G}, oops]", [CALL_G, ", oops]"]),
        ("mistral", "[TOOL_CALLS]g{}] x", [CALL_G, "] x"]),
        ("mistral", f"[TOOL_CALLS] [{G[:-1]} ] x", [CALL_G, "] x"]),
        ("llama3_json", f"{G}; oops", [CALL_G, "; oops"]),
    ],
)
def test_what_follows_a_broken_mark_is_text(name: str, text: str, expected: list[Any]) -> None:
    assert summarise(read(make(name), [text])) == expected
    assert summarise(read(make(name), text)) == expected


def test_ids() -> None:
    def list_ids(form: CallFormat, text: str) -> list[str]:
        return [event.call_id for event in read(CallTextParser(form), [text]) if isinstance(event, CallBegun)]

    one, two = list_ids(HERMES, f"<tool_call>{G}</tool_call>" * 2)
    assert one != two and one.startswith("call_") and len(one) == 29 and int(one[5:], 16) >= 0
    one, two = list_ids(MISTRAL, f"[TOOL_CALLS] [{G},{G}]")
    assert one != two and len(one) == 9 and one.isalnum() and one.isascii()


HOSTILE = {
    "hermes": ["<tool_call>", "<tool_call>{", '<tool_call>{"a":"', '<tool_call>{"x":[', f"<tool_call>{G}", "\n", "<",
               '<tool_call>{"name":"f","arguments":{', '<tool_call>{"arguments":{},', '"arguments":"{', "{", "x "],
    "llama3_json": ["<|python_tag|>", "<|python_tag|>{", "{", ";", G, '{"x":[', f"{G};", "<"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][", "[", "f", "[TOOL_CALLS]f[CALL_ID]", "[TOOL_CALLS]f{}",
                f"[TOOL_CALLS][{G},"],
    "forced": ["[", "[{", f"[{G},", f"{G},"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "unit"), list_cases(HOSTILE))
@pytest.mark.parametrize("is_cut", [False, True])
def test_work_grows_with_the_text(name: str, unit: str, is_cut: bool) -> None:
    """Counts looks at characters: twice the text may cost twice the looks and no more."""

    def count(num_units: int, begin: str = "") -> int:
        parser, text = make(name), begin + unit * num_units
        CountedText.num_seen = 0
        for part in [text[at : at + 7] for at in range(0, len(text), 7)] if is_cut else [text]:
            parser.push(CountedText(part))
        parser.finish()
        return CountedText.num_seen

    for begin in (
        "",
        '<tool_call>{"arguments": {"a": ',
        '[TOOL_CALLS][{"arguments": {"a": "',
        '{"name": "f", "parameters": {',
    ):
        assert 0 < count(2000, begin) <= 2.2 * count(1000, begin)
