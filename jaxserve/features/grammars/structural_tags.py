"""Writes structural tags as a Lark grammar: free text is a lazy lexeme, which ends where a tag begins."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import InvalidRequestError, shorten
from jaxserve.features.grammars.rules import quote, write_regex, write_rule
from jaxserve.structural_parts import (
    AnyText,
    Choice,
    Form,
    PartSequence,
    Repeat,
    Tag,
    Text,
    Token,
    TriggeredTags,
)
from jaxserve.structural_tag import read_structural_tag
from jaxserve.structured_params import StructuredOutputsParams
from jaxserve.tokenizers import Tokenizer

_FIELD = "structured_outputs.structural_tag"
Mark = Text | Token


def write_structural_tag(text: str, tokenizer: Tokenizer) -> str:
    """Returns the Lark grammar of a structural tag.

    Args:
        text: a JSON object that `StructuredOutputsParams` has checked.
        tokenizer: the texts of its special tokens are those tokens.

    Raises:
        InvalidRequestError: a mark is no special token of this tokenizer, or marks hide each other.
    """
    writer = _Writer(tokenizer)
    start = writer.write(read_structural_tag(text, _FIELD), ())
    return "\n".join((f"start: {start}", *writer.rules, ""))


@dataclass(frozen=True, slots=True)
class _Cut:
    """A mark, cut at its first special token."""

    before: str
    token: int | None = None  # None: it is nothing but text
    behind: str = ""


class _Writer:
    """Collects the rules of one grammar."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.rules = tokenizer, list[str]()
        self._any_of: dict[tuple[str, ...], str] = {}  # terminals of the texts that have one of these in them
        longest_first = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def write(self, part: Any, ends: Sequence[Mark]) -> str:
        """Returns a part as terms, with one of the ends behind it if there are any."""
        if ends and isinstance(part, Form) and part.kind == "regex":
            return _join(self._write_regex(part.value, end) for end in ends)
        match part:
            case AnyText(excludes):
                return self._write_free(excludes, (), ends)
            case TriggeredTags():
                return self._write_triggered(part, ends)
            case PartSequence(parts):
                return " ".join((*(self.write(each, ()) for each in parts[:-1]), self.write(parts[-1], ends)))
            case Choice(parts):
                return _join(self.write(each, ends) for each in parts)
        return f"{self._write_closed(part)} {self._write_ends(ends)}"

    def _write_closed(self, part: Any) -> str:
        match part:
            case Tag(begin, content, ends):
                return f"{self._write_mark(begin)} {self.write(content, ends)}"
            case Repeat(content, least, most):
                return f"{self._add_rule(self.write(content, ()))}{{{least},{'' if most is None else most}}}"
            case Form(kind, value):
                return self._add_form(kind, value)
        return self._write_mark(part)

    def _write_triggered(self, part: TriggeredTags, ends: Sequence[Mark]) -> str:
        """Each trigger has a lexeme of any text up to it. Where one ends, the text of the others ends as well."""
        self._check_triggers(part.triggers, ends)
        leads, first = [], []
        for trigger, tags in zip(part.triggers, part.tags, strict=True):
            bodies = [(tag.begin, self._add_rule(self.write(tag.content, tag.ends))) for tag in tags]
            rest = (f"{self._write_mark(_drop(begin, trigger))} {body}" for begin, body in bodies)
            lead = self._write_until(Text(trigger), part.excludes, [*map(Text, part.triggers), *ends])
            leads.append(f"{lead} {_join(rest)}")
            first += [f"{self._write_mark(begin)} {body}" for begin, body in bodies]
        call, tail = self._add_rule(_join(leads)), self._write_free(part.excludes, part.triggers, ends)
        end = self._write_ends(ends)
        if part.at_least_one:
            return f"{_join(first)} {end if part.stop_after_first else f'{call}* {tail}'}"
        return _join((f"{call} {end}", tail)) if part.stop_after_first else f"{call}* {tail}"

    def _check_triggers(self, triggers: Sequence[str], ends: Sequence[Mark]) -> None:
        for trigger in triggers:
            if self._cut(Text(trigger)).behind:
                raise _refuse(f"the trigger {shorten(trigger)} must end with its special token")
            for end in ends:
                if isinstance(end, Text) and (end.text in trigger or trigger in end.text):
                    raise _refuse(f"the trigger {shorten(trigger)} and the end {shorten(end.text)} hide each other")

    def _write_free(self, excludes: Sequence[str], triggers: Sequence[str], ends: Sequence[Mark]) -> str:
        """Returns any text without triggers, up to one of the ends or to the end of the answer."""
        if not ends:
            return f"{self._add_terminal(self._exclude((*excludes, *triggers), '+'))}?"
        others = [*map(Text, triggers), *ends]
        return _join(self._write_until(end, excludes, others) for end in ends)

    def _write_until(self, end: Mark, excludes: Sequence[str], others: Sequence[Mark]) -> str:
        """Returns any text up to a mark, which it includes, and without the others if they are text.

        A lazy lexeme ends with the first text that ends one of those that may come here. Text in front of a special
        token has no such end, so the others are excluded from it.
        """
        cut = self._cut(end)
        if cut.token is None:
            terminal = self._add_terminal(f"{self._exclude(excludes, '*')} {quote(cut.before)}")
            return self._add_rule(terminal, "[lazy]")
        cuts = map(self._cut, others)
        avoided = (*excludes, *(other.before for other in cuts if other.token is None))
        behind = f"<[{cut.token}]> {self._write_mark(Text(cut.behind))}"
        if cut.before:
            return f"{self._add_terminal(f'{self._exclude(avoided, "*")} {quote(cut.before)}')} {behind}"
        return f"{self._add_terminal(self._exclude(avoided, '+'))}? {behind}"

    def _write_regex(self, pattern: str, end: Mark) -> str:
        """Returns the shortest text of a regular expression with an end behind it, as it might match the end too."""
        cut = self._cut(end)
        if cut.token is not None:
            return f"{self._add_form('regex', pattern)} {self._write_mark(end)}"
        return self._add_rule(self._add_terminal(f"{write_regex(pattern)} {quote(cut.before)}"), "[lazy]")

    def _exclude(self, texts: Sequence[str], repeat: str) -> str:
        """Returns the terminal of any text in which none of these occurs."""
        free, key = f"/(?s:.{repeat})/", tuple(texts)
        if not texts:
            return free
        if key not in self._any_of:
            self._any_of[key] = self._add_terminal(f"/(?s:.*)/ {_join(map(quote, texts))} /(?s:.*)/")
        return self._add_terminal(f"{free} & ~{self._any_of[key]}")

    def _write_ends(self, ends: Sequence[Mark]) -> str:
        return _join(map(self._write_mark, ends)) if ends else ""

    def _write_mark(self, mark: Mark) -> str:
        """Returns a mark as terms: special tokens, and the text between them."""
        terms, cut = [], self._cut(mark)
        while cut.token is not None:
            terms += [*([quote(cut.before)] if cut.before else ()), f"<[{cut.token}]>"]
            cut = self._cut(Text(cut.behind))
        return " ".join((*terms, quote(cut.before)) if cut.before else terms)

    def _cut(self, mark: Mark) -> _Cut:
        known = self._tokenizer.special_tokens
        if isinstance(mark, Token):
            token = known.get(mark.token) if isinstance(mark.token, str) else mark.token
            cut = _Cut("", token if token in known.values() else None)
            if cut.token is None:
                raise _refuse(f"{shorten(mark.token)} is no special token of this model")
        else:
            found = self._special.search(mark.text)
            if found is None:
                return _Cut(mark.text)
            cut = _Cut(mark.text[: found.start()], known[found[0]], mark.text[found.end() :])
        if cut.token in self._tokenizer.eos_token_ids:
            text = mark.text if isinstance(mark, Text) else mark.token
            raise _refuse(f"{shorten(text)} has the token in it that ends an answer; leave that out")
        return cut

    def _add_form(self, kind: str, value: str) -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(write_rule(StructuredOutputsParams(**{kind: value}), name))
        return name

    def _add_rule(self, terms: str, options: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{options}: {terms}")
        return name

    def _add_terminal(self, terms: str) -> str:
        name = f"T{len(self.rules)}"
        self.rules.append(f"{name}: {terms}")
        return name


def _drop(begin: Mark, trigger: str) -> Text:
    assert isinstance(begin, Text), "the reader checked it"
    return Text(begin.text.removeprefix(trigger))


def _join(terms: Iterable[str]) -> str:
    return f"({' | '.join(terms)})"


def _refuse(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, field=_FIELD, value=None)
