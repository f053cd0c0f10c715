"""Conversations, tools and their forms that cannot be served."""

from __future__ import annotations

from typing import Any

from tests.server.refusals.refusal import Row

WIDE = ({"properties": {"Q" * 200_000: {}}}, {"enum": [1] * 50_000}, {"enum": [[]] * 50_000})  # without a long text


def _message(role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, **fields}]}


def _part(**part: Any) -> dict[str, Any]:
    return _message(content=[part])


def _call(**function: Any) -> dict[str, Any]:
    return _message("assistant", content="", tool_calls=[{"id": "c", "type": "function", "function": function}])


def make_tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


def _forced(*tools: dict[str, Any], choice: Any = "required", **fields: Any) -> dict[str, Any]:
    return {"tools": list(tools), "tool_choice": choice, **fields}


NAMED = {"type": "function", "function": {"name": "g"}}
CALLS = "messages[0].tool_calls[0]"
CHATS: list[Row] = [
    ({"messages": []}, "messages"),
    *(({"messages": [value]}, "messages[0]") for value in (None, 5, "hi", [])),
    *(
        ({"messages": [{"role": role, "content": "a"}]}, "messages[0].role")
        for role in (None, "", "robot", 5, ["user"])
    ),
    *((_message(content=value), "messages[0].content") for value in (None, 5, {}, True)),
    (_message(), "messages[0].content"),
    (_part(type="image_url", image_url={"url": "http://127.0.0.1:1/x.png"}), "messages[0].content[0]"),
    (_part(type="image_url", image_url={"url": "file:///etc/passwd"}), "messages[0].content[0]"),
    # Its length is not what is wrong with it.
    (_part(type="image_url", image_url={"url": f"data:image/png;base64,{'A' * 400_000}"}), "messages[0].content[0]"),
    (_part(type="input_audio", input_audio={"data": "Q" * 4000, "format": "wav"}), "messages[0].content[0]"),
    (_part(type="video_url", video_url={"url": "data:video/mp4;base64,AAAA"}), "messages[0].content[0]"),
    (_part(type="file", file={"file_id": "../../x"}), "messages[0].content[0]"),
    (_part(type=["text"], text="a"), "messages[0].content[0]"),
    (_part(type="text"), "messages[0].content[0].text"),
    (_part(type="text", text=5), "messages[0].content[0].text"),
    (_message(content=["a"]), "messages[0].content[0]"),
    (_message(content="a", name=5), "messages[0].name"),
    (_message(content="a", color="red"), "messages[0]"),
    (_message(content="a", **{"Q" * 5000: 1}), "messages[0]"),
    (_message("tool", content="a", tool_call_id="c"), "messages"),  # the demo model's template knows no tools
    (_message("assistant", content="a", tool_calls="x"), "messages[0].tool_calls"),
    (_message("assistant", content="a", tool_calls=[{}]), CALLS),
    (_message("assistant", content="a", tool_calls=[{"type": "code", "function": {"name": "f"}}]), f"{CALLS}.type"),
    (_message("assistant", content="a", function_call={"name": "f", "arguments": "{}"}), "messages[0]"),
    (_call(name=""), f"{CALLS}.function.name"),
    (_call(name=5), f"{CALLS}.function.name"),
    *((_call(name="f", arguments=text), f"{CALLS}.function.arguments") for text in (5, [])),
    *(({"max_tokens": value}, "max_tokens") for value in (0, -1, 2**31)),
    *(({"max_tokens": None, "max_completion_tokens": value}, "max_completion_tokens") for value in (0, -1, 2**63)),
    ({"max_tokens": 3, "max_completion_tokens": 5}, "max_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    *(({"logprobs": True, "top_logprobs": value}, "top_logprobs") for value in (-2, -1, 21, 10**6, 2**63)),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    (_message("assistant", content="a", refusal="no"), "messages[0]"),
    (_message("assistant", content=[{"type": "refusal", "refusal": 5}]), "messages[0].content[0].refusal"),
    (_forced({}), "tools[0].type"),
    (_forced({"type": "web_search"}), "tools[0].type"),
    (_forced({"type": "function"}), "tools[0].function"),
    (_forced(make_tool()), "tools[0].function.name"),
    *((_forced(make_tool(name=name)), "tools[0].function.name") for name in ("", "a b", "Q" * 65, "é", 5, None)),
    (_forced(make_tool(name="f"), make_tool(name="f")), "tools[1].function.name"),
    (_forced(*(make_tool(name=f"f{number}") for number in range(129))), "tools"),
    (_forced(make_tool(name="f", color="red")), "tools[0].function"),
    (_forced(make_tool(name="f", description=5)), "tools[0].function.description"),
    (_forced(make_tool(name="f", parameters=[])), "tools[0].function.parameters"),
    (_forced(make_tool(name="f", parameters={"type": "array"})), "tools[0].function.parameters.type"),
    (_forced(make_tool(name="f", parameters={"properties": {"a": {"type": "nope"}}})), "tools"),
    (_forced(make_tool(name="f", parameters={"properties": {"a": {"$ref": "http://127.0.0.1:1/x"}}})), "tools"),
    (_forced(make_tool(name="f"), choice="maybe"), "tool_choice"),
    (_forced(make_tool(name="f"), choice=NAMED), "tool_choice.function.name"),
    (_forced(make_tool(name="f"), choice={"type": "auto"}), "tool_choice.type"),
    (_forced(make_tool(name="f"), response_format={"type": "json_object"}), "response_format"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"store": True}, "store"),
    ({"reasoning_effort": "Q" * 300}, "reasoning_effort"),
    ({"echo": True}, "echo"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {"a": "Q" * 513}}, "metadata.a"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template": "{% for i in range(10**9) %}{% endfor %}"}, "chat_template"),
    *(
        ({"chat_template_kwargs": {name: 1}}, f"chat_template_kwargs.{name}")
        for name in (
            "messages",
            "tools",
            "params",
            "self",
            "request_id",
            "cache_salt",
            "priority",
            "tenant",
            "deadline",
            "",
        )
    ),
    *(
        ({"chat_template_kwargs": {"thinking": value}}, "chat_template_kwargs.thinking")
        for value in ("yes", 1, None, [], {"a": [[]]}, True)  # the demo's template does not read it
    ),
    ({"chat_template_kwargs": {"documents": [{"text": "x"}]}}, "chat_template_kwargs.documents"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"reasoning_effort": "medium", "chat_template_kwargs": {"reasoning_effort": "low"}}, "reasoning_effort"),
    ({"continue_final_message": True}, "messages[0].role"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    *(({"tools": [make_tool(name="f", parameters=schema)]}, "messages", "context_length_exceeded") for schema in WIDE),
]
