"""Histograms cheap enough to update per streamed token."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

WINDOW_SECONDS = 30.0  # percentiles cover the last one to two windows


class Histogram:
    """Counts of values per bucket, and their sum. One thread writes, without a lock."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)  # ascending and finite; one more bucket holds larger values
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Counts one value. Bounds are inclusive upper bounds."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class RecentHistogram(Histogram):
    """A histogram with quantiles of the last 30 to 60 seconds."""

    __slots__ = ("_clock", "_current", "_previous", "_turns_at")

    def __init__(self, bounds: Sequence[float], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(bounds)
        self._clock = clock
        self._previous = self._current = list(self.counts)  # the counts when each window began
        self._turns_at = clock() + WINDOW_SECONDS

    def observe(self, value: float) -> None:
        """Counts one value in the totals and the current window."""
        if self._clock() >= self._turns_at:
            self._turn()
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def find_quantiles(self, *quantiles: float) -> list[float | None]:
        """Returns the quantiles (0 to 1) of recent values, interpolated within buckets; None without values."""
        if self._clock() >= self._turns_at:
            self._turn()
        recent = [count - before for count, before in zip(self.counts, self._previous, strict=True)]
        return [interpolate(self.bounds, recent, quantile) for quantile in quantiles]

    def _turn(self) -> None:
        """Begins a window. After a pause longer than one window, past values are dropped."""
        now = self._clock()
        counts = list(self.counts)
        self._previous = self._current if now < self._turns_at + WINDOW_SECONDS else counts
        self._current = counts
        self._turns_at = now + WINDOW_SECONDS


def interpolate(bounds: Sequence[float], counts: Sequence[int], quantile: float) -> float | None:
    """Returns the quantile (0 to 1) of the counted values; None without values.

    Values are assumed uniform within a bucket; the first bucket begins at 0. Values above the last bound count as it.
    """
    total = sum(counts)
    if not total:
        return None
    wanted, below, lower = quantile * total, 0, 0.0
    for upper, count in zip(bounds, counts, strict=False):
        if count and below + count >= wanted:
            return lower + (upper - lower) * (wanted - below) / count
        below += count
        lower = upper
    return lower
