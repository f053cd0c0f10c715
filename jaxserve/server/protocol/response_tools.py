"""The tools of `/v1/responses` and the choice among them, read as those of chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxserve.errors import InvalidRequestError, shorten
from jaxserve.server.protocol.foreign import is_harmless
from jaxserve.server.tools import ToolSet, read_tools
from jaxserve.server.tools.spec import MAX_TOOLS
from jaxserve.structured_params import StructuredOutputsParams
from jaxserve.tokenizers.checks import require_text

HOSTED = (  # types of tools that OpenAI's servers run
    *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
    *("file_search", "code_interpreter", "image_generation", "mcp", "tool_search", "programmatic_tool_calling"),
)
_FUNCTION_FIELDS = ("type", "name", "description", "parameters", "strict")
_CUSTOM_FIELDS = ("type", "name", "description", "format")
_NAMESPACE_FIELDS = ("type", "name", "description", "tools")
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # fields of tools that are refused, but for these values
    "defer_loading": (False,),
    "async": (False,),
    "allowed_callers": (["direct"],),
    "output_schema": (),
}


@dataclass(frozen=True, slots=True)
class NamedTool:
    """A tool that the model may call, by its name in the body."""

    kind: str  # function or custom
    name: str
    namespace: str | None = None

    @property
    def full_name(self) -> str:
        """Its name for the model."""
        return join_names(self.namespace, self.name)


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """The tools of a body."""

    tool_set: ToolSet | None = None
    by_name: Mapping[str, NamedTool] = field(default_factory=dict)  # by the name for the model
    omitted: tuple[str, ...] = ()  # types of hosted tools that the model is not shown
    input_form: StructuredOutputsParams | None = None  # of a forced custom call, whose input is the whole answer

    def find(self, name: str) -> NamedTool:
        """Returns the tool that the model calls by this name; a function if there is none."""
        return self.by_name.get(name) or NamedTool("function", name)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tool, its place in the body, and the function of chat completions that it is for the model."""

    tool: NamedTool
    place: str
    function: dict[str, Any]
    syntax: str | None = None  # of the grammar of a custom tool's input: regex or lark
    definition: str | None = None
    about: str | None = None  # the description of its namespace

    def list_names(self, number: int) -> dict[str, str]:
        """Returns the body's names of the fields of the function with this number."""
        inner, names = f"tools[{number}].function", {}
        if self.tool.kind == "custom":
            definition = f"{self.place}.format.definition" if self.syntax else self.place
            names = {f"{inner}.strict": f"{self.place}.format", f"{inner}.parameters": definition}
        return {**names, inner: self.place, f"tools[{number}]": self.place}


def join_names(namespace: str | None, name: str) -> str:
    """Returns a tool's name for the model, which knows no namespaces."""
    return name if namespace is None else f"{namespace}__{name}"


def read_response_tools(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None,
    parallel: bool | None,
    names: dict[str, str],
    *,
    refuses_hosted: bool = False,
) -> ResponseTools:
    """Returns the tools of a body and how they may be called.

    Args:
        tools, tool_choice, parallel: the body's `tools`, `tool_choice` and `parallel_tool_calls`.
        names: gets the body's names of the fields of chat completions.
        refuses_hosted: hosted tools are never left out, but refused.

    Raises:
        InvalidRequestError: names the field, in the body's words or in those of chat completions.
    """
    entries: list[_Entry] = []
    hosted: dict[str, str] = {}  # type -> place of the first
    for at, tool in enumerate(tools or ()):
        kind, place = tool.get("type"), f"tools[{at}]"
        if kind in HOSTED:
            hosted.setdefault(str(kind), place)
        elif kind == "namespace":
            entries += _read_namespace(tool, place)
        else:
            entries.append(_read_tool(tool, place))
    if len(entries) > MAX_TOOLS:
        raise InvalidRequestError(f"at most {MAX_TOOLS}, got {len(entries)}", field="tools", value=len(entries))
    mode, named, entries = _read_choice(tool_choice, entries)
    if hosted and (refuses_hosted or not entries or mode == "required"):
        kind, place = next(iter(hosted.items()))
        message = f"{kind} is a hosted tool, and none runs here"
        if not refuses_hosted:
            message += "; it is left out where the model may call other tools (tool_choice auto)"
        raise InvalidRequestError(message, field=f"{place}.type", value=kind)
    for number, entry in enumerate(entries):
        names |= entry.list_names(number)
    _describe_namespaces(entries)
    input_form = _read_input_form(entries, mode, named, names)
    tool_set = read_tools([{"type": "function", "function": entry.function} for entry in entries], mode, parallel)
    by_name = {entry.tool.full_name: entry.tool for entry in entries}
    return ResponseTools(tool_set, by_name, tuple(hosted), input_form)


def _read_input_form(
    entries: Sequence[_Entry], mode: Any, named: _Entry | None, names: dict[str, str]
) -> StructuredOutputsParams | None:
    """Returns the form of the named tool's input if it is a Lark grammar, which is no part of a JSON Schema."""
    callable_here = [named] if named is not None else entries if mode != "none" else []
    for entry in callable_here:
        if entry.syntax == "lark" and entry is not named:
            message = "a Lark grammar holds only where tool_choice names the tool; use a regex, or leave the format out"
            raise InvalidRequestError(message, field=f"{entry.place}.format.syntax", value="lark")
    if named is None:
        return None
    place = f"{named.place}.format.definition" if named.syntax is not None else f"{named.place}.parameters"
    names |= dict.fromkeys(("structured_outputs.json", "structured_outputs.grammar"), place)
    return StructuredOutputsParams(grammar=named.definition) if named.syntax == "lark" else None


def _describe_namespaces(entries: Sequence[_Entry]) -> None:
    """Puts the description of each namespace before that of its first tool."""
    described: set[str | None] = set()
    for entry in entries:
        own = entry.function.get("description")
        if entry.about and entry.tool.namespace not in described and isinstance(own, str | None):
            entry.function["description"] = "\n\n".join(filter(None, (f"[{entry.tool.namespace}] {entry.about}", own)))
        described.add(entry.tool.namespace)


def _read_namespace(tool: Mapping[str, Any], place: str) -> list[_Entry]:
    _require_known(tool, _NAMESPACE_FIELDS, place)
    name, members = _require_name(tool.get("name"), f"{place}.name"), tool.get("tools")
    about = tool.get("description")
    if about is not None:
        require_text(about, f"{place}.description")
    if not isinstance(members, list) or not members:
        raise _wrong("a list of at least one tool", members, f"{place}.tools")
    entries = []
    for at, member in enumerate(members):
        where = f"{place}.tools[{at}]"
        if not isinstance(member, Mapping):
            raise _wrong("an object", member, where)
        entries.append(replace(_read_tool(member, where, name), about=about))
    return entries


def _read_tool(tool: Mapping[str, Any], place: str, namespace: str | None = None) -> _Entry:
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        known = "function and custom" if namespace is not None else "function, custom and namespace"
        inside = " in a namespace" if namespace is not None else ""
        message = f"{shorten(kind)} is not supported{inside}; {known} are"
        raise InvalidRequestError(message, field=f"{place}.type", value=kind)
    _require_known(tool, _FUNCTION_FIELDS if kind == "function" else _CUSTOM_FIELDS, place)
    named = NamedTool(str(kind), _require_name(tool.get("name"), f"{place}.name"), namespace)
    if len(named.full_name) > 64:
        message = f"with its namespace at most 64 characters, got {len(named.full_name)} in {shorten(named.full_name)}"
        raise InvalidRequestError(message, field=f"{place}.name", value=named.name)
    if kind == "custom":
        return _read_custom(tool, named, place)
    function = {key: tool[key] for key in ("description", "parameters", "strict") if tool.get(key) is not None}
    return _Entry(named, place, {"name": named.full_name, **function})


def _read_custom(tool: Mapping[str, Any], named: NamedTool, place: str) -> _Entry:
    """Returns a custom tool as a function with one text, `input`."""
    form, where = tool.get("format"), f"{place}.format"
    kind = form.get("type") if isinstance(form, Mapping) else None if form is not None else "text"
    if kind not in ("text", "grammar"):
        raise _wrong("an object of type text or grammar", form, where)
    text: dict[str, Any] = {"type": "string", "description": "The whole input, as plain text."}
    parameters = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    function = {"name": named.full_name, "parameters": parameters}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    if form is None or kind == "text":
        _require_known(form or {}, ("type",), where)
        return _Entry(named, place, function)
    _require_known(form, ("type", "syntax", "definition"), where)
    syntax = form.get("syntax")
    if syntax not in ("lark", "regex"):
        raise InvalidRequestError(
            f"must be lark or regex, got {shorten(syntax)}", field=f"{where}.syntax", value=syntax
        )
    definition = require_text(form.get("definition"), f"{where}.definition")
    try:
        StructuredOutputsParams(**{"grammar" if syntax == "lark" else syntax: definition})
    except InvalidRequestError as error:
        message = str(error).removeprefix(f"{error.field}: ")
        raise InvalidRequestError(message, field=f"{where}.definition", value=None) from error
    text["description"] = f"The whole input, as plain text. It matches this {syntax}:\n{definition}"
    if syntax == "regex":
        text["pattern"] = f"^(?:{definition})$"
    return _Entry(named, place, {**function, "strict": True}, syntax, definition)


def _read_choice(choice: Any, entries: list[_Entry]) -> tuple[Any, _Entry | None, list[_Entry]]:
    """Returns the choice in the form of chat completions, the tool that it names, and the tools that it allows."""
    if isinstance(choice, str | None):
        return choice, None, entries
    kind = choice.get("type")
    if kind in ("function", "custom"):
        named = _find(choice, entries, "tool_choice")
        return {"type": "function", "function": {"name": named.tool.full_name}}, named, entries
    if kind != "allowed_tools":
        about = "is a hosted tool, and none runs here" if kind in HOSTED else "is not supported"
        message = f"{shorten(kind)} {about}; auto, none, required, function, custom and allowed_tools are possible"
        raise InvalidRequestError(message, field="tool_choice.type", value=kind)
    _require_known(choice, ("type", "mode", "tools"), "tool_choice")
    mode, allowed = choice.get("mode"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidRequestError(
            f"must be auto or required, got {shorten(mode)}", field="tool_choice.mode", value=mode
        )
    if not isinstance(allowed, list) or not 1 <= len(allowed) <= MAX_TOOLS:
        raise _wrong(f"a list of 1 to {MAX_TOOLS} tools", allowed, "tool_choice.tools")
    chosen = []
    for at, each in enumerate(allowed):
        where = f"tool_choice.tools[{at}]"
        if not isinstance(each, Mapping):
            raise _wrong("an object", each, where)
        if each.get("type") in HOSTED:
            if mode == "required" or len(allowed) == 1:
                message = f"{each['type']} is a hosted tool, and none runs here"
                raise InvalidRequestError(message, field=f"{where}.type", value=each["type"])
        elif each.get("type") == "namespace":
            chosen += _find_members(each, entries, where)
        else:
            chosen.append(_find(each, entries, where))
    return mode, None, [entry for entry in entries if entry in chosen]


def _find(choice: Mapping[str, Any], entries: Sequence[_Entry], where: str) -> _Entry:
    """Returns the tool that an object of type, name and perhaps namespace names."""
    _require_known(choice, ("type", "name", "namespace"), where)
    kind, name, namespace = (choice.get(key) for key in ("type", "name", "namespace"))
    if kind not in ("function", "custom"):
        message = f"{shorten(kind)} is not supported; function, custom and namespace are"
        raise InvalidRequestError(message, field=f"{where}.type", value=kind)
    for entry in entries:
        if (entry.tool.kind, entry.tool.name, entry.tool.namespace) == (kind, name, namespace):
            return entry
    inside = "" if namespace is None else f" in the namespace {shorten(namespace)}"
    message = f"must be the name of a {kind} among the tools, got {shorten(name)}{inside}"
    raise InvalidRequestError(message, field=f"{where}.name", value=name)


def _find_members(choice: Mapping[str, Any], entries: Sequence[_Entry], where: str) -> list[_Entry]:
    _require_known(choice, ("type", "name"), where)
    name = choice.get("name")
    found = [entry for entry in entries if entry.tool.namespace is not None and entry.tool.namespace == name]
    if not found:
        raise _wrong("the name of a namespace among the tools", name, f"{where}.name")
    return found


def _require_name(name: Any, where: str) -> str:
    if not isinstance(name, str) or not name:
        raise _wrong("a name", name, where)
    return require_text(name, where)


def _wrong(expected: str, value: Any, where: str) -> InvalidRequestError:
    return InvalidRequestError(f"must be {expected}, got {shorten(value)}", field=where, value=value)


def _require_known(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key, value in values.items():
        if key not in known and not (key in _NEUTRAL and is_harmless(value, _NEUTRAL[key])):
            message = f"{shorten(key)} is not supported; {', '.join(known)} are"
            raise InvalidRequestError(message, field=where, value=key)
