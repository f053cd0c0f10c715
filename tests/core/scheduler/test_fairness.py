"""Tenants share the engine by weight: whose turn it is, what is charged, and how far apart they can be."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.scheduler import Scheduler, Sequence, StepOutputs
from jaxserve.core.scheduler.fairness import FairOrder
from jaxserve.request import Request, ServiceTier, Tenant
from jaxserve.sampling_params import SamplingParams
from tests.core.scheduler.test_scheduler import add, commit, make_scheduler

A, B = Tenant("a"), Tenant("b", weight=3)


def counters(scheduler: Scheduler) -> dict[str, float]:
    assert isinstance(scheduler.turns, FairOrder)
    return dict(scheduler.turns.counters)


def step(scheduler: Scheduler) -> None:
    plan = scheduler.plan()
    assert plan is not None
    commit(scheduler, plan)


def test_a_prompt_token_costs_one_an_output_token_two_and_cached_ones_nothing() -> None:
    scheduler = make_scheduler(budget=256, caching=True, scheduling_policy="fair")
    add(scheduler, "first", 100, max_tokens=3, tenant=A)
    for _ in range(3):
        step(scheduler)
    assert counters(scheduler) == {"a": 100 + 2 * 3}
    add(scheduler, "again", 100, max_tokens=3, tenant=B)
    for _ in range(3):
        step(scheduler)
    free = scheduler.counts.prefix_hits
    assert free == 96  # of the prompt of b, which starts where a is: it was a's turn last
    assert counters(scheduler)["b"] == pytest.approx(106 + (4 + 2 * 3) / 3)


def test_what_is_computed_again_is_charged_once() -> None:
    scheduler = make_scheduler(rows=2, budget=64, num_pages=5, scheduling_policy="fair")
    add(scheduler, "old", 60, max_tokens=60, tenant=A)
    young = add(scheduler, "young", 60, max_tokens=30, tenant=B)
    while scheduler.has_unfinished:
        step(scheduler)
    assert young.num_preemptions > 0
    assert counters(scheduler) == pytest.approx({"a": 60 + 2 * 60, "b": (60 + 2 * 30) / 3})


def test_the_tenant_served_least_is_next_within_a_rank() -> None:
    scheduler = make_scheduler(rows=1, budget=256, scheduling_policy="fair")
    for number in range(3):
        add(scheduler, f"a{number}", 50, max_tokens=1, tenant=A)
    add(scheduler, "b", 50, max_tokens=1, tenant=Tenant("b"))
    add(scheduler, "soon", 50, max_tokens=1, tenant=A, priority=-1)
    add(scheduler, "flex", 50, max_tokens=1, tenant=Tenant("c"), service_tier=ServiceTier.FLEX)
    order = []
    while scheduler.has_unfinished:
        order.append(scheduler.waiting.first.request.request_id)
        step(scheduler)
    assert order == ["soon", "b", "a0", "a1", "a2", "flex"]


def test_nobody_saves_credit_while_idle() -> None:
    scheduler = make_scheduler(rows=1, budget=256, scheduling_policy="fair")
    for number in range(4):
        add(scheduler, f"a{number}", 50, max_tokens=1, tenant=A)
    for _ in range(3):
        step(scheduler)
    for number in range(4):
        add(scheduler, f"late{number}", 50, max_tokens=1, tenant=Tenant("late"))
    assert counters(scheduler)["late"] == counters(scheduler)["a"] == 3 * 52


@given(
    weights=st.tuples(st.sampled_from([0.25, 1, 2, 8]), st.sampled_from([0.25, 1, 2, 8])),
    seed=st.integers(0, 10**6),
    num_pages=st.integers(8, 30),
    rows=st.integers(1, 6),
    overlap=st.booleans(),
)
def test_two_backlogged_tenants_stay_close(
    weights: tuple[float, float], seed: int, num_pages: int, rows: int, overlap: bool
) -> None:
    """At any weights, the served tokens of two tenants that always wait differ by 2 x max(prompt, 2 x pool) at most."""
    draw, names = random.Random(seed), itertools.count()
    scheduler = make_scheduler(rows=rows, budget=64, num_pages=num_pages, scheduling_policy="fair")
    tenants = [Tenant(name, weight) for name, weight in zip("xy", weights, strict=True)]
    served = dict.fromkeys("xy", 0.0)
    sequences: list[Sequence] = []
    seen: Counter[Sequence] = Counter()  # prompt tokens computed at least once

    def refill() -> None:
        waiting = [sequence.request.tenant.name for sequence in scheduler.waiting]
        for tenant in tenants:
            for _ in range(2 - min(waiting.count(tenant.name), 2)):
                params = SamplingParams(temperature=0, max_tokens=draw.randint(1, 60))
                prompt = tuple(range(draw.randint(1, 150)))
                sequences.extend(scheduler.add(Request(f"r{next(names)}", prompt, params, tenant=tenant)))

    in_flight = None
    bound = 2 * max(150, 2 * 32 * num_pages) / min(weights)
    for _ in range(150):
        refill()
        plan = scheduler.plan()
        before = {id(s): len(s.token_ids) for s in sequences}
        for chunk in plan.chunks if plan is not None else ():
            sequence = scheduler.batch.by_ticket[chunk.ticket]
            end = max(seen[sequence], min(chunk.end, sequence.num_prompt_tokens))
            served[sequence.request.tenant.name] += (end - seen[sequence]) / sequence.request.tenant.weight
            seen[sequence] = end
        ready, in_flight = (in_flight, plan) if overlap else (plan, None)
        if ready is not None:
            scheduler.commit(ready, StepOutputs([7] * ready.num_rows))
        for sequence in sequences:
            new = len(sequence.token_ids) - before[id(sequence)]
            served[sequence.request.tenant.name] += 2 * new / sequence.request.tenant.weight
        sequences = [sequence for sequence in sequences if sequence.finish_reason is None]
        assert abs(served["x"] - served["y"]) <= bound
