"""The choice of a step's width: how many tokens each decoding row computes, 1 or its last token and its drafts.

Drafts pause when they do not pay. What a step of each width costs was measured when the engine started, and stays as it
is: a busy machine slows steps of all widths down. How many tokens a step brings follows from the drafts that were right
lately. vLLM, too, profiles costs at its start (since 0.32).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.core.scheduler.acceptance import Acceptance
from jaxserve.core.scheduler.limits import SchedulerLimits
from jaxserve.core.scheduler.step_times import StepTimes, round_up

_log = logging.getLogger(__name__)

_MARGIN = 1.05  # a width wins if it brings this many times the tokens of plain steps, for the same cost
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 1024  # steps
_PROVEN = 32  # verify steps since a pause that were no luck; then any gain wins, and the next pause is a first one
_FRUITLESS = 1000  # drafts of a head without an accepted one, after which it is switched off

# Seconds of a step that does nothing else, by (padded rows, width); with a third entry, those of rows with adapters.
type StepCosts = Mapping[tuple[int, ...], float]


@dataclass(slots=True)
class _Pause:
    """Steps without drafts, for one padded number of rows. Each pause is twice as long as the one before it."""

    left: int = 0
    length: int = _FIRST_PAUSE // 2  # of the last one
    num_verified: int = 0  # steps since then

    def begin(self) -> None:
        self.length = _FIRST_PAUSE if self.num_verified >= _PROVEN else min(2 * self.length, _LONGEST_PAUSE)
        self.left, self.num_verified = self.length, 0


class WidthChooser:
    """Chooses widths, and which steps make drafts. The planner asks, the committer tells what came of it.

    Args:
        limits: their `max_drafts` is at least 1.
        times: the measured times of steps; for a limit of a step's time only.
        costs: what the runner measured. It may grow: nothing is verified before the cost of plain steps is known, and a
            width of unknown cost is taken for as cheap as a plain step, so it is tried.
    """

    def __init__(self, limits: SchedulerLimits, times: StepTimes, costs: StepCosts) -> None:
        self._limits, self._times, self._costs = limits, times, costs
        self._sizes = {
            width: tuple(sorted(rows for rows, each in limits.verify_widths if each == width))
            for width in sorted({width for _, width in limits.verify_widths})
        }
        self._acceptance = Acceptance(limits.max_drafts)
        self._pauses: dict[int, _Pause] = {}
        self._has_drafts = False  # the last plan makes some
        self.is_off = False  # for good

    def choose(self, num_rows: int, step_limit: float | None = None, *, has_adapters: bool = False) -> tuple[int, int]:
        """Returns the width of the next step if it has no chunks, and how many drafts it makes for the step after it.

        Args:
            num_rows: decoding rows; without any, the step's chunks may bring some, which can verify in the next step.
            step_limit: seconds that the step may take; None: any time.
        """
        num_rows = max(1, num_rows)
        widths = [width for width in self._sizes if self._may_run(num_rows, width, step_limit, has_adapters)]
        if not widths or self.is_off:
            return 1, 0
        if self._limits.fixed_drafts is not None:
            wanted = self._read_table(num_rows, widths)
        else:
            wanted = self._choose_best(num_rows, widths, has_adapters)
        return wanted if self._has_drafts else 1, self._limits.max_drafts if wanted > 1 else 0

    def note_plan(self, num_drafts: int) -> None:
        """Notes how many drafts the step that was planned makes."""
        self._has_drafts = num_drafts > 0

    def note_gains(self, gains: Counter[int], num_drafts: int) -> None:
        """Notes what a verify step brought: rows by the drafts that they gained, of at most `num_drafts`."""
        self._acceptance.add(gains, num_drafts)

    def check_head(self, num_drafts: int, num_accepted: int) -> None:
        """Switches off a head of which no draft was ever accepted, if there were many."""
        if num_accepted or num_drafts < _FRUITLESS or self.is_off or not self._limits.has_draft_passes:
            return
        self.is_off = True
        _log.warning(
            "speculative_config: none of the first %d drafts was accepted, so drafting is switched off. "
            "Was its model trained for the one that is served?",
            num_drafts,
        )

    def _may_run(self, num_rows: int, width: int, step_limit: float | None, has_adapters: bool) -> bool:
        if num_rows > self._sizes[width][-1] or num_rows * width > self._limits.max_num_batched_tokens:
            return False
        seconds = self._times.estimate_decode(num_rows, width, has_adapters=has_adapters)
        return step_limit is None or seconds <= step_limit

    def _read_table(self, num_rows: int, widths: list[int]) -> int:
        """Returns the width by the fixed table."""
        table = self._limits.fixed_drafts or ()
        drafts = next((drafts for first, last, drafts in table if first <= num_rows <= last), 0)
        return max((width for width in widths if width <= drafts + 1), default=1)

    def _choose_best(self, num_rows: int, widths: list[int], has_adapters: bool) -> int:
        """Returns the width with the most expected tokens for its cost; 1 if none wins, or drafts pause."""
        padded = round_up(self._limits.row_sizes, num_rows)
        pause = self._pauses.setdefault(round_up(self._sizes[widths[0]], num_rows), _Pause())
        if pause.left:
            pause.left -= 1
            if not pause.left:
                self._acceptance.hope()
            return 1
        form = (1,) if has_adapters else ()
        cost = plain = self._costs.get((padded, 1, *form), 0.0)
        if not plain:
            return 1
        tokens = self._acceptance.predict()
        best, most = 1, _MARGIN if pause.num_verified < _PROVEN else 1.0
        for width in widths:
            # Computing more tokens is never cheaper, whatever noise there was when they were measured.
            cost = max(cost, self._costs.get((round_up(self._sizes[width], num_rows), width, *form), 0.0))
            gain = tokens[width - 1] * plain / cost
            if gain > most:
                best, most = width, gain
        if best == 1:
            pause.begin()
        elif self._has_drafts:
            pause.num_verified += 1
        return best
