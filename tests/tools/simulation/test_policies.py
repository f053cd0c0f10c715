"""What the policies promise, on a virtual clock: nobody's tokens are late because of a neighbour."""

from __future__ import annotations

import heapq
import random
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.families.registry import parse_config
from jaxserve.presets import load_preset
from jaxserve.request import Request, ServiceTier, Tenant
from jaxserve.tools.simulation.device import StepFormula
from jaxserve.tools.simulation.engine_plan import choose_device, plan_engine
from jaxserve.tools.simulation.replica import EngineSpec, Timeline, make_request, simulate
from jaxserve.tools.simulation.traces import read_trace

TRACES = Path(__file__).parents[4] / "shared" / "traces"
ITL_MS = 20.0
STEP = StepFormula(step_seconds=1.0)  # times are then numbers of steps


def make_engine(**options: Any) -> EngineSpec:
    """An H200 with Llama 3.1 8B."""
    config = EngineConfig.from_options(model="llama-3.1-8b", **options).resolve("gpu")
    kind, rates = choose_device("h200", None)
    model = parse_config(load_preset("llama-3.1-8b") or {})
    return plan_engine(config, model, kind, replace(rates, step_seconds=200e-6, row_seconds=1e-6))


def make_lengths(count: int) -> list[tuple[int, int]]:
    """(prompt, answer) tokens, spread as in chats."""
    draw = random.Random(3)
    return [
        (min(int(draw.lognormvariate(6.5, 0.9)) + 1, 8000), min(int(draw.lognormvariate(5, 0.7)) + 1, 1000))
        for _ in range(count)
    ]


def make_load(lengths: list[tuple[int, int]], span: float, **fields: Any) -> Iterator[Request]:
    """Requests of these lengths that arrive evenly over `span` seconds."""
    for index, (prompt, answer) in enumerate(lengths):
        yield make_request(f"load {index}", index * span / len(lengths), (2**40 + index,) * prompt, answer, **fields)


def make_streams(span: float, tier: ServiceTier) -> list[Request]:
    """Four clients that ask again when their answer should be there."""
    draw = random.Random(5)
    starts = [(0.5 + 0.1 * client + 5 * turn, client, turn) for client in range(4) for turn in range(int(span / 5))]
    return [
        make_request(f"stream {client} {turn}", at, (2**50 + 1000 * client + turn,) * draw.randint(100, 800), 150,
                     service_tier=tier)
        for at, client, turn in sorted(starts)
    ]  # fmt: skip


def merge(*requests: Iterable[Request]) -> Iterator[Request]:
    return heapq.merge(*requests, key=lambda request: request.arrival_time)


def find(timelines: Iterable[Timeline], name: str) -> list[Timeline]:
    return [timeline for timeline in timelines if timeline.request_id.startswith(name)]


def percentile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def count_served(timelines: list[Timeline], span: float) -> int:
    """The load's tokens in the first `span` seconds."""
    return sum(
        sum(at <= span for at in each.token_times) + each.num_prompt_tokens * (each.token_times[0] <= span)
        for each in find(timelines, "load")
        if each.token_times
    )


def check_tiers(lengths: list[tuple[int, int]]) -> None:
    """A load of 1.2 x what the engine can do, as `flex`, beside four streams."""
    plain, tiered = make_engine(), make_engine(priority_itl_ms=ITL_MS)
    done = simulate(make_load(lengths, 0.001), plain)
    span = max(timeline.finished_time or 0.0 for timeline in done) / 1.2
    usual, flex, soon = ServiceTier.DEFAULT, ServiceTier.FLEX, ServiceTier.PRIORITY
    before = simulate(merge(make_load(lengths, span), make_streams(span, usual)), plain)
    after = simulate(merge(make_load(lengths, span, service_tier=flex), make_streams(span, soon)), tiered)
    late = percentile((itl for each in find(before, "stream") for itl in each.itls), 0.99)
    itl = percentile((itl for each in find(after, "stream") for itl in each.itls), 0.99)
    share = count_served(after, span) / count_served(before, span)
    print(f"p99 ITL {1e3 * late:.1f} -> {1e3 * itl:.1f} ms, throughput x {share:.3f}")
    assert 1e3 * itl <= 1.1 * ITL_MS < 1e3 * late
    assert share >= 0.85


def test_priority_rows_keep_to_their_limit_at_little_cost() -> None:
    check_tiers(make_lengths(400))


@pytest.mark.thorough
@pytest.mark.skipif(not TRACES.is_dir(), reason="AzureLLMInferenceTrace_conv.csv is not here")
def test_priority_rows_keep_to_their_limit_beside_a_real_load() -> None:
    trace = read_trace(TRACES / "AzureLLMInferenceTrace_conv.csv")[:1500]
    check_tiers([(each.num_prompt_tokens, each.num_output_tokens) for each in trace])


def make_short(name: str, span: float, per_step: float, **fields: Any) -> Iterator[Request]:
    draw, at, index = random.Random(name), 0.0, 0
    while at < span:
        at, index = at + draw.expovariate(per_step), index + 1
        prompt = (zlib.crc32(f"{name} {index}".encode()),) * draw.randint(50, 400)
        yield make_request(f"{name} {index}", at, prompt, draw.randint(20, 120), **fields)


def test_a_long_prompt_delays_others_by_two_steps_at_most() -> None:
    long = [make_request(f"long {j}", 100.0 + 400 * j, (2**42 + j,) * 100_000, 20) for j in range(4)]
    delays = {}
    for name, options in {"shares": {}, "takes all": {"long_prefill_token_threshold": 0}}.items():
        engine = replace(make_engine(**options), formula=STEP)
        alone = {each.request_id: each.ttft for each in simulate(make_short("short", 2000, 0.1), engine)}
        beside = find(simulate(merge(make_short("short", 2000, 0.1), long), engine), "short")
        delays[name] = percentile(((each.ttft or 0) - (alone[each.request_id] or 0) for each in beside), 0.99)
    assert delays["shares"] <= 2 and delays["takes all"] > 20


def test_a_flood_does_not_delay_the_tenant_beside_it() -> None:
    """Alone with its share: half the rows, half of each step, half the pages, steps as long."""
    span = 1500.0
    engine = replace(make_engine(scheduling_policy="fair", enable_prefix_caching=False), formula=STEP)
    limits = replace(engine.limits, max_num_seqs=128, max_num_batched_tokens=1024)
    half = replace(engine, limits=limits, groups=tuple(replace(g, num_pages=g.num_pages // 2) for g in engine.groups))
    few = list(make_short("few", span, 0.05, tenant=Tenant("few")))
    flood = make_short("flood", span, 5, tenant=Tenant("flood"))
    alone = [each.ttft or 0.0 for each in simulate(few, half)]
    beside = [each.ttft or 0.0 for each in find(simulate(merge(few, flood), engine), "few")]
    print(f"p99 TTFT {percentile(alone, 0.99):.2f} -> {percentile(beside, 0.99):.2f} steps")
    assert percentile(beside, 0.99) <= 1.5 * percentile(alone, 0.99)
