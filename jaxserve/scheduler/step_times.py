"""How long steps take, by padded size."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from dataclasses import dataclass, field

from jaxserve.scheduler.limits import SchedulerLimits

_SAMPLES = 5
_MANY_SAMPLES, _FEW_SAMPLES = 8, 4  # of a mean
_PAUSE = 6  # steps without a size, after which its times are measured anew: two verify steps and a wake are fewer
_WAKE = 3  # plain steps behind a step of chunks or a verify step that it slows down
_LOOK_WAKE = 1  # the same behind a plain step that made drafts
_DECAY = 0.9997  # an estimate 10 % above a limit is tried again after 318 steps


@dataclass(slots=True)
class _Size:
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    step: int = 0  # at the last sample
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_MANY_SAMPLES))  # none from before a pause
    before: float = 0.0  # the mean before it
    last_before: int = 0  # the step of the last sample before it
    plain: _Size | None = None  # of a size with drafts: that of the plain steps in which its samples are counted
    _mean: float | None = None  # `mean`, which is read several times a step; None: to be computed

    @property
    def median(self) -> float:
        return sorted(self.samples)[len(self.samples) // 2]

    @property
    def mean(self) -> float:
        """The mean without the largest and the smallest quarter. Steps that overlap take a long and a short time in
        turns, so it is one of an even number of samples. Of few samples the smaller one in the middle, since the first
        may be slow; 0 if there is only one. What was measured before a pause counts as two beside them.
        """
        if self._mean is None:
            self._mean = self._compute_mean()
        return self._mean

    def _compute_mean(self) -> float:
        count = len(self.recent)
        if count < _FEW_SAMPLES:
            if self.before:
                return (2 * self.before + sum(self.recent)) / (2 + count)
            return sorted(self.recent)[(count - 1) // 2] if count > 1 else 0.0
        newest = list(self.recent)[count % 2 :]
        middle = sorted(newest)[count // 4 : len(newest) - count // 4]
        return sum(middle) / len(middle)

    def add(self, seconds: float, step: int) -> None:
        if step - self.step > _PAUSE and len(self.recent) > 1:
            self.before, self.last_before = self.mean, self.step
            self.recent.clear()
        self.samples.append(seconds)
        self.recent.append(seconds)
        self.step, self._mean = step, None

    def amend(self, seconds: float) -> None:
        """Adds seconds to the last sample."""
        if self.recent:
            self.samples[-1] += seconds
            self.recent[-1] += seconds
            self._mean = None

    @property
    def is_renewed(self) -> bool:
        """Whether the last sample made enough of them to replace what was measured before a pause."""
        return len(self.recent) == _FEW_SAMPLES and min(self.before, self.mean) > 0

    def scale(self, factor: float) -> None:
        """Multiplies the samples since the last pause."""
        self.recent = deque((sample * factor for sample in self.recent), self.recent.maxlen)
        self._mean = None


class StepTimes:
    """A moving median of the seconds of each padded size. Those of steps with drafts are kept in plain steps.

    The estimate of a size that no step uses shrinks with each step. So a size found too slow is tried again, the more
    rarely the slower it was. What else runs on the machine slows steps with drafts down as it does plain ones, so their
    ratio says more than a time of long ago.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._rows, self._tokens = limits.row_sizes, limits.token_sizes
        self._verify_rows = {
            width: tuple(sorted(rows for rows, each in limits.verify_widths if each == width))
            for _, width in limits.verify_widths
        }
        self._widths: defaultdict[tuple[int, int, int], _Size] = defaultdict(_Size)
        self._sizes: defaultdict[tuple[bool, int], _Size] = defaultdict(_Size)
        self._num_steps = 0
        self._unlike_plain = _WAKE  # plain steps to come that are not measured as such, for what came before them
        self._drafted: _Size | None = None  # the size of the step with drafts in whose wake the last one was
        self.last_seconds = 0.0  # of the last step; 0 if it had chunks or was skipped
        self.was_plain = False  # whether the last step was measured as a plain one

    def add(self, num_tokens: int, num_rows: int, seconds: float) -> None:
        """Adds the time of a step."""
        is_decode = num_tokens == num_rows
        self._unlike_plain, self._drafted = 0 if is_decode else _WAKE, None
        self.last_seconds, self.was_plain = seconds if is_decode else 0.0, is_decode
        key = is_decode, _round_up(self._rows if is_decode else self._tokens, num_tokens)
        self._num_steps += 1
        size = self._sizes[key]
        size.add(seconds, self._num_steps)
        if is_decode and size.is_renewed:
            self._count_anew(size)

    def _count_anew(self, plain: _Size) -> None:
        """Counts what was measured while no plain step was in plain steps as they are now, not as they were before."""
        factor = plain.before / plain.mean
        for size in self._widths.values():
            if size.plain is plain and size.step > plain.last_before:
                size.scale(factor)

    def skip(self) -> None:
        """Passes a step whose time says nothing of others."""
        self._num_steps += 1
        self._unlike_plain, self._drafted = _WAKE, None
        self.last_seconds, self.was_plain = 0.0, False

    @property
    def is_in_wake(self) -> bool:
        """Whether the last step had drafts, or was one of the few behind it."""
        return self._drafted is not None

    def add_decode(self, num_rows: int, width: int, num_drafts: int, seconds: float) -> None:
        """Adds the time of a step of decoding rows alone that may have verified or made drafts; see `measure`.

        While a step runs, the host commits the one before and packs the one after. So a plain step behind another kind
        of step says little of plain steps: what it takes longer than others is due to the drafts.
        """
        has_drafts = width > 1 or num_drafts > 0
        plain = self.measure(num_rows, 1, 0) if has_drafts or self._unlike_plain else 0.0
        if not has_drafts and not plain:
            self.add(num_rows, num_rows, seconds)
            return
        self._num_steps += 1
        self.last_seconds, self.was_plain = seconds, False
        if has_drafts:
            self._unlike_plain = _WAKE if width > 1 else max(self._unlike_plain - 1, _LOOK_WAKE)
            self._drafted = None
            if plain:
                self._drafted = self._widths[self._pad(num_rows, width), width, num_drafts]
                self._drafted.plain = self._sizes[True, _round_up(self._rows, num_rows)]
                self._drafted.add(seconds / plain, self._num_steps)
            return
        self._unlike_plain -= 1
        if self._drafted is not None:
            self._drafted.amend(min(seconds / plain, 2.0) - 1)

    def measure(self, num_rows: int, width: int, num_drafts: int) -> float:
        """Returns the seconds of a step of decoding rows alone; 0 if there were fewer than two of its size, or of
        plain ones.

        Args:
            width: tokens of each row.
            num_drafts: those that the step makes and that add to its time (`SchedulerLimits.count_costly`).
        """
        return self._read_width(num_rows, width, num_drafts, decay=1.0)

    def estimate_width(self, num_rows: int, width: int, num_drafts: int) -> float:
        """Returns the same, but less the longer ago the last such step was."""
        return self._read_width(num_rows, width, num_drafts, decay=_DECAY)

    def _read_width(self, num_rows: int, width: int, num_drafts: int, decay: float) -> float:
        plain = self._sizes.get((True, _round_up(self._rows, num_rows)))
        if plain is None or (width == 1 and not num_drafts):
            return 0.0 if plain is None else plain.mean * decay ** (self._num_steps - plain.step)
        size = self._widths.get((self._pad(num_rows, width), width, num_drafts))
        return 0.0 if size is None else plain.mean * size.mean * decay ** (self._num_steps - size.step)

    def _pad(self, num_rows: int, width: int) -> int:
        return _round_up(self._rows if width == 1 else self._verify_rows[width], num_rows)

    def estimate(self, num_tokens: int) -> float:
        """Returns the seconds of a mixed step; 0 if there was none of its size."""
        return self._read(False, _round_up(self._tokens, num_tokens))

    def estimate_decode(self, num_rows: int) -> float:
        """Returns the seconds of a step of decoding rows alone; 0 if there was none of its size or below."""
        padded = _round_up(self._rows, num_rows)
        return max((self._read(True, rows) for rows in (*self._rows, padded) if rows <= padded), default=0.0)

    def _read(self, is_decode: bool, num_tokens: int) -> float:
        size = self._sizes.get((is_decode, num_tokens))
        return 0.0 if size is None else size.median * _DECAY ** (self._num_steps - size.step)


def _round_up(sizes: tuple[int, ...], count: int) -> int:
    """Returns the smallest size that holds `count`; `count` itself if there is none."""
    place = bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) else count
