"""The tools of a request: what the model may or must call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jaxserve.errors import InvalidRequestError, shorten
from jaxserve.server.tools.schemas import move_schema
from jaxserve.structured_params import StructuredOutputsParams
from jaxserve.tokenizers.checks import require_text
from jaxserve.tokenizers.messages import copy_json

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CHOICES = ("auto", "none", "required")
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON Schema of its arguments; None: it takes none
    strict: bool = False  # its arguments always match the schema, also where the model may choose

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """The schema of its arguments, always of an object."""
        if not self.parameters:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return self.parameters if "type" in self.parameters else {"type": "object", **self.parameters}


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of one request, validated, and how they may be used."""

    tools: tuple[Tool, ...]
    choice: Literal["auto", "none", "required", "named"] = "auto"
    named: str | None = None  # with choice "named"
    parallel: bool = True  # one answer may have several calls
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", frozenset(tool.name for tool in self.tools))

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call; a grammar then constrains all of it."""
        return self.choice in ("required", "named")

    @property
    def is_strict(self) -> bool:
        """Whether a grammar constrains calls of a tool that the model may choose."""
        return any(tool.strict for tool in self.tools)

    def loosen(self) -> ToolSet:
        """Returns the tools with any object as arguments of those that are not strict."""
        return replace(
            self,
            tools=tuple(tool if tool.strict else replace(tool, parameters={"type": "object"}) for tool in self.tools),
        )

    def narrow(self) -> ToolSet:
        """Returns the one tool that is named; all of them if none is."""
        if self.named is None:
            return self
        return replace(self, tools=tuple(tool for tool in self.tools if tool.name == self.named), parallel=False)

    def describe(self) -> list[dict[str, Any]] | None:
        """Returns the tools in the form that chat templates expect; None with choice "none"."""
        if self.choice == "none":
            return None
        described = []
        for tool in self.tools:
            function: dict[str, Any] = {"name": tool.name}
            if tool.description is not None:
                function["description"] = tool.description
            function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
            described.append({"type": "function", "function": function})
        return described

    def structured_outputs(self) -> StructuredOutputsParams | None:
        """Returns the structured output of a forced answer; None if the model may choose.

        A named function's answer is the object of its arguments. A required call's answer is an array of objects with
        `name` and `parameters`.

        Raises:
            InvalidRequestError: the schemas are too large or too deep, or have unresolved references.
        """
        if not self.is_forced:
            return None
        if self.choice == "named":
            at = next(at for at, tool in enumerate(self.tools) if tool.name == self.named)
            schema, where = self.tools[at].arguments_schema, f"tools[{at}].function.parameters"
        else:
            schema, where = self.make_array_schema("parameters"), "tools"
        try:
            # Weak models may generate blanks between JSON tokens endlessly.
            return StructuredOutputsParams(json=schema, disable_any_whitespace=True)
        except InvalidRequestError as error:
            reason = str(error).removeprefix(f"{error.field}: ")
            raise InvalidRequestError(f"as the schema of a forced call: {reason}", field=where) from error

    def make_array_schema(self, arguments: str, name: str = "name", call_id: str | None = None) -> dict[str, Any]:
        """Returns the schema of an array of calls; its parts are those of `make_call_schema`."""
        call = self.make_call_schema(arguments, name, call_id)
        schema = {"type": "array", "minItems": 1, "items": {"anyOf": call["anyOf"]}, "$defs": call["$defs"]}
        return schema if self.parallel else {**schema, "maxItems": 1}

    def make_call_schema(self, arguments: str, name: str = "name", call_id: str | None = None) -> dict[str, Any]:
        """Returns the schema of one call, an object.

        Args:
            arguments: the member with the arguments.
            name: the member with the function's name.
            call_id: a member before both, a short number as text; None: there is none.

        Raises:
            InvalidRequestError: a tool's schema has references that cannot be moved.
        """
        number = {call_id: {"type": "string", "pattern": "^[0-9]{1,4}$"}} if call_id is not None else {}
        definitions, calls = {}, []
        for at, tool in enumerate(self.tools):
            place = f"tool{at}"
            definitions[place] = move_schema(
                tool.arguments_schema, f"#/$defs/{place}", f"tools[{at}].function.parameters"
            )
            members = {**number, name: {"const": tool.name}, arguments: {"$ref": f"#/$defs/{place}"}}
            calls.append(
                {"type": "object", "properties": members, "required": [*members], "additionalProperties": False}
            )
        return {"anyOf": calls, "$defs": definitions}


def read_tools(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel: bool | None = True,
) -> ToolSet | None:
    """Returns the tools of a request, None if it has none.

    Args:
        tools: objects of OpenAI's chat API.
        tool_choice: "auto" (the default), "none", "required", or a function by name.
        parallel: the request's `parallel_tool_calls`.

    Raises:
        InvalidRequestError: names the malformed, unknown or missing part.
    """
    if not tools:
        if tool_choice not in (None, "none", "auto"):  # the model decides among no tools
            message = f"{shorten(tool_choice)} needs tools, and there are none"
            raise InvalidRequestError(message, field="tool_choice", value=tool_choice)
        return None
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"at most {MAX_TOOLS}, got {len(tools)}", field="tools", value=len(tools))
    known: dict[str, Tool] = {}
    for at, entry in enumerate(tools):
        tool = _read_tool(entry, f"tools[{at}]")
        if tool.name in known:
            message = f"{tool.name!r} is also the name of another tool; names must be unique"
            raise InvalidRequestError(message, field=f"tools[{at}].function.name", value=tool.name)
        known[tool.name] = tool
    choice, named = _read_choice(tool_choice, known)
    return ToolSet(tuple(known.values()), choice, named, parallel is not False)


def _read_tool(entry: Mapping[str, Any], where: str) -> Tool:
    function = _require_function(entry, where)
    where = f"{where}.function"
    _require_known(function, _FUNCTION_FIELDS, where)
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"must be 1 to 64 of the characters a-z, A-Z, 0-9, _ and -, got {shorten(name)}"
        raise InvalidRequestError(message, field=f"{where}.name", value=name)
    if description is not None:
        require_text(description, f"{where}.description")
    if not isinstance(function.get("strict"), bool | None):
        message = f"must be true or false, got {shorten(function['strict'])}"
        raise InvalidRequestError(message, field=f"{where}.strict", value=function["strict"])
    parameters = _read_parameters(function.get("parameters"), f"{where}.parameters")
    return Tool(name, description, parameters, function.get("strict") is True)


def _read_parameters(parameters: Any, where: str) -> dict[str, Any] | None:
    if parameters is None:
        return None
    if not isinstance(parameters, Mapping):
        message = f"must be a JSON Schema of an object, got {shorten(parameters)}"
        raise InvalidRequestError(message, field=where, value=parameters)
    copied: dict[str, Any] = copy_json(parameters, where)
    if copied.get("type", "object") != "object":
        message = f"must be 'object', got {shorten(copied['type'])}"
        raise InvalidRequestError(message, field=f"{where}.type", value=copied["type"])
    return copied


def _read_choice(
    choice: Any, known: Mapping[str, Tool]
) -> tuple[Literal["auto", "none", "required", "named"], str | None]:
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        if choice not in _CHOICES:
            message = f"must be {', '.join(_CHOICES)} or a function by name, got {shorten(choice)}"
            raise InvalidRequestError(message, field="tool_choice", value=choice)
        return choice, None  # type: ignore[return-value]
    function = _require_function(choice, "tool_choice")
    _require_known(function, ("name",), "tool_choice.function")
    name = function.get("name")
    if not isinstance(name, str) or name not in known:
        message = f"must be the name of one of the tools, got {shorten(name)}"
        raise InvalidRequestError(message, field="tool_choice.function.name", value=name)
    return "named", name


def _require_function(entry: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Returns the function of `{"type": "function", "function": {...}}`."""
    if entry.get("type") != "function":
        message = f"only 'function' is supported, got {shorten(entry.get('type'))}"
        raise InvalidRequestError(message, field=f"{where}.type", value=entry.get("type"))
    _require_known(entry, ("type", "function"), where)
    function = entry.get("function")
    if not isinstance(function, Mapping):
        message = f"must be an object with 'name', got {shorten(function)}"
        raise InvalidRequestError(message, field=f"{where}.function", value=function)
    return function


def _require_known(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in values:
        if key not in known:
            message = f"{shorten(key)} is not supported; {', '.join(known)} are"
            raise InvalidRequestError(message, field=where, value=key)
