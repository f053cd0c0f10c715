"""The exam: questions that training never showed, and how answers are judged. It knows nothing of any engine."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from demo_lm import tasks
from demo_lm.corpus import Conversation
from demo_lm.glossary import load_glossary
from demo_lm.questions import HELD_OUT_TEMPLATES, list_held_out_questions

THRESHOLDS = {
    "addition": 0.97, "glossary": 0.90, "json": 0.90,
    "call": 0.70, "no call": 0.90, "result": 0.95, "keys": 0.90, "reasoning": 0.95,
    "subtraction": 0.90, "pirate": 0.90,
}  # fmt: skip
"""Shares of right answers below which the demo model, or the engine that runs it, is broken."""

_CALL = "<tool_call>"


@dataclass(frozen=True)
class Problem:
    """One question and the only answer that training would have given to it."""

    skill: str  # a key of THRESHOLDS
    part: str  # the row of the table: what kind of question of that skill
    question: str
    expected: str
    context: Conversation | None = None  # all that is shown, with the question; None: only that
    thinks: bool = False  # the answer begins inside reasoning
    adapter: str = ""  # the one that answers

    @property
    def prompt(self) -> Conversation:
        """All that is shown."""
        return self.context or Conversation(({"role": "user", "content": self.question},))

    def accepts(self, answer: str) -> bool:
        """Whether `answer` is right: the same sum, call or record, or word for word the same sentence."""
        answer = answer.strip()
        if self.skill == "no call":
            return bool(answer) and _CALL not in answer
        if _CALL in self.expected:
            return _read_call(answer) == _read_call(self.expected) is not None
        if self.thinks and "</think>" not in answer:
            return False
        if self.skill in ("addition", "reasoning", "subtraction"):
            return tasks.read_sum(answer) == tasks.read_sum(self.expected)
        if self.skill in ("json", "keys"):
            return answer == self.expected or _parse(answer) == json.loads(self.expected)
        return answer == self.expected


@dataclass(frozen=True)
class Scores:
    """How many problems of each (skill, part) were solved, and the wrong answers."""

    right: dict[tuple[str, str], int]
    total: dict[tuple[str, str], int]
    wrong: tuple[tuple[Problem, str], ...]

    def share(self, skill: str) -> float:
        """Right answers over all problems of `skill`, in [0, 1]."""
        total = sum(count for (name, _), count in self.total.items() if name == skill)
        return sum(count for (name, _), count in self.right.items() if name == skill) / max(total, 1)

    def passes(self) -> bool:
        """Whether every skill that was asked for reaches its threshold."""
        asked = {skill for skill, _ in self.total}
        return all(self.share(skill) >= THRESHOLDS[skill] for skill in asked)


def list_problems(num_addition: int = 500, num_json: int = 100, per_entry: int = 4, seed: int = 1) -> list[Problem]:
    """The exam: `num_addition` unseen pairs, for each glossary entry `per_entry` held-out templates and its two unseen
    questions, and `num_json` unseen records. The same arguments give the same problems."""
    rng = random.Random(seed)
    problems = []
    for _ in range(num_addition):
        a, b = tasks.draw_pair(rng, held_out=True, short=0.0)
        question = rng.choice(tasks.ADDITION_WORDINGS).format(a=a, b=b)
        part = f"{len(str(max(a, b)))}-digit numbers, unseen pairs"
        problems.append(Problem("addition", part, question, tasks.work_addition(a, b)))
    for entry in load_glossary():
        questions = list_held_out_questions(entry)
        templated = questions[: len(HELD_OUT_TEMPLATES) * len(entry.names)]
        for question in rng.sample(templated, min(per_entry, len(templated))):
            problems.append(Problem("glossary", "unseen templates", question, entry.answer))
        for question in questions[len(templated) :]:
            problems.append(Problem("glossary", "unseen questions", question, entry.answer))
    for _ in range(num_json):
        record = tasks.draw_record(rng, held_out=True)
        question = rng.choice(tasks.JSON_WORDINGS).format(r=tasks.write_record(record))
        problems.append(Problem("json", "unseen records", question, tasks.write_json(record)))
    return problems


def evaluate(generate: Callable[[list[str]], Sequence[str]], problems: Sequence[Problem]) -> Scores:
    """Asks every question at once and judges the answers.

    Args:
        generate: problems to greedy answers, in the same order, without special tokens.
        problems: what to ask; see `list_problems`.
    """
    answers = generate(problems)
    return judge(
        problems, [problem.accepts(answer) for problem, answer in zip(problems, answers, strict=True)], answers
    )


def judge(problems: Sequence[Problem], verdicts: Sequence[bool], answers: Sequence[str]) -> Scores:
    """Counts `verdicts` by skill and part, and keeps the answers that were wrong."""
    right: dict[tuple[str, str], int] = {}
    total: dict[tuple[str, str], int] = {}
    wrong = []
    for problem, verdict, answer in zip(problems, verdicts, answers, strict=True):
        place = (problem.skill, problem.part)
        right[place] = right.get(place, 0) + int(verdict)
        total[place] = total.get(place, 0) + 1
        if not verdict:
            wrong.append((problem, answer))
    return Scores(right, total, tuple(wrong))


def show_scores(scores: Scores, *, title: str = "demo model: answers to unseen questions") -> Table:
    """A table with one line for each part and one for each skill, which names its threshold."""
    table = Table(title=title)
    for heading in ("skill", "questions", "right", "share", "threshold"):
        table.add_column(heading, justify="left" if heading in ("skill", "questions") else "right")
    for skill, least in THRESHOLDS.items():
        if not any(name == skill for name, _ in scores.total):
            continue
        parts = sorted(part for name, part in scores.total if name == skill)
        for part in parts:
            right, total = scores.right[skill, part], scores.total[skill, part]
            table.add_row(skill, part, f"{right}/{total}", f"{right / total:.1%}", "")
        share = scores.share(skill)
        color = "green" if share >= least else "red"
        table.add_row(skill, "all", "", f"[bold {color}]{share:.1%}[/]", f">= {least:.0%}", end_section=True)
    return table


def export_scores(scores: Scores) -> dict[str, object]:
    """The same as plain data for a JSON file."""
    return {
        "skills": {skill: scores.share(skill) for skill, _ in scores.total},
        "thresholds": THRESHOLDS,
        "parts": [
            {"skill": skill, "part": part, "right": scores.right[skill, part], "total": total}
            for (skill, part), total in scores.total.items()
        ],
        "wrong": [
            {"question": problem.question, "expected": problem.expected, "answer": answer}
            for problem, answer in scores.wrong
        ],
        "passes": scores.passes(),
    }


def _read_call(text: str) -> object:
    """The only call of an answer; None if there is none, or more than one."""
    _, _, call = text.partition(_CALL)
    return _parse(call.removesuffix("</tool_call>"))


def _parse(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
