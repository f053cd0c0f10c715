"""How many tokens each decoding row computes in a step: 1, or its last token and its drafts.

Drafting must never be slower than plain steps. Two things see to that. A prediction, from measured times and running
acceptance, chooses the width. An account bounds what a wrong prediction costs, and what it takes to learn how good
drafts are (`draft_account.py`, `looks.py`): while it is empty nothing is verified, and lookups rest. Each number of
rows that can verify has its own, so that what one row gains is not spent on tries with eight. Both need the time of
plain steps, which changes with what else runs on the machine. So while drafts are verified a few plain steps are run
now and then (`renewals.py`), and always before plain steps are chosen.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass

from jaxserve.scheduler.acceptance import Acceptance
from jaxserve.scheduler.draft_account import DraftAccount
from jaxserve.scheduler.limits import SchedulerLimits
from jaxserve.scheduler.looks import Looks, estimate_cost
from jaxserve.scheduler.renewals import Renewals
from jaxserve.scheduler.step_times import StepTimes

_log = logging.getLogger(__name__)

_MARGIN = 1.05  # a width replaces another if it is better by this factor
_LEAST_MARGIN = 1.02  # the same for plain steps
_HOLD = 16  # steps that fewer rows must last before they count: row counts that flip must not flip the width
_LOOKUP_ALLOWANCE, _HEAD_ALLOWANCE = 0.01, 0.02  # share of the time that may be lost
_KEPT_MEMORY = 16  # verify steps of which the share of kept tokens is known
_MOST_OF_MEAN = 2.0  # times what such a step usually takes: more is not the drafts' fault
_PROBE_CHAINS = 8  # chains that a probe sees
_STAKE = 2.0  # plain steps that an account must have before drafts are made: the first ones cost before they gain
_FRUITLESS = 1000  # drafts of a head without an accepted one, after which it is switched off


@dataclass(frozen=True, slots=True)
class _Price:
    """What a probe costs, and when it pays."""

    width: int = 2
    needed: float = 0.0  # tokens of a row with which its steps gain
    cost: float = 0.0  # of all its steps if no draft is right, in plain steps


class WidthChooser:
    """Chooses widths and numbers of drafts. The planner asks, the committer tells what came of it.

    Args:
        limits: their `max_drafts` is at least 1.
        times: the measured times of steps; it is read only.
    """

    def __init__(self, limits: SchedulerLimits, times: StepTimes) -> None:
        self._limits, self._times = limits, times
        self._sizes = sorted({rows for rows, _ in limits.verify_widths})
        self._widths = [
            (1, *sorted({width for rows, width in limits.verify_widths if rows >= size})) for size in self._sizes
        ]
        self._acceptance = Acceptance(limits.max_drafts)
        self._current = [1] * len(self._sizes)
        self._size, self._age = 0, 0  # the place in `_sizes` that counts, and for how many steps rows were fewer
        self._fixed, self._fixed_age = -1, 0
        self._num_made = 0  # drafts that the last plan makes
        self._looks = Looks()
        self._price = _Price()  # of the next probe
        self.awaits_drafts = False  # whether the last committed step made drafts
        self._probe = 0  # chains that the probe under way has yet to see
        self._renewals = Renewals()
        self._num_brought, self._kept = 0, 1.0  # tokens of the last step's runs; share that sequences keep, a mean
        allowance = _HEAD_ALLOWANCE if limits.draft_costs else _LOOKUP_ALLOWANCE
        self._accounts = [DraftAccount(allowance) for _ in self._sizes]
        self.is_off = False  # for good

    def choose(self, num_rows: int, step_limit: float | None = None) -> tuple[int, int]:
        """Returns the width of the next step if it has no chunks, and how many drafts it makes for the step after it.

        Args:
            num_rows: decoding rows; without any, the step's chunks may bring some, which can verify in the next step.
            step_limit: seconds that the step may take; None: any time.
        """
        limits, num_decoding, num_rows = self._limits, num_rows, max(1, num_rows)
        place = bisect_left(self._sizes, num_rows)
        if place >= self._size or self._age >= _HOLD:
            if place != self._size:
                self._price = _Price()  # that of other rows says nothing
                self._renewals.forget_usual()
            self._size, self._age = place, 0
        else:
            self._age += 1
        if self.is_off or self._size == len(self._sizes):
            return 1, 0
        account = self._accounts[self._size]
        self._looks.note_rows(num_decoding, account)
        if self._rests:
            self._looks.pass_step()
            return 1, 0
        widths = [width for width in self._widths[self._size] if self._may_run(num_rows, width, step_limit)]
        wanted = self._choose_measured(num_rows, widths) if limits.fixed_drafts is None else self._read_table(num_rows)
        wanted = max(width for width in widths if width <= wanted)
        width = max(width for width in widths if width <= min(wanted, self._num_made + 1))
        if limits.draft_costs:
            return width, wanted - 1
        return width, 0 if self._renewals.is_under_way else self._count_lookups(num_rows, wanted)

    def note_plan(self, num_drafts: int) -> None:
        """Notes how many drafts the step that was planned makes."""
        self._num_made = num_drafts

    def note_drafts(self, lengths: list[int] | None) -> None:
        """Notes how many drafts each row of a committed step has for its next one; None: the step made none."""
        self.awaits_drafts = lengths is not None
        if lengths is not None:
            self._acceptance.set_lengths(lengths)

    def note_chains(self, chains: Counter[tuple[int, int]], num_verified: int) -> None:
        """Notes what became of the drafts of a committed step.

        Args:
            chains: rows by (drafts compared, drafts that were right). In a step of width 1 the first draft of a row is
                compared with the token that the row sampled.
            num_verified: rows that verified; 0 in a step of width 1.
        """
        self._acceptance.add(chains)
        self._num_brought = sum((right + 1) * count for (_, right), count in chains.items())
        if not num_verified and self._may_pay(chains):
            self._looks.hope()  # what was right may be right again
        if self._probe and num_verified:
            self._probe = max(0, self._probe - num_verified)

    def _may_pay(self, chains: Counter[tuple[int, int]]) -> bool:
        """Returns whether a probe can be paid for and would gain if its drafts were as good as these first ones."""
        num_right, price = sum(count for (_, right), count in chains.items() if right), self._price
        if not num_right or self._size == len(self._sizes) or not self._accounts[self._size].affords(price.cost):
            return False
        share = num_right / chains.total()
        return sum(share**position for position in range(price.width)) >= price.needed

    def check_head(self, num_drafts: int, num_accepted: int) -> None:
        """Switches off a head of which no draft was ever accepted, if there were many."""
        if num_accepted or num_drafts < _FRUITLESS or self.is_off or not self._limits.draft_costs:
            return
        self.is_off = True
        _log.warning(
            "speculative_config: none of the first %d drafts was accepted, so drafting is switched off. "
            "Was its model trained for the one that is served?",
            num_drafts,
        )

    def note_step(self, num_rows: int, width: int, num_drafts: int, num_tokens: int) -> None:
        """Balances the account after a step of `num_rows` decoding rows that brought `num_tokens` tokens.

        Short answers often end within a run, whose other tokens were computed for nothing.
        """
        if width > 1 and self._num_brought:
            self._kept += (min(1.0, num_tokens / self._num_brought) - self._kept) / _KEPT_MEMORY
        times, num_rows = self._times, max(1, num_rows)
        place = bisect_left(self._sizes, num_rows)
        if place == len(self._sizes):
            return
        account = self._accounts[place]
        self._renewals.note_step(times.was_plain)
        if times.was_plain and account.is_open:  # most steps: it costs the host little
            account.add()
            return
        plain = times.measure(num_rows, 1, 0)
        if not plain:
            return
        gain = 0.0
        if times.is_in_wake and num_tokens:
            most = times.measure(num_rows, width, self._limits.count_costly(width, num_drafts)) / plain or 2.0
            if self._renewals.usual and (place, width) == (self._size, self._current[place]):
                most = min(most, self._renewals.usual)  # a sudden rise is most likely one of all steps
            gain = num_tokens / num_rows - min(times.last_seconds / plain, _MOST_OF_MEAN * most)
        elif num_drafts and not (times.last_seconds or self._limits.draft_costs):  # lookups in a step of chunks
            gain = -estimate_cost(plain, times.measure(num_rows, 1, num_drafts))
        account.add(gain)

    @property
    def _rests(self) -> bool:
        """Whether there is nothing to choose from: no step has or awaits drafts, and none may try them yet."""
        if self._limits.fixed_drafts is not None or self._current[self._size] > 1:
            return False
        if self._num_made or self.awaits_drafts or self._probe:
            return False
        if not self._limits.draft_costs:
            return not self._looks.is_due
        return not self._accounts[self._size].affords(self._price.cost)

    def _count_lookups(self, num_rows: int, width: int) -> int:
        """Returns the drafts that a step with lookups makes: all for a step of `width` that follows, or for a look."""
        plain, account, most = self._times.measure(num_rows, 1, 0), self._accounts[self._size], self._limits.max_drafts
        if width == 1 and (self._limits.fixed_drafts is not None or not plain):
            return 0
        if width == 1 and not self._looks.is_due:
            self._looks.pass_step()
            return 0
        if plain:
            self._looks.begin(account, estimate_cost(plain, self._times.measure(num_rows, 1, most)))
        return most if width > 1 or account.affords(0.0) else 0

    def _may_run(self, num_rows: int, width: int, step_limit: float | None) -> bool:
        if width == 1:
            return True
        if num_rows * width > self._limits.max_num_batched_tokens:
            return False
        return step_limit is None or self._estimate(num_rows, width) <= step_limit

    def _estimate(self, num_rows: int, width: int) -> float:
        """Returns the seconds of a step of this width in a row of such steps; 0 if there were too few."""
        return self._times.estimate_width(num_rows, width, self._limits.count_costly(width, width - 1))

    def _read_table(self, num_rows: int) -> int:
        """Returns the width by the fixed table. A change of the table's line must last before it counts."""
        table = self._limits.fixed_drafts or ()
        fixed = next((drafts for first, last, drafts in table if first <= num_rows <= last), 0)
        if fixed == self._fixed:
            self._fixed_age = 0
        elif self._fixed < 0 or self._fixed_age >= _HOLD:
            self._fixed, self._fixed_age = fixed, 0
        else:
            self._fixed_age += 1
        return self._fixed + 1

    def _choose_measured(self, num_rows: int, widths: list[int]) -> int:
        """Returns the width with the most tokens a second, as far as is known and the account allows."""
        account = self._accounts[self._size]
        if not account.is_open or len(widths) == 1:
            return 1  # the time of plain steps must be known first
        current = self._current[self._size]
        if not account.affords(0.0):
            self._probe = 0
            self._current[self._size] = 1
            return 1
        plain = self._estimate(num_rows, 1)
        if not plain:
            return 1
        tokens = self._acceptance.predict(always_drafts=self._limits.draft_costs)
        # A width without a time is taken for as fast as a plain step, so it is tried if its drafts are any good.
        tokens = [tokens[0], *(count * self._kept for count in tokens[1:])]
        speeds = {width: tokens[width - 1] / (self._estimate(num_rows, width) or plain) for width in widths}
        best = max(speeds, key=speeds.__getitem__)
        if current > 1 and not self._probe:
            ratio = self._estimate(num_rows, current) / plain if current in speeds else 0.0
            self._renewals.consider(ratio, is_worse=speeds[best] > speeds.get(current, 0) and best == 1)
        if self._renewals.take_step():
            return 1
        is_better = speeds[best] > (_MARGIN if best > 1 else _LEAST_MARGIN) * speeds.get(current, 0)
        if is_better and (current > 1 or account.affords(_STAKE)):
            if best == 1 and self._limits.draft_costs:
                account.halve()
            current = self._current[self._size] = best
            self._renewals.forget_usual()
        if current > 1:
            return current
        return self._choose_probe(num_rows, widths, plain, account)

    def _choose_probe(self, num_rows: int, widths: list[int], plain: float, account: DraftAccount) -> int:
        """Returns the width of a probe while plain steps seem best; 1: not now."""
        width = widths[1]
        if self._probe:
            return width
        ratio = self._estimate(num_rows, width) / plain or 2.0
        num_steps = max(2, _PROBE_CHAINS // num_rows) + 1
        self._price = _Price(width, _MARGIN * ratio, num_steps * (ratio - 1))
        if not account.affords(self._price.cost):
            return 1
        if not self._limits.draft_costs:  # plain steps show how good first drafts are
            tokens = self._acceptance.predict(always_drafts=False, hopes=True)
            if tokens[width - 1] <= self._price.needed:
                return 1
        self._acceptance.forget()
        self._probe = max(_PROBE_CHAINS, 2 * num_rows)
        return width
