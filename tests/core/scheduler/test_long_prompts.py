"""A long prompt leaves room for others, and takes what they leave."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.scheduler import Scheduler, StepPlan
from tests.core.scheduler.test_scheduler import add, commit, make_scheduler


def make(**options: Any) -> Scheduler:
    return make_scheduler(rows=6, budget=256, num_pages=200, **options)


def lengths(scheduler: Scheduler) -> dict[int, int]:
    """The chunks of the next step: row to tokens."""
    plan = scheduler.plan()
    assert plan is not None
    commit(scheduler, plan)
    return {chunk.row: len(chunk.token_ids) for chunk in plan.chunks}


def test_alone_it_takes_the_whole_step() -> None:
    scheduler = make(long_prefill_token_threshold=64)
    add(scheduler, "long", 500)
    assert [lengths(scheduler) for _ in range(2)] == [{0: 256}, {0: 244}]


def test_beside_others_it_has_its_share_and_what_they_leave() -> None:
    scheduler = make(long_prefill_token_threshold=64)
    add(scheduler, "long", 500)
    add(scheduler, "short", 30)
    assert lengths(scheduler) == {0: 224, 1: 30}
    for name in ("a", "b", "c"):
        add(scheduler, name, 60)
    assert lengths(scheduler) == {0: 64, 2: 60, 3: 60, 4: 60}


def test_two_long_ones_share_and_the_older_has_the_rest() -> None:
    scheduler = make(long_prefill_token_threshold=64)
    add(scheduler, "old", 500)
    add(scheduler, "young", 500)
    assert lengths(scheduler) == {0: 192, 1: 64}


def test_zero_is_no_limit() -> None:
    scheduler = make(long_prefill_token_threshold=0)
    add(scheduler, "old", 500)
    add(scheduler, "short", 30)
    assert [lengths(scheduler) for _ in range(2)] == [{0: 256}, {0: 244}]


@pytest.mark.parametrize(
    ("max_model_len", "budget", "share"), [(512, 256, 32), (4096, 2048, 163), (131072, 2048, 1024), (2048, 2048, 81)]
)
def test_the_default_is_four_percent_and_at_most_half_a_step(max_model_len: int, budget: int, share: int) -> None:
    from jaxserve.core.scheduler import SchedulerLimits

    limits = SchedulerLimits(
        max_num_seqs=4, max_num_batched_tokens=budget, max_model_len=max_model_len, max_prefix_updates=16
    )
    assert limits.long_prefill_tokens == share


def test_one_long_prompt_at_once_lets_shorter_ones_pass() -> None:
    scheduler = make(long_prefill_token_threshold=64, max_long_partial_prefills=1)
    for name in ("first", "second"):
        add(scheduler, name, 500)
    add(scheduler, "short", 60)
    assert lengths(scheduler) == {0: 192, 2: 60}
    assert lengths(scheduler) == {0: 224}  # the short one decodes beside
    assert lengths(scheduler) == {0: 84, 1: 160}  # the first is complete: the second's turn


def test_one_prompt_in_parts_at_once() -> None:
    scheduler = make(long_prefill_token_threshold=128, max_num_partial_prefills=1)
    add(scheduler, "a", 500)
    add(scheduler, "b", 200)
    add(scheduler, "c", 40)
    assert lengths(scheduler) == {0: 192, 2: 40}
    assert lengths(scheduler) == {0: 224}
    assert lengths(scheduler) == {0: 84, 1: 160}


@given(
    prompts=st.lists(st.integers(1, 500), min_size=1, max_size=8),
    options=st.fixed_dictionaries(
        {},
        optional={
            "long_prefill_token_threshold": st.integers(0, 200),
            "max_num_partial_prefills": st.integers(1, 3),
            "max_long_partial_prefills": st.integers(1, 3),
        },
    ),
    num_pages=st.integers(18, 60),
)
def test_every_prompt_ends_and_no_step_is_empty_or_too_large(
    prompts: list[int], options: dict[str, int], num_pages: int
) -> None:
    scheduler = make_scheduler(rows=4, budget=128, num_pages=num_pages, **options)
    sequences = [add(scheduler, f"{number}", length, max_tokens=5) for number, length in enumerate(prompts)]
    for _ in range(2000):
        plan: StepPlan | None = scheduler.plan()
        if plan is None:
            break
        assert 0 < plan.num_tokens <= 128 and plan.num_rows <= 4
        keys = [update[:3] for update in plan.page_updates]
        assert len(keys) == len(set(keys)), "a table entry is written twice"
        commit(scheduler, plan)
        scheduler.pages.check()
    assert not scheduler.has_unfinished
    assert [len(sequence.token_ids) for sequence in sequences] == [min(512, length + 5) for length in prompts]
