"""The formats in which model families write calls, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxserve.server.tools.call_readers import CallReader, NamedCallReader
from jaxserve.server.tools.literal_calls import LiteralCallReader
from jaxserve.server.tools.literals import FUNCTIONGEMMA, GEMMA4, PYTHON, LiteralNotation
from jaxserve.server.tools.marked_calls import DEEPSEEK, KIMI, NAME, WORD, CallMarks, MarkedCallReader
from jaxserve.server.tools.parser_parts import make_call_id, make_short_call_id
from jaxserve.server.tools.reasoning import COHERE_ANSWER
from jaxserve.server.tools.xml_calls import GLM_MARKS, MINIMAX_MARKS, QWEN3_CODER_MARKS, XmlCallReader

# The states of an answer. Each format has further ones, its leads, which are between text and call.
TEXT, CALL, BARE = "text", "call", "bare call"  # a bare call has no opener
MARKED = "marked call"  # its reader begins behind the word
NAMED = "named call"  # its reader begins with the first character of the name
MARK = "mark"  # inside what may become an opener

Parameters = Mapping[str, Mapping[str, Any]]  # the schemas of functions' arguments by their names
ReaderMaker = Callable[[int, Callable[[], str], list[str], Parameters], CallReader]


@dataclass(frozen=True)
class CallFormat:
    """The text around the calls of an answer.

    `leads` are the states between text and call. Each maps the words that may come next, after any blanks, to the next
    state; the empty word stands for the name of a call. The first character of an opener occurs only at the beginning
    of words, so when a word fails to match, no opener has begun inside it.
    """

    leads: Mapping[str, Mapping[str, str]]
    opener: str | None = None  # begins calls anywhere in text
    synonyms: tuple[str, ...] = ()  # of the opener, which some models of the family write
    drops: tuple[str, ...] = ()  # marks around the answer, which are no content
    start: str = TEXT  # state at the beginning of the answer
    named: ReaderMaker | None = None  # reads calls that begin with a name
    marked: ReaderMaker | None = None  # reads calls behind a word of a lead
    needs_arguments: bool = False  # an object without arguments is not a call
    make_id: Callable[[], str] = make_call_id


HERMES = CallFormat(
    opener="<tool_call>",
    leads={
        "open": {"{": CALL},
        "after": {"</tool_call>": TEXT, "<tool_call>": "open"},
    },
)
LLAMA3_JSON = CallFormat(
    opener="<|python_tag|>",
    start="start",
    leads={
        "start": {"{": BARE, "<|python_tag|>": "open"},
        "open": {"{": CALL},
        "after": {";": "next", "{": BARE, "<|python_tag|>": "open"},
        "next": {"{": BARE, "<|python_tag|>": "open"},
    },
    needs_arguments=True,
)
MISTRAL = CallFormat(
    opener="[TOOL_CALLS]",
    leads={
        "open": {"[": "array", "{": CALL, "": NAMED},
        "array": {"{": CALL},
        "after": {",": "next", "]": TEXT},
        "next": {"{": CALL},
    },
    named=lambda index, make_id, raw, _: NamedCallReader(index, make_id, raw),
    make_id=make_short_call_id,
)
GRANITE = CallFormat(
    opener="<|tool_call|>",
    synonyms=("<tool_call>",),
    leads={"open": {"[": "array"}, "array": {"{": CALL}, "after": {",": "next", "]": TEXT}, "next": {"{": CALL}},
)
PHI4_MINI_JSON = CallFormat(
    opener="functools[",
    leads={"open": {"{": CALL}, "after": {",": "next", "]": TEXT}, "next": {"{": CALL}},
)
COHERE_COMMAND3 = CallFormat(
    opener="<|START_ACTION|>",
    drops=COHERE_ANSWER,
    leads={
        "open": {"[": "array"},
        "array": {"{": CALL},
        "after": {",": "next", "]": "after", "<|END_ACTION|>": TEXT},
        "next": {"{": CALL},
    },
)
NEMOTRON_JSON = CallFormat(
    opener="<TOOLCALL>",
    leads={
        "open": {"[": "array", "{": CALL},
        "array": {"{": CALL},
        "after": {",": "next", "]": "after", "</TOOLCALL>": TEXT},
        "next": {"{": CALL},
    },
)
QWEN3_CODER = CallFormat(
    opener="<tool_call>",
    leads={
        "open": {"<function=": MARKED},
        "after": {"</tool_call>": TEXT, "<tool_call>": "open"},
    },
    marked=partial(XmlCallReader, QWEN3_CODER_MARKS),
)
GLM = CallFormat(
    opener="<tool_call>",
    leads={"open": {"": NAMED}, "after": {"<tool_call>": "open"}},
    named=partial(XmlCallReader, GLM_MARKS),
)
MINIMAX_M2 = CallFormat(
    opener="<minimax:tool_call>",
    leads={
        "open": {'<invoke name="': MARKED},
        "after": {"</minimax:tool_call>": TEXT, '<invoke name="': MARKED, "<minimax:tool_call>": "open"},
    },
    marked=partial(XmlCallReader, MINIMAX_MARKS),
)


def _mark_calls(marks: CallMarks, *steps: str) -> CallFormat:
    return CallFormat(
        opener=marks.first,
        leads={
            "open": {marks.begin: MARKED},
            "after": {"```": "after", marks.end: "after", marks.begin: MARKED, marks.last: TEXT},
        },
        marked=lambda index, make_id, raw, _: MarkedCallReader(steps, index, make_id, raw),
    )


def _write_literals(notation: LiteralNotation, begin: str, end: str) -> CallFormat:
    return CallFormat(
        opener=begin,
        leads={"open": {"call:": MARKED}, "after": {end: TEXT, begin: "open"}},
        marked=partial(LiteralCallReader, notation),
    )


OLMO3 = CallFormat(
    opener="<function_calls>",
    leads={"open": {"": NAMED}, "after": {"</function_calls>": TEXT, "": NAMED}},
    named=partial(LiteralCallReader, PYTHON),
)
PYTHONIC = CallFormat(
    start="start",
    leads={"start": {"[": "list"}, "list": {"": NAMED}, "after": {",": "next", "]": TEXT}, "next": {"": NAMED}},
    named=partial(LiteralCallReader, PYTHON, knows_names=True),
)
LFM2 = CallFormat(  # Python's calls, or JSON where the system's message asks for that
    opener="<|tool_call_start|>",
    leads={
        "open": {"[": "list"},
        "list": {"{": CALL, "": NAMED},
        "after": {",": "list", "]": "after", "<|tool_call_end|>": TEXT},
    },
    named=partial(LiteralCallReader, PYTHON),
)
FORCED_ARRAY = CallFormat(  # what `ToolSet.structured_outputs` makes of tool_choice="required"
    start="start",
    leads={
        "start": {"[": "array"},
        "array": {"{": CALL},
        "after": {",": "next", "]": TEXT},
        "next": {"{": CALL},
    },
)

CALL_FORMATS: Mapping[str, CallFormat] = {  # by vLLM's names
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "mistral": MISTRAL,
    "granite": GRANITE,
    "granite4": HERMES,
    "phi4_mini_json": PHI4_MINI_JSON,
    "cohere_command3": COHERE_COMMAND3,
    "qwen3_coder": QWEN3_CODER,
    "qwen3_xml": QWEN3_CODER,
    "mimo": QWEN3_CODER,
    "glm45": GLM,
    "glm47": GLM,
    "minimax_m2": MINIMAX_M2,
    "deepseek_v3": _mark_calls(DEEPSEEK, WORD, DEEPSEEK.sep, NAME, "```json"),
    "deepseek_v31": _mark_calls(DEEPSEEK, NAME, DEEPSEEK.sep),
    "kimi_k2": _mark_calls(KIMI, NAME, ":", WORD, KIMI.sep),
    "pythonic": PYTHONIC,
    "olmo3": OLMO3,
    "lfm2": LFM2,
    "nemotron_json": NEMOTRON_JSON,  # NVIDIA's plugin for vLLM
    "gemma4": _write_literals(GEMMA4, "<|tool_call>", "<tool_call|>"),
    "functiongemma": _write_literals(FUNCTIONGEMMA, "<start_function_call>", "<end_function_call>"),
}
