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


def test_a_plain_step_that_looks_drafts_up_is_of_a_kind_of_its_own_and_so_is_the_one_behind_it() -> None:
    times = make_times()
    for _ in range(8):
        times.add_decode(1, 1, 0, 1.0)
    assert times.was_plain and not times.is_in_wake
    for _ in range(20):
        for num_drafts, seconds in ((4, 1.3), (0, 1.2), (0, 1.0)):
            times.add_decode(1, 1, num_drafts, seconds)
            assert times.is_in_wake == (seconds > 1) != times.was_plain
    assert times.measure(1, 1, 0) == pytest.approx(1.0)
    assert times.measure(1, 1, 4) == pytest.approx(1.5)


def test_a_look_in_the_wake_of_a_verify_step_does_not_end_it() -> None:
    times = make_times()
    for _ in range(5):
        times.add_decode(1, 1, 0, 1.0)
    for num_drafts in (0, 4, 0, 0):
        times.add_decode(1, 5 if times.was_plain else 1, num_drafts, 1.5)
    assert times.measure(1, 1, 0) == pytest.approx(1.0) and not times.was_plain
    times.add_decode(1, 1, 0, 1.0)
    assert times.was_plain


def test_times_of_a_rare_kind_follow_what_changes() -> None:
    times = make_times()
    for seconds, expected in ((1.5, 1.5), (3.0, 3.0)):
        for _ in range(12):
            times.add_decode(1, 1, 4, seconds)
            for _ in range(40):
                times.add_decode(1, 1, 0, 1.0)
        assert times.measure(1, 1, 4) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("following", "expected"), [(50.0, 4.0), (0.2, 2.2)])
def test_drafts_pay_for_no_more_than_a_plain_step_and_gain_by_a_short_one(following: float, expected: float) -> None:
    """Steps that overlap take a long and a short time in turns."""
    times = make_times()
    for _ in range(3):
        times.add_decode(1, 1, 0, 1.0)
    for _ in range(4):
        times.add_decode(1, 5, 0, 3.0)
        times.add_decode(1, 1, 0, following)
    assert times.measure(1, 5, 0) == pytest.approx(expected)


@pytest.mark.parametrize(("count", "expected"), [(2, 6.0), (4, 3.0)])
def test_drafts_are_counted_in_the_plain_steps_behind_them_unless_they_are_two(count: int, expected: float) -> None:
    """Plain steps take 1 s before those with drafts and 2 s behind them."""
    times = make_times()
    for seconds in (1.0, 2.0):
        for _ in range(12):
            times.add_decode(1, 1, 0, seconds)
        if seconds == 1:
            for _ in range(count):
                times.add_decode(1, 5, 0, 3.0)
    assert times.measure(1, 5, 0) == pytest.approx(expected)


@pytest.mark.parametrize("count", range(4, 10))
def test_steps_that_are_long_and_short_in_turns_have_their_mean(count: int) -> None:
    times = make_times()
    for turn in range(count):
        times.add_decode(1, 1, 0, (0.5, 1.5)[turn % 2])
        assert turn < 3 or times.measure(1, 1, 0) == pytest.approx(1.0)


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


def test_drafts_are_counted_in_plain_steps_of_their_own_time() -> None:
    times = make_times()
    for _ in range(5):
        times.add_decode(1, 1, 0, 1.0)
    for _ in range(40):
        times.add_decode(1, 5, 0, 6.0)  # meanwhile everything takes three times as long
    assert times.measure(1, 5, 0) == pytest.approx(6.0)
    for _ in range(8):
        times.add_decode(1, 1, 0, 3.0)
    assert times.measure(1, 1, 0) == pytest.approx(3.0)
    assert times.measure(1, 5, 0) == pytest.approx(6.0, rel=0.1), "two plain steps, not six"


def test_what_was_measured_before_a_pause_gives_way_to_new_times() -> None:
    times = make_times()
    for _ in range(8):
        times.add_decode(1, 5, 0, 4.0)
        times.add_decode(1, 1, 0, 1.0)
    for _ in range(40):
        times.add_decode(1, 1, 0, 1.0)
    before = times.measure(1, 5, 0)
    found = []
    for _ in range(4):
        times.add_decode(1, 5, 0, 2.0)
        found.append(times.measure(1, 5, 0))
    assert before > found[0] > found[1] > found[2] > found[3] == pytest.approx(2.0)


def test_a_step_that_is_skipped_changes_no_time() -> None:
    times = make_times()
    for _ in range(5):
        times.add_decode(1, 1, 0, 1.0)
        times.add_decode(1, 5, 0, 3.0)
    times.skip()
    assert times.last_seconds == 0 and not times.was_plain and not times.is_in_wake
    times.add_decode(1, 1, 0, 1.9)  # what the step before brought takes time
    assert not times.is_in_wake
    assert (times.measure(1, 1, 0), times.measure(1, 5, 0)) == (pytest.approx(1.0), pytest.approx(3.0))


def test_the_first_time_counts_whatever_came_before() -> None:
    times = make_times()
    for _ in range(2):
        times.add_decode(1, 5, 0, 3.0)
        times.add_decode(1, 1, 0, 2.0)
    assert times.measure(1, 1, 0) == pytest.approx(2.0)
