"""What is counted is what happened."""

from __future__ import annotations

import dataclasses
import itertools
import threading

import pytest

from jaxserve.core.scheduler import StepOutputs, StepPlan
from jaxserve.engine.engine_counts import EngineCounts
from jaxserve.engine.metrics import Counter, Vector, list_metrics
from jaxserve.engine.stats import DraftStats, PoolStats, read_page_map, read_rows, read_stats
from jaxserve.sampling_params import SamplingParams
from tests.engine.helpers import greedy, make_engine, run
from tests.fake_device import FakeStep


def test_steps_tokens_and_pools() -> None:
    engine, device = make_engine(num_pages=40)
    run(engine, [greedy("a", range(100), 10)])
    run(engine, [greedy("b", range(100), 10, cache_salt="other"), greedy("c", range(100), 10)])
    found = read_stats(engine)
    assert found.num_steps == len(device.plans) == sum(found.steps.values())
    assert found.steps["decode 1"] == sum(plan.num_tokens == plan.num_rows == 1 for plan in device.plans)
    tokens = [plan.num_tokens for plan in device.plans]
    assert found.useful_tokens == found.step_tokens.total == sum(tokens)
    assert (found.padded_tokens, found.num_faults, found.num_preemptions, found.num_compiles) == (0, 0, 0, 0)
    upper = (*found.step_tokens.bounds, 10**9)
    for low, high, count in zip((0, *upper), upper, found.step_tokens.counts, strict=False):
        assert count == sum(low < number <= high for number in tokens)
    assert (found.prefix_queries, found.prefix_hits) == (300, 96)
    assert found.pools == (PoolStats(39, 0, 6),)
    assert (found.num_running, found.num_waiting, found.num_queued_tokens) == (0, 0, 0)


def test_drafts_and_the_metrics_of_them() -> None:
    engine, _ = make_engine()
    assert read_stats(engine).drafts == DraftStats()
    assert not any(isinstance(metric, Vector) for metric in list_metrics(read_stats(engine), "m"))
    counts = engine.scheduler.counts
    counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens = 10, 40, 23
    counts.num_accepted_by_position += [9, 8, 4, 2]
    found = read_stats(engine)
    assert found.drafts == DraftStats(10, 40, 23, (9, 8, 4, 2))
    values = {
        metric.name.removeprefix("jaxserve:spec_decode_"): metric.values if isinstance(metric, Vector) else metric.value
        for metric in list_metrics(found, "m")
        if isinstance(metric, Counter | Vector) and "spec_decode" in metric.name
    }
    assert values == {
        "num_drafts": 10,
        "num_draft_tokens": 40,
        "num_accepted_tokens": 23,
        "num_accepted_tokens_per_pos": [9, 8, 4, 2],
    }


def test_only_prompts_that_are_looked_up_are_prefix_queries() -> None:
    engine, _ = make_engine()
    scored = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    run(engine, [greedy("plain", range(70), 2)])
    run(engine, [dataclasses.replace(greedy("scored", range(70), 2), params=scored)])
    assert (read_stats(engine).prefix_queries, read_stats(engine).prefix_hits) == (70, 0)


def test_what_is_at_work_now() -> None:
    engine, _ = make_engine(rows=2, num_pages=30)
    for name, length, priority in (("a", 40, 0), ("b", 70, -3), ("c", 80, 5), ("d", 9, 7)):
        engine.add_request(greedy(name, range(length), 50, priority=priority))
    assert (read_stats(engine).num_waiting, read_stats(engine).num_queued_tokens) == (4, 199)
    for _ in range(3):
        engine.step()
    found, rows = read_stats(engine), read_rows(engine)
    assert (found.num_running, found.num_waiting, found.num_queued_tokens) == (2, 2, 89)
    assert [(row.row, row.request_id, row.priority, row.num_prompt_tokens) for row in rows] == [
        (0, "b", -3, 70),
        (1, "a", 0, 40),
    ]
    assert not rows[0].is_prefilling and rows[0].num_tokens > 70 and rows[0].num_computed_tokens >= 70
    (pool,) = found.pools
    drawn = read_page_map(engine)
    assert len(drawn) == pool.total == 29 and drawn.count("2") + drawn.count("3") == pool.used == 5
    assert drawn.count("0") == pool.total - pool.used - pool.cached
    engine.abort_all()


def test_prefilling_rows_say_so() -> None:
    engine, _ = make_engine()
    engine.add_request(greedy("long", range(200), 5))
    engine.step()
    (row,) = read_rows(engine)
    assert (row.is_prefilling, row.num_computed_tokens, row.num_tokens) == (True, 64, 200)
    engine.abort_all()


def test_pages_are_drawn_by_their_largest_state() -> None:
    engine, _ = make_engine(num_pages=21, rows=2, budget=96)
    assert read_page_map(engine) == "0" * 20
    run(engine, [greedy("a", range(64), 2)])
    assert sorted(read_page_map(engine)) == sorted("11" + "0" * 18)
    for name in ("b", "c"):
        engine.add_request(greedy(name, range(80), 5))
        engine.step()
    whole, coarse = read_page_map(engine), read_page_map(engine, 7)
    assert whole.count("3") == 2 and whole.count("2") == 2
    bounds = [cell * 20 // 7 for cell in range(8)]
    assert coarse == "".join(max(whole[a:b]) for a, b in itertools.pairwise(bounds))
    engine.abort_all()


def test_preemptions_and_faults_are_counted() -> None:
    engine, device = make_engine(num_pages=8, caching=False)
    outputs = run(engine, [greedy(f"r{i}", range(i, i + 33), 60) for i in range(3)])
    preempted = sum(output.metrics.num_preemptions for output in outputs.values() if output.metrics)
    assert read_stats(engine).num_preemptions == preempted > 0
    assert read_stats(engine).prefix_queries == 0, "there is no prefix cache to ask"
    device.fail_next = RuntimeError("struck")
    run(engine, [greedy("hit", range(5), 5)])
    assert read_stats(engine).num_faults == 1


def test_waiting_and_working_share_the_time_that_there_is_work() -> None:
    now = 0.0

    class Future:
        def result(self) -> StepOutputs:
            nonlocal now
            now += 5.0
            return StepOutputs([])

    counts = EngineCounts(lambda: now)
    for _ in range(2):
        now += 1000.0  # time without work is neither
        counts.begin()
        for _ in range(3):
            now += 2.0
            counts.wait(Future())
    assert (counts.wait_seconds, counts.busy_seconds) == (2 * 3 * 5.0, 2 * 3 * 2.0)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_time_of_a_step_that_compiled_is_not_noted(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now, seconds = [0.0], []
    engine, device = make_engine(clock=lambda: now[0], overlap=overlap)
    start = device.start

    def compile_fourth(plan: StepPlan) -> FakeStep:
        now[0] += 1.0
        if len(device.plans) == 3:
            now[0] += 100.0
            device.num_compiles += 1
        return start(plan)

    monkeypatch.setattr(device, "start", compile_fourth)
    monkeypatch.setattr(engine.scheduler.times, "add", lambda tokens, rows, taken, width=1, **_: seconds.append(taken))
    run(engine, [greedy("a", range(5), 10)])
    assert len(seconds) == len(device.plans) - 1 and max(seconds) < 3


def test_counters_can_be_read_while_steps_run() -> None:
    engine, _ = make_engine(num_pages=12, rows=4)
    failures: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                found = read_stats(engine)
                assert found.num_running <= 4 and found.num_steps >= 0
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    run(engine, [greedy(f"r{i}", range(i, i + 7 * (i % 9) + 1), 30) for i in range(60)])
    done.set()
    reader.join()
    assert failures == []
