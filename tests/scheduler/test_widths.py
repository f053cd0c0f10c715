"""The choice of widths on a synthetic clock: never slower than plain steps, and nearly as fast as the best width."""

from __future__ import annotations

import logging
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.scheduler.acceptance import Acceptance
from jaxserve.scheduler.limits import SchedulerLimits
from jaxserve.scheduler.step_times import StepTimes
from jaxserve.scheduler.widths import WidthChooser

MOST = 4
SLOW, CHEAP = {1: 1.0, 3: 1.4, 5: 1.9}, {1: 1.0, 3: 1.02, 5: 1.1}
DRAFT = 0.15  # a draft of a head, in plain steps
LOOK = 0.25, 0.15  # what a plain step takes longer whose drafts are looked up, and the one behind it


class Clock:
    """Decoding rows whose drafts are right with a probability; every step is planned before the last is committed.

    Steps are longer and shorter in turns by a share of `swing`, as those of a device that is ahead of the host.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        times: dict[int, float] = SLOW,
        look: tuple[float, float] = LOOK,
        kept: float = 1.0,
        swing: float = 0.0,
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
        self.chooser = WidthChooser(self.limits, self.step_times)
        self.seconds, self.num_tokens, self.num_plain = 0.0, 0, 0.0
        self.widths: list[int] = []
        self.made: list[int] = []
        self._times, self._look, self._random, self._kept = times, look, random.Random(seed), kept
        self._swing, self.pace = swing, 1.0
        self._flight: deque[tuple[int, int, int]] = deque()
        self._lengths: list[int] = []
        self._num_drafts = self._num_accepted = 0
        self._looked = False

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
        costs = self.limits.draft_costs
        seconds = self._times[width] + (DRAFT * num_drafts if costs else 0)
        looks = width == 1 and num_drafts > 0 and not costs
        seconds += self._look[0] * looks + self._look[1] * (self._looked and width == 1)
        self._looked = looks
        self._swing = -self._swing
        seconds *= (self._random.gauss(1, 0.02) + self._swing) * (1 + 0.05 * rows) * 0.01 * self.pace
        self.seconds += seconds
        self.num_plain += rows * seconds / (0.01 * (1 + 0.05 * rows) * self.pace)  # tokens of plain steps in that time
        self.step_times.add_decode(rows, width, self.limits.count_costly(width, num_drafts), seconds)
        chains: Counter[tuple[int, int]] = Counter()
        num_tokens = rows
        for length in self._lengths if len(self._lengths) == rows else [0] * rows:
            seen = min(length, max(1, width - 1))
            right = next((i for i in range(seen) if self._random.random() >= shares[i]), seen)
            chains[seen, right] += 1
            if width > 1:
                num_tokens += right
                self._num_drafts += seen
                self._num_accepted += right
        if width > 1:
            num_tokens = round(num_tokens * self._kept)  # answers end within runs
        self.num_tokens += num_tokens
        self._lengths = [num_drafts if self._random.random() < drafting else 0 for _ in range(rows)]
        self.chooser.note_chains(chains, rows if width > 1 else 0)
        self.chooser.note_drafts(self._lengths if num_drafts else None)
        self.chooser.note_step(rows, width, num_drafts, num_tokens)
        if width > 1:
            self.chooser.check_head(self._num_drafts, self._num_accepted)

    def restart(self) -> None:
        """Forgets what was measured so far."""
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
            speeds.append(tokens / (times[width] + (DRAFT * (width - 1) if costs else 0)))
    return max(speeds)


USELESS = {
    "never right": ([0.0] * 4, 1.0),
    "seldom right": ([0.1, 0.1, 0.1, 0.1], 1.0),
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
    for seed in range(2):
        clock = Clock(seed=seed, times=times, draft_costs=costs).run(2000, shares, rows, 1.0 if costs else drafting)
        assert clock.speed >= (0.97 if costs else 0.98)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("times", [SLOW, CHEAP], ids=["slow", "cheap"])
@pytest.mark.parametrize("costs", [False, True], ids=["lookups", "head"])
@pytest.mark.parametrize("shares", [[0.9] * 4, [0.7] * 4, [0.8, 0.7, 0.3, 0.1], [1.0] * 4], ids=str)
def test_good_drafts_gain_what_the_best_width_gains(
    shares: list[float], costs: bool, times: dict[int, float], rows: int
) -> None:
    for seed in range(2):
        clock = Clock(seed=seed, times=times, draft_costs=costs).run(2000, shares, rows)
        assert clock.speed >= 0.94 * find_best(shares, times, costs)


def test_tokens_behind_an_end_are_no_gain() -> None:
    """All widths would gain if answers did not end within runs; so they lose a hundredth."""
    assert find_best([0.9] * 4, SLOW, costs=False) > 2
    for seed in range(4):
        clock = Clock(kept=0.46, seed=seed).run(3000, [0.9] * 4, 8)
        assert clock.widths[-1000:].count(1) >= 700 and clock.speed >= 0.98


def test_a_step_that_must_be_short_verifies_only_what_fits() -> None:
    clock = Clock().run(400, [0.95] * 4)
    assert set(clock.widths[-50:]) == {5}
    seconds = clock.step_times.measure(1, 3, 0)
    assert clock.chooser.choose(1, step_limit=1.1 * seconds)[0] == 3
    assert clock.chooser.choose(1, step_limit=0.8 * seconds)[0] == 1


@pytest.mark.parametrize("costs", [False, True], ids=["lookups", "head"])
def test_rows_that_flip_do_not_flip_the_width(costs: bool) -> None:
    clock = Clock(draft_costs=costs).run(500, [0.9] * 4, 8)
    assert 1 not in clock.widths[-50:]
    flips = Clock(draft_costs=costs).run(500, [0.9] * 4, 8)
    flips.run(300, [0.9] * 4, lambda step: 9 if step % 2 == 0 else 8)
    assert sum(before != after for before, after in zip(flips.widths[500:], flips.widths[501:], strict=False)) <= 1
    assert set(flips.made[520:]) == {0}, "nobody drafts for steps that cannot verify"
    flips.run(30, [0.9] * 4, 8)
    assert 1 not in flips.widths[-8:], "the larger number has gone for good"


@pytest.mark.parametrize("costs", [False, True], ids=["lookups", "head"])
def test_the_table_fixes_the_drafts_and_does_not_thrash(costs: bool) -> None:
    table = ((1, 8, 4), (9, 32, 2))
    clock = Clock(draft_costs=costs, fixed_drafts=table, verify_widths=((8, 5), (64, 3), (64, 5)))
    bad = [0.05] * 4
    clock.run(50, bad, 8)
    assert set(clock.widths[1:]) == {5} and clock.widths[0] == 1, "whatever is accepted"
    clock.run(200, bad, lambda step: 9 if step % 2 == 0 else 8)
    assert sum(a != b for a, b in zip(clock.widths[50:], clock.widths[51:], strict=False)) <= 1
    clock.run(50, bad, 9)
    assert set(clock.widths[-20:]) == {3} and set(clock.made[-20:]) == {2 if costs else MOST}
    clock.run(50, bad, 40)
    assert set(clock.widths[-20:]) == {1} and set(clock.made[-20:]) == {0}


@pytest.mark.parametrize("times", [SLOW, CHEAP], ids=["slow", "cheap"])
@pytest.mark.parametrize("rows", [1, 8])
def test_lookups_come_back_when_the_text_changes(times: dict[int, float], rows: int) -> None:
    """Within two waits for a look."""
    for seed in range(5):
        clock = Clock(seed=seed, times=times).run(1000, [0.0] * 4, rows).run(160, [0.95] * 4, rows)
        clock.restart()
        clock.run(100, [0.95] * 4, rows)
        assert clock.speed >= 0.8 * find_best([0.95] * 4, times, costs=False)
        clock.restart()
        clock.run(300, [0.0] * 4, rows)
        assert clock.num_plain - clock.num_tokens <= 22 * rows, "what it had gained bounds what it loses"
        assert times is CHEAP or clock.widths[-200:].count(1) >= 196


@pytest.mark.parametrize(("look", "between"), [(LOOK, (55, 90)), ((0.02, 0.01), (15, 18))], ids=["slow", "cheap"])
def test_lookups_are_read_as_often_as_their_time_allows(look: tuple[float, float], between: tuple[int, int]) -> None:
    clock = Clock(look=look).run(3000, [0.0] * 4)
    assert between[0] <= 2000 / clock.made[-2000:].count(MOST) <= between[1]
    rests = clock.run(160, [1.0] * 4).made[-40:].count(0)
    assert rests < 8, "one that was right is followed by others, but while plain steps are measured anew"


@pytest.mark.parametrize("swing", [0.0, 0.5])
def test_other_rows_have_a_look_if_there_is_plenty_to_pay_it(swing: float) -> None:
    """With rows that come and go all the time, looks take what the account earns, and not more.

    A try of a width takes what several looks would; where steps are long and short in turns there are more tries.
    """
    looks, speed = [], 0.0
    for seed in range(4):
        clock = Clock(seed=seed, swing=swing).run(4000, [0.0] * 4, lambda step: 7 + step // 5 % 2)
        looks += [step for step, made in enumerate(clock.made) if made and step >= 1000]
        speed += clock.speed / 4
    assert speed >= 0.9845
    assert sum(step % 5 == 0 for step in looks) >= 0.5 * len(looks), "a fifth of them if rows were no reason"
    assert 35 <= 4 * 3000 / len(looks) <= 55


@pytest.mark.parametrize("steps", [100, 101])
def test_short_steps_do_not_take_what_drafts_gained(steps: int) -> None:
    clock = Clock(swing=0.6).run(500, [0.95] * 4, 8).run(steps, [0.0] * 4, 8, drafting=0.0)
    assert clock.widths[-50:].count(1) == 50 and not any(clock.made[-5:])
    assert clock.run(1, [0.95] * 4, 7).made[-1] == MOST, "another row has a look at once"


@pytest.mark.parametrize("swing", [0.0, 0.5])
@pytest.mark.parametrize("pace", [0.4, 3.0])
@pytest.mark.parametrize("costs", [False, True], ids=["lookups", "head"])
def test_another_pace_of_the_machine_does_not_end_good_drafts(costs: bool, pace: float, swing: float) -> None:
    """While drafts are verified, the time of a plain step is one of long ago."""
    for seed in range(8):
        clock = Clock(seed=seed, swing=swing, draft_costs=costs).run(2000, [0.9] * 4)
        clock.pace = pace
        assert clock.run(600, [0.9] * 4).widths[-600:].count(1) <= 60


@pytest.mark.parametrize(("costs", "share"), [(False, 0.85), (True, 0.7)], ids=["lookups", "head"])
def test_a_machine_that_is_fast_in_bursts_does_not_end_good_drafts(costs: bool, share: float) -> None:
    """Verify steps are soon counted in plain steps that were measured behind them, not before them alone."""
    num_verified = num_steps = 0
    for seed in range(12):
        pace, clock = random.Random(seed), Clock(seed=seed, draft_costs=costs)
        for _ in range(50):
            clock.pace = pace.choice((0.3, 1.0))
            clock.run(pace.randrange(10, 60), [0.9] * 4)
        later = clock.widths[500:]
        num_verified, num_steps = num_verified + len(later) - later.count(1), num_steps + len(later)
    assert num_verified >= share * num_steps


def test_steps_of_chunks_pay_for_their_looks() -> None:
    """Otherwise rows that come and go would be looked at each time, as the account would always have plenty."""
    clock = Clock().run(2000, [0.0] * 4, 8)
    chooser, made = clock.chooser, []
    for step in range(400):
        _, num_drafts = chooser.choose(7 + step % 2)
        chooser.note_plan(num_drafts)
        clock.step_times.add(40, 9, 0.05)
        chooser.note_drafts([0] * 8 if num_drafts else None)
        chooser.note_step(8, 1, num_drafts, 8)
        made.append(num_drafts)
    assert 1 <= made[-200:].count(MOST) <= 200 / 20


def test_lookups_rest_where_a_verify_step_cannot_pay_for_itself() -> None:
    """Half of the first drafts are right, which would bring 1.9 tokens in a step that costs as much as 4."""
    clock = Clock(times={1: 1.0, 3: 3.0, 5: 4.0}).run(2000, [0.5] * 4, 8)
    assert clock.made[-1000:].count(MOST) <= 1000 / 40 and clock.speed >= 0.98
    assert clock.run(500, [1.0] * 4, 8).widths[-50:].count(1) <= 10, "but come back with better drafts"


def test_a_head_that_is_off_runs_no_draft_passes_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, predict = [], Acceptance.predict

    def count(self: Acceptance, **options: Any) -> list[float]:
        compared.append(self)
        return predict(self, **options)

    monkeypatch.setattr(Acceptance, "predict", count)
    clock = Clock(draft_costs=True).run(500, [0.1] * 4)
    compared.clear()
    clock.run(1000, [0.1] * 4)
    assert clock.made[-1000:].count(0) >= 930 and clock.widths[-1000:].count(1) >= 940
    assert len(compared) <= 100, "widths are compared only when something could be tried"
    clock.run(3000, [0.95] * 4)
    assert clock.widths[-300:].count(1) <= 10


def test_a_head_that_is_never_right_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock(draft_costs=True, times=CHEAP)
    with caplog.at_level(logging.WARNING):
        clock.run(12_000, [0.0] * 4)
    assert clock.chooser.is_off
    (record,) = caplog.records
    assert "none of the first" in record.message and "speculative_config" in record.message
    before = len(clock.widths)
    clock.run(500, [1.0] * 4)
    assert set(clock.widths[before:]) == {1} and set(clock.made[before:]) == {0}


def test_a_right_draft_keeps_a_head_and_lookups_are_never_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    right, lookups = Clock(draft_costs=True), Clock()
    right.chooser.check_head(5000, 1)
    lookups.chooser.check_head(5000, 0)
    assert not right.chooser.is_off and not lookups.chooser.is_off and not caplog.records


def test_a_slow_first_step_is_no_verdict() -> None:
    """The first step of a size may have compiled its program."""
    clock = Clock(verify_widths=((1, 5),))
    compiled = clock.step_times.add_decode
    seen: set[int] = set()

    def add(num_rows: int, width: int, num_drafts: int, seconds: float) -> None:
        compiled(num_rows, width, num_drafts, seconds if width in seen else 100.0)
        seen.add(width)

    clock.step_times.add_decode = add  # type: ignore[method-assign]
    clock.run(300, [0.95] * 4)
    assert clock.widths[-100:].count(5) >= 90
