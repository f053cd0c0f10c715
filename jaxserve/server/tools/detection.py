"""Detects the formats of calls and of reasoning by the texts of a chat template."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.server.tools.answer_parser import HARMONY_REASONING, HARMONY_TOOLS
from jaxserve.server.tools.marked_calls import DEEPSEEK, KIMI

_CHANNEL = "<|channel|>"
# The texts that show a format; the first format counts of which a template has all.
_CALLS = (
    ((_CHANNEL,), HARMONY_TOOLS),
    (("[TOOL_CALLS]",), "mistral"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    ((DEEPSEEK.first, "```json"), "deepseek_v3"),
    ((DEEPSEEK.first,), "deepseek_v31"),
    ((KIMI.first,), "kimi_k2"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("functools[",), "phi4_mini_json"),
    (("<|tool_call>",), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("<function_calls>",), "olmo3"),
    (("<|tool_list_start|>",), "lfm2"),
    (("<|tool_call_start|>[",), "lfm2"),
    (("List of tools: [", "keep_past_thinking"), "lfm2"),  # LFM2.5, whose template shows no call
    (("<TOOLCALL>[",), "nemotron_json"),
    (("[func_name1(",), "pythonic"),
    (("<|python_tag|>", "parameters"), "llama3_json"),
    (("ipython", "parameters"), "llama3_json"),
)
_REASONING = (
    ((_CHANNEL,), HARMONY_REASONING),
    (("<|channel>", "<channel|>"), "gemma4"),
    (("<|START_THINKING|>",), "cohere_command3"),
    (("[THINK]",), "mistral"),
    (("Here is my thought process:", "Here is my response:"), "granite"),
    (("<think>", "<minimax:tool_call>"), "minimax_m2"),
    (("<think>", "<arg_key>"), "glm45"),
    (("<think>", KIMI.first), "kimi_k2"),
    (("<think>", "<functions>"), "olmo3"),
    (("<think>", DEEPSEEK.first, "thinking"), "deepseek_v3"),
    (("<think>", DEEPSEEK.first), "deepseek_r1"),
    (("<think>",), "qwen3"),
)


def guess_tool_parser(chat_template: str | None) -> str | None:
    """Returns the parser for the calls in a chat template; None if it has none, or an unknown format."""
    return _find(_CALLS, chat_template)


def guess_reasoning_parser(chat_template: str | None) -> str | None:
    """Returns the parser for the reasoning in a chat template; None if it has none."""
    return _find(_REASONING, chat_template)


def _find(table: Sequence[tuple[Sequence[str], str]], template: str | None) -> str | None:
    return next((parser for texts, parser in table if all(text in (template or "") for text in texts)), None)
