"""Conversations for chat templates: usual ones, and random ones in which anything of JSON may stand."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.tokenizers.test_chat import call, calling

_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": " What is a <b> & a KV cache? "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt keeps keys."},
    {"role": "user", "content": "\u00e9\u4e2d\U0001f600"},
]
_USUAL = [{"role": "system", "content": "Be brief."}, *_TURNS]
_WITH_TOOLS = [
    _TURNS[0],
    *calling(call({"city": "Rome", "days": [1, None, 2.5]}, id="call_0123")),
    {"role": "tool", "tool_call_id": "call_0123", "content": "5", "name": "f"},
    {"role": "assistant", "content": "so", "reasoning_content": "hm"},
    _TURNS[2],
]
CONVERSATIONS = (_USUAL, _TURNS, _WITH_TOOLS)

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
tool_lists = st.none() | st.lists(
    st.fixed_dictionaries({"type": st.just("function"),
                           "function": st.fixed_dictionaries({"name": texts, "parameters": schemas},
                                                             optional={"description": texts})}) | values,
    max_size=2,
)  # fmt: skip
