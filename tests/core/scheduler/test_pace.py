"""The expected wait: a place in line at the recent pace; who would wait too long is refused at once."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxserve.core.scheduler import Scheduler
from jaxserve.core.scheduler.pace import QueuePace
from jaxserve.errors import QueueFullError
from jaxserve.request import FinishReason, ServiceTier, Tenant
from tests.core.scheduler.test_scheduler import make_scheduler
from tests.core.scheduler.test_waiting import make_request

DEFAULT, FLEX = (ServiceTier.DEFAULT, 0), (ServiceTier.FLEX, 0)


def make_waiting(count: int, **options: Any) -> Scheduler:
    """Its one row runs, so many wait, and two a second were admitted so far."""
    scheduler = make_scheduler(rows=1, clock=lambda: 100.0, **options)
    scheduler.add(make_request("runs", 5))
    assert scheduler.plan() is not None
    for number in range(count):
        scheduler.add(make_request(f"w{number}", 5, tenant=Tenant("many")))
    scheduler.queue_admission.pace = pace = QueuePace()
    pace.note(0.0, 0, waits=True)
    pace.note(1.0, 2, waits=True)
    return scheduler


def test_the_pace_is_of_times_in_which_some_wait() -> None:
    pace = QueuePace()
    for second in range(100):
        pace.note(second, second, waits=False)
    assert pace.estimate(50) == 0.0, "an idle engine admitted one a second, and could have admitted more"
    pace.note(100.0, 132, waits=True)  # the burst that filled the rows
    pace.note(101.0, 142, waits=True)
    assert pace.estimate(50) == pytest.approx(5.0)
    assert pace.estimate(0) == pace.estimate(-3) == 0.0
    pace.note(102.0, 147, waits=False)
    assert pace.estimate(50) == pytest.approx(50 / 7.5, rel=0.05)
    pace.note(111.0, 147, waits=False)
    pace.note(115.0, 147, waits=True)
    assert pace.estimate(50) == 0.0, "it is too long ago"


def test_a_queue_that_stands_still_takes_for_ever() -> None:
    pace = QueuePace()
    for second in range(9):
        pace.note(second, 0, waits=True)
        assert second in (6, 7) or pace.estimate(1) == (0.0 if second < 6 else math.inf)
    pace.note(9.0, 1, waits=True)
    assert pace.estimate(1) < math.inf


def test_what_would_wait_too_long_is_refused_at_once() -> None:
    scheduler = make_waiting(3)
    admission = scheduler.queue_admission
    assert admission.estimate_wait(DEFAULT) == pytest.approx(2.0)
    assert admission.find_room([make_request("unbounded", deadline=100.1)]) == []
    admission.bound_wait(1.9)
    with pytest.raises(QueueFullError, match=r"expected in 2\.0 s, and max_queue_wait=1\.9; try again") as caught:
        admission.find_room([make_request("late")])
    assert (caught.value.limit, caught.value.queued) == (1.9, pytest.approx(2.0))
    with pytest.raises(QueueFullError):
        admission.refuse_if_late(DEFAULT)
    admission.bound_wait(2.1)
    assert admission.find_room([make_request("in time")]) == []


def test_better_requests_wait_for_better_ones_only() -> None:
    admission = make_waiting(3).queue_admission
    admission.bound_wait(0.6)
    assert admission.estimate_wait((ServiceTier.DEFAULT, -1)) == 0.5
    assert admission.estimate_wait((ServiceTier.PRIORITY, 5)) == 0.5
    assert admission.find_room([make_request("better", priority=-1)]) == []
    assert admission.estimate_wait(FLEX) == 2.0


def test_flex_waits_as_long_as_it_takes_and_a_deadline_holds_for_all() -> None:
    admission = make_waiting(3).queue_admission
    admission.bound_wait(1.0)
    assert admission.find_room([make_request("flex", service_tier=ServiceTier.FLEX)]) == []
    admission.bound_wait(math.inf)
    for tier in (ServiceTier.FLEX, ServiceTier.DEFAULT):
        assert admission.find_room([make_request("in time", service_tier=tier, deadline=102.5)]) == []
        with pytest.raises(QueueFullError, match=r"expected in 2\.0 s, and its timeout leaves 1\.5 s"):
            admission.find_room([make_request("late", service_tier=tier, deadline=101.5)])


def test_idle_rows_take_what_comes() -> None:
    scheduler = make_waiting(0)
    scheduler.queue_admission.bound_wait(0.1)
    with pytest.raises(QueueFullError):
        scheduler.queue_admission.find_room([make_request("late")])
    scheduler.finish("runs", FinishReason.ABORT)
    assert scheduler.queue_admission.estimate_wait(DEFAULT) == 0.0
    assert scheduler.queue_admission.find_room([make_request("at once", deadline=99.0)]) == []


def test_with_turns_one_tenant_does_not_make_another_wait() -> None:
    admission = make_waiting(30, scheduling_policy="fair").queue_admission
    assert admission.estimate_wait(DEFAULT, Tenant("many")) == 15.5
    assert admission.estimate_wait(DEFAULT, Tenant("one")) == 1.0, "behind one of the others"
    assert admission.estimate_wait(DEFAULT, Tenant("light", weight=0.1)) == 5.5, "behind ten"
    admission.bound_wait(2.0)
    assert admission.find_room([make_request("a", tenant=Tenant("one"))]) == []
    with pytest.raises(QueueFullError):
        admission.find_room([make_request("b", tenant=Tenant("many"))])
