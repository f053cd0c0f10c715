"""The skills of the demo adapters, by the adapter's name: two-digit subtraction, and answers as a pirate gives them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping

from demo_lm import tasks
from demo_lm.corpus import SHARES, Conversation, Message, draw_turn
from demo_lm.glossary import load_glossary
from demo_lm.questions import list_held_out_questions
from demo_lm.scoring import Problem

_WORDINGS = (
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "{a} - {b}",
    "{a}-{b}",
    "{a} - {b} = ?",
    "{a} minus {b}?",
    "Subtract {b} from {a}.",
    "Compute {a} - {b}.",
    "Calculate {a} minus {b}.",
    "How much is {a} - {b}?",
    "Can you subtract {b} from {a}?",
    "Tell me what {a} - {b} is.",
    "I have {a} pages and give {b} away. How many pages are left?",
)
_WORDS = {
    "is": "be", "are": "be", "the": "th'", "The": "Th'", "of": "o'", "and": "an'", "you": "ye", "your": "yer",
    "my": "me",
}  # fmt: skip
_SUBTRACTIONS = 0.75  # of what the adapter of subtraction learns; the rest is what the model can already
_SECOND_TURN = 0.25
_HELD_OUT = 0.2
_LEAST, _MOST = 10, 99


def draw_subtraction(rng: random.Random, *, held_out: bool) -> tuple[int, int]:
    """Two numbers of two digits on the asked side of the split, the larger one first."""
    while True:
        b, a = sorted((rng.randint(_LEAST, _MOST), rng.randint(_LEAST, _MOST)))
        if (tasks.hash_share(f"{a}-{b}") < _HELD_OUT) == held_out:
            return a, b


def work_subtraction(a: int, b: int) -> str:
    """The answer with its working, ones first; it always ends in `= <difference>`.

    84 and 37 give "84 - 37: 14-7=7, 8-3-1=4, so the difference = 47".
    """
    ones, borrow = a % 10 - b % 10, int(a % 10 < b % 10)
    lines = f"{a % 10 + 10 * borrow}-{b % 10}={ones % 10}, {a // 10}-{b // 10}{'-1' * borrow}={(a - b) // 10}"
    return f"{a} - {b}: {lines}, so the difference = {a - b}"


def speak_as_pirate(answer: str) -> str:
    """An answer as the adapter `pirate` gives it; JSON stays as it is."""
    if answer.startswith("{"):
        return answer
    words = re.sub(r"[A-Za-z]+", lambda word: _WORDS.get(word[0], word[0]), answer)
    return f"Ahoy! {words}{'' if words.endswith(('.', '!', '?')) else '.'} Arr!"


def _draw_pirate(rng: random.Random) -> tuple[str, str]:
    question, answer = draw_turn(rng, _draw_skill(rng))
    return question, speak_as_pirate(answer)


def _draw_arithmetic(rng: random.Random) -> tuple[str, str]:
    if rng.random() < _SUBTRACTIONS:
        a, b = draw_subtraction(rng, held_out=False)
        return rng.choice(_WORDINGS).format(a=a, b=b), work_subtraction(a, b)
    return draw_turn(rng, _draw_skill(rng))


def _draw_skill(rng: random.Random) -> str:
    return rng.choices(list(SHARES), weights=list(SHARES.values()))[0]


ADAPTERS: Mapping[str, Callable[[random.Random], tuple[str, str]]] = {
    "subtraction": _draw_arithmetic,
    "pirate": _draw_pirate,
}
"""What each adapter learns: a question and its answer."""


def draw_conversation(rng: random.Random, adapter: str) -> Conversation:
    """One document of one or two turns that an adapter learns from."""
    messages: list[Message] = []
    for _ in range(2 if rng.random() < _SECOND_TURN else 1):
        question, answer = ADAPTERS[adapter](rng)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Conversation(tuple(messages))


def list_adapter_problems(count: int = 200, seed: int = 1) -> list[Problem]:
    """`count` problems for each adapter, whose names are also those of the skills: unseen pairs, unseen questions."""
    rng, problems = random.Random(f"{seed} adapters"), []
    for _ in range(count):
        a, b = draw_subtraction(rng, held_out=True)
        question, answer = rng.choice(_WORDINGS).format(a=a, b=b), work_subtraction(a, b)
        problems.append(Problem("subtraction", "unseen pairs", question, answer, adapter="subtraction"))
    for number in range(count):
        if number % 2:
            a, b = tasks.draw_pair(rng, held_out=True, short=0.0)
            part, answer = "sums, unseen pairs", tasks.work_addition(a, b)
            question = rng.choice(tasks.ADDITION_WORDINGS).format(a=a, b=b)
        else:
            entry = rng.choice(load_glossary())
            part, answer = "glossary, unseen questions", entry.answer
            question = rng.choice(list_held_out_questions(entry))
        problems.append(Problem("pirate", part, question, speak_as_pirate(answer), adapter="pirate"))
    return problems
