"""Makes the parser of an answer from the names of its parts.

Marks of calls and of reasoning are special tokens in some checkpoints, so the text for these parsers must include
special tokens (`needs_special_tokens`). The token that stopped a sequence is never part of its text. Any other special
token outside of calls is content.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.errors import ConfigError
from jaxserve.server.events import ArgumentsDelta, CallBegun, CallEnded, Event, ParserEvent, TextDelta
from jaxserve.server.tools.call_formats import CALL_FORMATS, FORCED_ARRAY, CallFormat
from jaxserve.server.tools.call_text import CallsOrForm, CallTextParser, ForcedCall
from jaxserve.server.tools.harmony import HarmonyParser
from jaxserve.server.tools.json_scanner import JsonScanner
from jaxserve.server.tools.parser_parts import BLANKS, ToolParser
from jaxserve.server.tools.reasoning import REASONING_FORMATS, ReasoningParser, find_place
from jaxserve.server.tools.spec import ToolSet

# vLLM's names for parsers of calls and of reasoning. In harmony either reads the whole answer.
HARMONY_TOOLS, HARMONY_REASONING = "openai", "openai_gptoss"

TOOL_PARSERS = (*CALL_FORMATS, HARMONY_TOOLS)
REASONING_PARSERS = (*REASONING_FORMATS, HARMONY_REASONING)


@dataclass(slots=True)
class _OpenCall:
    """A call that has begun and not ended."""

    index: int
    is_complete: bool = False  # its arguments are
    _scanner: JsonScanner | None = None  # None before their first character

    def read(self, text: str) -> None:
        """Reads more of its arguments. Nothing tells the end of those that are no object."""
        text = text if self._scanner is not None else text.lstrip(BLANKS)
        if self.is_complete or not text:
            return
        if self._scanner is None:
            self._scanner = JsonScanner()
            self.is_complete = text[0] != "{"
        if not self.is_complete:
            self._scanner.push(text)
            self.is_complete = self._scanner.done


class AnswerParser:
    """Reads one answer: reasoning first, then content and calls. Without parsers all text is content."""

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        *,
        max_calls: int | None = None,
        is_forced: bool = False,
    ) -> None:
        self._reasoning, self._tools, self._max_calls, self._is_forced = reasoning, tools, max_calls, is_forced
        self._open_call: _OpenCall | None = None
        self.saw_calls = False  # a complete call has ended

    @property
    def is_reasoning(self) -> bool:
        """Whether the text read so far ends inside reasoning."""
        part = self._reasoning_part
        return part is not None and part.is_inside

    @property
    def may_reason(self) -> bool:
        """Whether reasoning may follow."""
        part = self._reasoning_part
        return part is not None and not part.is_over

    @property
    def _reasoning_part(self) -> ReasoningParser | HarmonyParser | None:
        return self._tools if isinstance(self._tools, HarmonyParser) else self._reasoning

    def push(self, text: str) -> list[Event]:
        """Reads more text; returns what is certain so far."""
        if self._reasoning is None:
            return self._read_content(text)
        events = self._reasoning.push(text)
        if self._reasoning.is_done:
            self._reasoning = None  # each of the many chunks that follow is read by one parser less
        return self._read_events(events)

    def finish(self) -> list[Event]:
        """Returns what was held back, at the end of the text."""
        events = self._read_events(self._reasoning.finish()) if self._reasoning is not None else []
        if self._tools is not None:
            events += self._keep(self._tools.finish())
        return events + self._end_call()

    def _read_events(self, events: list[ParserEvent]) -> list[Event]:
        if self._tools is None:
            return [*events]
        read: list[Event] = []
        for event in events:
            read += self._read_content(event.text) if isinstance(event, TextDelta) else [event]
        return read

    def _read_content(self, text: str) -> list[Event]:
        if self._tools is not None:
            return self._keep(self._tools.push(text))
        return [TextDelta(text)] if text else []

    def _keep(self, events: list[ParserEvent]) -> list[Event]:
        """Drops calls beyond the allowed number, and ends each of the others where something else follows."""
        kept: list[Event] = []
        for event in events:
            if not isinstance(event, ArgumentsDelta):
                kept += self._end_call()
            if isinstance(event, CallBegun | ArgumentsDelta):
                if self._max_calls is not None and event.index >= self._max_calls:
                    continue
            elif self._is_forced:  # other text is the cut-off beginning of a call
                continue
            if isinstance(event, CallBegun):
                self._open_call = _OpenCall(event.index)
            elif isinstance(event, ArgumentsDelta) and self._open_call is not None:
                self._open_call.read(event.text)
            kept.append(event)
        return kept

    def _end_call(self) -> list[Event]:
        call, self._open_call = self._open_call, None
        if call is None:
            return []
        self.saw_calls |= call.is_complete
        return [CallEnded(call.index, call.is_complete)]


def make_answer_parser(
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    toolset: ToolSet | None = None,
    *,
    prompt: str = "",
    begun: str | None = None,
    is_constrained: bool = False,
) -> AnswerParser:
    """Returns a parser for one answer.

    It reads calls only if the request has tools and either forces calls or leaves the choice to the model
    (`tool_choice` "auto"). Forced calls of a model without a format of its own are JSON, and have no reasoning.

    Args:
        tool_parser: a name in `TOOL_PARSERS`.
        reasoning_parser: a name in `REASONING_PARSERS`.
        toolset: the tools of the request. With `parallel=False` calls after the first are dropped.
        prompt: the text that the answer continues. A mark of reasoning at its end overrides the parser's default.
        begun: the content of the message that the answer continues; None if it begins a message of its own.
        is_constrained: the request's own grammar constrains an answer that does not begin with a call.

    Raises:
        ConfigError: there is no parser with that name.
    """
    for option, name, known in (
        ("tool_call_parser", tool_parser, TOOL_PARSERS),
        ("reasoning_parser", reasoning_parser, REASONING_PARSERS),
    ):
        if name is not None and name not in known:
            raise ConfigError(f"must be one of {', '.join(known)}, got {name!r}", field=option, value=name)
    form = CALL_FORMATS.get(tool_parser or "")
    is_forced = toolset is not None and toolset.is_forced
    max_calls = 1 if toolset is not None and not toolset.parallel else None
    if toolset is not None and is_forced and form is None:
        tools = ForcedCall(toolset.named) if toolset.named is not None else CallTextParser(FORCED_ARRAY)
        return AnswerParser(tools=tools, max_calls=max_calls, is_forced=True)
    may_call = tool_parser is not None and toolset is not None and toolset.choice != "none"
    names = toolset.names if may_call and toolset is not None else None
    parameters = {tool.name: tool.arguments_schema for tool in toolset.tools} if toolset is not None else {}
    if is_constrained:
        calls = CallsOrForm(form, names, parameters) if form is not None and names is not None else None
        return AnswerParser(tools=calls, max_calls=max_calls)
    if tool_parser == HARMONY_TOOLS or reasoning_parser == HARMONY_REASONING:
        return AnswerParser(tools=HarmonyParser(names, in_message=begun is not None), max_calls=max_calls)
    reasoning, tools = None, None
    marks = REASONING_FORMATS.get(reasoning_parser or "")
    if marks is not None:
        inside, continues = find_place(prompt, begun or "", str(reasoning_parser))
        reasoning = ReasoningParser(marks, starts_inside=bool(inside), continues=continues)
    if form is not None and names is not None:
        tools = CallTextParser(form, names, parameters)
    elif marks is not None and marks.drops:
        tools = CallTextParser(CallFormat({}, drops=marks.drops))
    return AnswerParser(reasoning, tools, max_calls=max_calls, is_forced=is_forced)


def needs_special_tokens(name: str | None) -> bool:
    """Whether text for this parser, of calls or reasoning, must include special tokens: all parsers need them."""
    return name in TOOL_PARSERS or name in REASONING_PARSERS
