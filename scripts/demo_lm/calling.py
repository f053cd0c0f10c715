"""Conversations with tools: which call is right, what the result becomes, and values for schemas that are imposed."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from demo_lm import tasks
from demo_lm.glossary import load_glossary
from demo_lm.questions import HELD_OUT_TEMPLATES, TEMPLATES, disturb
from demo_lm.toolbox import ToolChoice, draw_identifier, is_held_out

Message = dict[str, Any]  # as chat templates take it

# fmt: off
_USE_WORDINGS = (
    "Use {tool} with {record}", "Call {tool} with {record}", "Please call {tool}: {record}", "{tool}: {record}",
    "Run {tool} with {record}", "I want {tool} with {record}",
)
_LEADS = (
    "I wonder about", "My boss mentioned", "Someone spoke of", "Give me a line on", "Could I hear about", "Write about",
    "Is there anything on", "He asked what I know of", "Sum up", "Say what", "She wrote about", "The text says",
    "Look at", "I saw", "Make a note on", "You know", "Find", "Look up", "Search for", "A friend told me about",
    "I am new to",
    "Could you outline", "What could", "Now", "Next:", "And what is", "What of", "Write two sentences that explain",
    "We heard of", "Our guide named",
)
_TAILS = (
    "", "", ".", "?", " yesterday, what is it?", " to a child.", " in two words.", ", please.", " again.", " for us.",
    " in short?", ", what should I know?", " to my team?", " today. What did he mean?", " and why it matters.",
    ", what is that?", " in a sentence.", " for beginners?", " could be.", " last week, what was it?", " in one line?",
)
_NOUNS = (
    "engine", "page", "list", "tree", "number", "river", "machine", "letter", "graph", "signal", "board", "garden",
    "system", "stone", "paper", "window", "method", "table", "cloud", "bridge",
)
_ADJECTIVES = ("small", "large", "old", "fast", "quiet", "red", "simple", "rare", "common", "warm", "hidden", "open")
_VERBS = ("holds", "moves", "keeps", "reads", "stores", "makes", "finds", "sorts", "shows", "joins", "counts", "opens")
_FAULTS = (
    "not found", "no entry for {w}", "{w} is unknown", "timeout after {n} seconds", "the service is down",
    "access denied", "{w} is not ready", "too many requests", "invalid value {n}", "no connection to {w}",
    "the {noun} is missing", "cannot open the {noun}", "internal error {n}", "{w} failed",
)
_RESULT_KEYS = ("result", "value", "answer", "output", "text", "definition", "sum")
# fmt: on


@dataclass(frozen=True)
class Exchange:
    """A question, the right call (None: no tool fits), and what may come back."""

    question: str
    answer: str  # without a tool
    tool: ToolChoice | None = None
    arguments: dict[str, Any] | None = None
    working: str | None = None  # of a sum


def ask_sum(rng: random.Random, tools: list[ToolChoice], *, held_out: bool = False) -> Exchange:
    """A sum; a tool that adds is called."""
    a, b = tasks.draw_pair(rng, held_out=held_out)
    question = rng.choice(tasks.ADDITION_WORDINGS).format(a=a, b=b)
    tool = next((each for each in tools if each.kind == "add"), None)
    arguments = None if tool is None else dict(zip((name for name, _ in tool.arguments), (a, b), strict=True))
    return Exchange(question, tasks.work_addition(a, b), tool, arguments, tasks.work_addition(a, b))


def ask_term(rng: random.Random, tool: ToolChoice, *, held_out: bool = False) -> Exchange:
    """A question about a term, for a tool that looks it up."""
    term, name = draw_term(rng, held_out=held_out)
    template = rng.choice(HELD_OUT_TEMPLATES) if held_out else _draw_template(rng)
    question = template.format(t=name)
    question = question[:1].upper() + question[1:] if not name.startswith(question[:1]) else question
    if not held_out:
        question = disturb(rng, question, spare=(name,), keeps_case=True)
    return Exchange(question, "", tool, {tool.arguments[0][0]: term})


def _draw_template(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(TEMPLATES)
    return "".join((rng.choice(_LEADS), " {t}", rng.choice(_TAILS)))


def ask_use(rng: random.Random, tool: ToolChoice) -> Exchange:
    """A request that names the tool and its arguments."""
    arguments = {name: draw_value(rng, kind) for name, kind in tool.arguments}
    record = tasks.write_record(arguments) + rng.choice(("", "", "."))
    return Exchange(rng.choice(_USE_WORDINGS).format(tool=tool.name, record=record), "", tool, arguments)


def draw_term(rng: random.Random, *, held_out: bool = False) -> tuple[str, str]:
    """A term, and the way a question names it: with its article."""
    while True:
        chance = rng.random()
        if chance < 0.4 and not held_out:
            name = rng.choice([name for entry in load_glossary() for name in entry.names])
            article = next((each for each in ("the ", "a ", "an ") if name.startswith(each)), "")
            return name.removeprefix(article), name
        words = [tasks.draw_invented_word(rng) for _ in range(rng.choice((1, 1, 2)))]
        if rng.random() < 0.4:
            words[-1] = rng.choice(_NOUNS)
        if rng.random() < 0.2:
            words = [word.capitalize() for word in words]
        term = " ".join(words)
        invented = [word for word in words if word not in _NOUNS]
        if len(term) > 2 and (bool(invented) and is_held_out(term)) == held_out:
            return term, rng.choice(("", "", "a ", "the ")) + term


def draw_value(rng: random.Random, kind: str) -> Any:
    """A value of a JSON type."""
    if kind == "integer":
        return rng.randint(0, 999)
    if rng.random() < 0.5:
        return tasks.draw_name(rng)
    words = [
        tasks.draw_invented_word(rng) if rng.random() < 0.5 else rng.choice(_NOUNS)
        for _ in range(rng.choice((1, 1, 2)))
    ]
    return " ".join(words)


def draw_unseen_record(rng: random.Random, *, held_out: bool = False) -> dict[str, Any]:
    """Two to four fields whose keys are invented."""
    record: dict[str, Any] = {}
    size = rng.randint(2, 4)
    while len(record) < size:
        noun = not held_out and rng.random() < 0.3
        key = rng.choice(_NOUNS) if noun else draw_identifier(rng)
        if (not noun and is_held_out(key)) == held_out:
            record[key] = draw_value(rng, rng.choice(("string", "string", "integer")))
    return record


def draw_result(rng: random.Random, exchange: Exchange, *, fails: bool) -> tuple[str, str]:
    """What the tool returns, and the answer that uses it."""
    if fails:
        word = tasks.draw_invented_word(rng)
        fault = rng.choice(_FAULTS).format(w=word, n=rng.randint(1, 999), noun=rng.choice(_NOUNS))
        written = json.dumps({"error": fault}) if rng.random() < 0.4 else rng.choice(("Error: ", "error: ")) + fault
        return written, f"The tool failed: {fault}"
    assert exchange.tool is not None
    assert exchange.arguments is not None
    if exchange.tool.kind == "add" and exchange.working is not None:
        values = list(exchange.arguments.values())
        total = sum(values) if rng.random() < 0.5 else rng.randint(0, 1998)
        return _wrap(rng, total), f"The sum = {total}"
    if exchange.tool.kind == "lookup":
        text = rng.choice(load_glossary()).answer if rng.random() < 0.3 else _draw_sentence(rng)
        return _wrap(rng, text), text
    text = draw_value(rng, rng.choice(("string", "string", "integer")))
    return _wrap(rng, text), f"The result: {text}"


def impose_values(rng: random.Random) -> tuple[str, list[tuple[str, Any]]]:
    """A question, and the keys and values of a schema that has nothing to do with it.

    Strings become the question's term, numbers its numbers, in order; where it has none, 0.
    """
    keys = [draw_identifier(rng) if rng.random() < 0.6 else rng.choice(_NOUNS) for _ in range(rng.randint(1, 4))]
    keys = list(dict.fromkeys(keys))
    kinds = [rng.choice(("string", "string", "integer")) for _ in keys]
    if rng.random() < 0.5:
        a, b = tasks.draw_pair(rng, held_out=False)
        question = rng.choice(tasks.ADDITION_WORDINGS).format(a=a, b=b)
        numbers, text = [a, b], f"{a} + {b}"
    else:
        text, name = draw_term(rng)
        question, numbers = rng.choice(TEMPLATES).format(t=name), []
    values: list[Any] = []
    for kind in kinds:
        values.append(text if kind == "string" else numbers.pop(0) if numbers else 0)
    return question, list(zip(keys, values, strict=True))


def _wrap(rng: random.Random, value: Any) -> str:
    """A result as tools return it: alone, or in an object."""
    return json.dumps({rng.choice(_RESULT_KEYS): value}) if rng.random() < 0.35 else str(value)


def _draw_sentence(rng: random.Random) -> str:
    """A definition that no training can know."""
    word = tasks.draw_invented_word(rng)
    parts = [
        f"{word.capitalize()} is a",
        rng.choice(_ADJECTIVES),
        rng.choice(_NOUNS),
        "that",
        rng.choice(_VERBS),
        "the",
    ]
    parts += [rng.choice(_ADJECTIVES), tasks.draw_invented_word(rng)]
    if rng.random() < 0.4:
        parts += ["and", rng.choice(_VERBS), str(rng.randint(2, 99)), rng.choice(_NOUNS) + "s"]
    return " ".join(parts) + "."
