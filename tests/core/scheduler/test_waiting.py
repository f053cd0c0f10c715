"""The queue: sorted by priority and arrival whatever comes back to it, and its totals are those of what is in it."""

from __future__ import annotations

import sys
import threading
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.scheduler import Sequence, SequenceStatus
from jaxserve.core.scheduler.fairness import FairOrder
from jaxserve.core.scheduler.sequence import make_order
from jaxserve.core.scheduler.waiting import TenantLoad, WaitingQueue
from jaxserve.request import PRIORITIES, FinishReason, Rank, Request, ServiceTier, Tenant
from jaxserve.sampling_params import SamplingParams
from tests.core.scheduler.test_scheduler import make_scheduler


def make_request(name: str, length: int = 3, n: int = 1, priority: int = 0, **fields: Any) -> Request:
    params = SamplingParams(temperature=0.5, max_tokens=4, n=n)
    return Request(name, tuple(range(length)), params, priority=priority, **fields)


@given(
    st.lists(
        st.tuples(
            st.tuples(st.sampled_from(ServiceTier), st.sampled_from([*PRIORITIES[:2], -1, 0, 1, *PRIORITIES[-2:]])),
            st.integers(0, 2**40),
        ),
        min_size=2,
    )
)
def test_order_is_tier_then_priority_then_arrival(keys: list[tuple[Rank, int]]) -> None:
    assert sorted(keys) == sorted(keys, key=lambda key: make_order(*key))


@given(st.lists(st.tuples(st.sampled_from(["add", "pop", "back", "end"]), st.integers(0, 9)), max_size=40))
def test_queue_is_sorted_and_counted(actions: list[tuple[str, int]]) -> None:
    scheduler, queue = make_scheduler(), WaitingQueue()
    waiting: list[Sequence] = []
    running: list[Sequence] = []
    for count, (action, value) in enumerate(actions):
        if action == "add":
            pages = scheduler.pages.new_sequence("")
            request = make_request(f"r{count}", 1 + value, tenant=Tenant("ab"[value % 2]))
            sequence = Sequence(request, pages, 50, order=make_order((1, value % 3 - 1), count))
            queue.enter([sequence])
            waiting.append(sequence)
        elif action == "pop" and waiting:
            sequence = queue.first
            assert sequence is min(waiting, key=lambda each: each.order)
            assert queue.first is sequence
            queue.remove(sequence)
            sequence.status = SequenceStatus.RUNNING
            waiting.remove(sequence)
            running.append(sequence)
        elif action == "back" and running:
            sequence = running.pop(value % len(running))
            sequence.status = SequenceStatus.PREEMPTED
            queue.push(sequence)
            waiting.append(sequence)
        elif action == "end" and waiting:
            sequence = waiting.pop(value % len(waiting))
            queue.remove(sequence)
        assert list(queue) == sorted(waiting, key=lambda each: each.order)
        new = [each for each in waiting if each.status is SequenceStatus.WAITING]
        assert (queue.num_new, queue.num_new_tokens) == (len(new), sum(each.num_prompt_tokens for each in new))
        for name in "ab":
            own = [each for each in waiting if each.request.tenant.name == name]
            lengths = [each.num_prompt_tokens for each in own if each in new]
            assert queue.by_tenant[name] == TenantLoad(len(own), len(lengths), sum(lengths))


def test_requests_that_end_while_they_wait_make_room() -> None:
    scheduler = make_scheduler(queue=(3, 100))
    scheduler.add(make_request("a", 10, n=3))
    scheduler.finish("a", FinishReason.ABORT)
    assert (scheduler.waiting.num_new, scheduler.waiting.num_new_tokens, len(scheduler.waiting)) == (0, 0, 0)


def test_length_can_be_read_while_new_tenants_arrive() -> None:
    scheduler, queue = make_scheduler(), WaitingQueue(FairOrder())
    failures: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                assert 0 <= len(queue) <= 3000
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # as many switches between threads as there can be
    reader = threading.Thread(target=read)
    reader.start()
    try:
        for i in range(3000):
            request = make_request(f"r{i}", tenant=Tenant(f"tenant {i}"))
            queue.enter([Sequence(request, scheduler.pages.new_sequence(""), 50, order=make_order((1, 0), i))])
    finally:
        done.set()
        reader.join()
        sys.setswitchinterval(interval)
    assert failures == [] and len(queue) == 3000
