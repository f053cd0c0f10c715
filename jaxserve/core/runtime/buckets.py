"""The closed set of shapes that programs are compiled for."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jaxserve.errors import MissingProgramError
from jaxserve.scheduler_options import MIN_CHUNK

_MAX_LOOP_ROWS = 8
_MAX_VERIFY_PROGRAMS = {"cpu": 6, "gpu": 16, "tpu": 16}
_FEW_TOKENS = 64  # that a verify step may always have; otherwise it has no more than the largest decode step
_MAX_PROGRAMS = {"cpu": 12, "gpu": 40, "tpu": 40}
PROGRAMS_PER_ROWS = 3  # a decode size is a forward and two sample programs


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """Padded shape of a forward program: a decode bucket if every row has one token, a verify bucket if every row has
    `width` of them, its last one and its drafts; otherwise a mixed one. With `adapters`, tokens may have those of the
    first so many slots."""

    tokens: int  # T
    rows: int  # S
    width: int = 1
    adapters: int = 0

    @property
    def is_decode(self) -> bool:
        return self.tokens == self.rows

    @property
    def is_mixed(self) -> bool:
        return self.tokens > self.rows * self.width

    @property
    def max_query_len(self) -> int | None:
        """The most tokens of a row; None: any number."""
        return None if self.is_mixed else self.width

    def __str__(self) -> str:
        form = f" adapters {self.adapters}" if self.adapters else ""
        if self.is_mixed:
            return f"mixed {self.tokens}x{self.rows}{form}"
        return f"verify {self.rows}x{self.width}{form}" if self.width > 1 else f"decode {self.rows}{form}"


class BucketTable:
    """The buckets of an engine, by size: decode buckets have one token per row, mixed ones have all rows.

    Args:
        verify: (rows, width) of the verify buckets.
        adapters: the slots of adapters that programs have; each bucket is there with each of these numbers.
    """

    def __init__(
        self,
        decode_rows: Iterable[int],
        mixed_tokens: Iterable[int],
        max_num_seqs: int,
        verify: Iterable[tuple[int, int]] = (),
        adapters: Iterable[int] = (0,),
    ) -> None:
        self._decode_rows = sorted(set(decode_rows))
        self._mixed_tokens = sorted(set(mixed_tokens))
        self._max_num_seqs = self._decode_rows[-1]
        if self._max_num_seqs < max_num_seqs:
            raise ValueError(f"decode_rows: the largest must hold max_num_seqs={max_num_seqs}, got {self._decode_rows}")
        self.verify_sizes = tuple(sorted(set(verify)))
        self._adapters = sorted(set(adapters))
        self._decode = [Bucket(rows, rows) for rows in self._decode_rows]
        self._mixed = [Bucket(tokens, self._max_num_seqs) for tokens in self._mixed_tokens]
        self._verify = [Bucket(rows * width, rows, width) for rows, width in self.verify_sizes]
        plain = (*self._decode, *self._verify, *self._mixed)
        self.buckets = tuple(replace(bucket, adapters=count) for count in self._adapters for bucket in plain)

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
        """Returns a table of the largest decode, mixed and verify buckets, which together hold any step."""
        most_rows = {width: rows for rows, width in self.verify_sizes}  # the last is the largest
        verify = [(rows, width) for width, rows in most_rows.items()]
        sizes = self._decode_rows[-1:], self._mixed_tokens[-1:]
        return BucketTable(*sizes, self._max_num_seqs, verify, self._adapters[-1:])

    def with_verify(self, sizes: Iterable[tuple[int, int]]) -> BucketTable:
        """Returns the table with verify buckets of (rows, width)."""
        return BucketTable(self._decode_rows, self._mixed_tokens, self._max_num_seqs, sizes, self._adapters)

    def with_adapters(self, counts: Iterable[int]) -> BucketTable:
        """Returns the table with each bucket for these numbers of slots, of which 0 is without adapters."""
        sizes = self._decode_rows, self._mixed_tokens, self._max_num_seqs
        return BucketTable(*sizes, self.verify_sizes, counts)

    @property
    def smallest_mixed(self) -> Bucket:
        """The mixed bucket that a short prompt uses."""
        return replace(self._mixed[0], adapters=self._adapters[0])

    def find(
        self, num_tokens: int, num_rows: int, width: int = 1, adapters: int = 0, *, is_mixed: bool = False
    ) -> Bucket:
        """Returns the smallest bucket that holds a step, a mixed one if it must be; MissingProgramError if none does.

        Without verify buckets, a step of rows of several tokens is a loop, which runs a decode bucket `width` times.
        """
        bucket = self._find(max(num_tokens, num_rows + is_mixed), num_rows, width)
        if adapters > self._adapters[-1]:
            raise MissingProgramError(f"no program for adapters in {adapters} slots; the most are {self._adapters[-1]}")
        count = self._adapters[bisect_left(self._adapters, adapters)]
        return replace(bucket, adapters=count) if count else bucket

    def _find(self, num_tokens: int, num_rows: int, width: int) -> Bucket:
        if width > 1:
            return self.find_verify(num_rows, width) if self._verify else self._find(num_rows, num_rows, 1)
        if num_tokens == num_rows and num_rows <= self._max_num_seqs:
            return self._decode[bisect_left(self._decode_rows, num_rows)]
        if num_rows > self._max_num_seqs or num_tokens > self._mixed_tokens[-1]:
            raise MissingProgramError(f"no program for a step of {num_tokens} tokens in {num_rows} rows")
        return self._mixed[bisect_left(self._mixed_tokens, num_tokens)]

    def find_verify(self, num_rows: int, width: int) -> Bucket:
        """Returns the smallest bucket that verifies rows of `width` tokens; MissingProgramError if none does."""
        for bucket in self._verify:
            if bucket.width == width and bucket.rows >= num_rows:
                return bucket
        raise MissingProgramError(f"no program verifies {num_rows} rows of {width} tokens; there are {self._verify}")


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


def choose_verify_sizes(
    platform: str,
    rows: Sequence[int],
    max_num_batched_tokens: int,
    max_drafts: int,
    fixed: Sequence[tuple[int, int, int]] | None = None,
) -> list[tuple[int, int]]:
    """Returns the (rows, width) of verify buckets, those of the fewest rows: there drafts pay most.

    Two widths for each number of rows: all drafts, and half of them for text of which little is accepted. A single row
    has buckets of its own, also where decode buckets begin with two.

    Args:
        rows: those of decode buckets, ascending.
        fixed: (from, to, drafts) of numbers of rows, in place of the choice of widths.
    """
    counts = sorted({1, *rows})
    if fixed is None:
        widths, most = sorted({max_drafts + 1, max_drafts // 2 + 1} - {1}, reverse=True), max(counts[-1], _FEW_TOKENS)
        sizes = [(count, width) for count in counts for width in widths if count == 1 or count * width <= most]
    else:
        sizes = []
        for first, last, drafts in fixed:
            begin, end = (bisect_left(counts, min(each, counts[-1])) for each in (first, last))
            sizes += [(count, drafts + 1) for count in counts[begin : end + 1] if drafts]
    sizes = [(count, width) for count, width in sizes if count * width <= max_num_batched_tokens]
    return sizes if fixed is not None else sizes[: _MAX_VERIFY_PROGRAMS[platform]]


def _choose_rows(platform: str, max_num_seqs: int, limit: int) -> list[int]:
    factor = 4 if platform == "cpu" else 2
    # A CPU's products of one row cost more, and a GPU's norm of one row is three kernels where that of two is one.
    least = 1 if platform == "tpu" else 2
    rows = max(least, max_num_seqs)
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
