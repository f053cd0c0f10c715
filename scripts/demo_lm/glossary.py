"""The glossary that the demo model answers from: `glossary.toml` beside this file, checked on loading."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_PATH = Path(__file__).with_name("glossary.toml")


@dataclass(frozen=True)
class Entry:
    """One fact: the sentence to answer with, and the ways to ask for it."""

    key: str
    names: tuple[str, ...]  # ways to write the term inside a question template; empty for facts without a term
    answer: str
    asks: tuple[str, ...]  # whole questions used in training
    unseen: tuple[str, ...]  # whole questions kept for evaluation


@cache
def load_glossary() -> tuple[Entry, ...]:
    """All entries in file order.

    Raises ValueError naming the entry when a key is doubled, an answer is not ASCII, or a question stands both in
    `asks` and in `unseen` (of any entry): the evaluation would then measure memory.
    """
    with _PATH.open("rb") as file:
        rows = tomllib.load(file)["entry"]
    entries = tuple(
        Entry(row["key"], tuple(row["names"]), row["answer"], tuple(row["asks"]), tuple(row["unseen"])) for row in rows
    )
    keys = [entry.key for entry in entries]
    trained = {question.lower() for entry in entries for question in entry.asks}
    for entry in entries:
        if keys.count(entry.key) > 1:
            raise ValueError(f"glossary entry {entry.key!r} is there twice")
        if not entry.answer.isascii():
            raise ValueError(f"glossary entry {entry.key!r}: the answer is not ASCII")
        both = [question for question in entry.unseen if question.lower() in trained]
        if both:
            raise ValueError(f"glossary entry {entry.key!r}: {both} is asked in training as well")
    return entries
