"""Bodies of the Responses API that cannot be served."""

from __future__ import annotations

from typing import Any

from tests.server.refusals.refusal import HELLO, Row

PICTURE = {"type": "input_image", "image_url": "http://a.example"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "1"}
CUSTOM_CALL = {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "a"}
F: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
G: dict[str, Any] = {"type": "custom", "name": "g"}
WEB = {"type": "web_search"}


def grammar(syntax: Any, definition: Any) -> dict[str, Any]:
    return {**G, "format": {"type": "grammar", "syntax": syntax, "definition": definition}}


def space(*tools: Any, **more: Any) -> dict[str, Any]:
    return {"type": "namespace", "name": "n", "description": "About n.", "tools": list(tools), **more}


def allow(*tools: Any, mode: Any = "auto", **more: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools), **more}


_MESSAGES: list[Row] = [
    *(({"input": [{"type": kind, "role": "user"}]}, "input[0].type") for kind in ("x", 5, ["a"], {}, None)),
    *(({"input": [{"type": kind}]}, "input[0].type") for kind in ("item_reference", "web_search_call", "compaction")),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"type": "reasoning", "encrypted_content": "gAAAA"}]}, "input[0].encrypted_content"),
    ({"input": [{"type": "reasoning", "encrypted_content": 5}]}, "input[0].encrypted_content"),
    ({"input": [{"type": "reasoning", "summary": [{"type": "summary_text"}]}]}, "input[0].summary[0].text"),
]
_CALLS: list[Row] = [
    ({"input": [RESULT]}, "input[0].call_id"),
    ({"input": [CALL, RESULT, RESULT]}, "input[2].call_id"),
    ({"input": [CALL, {**RESULT, "call_id": "d"}]}, "input[1].call_id"),
    ({"input": [CUSTOM_CALL, RESULT]}, "input[1].call_id"),
    ({"input": [CALL, {**RESULT, "type": "custom_tool_call_output"}]}, "input[1].call_id"),
    ({"input": [CALL]}, "input[0].call_id"),
    ({"input": [*HELLO, CUSTOM_CALL]}, "input[1].call_id"),
    ({"input": [CALL, *HELLO, RESULT]}, "input[0].call_id"),
    ({"input": [CALL, {**CALL, "call_id": "d"}, RESULT, {**CALL, "call_id": "e"}]}, "input[1].call_id"),
    ({"input": [CALL, CALL, RESULT]}, "input[1].call_id"),
    ({"input": [CALL, RESULT, CALL, RESULT]}, "input[2].call_id"),
    *(({"input": [{**CALL, "call_id": value}, RESULT]}, "input[0].call_id") for value in (None, 5, "")),
    *(({"input": [{**CALL, "name": value}, RESULT]}, "input[0].name") for value in (None, 5, "")),
    *(({"input": [{**CALL, "arguments": value}, RESULT]}, "input[0].arguments") for value in (None, 5, {})),
    *(({"input": [{**CUSTOM_CALL, "input": value}]}, "input[0].input") for value in (None, 5, {})),
    *(({"input": [CALL, {**RESULT, "output": value}]}, "input[1].output") for value in (None, 5, {})),
    ({"input": [CALL, {**RESULT, "output": [PICTURE]}]}, "input[1].output[0]"),
    ({"input": [{**CALL, "namespace": 5}, RESULT]}, "input[0].namespace"),
    ({"input": [{**CALL, "caller": {"type": "program", "caller_id": "p"}}, RESULT]}, "input[0]"),
    ({"input": [{**CALL, "async": True}, RESULT]}, "input[0]"),
    ({"input": [{**CUSTOM_CALL, "arguments": "{}"}]}, "input[0]"),
]
_TOOLS: list[Row] = [
    ({"tools": [{**F, "strict": 5}]}, "tools[0].strict"),
    *(({"tools": [{"type": kind, "name": "f"}]}, "tools[0].type") for kind in ("x", 5, None, {}, "local_shell")),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0]"),
    *(({"tools": [{**F, "name": value}]}, "tools[0].name") for value in (None, 5, "", "a b", "a" * 65)),
    ({"tools": [{**F, "description": 5}]}, "tools[0].description"),
    ({"tools": [{**F, "parameters": {"type": "array"}}]}, "tools[0].parameters.type"),
    ({"tools": [{**F, "defer_loading": True}]}, "tools[0]"),
    ({"tools": [{**F, "allowed_callers": ["programmatic"]}]}, "tools[0]"),
    ({"tools": [{**F, "output_schema": {}}]}, "tools[0]"),
    ({"tools": [F, space({**F, "name": "h"}), F]}, "tools[2].name"),
    ({"tools": [space(F), {**F, "name": "n__f"}]}, "tools[1].name"),
    ({"tools": [{**F, "name": f"f{at}"} for at in range(129)]}, "tools"),
    ({"tools": [space(*({**F, "name": f"f{at}"} for at in range(129)))]}, "tools"),
    ({"tools": [space(space(F))]}, "tools[0].tools[0].type"),
    ({"tools": [space(WEB)]}, "tools[0].tools[0].type"),
    ({"tools": [space(5)]}, "tools[0].tools[0]"),
    ({"tools": [space()]}, "tools[0].tools"),
    ({"tools": [space(F, name="")]}, "tools[0].name"),
    ({"tools": [space(F, description=5)]}, "tools[0].description"),
    ({"tools": [space({**F, "name": "a" * 64})]}, "tools[0].tools[0].name"),
    ({"tools": [{**G, "parameters": {}}]}, "tools[0]"),
    *(({"tools": [{**G, "format": value}]}, "tools[0].format") for value in (5, {}, {"type": "json"})),
    ({"tools": [grammar("gbnf", "a")]}, "tools[0].format.syntax"),
    *(({"tools": [grammar("regex", value)]}, "tools[0].format.definition") for value in (None, 5, "a" * 20_000, "a\\")),
    ({"tools": [grammar("lark", "a" * 70_000)]}, "tools[0].format.definition"),
    ({"tools": [grammar("lark", 'start: "a"')]}, "tools[0].format.syntax"),
    ({"tools": [grammar("lark", 'start: "a"')], "tool_choice": "required"}, "tools[0].format.syntax"),
    *(
        ({"tools": [F, grammar(*form)], "tool_choice": {"type": "custom", "name": "g"}}, "tools[1].format.definition")
        for form in (("lark", "start: nowhere"), ("regex", "(a"))
    ),
    (
        {"tools": [{**F, "parameters": {"type": "object", "properties": {"a": {"type": "nope"}}}}]}
        | {"tool_choice": {"type": "function", "name": "f"}},
        "tools[0].parameters",
    ),
    ({"tools": [{**F, "parameters": {"properties": {"a": {"type": "nope"}}}}], "tool_choice": "required"}, "tools"),
    ({"tools": [WEB]}, "tools[0].type"),
    ({"tools": [WEB], "tool_choice": "none"}, "tools[0].type"),
    ({"tools": [F, {"type": "mcp"}], "tool_choice": "required"}, "tools[1].type"),
]
_CHOICES: list[Row] = [
    *(({"tool_choice": value}, "tool_choice") for value in ("required", "x")),
    *(({"tools": [F], "tool_choice": value}, "tool_choice") for value in ("x", "any", "")),
    *(({"tools": [F], "tool_choice": {"type": kind}}, "tool_choice.type") for kind in ("web_search", "mcp", "x", 5)),
    *(
        ({"tools": [F, G], "tool_choice": {"type": kind, "name": name}}, "tool_choice.name")
        for kind, name in (("function", "g"), ("custom", "f"), ("function", "x"), ("function", None))
    ),
    ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": [space(F)], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
    ({"tools": [F], "tool_choice": allow({"type": "function", "name": "f"}, mode="none")}, "tool_choice.mode"),
    ({"tools": [F], "tool_choice": allow()}, "tool_choice.tools"),
    ({"tools": [F], "tool_choice": allow(*([WEB] * 129))}, "tool_choice.tools"),
    ({"tools": [F], "tool_choice": allow(5)}, "tool_choice.tools[0]"),
    ({"tools": [F], "tool_choice": allow({"type": "function", "name": "x"})}, "tool_choice.tools[0].name"),
    ({"tools": [F], "tool_choice": allow({"type": "namespace", "name": "x"})}, "tool_choice.tools[0].name"),
    ({"tools": [F], "tool_choice": allow({"type": "x"})}, "tool_choice.tools[0].type"),
    ({"tools": [F, WEB], "tool_choice": allow(WEB)}, "tool_choice.tools[0].type"),
    ({"tools": [F, WEB], "tool_choice": allow(WEB, mode="required")}, "tool_choice.tools[0].type"),
    ({"tools": [F], "tool_choice": allow({"type": "function", "name": "f"}, more=1)}, "tool_choice"),
    (
        {"tools": [F], "tool_choice": {"type": "function", "name": "f"}, "text": {"format": {"type": "json_object"}}},
        "text.format",
    ),
]
RESPONSES: list[Row] = [
    *_MESSAGES,
    *_CALLS,
    *_TOOLS,
    *_CHOICES,
    ({"input": []}, "input"),
    *(({"input": [value]}, "input[0]") for value in (5, "a", None, [])),
    ({"input": [{}]}, "input[0].role"),
    ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
    ({"input": [{"type": "reasoning", "content": 5}]}, "input[0].content"),
    ({"input": [{"type": "reasoning", "content": [{"type": "reasoning_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [5]}]}, "input[0].content[0]"),
    ({"input": [{"role": "assistant", "content": [{"type": "refusal"}]}]}, "input[0].content[0].refusal"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input[0].content[0]"),
    ({"input": [*HELLO, {"role": "user", "content": 5}], "instructions": "Be brief."}, "input[1].content"),
    *(({"max_output_tokens": value}, "max_output_tokens") for value in (0, -1, 2**31, 2**70)),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nope"}}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
    *(
        ({"text": {"format": {"type": kind, name: value}}}, f"text.format.{name}")
        for kind in ("text", "json_object")
        for name, value in {"schema": {"default": float("nan")}, "name": "a", "strict": True}.items()
    ),
    ({"text": {"color": 1}}, "text.color", "unknown_parameter"),
    ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"chat_template_kwargs": {"reasoning_effort": "high"}}, "chat_template_kwargs.reasoning_effort"),
    ({"truncation": "auto"}, "truncation"),
    ({"chat_template_kwargs": {"request_id": "a"}}, "chat_template_kwargs.request_id"),
    ({"chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs.thinking"),
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"max_tool_calls": 3}, "max_tool_calls"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": ["message.output_text.logprobs"]}, "include[0]"),
    ({"include": ["reasoning.encrypted_content", "x"]}, "include[1]"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"reasoning": {"context": "current_turn"}}, "reasoning.context"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ({"client_metadata": 5}, "client_metadata"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
    ({"n": 2}, "n"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"max_tokens": 2}, "max_tokens", "unknown_parameter"),
    ({"input": [{"role": "user", "content": [PICTURE]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{**PICTURE, "image_url": "A" * 400_000}]}]}, "input[0].content[0]"),
    ({"instructions": "Be brief.", "input": [{"role": "robot", "content": "hi"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": "hi", "color": "red"}]}, "input[0]"),
]
