"""Bodies of the Responses API that cannot be served."""

from __future__ import annotations

from tests.server.refusals.refusal import HELLO, Row

PICTURE = {"type": "input_image", "image_url": "http://a.example"}
RESPONSES: list[Row] = [
    ({"input": []}, "input"),
    *(({"input": [value]}, "input[0]") for value in (5, "a", None, [])),
    ({"input": [{}]}, "input[0].role"),
    ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
    *(({"input": [{"type": kind, "role": "user"}]}, "input[0].type") for kind in ("x", 5, ["a"], {}, None)),
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
    ({"tool_choice": "required"}, "tool_choice"),
    ({"truncation": "auto"}, "truncation"),
    ({"chat_template_kwargs": {"request_id": "a"}}, "chat_template_kwargs.request_id"),
    ({"chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs.thinking"),
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"max_tool_calls": 3}, "max_tool_calls"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
    ({"n": 2}, "n"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"max_tokens": 2}, "max_tokens", "unknown_parameter"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "1"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [PICTURE]}]}, "input[0].content[0]"),
    ({"instructions": "Be brief.", "input": [{"role": "robot", "content": "hi"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": "hi", "color": "red"}]}, "input[0]"),
]
