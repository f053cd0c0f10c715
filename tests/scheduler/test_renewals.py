"""Renewals of the time of plain steps while drafts are verified."""

from __future__ import annotations

from itertools import pairwise

from jaxserve.scheduler.renewals import Renewals


def run_verify_steps(renewals: Renewals, num_steps: int, ratio: float = 2.0, *, is_worse: bool = False) -> list[int]:
    """Returns the steps, of so many, that were plain ones of a renewal."""
    plain = []
    for step in range(num_steps):
        renewals.consider(ratio, is_worse=is_worse)
        is_plain = renewals.take_step()
        renewals.note_step(is_plain)
        plain += [step] if is_plain else []
    return plain


def test_renewals_become_rarer() -> None:
    plain = run_verify_steps(Renewals(), 2000)
    starts = [step for step in plain if step - 1 not in plain]
    assert starts[0] == 16 and len(plain) == 8 * len(starts)
    gaps = [after - before - 8 for before, after in pairwise(starts)]
    assert gaps[:4] == [32, 64, 128, 256] and set(gaps[4:]) == {256}


def test_plain_steps_are_measured_before_they_are_chosen() -> None:
    renewals = Renewals()
    run_verify_steps(renewals, 24)  # the last eight are a renewal
    assert run_verify_steps(renewals, 16, is_worse=True) == list(range(8, 16)), "at first they are as good as new"


def test_a_sudden_rise_of_verify_steps_is_looked_into() -> None:
    renewals = Renewals()
    run_verify_steps(renewals, 40)
    assert abs(renewals.usual - 2.0) < 1e-9
    assert run_verify_steps(renewals, 8, 2.2) == [], "little more than usual"
    assert run_verify_steps(renewals, 8, 4.0) == list(range(8))
    assert renewals.usual == 0.0, "what is usual beside the new time has yet to be seen"
    run_verify_steps(renewals, 10, 4.0)
    assert renewals.usual == 4.0 and run_verify_steps(renewals, 2, 4.0) == []


def test_steps_whose_time_is_unknown_change_nothing_usual() -> None:
    renewals = Renewals()
    run_verify_steps(renewals, 3, 0.0)
    assert renewals.usual == 0.0
    run_verify_steps(renewals, 3)
    run_verify_steps(renewals, 3, 0.0)
    assert renewals.usual == 2.0
    renewals.forget_usual()
    assert renewals.usual == 0.0
