"""Tool calls and reasoning: the tools of a request, and parsers of a model's text. Host only."""

from __future__ import annotations

from jaxserve.server.tools.answer_parser import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    AnswerParser,
    make_answer_parser,
    needs_special_tokens,
)
from jaxserve.server.tools.call_text import ForcedCall
from jaxserve.server.tools.detection import guess_reasoning_parser, guess_tool_parser
from jaxserve.server.tools.grammar import constrain_calls, has_call_grammar
from jaxserve.server.tools.spec import ToolSet, read_tools

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "AnswerParser",
    "ForcedCall",
    "ToolSet",
    "constrain_calls",
    "guess_reasoning_parser",
    "guess_tool_parser",
    "has_call_grammar",
    "make_answer_parser",
    "needs_special_tokens",
    "read_tools",
]
