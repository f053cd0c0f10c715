"""Requests in virtual time: every figure here can be computed by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from jaxserve.core.pages import PageGroup
from jaxserve.core.runtime.buckets import Bucket, BucketTable
from jaxserve.core.scheduler import SchedulerLimits
from jaxserve.errors import InvalidRequestError, QueueFullError
from jaxserve.request import Request, ServiceTier, Tenant
from jaxserve.scheduler_options import SchedulerOptions
from jaxserve.tools.simulation.device import Attention, StepFormula
from jaxserve.tools.simulation.replica import EngineSpec, Replica, Timeline, make_request, simulate

SECOND = StepFormula(step_seconds=1.0)


def make_spec(
    formula: StepFormula = SECOND,
    *,
    rows: int = 4,
    tokens: int = 128,
    pages: int = 100,
    overlap: bool = True,
    **options: Any,
) -> EngineSpec:
    buckets = BucketTable(range(1, rows + 1), [64, tokens], rows)
    limits = SchedulerLimits(
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        max_model_len=1024,
        max_prefix_updates=64,
        loop_rows=buckets.loop_rows,
        pads_cheaply=True,
        options=SchedulerOptions(**options),
    )
    return EngineSpec(limits, (PageGroup(pages),), buckets, formula, page_size=32, overlap=overlap)


def make_prompt(number: int, length: int) -> range:
    return range(10_000 * number, 10_000 * number + length)


def ask(number: int, arrival: float = 0.0, *, prompt: int = 10, tokens: int = 3, **fields: object) -> Request:
    return make_request(f"r{number}", arrival, make_prompt(number, prompt), tokens, **fields)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_alone_has_a_token_per_step(overlap: bool) -> None:
    (timeline,) = simulate([ask(0, 5.0)], make_spec(overlap=overlap))
    assert list(timeline.token_times) == [6.0, 7.0, 8.0]
    assert timeline.ttft == 1.0 and timeline.tpot == 1.0 and list(timeline.itls) == [1.0, 1.0]
    assert timeline.finished_time == 8.0 and timeline.finish_reason == "length"


def test_a_long_prompt_is_computed_in_chunks() -> None:
    (timeline,) = simulate([ask(0, prompt=300, tokens=1)], make_spec())
    assert list(timeline.token_times) == [3.0]  # 128 + 128 + 44 tokens


@pytest.mark.parametrize(("overlap", "first"), [(True, 3.0), (False, 2.0)])
def test_with_overlap_an_arrival_waits_for_the_step_that_was_planned_ahead(overlap: bool, first: float) -> None:
    """At 0.5 the first step runs; with overlap the second one is dispatched already."""
    _, late = simulate([ask(0, tokens=10), ask(1, 0.5, tokens=2)], make_spec(overlap=overlap))
    assert list(late.token_times) == [first, first + 1]


def test_idle_time_is_skipped() -> None:
    first, second = simulate([ask(0, 1.0, tokens=1), ask(1, 1e6, tokens=1)], make_spec())
    assert list(first.token_times) == [2.0] and list(second.token_times) == [1e6 + 1]


def test_requests_beyond_the_rows_wait() -> None:
    timelines = simulate([ask(number, tokens=2) for number in range(5)], make_spec(rows=4))
    assert [timeline.ttft for timeline in timelines[:4]] == [1.0] * 4
    assert timelines[4].ttft == 3.0


def test_a_request_that_can_never_run_is_refused_and_others_are_served() -> None:
    refused, served = simulate([ask(0, prompt=2000), ask(1)], make_spec())
    assert isinstance(refused.error, InvalidRequestError) and refused.finished_time is None and refused.ttft is None
    assert served.error is None and len(served.token_times) == 3


def test_a_full_queue_refuses_and_better_priorities_displace() -> None:
    spec = make_spec(rows=1, max_num_queued_reqs=1)
    requests = [ask(0, tokens=50), ask(1, 5.0), ask(2, 6.0), ask(3, 7.0, priority=-1)]
    running, displaced, refused, better = simulate(requests, spec)
    assert running.error is None and len(running.token_times) == 50
    assert isinstance(refused.error, QueueFullError) and refused.finished_time is None
    assert isinstance(displaced.error, QueueFullError) and displaced.finish_reason == "error"
    assert better.error is None and better.ttft is not None and better.ttft > 40


def test_three_times_the_load_leaves_what_is_served_in_time() -> None:
    """16 rows serve 1.45 requests a second. Three times as many come; each that is let in begins near its bound."""
    num_seconds, rate = 400, 1.45

    def count_good(most_wait: float) -> int:
        replica = Replica(make_spec(rows=16, tokens=256, pages=400))
        replica.scheduler.queue_admission.bound_wait(most_wait)
        found = []
        for number in range(round(3 * rate * num_seconds)):
            request = ask(number, number / (3 * rate), tokens=4 + number * 7 % 13)
            replica.run_until(request.arrival_time)
            found.append(replica.add(request))
        replica.run()
        return sum(each.ttft is not None and each.ttft <= 5 + 4 for each in found)  # a step has a second

    assert count_good(5.0) >= 0.8 * rate * num_seconds
    assert count_good(float("inf")) < 0.1 * rate * num_seconds


def test_equal_prompts_hit_the_prefix_cache() -> None:
    first = ask(0, prompt=100, tokens=1)
    again = replace(first, request_id="again", arrival_time=10.0)
    _, timeline = simulate([first, again], make_spec())
    assert timeline.num_cached_tokens == 96


def test_prompts_return_from_the_host_tier_while_others_run() -> None:
    """The pool holds one prompt at a time; the second round finds all of them on the host."""
    spec = replace(make_spec(pages=8), num_host_slots=64, max_copies=8)
    spec = replace(spec, formula=replace(SECOND, load_seconds=(0.25,)))
    rounds = [ask(number, prompt=6 * 32 + 1, tokens=1) for number in range(4)]
    again = [replace(each, request_id=f"again {each.request_id}") for each in rounds]
    requests = [replace(each, arrival_time=100.0 * index) for index, each in enumerate((*rounds, *again))]
    assert sum(each.num_cached_tokens for each in simulate(requests, make_spec(pages=8))) == 0
    timelines = simulate(requests, spec)
    assert [each.num_cached_tokens for each in timelines] == [0] * 4 + [6 * 32] * 4
    # Six pages are loaded, then a step computes what is left; nothing else runs, so the loads are waited for.
    assert [each.ttft for each in timelines] == [2.0] * 4 + [6 * 0.25 + 1.0] * 4


def test_preempted_requests_get_all_their_tokens() -> None:
    timelines = simulate([ask(number, prompt=60, tokens=100) for number in range(4)], make_spec(pages=13))
    assert sum(timeline.num_preemptions for timeline in timelines) > 0
    for timeline in timelines:
        assert len(timeline.token_times) == 100
        assert all(earlier < later for earlier, later in itertools.pairwise(timeline.token_times))


def test_tenant_and_tier_reach_the_timeline() -> None:
    request = ask(0, tenant=Tenant("a"), service_tier=ServiceTier.FLEX, priority=3)
    (timeline,) = simulate([request], make_spec())
    assert (timeline.tenant, timeline.service_tier) == ("a", "flex")


def test_a_client_may_send_its_next_request_when_one_ends() -> None:
    ended: list[Timeline] = []

    def send_next(timeline: Timeline) -> None:
        ended.append(timeline)
        if len(ended) < 3:
            replica.add(ask(len(ended), replica.clock.now, tokens=2))

    replica = Replica(make_spec(), on_finish=send_next)
    replica.add(ask(0, tokens=2))
    replica.run()
    assert [list(timeline.token_times) for timeline in ended] == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


def test_the_formula_streams_weights_or_computes_whichever_is_longer() -> None:
    formula = StepFormula(10.0, 1.0, 2.0, step_seconds=0.5, row_seconds=0.25)
    assert formula.of_bucket(Bucket(2, 2)) == 10.0 + 0.5 + 0.5
    assert formula.of_bucket(Bucket(64, 4)) == 64 + 8 + 0.5 + 1.0


@pytest.mark.parametrize("window", [None, 7, 40])
def test_chunks_read_each_key_once_and_compute_each_visible_pair(window: int | None) -> None:
    for start, end in [(0, 1), (0, 5), (3, 9), (32, 64), (64, 96), (5, 6)]:
        visible = [range(max(0, q - (window or 1000) + 1), q + 1) for q in range(start, end)]
        pairs, keys = sum(map(len, visible)), len(set().union(*visible))
        assert Attention(0.0, 1.0, window).of_chunk(start, end) == pairs
        assert Attention(1.0, 0.0, window).of_chunk(start, end) == keys
        assert Attention(1.0, 0.0, window).of_query(end) == len(visible[-1])


def test_decoding_takes_the_time_of_reading_what_its_rows_see() -> None:
    formula = StepFormula(attention=(Attention(1.0), Attention(100.0, window=16)), step_seconds=0.5)
    (timeline,) = simulate([ask(0, prompt=10, tokens=10)], make_spec(formula))
    expected = [0.5 + length + 100 * min(length, 16) for length in range(11, 20)]
    assert list(timeline.itls) == pytest.approx(expected)


def test_several_decode_steps_in_one_dispatch_pay_c0_once() -> None:
    formula = StepFormula(weight_seconds=1.0, attention=(Attention(0.01),), step_seconds=10.0)
    (timeline,) = simulate([ask(0, prompt=10, tokens=9)], make_spec(formula, max_decode_steps=4))
    # The first token takes its prompt's step; then two dispatches of four steps with 11 to 18 tokens in sight.
    first = 10.0 + 1.0 + 0.01 * 10
    ends = [first + 10 + sum(1 + 0.01 * n for n in range(11, 15))]
    ends.append(ends[0] + 10 + sum(1 + 0.01 * n for n in range(15, 19)))
    assert list(timeline.token_times) == pytest.approx([first, *[ends[0]] * 4, *[ends[1]] * 4])
