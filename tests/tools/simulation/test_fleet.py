"""Several replicas: routers, the figures of a run, the devices needed, and continuous against static batching."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from jaxserve.core.pages import PageGroup
from jaxserve.core.runtime.buckets import BucketTable
from jaxserve.core.scheduler import SchedulerLimits
from jaxserve.request import Request
from jaxserve.tools.simulation.device import StepFormula
from jaxserve.tools.simulation.fleet import run_fleet
from jaxserve.tools.simulation.replica import EngineSpec, simulate
from jaxserve.tools.simulation.report import Targets, summarize
from jaxserve.tools.simulation.router import ROUTERS
from jaxserve.tools.simulation.traces import read_trace
from tests.tools.simulation.test_replica import ask, make_prompt, make_spec
from tests.tools.simulation.test_traces import TRACES

pytestmark = pytest.mark.thorough


def count_by_replica(requests: Sequence[Request], router: str, num_replicas: int) -> list[int]:
    run = run_fleet(requests, make_spec(), num_replicas=num_replicas, router=router)
    assert run is not None and all(timeline.finish_reason == "length" for timeline in run.timelines)
    return [sum(each.replica == index for each in run.timelines) for index in range(num_replicas)]


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_spreads_a_burst(router: str) -> None:
    assert count_by_replica([ask(number) for number in range(30)], router, 3) == [10, 10, 10]


def test_round_robin_ignores_load_and_least_loaded_heeds_it() -> None:
    requests = [ask(n, float(n), tokens=200 if n % 2 == 0 else 1) for n in range(12)]
    assert count_by_replica(requests, "round-robin", 2) == [6, 6]
    run = run_fleet(requests, make_spec(), num_replicas=2, router="least-loaded")
    assert run is not None
    long_ones = [each.replica for each in run.timelines if len(each.token_times) == 200]
    assert sorted(long_ones) == [0, 0, 0, 1, 1, 1]


def make_conversations(count: int, turns: int) -> list[Request]:
    """Each turn's prompt begins with the one before; turns of all conversations alternate, in random order."""
    rng, requests = random.Random(0), []
    for turn in range(turns):
        for number in rng.sample(range(count), count):
            prompt = tuple(make_prompt(number, 64 * (turn + 1)))
            requests.append(
                replace(ask(0, 20.0 * len(requests)), request_id=f"{number}/{turn}", prompt_token_ids=prompt)
            )
    return requests


def test_the_prefix_router_finds_what_one_replica_alone_would() -> None:
    requests = make_conversations(9, 4)
    hits = {}
    for router in ROUTERS:
        run = run_fleet(requests, make_spec(), num_replicas=3, router=router)
        assert run is not None
        hits[router] = sum(timeline.num_cached_tokens for timeline in run.timelines)
    alone = sum(timeline.num_cached_tokens for timeline in simulate(requests, make_spec(pages=300)))
    assert hits["prefix"] == alone > 2 * hits["round-robin"]


def test_the_prefix_router_forgets_what_a_replica_has_no_pages_for() -> None:
    run = run_fleet([ask(n, 10.0 * n, prompt=96) for n in range(40)], make_spec(pages=10), num_replicas=1)
    assert run is not None
    router = ROUTERS["prefix"](make_spec(pages=10), 1)
    for number in range(40):
        router.choose(ask(number, prompt=96), run.replicas)
    (sent,) = router._sent  # type: ignore[attr-defined]
    assert len(sent) == 9
    spec = replace(make_spec(pages=10), num_host_slots=20)
    assert ROUTERS["prefix"](spec, 1)._capacity == 29, "what the host holds is not forgotten"  # type: ignore[attr-defined]


def test_the_summary_counts_what_happened() -> None:
    requests = [ask(0, tokens=3), ask(1, 0.0, prompt=2000), ask(2, 4.0, tokens=1)]
    run = run_fleet(requests, make_spec())
    assert run is not None
    found = summarize(run, Targets(ttft_ms=1000), label="x", devices_per_replica=2)
    assert (found.num_requests, found.num_refused, found.seconds, found.num_devices) == (3, 1, 5.0, 2)
    assert found.output_token_rate == pytest.approx(4 / 5) and found.prompt_token_rate == pytest.approx(20 / 5)
    assert found.ttft_ms.p50 == found.itl_ms.p99 == 1000.0
    assert found.slo_share == pytest.approx(2 / 3) and found.goodput == pytest.approx(2 / 5)
    assert found.num_steps == 4 and found.device_busy_share == pytest.approx(4 / 5)
    # Two prompts of 10 tokens in a bucket of 64, and two decode steps of one row each.
    assert found.padding_share == pytest.approx(1 - 22 / (2 * 64 + 2))
    assert dataclasses.replace(found, slo="").to_dict()["itl_ms"]["p99"] == 1000.0


def test_an_slo_bounds_first_tokens_and_the_mean_of_the_others() -> None:
    (timeline,) = simulate([ask(0, tokens=3)], make_spec())
    assert Targets(1000, 1000).are_met(timeline) and Targets().are_met(timeline)
    assert not Targets(999).are_met(timeline) and not Targets(None, 999).are_met(timeline)
    (refused,) = simulate([ask(0, prompt=2000)], make_spec())
    assert not Targets(1000).are_met(refused)


def test_a_run_stops_when_it_is_told_to() -> None:
    ended: list[str] = []

    def give_up(timeline: object) -> bool:
        ended.append("x")
        return len(ended) == 2

    assert run_fleet([ask(n, 10.0 * n) for n in range(100)], make_spec(), give_up=give_up) is None
    assert len(ended) == 2


def draw_lengths(name: str, count: int) -> list[int]:
    """Returns answers' lengths, invented or from a trace."""
    if name in ("conv", "code"):
        trace = read_trace(TRACES / f"AzureLLMInferenceTrace_{name}.csv")
        return [request.num_output_tokens for request in trace][:count]
    rng = random.Random(count)
    draw = {
        "exponential": lambda: 1 + min(int(rng.expovariate(1 / 60)), 900),
        "few long": lambda: 400 if rng.random() < 0.05 else 20,
        "uniform": lambda: rng.randint(10, 100),
    }[name]
    return [draw() for _ in range(count)]


@pytest.mark.parametrize("rows", [8, 32])
@pytest.mark.parametrize("name", ["exponential", "few long", "uniform", "conv", "code"])
def test_continuous_over_static_reaches_the_theoretical_ratio(name: str, rows: int) -> None:
    """All requests wait at the beginning, and every step takes a second. A static batch runs until its longest answer
    ends, so the theory is sum(longest of each batch) over sum(lengths) / rows.

    The continuous rate is that of the time in which requests wait. What follows the last admission depends on the end
    of the list, not on the scheduler, and the theory leaves it out, too.
    """
    if name in ("conv", "code") and not TRACES.is_dir():
        pytest.skip("the public traces are not in ../shared/traces")
    lengths = draw_lengths(name, 60 * rows)
    static = sum(max(lengths[start : start + rows]) for start in range(0, len(lengths), rows))
    theory = static / (sum(lengths) / rows)
    buckets = BucketTable([rows], [16 * rows], rows)
    limits = SchedulerLimits(
        max_num_seqs=rows,
        max_num_batched_tokens=16 * rows,
        max_model_len=2048,
        max_prefix_updates=64,
        pads_cheaply=True,
    )
    spec = EngineSpec(limits, (PageGroup(64 * rows),), buckets, StepFormula(step_seconds=1.0), page_size=32)
    timelines = simulate([ask(n, prompt=4, tokens=length) for n, length in enumerate(lengths)], spec)
    waiting = max(timeline.ttft or 0.0 for timeline in timelines)
    served = sum(sum(seconds <= waiting for seconds in timeline.token_times) for timeline in timelines)
    ratio = (served / waiting) / (sum(lengths) / static)
    print(f"{name}, {rows} rows: {ratio:.2f} of {theory:.2f}")
    assert theory >= ratio >= 0.95 * theory > 1.5
