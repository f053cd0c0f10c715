"""Reads the system prompt and the turns of a Messages body as messages for chat templates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from jaxserve.errors import InvalidRequestError, shorten
from jaxserve.media.parts import describe_kind
from jaxserve.server.protocol.messages import CountTokensRequest
from jaxserve.tokenizers.checks import require_text
from jaxserve.tokenizers.messages import copy_json

# Claude Code's first block of every request. It differs each time, and no prefix behind it would be cached.
_BILLING = "x-anthropic-billing-header:"
_BLOCKS: Mapping[str, tuple[str, ...]] = {  # kinds of blocks by role
    "system": ("text",),
    "user": ("text", "tool_result"),
    "result": ("text",),  # inside tool_result
    "assistant": ("text", "thinking", "tool_use"),
}
_FIELDS: Mapping[str, tuple[str, ...]] = {  # of blocks by kind
    "text": ("text",),
    "image": ("source",),
    "thinking": ("thinking", "signature"),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id", "content", "is_error"),
}
_IMAGES = ("user", "result")  # which may have images, too, where these are read
_MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_HARMLESS: Mapping[str, tuple[Any, ...]] = {"citations": ([],), "caller": ({"type": "direct"},)}  # beside null


class TurnReader:
    """Puts chat messages together, turn by turn.

    A system message behind the first turn stays where it is if the template shows it as a turn of its own. Otherwise
    it is text of the user's turn around it. Either way the prompt in front of it stays as it was.

    Args:
        shows_system: says whether the template shows such a message; called when there is one.
        reads_images: the model does; else they are refused.
    """

    def __init__(self, shows_system: Callable[[], bool], *, reads_images: bool = False) -> None:
        self.messages: list[dict[str, Any]] = []
        self.sources: list[str] = []  # the body's name of each message
        self._shows_system, self._reads_images = shows_system, reads_images
        self._images: dict[int, str] = {}  # the body's name of each image, by the id of its part
        self._ids: set[str] = set()  # of all calls
        self._open: dict[str, str] = {}  # calls that wait for their result: id to field

    def read(self, body: CountTokensRequest) -> None:
        """Reads a body.

        Raises:
            InvalidRequestError: names a block that is malformed or not supported, a call without its result, or a
                result without its call.
        """
        if body.system is not None:
            self._read_system(body.system, "system")
        for at, turn in enumerate(body.messages):
            self._read_turn(turn, f"messages[{at}]")
        self._require_results()
        if not any(turn["role"] != "system" for turn in body.messages):
            message = "must hold at least one message of user or assistant"
            raise InvalidRequestError(message, field="messages", value=body.messages)

    def list_images(self) -> dict[str, str]:
        """Returns the body's name of each image by its name in `messages`."""
        return {
            f"messages[{number}].content[{at}]": self._images[id(part)]
            for number, message in enumerate(self.messages)
            if isinstance(message["content"], list)
            for at, part in enumerate(message["content"])
            if id(part) in self._images
        }

    def _read_turn(self, turn: Mapping[str, Any], name: str) -> None:
        role = turn.get("role")
        if not isinstance(role, str) or role not in _BLOCKS:
            message = f"must be user, assistant or system, got {shorten(role)}"
            raise InvalidRequestError(message, field=f"{name}.role", value=role)
        for key, value in turn.items():
            if key not in ("role", "content") and value is not None:
                message = f"{shorten(key)} is not supported; role and content are"
                raise InvalidRequestError(message, field=name, value=key)
        content, field = turn.get("content"), f"{name}.content"
        if role == "user":
            self._read_user(content, field)
            return
        self._require_results()
        if role == "system":
            self._read_system(content, field)
        else:
            self._read_assistant(content, field)

    def _read_system(self, content: Any, field: str) -> None:
        texts = [_read_text(block, where) for where, block in self._list_blocks(content, "system", field)]
        if isinstance(content, list):
            texts = [text for text in texts if not text.startswith(_BILLING)]
        if not texts:
            return
        leads = all(message["role"] == "system" for message in self.messages)
        self._add("system" if leads or self._shows_system() else "user", "\n".join(texts), field)

    def _read_user(self, content: Any, field: str) -> None:
        parts: list[dict[str, Any]] = []
        blocks = self._list_blocks(content, "user", field)
        if not blocks:
            raise InvalidRequestError("must hold at least one block", field=field, value=content)
        for where, block in blocks:
            if block["type"] != "tool_result":
                parts.append(self._read_part(block, where))
            elif parts:
                message = "tool_result must come before the text of its message"
                raise InvalidRequestError(message, field=f"{where}.type", value="tool_result")
            else:
                self._read_result(block, where)
        self._require_results()
        if parts:
            self._add("user", _join_parts(parts), field)

    def _read_result(self, block: Mapping[str, Any], where: str) -> None:
        call_id = block.get("tool_use_id")
        if not isinstance(call_id, str) or self._open.pop(call_id, None) is None:
            message = f"must be the id of a tool_use in the message before, each once, got {shorten(call_id)}"
            raise InvalidRequestError(message, field=f"{where}.tool_use_id", value=call_id)
        failed, content = block.get("is_error"), block.get("content")
        if not isinstance(failed, bool | None):
            message = f"must be true or false, got {shorten(failed)}"
            raise InvalidRequestError(message, field=f"{where}.is_error", value=failed)
        blocks = [] if content is None else self._list_blocks(content, "result", f"{where}.content")
        joined = _join_parts([self._read_part(part, name) for name, part in blocks])
        if failed:  # templates have no other place for it
            joined = f"Error: {joined}" if isinstance(joined, str) else [_make_text("Error: "), *joined]
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": joined})
        self.sources.append(where)

    def _read_assistant(self, content: Any, field: str) -> None:
        texts: list[str] = []
        reasoning: list[str] = []
        calls: list[dict[str, Any]] = []
        for where, block in self._list_blocks(content, "assistant", field):
            if block["type"] == "text":
                texts.append(_read_text(block, where))
            elif block["type"] == "thinking":
                reasoning.append(require_text(block.get("thinking"), f"{where}.thinking"))
            else:
                calls.append(self._read_call(block, where))
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        if reasoning:
            message["reasoning_content"] = "".join(reasoning)
        if calls:
            message["tool_calls"] = calls
        self.messages.append(message)
        self.sources.append(field)

    def _read_call(self, block: Mapping[str, Any], where: str) -> dict[str, Any]:
        call_id, given = block.get("id"), block.get("input")
        if not isinstance(call_id, str) or not call_id or call_id in self._ids:
            message = f"must be an id that no other tool_use has, got {shorten(call_id)}"
            raise InvalidRequestError(message, field=f"{where}.id", value=call_id)
        name = require_text(block.get("name"), f"{where}.name")
        if not name:
            raise InvalidRequestError("is empty", field=f"{where}.name", value=name)
        if not isinstance(given, dict):
            raise InvalidRequestError(f"must be an object, got {shorten(given)}", field=f"{where}.input", value=given)
        self._ids.add(call_id)
        self._open[call_id] = where
        function = {"name": name, "arguments": copy_json(given, f"{where}.input")}
        return {"id": require_text(call_id, f"{where}.id"), "type": "function", "function": function}

    def _require_results(self) -> None:
        """Refuses a call that has no result where the next turn begins."""
        for call_id, where in self._open.items():
            message = f"{shorten(call_id)} has no tool_result in the next message, which must be the user's"
            raise InvalidRequestError(message, field=f"{where}.id", value=call_id)

    def _add(self, role: str, content: str | list[dict[str, Any]], source: str) -> None:
        """Adds a content. Texts of one turn are joined by a line's end."""
        if self.messages and self.messages[-1]["role"] == role:
            self.messages[-1]["content"] = _join_contents(self.messages[-1]["content"], content)
            return
        self.messages.append({"role": role, "content": content})
        self.sources.append(source)

    def _list_blocks(self, content: Any, role: str, field: str) -> list[tuple[str, dict[str, Any]]]:
        """Returns the blocks of a content, each with its name in the body; text is one block."""
        if isinstance(content, str):
            return [(field, _make_text(content))]
        if not isinstance(content, list):
            message = f"must be text or a list of blocks, got {shorten(content)}"
            raise InvalidRequestError(message, field=field, value=content)
        kinds = (*_BLOCKS[role], "image") if self._reads_images and role in _IMAGES else _BLOCKS[role]
        return [(f"{field}[{at}]", _check_block(block, kinds, f"{field}[{at}]")) for at, block in enumerate(content)]

    def _read_part(self, block: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Returns a text or an image as a part of chats."""
        if block["type"] == "text":
            return _make_text(_read_text(block, where))
        part = {"type": "image_url", "image_url": {"url": _read_source(block.get("source"), f"{where}.source")}}
        self._images[id(part)] = where
        return part


def _make_text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _join_parts(parts: Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Returns the text of parts, joined by line's ends; the parts themselves, so joined, if there are images."""
    joined: list[dict[str, Any]] = []
    for kind, group in groupby(parts, key=lambda part: part["type"]):
        run = list(group)
        joined += [_make_text("\n".join(part["text"] for part in run))] if kind == "text" else run
    if not joined:
        return ""
    return joined[0]["text"] if len(joined) == 1 and joined[0]["type"] == "text" else joined


def _join_contents(first: str | list[dict[str, Any]], second: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Returns two contents as one, like `_join_parts`; the first may change."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n{second}"
    joined, more = ([_make_text(each)] if isinstance(each, str) else each for each in (first, second))
    if joined[-1]["type"] == more[0]["type"] == "text":
        joined[-1] = _make_text(f"{joined[-1]['text']}\n{more[0]['text']}")
        more = more[1:]
    joined += more
    return joined


def _read_source(source: Any, where: str) -> str:
    """Returns the URL of an image's source."""
    kind = source.get("type") if isinstance(source, dict) else None
    known = {"base64": ("type", "media_type", "data"), "url": ("type", "url")}.get(str(kind))
    if known is None:
        message = f"must be base64 or url, as nothing is stored here, got {shorten(kind)}"
        raise InvalidRequestError(message, field=f"{where}.type", value=kind)
    for key, value in source.items():
        if key not in known and value is not None:
            message = f"{shorten(key)} is not supported in a source; {', '.join(known)} are"
            raise InvalidRequestError(message, field=where, value=key)
    if kind == "url":
        return require_text(source.get("url"), f"{where}.url")
    if source.get("media_type") not in _MEDIA_TYPES:
        message = f"must be one of {', '.join(_MEDIA_TYPES)}, got {shorten(source.get('media_type'))}"
        raise InvalidRequestError(message, field=f"{where}.media_type", value=source.get("media_type"))
    data = require_text(source.get("data"), f"{where}.data")
    return f"data:{source['media_type']};base64,{data}"


def _check_block(block: Any, kinds: Sequence[str], where: str) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        message = f"must be {' or '.join(kinds)} here, got {shorten(kind)}"
        if (what := describe_kind(kind)) is not None:
            reason = "" if "image" in kinds else ", as this model is served for text"
            message = f"{message}: it is {what}, which is not read here{reason}"
        raise InvalidRequestError(message, field=f"{where}.type", value=kind)
    for key, value in block.items():
        known = key in _FIELDS[kind] or key in ("type", "cache_control")
        if not known and value is not None and value not in _HARMLESS.get(key, ()):
            message = f"{shorten(key)} is not supported in {kind}; {', '.join(_FIELDS[kind])} are"
            raise InvalidRequestError(message, field=where, value=key)
    found: dict[str, Any] = block
    return found


def _read_text(block: Mapping[str, Any], where: str) -> str:
    return require_text(block.get("text"), f"{where}.text")
