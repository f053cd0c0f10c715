"""Throughput counts what was computed, and says when its clock is worth nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.tools.bench.limits import ModelCosts
from jaxserve.tools.bench.prompts import BenchRequest
from jaxserve.tools.bench.runs import Finished, Run, RunOptions, StepSize, run_requests
from jaxserve.tools.bench.setup import Bench
from jaxserve.tools.bench.throughput import list_failures, measure_throughput, summarize_runs, summarize_times
from tests.tools.bench.small_bench import LIMITS, make_bench

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def bench() -> Bench:
    return make_bench()


def make(num_prompt: int, num_output: int, arrival: float = 0.0) -> BenchRequest:
    return BenchRequest(tuple(range(20, 20 + num_prompt)), None, num_prompt, num_output, arrival)


def test_a_run_counts_tokens_steps_and_times(bench: Bench) -> None:
    requests = [make(10, 4), make(30, 8), make(5, 1)]
    bench.llm.reset_prefix_cache()
    run = run_requests(bench.llm, requests)
    assert [(each.num_prompt_tokens, each.num_output_tokens) for each in run.requests] == [(10, 4), (30, 8), (5, 1)]
    assert run.num_prompt_tokens == 45 and run.num_output_tokens == 13 and run.num_completed == 3
    assert sum(run.steps.values()) == len(run.sizes)
    assert run.useful_tokens == sum(size.num_tokens for size in run.sizes) <= run.padded_tokens
    assert run.useful_tokens >= 45 + 13 - 3, "a row that ends wastes a token, none is left out"
    for each in run.requests:
        assert each.arrival == 0 and each.ttft is not None and 0 < each.ttft <= each.latency <= run.seconds
    assert run.requests[2].tpot is None and run.requests[0].tpot is not None


def test_a_program_compiled_inside_the_clock_is_a_failure(bench: Bench) -> None:
    bench.llm.reset_prefix_cache()
    run = run_requests(bench.llm, [make(4, 4)])  # perhaps warms up
    run = run_requests(bench.llm, [make(4, 4)])
    assert run.num_compiled == 0 and not run.failures
    bad = replace(run, num_compiled=2)
    assert list_failures([run, bad, bad]) == [
        "2 programs were compiled inside the clock; its time is not that of serving"
    ]


def test_refused_requests_are_failures_and_the_rest_runs(bench: Bench) -> None:
    run = run_requests(bench.llm, [make(4, 2), make(300, 2), make(4, 2)])
    assert run.num_completed == 2 and run.num_output_tokens == 4
    assert run.requests[1].failure is not None and "prompt" in run.failures[0]


def test_requests_wait_for_their_arrival(bench: Bench) -> None:
    run = run_requests(bench.llm, [make(4, 2, arrival=0.15), make(4, 2)], RunOptions(keeps_arrivals=True))
    late, early = run.requests
    assert late.arrival == pytest.approx(0.15) and late.end > 0.15 and early.arrival == 0
    assert run.seconds >= 0.15


def test_figures_have_spreads_and_the_limit(bench: Bench) -> None:
    requests = [make(10, 4), replace(make(20, 4), is_cut=True)]
    runs = measure_throughput(bench, requests, RunOptions(), num_iters=2, num_warmup=1)
    figures = summarize_runs(bench, requests, runs)
    assert figures["num_cut"] == 1 and figures["total_num_tokens"] == 38 and figures["prefix_hits"] == 0
    assert len(figures["elapsed_time"].values) == 2 and figures["limit_share"].median > 0
    assert figures["engine"]["weight_bytes"] > 6e6 and figures["engine"]["kv_bytes"] > 0


def test_percentiles_leave_out_what_is_missing() -> None:
    assert summarize_times([None]) is None
    assert summarize_times([1.0, None, 3.0]) == {"mean": 2.0, "p50": 2.0, "p90": 2.8, "p99": 2.98}


def test_the_limit_of_a_run_is_that_of_its_steps() -> None:
    """By hand: two steps, of which the larger is bound by operations, and the keys of one request."""
    costs = ModelCosts(
        model=None,  # type: ignore[arg-type]  # no experts to ask for
        num_devices=2,
        weight_bytes=1_000_000,
        num_weights=(1_000_000, 500_000),
        keys=((100.0, None), (10.0, 4)),
        pair_operations=7,
    )
    object.__setattr__(costs, "streamed_bytes", lambda num_tokens: 1_000_000.0)
    run = Run(
        seconds=1.0,
        requests=(Finished(10, 3, 0.0, 0.1, 0.5),),
        steps={},
        sizes=(StepSize(10, 1), StepSize(1, 1)),
        useful_tokens=11,
        padded_tokens=16,
        num_preemptions=0,
        prefix_queries=0,
        prefix_hits=0,
        num_compiled=0,
    )
    computed = 2 * (1_000_000 * 10 + 500_000) / 1e10
    streamed = 1_000_000 / 1e9
    keys = sum(100 * context + 40 for context in (10, 11, 12)) / 1e9
    pairs = 7 * 55 / 1e10
    expected = (computed + streamed + keys + pairs) / 2
    assert run.limit_seconds(costs, LIMITS) == pytest.approx(expected)
