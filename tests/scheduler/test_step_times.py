"""How long steps take: which times say something of plain steps, and which are due to drafts."""

from __future__ import annotations

import pytest

from jaxserve.scheduler.limits import SchedulerLimits
from jaxserve.scheduler.step_times import StepTimes


def make_times() -> StepTimes:
    return StepTimes(
        SchedulerLimits(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=256,
            max_prefix_updates=16,
            row_sizes=(2, 8),
            token_sizes=(64,),
            verify_widths=((1, 5), (8, 5)),
            max_drafts=4,
        )
    )


def test_a_plain_step_behind_drafts_pays_for_them() -> None:
    times = make_times()
    for _ in range(5):
        times.add_decode(1, 1, 0, 1.0)
    for _ in range(5):
        times.add_decode(1, 5, 0, 3.0)
        times.add_decode(1, 1, 0, 1.5)  # the commit of five tokens
        assert times.last_seconds == 1.5
        times.add_decode(1, 1, 0, 1.0)
    assert times.measure(1, 1, 0) == pytest.approx(1.0)
    assert times.measure(1, 5, 0) == pytest.approx(3.5)


def test_three_plain_steps_behind_drafts_pay_for_them() -> None:
    times = make_times()
    for _ in range(5):
        times.add_decode(1, 1, 0, 1.0)
    for _ in range(5):
        times.add_decode(1, 5, 0, 3.0)
        for seconds in (1.5, 1.25, 1.25, 1.0):
            assert times.is_in_wake
            times.add_decode(1, 1, 0, seconds)
        assert not times.is_in_wake
    assert times.measure(1, 1, 0) == pytest.approx(1.0)
    assert times.measure(1, 5, 0) == pytest.approx(4.0)


def test_plain_steps_whose_drafts_are_read_count_only_for_want_of_others() -> None:
    times = make_times()
    for _ in range(8):
        times.add_decode(1, 1, 0, 1.0)
    for _ in range(50):
        for looks in (True, True, False):
            times.add_decode(1, 1, 0, 1.4 if looks else 1.0, looks=looks)
            assert times.measure(1, 1, 0) == pytest.approx(1.0) and not times.is_in_wake
    for _ in range(100):
        times.add_decode(1, 1, 0, 1.4, looks=True)
    assert times.measure(1, 1, 0) == pytest.approx(1.4)


def test_drafts_do_not_pay_for_more_than_a_plain_step_nor_gain_by_a_short_one() -> None:
    for following, expected in ((50.0, 4.0), (0.2, 3.0)):
        times = make_times()
        times.add_decode(1, 1, 0, 1.0)
        times.add_decode(1, 1, 0, 1.0)
        for _ in range(4):
            times.add_decode(1, 5, 0, 3.0)
            times.add_decode(1, 1, 0, following)
        assert times.measure(1, 5, 0) == pytest.approx(expected)


def test_a_plain_step_behind_chunks_says_nothing() -> None:
    times = make_times()
    for _ in range(2):
        times.add_decode(1, 1, 0, 1.0)
    for _ in range(8):
        times.add(40, 2, 9.0)  # chunks
        assert times.last_seconds == 0.0
        times.add_decode(1, 1, 0, 2.0)
    assert times.measure(1, 1, 0) == pytest.approx(1.0)
    assert times.estimate(40) > 8.9


def test_the_first_time_counts_whatever_came_before() -> None:
    times = make_times()
    for _ in range(2):
        times.add_decode(1, 5, 0, 3.0)
        times.add_decode(1, 1, 0, 2.0)
    assert times.measure(1, 1, 0) == pytest.approx(2.0)
