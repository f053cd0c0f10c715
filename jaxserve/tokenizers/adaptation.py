"""Gives a conversation the form that a chat template shows, so that none of its messages vanishes.

Templates leave out roles that they do not know, without a word. Some join a call's arguments as text, some refuse ids
that are not nine letters and digits, some show the id in place of the function's name. A template is asked by
rendering short conversations with marks; what it answered is kept.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from jaxserve.errors import InvalidRequestError, TokenizerError
from jaxserve.tokenizers.renderer import RenderTimeoutError

Message = dict[str, Any]
Render = Callable[[list[Message]], str]  # of a template, with its usual variables and one tool, named f
INSTRUCTIONS = ("system", "developer")
_RESULTS = ("tool", "function", "ipython")
_MOST_ROLES = 4  # of a question; more messages of instructions are joined or not as the first four are
_MOST_ANSWERS = 512
_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
SAMPLE_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "Finds.",
            "parameters": {
                "type": "object",
                "properties": {"k": {"type": "string", "description": "A key."}},
                "required": ["k"],
            },
        },
    }
]


class Answer(StrEnum):
    SHOWN = "shown"
    LEFT_OUT = "left out"
    REFUSED = "refused"


class Ids(StrEnum):
    ANY = "any"
    SHORT = "short"  # nine letters and digits
    NAMED = "named"  # functions.name:0, counted through the conversation


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form of a message of calls, and of the results behind it, that a template shows."""

    has_text_arguments: bool = False  # else an object
    has_no_content: bool = False  # content beside calls is a message of its own, and None here
    ids: Ids = Ids.ANY


_FORMS = tuple(itertools.starmap(CallForm, itertools.product((False, True), (False, True), Ids)))


class TemplateForm:
    """The forms that one template shows. Safe to use from several threads.

    Args:
        key: equal for equal templates with equal variables.
        render: raises InvalidRequestError or TokenizerError where the template refuses the messages.
    """

    def __init__(self, key: str, render: Render) -> None:
        self._key, self._render = key, render

    def ask_leading(self, roles: Sequence[str]) -> Answer:
        """Asks for instructions at the beginning, by the roles of their messages."""
        roles = tuple(roles[:_MOST_ROLES])
        messages = [_say(role, number) for number, role in enumerate(roles)]
        return self._ask([*messages, _say("user", len(roles))], range(len(roles) + 1))

    def ask_later(self, role: str) -> Answer:
        """Asks for instructions between turns. They are left out if they change what was before them."""
        roles = ("user", "assistant", role, "user")
        return self._ask([_say(each, number) for number, each in enumerate(roles)], (1, 2, 3))

    def ask_turns(self) -> Answer:
        """Asks for turns of the user and the assistant."""
        roles = ("user", "assistant", "user", "assistant", "user")
        return self._ask([_say(role, number) for number, role in enumerate(roles)], range(len(roles)))

    def ask_calls(self, form: CallForm, role: str | None = "tool", *, has_text: bool = False) -> Answer:
        """Asks for calls in a form, and for their results in messages of a role; with None there are no results."""
        function = {"name": _mark(6), "arguments": {"k": _mark(2)}}
        call = {"id": "call_0123456789ab", "type": "function", "function": function}
        turn = {"role": "assistant", "content": _mark(1) if has_text else "", "tool_calls": [call]}
        results = [{**_say(role, 3), "tool_call_id": call["id"], "name": "f"}] if role is not None else []
        messages = [_say("user", 0), turn, *results, _say("assistant", 4), _say("user", 5)]
        asked = ((1, has_text), (6, True), (2, True), (3, role is not None))
        marks = [number for number, is_asked in asked if is_asked]
        return self._ask(list(_write_calls(messages, form)), marks, wrong=str({"k": _mark(2)}))

    def find_call_form(self, role: str | None = "tool") -> CallForm | None:
        """Returns the first form of calls that is shown, the usual one if it is refused, None if none is shown."""
        usual = self.ask_calls(CallForm(), role)
        shown = (form for form in _FORMS if self.ask_calls(form, role) is Answer.SHOWN)
        return next(shown, CallForm() if usual is Answer.REFUSED else None)

    def find_text_form(self, form: CallForm) -> CallForm:
        """Returns the form of a message of calls that has text, too. Where no form shows the text, it is `form`."""
        forms = (form, replace(form, has_no_content=True))
        return next((each for each in forms if self.ask_calls(each, has_text=True) is Answer.SHOWN), form)

    def _ask(self, messages: list[Message], marks: Sequence[int], wrong: str | None = None) -> Answer:
        question = f"{self._key} {json.dumps(messages)}"
        answer = _ANSWERS.find(question)
        if answer is None:
            answer = self._render_marks(messages, marks, wrong)
            _ANSWERS.keep(question, answer)
        return answer

    def _render_marks(self, messages: list[Message], marks: Sequence[int], wrong: str | None) -> Answer:
        try:
            text = self._render(messages)
        except RenderTimeoutError:
            raise
        except (InvalidRequestError, TokenizerError):
            return Answer.REFUSED
        places = [text.find(_mark(number)) for number in marks]
        is_shown = places == sorted(places) and -1 not in places and not (wrong is not None and wrong in text)
        return Answer.SHOWN if is_shown else Answer.LEFT_OUT


class _Answers:
    """The answers to the latest questions."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, question: str) -> Answer | None:
        with self._lock:
            if question in self._answers:
                self._answers.move_to_end(question)
            return self._answers.get(question)

    def keep(self, question: str, answer: Answer) -> None:
        with self._lock:
            self._answers[question] = answer
            if len(self._answers) > _MOST_ANSWERS:
                self._answers.popitem(last=False)


_ANSWERS = _Answers()


def make_key(template: str, variables: Mapping[str, Any]) -> str:
    """Returns the key of a template with its variables."""
    return hashlib.sha256(json.dumps([template, dict(variables)]).encode()).hexdigest()


def adapt(messages: Sequence[Message], form: TemplateForm) -> list[Message]:
    """Returns checked messages in the form that a template shows.

    Raises:
        InvalidRequestError: a message would be left out, whatever its form.
    """
    num_leading = next((at for at, each in enumerate(messages) if each["role"] not in INSTRUCTIONS), len(messages))
    if len(messages) > num_leading + 1 and form.ask_turns() is Answer.LEFT_OUT:
        message = "the chat template does not show earlier turns, so the model would not know of them; send one message"
        raise InvalidRequestError(message, field=f"messages[{num_leading}]")
    adapted = _adapt_leading(messages[:num_leading], form) + _adapt_later(messages[num_leading:], form)
    at = next((at for at, each in enumerate(messages) if "tool_calls" in each or each["role"] in _RESULTS), None)
    if at is None:
        return adapted
    calls = form.find_call_form("tool" if any(each["role"] in _RESULTS for each in messages) else None)
    if calls is None:
        message = "the chat template does not show calls and their results, so the model would not know of them"
        raise InvalidRequestError(message, field=f"messages[{at}]")
    has_text = any("tool_calls" in each and each["content"] for each in adapted)
    return list(_write_calls(adapted, calls, form.find_text_form(calls) if has_text else calls))


def _adapt_leading(messages: Sequence[Message], form: TemplateForm) -> list[Message]:
    roles = [message["role"] for message in messages]
    if not any(message["content"] for message in messages) or form.ask_leading(roles) is Answer.SHOWN:
        return list(messages)
    answers = {role: form.ask_leading([role]) for role in INSTRUCTIONS}
    role = next((role for role in INSTRUCTIONS if answers[role] is Answer.SHOWN), "system")
    if answers[role] is Answer.LEFT_OUT:
        message = "is left out by the chat template; put instructions into the first message of the user"
        raise InvalidRequestError(message, field="messages[0].role", value=roles[0])
    return [{"role": role, "content": "\n\n".join(message["content"] for message in messages)}]


def _adapt_later(messages: Sequence[Message], form: TemplateForm) -> list[Message]:
    """Instructions that are not shown as a turn join the next message of the user: no earlier turn changes."""
    adapted: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role in INSTRUCTIONS:
            shown = next((each for each in (role, "system") if form.ask_later(each) is Answer.SHOWN), None)
            if shown is None:
                waiting.append(content)
            else:
                adapted.append({**message, "role": shown})
            continue
        if role in _RESULTS and role != "tool":
            calls = form.find_call_form(role)
            if calls is None or form.ask_calls(calls, role) is not Answer.SHOWN:
                role = "tool"
        if waiting and role == "user":
            content, waiting = _put_before(waiting, content), []
        adapted.append({**message, "role": role, "content": content})
    return [*adapted, {"role": "user", "content": "\n\n".join(waiting)}] if waiting else adapted


def _put_before(texts: Sequence[str], content: Any) -> Any:
    """Returns content, a string or a list of parts, with texts in front of it."""
    if isinstance(content, list):
        return [{"type": "text", "text": "\n\n".join([*texts, ""])}, *content]
    return "\n\n".join([*texts, content])


def _write_calls(messages: Sequence[Message], form: CallForm, with_text: CallForm | None = None) -> Iterator[Message]:
    """Yields the messages with calls and results in a form; `with_text` is the form of calls beside text."""
    known: dict[str, str] = {}  # the ids of the calls so far, as they came: as they are written
    num_calls = 0
    for message in messages:
        calls, changed = message.get("tool_calls"), dict(message)
        if "tool_call_id" in message:
            result_of = message["tool_call_id"]
            changed["tool_call_id"] = known.get(result_of) or _write_id(result_of, form)
        if calls:
            changed["tool_calls"] = []
            for call in calls:
                written = _write_call(call, form, num_calls)
                num_calls += 1
                changed["tool_calls"].append(written)
                if "id" in call:
                    known[call["id"]] = written["id"]
            if ((with_text or form) if message["content"] else form).has_no_content:
                if message["content"]:
                    yield {key: value for key, value in changed.items() if key != "tool_calls"}
                    changed.pop("reasoning_content", None)
                changed["content"] = None
        yield changed


def _write_call(call: Mapping[str, Any], form: CallForm, number: int) -> Message:
    written, function = dict(call), dict(call["function"])
    if form.has_text_arguments and not isinstance(function["arguments"], str):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    if form.ids is Ids.NAMED:
        written["id"] = f"functions.{function['name']}:{number}"
    elif "id" in call:
        written["id"] = _write_id(call["id"], form)
    return {**written, "function": function}


def _write_id(call_id: str, form: CallForm) -> str:
    return shorten_id(call_id) if form.ids is Ids.SHORT else call_id


@functools.lru_cache(maxsize=1024)
def shorten_id(call_id: str) -> str:
    """Returns an id of nine letters and digits for any other: the same for the same, and itself if it has that form."""
    if len(call_id) == 9 and all(character in _LETTERS for character in call_id):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode()).digest()[:8], "big")
    return "".join(_LETTERS[number // 62**place % 62] for place in range(9))


def describe_form(form: TemplateForm) -> list[str]:
    """Returns what a template does not show as it comes, for the log."""
    lines = []
    shown = [role for role in INSTRUCTIONS if form.ask_leading([role]) is Answer.SHOWN]
    for role in INSTRUCTIONS:
        if role not in shown:
            lines.append(f"messages of role {role} are {f'shown as {shown[0]}' if shown else 'refused'}")
    if form.ask_turns() is Answer.LEFT_OUT:
        lines.append("turns before the last message are refused")
    if shown and form.ask_leading([shown[0]] * 2) is not Answer.SHOWN:
        lines.append(f"messages of role {shown[0]} at the beginning are joined")
    if form.ask_later("system") is not Answer.SHOWN:
        lines.append("a later message of role system joins the next one of the user")
    calls = form.find_call_form()
    if calls is None or form.ask_calls(calls) is not Answer.SHOWN:
        return [*lines, "calls and messages of role tool are refused"]
    if calls.has_text_arguments:
        lines.append("arguments of calls are given as text")
    if calls.ids is not Ids.ANY:
        form_of_ids = {Ids.SHORT: "nine letters and digits", Ids.NAMED: "functions.name:0, for the name is not shown"}
        lines.append(f"ids of calls are mapped to {form_of_ids[calls.ids]}")
    with_text = form.find_text_form(calls)
    if form.ask_calls(with_text, has_text=True) is not Answer.SHOWN:
        lines.append("text beside calls is left out")
    elif with_text.has_no_content:
        lines.append("text beside calls is a message of its own")
    return lines


def _mark(number: int) -> str:
    return f"mark{number}zq"


def _say(role: str, number: int) -> Message:
    return {"role": role, "content": _mark(number)}
