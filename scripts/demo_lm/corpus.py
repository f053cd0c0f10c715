"""The stream of training conversations: which skills, in what proportion, in how many turns."""

from __future__ import annotations

import random
from dataclasses import dataclass

from demo_lm import tasks
from demo_lm.glossary import load_glossary
from demo_lm.questions import draw_question

SHARES = {"addition": 0.42, "glossary": 0.32, "json": 0.17, "story": 0.09}
"""How often each skill is drawn, by turns (not by tokens)."""

_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Be brief.",
    "You answer questions about jaxserve.",
    "Answer in one sentence.",
)
_PLAIN_STORIES = 0.5


@dataclass(frozen=True)
class Conversation:
    """What one training document says: turns of (user, assistant), or plain text when there are none."""

    turns: tuple[tuple[str, str], ...] = ()
    system: str = ""
    text: str = ""


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
            record = tasks.draw_record(rng, held_out=False)
            wording = rng.choice(tasks.JSON_WORDINGS)
            return wording.format(r=tasks.write_record(record)), tasks.write_json(record)
        case "story":
            return tasks.draw_story(rng)
    raise ValueError(f"skill {skill!r} is not one of {sorted(SHARES)}")


def draw_conversation(rng: random.Random) -> Conversation:
    """One document: mostly a single turn, now and then several, a system prompt, or a story as plain text."""
    skills = _draw_skills(rng, 1)
    if skills == ["story"] and rng.random() < _PLAIN_STORIES:
        return Conversation(text=draw_turn(rng, "story")[1])
    if rng.random() < 0.12:
        skills += _draw_skills(rng, rng.choice((1, 1, 1, 2, 2, 3, 5)))
    system = rng.choice(_SYSTEM_PROMPTS) if rng.random() < 0.05 else ""
    return Conversation(turns=tuple(draw_turn(rng, skill) for skill in skills), system=system)


def _draw_skills(rng: random.Random, count: int) -> list[str]:
    return rng.choices(list(SHARES), weights=list(SHARES.values()), k=count)
