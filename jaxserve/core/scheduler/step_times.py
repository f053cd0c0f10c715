"""Durations of steps, by padded size."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from dataclasses import dataclass, field

from jaxserve.core.scheduler.limits import SchedulerLimits

_SAMPLES = 5
_DECAY = 0.9997  # an estimate 10 % above a limit is tried again after 318 steps


@dataclass(slots=True)
class _Size:
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    step: int = 0  # at the last sample

    @property
    def median(self) -> float:
        return sorted(self.samples)[len(self.samples) // 2]


class StepTimes:
    """A moving median of the seconds of each padded size, for the limit of a step's time.

    The estimate of a size that no step uses shrinks with each step. So a size found too slow is tried again, the more
    rarely the slower it was.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._rows, self._tokens = limits.row_sizes, limits.token_sizes
        # By (width, padded size, whether rows have adapters); the width of mixed steps is 0.
        self._sizes: defaultdict[tuple[int, int, bool], _Size] = defaultdict(_Size)
        self._num_steps = 0

    def add(
        self, num_tokens: int, num_rows: int, seconds: float, width: int = 1, *, has_adapters: bool = False
    ) -> None:
        """Adds the time of a step. Each of its rows has `width` tokens, or it is a mixed one."""
        if num_tokens == num_rows * width:
            key = width, round_up(self._rows, num_rows), has_adapters
        else:
            key = 0, round_up(self._tokens, num_tokens), has_adapters
        self._num_steps += 1
        size = self._sizes[key]
        size.samples.append(seconds)
        size.step = self._num_steps

    def estimate(self, num_tokens: int, *, has_adapters: bool = False) -> float:
        """Returns the seconds of a mixed step; 0 if there was none of its size."""
        return self._read(0, round_up(self._tokens, num_tokens), has_adapters)

    def estimate_decode(self, num_rows: int, width: int = 1, *, has_adapters: bool = False) -> float:
        """Returns the seconds of a step of decoding rows alone; 0 if there was none of its size or below."""
        padded = round_up(self._rows, num_rows)
        sizes = (rows for rows in (*self._rows, padded) if rows <= padded)
        return max((self._read(width, rows, has_adapters) for rows in sizes), default=0.0)

    def _read(self, width: int, num_tokens: int, has_adapters: bool) -> float:
        size = self._sizes.get((width, num_tokens, has_adapters))
        return 0.0 if size is None else size.median * _DECAY ** (self._num_steps - size.step)


def round_up(sizes: tuple[int, ...], count: int) -> int:
    """Returns the smallest size that holds `count`; `count` itself if there is none."""
    place = bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) else count
