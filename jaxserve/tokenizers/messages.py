"""Checks the messages and tools of a conversation and gives them the shape that chat templates expect."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import InvalidRequestError, shorten
from jaxserve.media.parts import IMAGE, describe_kind
from jaxserve.tokenizers.checks import require_text

# Other roles are refused: some templates write '<|' + role + '|>', and a role "end" would end the turn.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
MAX_JSON_NESTING = 64  # levels in a tool and in a call's arguments
_FIELDS = ("role", "content", "name")
_TEXT_FIELDS = ("name", "tool_call_id", "reasoning_content", "reasoning")
_ASSISTANT_FIELDS = (*_FIELDS, "reasoning_content", "reasoning", "tool_calls")
_TOOL_FIELDS = (*_FIELDS, "tool_call_id")
_EMPTY_FIELDS = ("refusal", "annotations", "audio", "function_call")  # clients send these back; templates ignore them
_REPEATED = "provider_specific_fields"  # in which LiteLLM has other fields once more
_PARSED, _PARSED_ARGUMENTS = "parsed", "parsed_arguments"  # what OpenAI's client for Python read in the text beside it
_IMAGE_ROLES = ("user", "tool")
_CALL_FIELDS = ("id", "type", "function", "index")  # `index` is left over from streamed deltas


def check_messages(messages: Sequence[Mapping[str, Any]], *, reads_images: bool = False) -> list[dict[str, Any]]:
    """Returns a copy of the messages, the content of each as one string; parts are joined by newlines.

    With `reads_images`, content that has images (`IMAGE`, by `take_images`) is a list of them and of parts of text.

    The arguments of tool calls become objects, as templates expect, or stay text that is no JSON object; `reasoning`
    becomes `reasoning_content`; missing content becomes "" in an assistant's message that calls tools or reasons.

    Raises:
        InvalidRequestError: there is no message, or one is malformed or holds something other than text.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequestError(
            f"must be a list of at least one message, got {shorten(messages)}", field="messages", value=messages
        )
    return [_check_message(message, f"messages[{at}]", reads_images) for at, message in enumerate(messages)]


def count_images(messages: Sequence[Mapping[str, Any]]) -> int:
    """Returns the number of images in checked messages."""
    return sum(each["content"].count(IMAGE) for each in messages if isinstance(each["content"], list))


def require_readable_parts(messages: Sequence[Mapping[str, Any]], *, reads_images: bool = False) -> None:
    """Refuses images, video, sound and files by name, before anything about the length of their data is said.

    With `reads_images`, images may be there as `take_images` leaves them. Everything else is left to `check_messages`.

    Raises:
        InvalidRequestError: names the first such part.
    """
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        for at, part in enumerate(content if isinstance(content, list) else ()):
            what = describe_kind(part.get("type")) if isinstance(part, Mapping) else None
            if what is not None and not (reads_images and part == IMAGE):
                field = f"messages[{number}].content[{at}]"
                raise _refuse_other(part, what, field) if reads_images else _refuse_part(part, what, field)


def rename_reasoning(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with reasoning as `thinking`, gpt-oss's name.

    Its template refuses a message of calls that has both reasoning and content; the content stays then.
    """
    renamed = []
    for message in messages:
        others = {key: value for key, value in message.items() if key != "reasoning_content"}
        if "reasoning_content" in message and not ("tool_calls" in message and message["content"]):
            others["thinking"] = message["reasoning_content"]
        renamed.append(others)
    return renamed


def wrap_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with arguments that are text as a member of an object, for templates that need one."""

    def wrap(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if isinstance(function["arguments"], str):
            function = {**function, "arguments": {"arguments": function["arguments"]}}
        return {**call, "function": function}

    return [
        {**message, "tool_calls": list(map(wrap, message["tool_calls"]))} if "tool_calls" in message else dict(message)
        for message in messages
    ]


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Returns a copy of the tools, None if there are none: templates test `tools is not none`.

    Raises:
        InvalidRequestError: `tools` is not a list of JSON objects.
    """
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise InvalidRequestError(f"must be a list of objects, got {shorten(tools)}", field="tools", value=tools)
    return [_copy_object(tool, f"tools[{at}]") for at, tool in enumerate(tools)] or None


def _check_message(message: Any, field: str, reads_images: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"must be an object with 'role' and 'content', got {shorten(message)}", field=field, value=message
        )
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequestError(
            f"must be one of {', '.join(sorted(ROLES))}, got {shorten(role)}", field=f"{field}.role", value=role
        )
    if role == "assistant" and isinstance(message.get("refusal"), str) and not message.get("content"):
        message = {**message, "content": message["refusal"], "refusal": None}  # OpenAI's models say it instead
    if role == "assistant":
        message = _drop_repeated(message)
    known = _FIELDS
    if role in ("assistant", "tool", "function", "ipython"):
        known = _ASSISTANT_FIELDS if role == "assistant" else _TOOL_FIELDS
    for key, value in message.items():
        if key not in known and not (key in (*_ASSISTANT_FIELDS, *_EMPTY_FIELDS, _PARSED) and value in (None, [])):
            message_text = f"{shorten(key)} is not supported in a message of {role}; {', '.join(known)} are"
            raise InvalidRequestError(message_text, field=field, value=key)
    texts = {key: require_text(message[key], f"{field}.{key}") for key in _TEXT_FIELDS if message.get(key) is not None}
    reasoning = texts.pop("reasoning", None)
    if reasoning is not None:
        texts.setdefault("reasoning_content", reasoning)
    calls = _check_calls(message.get("tool_calls"), f"{field}.tool_calls")
    content = message.get("content")
    if content is None and (calls or "reasoning_content" in texts):
        content = ""  # not None: templates use it as a string
    roles = _IMAGE_ROLES if reads_images else ()
    checked = {"role": role, "content": _read_content(content, f"{field}.content", role, roles), **texts}
    return {**checked, "tool_calls": calls} if calls else checked


def _drop_repeated(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message without the fields in which clients repeat others of it."""
    repeated, dropped = message.get(_REPEATED), [_PARSED] if message.get("content") is not None else []
    reasoning = message.get("reasoning", message.get("reasoning_content"))
    said = {**message, "reasoning": reasoning, "reasoning_content": reasoning}
    if isinstance(repeated, Mapping) and all(value in (None, said.get(key)) for key, value in repeated.items()):
        dropped.append(_REPEATED)
    return {key: value for key, value in message.items() if key not in dropped}


def _read_content(content: Any, field: str, role: str, image_roles: Sequence[str]) -> str | list[dict[str, str]]:
    """Returns content as one string, or as parts if it has images; `image_roles` are those that may have some."""
    if not isinstance(content, list):
        return require_text(content, field)
    parts = [_read_part(part, f"{field}[{at}]", role, image_roles) for at, part in enumerate(content)]
    return parts if IMAGE in parts else "\n".join(part["text"] for part in parts)


def _read_part(part: Any, field: str, role: str, image_roles: Sequence[str]) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", "refusal"):
        return {"type": "text", "text": require_text(part.get(kind), f"{field}.{kind}")}
    what = describe_kind(kind)
    if not image_roles or what is None:
        raise _refuse_part(part, what, field)
    if part == IMAGE and role in image_roles:
        return IMAGE
    raise _refuse_other(part, what, field)


def _refuse_other(part: Any, what: str, field: str) -> InvalidRequestError:
    """Returns the refusal of a part, that holds `what`, by a model that reads images."""
    message = f"is {what}; text is read here, and images in messages of {' and '.join(_IMAGE_ROLES)}"
    return InvalidRequestError(message, field=field, value=part)


def _refuse_part(part: Any, what: str | None, field: str) -> InvalidRequestError:
    """Returns a text model's refusal of a part; `what` it holds, None if that is not known."""
    message = f"only parts of type 'text' are supported, got {shorten(part)}"
    if what is not None:
        message = f"is {what}, which is not read here: this model is served for text; send text"
    return InvalidRequestError(message, field=field, value=part)


def _check_calls(calls: Any, field: str) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if not isinstance(calls, list | tuple):
        raise InvalidRequestError(f"must be a list, got {shorten(calls)}", field=field, value=calls)
    return [_check_call(call, f"{field}[{at}]") for at, call in enumerate(calls)]


def _check_call(call: Any, field: str) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise InvalidRequestError(
            f"must be an object with 'id', 'type' and 'function', got {shorten(call)}", field=field, value=call
        )
    for values, known, where in (
        (call, _CALL_FIELDS, field),
        (call["function"], ("name", "arguments"), f"{field}.function"),
    ):
        for key in values:
            if key not in known and not (key == _PARSED_ARGUMENTS and "arguments" in values):
                message = f"{shorten(key)} is not supported; {', '.join(known)} are"
                raise InvalidRequestError(message, field=where, value=key)
    if call.get("type", "function") != "function":
        raise InvalidRequestError(
            f"must be 'function', got {shorten(call['type'])}", field=f"{field}.type", value=call["type"]
        )
    name = require_text(call["function"].get("name"), f"{field}.function.name")
    if not name:
        raise InvalidRequestError("is empty", field=f"{field}.function.name", value=name)
    arguments = _read_arguments(call["function"].get("arguments"), f"{field}.function.arguments")
    checked = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return checked if call.get("id") is None else {"id": require_text(call["id"], f"{field}.id"), **checked}


def _read_arguments(arguments: Any, field: str) -> dict[str, Any] | str:
    """Returns a call's arguments, given as an object or as text; {} if there are none.

    A model may have written any text, or been cut off. What is not the text of an object stays as it is.
    """
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return _copy_object(arguments, field)
    text = require_text(arguments, field)
    try:
        return _copy_object(json.loads(text), field)
    except (ValueError, RecursionError):  # an InvalidRequestError is a ValueError
        return text


def _copy_object(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"must be a JSON object, got {shorten(value)}", field=field, value=value)
    copied = copy_json(value, field)
    assert isinstance(copied, dict)
    return copied


def copy_json(value: Any, field: str, *, max_nesting: int = MAX_JSON_NESTING) -> Any:
    """Returns a copy of a JSON value as plain dicts, lists, strings, numbers, booleans and None.

    Raises:
        InvalidRequestError: it holds anything else, a lone surrogate or a number that JSON cannot express, or nests
            too deeply.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return require_text(value, field)
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, Mapping | list | tuple):
        if max_nesting == 0:
            raise InvalidRequestError(f"nested more than {MAX_JSON_NESTING} levels deep", field=field)
        if isinstance(value, Mapping):
            return {
                require_text(key, field): copy_json(item, field, max_nesting=max_nesting - 1)
                for key, item in value.items()
            }
        return [copy_json(item, field, max_nesting=max_nesting - 1) for item in value]
    raise InvalidRequestError(f"must be JSON, got {shorten(value)}", field=field, value=value)
