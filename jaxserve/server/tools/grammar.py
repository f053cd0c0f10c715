"""The grammar of an answer with calls in the model's own format, whose arguments match their schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from jaxserve.errors import InvalidRequestError
from jaxserve.features.grammars.rules import write_rule
from jaxserve.server.tools.call_formats import CALL_FORMATS, CallFormat
from jaxserve.server.tools.literal_grammar import LiteralGrammar
from jaxserve.server.tools.literals import FUNCTIONGEMMA, GEMMA4, PYTHON, LiteralNotation
from jaxserve.server.tools.marked_calls import DEEPSEEK, KIMI, CallMarks
from jaxserve.server.tools.reasoning import REASONING_FORMATS, find_place
from jaxserve.server.tools.spec import ToolSet
from jaxserve.server.tools.xml_calls import GLM_MARKS, MINIMAX_MARKS, QWEN3_CODER_MARKS, XmlMarks
from jaxserve.server.tools.xml_grammar import write_arguments
from jaxserve.structured_params import StructuredOutputsParams


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The way in which one format writes calls. Its opening mark is that of the `CallFormat` of the same name."""

    write: Callable[[_Writer], str]  # the rule `call`, of what follows the opening mark, and those that it needs
    separator: str = ""  # between two calls, instead of further text
    has_opener: bool = True  # else a call begins an answer, and only there
    bare: str = r"\{"  # without an opener: the pattern that a call begins with, NAMES for the functions'
    repeats: bool = True  # else all calls are in one `call`


def has_call_grammar(parser: str | None) -> bool:
    """Whether there is a grammar for the calls that a parser reads."""
    return parser in _SYNTAXES


def constrain_calls(
    tools: ToolSet,
    parser: str,
    reasoning_parser: str | None,
    special_tokens: Mapping[str, int],
    *,
    form: StructuredOutputsParams | None = None,
    read_prompt: Callable[[], str] = str,
) -> StructuredOutputsParams | None:
    """Returns the constraint of an answer with tools; None if the model may write what it likes.

    With a form, the answer is calls or has the form. If calls are forced, it is reasoning and calls. With strict tools,
    it is any text, reasoning included, and after each opening mark a call; tools that are not strict take any object.

    Args:
        parser: the name of the format's parser.
        reasoning_parser: the name of the parser of reasoning; None: there is none.
        special_tokens: those of the tokenizer: text to id.
        read_prompt: returns the prompt, whose end says where reasoning begins.

    Raises:
        InvalidRequestError: there is no grammar for the format, or form and tools are too large together.
    """
    if not (tools.is_forced or (tools.choice == "auto" and (form is not None or tools.is_strict))):
        return None
    if parser not in _SYNTAXES:
        message = f"calls in the format {parser} have none; use tool_choice none or required"
        raise InvalidRequestError(message, field="structured_outputs" if form is not None else "tools")
    if form is None:
        tools = tools.narrow() if tools.is_forced else tools.loosen()
    writer = _Writer(_SYNTAXES[parser], CALL_FORMATS[parser], tools, special_tokens)
    if form is not None:
        rules = ["start: form | calls", write_rule(form, "form"), *writer.write_calls()]
    else:
        place = find_place(read_prompt(), "", reasoning_parser)[0] if reasoning_parser is not None else False
        body = "calls" if tools.is_forced else "text"
        rules = [*writer.write_start(body, reasoning_parser, place), *writer.write_calls()]
        if not tools.is_forced:
            rules += writer.write_text(reasoning_parser)
    return StructuredOutputsParams(grammar="\n".join((*rules, "")))


class _Writer:
    """Writes the rules of one grammar."""

    def __init__(self, syntax: CallSyntax, form: CallFormat, tools: ToolSet, special_tokens: Mapping[str, int]) -> None:
        self._syntax, self._form, self.tools, self._special_tokens = syntax, form, tools, special_tokens
        self._opener = form.opener

    def mark(self, text: str) -> str:
        """Returns a mark as a term: a special token, if it is or begins with one."""
        found = max((token for token in self._special_tokens if text.startswith(token)), key=len, default="")
        rest = json.dumps(text[len(found) :], ensure_ascii=False)
        if not found:
            return rest
        return f"<[{self._special_tokens[found]}]>" + (f" {rest}" if found != text else "")

    def write_calls(self) -> list[str]:
        """Returns the rule `calls`, of nothing but calls, and those that it needs."""
        opener = self.mark(self._opener) if self._syntax.has_opener and self._opener else ""
        separator = json.dumps(self._syntax.separator) if self._syntax.separator else ""
        more = f" ({separator} {opener} call)*" if self.tools.parallel and self._syntax.repeats else ""
        return [f"calls: {opener} call{more}", self._syntax.write(self)]

    def write_text(self, reasoning_parser: str | None) -> list[str]:
        """Returns the rule `text`, of any text with calls in it, and those that it needs."""
        syntax, patterns = self._syntax, []
        if reasoning_parser is not None:
            patterns.append(rf"\s*{_escape(REASONING_FORMATS[reasoning_parser].opener)}(?s:.*)")
        if not syntax.has_opener:
            bare = syntax.bare.replace("NAMES", "|".join(_escape(tool.name) for tool in self.tools.tools))
            patterns.append(rf"\s*{bare}(?s:.*)")
        patterns += [_write_containing(mark) for mark in self._form.synonyms]
        rules = self.write_until("lead", self._opener, patterns) if self._opener is not None else []
        if self._opener is not None:
            patterns.append(_write_containing(self._opener))
        if not syntax.has_opener:
            lead = " | lead calls" if self._opener is not None else ""
            start = f"text: (TAIL | calls{lead})?"
        elif self.tools.parallel:
            start = f"text: (lead call)* {self._write_free('TAIL')}"
        else:
            start = f"text: (lead call)? {self._write_free('TAIL')}"
        return [start, f"TAIL: {_write_terminal('+', patterns)}", *rules]

    def _write_free(self, terminal: str) -> str:
        """Returns a terminal of text, or none, as a term; marks that are no content may be in it."""
        drops = [self.mark(mark) for mark in self._form.drops if mark in self._special_tokens]
        return f"({' | '.join((terminal, *drops))})*" if drops else f"{terminal}?"

    def write_start(self, body: str, reasoning_parser: str | None, place: bool | None) -> list[str]:
        """Returns the rule `start`: the body, behind reasoning if there is any.

        Args:
            place: the text begins inside reasoning (True), behind it (False), or the text says (None).
        """
        if reasoning_parser is None or place is False:
            return [f"start: {body}"]
        marks, is_forced = REASONING_FORMATS[reasoning_parser], self.tools.is_forced
        opener = "" if place else f"GAP? {self.mark(marks.opener)} "
        thought = f"{opener}reasoning GAP? {body}" if is_forced else f"{opener}reasoning {body} | {opener}INSIDE?"
        inside = _write_terminal("+", [_write_containing(marks.closer)])
        rules = [f"start: {thought}" if place else f"start: {body} | {thought}"]
        if not is_forced or marks.closer in self._special_tokens:
            rules.append(f"INSIDE: {inside}")
        return [*rules, r"GAP: /[ \n]{1,2}/", *self.write_until("reasoning", marks.closer, [], "INSIDE")]

    def write_until(self, name: str, mark: str, patterns: Sequence[str], before: str | None = None) -> list[str]:
        """Returns a rule of any text up to a mark, which it includes."""
        if mark in self._special_tokens:  # no text spells it
            if before is not None:
                return [f"{name}: {before}? {self.mark(mark)}"]
            term = _write_terminal("+", [*patterns, _write_containing(mark)])
            return [f"{name}: {self._write_free(name.upper())} {self.mark(mark)}", f"{name.upper()}: {term}"]
        return [f"{name}[lazy]: {name.upper()}", f"{name.upper()}: /(?s:.*){_escape(mark)}/{_exclude(patterns)}"]


def _write_containing(mark: str) -> str:
    """Returns the pattern of text with a mark in it."""
    return rf"(?s:.*){_escape(mark)}(?s:.*)"


def _write_terminal(repeat: str, excluded: Sequence[str]) -> str:
    return f"/(?s:.{repeat})/{_exclude(excluded)}"


def _exclude(patterns: Sequence[str]) -> str:
    return "".join(f" & ~/{pattern}/" for pattern in patterns)


def _escape(text: str) -> str:
    return re.sub(r"([^\w<>\s])", r"\\\1", text, flags=re.ASCII) if text.isascii() else re.escape(text)


def _write_hermes(writer: _Writer) -> str:
    call = json.dumps(writer.tools.make_call_schema("arguments"))
    return f'call: "\\n" %json {call} "\\n" {writer.mark("</tool_call>")}'


def _write_llama(writer: _Writer) -> str:
    return f"call: %json {json.dumps(writer.tools.make_call_schema('parameters'))}"


def _write_mistral(writer: _Writer) -> str:
    """Older models write an array of objects, newer ones each call by its name."""
    array, separator = json.dumps(writer.tools.make_array_schema("arguments")), writer.mark("[ARGS]")
    named = " | ".join(
        f"{json.dumps(tool.name)} {separator}? %json {json.dumps(tool.arguments_schema)}" for tool in writer.tools.tools
    )
    return f'call: " "? %json {array} | {named}'


def _write_array(arguments: str, name: str, call_id: str | None, end: str, writer: _Writer) -> str:
    array = json.dumps(writer.tools.make_array_schema(arguments, name, call_id))
    return f"call: %json {array} {writer.mark(end) if end else ''}"


def _write_open_array(writer: _Writer) -> str:
    """The opener has the array's bracket."""
    more = ' ("," " "? one)*' if writer.tools.parallel else ""
    return f'call: one{more} "]"\none: %json {json.dumps(writer.tools.make_call_schema("arguments"))}'


def _write_marked(marks: CallMarks, before: str, behind: str, end: str, separator: str, writer: _Writer) -> str:
    """Calls of one answer stand between one pair of marks; SEP is the mark before the arguments."""
    begin, sep, close, last = map(writer.mark, (marks.begin, marks.sep, marks.end, marks.last))
    before, behind = before.replace("SEP", sep), behind.replace("SEP", sep)
    named = " | ".join(
        f"{json.dumps(tool.name)} {behind} %json {json.dumps(tool.arguments_schema)}" for tool in writer.tools.tools
    )
    more = f" ({separator} one)*" if writer.tools.parallel else ""
    return f"call: one{more} {last}\none: {begin} {before} named {end} {close}\nnamed: {named}"


def _write_literals(
    notation: LiteralNotation, lead: str, before: str, separator: str | None, behind: str, mark: str, writer: _Writer
) -> str:
    """Returns the rules of a call, or of several with a separator.

    What is before the first name, the name and its bracket are one lexeme, because free text may begin like it.
    """
    grammar = LiteralGrammar(notation, writer.mark, "value")
    arguments, first, named = [], [], []
    for at, tool in enumerate(writer.tools.tools):
        term = grammar.write_arguments(tool.arguments_schema, f"tools[{at}].function.parameters")
        arguments.append(f"arguments{at}: {term}")
        first.append(f"{json.dumps(before + tool.name + notation.begin)} arguments{at}")
        named.append(f"{json.dumps(tool.name + notation.begin)} arguments{at}")
    rules = [f"first: {' | '.join(first)}", *arguments, *grammar.list_rules()]
    more = ""
    if separator is not None and writer.tools.parallel:
        more = f"({separator} named)*"
        rules.append(f"named: {' | '.join(named)}")
    if not notation.has_escapes:
        rules += writer.write_until("value", notation.quotes[0], [])
    return "\n".join((f"call: {lead} first {more} {behind} {writer.mark(mark)}", *rules))


def _write_xml(marks: XmlMarks, before: str, behind: str, writer: _Writer) -> str:
    calls = []
    for at, tool in enumerate(writer.tools.tools):
        field = f"tools[{at}].function.parameters"
        arguments = write_arguments(tool.arguments_schema, field, marks, writer.mark, "value")
        name_end = writer.mark(marks.name_end) if marks.name_end else ""
        calls.append(f'{json.dumps(tool.name)} {name_end} "\\n" {arguments} ')
    end = f"{writer.mark(marks.end)} {behind and f'{json.dumps(chr(10))} {writer.mark(behind)}'}"
    rules = [f"call: {json.dumps(before) if before else ''} named {end}", f"named: {' | '.join(calls)}"]
    return "\n".join((*rules, *writer.write_until("value", marks.value_end, [])))


_HERMES = CallSyntax(_write_hermes, "\n")
_QWEN3_CODER = CallSyntax(partial(_write_xml, QWEN3_CODER_MARKS, "\n<function=", "</tool_call>"), "\n")
_GLM = CallSyntax(partial(_write_xml, GLM_MARKS, "", ""), "\n")
_SYNTAXES: Mapping[str, CallSyntax] = {
    "hermes": _HERMES,
    "granite4": _HERMES,
    "llama3_json": CallSyntax(_write_llama, "; ", has_opener=False),
    "mistral": CallSyntax(_write_mistral),
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "mimo": _QWEN3_CODER,
    "glm45": _GLM,
    "glm47": _GLM,
    "minimax_m2": CallSyntax(partial(_write_xml, MINIMAX_MARKS, '\n<invoke name="', "</minimax:tool_call>"), "\n"),
    "deepseek_v3": CallSyntax(
        partial(_write_marked, DEEPSEEK, '"function" SEP', r'"\n```json\n"', r'"\n```"', r'"\n"')
    ),
    "deepseek_v31": CallSyntax(partial(_write_marked, DEEPSEEK, "", "SEP", "", "")),
    "kimi_k2": CallSyntax(partial(_write_marked, KIMI, '"functions."', '":" /[0-9]{1,3}/ SEP', "", "")),
    "pythonic": CallSyntax(
        partial(_write_literals, PYTHON, "", "[", '", "', "", "]"),
        has_opener=False,
        bare=r"\[\s*(NAMES)\(",
        repeats=False,
    ),
    "olmo3": CallSyntax(partial(_write_literals, PYTHON, r'"\n"?', "", r'"\n"', r'"\n"?', "</function_calls>")),
    "lfm2": CallSyntax(partial(_write_literals, PYTHON, "", "[", '", "', '"]"', "<|tool_call_end|>")),
    "gemma4": CallSyntax(partial(_write_literals, GEMMA4, "", "call:", None, "", "<tool_call|>")),
    "functiongemma": CallSyntax(partial(_write_literals, FUNCTIONGEMMA, "", "call:", None, "", "<end_function_call>")),
    "granite": CallSyntax(partial(_write_array, "arguments", "name", None, "")),
    "nemotron_json": CallSyntax(partial(_write_array, "arguments", "name", None, "</TOOLCALL>")),
    "phi4_mini_json": CallSyntax(_write_open_array),
    "cohere_command3": CallSyntax(partial(_write_array, "parameters", "tool_name", "tool_call_id", "<|END_ACTION|>")),
}
