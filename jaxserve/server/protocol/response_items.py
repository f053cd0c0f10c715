"""The output items of `/v1/responses`, and the events of each."""

from __future__ import annotations

import json
import re
from typing import Any, Protocol

from jaxserve.server.protocol.response_input import REASONING_MARK
from jaxserve.server.protocol.response_tools import NamedTool

ItemEvent = tuple[str, dict[str, Any]]  # the type of an event and its values, but for its number
_HIGH, _LOW = r"u[dD][89abAB][0-9a-fA-F]{2}", r"u[dD][c-fC-F][0-9a-fA-F]{2}"  # escapes of the halves of a character
_ESCAPE = rf'(?:["\\/bfnrt]|(?!{_HIGH})u[0-9a-fA-F]{{4}}|{_HIGH}\\{_LOW})'
_CHARACTERS = re.compile(rf'(?:[^"\\]++|\\{_ESCAPE})*+', re.DOTALL)  # of a JSON string, each of them whole
_BEGUN = re.compile(rf"\\(?:u[0-9a-fA-F]{{0,3}}|{_HIGH}(?:\\(?:u[0-9a-fA-F]{{0,3}})?)?)?\Z")  # an escape that is not
_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HEAD_PARTS = ("{", '"input"', ":", '"')
_LONGEST_HEAD = 256  # characters, blanks between its parts included


class OutputItem(Protocol):
    """An item of the answer, while it is written."""

    status: str  # in_progress, completed or incomplete

    def begin(self) -> list[ItemEvent]:
        """Returns the events that announce the item."""
        ...

    def add(self, text: str) -> list[ItemEvent]:
        """Adds text: of a message, of reasoning, or of a call's arguments."""
        ...

    def end(self, status: str) -> list[ItemEvent]:
        """Ends the item and returns the last of its events."""
        ...

    def render(self) -> dict[str, Any]:
        """Returns the item in OpenAI's format."""
        ...


class TextItem:
    """A message or reasoning: one content part of text.

    Args:
        kind: message or reasoning.
        hides: reasoning has its text in `encrypted_content` as well, for clients that send nothing else back.
    """

    def __init__(self, kind: str, item_id: str, index: int, *, hides: bool = False) -> None:
        self.kind, self.status = kind, "in_progress"
        self._id, self._index, self._hides = item_id, index, hides and kind == "reasoning"
        self._part_kind = "output_text" if kind == "message" else "reasoning_text"
        self._logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        self._place = {"item_id": item_id, "output_index": index, "content_index": 0}
        self._texts: list[str] = []

    def begin(self) -> list[ItemEvent]:
        added = {"output_index": self._index, "item": self.render()}
        return [
            ("response.output_item.added", added),
            ("response.content_part.added", {**self._place, "part": self._render_part("")}),
        ]

    def add(self, text: str) -> list[ItemEvent]:
        self._texts.append(text)
        return [(f"response.{self._part_kind}.delta", {**self._place, "delta": text, **self._logprobs})]

    def end(self, status: str) -> list[ItemEvent]:
        self.status = status
        text = "".join(self._texts)
        return [
            (f"response.{self._part_kind}.done", {**self._place, "text": text, **self._logprobs}),
            ("response.content_part.done", {**self._place, "part": self._render_part(text)}),
            ("response.output_item.done", {"output_index": self._index, "item": self.render()}),
        ]

    def render(self) -> dict[str, Any]:
        text = "".join(self._texts)
        content = [] if self.status == "in_progress" else [self._render_part(text)]
        found = {"id": self._id, "type": self.kind, "status": self.status, "content": content}
        if self.kind == "message":
            return {**found, "role": "assistant"}
        hidden = {"encrypted_content": REASONING_MARK + text} if self._hides and self.status != "in_progress" else {}
        return {**found, "summary": [], **hidden}

    def _render_part(self, text: str) -> dict[str, Any]:
        found = {"type": self._part_kind, "text": text}
        return {**found, "annotations": [], **self._logprobs} if self.kind == "message" else found


class CallItem:
    """A call of a function or of a custom tool.

    Args:
        is_raw: the text of a custom call is its input itself, not JSON with the input in it.
    """

    kind = "call"

    def __init__(self, tool: NamedTool, call_id: str, item_id: str, index: int, *, is_raw: bool = False) -> None:
        self.status = "in_progress"
        self._tool, self._call_id, self._id, self._index = tool, call_id, item_id, index
        self._place = {"item_id": item_id, "output_index": index}
        self._texts: list[str] = []
        self._reader = None if is_raw or tool.kind == "function" else InputText()
        is_function = tool.kind == "function"
        self._type, self._field = ("function_call", "arguments") if is_function else ("custom_tool_call", "input")
        self._event = f"response.{self._type}_{self._field}"

    def begin(self) -> list[ItemEvent]:
        return [("response.output_item.added", {"output_index": self._index, "item": self.render()})]

    def add(self, text: str) -> list[ItemEvent]:
        return self._tell(text if self._reader is None else self._reader.push(text))

    def end(self, status: str) -> list[ItemEvent]:
        events = self._tell(self._reader.finish()) if self._reader is not None else []
        self.status = status
        done = {**self._place, self._field: "".join(self._texts)}
        if self._tool.kind == "function":
            done["name"] = self._tool.name
        events.append((f"{self._event}.done", done))
        return [*events, ("response.output_item.done", {"output_index": self._index, "item": self.render()})]

    def render(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": self._type,
            "status": self.status,
            "call_id": self._call_id,
            "name": self._tool.name,
            self._field: "".join(self._texts),
            **({"namespace": self._tool.namespace} if self._tool.namespace is not None else {}),
        }

    def _tell(self, text: str) -> list[ItemEvent]:
        if not text:
            return []
        self._texts.append(text)
        return [(f"{self._event}.delta", {**self._place, "delta": text})]


class InputText:
    """Reads the text in `{"input": "..."}` as its JSON comes. Arguments of any other form are the text themselves."""

    def __init__(self) -> None:
        self._held = ""
        self._state = "head"  # then text, then end; or raw

    def push(self, piece: str) -> str:
        """Returns what is certain of the text."""
        if self._state in ("raw", "end"):
            return piece if self._state == "raw" else ""
        self._held += piece
        if self._state == "head":
            if (head := _HEAD.match(self._held)) is not None:
                self._state, self._held = "text", self._held[head.end() :]
            elif _may_become_head(self._held):
                return ""
            else:
                self._state = "raw"
                return self._take_held()
        return self._read_characters()

    def finish(self) -> str:
        """Returns what was held back, at the end of the arguments."""
        return "" if self._held.isspace() else self._take_held()

    def _take_held(self) -> str:
        held, self._held = self._held, ""
        return held

    def _read_characters(self) -> str:
        texts, held, at = [], self._held, 0
        while self._state == "text":
            whole = _CHARACTERS.match(held, at)
            assert whole is not None  # the empty text matches
            texts.append(_decode(whole[0]))
            at = whole.end()
            if held.startswith('"', at):
                self._state, at = "end", len(held)
            elif at == len(held) or _BEGUN.match(held, at):
                break
            else:  # the escape is broken
                texts.append(held[at])
                at += 1
        self._held = held[at:]
        return "".join(texts)


def _may_become_head(text: str) -> bool:
    """Whether text is the beginning of `{"input": "`, with any blanks between its parts."""
    rest = text.lstrip()
    if len(text) > _LONGEST_HEAD:
        return False
    for part in _HEAD_PARTS:
        if not rest.startswith(part):
            return part.startswith(rest)
        rest = rest[len(part) :].lstrip()
    return True


def _decode(escaped: str) -> str:
    """Returns the characters of a part of a JSON string. Halves of characters become U+FFFD."""
    if "\\" not in escaped:
        return escaped
    text: str = json.loads(f'"{escaped}"', strict=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
