"""The closed set of shapes that programs are compiled for."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxserve.config import MIN_CHUNK
from jaxserve.errors import MissingProgramError

_MAX_LOOP_ROWS = 8
_MAX_PROGRAMS = {"cpu": 12, "gpu": 40, "tpu": 40}
PROGRAMS_PER_ROWS = 3  # a decode size is a forward and two sample programs


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """Padded shape of a forward program. With tokens == rows every row has one token: a decode bucket."""

    tokens: int  # T
    rows: int  # S

    @property
    def is_decode(self) -> bool:
        return self.tokens == self.rows

    def __str__(self) -> str:
        return f"decode {self.rows}" if self.is_decode else f"mixed {self.tokens}x{self.rows}"


class BucketTable:
    """The buckets of an engine, by size: decode buckets have one token per row, mixed ones have all rows."""

    def __init__(self, decode_rows: Iterable[int], mixed_tokens: Iterable[int], max_num_seqs: int) -> None:
        self._decode_rows = sorted(set(decode_rows))
        self._mixed_tokens = sorted(set(mixed_tokens))
        self._max_num_seqs = self._decode_rows[-1]
        if self._max_num_seqs < max_num_seqs:
            raise ValueError(f"decode_rows: the largest must hold max_num_seqs={max_num_seqs}, got {self._decode_rows}")
        decode = [Bucket(rows, rows) for rows in self._decode_rows]
        self.buckets = (*decode, *(Bucket(tokens, self._max_num_seqs) for tokens in self._mixed_tokens))

    @property
    def row_counts(self) -> tuple[int, ...]:
        """The row counts of decode buckets and sample programs, ascending."""
        return tuple(self._decode_rows)

    @property
    def loop_rows(self) -> int:
        """The most rows of a program of several decode steps: more gain little from it."""
        return max((rows for rows in self._decode_rows if rows <= _MAX_LOOP_ROWS), default=0)

    @property
    def token_counts(self) -> tuple[int, ...]:
        """The token counts of mixed buckets, ascending."""
        return tuple(self._mixed_tokens)

    @property
    def largest(self) -> Bucket:
        return self.buckets[-1]

    def take_largest(self) -> BucketTable:
        """Returns a table of the largest decode and the largest mixed bucket, which together hold any step."""
        return BucketTable(self._decode_rows[-1:], self._mixed_tokens[-1:], self._max_num_seqs)

    @property
    def smallest_mixed(self) -> Bucket:
        """The mixed bucket that a short prompt uses."""
        return self.buckets[len(self._decode_rows)]

    def find(self, num_tokens: int, num_rows: int) -> Bucket:
        """Returns the smallest bucket that holds a step; MissingProgramError if none does."""
        if num_tokens == num_rows and num_rows <= self._max_num_seqs:
            return self.buckets[bisect_left(self._decode_rows, num_rows)]
        if num_rows > self._max_num_seqs or num_tokens > self._mixed_tokens[-1]:
            raise MissingProgramError(f"no program for a step of {num_tokens} tokens in {num_rows} rows")
        return self.buckets[len(self._decode_rows) + bisect_left(self._mixed_tokens, num_tokens)]


def make_buckets(
    platform: str,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    decode_rows: Sequence[int] | None = None,
    mixed_tokens: Sequence[int] | None = None,
) -> BucketTable:
    """Returns the finest geometric buckets that stay within the platform's limit of programs.

    On CPU the smallest decode bucket has two rows: XLA's bf16 product with a single row is many times slower there.

    Args:
        decode_rows: sizes in place of those, ascending, from `precompile_bs_paddings`.
        mixed_tokens: the same, from `precompile_token_paddings`.
    """
    limit = _MAX_PROGRAMS[platform]
    decode = _choose_rows(platform, max_num_seqs, limit) if decode_rows is None else decode_rows
    if mixed_tokens is None:
        first = max(64, decode[-1] + MIN_CHUNK)
        most = max(2, limit - PROGRAMS_PER_ROWS * len(decode))
        mixed_tokens = _spread(first, max(first, max_num_batched_tokens), most)
    return BucketTable(decode, mixed_tokens, max_num_seqs)


def _choose_rows(platform: str, max_num_seqs: int, limit: int) -> list[int]:
    factor = 4 if platform == "cpu" else 2
    least, rows = (2, max(2, max_num_seqs)) if platform == "cpu" else (1, max_num_seqs)
    decode = _divide(rows, least, factor)
    while PROGRAMS_PER_ROWS * len(decode) > limit - 2:
        factor *= 2
        decode = _divide(rows, least, factor)
    return decode[::-1]


def _divide(last: int, least: int, factor: int) -> list[int]:
    """Returns `last`, `last` / `factor`, ... down to `least`."""
    sizes = [last]
    while sizes[-1] > least:
        sizes.append(max(least, -(-sizes[-1] // factor)))
    return sizes


def _spread(first: int, last: int, most: int) -> list[int]:
    """Returns at most `most` sizes from `first` to `last`, about equal ratios apart; those between are whole chunks."""
    steps = min(most - 1, math.ceil(math.log(last / first) / math.log(1.5)))
    between = [first * (last / first) ** (index / steps) for index in range(1, steps)]
    return [first, *(min(last, math.ceil(size / MIN_CHUNK) * MIN_CHUNK) for size in between), last]
