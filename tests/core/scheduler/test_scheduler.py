"""Planning: the token budget, the order of rows, chunks on their grid, preemption of the youngest."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.pages import PageGroup, PageManager
from jaxserve.core.scheduler import Scheduler, SchedulerLimits, Sequence, SequenceStatus, StepOutputs, StepPlan
from jaxserve.core.scheduler.policy import choose_budget, choose_chunk, choose_victim
from jaxserve.core.scheduler.sequence import NON_FINITE
from jaxserve.core.scheduler.step_plan import FinishedAnswer
from jaxserve.errors import NonFiniteLogitsError
from jaxserve.request import FinishReason, Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler_options import SchedulerOptions


def make_scheduler(
    rows: int = 4,
    budget: int = 64,
    num_pages: int = 40,
    caching: bool = False,
    queue: tuple[int | None, int | None] = (None, None),
    sizes: tuple[int, ...] = (),
    row_sizes: tuple[int, ...] = (),
    clock: Callable[[], float] = time.monotonic,
    keeps_answers: bool = False,
    **options: Any,
) -> Scheduler:
    pages = PageManager([PageGroup(num_pages)], page_size=32, max_chunk=budget, enable_prefix_caching=caching)
    limits = SchedulerLimits(
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        max_model_len=512,
        max_prefix_updates=16,
        row_sizes=row_sizes,
        token_sizes=sizes,
        keeps_answers=keeps_answers,
        options=SchedulerOptions(max_num_queued_reqs=queue[0], max_num_queued_tokens=queue[1], **options),
    )
    return Scheduler(limits, pages, clock)


def add(scheduler: Scheduler, name: str, length: int, max_tokens: int = 50, **of_request: Any) -> Sequence:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    (sequence,) = scheduler.add(Request(name, tuple(range(length)), params, **of_request))
    return sequence


def commit(scheduler: Scheduler, plan: StepPlan) -> None:
    """Commits a step in which every row got token 7."""
    scheduler.commit(plan, StepOutputs([7] * plan.num_rows))


@given(st.integers(0, 500), st.integers(1, 500), st.integers(0, 300))
def test_unfinished_chunks_end_on_the_grid(start: int, work: int, budget: int) -> None:
    start -= start % 32
    length = choose_chunk(make_scheduler().limits, start, work, budget)
    assert 0 <= length <= min(work, budget)
    assert length == work or (start + length) % 32 == 0
    assert length == work or length > budget - 32, "no more than a tile of the budget is left unused"


@given(st.lists(st.integers(1, 300), max_size=8), st.integers(0, 4))
def test_steps_fill_their_sizes_where_padding_costs(prompts: list[int], num_running: int) -> None:
    """Of any prompts; whatever a step leaves for the next is less than it would be padded by."""
    sizes = (64, 192, 512)
    scheduler = make_scheduler(budget=512, num_pages=200, sizes=sizes)
    for number in range(num_running):
        add(scheduler, f"running {number}", 8)
    assert scheduler.plan() is not None or not num_running
    for number, length in enumerate(prompts):
        add(scheduler, f"{number}", length)
    wanted = num_running + sum(prompts[: 4 - num_running])
    budget = choose_budget(scheduler.limits, scheduler.batch, scheduler.waiting, scheduler.times)
    assert budget in sizes
    larger = min([size for size in sizes if size >= wanted], default=512)
    assert budget == larger or wanted - budget < larger - wanted
    plan = scheduler.plan()
    assert (plan is None and wanted == 0) or (plan is not None and plan.num_tokens <= budget)


def test_a_little_more_than_a_size_waits_for_the_next_step() -> None:
    scheduler = make_scheduler(budget=512, num_pages=200, sizes=(64, 192, 512))
    add(scheduler, "a", 200)
    add(scheduler, "b", 40)
    assert [plan.num_tokens if (plan := scheduler.plan()) else None for _ in range(4)] == [192, 48, 2, 2]
    add(scheduler, "c", 500)
    plan = scheduler.plan()
    assert plan is not None and plan.num_tokens == 502, "no size below is nearly filled"


def test_decodes_come_first_and_prompts_take_the_rest() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 10)
    first = scheduler.plan()
    assert first is not None and [len(chunk.token_ids) for chunk in first.chunks] == [10]
    add(scheduler, "b", 200)
    second = scheduler.plan()
    assert second is not None
    assert second.decode_rows == (first.chunks[0].row,)
    assert [(chunk.start, len(chunk.token_ids), chunk.is_last) for chunk in second.chunks] == [(0, 32, False)]
    assert second.num_tokens == 33 <= scheduler.limits.max_num_batched_tokens


def test_planning_goes_on_before_tokens_are_known_and_stops_where_it_must() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 10, max_tokens=3)
    plans = [scheduler.plan() for _ in range(4)]
    assert [plan.num_tokens if plan else None for plan in plans] == [10, 1, 1, None]
    for plan, token in zip(plans, (7, 8, 9), strict=False):
        commit = scheduler.commit(plan, StepOutputs([token]))  # type: ignore[arg-type]
    assert [sequence.finish_reason for sequence in commit.finished] == [FinishReason.LENGTH]
    assert commit.sequences[0].token_ids[-3:] == [7, 8, 9]
    assert not scheduler.has_unfinished


def test_plans_travel() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 40)
    plan = scheduler.plan()
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_the_youngest_is_preempted_and_still_gets_its_token() -> None:
    scheduler = make_scheduler(num_pages=5)
    old, young = add(scheduler, "old", 60, 60), add(scheduler, "young", 60, 60)
    plans = [scheduler.plan(), scheduler.plan()]
    while young.status is SequenceStatus.RUNNING:
        plan = plans.pop(0)
        assert plan is not None
        scheduler.commit(plan, StepOutputs([1] * plan.num_rows))
        plans.append(scheduler.plan())
    assert old.status is SequenceStatus.RUNNING and young.num_preemptions == 1
    assert (young.num_awaited_steps, young.pages.page_ids[0]) == (1, [])
    known = len(young.token_ids)
    in_flight = plans.pop(0)
    assert in_flight is not None and young.ticket in in_flight.decode_tickets
    scheduler.commit(in_flight, StepOutputs([1] * in_flight.num_rows))
    assert (len(young.token_ids), young.num_awaited_steps) == (known + 1, 0)


def test_what_follows_the_end_within_a_run_is_dropped() -> None:
    ends = {"limit": [1, 2, 3, 4, 5], "stop": [1, 2, 9, 4], "eos": [1, 8, 9, 3], "fault": [1, 2, 3, NON_FINITE, 4]}
    kept = {"limit": [1, 2, 3, 4], "stop": [1, 2, 9], "eos": [1, 8], "fault": [1, 2, 3]}
    reasons = dict(
        zip(ends, (FinishReason.LENGTH, FinishReason.STOP, FinishReason.STOP, FinishReason.ERROR), strict=True)
    )
    scheduler = make_scheduler()
    params = SamplingParams(max_tokens=4, stop_token_ids=[9])
    found = {name: scheduler.add(Request(name, (5, 6), params, eos_token_ids=(8,)))[0] for name in ends}
    plan = scheduler.plan()
    assert plan is not None
    ids = [token for run in ends.values() for token in run]
    commit = scheduler.commit(plan, StepOutputs(ids, [len(run) for run in ends.values()]))
    assert commit.runs == [tuple(run) for run in kept.values()] and commit.finished == list(found.values())
    assert {name: sequence.token_ids[2:] for name, sequence in found.items()} == kept
    assert {name: sequence.finish_reason for name, sequence in found.items()} == reasons
    assert [sequence.stop_token_id for sequence in found.values()] == [None, 9, None, None]
    assert isinstance(found["fault"].error, NonFiniteLogitsError) and not scheduler.has_unfinished


def test_a_run_moves_what_is_computed_and_what_can_be_shared() -> None:
    scheduler = make_scheduler(caching=True)
    sequence = add(scheduler, "a", 30)
    for runs, num_computed in (([3, 4, 5], 32), ([6], 33), ([7] * 8, 41)):
        plan = scheduler.plan()
        assert plan is not None
        commit = scheduler.commit(plan, StepOutputs(runs, [len(runs)]))
        assert commit.runs == [tuple(runs)] and sequence.num_computed_tokens == num_computed
        assert sequence.num_computed_tokens == len(sequence.token_ids) - 1
    assert sequence.pages.num_published == 1


def test_smaller_priorities_are_admitted_first() -> None:
    scheduler = make_scheduler(rows=1)
    late, usual, second, urgent = (
        add(scheduler, name, 5, 1, priority=p) for name, p in [("z", 3), ("a", 0), ("b", 0), ("c", -1)]
    )
    assert list(scheduler.waiting) == [urgent, usual, second, late]
    order = []
    while scheduler.has_unfinished:
        plan = scheduler.plan()
        assert plan is not None
        order += scheduler.commit(plan, StepOutputs([1])).finished
    assert order == [urgent, usual, second, late]


def test_the_victim_is_the_youngest_whether_it_decodes_or_not() -> None:
    scheduler = make_scheduler()
    old, young = add(scheduler, "old", 8), add(scheduler, "young", 8)
    for decoding, prefilling in (([old], [young]), ([young], [old])):
        batch = SimpleNamespace(decoding=decoding, prefilling=prefilling)
        assert choose_victim(scheduler.limits, batch) is young


def test_the_lowest_priority_is_preempted_though_it_is_the_oldest() -> None:
    scheduler = make_scheduler(num_pages=5)
    first, urgent = add(scheduler, "first", 60, 60, priority=1), add(scheduler, "urgent", 60, 60, priority=0)
    while first.status is not SequenceStatus.PREEMPTED:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, StepOutputs([1] * plan.num_rows))
    assert urgent.status is SequenceStatus.RUNNING and scheduler.counts.num_preemptions == 1
    later = add(scheduler, "later", 5, 5, priority=1)
    before = add(scheduler, "before", 5, 5, priority=0)
    assert list(scheduler.waiting) == [before, first, later]


def test_tokens_of_an_ended_request_find_nobody() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 10)
    plan = scheduler.plan()
    assert len(scheduler.finish("a", FinishReason.ABORT)) == 1
    assert scheduler.finish("a", FinishReason.ABORT) == []
    assert plan is not None and scheduler.commit(plan, StepOutputs([5])).sequences == []
    again = add(scheduler, "a", 10)
    assert again.token_ids == list(range(10))


def test_plans_bring_finished_answers_with_the_end_of_their_prompts() -> None:
    for keeps_answers in (False, True):
        scheduler = make_scheduler(keeps_answers=keeps_answers)
        add(scheduler, "short", 3, max_tokens=2, cache_salt="mine")
        add(scheduler, "aborted", 20)
        add(scheduler, "no answer", 300)
        plans = [scheduler.plan() for _ in range(2)]
        for plan in plans:
            assert plan is not None and plan.finished_answers == ()
            commit(scheduler, plan)
        for name in ("aborted", "no answer"):
            scheduler.finish(name, FinishReason.ABORT)
        add(scheduler, "next", 5)
        plan = scheduler.plan()
        assert plan is not None
        expected = FinishedAnswer((0, 1, 2, 7, 7), "0:mine"), FinishedAnswer((*range(4, 20), 7, 7), "0:")
        assert plan.finished_answers == (expected if keeps_answers else ())
        plan = scheduler.plan()
        assert plan is not None and plan.finished_answers == ()
