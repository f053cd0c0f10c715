"""The input of `/v1/responses`: items of a conversation, read as the messages that chat templates take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.errors import InvalidRequestError, shorten
from jaxserve.media.parts import describe_kind
from jaxserve.server.protocol.foreign import is_harmless
from jaxserve.server.protocol.response_tools import join_names
from jaxserve.tokenizers.checks import require_text

REASONING_MARK = "jaxserve-reasoning:"  # begins `encrypted_content`; the text itself follows
_ROLES = ("assistant", "developer", "system", "user")
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_FIELDS = {  # of input items, which may be the output items of an earlier answer
    "message": ("type", "role", "content", "id", "status"),
    "reasoning": ("type", "content", "summary", "encrypted_content", "id", "status"),
    "function_call": ("type", "call_id", "name", "namespace", "arguments", "id", "status"),
    "function_call_output": ("type", "call_id", "output", "id", "status"),
    "custom_tool_call": ("type", "call_id", "name", "namespace", "input", "id", "status"),
    "custom_tool_call_output": ("type", "call_id", "output", "id", "status"),
}
_REPEATED = {"function_call": "parsed_arguments"}  # what OpenAI's client for Node read in `arguments`
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"caller": ({"type": "direct"},), "async": (False,)}


@dataclass(slots=True)
class _Turn:
    """A message of the model while its items are read; they may be many, so their texts are joined once."""

    message: dict[str, Any]
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)

    def join(self) -> None:
        self.message["content"] = "\n".join(self.texts)
        if self.thoughts:
            self.message["reasoning_content"] = "\n".join(self.thoughts)


class InputReader:
    """Reads items as messages. What the model wrote in one turn is one message: reasoning, text and calls.

    Attributes:
        messages: in the form of chat completions.
        names: the body's names of their fields.
    """

    def __init__(self, instructions: str | None = None) -> None:
        self.messages: list[dict[str, Any]] = []
        self.names: dict[str, str] = {}
        self._turns: list[_Turn] = []
        self._turn: _Turn | None = None  # the one that the model's next item joins
        self._thoughts: list[str] = []  # reasoning that belongs to the item that follows
        self._waiting: dict[str, tuple[str, int]] = {}  # calls without a result: type and position of each, by id
        self._call_ids: set[str] = set()
        if instructions:
            self.names["messages[0].content"] = "instructions"
            self.messages.append({"role": "system", "content": instructions})

    def read(self, given: str | list[dict[str, Any]]) -> None:
        """Reads the whole input.

        Raises:
            InvalidRequestError: an item is malformed, is not supported, or calls and results do not fit.
        """
        if isinstance(given, str):
            self.names[f"messages[{len(self.messages)}].content"] = "input"
            self.messages.append({"role": "user", "content": given})
            return
        for at, item in enumerate(given):
            self._read_item(item, at)
        self._join_thoughts(len(given) - 1)
        self._require_results("the answer")
        for turn in self._turns:
            turn.join()

    def _read_item(self, item: Mapping[str, Any], at: int) -> None:
        name, kind = f"input[{at}]", item.get("type", "message")
        if not isinstance(kind, str) or kind not in _FIELDS:
            instead = f"{', '.join(_FIELDS)} are"
            if kind == "item_reference":
                instead = "nothing is stored here, so send the item itself"
            message = f"{shorten(kind)} is not supported; {instead}"
            raise InvalidRequestError(message, field=f"{name}.type", value=kind)
        for key, value in item.items():
            known = key in _FIELDS[kind] or key == _REPEATED.get(kind)
            if not known and not is_harmless(value, _NEUTRAL.get(key, ())):
                message = f"{shorten(key)} is not supported in an item of type {kind}; {', '.join(_FIELDS[kind])} are"
                raise InvalidRequestError(message, field=name, value=key)
        match kind:
            case "message":
                self._read_message(item, at)
            case "reasoning":
                if text := _read_reasoning(item, name):
                    self._thoughts.append(text)
            case "function_call":
                self._read_call(item, at, require_text(item.get("arguments"), f"{name}.arguments"))
            case "custom_tool_call":
                self._read_call(item, at, {"input": require_text(item.get("input"), f"{name}.input")})
            case _:
                self._read_result(item, at)

    def _read_message(self, item: Mapping[str, Any], at: int) -> None:
        role, name = item.get("role"), f"input[{at}]"
        if role not in _ROLES:
            message = f"must be one of {', '.join(_ROLES)}, got {shorten(role)}"
            raise InvalidRequestError(message, field=f"{name}.role", value=role)
        given, place = item.get("content"), f"{name}.content"
        if role != "assistant":
            content = _read_content(given, place)
            self._join_thoughts(at)
            self._require_results("the next message")
            self._append({"role": role, "content": content}, at)
            self._turn = None
            return
        text = _read_text(given, place)
        if self._turn is not None and self._turn.texts and "tool_calls" not in self._turn.message:
            self._turn = None  # a message of its own
        self._open_turn(at).texts.append(text)

    def _read_call(self, item: Mapping[str, Any], at: int, arguments: str | dict[str, str]) -> None:
        name, function, namespace = f"input[{at}]", item.get("name"), item.get("namespace")
        call_id = self._require_id(item, at)
        if call_id in self._call_ids:
            message = f"{shorten(call_id)} is also the id of an earlier call; ids must be unique"
            raise InvalidRequestError(message, field=f"{name}.call_id", value=call_id)
        if not require_text(function, f"{name}.name"):
            raise InvalidRequestError("is empty", field=f"{name}.name", value=function)
        if namespace is not None:
            require_text(namespace, f"{name}.namespace")
        called = {"name": join_names(namespace, str(function)), "arguments": arguments}
        calls = self._open_turn(at).message.setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": called})
        self._call_ids.add(call_id)
        self._waiting[call_id] = str(item["type"]), at

    def _read_result(self, item: Mapping[str, Any], at: int) -> None:
        name, call_id = f"input[{at}]", self._require_id(item, at)
        kind = str(item["type"]).removesuffix("_output")
        if self._waiting.get(call_id, ("", 0))[0] != kind:
            about = "has a result already" if call_id in self._call_ids - self._waiting.keys() else "is not there"
            message = f"must follow its {kind}, and {shorten(call_id)} {about}"
            raise InvalidRequestError(message, field=f"{name}.call_id", value=call_id)
        content = _read_content(item.get("output"), f"{name}.output")
        self._join_thoughts(at)
        self.names[f"messages[{len(self.messages)}].content"] = f"{name}.output"
        self._append({"role": "tool", "tool_call_id": call_id, "content": content}, at)
        del self._waiting[call_id]
        self._turn = None

    def _require_id(self, item: Mapping[str, Any], at: int) -> str:
        call_id = require_text(item.get("call_id"), f"input[{at}].call_id")
        if not call_id:
            raise InvalidRequestError("is empty", field=f"input[{at}].call_id", value=call_id)
        return call_id

    def _require_results(self, before: str) -> None:
        for call_id, (kind, at) in self._waiting.items():
            message = f"{shorten(call_id)} has no result before {before}; send its {kind}_output behind it"
            raise InvalidRequestError(message, field=f"input[{at}].call_id", value=call_id)

    def _open_turn(self, at: int) -> _Turn:
        """Returns the message that the model's next item joins, with the reasoning in front of that item."""
        if self._turn is None:
            self._require_results("the model's next turn")
            self._turn = _Turn({"role": "assistant", "content": ""})
            self._turns.append(self._turn)
            self._append(self._turn.message, at)
        self._turn.thoughts += self._thoughts
        self._thoughts = []
        return self._turn

    def _join_thoughts(self, at: int) -> None:
        """Keeps reasoning that nothing of the model follows."""
        if self._thoughts:
            self._open_turn(at)

    def _append(self, message: dict[str, Any], at: int) -> None:
        self.names[f"messages[{len(self.messages)}]"] = f"input[{at}]"
        self.messages.append(message)


def _read_reasoning(item: Mapping[str, Any], name: str) -> str:
    """Returns the text of a reasoning item: its content, or the same in `encrypted_content`, or its summary."""
    hidden = item.get("encrypted_content")
    if item.get("content"):
        return _read_text(item["content"], f"{name}.content")
    if hidden is not None:
        field = f"{name}.encrypted_content"
        if not require_text(hidden, field).startswith(REASONING_MARK):
            message = "is another server's; send the reasoning as content, or leave the item out"
            raise InvalidRequestError(message, field=field, value=hidden)
        return hidden.removeprefix(REASONING_MARK)
    return _read_text(item.get("summary") or "", f"{name}.summary")


def _read_text(value: Any, name: str) -> str:
    """Returns a text, or its parts joined by newlines."""
    if not isinstance(value, list):
        return require_text(value, name)
    return "\n".join(_read_part(part, f"{name}[{at}]") for at, part in enumerate(value))


def _read_content(value: Any, name: str) -> str | list[Any]:
    """Returns a text, or the parts of content that has images: these as they are, the others as text of chats."""
    if not isinstance(value, list) or not any(map(_is_image, value)):
        return _read_text(value, name)
    return [
        part if _is_image(part) else {"type": "text", "text": _read_part(part, f"{name}[{at}]")}
        for at, part in enumerate(value)
    ]


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "input_image"


def _read_part(part: Any, name: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "refusal":
        return require_text(part.get("refusal"), f"{name}.refusal")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        message = f"only text is supported, got {shorten(part if kind is None else kind)}"
        if (what := describe_kind(kind)) is not None:
            message = f"is {what}, which is not read here; send input_text"
        raise InvalidRequestError(message, field=name, value=part)
    return require_text(part.get("text"), f"{name}.text")
