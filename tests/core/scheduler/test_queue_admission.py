"""Admission to the queue: idle rows count, what never fits is said so, and better requests displace worse ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.scheduler import Scheduler, StepOutputs
from jaxserve.errors import InvalidRequestError, QueueFullError
from jaxserve.request import FinishReason, Request, ServiceTier, Tenant
from tests.core.scheduler.test_scheduler import make_scheduler
from tests.core.scheduler.test_waiting import make_request


def make_full(rows: int = 2, queue: tuple[int | None, int | None] = (3, None), priority: int = 0) -> Scheduler:
    """One whose rows all run, and whose queue takes not one sequence more; the last to come is "w3"."""
    scheduler = make_scheduler(rows=rows, queue=queue)
    for number in range(rows):
        scheduler.add(make_request(f"r{number}", 5))
    assert scheduler.plan() is not None and scheduler.queue_admission.idle_rows == 0
    for number in range(1, (queue[0] or 0) + 1):
        scheduler.queue_admission.find_room([waits := make_request(f"w{number}", 5, priority=priority)])
        scheduler.add(waits)
    return scheduler


def find_names(scheduler: Scheduler, *requests: Request) -> list[str]:
    return [name for name, _ in scheduler.queue_admission.find_room(requests)]


def test_a_full_queue_refuses_and_says_which_limit() -> None:
    scheduler = make_full()
    for priority in (0, 7):
        with pytest.raises(QueueFullError, match=r"3 sequences.*max_num_queued_reqs=3") as caught:
            scheduler.queue_admission.refuse_if_full((1, priority))
        assert (caught.value.limit, caught.value.queued) == (3, 3)
        with pytest.raises(QueueFullError, match=r"3 sequences.* 2 more"):
            scheduler.queue_admission.find_room([make_request("a"), make_request("b")])
    scheduler.add(make_request("a", 400, n=9))  # a batch is not limited


def test_tokens_are_a_limit_of_their_own() -> None:
    scheduler = make_full(queue=(None, 20))
    scheduler.add(make_request("a", 5))
    assert find_names(scheduler, make_request("b", 15)) == []
    with pytest.raises(QueueFullError, match=r"5 prompt tokens.* 16 more .*max_num_queued_tokens=20") as caught:
        scheduler.queue_admission.find_room([make_request("b", 16)])
    assert (caught.value.limit, caught.value.queued) == (20, 5)


@pytest.mark.parametrize("queue", [(1, None), (None, 4)])
def test_what_could_start_now_is_not_refused(queue: tuple[int | None, int | None]) -> None:
    scheduler = make_scheduler(rows=3, queue=queue)
    for name in ("a", "b", "c"):
        scheduler.queue_admission.refuse_if_full((1, 0))
        assert find_names(scheduler, make_request(name, 5)) == []
        scheduler.add(make_request(name, 5))
    with pytest.raises(QueueFullError):
        scheduler.queue_admission.find_room([make_request("d", 5), make_request("e", 5)])


def test_idle_rows_do_not_count_while_pages_are_missing() -> None:
    scheduler = make_scheduler(rows=8, budget=256, num_pages=5, queue=(1, None))
    scheduler.add(make_request("a", 100))
    scheduler.add(make_request("b", 100))
    assert scheduler.plan() is not None
    assert (len(scheduler.batch), scheduler.queue_admission.idle_rows) == (1, 0)
    with pytest.raises(QueueFullError, match="1 sequences"):
        scheduler.queue_admission.find_room([make_request("c", 1)])
    scheduler.finish("b", FinishReason.ABORT)
    assert scheduler.queue_admission.idle_rows == 7


@pytest.mark.parametrize(
    ("queue", "requests", "field", "message"),
    [
        (
            (3, None),
            [make_request("a", n=6)],
            "n",
            "6 sequences.*max_num_queued_reqs=3.*max_num_seqs=2",
        ),
        ((3, None), [make_request(str(i), n=2) for i in range(3)], "prompt", "6 sequences"),
        ((None, 10), [make_request("a", 5, n=3)], None, ""),
        ((None, 10), [make_request("a", 11, n=3)], "prompt", "11 prompt tokens.*max_num_queued_tokens=10"),
    ],
)
@pytest.mark.parametrize("is_full", [False, True])
def test_what_never_fits_is_told_not_to_try_again(
    queue: tuple[int | None, int | None], requests: list[Request], field: str | None, message: str, is_full: bool
) -> None:
    scheduler = make_full(queue=queue) if is_full else make_scheduler(rows=2, queue=queue)
    if field is None:
        assert find_names(scheduler, *requests) == []
        return
    with pytest.raises(InvalidRequestError, match=message) as caught:
        scheduler.queue_admission.find_room(requests)
    assert caught.value.field == field


def test_a_better_request_takes_the_place_of_the_worst_that_waits() -> None:
    scheduler = make_full(queue=(3, None), priority=5)
    scheduler.queue_admission.refuse_if_full((1, 4))
    ((name, error),) = scheduler.queue_admission.find_room([make_request("better", 5, priority=4)])
    assert name == "w3" and "request w3: the queue is full (max_num_queued_reqs=3)" in str(error)
    assert find_names(scheduler, make_request("b", n=2)) == ["w3", "w2"]
    for priority in (5, 6):  # who came first stays
        with pytest.raises(QueueFullError):
            scheduler.queue_admission.find_room([make_request("same", 5, priority=priority)])


def test_nobody_makes_way_in_vain() -> None:
    scheduler = make_full(queue=(4, None), priority=5)
    scheduler.finish("w1", FinishReason.ABORT)
    scheduler.add(make_request("best", priority=-1))
    assert find_names(scheduler, make_request("b", n=3)) == ["w4", "w3", "w2"]
    with pytest.raises(QueueFullError, match=r"4 sequences.* 4 more"):
        scheduler.queue_admission.find_room([make_request("b", n=4)])


def test_tokens_make_way_too() -> None:
    scheduler = make_full(queue=(None, 20))
    scheduler.add(make_request("w1", 12, priority=1))
    scheduler.add(make_request("w2", 8, priority=2))
    assert find_names(scheduler, make_request("a", 8)) == ["w2"]
    assert find_names(scheduler, make_request("a", 9)) == ["w2", "w1"]


def test_who_has_begun_stays() -> None:
    scheduler = make_scheduler(rows=1, queue=(2, None))
    scheduler.add(make_request("a", 10, n=3, priority=9))
    plan = scheduler.plan()
    assert plan is not None and scheduler.waiting.num_new == 2  # its further completions wait for the prompt's pages
    for _ in range(2):
        with pytest.raises(QueueFullError):
            scheduler.queue_admission.find_room([make_request("better")])
        scheduler.commit(plan, StepOutputs([7]))
    assert len(scheduler.waiting) == 2


def test_only_first_admissions_count() -> None:
    scheduler = make_scheduler(rows=2, queue=(1, None))
    scheduler.add(make_request("a", 10, n=2))
    assert (scheduler.waiting.num_new, scheduler.waiting.num_new_tokens) == (2, 10)
    plan = scheduler.plan()
    assert plan is not None and (scheduler.waiting.num_new, scheduler.waiting.num_new_tokens) == (1, 0)
    assert find_names(scheduler, make_request("b")) == []  # the second completion has the idle row, so "b" may wait
    with pytest.raises(QueueFullError):
        scheduler.queue_admission.find_room([make_request("b", n=2)])
    scheduler.commit(plan, StepOutputs([7]))
    scheduler.plan()
    assert (scheduler.waiting.num_new, len(scheduler.waiting)) == (0, 0)
    scheduler.requeue_running()
    assert (scheduler.waiting.num_new, len(scheduler.waiting)) == (0, 2)
    assert find_names(scheduler, make_request("b")) == []


def test_a_default_bounds_where_no_option_does() -> None:
    for queue, most in ((None, 2), (5, 5)):
        scheduler = make_scheduler(rows=1, queue=(queue, None))
        scheduler.queue_admission.bound_sequences(2)
        assert find_names(scheduler, make_request("a", n=most + 1)) == []
        with pytest.raises(InvalidRequestError):
            scheduler.queue_admission.find_room([make_request("a", n=most + 2)])


# Shares of tenants

HALF = Tenant("half", queue_share=0.5)


def wait(scheduler: Scheduler, name: str, length: int = 5, n: int = 1, **fields: Any) -> list[str]:
    """Lets a request in and queues it; returns whom it displaces."""
    request = make_request(name, length, n, **fields)
    displaced = find_names(scheduler, request)
    for other in displaced:
        scheduler.finish(other, FinishReason.ERROR)
    scheduler.add(request)
    return displaced


def test_a_tenant_fills_its_share_and_leaves_the_rest_to_others() -> None:
    scheduler = make_full(queue=(4, None))
    for name in ("w1", "w2"):
        scheduler.finish(name, FinishReason.ABORT)
    wait(scheduler, "h1", tenant=Tenant("half"))
    scheduler.finish("w3", FinishReason.ABORT)
    wait(scheduler, "h2", tenant=HALF)
    message = r"tenant 'half': 2 sequences.* 1 more .*queue_share=0\.5 of max_num_queued_reqs=4;"
    with pytest.raises(QueueFullError, match=message) as caught:
        scheduler.queue_admission.find_room([make_request("h3", tenant=HALF)])
    assert (caught.value.limit, caught.value.queued) == (2, 2)
    with pytest.raises(QueueFullError, match=message):
        scheduler.queue_admission.refuse_if_full((1, 0), HALF)
    scheduler.queue_admission.refuse_if_full((1, 0))
    wait(scheduler, "other", tenant=Tenant("other", queue_share=0.5))
    with pytest.raises(QueueFullError, match=r"4 sequences.*max_num_queued_reqs=4;"):
        scheduler.queue_admission.find_room([make_request("more", tenant=Tenant("other", queue_share=0.5))])
    scheduler.finish("h1", FinishReason.ABORT)
    wait(scheduler, "h3", tenant=HALF)


def test_a_share_is_of_tokens_too() -> None:
    scheduler = make_full(queue=(None, 40))
    wait(scheduler, "a", 15, tenant=HALF)
    with pytest.raises(QueueFullError, match=r"15 prompt tokens .* 6 more .*=0\.5 of max_num_queued_tokens=40"):
        scheduler.queue_admission.find_room([make_request("b", 6, tenant=HALF)])
    wait(scheduler, "b", 5, tenant=HALF)
    wait(scheduler, "c", 20)


def test_a_small_share_is_one_sequence() -> None:
    scheduler = make_full(queue=(4, None))
    scheduler.finish("w1", FinishReason.ABORT)
    tiny = Tenant("tiny", queue_share=0.001)
    wait(scheduler, "a", tenant=tiny)
    scheduler.finish("w2", FinishReason.ABORT)
    with pytest.raises(QueueFullError, match="tenant 'tiny': 1 sequences"):
        scheduler.queue_admission.find_room([make_request("b", tenant=tiny)])


def test_idle_rows_are_no_part_of_the_queue_but_others_may_take_them() -> None:
    scheduler = make_scheduler(rows=3, queue=(2, None))
    for name in ("a", "b", "c", "d"):  # one may wait, and three rows are idle
        wait(scheduler, name, tenant=HALF)
    with pytest.raises(QueueFullError):
        scheduler.queue_admission.find_room([make_request("e", tenant=HALF)])
    scheduler = make_scheduler(rows=3, queue=(2, None))
    for name in ("a", "b"):
        wait(scheduler, name)
    wait(scheduler, "c", tenant=HALF)
    wait(scheduler, "d", tenant=HALF)
    with pytest.raises(QueueFullError, match="tenant 'half': 2 sequences"):
        scheduler.queue_admission.find_room([make_request("e", tenant=HALF)])


def test_what_never_fits_a_share_is_told_so() -> None:
    scheduler = make_scheduler(rows=2, queue=(4, None))
    assert find_names(scheduler, make_request("a", n=4, tenant=HALF)) == []
    message = r"^n: .*5 sequences.*queue_share=0\.5 of max_num_queued_reqs=4 and max_num_seqs=2"
    with pytest.raises(InvalidRequestError, match=message):
        scheduler.queue_admission.find_room([make_request("a", n=5, tenant=HALF)])


def test_a_tenant_beyond_its_share_displaces_its_own() -> None:
    scheduler = make_full(queue=(5, None), priority=9)
    for name in ("w4", "w5"):
        scheduler.finish(name, FinishReason.ABORT)
    for name, priority in (("h1", 3), ("h2", 5)):
        wait(scheduler, name, priority=priority, tenant=HALF)
    assert wait(scheduler, "better", priority=1, tenant=HALF) == ["h2"]
    with pytest.raises(QueueFullError, match="tenant 'half'"):
        scheduler.queue_admission.find_room([make_request("same", priority=3, tenant=HALF)])
    # Its own makes room for both limits, so nobody else's is displaced.
    assert find_names(scheduler, make_request("best", priority=0, tenant=HALF)) == ["h1"]
    assert find_names(scheduler, make_request("best", priority=0)) == ["w3"]


def test_others_make_way_for_the_whole_queue_alone() -> None:
    scheduler = make_full(queue=(4, None), priority=9)
    assert wait(scheduler, "h1", priority=1, tenant=HALF) == ["w4"]
    requests = [make_request("h2", tenant=HALF), make_request("x", tenant=Tenant("x", queue_share=0.25))]
    assert find_names(scheduler, *requests) == ["w3", "w2"]


TENANTS = (Tenant("a", queue_share=0.2), Tenant("b", queue_share=0.5), Tenant("c"))


@given(
    st.lists(
        st.tuples(st.sampled_from(TENANTS), st.integers(1, 3), st.integers(1, 12), st.sampled_from(ServiceTier)),
        max_size=40,
    )
)
def test_shares_hold_and_only_what_is_full_displaces(asked: list[tuple[Tenant, int, int, ServiceTier]]) -> None:
    scheduler = make_full(queue=(10, 60))
    for name in range(1, 11):
        scheduler.finish(f"w{name}", FinishReason.ABORT)
    waiting, present = scheduler.waiting, {}
    for number, (tenant, n, length, tier) in enumerate(asked):
        request = make_request(f"q{number}", length, n, tenant=tenant, service_tier=tier)
        try:
            displaced = find_names(scheduler, request)
        except (QueueFullError, InvalidRequestError):
            continue
        assert all(present[name].rank > request.rank for name in displaced)
        count, tokens = _measure([*present.values(), request])
        if count <= 10 and tokens <= 60:  # the whole queue has room, so at most its own share is full
            assert all(present[name].tenant is tenant for name in displaced)
        for name in displaced:
            scheduler.finish(name, FinishReason.ERROR)
            del present[name]
        scheduler.add(request)
        present[request.request_id] = request
        for each in TENANTS:
            own = [other for other in present.values() if other.tenant is each]
            load = waiting.by_tenant[each.name]
            assert (load.num_new, load.num_new_tokens) == _measure(own)
            assert load.num_new <= 10 * each.queue_share and load.num_new_tokens <= 60 * each.queue_share
        assert waiting.num_new <= 10 and waiting.num_new_tokens <= 60


def _measure(requests: list[Request]) -> tuple[int, int]:
    return sum(each.params.n for each in requests), sum(len(each.prompt_token_ids) for each in requests)
