"""Reads the tools of a Messages body, and the choice among them, in the form of OpenAI's chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import InvalidRequestError, shorten

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_TOOL_FIELDS = ("name", "description", "input_schema", "strict")
_TOOL_HARMLESS: Mapping[str, tuple[Any, ...]] = {  # beside null: values that change nothing
    "type": ("custom",),
    "eager_input_streaming": (True, False),  # arguments are streamed as they come
    "defer_loading": (False,),
    "input_examples": ([],),
    "allowed_callers": (["direct"],),
}


def read_tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a tool in OpenAI's form, whose values `read_tools` checks.

    Raises:
        InvalidRequestError: the server would have to run it, or a field is not supported.
    """
    kind = tool.get("type")
    if kind not in (None, "custom"):
        message = f"only custom tools are supported: the server runs none itself, got {shorten(kind)}"
        raise InvalidRequestError(message, field=f"{where}.type", value=kind)
    for key, value in tool.items():
        known = key in _TOOL_FIELDS or key == "cache_control"
        if not known and value is not None and value not in _TOOL_HARMLESS.get(key, ()):
            message = f"{shorten(key)} is not supported; {', '.join(_TOOL_FIELDS)} are"
            raise InvalidRequestError(message, field=where, value=key)
    if tool.get("input_schema") is None:
        raise InvalidRequestError("must be a JSON Schema of an object; it is missing", field=f"{where}.input_schema")
    function = {key: tool[key] for key in ("name", "description", "strict") if key in tool}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def read_choice(choice: Mapping[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool]:
    """Returns the choice in OpenAI's form, and whether one answer may have several calls.

    Raises:
        InvalidRequestError: names the field that is not one of Anthropic's.
    """
    if choice is None:
        return None, True
    kind, single, name = choice.get("type"), choice.get("disable_parallel_tool_use"), choice.get("name")
    for key, value in choice.items():
        if (
            key not in ("type", "disable_parallel_tool_use", *(("name",) if kind == "tool" else ()))
            and value is not None
        ):
            message = f"{shorten(key)} is not supported with type {shorten(kind)}"
            raise InvalidRequestError(message, field="tool_choice", value=key)
    if not isinstance(single, bool | None):
        message = f"must be true or false, got {shorten(single)}"
        raise InvalidRequestError(message, field="tool_choice.disable_parallel_tool_use", value=single)
    if kind == "tool":
        return {"type": "function", "function": {"name": name}}, not single
    if not isinstance(kind, str) or kind not in _CHOICES:
        message = f"must be auto, any, tool or none, got {shorten(kind)}"
        raise InvalidRequestError(message, field="tool_choice.type", value=kind)
    return _CHOICES[kind], not single
