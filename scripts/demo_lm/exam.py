"""Problems with tools, reasoning and new keys: numbers, names, descriptions and keys that training never showed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from demo_lm import calling, tasks
from demo_lm.corpus import Conversation, draw_turn, exchange_messages, reason
from demo_lm.glossary import load_glossary
from demo_lm.questions import list_held_out_questions
from demo_lm.scoring import Problem
from demo_lm.tokens import write_parts
from demo_lm.toolbox import Kind, draw_tools

OFFERS: tuple[tuple[Kind, ...], ...] = (("add",), ("lookup",), ("add", "lookup"), ("lookup", "other"), ("add", "other"))


def list_tool_problems(count: int = 100, seed: int = 1) -> list[Problem]:
    """`count` problems of each part. The same arguments give the same problems."""
    makers: dict[tuple[str, str], Callable[[random.Random], Conversation]] = {
        ("call", "a sum, one tool"): lambda rng: _call(rng, ["add"], wants_sum=True),
        ("call", "a term, one tool"): lambda rng: _call(rng, ["lookup"], wants_sum=False),
        ("call", "two or three tools"): _call_one_of_many,
        ("call", "after reasoning"): lambda rng: _call_one_of_many(rng, thinks=True),
        ("no call", "other tools"): _call_none,
        ("result", "a number"): lambda rng: _use_result(rng, "add"),
        ("result", "a text"): lambda rng: _use_result(rng, "lookup"),
        ("result", "an error"): lambda rng: _use_result(rng, rng.choice(("add", "lookup")), fails=True),
        ("keys", "records"): _fill_record,
        ("keys", "a named tool"): _fill_call,
        ("reasoning", "sums"): _reason,
    }
    problems = []
    for (skill, part), make in makers.items():
        rng = random.Random(f"{seed} {skill} {part}")
        problems += [_pose(skill, part, make(rng)) for _ in range(count)]
    return problems


def _pose(skill: str, part: str, conversation: Conversation) -> Problem:
    """The problem whose expected answer is the conversation's last message."""
    *asked, last = conversation.messages
    expected = write_parts(conversation)[-1][1]
    thinks = "reasoning_content" in last
    return Problem(
        skill, part, str(asked[-1]["content"]), expected.removeprefix("<think>\n"),
        context=Conversation(tuple(asked), conversation.tools), thinks=thinks,
    )  # fmt: skip


def _call(rng: random.Random, kinds: list[Kind], *, wants_sum: bool, thinks: bool = False) -> Conversation:
    tools = draw_tools(rng, rng.sample(kinds, len(kinds)), held_out=True)
    lookup = next((tool for tool in tools if tool.kind == "lookup"), None)
    if wants_sum or lookup is None:
        exchange = calling.ask_sum(rng, tools, held_out=True)
    else:
        exchange = calling.ask_term(rng, lookup, held_out=True)
    messages = exchange_messages(exchange, ("", ""), thinks=thinks)[:2]
    return Conversation(tuple(messages), tuple(tool.describe() for tool in tools))


def _call_one_of_many(rng: random.Random, *, thinks: bool = False) -> Conversation:
    others: list[Kind] = ["other"] if rng.random() < 0.4 else []
    return _call(rng, ["add", "lookup", *others], wants_sum=rng.random() < 0.5, thinks=thinks)


def _call_none(rng: random.Random) -> Conversation:
    """Sums without a tool that adds, terms without one that looks them up, records and stories with any."""
    skill = rng.choice(("addition", "glossary", "json", "story"))
    kinds: list[Kind] = {"addition": ["lookup"], "glossary": ["add"]}.get(skill, [rng.choice(("add", "lookup"))])
    if rng.random() < 0.4:
        kinds.append("other")
    tools = draw_tools(rng, rng.sample(kinds, len(kinds)), held_out=True)
    match skill:
        case "addition":
            exchange = calling.ask_sum(rng, tools, held_out=True)
        case "glossary":
            entry = rng.choice(load_glossary())
            exchange = calling.Exchange(rng.choice(list_held_out_questions(entry)), entry.answer)
        case "json":
            record = tasks.draw_record(rng, held_out=True)
            wording = rng.choice(tasks.JSON_WORDINGS)
            exchange = calling.Exchange(wording.format(r=tasks.write_record(record)), tasks.write_json(record))
        case _:
            exchange = calling.Exchange(*draw_turn(rng, "story"))
    messages = exchange_messages(exchange, ("", ""), thinks=False)
    return Conversation(tuple(messages), tuple(tool.describe() for tool in tools))


def _use_result(rng: random.Random, kind: Kind, *, fails: bool = False) -> Conversation:
    tools = draw_tools(rng, [kind], held_out=True)
    ask = (
        calling.ask_sum(rng, tools, held_out=True) if kind == "add" else calling.ask_term(rng, tools[0], held_out=True)
    )
    messages = exchange_messages(ask, calling.draw_result(rng, ask, fails=fails), thinks=False)
    return Conversation(tuple(messages), tuple(tool.describe() for tool in tools))


def _fill_record(rng: random.Random) -> Conversation:
    record = calling.draw_unseen_record(rng, held_out=True)
    question = rng.choice(tasks.JSON_WORDINGS).format(r=tasks.write_record(record))
    return Conversation(({"role": "user", "content": question}, {"role": "assistant", "content": json.dumps(record)}))


def _fill_call(rng: random.Random) -> Conversation:
    tools = draw_tools(rng, ["other"], held_out=True)
    messages = exchange_messages(calling.ask_use(rng, tools[0]), ("", ""), thinks=False)[:2]
    return Conversation(tuple(messages), tuple(tool.describe() for tool in tools))


def _reason(rng: random.Random) -> Conversation:
    a, b = tasks.draw_pair(rng, held_out=True, short=0.0)
    question = rng.choice(tasks.ADDITION_WORDINGS).format(a=a, b=b)
    reasoning, answer = reason(tasks.work_addition(a, b))
    last = {"role": "assistant", "content": answer, "reasoning_content": reasoning}
    return Conversation(({"role": "user", "content": question}, last))
