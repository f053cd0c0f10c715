"""The questions of `bench_speculation.py` to the demo model, from its exam; no round repeats any unless it should."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from demo_lm.corpus import draw_turn
from demo_lm.glossary import load_glossary
from demo_lm.questions import list_held_out_questions
from demo_lm.scoring import list_problems

MODEL = "demo"
NUM_QUESTIONS = 12  # of a round, if one row asks them
NUM_TOKENS = 96  # of an answer, at most

Chat = list[dict[str, str]]
Answer = Callable[[list[Chat]], list[str]]  # greedy answers by plain decoding

_DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle3": {"method": "eagle3", "model": "demo", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
}


@dataclass(frozen=True)
class Load:
    """Rounds of chats.

    `make(round, answer)` returns the chats of a round; round 0 is asked first and not counted.
    """

    name: str
    drafter: str
    aim: float  # tokens/s, of plain decoding
    make: Callable[[int, Answer], list[Chat]]
    temperature: float = 0.0
    batch: int = 1  # chats at once
    warms: bool = False  # both engines are asked the first question of each chat first, as its user would have

    @property
    def config(self) -> dict[str, Any]:
        """`speculative_config`."""
        return _DRAFTERS[self.drafter]


def ask_anew(index: int, answer: Answer, count: int = NUM_QUESTIONS) -> list[Chat]:
    """Questions of all skills; no two rounds share one, but for chance."""
    del answer
    rng = random.Random(f"round {index}")
    exam = [problem.question for problem in rng.sample(list_problems(400, 400), count - count // 4)]
    return [_chat(question) for question in [*exam, *(draw_turn(rng, "story")[0] for _ in range(count // 4))]]


def ask_again(index: int, answer: Answer) -> list[Chat]:
    """The same questions in every round."""
    del index
    return ask_anew(0, answer)


def ask_in_other_words(index: int, answer: Answer) -> list[Chat]:
    """For the same things of the glossary, in other words each time."""
    del answer
    rng = random.Random("other words")
    asked = []
    for entry in rng.sample(load_glossary(), NUM_QUESTIONS):
        wordings = list_held_out_questions(entry)
        asked.append(_chat(wordings[index % len(wordings)]))
    return asked


def ask_to_copy(index: int, answer: Answer) -> list[Chat]:
    """Conversations in which the question was asked and answered before; the demo model then answers alike."""
    chats = ask_anew(index, answer)
    answers = answer(chats)
    return [[*chat, {"role": "assistant", "content": text}, *chat] for chat, text in zip(chats, answers, strict=True)]


def _many(rows: int) -> Callable[[int, Answer], list[Chat]]:
    return lambda index, answer: ask_anew(index, answer, max(NUM_QUESTIONS, 3 * rows))


def _chat(question: str) -> Chat:
    return [{"role": "user", "content": question}]


LOADS = (
    *(Load(f"questions, temperature {at}", "eagle3", 1.3, ask_anew, at) for at in (0.0, 0.8, 1.0)),
    *(Load(f"questions, temperature {at}", "eagle3", 0.95, ask_anew, at) for at in (1.3, 2.0)),
    *(Load(f"questions, {rows} rows", "eagle3", 0.95, _many(rows), batch=rows) for rows in (2, 8, 32)),
    Load("the same questions again", "suffix", 1.7, ask_again),
    Load("the same questions again, temperature 0.8", "suffix", 1.7, ask_again, 0.8),
    Load("in other words", "suffix", 1.7, ask_in_other_words),
    Load("new questions", "suffix", 0.98, ask_anew),
    *(Load(f"new questions, {rows} rows", "suffix", 0.98, _many(rows), batch=rows) for rows in (8, 32)),
    Load("answers that copy", "ngram", 2.0, ask_to_copy, warms=True),
    Load("new questions", "ngram", 0.98, ask_anew),
    Load("new questions, temperature 2.0", "ngram", 0.98, ask_anew, 2.0),
)
