"""Lookups written from their definitions, one row and one token at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxserve.features.speculation import NO_DRAFT
from jaxserve.features.speculation.corpus import WAYS, CorpusShape
from jaxserve.features.speculation.suffix import MAX_OCCURRENCES

Salt = tuple[int, int]
BASE = 0x9E3779B1


@dataclass(frozen=True)
class Occurrence:
    start: int  # where what follows begins
    way: list[int]  # what follows, as far as it goes


def pad(drafts: list[int], count: int) -> list[int]:
    return drafts + [NO_DRAFT] * (count - len(drafts))


def count_equal(first: Sequence[int], second: Sequence[int], most: int) -> int:
    """How many of the last tokens are equal."""
    count = 0
    while count < min(most, len(first), len(second)) and first[-1 - count] == second[-1 - count]:
        count += 1
    return count


def repeat_from(tokens: list[int], start: int, count: int) -> list[int]:
    """What follows, if the text goes on as it went on at `start`."""
    text = list(tokens)
    for offset in range(count):
        text.append(text[start + offset])
    return text[len(tokens) :]


def find_in_row(tokens: list[int], depth: int) -> tuple[int, list[int]]:
    """The longest match and the ends of its occurrences, the last one first."""
    lengths = {end: count_equal(tokens[:end], tokens, depth) for end in range(len(tokens) - 1, 0, -1)}
    longest = max(lengths.values(), default=0)
    return longest, [end for end, matched in lengths.items() if matched == longest and longest > 0]


def propose_ngram(tokens: list[int], low: int, high: int, count: int) -> list[int]:
    for size in range(min(high, len(tokens) - 1), low - 1, -1):
        ends = [end for end in range(size, len(tokens)) if tokens[end - size : end] == tokens[len(tokens) - size :]]
        if ends:
            return repeat_from(tokens, ends[-1], count)
    return pad([], count)


def hash_ngram(tokens: list[int], salt: Salt) -> int:
    """The hash of corpus.py, which decides what is displaced in the tables."""
    state = sum((token + BASE) * BASE ** (back + 1) for back, token in enumerate(reversed(tokens)))
    for word in salt:
        state = (state ^ word) % 2**32
        state = (state ^ (state >> 16)) * 0x85EBCA6B % 2**32
        state = (state ^ (state >> 13)) * 0xC2B2AE35 % 2**32
        state ^= state >> 16
    return state


@dataclass
class SlowCorpus:
    """Answers in a list; the tables are a dictionary."""

    shape: CorpusShape
    answers: list[tuple[int, Salt, list[int]]] = field(default_factory=list)  # first position, salt, tokens
    table: dict[tuple[int, int, int], int] = field(default_factory=dict)  # (level, bucket, way) -> end
    position: int = 0

    def remember(self, tokens: list[int], salt: Salt) -> None:
        ring = self.shape.num_tokens
        tokens = tokens[-(ring - 2) :]
        if not tokens:
            return
        if self.position % ring + len(tokens) + 2 > ring:
            self.position += -self.position % ring
        way = len(self.answers) % WAYS
        self.answers.append((self.position + 1, salt, tokens))
        for size in self.shape.levels:
            for end in range(size, len(tokens)):
                key = (size, self.find_bucket(size, tokens[:end], salt), way)
                self.table[key] = self.position + 1 + end
        self.position += len(tokens) + 2

    def find_bucket(self, size: int, tokens: list[int], salt: Salt) -> int:
        return hash_ngram(tokens[-size:], salt) % self.shape.num_buckets

    def find(self, query: list[int], salt: Salt) -> tuple[int, list[Occurrence]]:
        first = max(0, self.position - self.shape.num_tokens)
        if len(self.answers) >= self.shape.num_answers:
            first = max(first, self.answers[-self.shape.num_answers][0] - 1)
        found: dict[int, tuple[int, Occurrence]] = {}
        for size in self.shape.levels:
            if len(query) < size:
                continue
            for way in range(WAYS):
                end = self.table.get((size, self.find_bucket(size, query, salt), way), 0)
                for begin, owner, tokens in self.answers:
                    if owner != salt or not begin < end <= begin + len(tokens):
                        continue
                    known = tokens[max(0, first - begin) : end - begin] if end > first else []
                    matched = count_equal(known, query, self.shape.depth)
                    if matched >= size:
                        found[end] = (matched, Occurrence(end, tokens[end - begin :]))
        longest = max([matched for matched, _ in found.values()], default=0)
        return longest, [occurrence for matched, occurrence in found.values() if matched == longest]


def propose_suffix(
    tokens: list[int],
    depth: int,
    factor: float,
    min_share: float,
    count: int,
    corpus: SlowCorpus | None = None,
    salt: Salt = (0, 0),
) -> list[int]:
    longest, ends = find_in_row(tokens, depth)
    occurrences = [Occurrence(end, repeat_from(tokens, end, count)) for end in ends[:MAX_OCCURRENCES]]
    if corpus is not None:
        matched, found = corpus.find(tokens, salt)
        if matched > longest:
            longest, occurrences = matched, found
    drafts: list[int] = []
    alike = occurrences
    while len(drafts) < min(count, math.floor(longest * factor + 1e-6)):
        place = len(drafts)
        alike = [each for each in alike if place < len(each.way)]
        if not alike:
            break
        votes = Counter(each.way[place] for each in alike)
        most = max(votes.values())
        leader = max((each for each in alike if votes[each.way[place]] == most), key=lambda each: each.start)
        if most < min_share * len(occurrences) - 1e-6:
            break
        drafts.append(leader.way[place])
        alike = [each for each in alike if each.way[place] == drafts[-1]]
    return pad(drafts, count)
