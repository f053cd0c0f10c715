"""The stream of training conversations: which skills, in what proportion, in how many turns."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from demo_lm import calling, tasks
from demo_lm.glossary import load_glossary
from demo_lm.questions import draw_question
from demo_lm.toolbox import Kind, ToolChoice, draw_tools

SHARES = {"addition": 0.42, "glossary": 0.32, "json": 0.17, "story": 0.09}
"""How often each skill without tools is drawn, by turns (not by tokens)."""

FORMS = {"plain": 0.55, "thinking": 0.08, "tools": 0.33, "imposed": 0.04}
"""How often each kind of document is drawn."""

_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Be brief.",
    "You answer questions about jaxserve.",
    "Answer in one sentence.",
)
_PLAIN_STORIES = 0.5
_OFFERS: tuple[tuple[Kind, ...], ...] = (  # tools of one document, before they are shuffled
    ("add",), ("lookup",), ("add", "lookup"), ("add", "lookup"), ("add", "other"), ("lookup", "other"), ("other",),
    ("add", "lookup", "other"),
)  # fmt: skip

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """What one training document says, in the form that chat templates take; or plain text."""

    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    text: str = ""
    imposed: str = ""  # beginning of the last answer that a grammar would force: it is not learned


@dataclass(frozen=True)
class Turn:
    """A question and its exact answer; the answer in two parts, where the model may reason first."""

    question: str
    answer: str
    reasoning: str
    conclusion: str


def draw_turn(rng: random.Random, skill: str) -> tuple[str, str]:
    """A question of the training side and its exact answer.

    Args:
        rng: the only source of randomness.
        skill: a key of `SHARES`; anything else raises ValueError.
    """
    match skill:
        case "addition":
            a, b = tasks.draw_pair(rng, held_out=False)
            return rng.choice(tasks.ADDITION_WORDINGS).format(a=a, b=b), tasks.work_addition(a, b)
        case "glossary":
            entry = rng.choice(load_glossary())
            return draw_question(rng, entry), entry.answer
        case "json":
            unseen = rng.random() < 0.4
            record = calling.draw_unseen_record(rng) if unseen else tasks.draw_record(rng, held_out=False)
            wording = rng.choice(tasks.JSON_WORDINGS)
            return wording.format(r=tasks.write_record(record)), tasks.write_json(record)
        case "story":
            return tasks.draw_story(rng)
    raise ValueError(f"skill {skill!r} is not one of {sorted(SHARES)}")


def reason(answer: str) -> tuple[str, str]:
    """An answer without tools as a model that reasons gives it: the working of a sum is the reasoning."""
    working, found, total = answer.partition(", so the sum = ")
    return (working, f"The sum = {total}") if found else ("I know that.", answer)


def draw_conversation(rng: random.Random) -> Conversation:
    """One document of a form in `FORMS`."""
    form = rng.choices(list(FORMS), weights=list(FORMS.values()))[0]
    match form:
        case "tools":
            return _draw_tool_conversation(rng)
        case "imposed":
            return _draw_imposed(rng)
    return _draw_plain(rng, thinks=form == "thinking")


def answer_message(answer: str, *, thinks: bool) -> Message:
    """The assistant's message of an answer that needs no tool."""
    if not thinks:
        return {"role": "assistant", "content": answer}
    reasoning, conclusion = reason(answer)
    return {"role": "assistant", "content": conclusion, "reasoning_content": reasoning}


def exchange_messages(
    exchange: calling.Exchange, result: tuple[str, str], *, thinks: bool, has_tools: bool = True
) -> list[Message]:
    """All messages of one question: it, the call with its result if a tool fits, the answer."""
    user: Message = {"role": "user", "content": exchange.question}
    if exchange.tool is None:
        last = answer_message(exchange.answer, thinks=thinks)
        if has_tools and last.get("reasoning_content") == "I know that.":
            last["reasoning_content"] = "No tool fits."
        return [user, last]
    function = {"name": exchange.tool.name, "arguments": exchange.arguments}
    call: Message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    written, answer = result
    last = {"role": "assistant", "content": answer}
    if thinks:
        call["reasoning_content"] = f"{exchange.tool.name} fits."
        last["reasoning_content"] = "I have the result."
    return [user, call, {"role": "tool", "content": written}, last]


def _draw_plain(rng: random.Random, *, thinks: bool) -> Conversation:
    """Mostly a single turn, now and then several, a system prompt, or a story as plain text."""
    skills = _draw_skills(rng, 1)
    if skills == ["story"] and rng.random() < _PLAIN_STORIES and not thinks:
        return Conversation(text=draw_turn(rng, "story")[1])
    if rng.random() < 0.12:
        skills += _draw_skills(rng, rng.choice((1, 1, 1, 2, 2, 3, 5)))
    messages = _draw_system(rng, 0.05)
    for skill in skills:
        question, answer = draw_turn(rng, skill)
        messages += [{"role": "user", "content": question}, answer_message(answer, thinks=thinks)]
    return Conversation(tuple(messages))


def _draw_tool_conversation(rng: random.Random) -> Conversation:
    """Tools, and one to three questions with what follows from each."""
    kinds = list(rng.choice(_OFFERS))
    rng.shuffle(kinds)
    tools = draw_tools(rng, kinds)
    messages, thinks = _draw_system(rng, 0.2), rng.random() < 0.2
    for _ in range(rng.choice((1, 2, 2, 3))):
        exchange = _draw_exchange(rng, tools)
        result = ("", "")
        if exchange.tool is not None:
            result = calling.draw_result(rng, exchange, fails=rng.random() < 0.2)
        messages += exchange_messages(exchange, result, thinks=thinks)
    return Conversation(tuple(messages), tuple(tool.describe() for tool in tools))


def _draw_exchange(rng: random.Random, tools: list[ToolChoice]) -> calling.Exchange:
    lookup = next((tool for tool in tools if tool.kind == "lookup"), None)
    chance = rng.random()
    if chance < 0.4:
        return calling.ask_sum(rng, tools)
    if chance < 0.55:
        return calling.ask_use(rng, rng.choice(tools))
    if chance < 0.88 and lookup is not None:
        return calling.ask_term(rng, lookup)
    skill = rng.choice(("json", "json", "story") if lookup is not None else ("glossary", "glossary", "json", "story"))
    return calling.Exchange(*draw_turn(rng, skill))


def _draw_imposed(rng: random.Random) -> Conversation:
    """An answer whose keys a grammar imposes, as an object or as the call of a tool that does not fit."""
    question, pairs = calling.impose_values(rng)
    user = {"role": "user", "content": question}
    value = dict(pairs)
    if rng.random() < 0.5:
        return Conversation((user, {"role": "assistant", "content": json.dumps(value)}), imposed="{")
    tool = draw_tools(rng, ["other"])[0]
    kinds = {key: "string" if isinstance(each, str) else "integer" for key, each in pairs}
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    described = {"type": "function", "function": {**tool.function, "parameters": parameters}}
    call = {"type": "function", "function": {"name": tool.name, "arguments": value}}
    return Conversation(
        (user, {"role": "assistant", "content": "", "tool_calls": [call]}), (described,), imposed="<tool_call>"
    )


def _draw_system(rng: random.Random, share: float) -> list[Message]:
    return [{"role": "system", "content": rng.choice(_SYSTEM_PROMPTS)}] if rng.random() < share else []


def _draw_skills(rng: random.Random, count: int) -> list[str]:
    return rng.choices(list(SHARES), weights=list(SHARES.values()), k=count)
