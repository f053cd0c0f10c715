"""Tiers: who is first, who yields, and how long a step may take while a row of the tier priority decodes."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.core.scheduler import Scheduler, SequenceStatus, StepPlan
from jaxserve.request import ServiceTier
from tests.core.scheduler.test_scheduler import add, commit, make_scheduler

FLEX, PRIORITY = ServiceTier.FLEX, ServiceTier.PRIORITY
SIZES = (64, 128, 256)
ROW_SIZES = (2, 4, 8)


def step(scheduler: Scheduler, seconds: float = 0.0) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    scheduler.add_time(plan, seconds)
    commit(scheduler, plan)
    return plan


def make_timed(**options: Any) -> Scheduler:
    """Eight rows with a limit of 30 ms; a row of the tier priority decodes."""
    scheduler = make_scheduler(
        rows=8, budget=256, num_pages=200, sizes=SIZES, row_sizes=ROW_SIZES, priority_itl_ms=30, **options
    )
    add(scheduler, "soon", 20, max_tokens=400, service_tier=PRIORITY)
    step(scheduler)
    return scheduler


def time_of(plan: StepPlan) -> float:
    """The seconds of a step on a device that needs 0.1 ms a token and 2 ms a row."""
    if plan.num_tokens == plan.num_rows:
        padded = next(size for size in ROW_SIZES if size >= plan.num_rows)
    else:
        padded = next(size for size in SIZES if size >= plan.num_tokens)
    return padded * 1e-4 + plan.num_rows * 2e-3


def test_tiers_come_before_priorities() -> None:
    scheduler = make_scheduler(rows=1)
    for name, options in {
        "flex": {"service_tier": FLEX, "priority": -5},
        "usual": {},
        "soon": {"service_tier": PRIORITY, "priority": 5},
    }.items():
        add(scheduler, name, 5, 1, **options)
    order = []
    while scheduler.has_unfinished:
        order.append(scheduler.waiting.first.request.request_id)
        step(scheduler)
    assert order == ["soon", "usual", "flex"]


def test_flex_yields_its_row_and_comes_back() -> None:
    scheduler = make_scheduler(rows=2)
    flex = [add(scheduler, f"flex{number}", 20, 30, service_tier=FLEX) for number in range(2)]
    step(scheduler)
    usual = add(scheduler, "usual", 20, 5)
    plan = step(scheduler)
    assert [new_row.row for new_row in plan.new_rows] == [1] and usual.status is SequenceStatus.RUNNING
    assert [sequence.status for sequence in flex] == [SequenceStatus.RUNNING, SequenceStatus.PREEMPTED]
    more_flex = add(scheduler, "more", 20, 5, service_tier=FLEX)
    while scheduler.has_unfinished:
        step(scheduler)
    assert [flex[1].num_preemptions, flex[0].num_preemptions, more_flex.num_preemptions] == [1, 0, 0]
    assert [len(sequence.token_ids) for sequence in (*flex, usual, more_flex)] == [50, 50, 25, 25]


def test_flex_yields_its_pages() -> None:
    scheduler = make_scheduler(rows=4, budget=256, num_pages=6)
    flex = add(scheduler, "flex", 120, 30, service_tier=FLEX)
    step(scheduler)
    usual = add(scheduler, "usual", 100, 5)
    step(scheduler)
    assert (flex.status, usual.status) == (SequenceStatus.PREEMPTED, SequenceStatus.RUNNING)


def test_the_usual_tier_does_not_yield_to_the_better_one() -> None:
    scheduler = make_scheduler(rows=1)
    usual = add(scheduler, "usual", 20, 30)
    step(scheduler)
    add(scheduler, "soon", 20, 5, service_tier=PRIORITY)
    step(scheduler)
    assert usual.status is SequenceStatus.RUNNING


@pytest.mark.parametrize(("threshold", "yields"), [(None, False), (11, False), (10, True), (1, True)])
def test_a_much_better_priority_takes_a_row(threshold: int | None, yields: bool) -> None:
    scheduler = make_scheduler(rows=2, priority_scheduling_preemption_threshold=threshold)
    add(scheduler, "old", 20, 30, priority=5)
    young = add(scheduler, "young", 20, 30, priority=5)
    step(scheduler)
    add(scheduler, "urgent", 20, 5, priority=-5)
    step(scheduler)
    assert (young.status is SequenceStatus.PREEMPTED) == yields


def test_nobody_yields_while_there_is_room() -> None:
    scheduler = make_scheduler(rows=2, priority_scheduling_preemption_threshold=1)
    flex = add(scheduler, "flex", 20, 30, service_tier=FLEX)
    step(scheduler)
    add(scheduler, "usual", 20, 5)
    step(scheduler)
    assert flex.status is SequenceStatus.RUNNING


def test_steps_keep_to_the_limit_while_a_priority_row_decodes() -> None:
    scheduler = make_timed()
    for number in range(30):
        add(scheduler, f"flex{number}", 300, 20, service_tier=FLEX)
    times = []
    while any(sequence.request.service_tier == PRIORITY for sequence in scheduler.batch.decoding) and len(times) < 300:
        plan = scheduler.plan()
        assert plan is not None
        times.append(time_of(plan))
        scheduler.add_time(plan, times[-1])
        commit(scheduler, plan)
    within = sum(seconds <= 0.033 for seconds in times)
    assert within >= 0.98 * len(times)
    assert max(times) < 0.045, "the larger sizes are tried, one after the other"
    assert scheduler.counts.num_tier_misses == sum(seconds > 0.030 for seconds in times)


def test_without_such_a_row_there_is_no_limit() -> None:
    scheduler = make_scheduler(rows=8, budget=256, num_pages=200, sizes=SIZES, priority_itl_ms=30)
    add(scheduler, "usual", 20, 400)
    step(scheduler)
    for number in range(4):
        add(scheduler, f"flex{number}", 500, 20, service_tier=FLEX)
    assert [step(scheduler, seconds=1.0).num_tokens for _ in range(3)] == [256 - 31] * 3
    assert scheduler.counts.num_tier_misses == 0


def test_decoding_that_takes_too_long_admits_only_its_own_tier() -> None:
    scheduler = make_timed()
    for _ in range(5):
        step(scheduler, seconds=0.050)
    usual = add(scheduler, "usual", 20, 5)
    soon = add(scheduler, "soon too", 20, 5, service_tier=PRIORITY)
    step(scheduler, seconds=0.050)
    assert (usual.status, soon.status) == (SequenceStatus.WAITING, SequenceStatus.RUNNING)
    while scheduler.has_unfinished:
        step(scheduler, seconds=0.001)
    assert usual.status is SequenceStatus.FINISHED, "it was tried again"
