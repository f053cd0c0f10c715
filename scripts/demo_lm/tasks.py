"""The skills besides the glossary: addition with its working, records to JSON, and small stories."""

from __future__ import annotations

import json
import random
import re
import zlib

ADDITION_WORDINGS = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "{a} + {b}",
    "{a}+{b}",
    "{a} + {b} = ?",
    "{a}+{b}=",
    "{a} plus {b}?",
    "Add {a} and {b}.",
    "Please add {a} to {b}.",
    "Compute {a} + {b}.",
    "Calculate {a} plus {b}.",
    "How much is {a} + {b}?",
    "What is the sum of {a} and {b}?",
    "Can you add {a} and {b}?",
    "Tell me what {a} + {b} is.",
    "I have {a} pages and get {b} more. How many pages do I have?",
)
JSON_WORDINGS = (
    "{r}",
    "Turn this into JSON: {r}",
    "Convert to JSON: {r}",
    "Write this as JSON: {r}",
    "JSON please: {r}",
    "Make JSON from this line: {r}",
    "Give me JSON for {r}",
)
STORY_WORDINGS = (
    "Tell me a story about a {animal} named {name}.",
    "Tell me a story about {name} the {animal}.",
    "Write a short story about a {animal} named {name}.",
    "Please write a story about a {animal} called {name}.",
    "Can you tell me a story about a {animal} called {name}?",
)
OPEN_STORY_WORDINGS = ("Tell me a story.", "Write a short story.", "Please tell me a story.", "A story, please.")

_HELD_OUT_PAIRS = 0.03
_HELD_OUT_RECORDS = 0.05
# fmt: off
_ANIMALS = (
    "fox", "cat", "dog", "bear", "frog", "owl", "mouse", "duck", "horse", "rabbit", "turtle", "whale", "bee", "goat",
)
_NAMES = (
    "Ada", "Alan", "Ben", "Clara", "Dora", "Emil", "Finn", "Grace", "Hugo", "Ida", "Jack", "Kim", "Lena", "Max",
    "Nora", "Otto", "Pia", "Quinn", "Rosa", "Sam", "Tim", "Uma", "Vera", "Will", "Yara", "Zoe",
)
_PLACES = ("forest", "garden", "village", "valley", "harbor", "meadow", "city", "castle")
_THINGS = ("lamp", "kite", "book", "key", "drum", "boat", "map", "bell", "ball", "clock")
_MOODS = ("small", "brave", "curious", "kind", "quiet", "clever", "happy", "shy")
_CITIES = (
    "Paris", "Rome", "Oslo", "Lima", "Cairo", "Tokyo", "Delhi", "Quito", "Berlin", "Dublin", "Vienna", "Madrid",
)
_JOBS = ("baker", "pilot", "nurse", "teacher", "farmer", "painter", "driver", "doctor", "writer", "cook")
_COLORS = ("red", "green", "blue", "yellow", "black", "white", "brown", "purple")
_STARTS = (
    "b", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z", "br", "ch", "st", "tr", "",
)
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea")
_ENDS = ("", "n", "l", "r", "s", "m", "t", "k", "nd")
# fmt: on


def is_held_out_pair(a: int, b: int) -> bool:
    """Whether the sum of `a` and `b`, in either order, is kept for evaluation (3 % of all pairs, by a fixed hash)."""
    return hash_share(f"{min(a, b)}+{max(a, b)}") < _HELD_OUT_PAIRS


def draw_pair(rng: random.Random, *, held_out: bool, short: float = 0.06) -> tuple[int, int]:
    """Two numbers to add, of two or three digits (of one with probability `short`), on the asked side of the split."""
    while True:
        a, b = (_draw_number(rng, short) for _ in range(2))
        if is_held_out_pair(a, b) == held_out:
            return a, b


def work_addition(a: int, b: int) -> str:
    """The answer with its working, ones first, carries written out; it always ends in `= <sum>`.

    345 and 678 give "345 + 678: 5+8=13, 4+7+1=12, 3+6+1=10, so the sum = 1023".
    """
    carry, lines = 0, []
    for place in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        lines.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry = total // 10
    return f"{a} + {b}: {', '.join(lines)}, so the sum = {a + b}"


def read_sum(text: str) -> int | None:
    """The number after the last `=` when it ends the answer of a sum or a difference, else None."""
    match = re.search(r"= ?(\d+)\.?\s*$", text)
    return int(match.group(1)) if match else None


def draw_record(rng: random.Random, *, held_out: bool) -> dict[str, str | int]:
    """Two to four fields on the asked side of the split; `name` comes first more often than not."""
    while True:
        fields: dict[str, str | int] = {
            "name": draw_name(rng),
            "age": rng.randint(1, 99),
            "city": rng.choice(_CITIES) if rng.random() < 0.6 else draw_name(rng),
            "job": rng.choice(_JOBS),
            "color": rng.choice(_COLORS),
            "pet": rng.choice(_ANIMALS),
            "id": rng.randint(1, 999),
            "score": rng.randint(0, 100),
        }
        keys = rng.sample(sorted(fields), rng.randint(2, 4))
        if rng.random() < 0.6:
            keys = ["name", *(key for key in keys if key != "name")]
        record = {key: fields[key] for key in keys}
        if (hash_share(write_record(record)) < _HELD_OUT_RECORDS) == held_out:
            return record


def write_record(record: dict[str, str | int]) -> str:
    """The record as a user types it: "name: Ada, age: 36"."""
    return ", ".join(f"{key}: {value}" for key, value in record.items())


def write_json(record: dict[str, str | int]) -> str:
    """The record as the model answers it, in one line."""
    return json.dumps(record)


def draw_story(rng: random.Random) -> tuple[str, str]:
    """A question and its story."""
    name, animal = draw_name(rng), rng.choice(_ANIMALS)
    wordings = STORY_WORDINGS if rng.random() < 0.7 else OPEN_STORY_WORDINGS
    return rng.choice(wordings).format(name=name, animal=animal), _write_story(rng, name, animal)


def draw_invented_word(rng: random.Random) -> str:
    """One or two syllables in lower case, most of them no word of any language."""
    syllables = (rng.choice(_STARTS) + rng.choice(_VOWELS) for _ in range(rng.randint(1, 2)))
    return "".join(syllables) + rng.choice(_ENDS)


def _write_story(rng: random.Random, name: str, animal: str) -> str:
    """Five sentences with one hero, one friend, one lost thing and one place."""
    mood, place, thing = rng.choice(_MOODS), rng.choice(_PLACES), rng.choice(_THINGS)
    friend = rng.choice([other for other in _NAMES if other != name])
    helper = rng.choice([other for other in _ANIMALS if other != animal])
    parts = (
        (f"Once upon a time there was a {mood} {animal} named {name}.",),
        (f"{name} lived in a {place} and had a {thing}.", f"In a {place}, {name} looked after a {thing}."),
        (f"One day the {thing} was gone.", f"One morning {name} could not find the {thing}."),
        (
            f"A {helper} named {friend} helped to look for it.",
            f"{name} asked {friend} the {helper} for help.",
        ),
        (f"Together they found the {thing} under a tree.", f"They found the {thing} near the {place} at night."),
        (f"{name} and {friend} were friends from then on.", f"{name} thanked {friend}, and they laughed."),
    )
    return " ".join(rng.choice(choices) for choices in parts)


def _draw_number(rng: random.Random, short: float) -> int:
    if rng.random() < short:
        return rng.randint(0, 9)
    return rng.randint(100, 999) if rng.random() < 0.6 else rng.randint(10, 99)


def draw_name(rng: random.Random) -> str:
    """A common name, or as often an invented one, so that copying is learned and not a list of names."""
    return rng.choice(_NAMES) if rng.random() < 0.5 else draw_invented_word(rng).capitalize()


def hash_share(text: str) -> float:
    """A fixed number in [0, 1) for `text`, the same on every machine."""
    return zlib.crc32(text.encode()) / 2**32
