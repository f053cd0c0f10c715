"""Values of sampling, prompts and tokens that cannot be served."""

from __future__ import annotations

from typing import Any

from tests.server.refusals.chats import WIDE, make_tool
from tests.server.refusals.forms import TAGS
from tests.server.refusals.refusal import HELLO, Row

FOREIGN: dict[str, Any] = {  # of other servers, at values that would change the answer
    "guided_json": {"type": "object"},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "start: A",
    "guided_decoding_backend": "outlines",
    "no_stop_trim": True,
    "return_hidden_states": True,
    "separate_reasoning": False,
    "stream_reasoning": False,
    "use_beam_search": True,
}
SAMPLING: list[Row] = [
    *(({"temperature": value}, "temperature") for value in (-0.001, 100.5, -1e308, 1e308, 10**400)),
    *(({"top_p": value}, "top_p") for value in (-1, 1.0001, 10**30)),
    *(({"min_p": value}, "min_p") for value in (-0.1, 1.1)),
    *(({"top_k": value}, "top_k") for value in (-2, 2**31, 2**70)),
    *(({"presence_penalty": value}, "presence_penalty") for value in (-2.1, 2.1)),
    *(({"frequency_penalty": value}, "frequency_penalty") for value in (-2.1, 2.1)),
    *(({"repetition_penalty": value}, "repetition_penalty") for value in (0, -1, 2.1)),
    *(({"seed": value}, "seed") for value in (-(2**63) - 1, 2**63, 2**200)),
    *(({name: value}, name) for name, value in FOREIGN.items()),
    *(({"min_tokens": value}, "min_tokens") for value in (-1, 4, 2**40)),
    *(({"stop": value}, "stop") for value in ("", [""], ["a"] * 17, ["a", ""])),
    *(({"stop": value}, "stop[1]") for value in (["a", None], ["a", 5])),
    *(
        ({"logit_bias": {key: 1}}, "logit_bias")
        for key in ("-1", "1536", "99999999999", "a", "", "1.5", "\u0661", "Q" * 5000)
    ),
    *(({"logit_bias": {"5": value}}, "logit_bias") for value in (101, -100.5)),
    ({"logit_bias": {"\n": None}}, "logit_bias.\\n"),
    ({"logit_bias": {str(number): 1 for number in range(301)}}, "logit_bias"),
    *(({"stop_token_ids": value}, "stop_token_ids") for value in ([-1], [1536], [2**70], [5] * 257)),
    *(({"allowed_token_ids": value}, "allowed_token_ids") for value in ([], [-1], [1536], [2**70])),
    *(({"bad_words": value}, "bad_words") for value in ([""], [" "], ["a"] * 33, ["Q" * 500])),
    *(({"priority": value}, "priority") for value in (2**31, -1, -(2**31), -(2**31) - 1, 2**200)),
    *(({"timeout": value}, "timeout") for value in (0, -1)),
    ({"cache_salt": "Q" * 257}, "cache_salt"),
    ({"user": "Q" * 513}, "user"),
    *(({"truncate_prompt_tokens": value}, "truncate_prompt_tokens") for value in (0, -2, 2**40)),
    ({"extra_args": {"a": 1}}, "extra_args"),
    *(({"service_tier": value}, "service_tier") for value in ("fast", "scale", "Flex", "", 1, ["flex"])),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": 5}}, "structured_outputs.structural_tag"),
    ({"structural_tag": {"format": {"type": "any_text"}}}, "structural_tag"),
    ({"structured_outputs": {"choice": ["a"], "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
]
COUNTS: list[Row] = [
    *(({"n": value}, "n") for value in (0, -1, 33, 129, 10**6, 2**63)),
    *(({"prompt_logprobs": value}, "prompt_logprobs") for value in (-1, 21, 10**6, 2**40)),
    ({"stream_options": {}}, "stream_options"),
    ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"stream": True, "stream_options": {"color": 1}}, "stream_options.color", "unknown_parameter"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "Q" * 65, "schema": {}}}},
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nope"}}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
    *(
        ({"response_format": {"type": kind, "json_schema": {"name": "a", "schema": {}}}}, "response_format.json_schema")
        for kind in ("text", "json_object")
    ),
    *(
        ({"response_format": {"type": kind, "triggers": ["<f"]}}, "response_format.triggers")
        for kind in ("text", "json_object", "json_schema")
    ),
    *(({"response_format": {"type": "structural_tag", **tag}}, f"response_format{name}") for tag, name in TAGS),
]
TEXTS: list[Row] = [
    *(({"prompt": value}, "prompt") for value in ([], [[]], [[], [5]], ["a"] * 2049)),
    *(({"prompt": value}, "prompt") for value in ([-1], [1536], [2**40], [2**70], [[5], [1536]])),
    *(({"prompt": value}, "prompt[0]") for value in ([True], [1.5], [None], [{}], [1, "a"])),
    ({"prompt": ["a", [1]]}, "prompt[1]"),
    *(({"max_tokens": value}, "max_tokens") for value in (-1, 0, 2**31, 2**63, 2**200)),
    *(({"logprobs": value}, "logprobs") for value in (-2, -1, 21, 10**6, 2**63)),
    *(({"best_of": value}, "best_of") for value in (0, 3, 10**9)),
    ({"suffix": "x"}, "suffix"),
    ({"echo": True, "logprobs": 10**6}, "logprobs"),
]
EMBEDDINGS: list[Row] = [
    *(({"input": value}, "input") for value in ("", [], [""], [[]], ["a", ""], ["a"] * 2049)),
    *(({"input": value}, "input") for value in ([-1], [1536], [2**70], [[1], [1536]])),
    ({"input": ["a", 5]}, "input[1]"),
    *(({"dimensions": value}, "dimensions") for value in (0, -1, 257, 10**6, 2**70)),
    ({"prompt_name": "query"}, "prompt_name"),
    ({"encoding_format": "hex"}, "encoding_format"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"priority": 2**40}, "priority"),
    ({"n": 2}, "n", "unknown_parameter"),
    ({"stream": True}, "stream", "unknown_parameter"),
]
LARGE_IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "A" * 400_000}}]}]
TOKENS: dict[str, list[Row]] = {
    "/tokenize": [
        ({"messages": HELLO}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": None, "messages": []}, "messages"),
        ({"prompt": None, "messages": [{"role": "robot"}]}, "messages[0].role"),
        ({"prompt": None, "messages": LARGE_IMAGE}, "messages[0].content[0]"),
        ({"prompt": None, "messages": HELLO, "tools": ["x"]}, "tools[0]"),
        ({"prompt": None, "messages": HELLO, "tools": [{"type": "function"}]}, "tools[0].function"),
        *(
            (
                {"prompt": None, "messages": HELLO, "tools": [make_tool(name="f", parameters=schema)]},
                "messages",
                "context_length_exceeded",
            )
            for schema in WIDE
        ),
        ({"prompt": None, "messages": HELLO, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
        ({"prompt": "Q" * 200_000}, "prompt", "context_length_exceeded"),
        ({"prompt": None, "messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ({"tools": []}, "tools"),
        ({"chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"add_generation_prompt": True}, "add_generation_prompt"),
    ],
    "/detokenize": [
        *(({"tokens": value}, "tokens") for value in ([-1], [1536], [2**40], [2**70], [5] * 1025)),
        *(({"tokens": value}, "tokens[0]") for value in (["a"], [1.5], [True], [None], [[5]])),
    ],
}
