"""The choice of widths on a synthetic clock: drafts pause when they do not pay, or gain what the best width does."""

from __future__ import annotations

import logging
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.core.scheduler.acceptance import Acceptance
from jaxserve.core.scheduler.limits import SchedulerLimits
from jaxserve.core.scheduler.step_times import StepTimes
from jaxserve.core.scheduler.widths import WidthChooser

MOST = 4
SLOW, CHEAP = {1: 1.0, 3: 1.4, 5: 1.9}, {1: 1.0, 3: 1.02, 5: 1.1}
PASSES = 0.6  # of a head, in plain steps
LOOK = 0.4  # what a plain step takes longer that looks drafts up, with the step behind it


class Clock:
    """Decoding rows whose drafts are right with a probability; every step is planned before the last is committed."""

    def __init__(
        self,
        *,
        seed: int = 0,
        times: dict[int, float] = SLOW,
        costs: dict[tuple[int, int], float] | None = None,
        **options: Any,
    ) -> None:
        given: dict[str, Any] = {
            "max_num_seqs": 64,
            "max_num_batched_tokens": 1024,
            "max_model_len": 4096,
            "max_prefix_updates": 16,
            "row_sizes": (2, 8, 64),
            "verify_widths": ((1, 3), (1, 5), (8, 3), (8, 5)),
            "max_drafts": MOST,
        }
        self.limits = SchedulerLimits(**(given | options))
        self.step_times = StepTimes(self.limits)
        if costs is None:
            costs = {(rows, 1): 0.01 * times[1] for rows in self.limits.row_sizes}
            costs |= {
                (rows, width): 0.01 * self._count_plain(width, MOST, times) for rows, width in self.limits.verify_widths
            }
        self.chooser = WidthChooser(self.limits, self.step_times, costs)
        self.num_tokens, self.num_plain = 0, 0.0
        self.widths: list[int] = []
        self.made: list[int] = []
        self.pace = 1.0
        self._times, self._random = times, random.Random(seed)
        self._flight: deque[tuple[int, int, int]] = deque()
        self._lengths: list[int] = []

    def _count_plain(self, width: int, num_drafts: int, times: dict[int, float]) -> float:
        """Returns what a step takes, in plain steps."""
        if self.limits.has_draft_passes:
            return times[width] + PASSES * (num_drafts > 0)
        return times[width] + LOOK * (width == 1 and num_drafts > 0)

    def run(
        self, steps: int, shares: list[float], rows: Callable[[int], int] | int = 1, drafting: float = 1.0
    ) -> Clock:
        """Runs steps. `shares` are those of right drafts by position, `drafting` that of rows that have drafts."""
        for step in range(steps):
            num_rows = rows if isinstance(rows, int) else rows(step)
            width, num_drafts = self.chooser.choose(num_rows)
            self.chooser.note_plan(num_drafts)
            self.widths.append(width)
            self.made.append(num_drafts)
            self._flight.append((num_rows, width, num_drafts))
            if len(self._flight) > 1:
                self._commit(*self._flight.popleft(), shares, drafting)
        return self

    def _commit(self, rows: int, width: int, num_drafts: int, shares: list[float], drafting: float) -> None:
        plain = self._count_plain(width, num_drafts, self._times) * self._random.gauss(1, 0.02)
        self.num_plain += rows * plain  # tokens of plain steps in that time
        self.step_times.add(rows * width, rows, plain * 0.01 * self.pace, width)
        gains: Counter[int] = Counter()
        for length in self._lengths if len(self._lengths) == rows else [0] * rows:
            seen = min(length, width - 1)
            gains[next((i for i in range(seen) if self._random.random() >= shares[i]), seen)] += 1
        self.num_tokens += rows + sum(gained * count for gained, count in gains.items())
        self._lengths = [num_drafts if self._random.random() < drafting else 0 for _ in range(rows)]
        if width > 1:
            self.chooser.note_gains(gains, width - 1)

    def restart(self) -> None:
        """Forgets what was counted so far."""
        self.num_tokens, self.num_plain = 0, 0.0

    @property
    def speed(self) -> float:
        """Tokens a second, in those of plain steps."""
        return self.num_tokens / self.num_plain


def find_best(shares: list[float], times: dict[int, float], costs: bool) -> float:
    """The speed of the best width, without noise."""
    speeds, tokens, reached = [1.0], 1.0, 1.0
    for width in range(2, MOST + 2):
        reached *= shares[width - 2]
        tokens += reached
        if width in times:
            speeds.append(tokens / (times[width] + PASSES * costs))
    return max(speeds)


USELESS = {
    "never right": ([0.0] * 4, 1.0),
    "seldom right": ([0.1] * 4, 1.0),
    "the first at times": ([0.35, 0.1, 0.1, 0.1], 1.0),
    "now and then": ([0.5, 0.3, 0.3, 0.3], 0.3),
    "nobody drafts": ([0.0] * 4, 0.0),
}


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("times", [SLOW, CHEAP], ids=["slow", "cheap"])
@pytest.mark.parametrize("costs", [False, True], ids=["lookups", "head"])
@pytest.mark.parametrize("name", USELESS)
def test_useless_drafts_cost_next_to_nothing(name: str, costs: bool, times: dict[int, float], rows: int) -> None:
    shares, drafting = USELESS[name]
    clock = Clock(times=times, has_draft_passes=costs).run(2000, shares, rows, drafting)
    assert clock.speed >= 0.97


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("times", [SLOW, CHEAP], ids=["slow", "cheap"])
@pytest.mark.parametrize("costs", [False, True], ids=["lookups", "head"])
@pytest.mark.parametrize("shares", [[0.9] * 4, [0.7] * 4, [0.8, 0.7, 0.3, 0.1], [1.0] * 4], ids=str)
def test_good_drafts_gain_what_the_best_width_gains(
    shares: list[float], costs: bool, times: dict[int, float], rows: int
) -> None:
    for seed in range(2):
        clock = Clock(seed=seed, times=times, has_draft_passes=costs).run(2000, shares, rows)
        assert clock.speed >= 0.95 * find_best(shares, times, costs)


def test_the_pace_of_the_machine_changes_nothing() -> None:
    steady, other = Clock(), Clock()
    for pace in (1.0, 0.3, 3.0, 0.3, 1.0):
        other.pace = pace
        for clock in (steady, other):
            clock.run(100, [0.6] * 4)
    assert steady.widths == other.widths and len(set(steady.widths)) > 1


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("costs", [False, True], ids=["lookups", "head"])
def test_text_that_changes_is_followed(costs: bool, rows: int) -> None:
    good, bad = [0.95] * 4, [0.0] * 4
    clock = Clock(has_draft_passes=costs).run(300, bad, rows)
    assert clock.widths[-40:].count(1) > 30
    clock.run(300, good, rows)
    assert 1 not in clock.widths[-40:], "no pause is longer than the steps before it"
    clock.run(70 if rows == 1 else 30, bad, rows)
    assert clock.widths[-20:].count(1) >= 10
    clock.run(60, good, rows)
    assert 1 not in clock.widths[-10:], "drafts that paid pause shortly"


def test_no_pause_is_longer_than_a_thousand_steps() -> None:
    clock = Clock().run(6000, [0.0] * 4)
    assert 0 < clock.made[-1100:].count(MOST) < 20
    assert 1 not in clock.run(1100, [0.95] * 4).widths[-10:]


def test_tokens_behind_an_end_are_no_gain() -> None:
    """Of five right tokens a sequence keeps two, so rows of three tokens bring as many, for less."""
    acceptance = Acceptance(MOST)
    assert acceptance.predict() == [1, 2, 3, 4, 5], "at first drafts are hoped to be right"
    for _ in range(40):
        acceptance.add(Counter({1: 8}), MOST)
    assert acceptance.predict() == pytest.approx([1, 2, 2.03, 2.03, 2.03], abs=0.05)
    acceptance.hope()
    assert acceptance.predict() == [1, 2, 3, 4, 5]


def test_a_position_that_was_not_verified_is_as_good_as_the_one_before_it() -> None:
    acceptance = Acceptance(MOST)
    for _ in range(200):
        acceptance.add(Counter({0: 4, 2: 4}), 2)
    one, *more = acceptance.predict()
    assert one == 1 and more == pytest.approx([1.5, 2, 2.5, 3], abs=0.1)


def test_a_width_never_costs_less_than_a_smaller_one() -> None:
    costs = {(rows, 1): 0.010 for rows in (2, 8, 64)}
    costs |= {(rows, width): seconds for rows in (1, 8) for width, seconds in ((3, 0.050), (5, 0.009))}
    assert set(Clock(costs=costs).run(100, [0.9] * 4).widths) == {1}


def test_nothing_is_verified_before_plain_steps_have_a_cost_and_unknown_widths_are_tried() -> None:
    costs: dict[tuple[int, int], float] = {}
    clock = Clock(costs=costs).run(50, [0.9] * 4)
    assert set(clock.widths) == {1} and set(clock.made) == {0}
    costs[2, 1] = 0.01
    assert clock.run(10, [0.9] * 4).widths[-1] == 5
    costs[1, 5] = 0.1
    assert clock.run(10, [0.9] * 4).widths[-1] == 3
    costs[1, 3] = 0.1
    assert clock.run(10, [0.9] * 4).widths[-1] == 1


def test_a_step_that_must_be_short_verifies_only_what_fits() -> None:
    clock = Clock().run(50, [0.95] * 4)
    for width, seconds in ((3, 0.014), (5, 0.019)):
        clock.step_times.add(width, 1, seconds, width)
    assert [clock.chooser.choose(1, step_limit=limit)[0] for limit in (0.03, 0.016, 0.005)] == [5, 3, 1]


@pytest.mark.parametrize("costs", [False, True], ids=["lookups", "head"])
def test_the_table_fixes_the_drafts(costs: bool) -> None:
    table = ((1, 8, 4), (9, 32, 2))
    clock = Clock(has_draft_passes=costs, fixed_drafts=table, verify_widths=((8, 5), (64, 3), (64, 5)), costs={})
    bad = [0.05] * 4
    clock.run(50, bad, 8)
    assert set(clock.widths[1:]) == {5} and clock.widths[0] == 1, "whatever is accepted"
    clock.run(50, bad, 9)
    assert set(clock.widths[50:]) == {3} and set(clock.made) == {MOST}
    clock.run(50, bad, 40)
    assert set(clock.widths[100:]) == {1} and set(clock.made[100:]) == {0}


def test_rows_that_no_program_verifies_make_no_drafts() -> None:
    clock = Clock().run(20, [0.9] * 4, 9)
    assert set(clock.widths) == {1} and set(clock.made) == {0}


def test_a_head_that_is_never_right_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    clock, lookups = Clock(has_draft_passes=True), Clock()
    with caplog.at_level(logging.WARNING):
        for num_drafts, num_accepted in ((999, 0), (5000, 1), (1000, 0), (1500, 0)):
            clock.chooser.check_head(num_drafts, num_accepted)
            lookups.chooser.check_head(num_drafts, 0)
    (record,) = caplog.records
    assert "none of the first 1000 drafts" in record.message and "speculative_config" in record.message
    assert clock.chooser.is_off and not lookups.chooser.is_off
    assert set(clock.run(50, [1.0] * 4).widths) == {1} and set(clock.made) == {0}
