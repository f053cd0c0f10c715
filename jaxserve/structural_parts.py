"""The parts of a structural tag: a tree, whose leaves are texts, tokens and forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Text:
    """A fixed text. The texts of special tokens in it are those tokens."""

    text: str


@dataclass(frozen=True, slots=True)
class Token:
    """One special token, by its id or its text."""

    token: int | str


@dataclass(frozen=True, slots=True)
class Form:
    """A text of a JSON Schema, a regular expression or a grammar."""

    kind: Literal["json", "regex", "grammar"]
    value: str


@dataclass(frozen=True, slots=True)
class AnyText:
    """Any text without these ones in it. It goes on until something else ends it."""

    excludes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PartSequence:
    """One part after the other."""

    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the parts."""

    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part several times."""

    part: Any
    least: int
    most: int | None = None  # None: any number of times


@dataclass(frozen=True, slots=True)
class Tag:
    """A beginning, a content, and one of the ends. Without ends it ends with its content."""

    begin: Text | Token
    content: Any
    ends: tuple[Text | Token, ...] = ()


@dataclass(frozen=True, slots=True)
class TriggeredTags:
    """Any text in which a tag begins wherever one of the triggers appears. It goes on as `AnyText` does."""

    triggers: tuple[str, ...]
    tags: tuple[tuple[Tag, ...], ...]  # by trigger; each begins with its own
    at_least_one: bool = False  # it begins with a tag
    stop_after_first: bool = False  # it ends with its first tag
    excludes: tuple[str, ...] = ()


def is_open(part: Any) -> bool:
    """Whether a part goes on until something else ends it."""
    match part:
        case AnyText() | TriggeredTags():
            return True
        case PartSequence(parts):
            return is_open(parts[-1])
        case Choice(parts):
            return any(map(is_open, parts))
    return False
