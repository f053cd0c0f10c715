"""Questions that the demo model, which ships in the package, was trained to answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxserve.sampling_params import SamplingParams

MAX_TOKENS = 128  # the longest answers have a little over 100
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
_NAMES = ("Ada", "Grace", "Alan", "Clara", "Emil", "Ida", "Nora", "Otto")
_QUESTIONS = (
    "What is continuous batching?",
    "What is a KV cache?",
    "What does TTFT mean?",
    "Why are KV caches divided into pages?",
    "What is prefill?",
    "What is preemption?",
    "What is prefix caching?",
    "What is jaxserve?",
)


@dataclass(frozen=True)
class Question:
    """One user's message, and how it is answered."""

    skill: str
    text: str
    params: SamplingParams


def make_questions(count: int, rng: random.Random) -> list[Question]:
    """Returns questions over every skill that the demo model has, in random order.

    Stories are sampled, each with its own seed; everything else is greedy.
    """
    makers: dict[str, Callable[[], str]] = {
        "addition": lambda: f"What is {rng.randint(10, 999)} + {rng.randint(10, 999)}?",
        "glossary": lambda: rng.choice(_QUESTIONS),
        "json": lambda: f"Turn this into JSON: name: {rng.choice(_NAMES)}, age: {rng.randint(18, 90)}",
        "story": lambda: "Tell me a story.",
    }
    skills = [list(makers)[index % len(makers)] for index in range(count)]
    rng.shuffle(skills)
    sampled = replace(GREEDY, temperature=0.8, top_p=0.9)
    return [
        Question(skill, makers[skill](), replace(sampled, seed=index) if skill == "story" else GREEDY)
        for index, skill in enumerate(skills)
    ]
