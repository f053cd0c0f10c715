"""A request whose deadline has passed ends at the next step, with what it has, in whatever state it is."""

from __future__ import annotations

import dataclasses

import pytest

from jaxserve.errors import DeadlineError
from jaxserve.request import RequestOutput
from jaxserve.sampling_params import OutputKind, SamplingParams
from tests.engine.helpers import greedy, make_engine, run
from tests.fake_device import continue_alone


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def check_timeout(output: RequestOutput) -> None:
    assert output.finished and isinstance(output.error, DeadlineError) and output.request_id in str(output.error)
    assert all(completion.finish_reason == "timeout" for completion in output.outputs)


@pytest.mark.parametrize("overlap", [False, True])
def test_running_request_ends_with_what_it_has(overlap: bool) -> None:
    clock = Clock()
    engine, device = make_engine(clock=clock, overlap=overlap)
    engine.add_request(greedy("late", range(10), 50, deadline=105.0))
    engine.add_request(greedy("calm", range(20), 30, deadline=500.0))
    outputs = [output for _ in range(10) for output in engine.step()]
    clock.now = 105.0
    outputs += engine.step()
    (late,) = [output for output in outputs if output.finished]
    check_timeout(late)
    alone = continue_alone(range(10), 50, [None], device.vocab_size)
    found = late.outputs[0].token_ids
    assert len(found) == (9 if overlap else 10) and found == alone[: len(found)]
    assert run(engine, [])["calm"].outputs[0].token_ids == continue_alone(range(20), 30, [None], device.vocab_size)
    assert all(pool.num_referenced == 0 for pool in engine.scheduler.pages.pools)
    assert not engine._deadlines


def test_waiting_prefilling_and_preempted_requests_end() -> None:
    clock = Clock()
    engine, _ = make_engine(clock=clock, num_pages=8, rows=3, caching=False)
    for name in ("a", "b", "c", "d"):
        engine.add_request(greedy(name, range(33), 60, deadline=105.0 if name == "d" else 110.0))
    while engine.scheduler.counts.num_preemptions == 0:
        engine.step()
    engine.add_request(greedy("long", range(100), 60, deadline=110.0, priority=-1))
    clock.now = 107.0
    (waiting,) = [output for output in engine.step() if output.finished]
    check_timeout(waiting)
    assert (waiting.request_id, waiting.outputs[0].token_ids) == ("d", [])
    clock.now = 111.0
    ended = [output for output in engine.step() if output.finished]
    assert {output.request_id for output in ended} == {"a", "b", "c", "long"}
    for output in ended:
        check_timeout(output)
    while engine.has_unfinished:
        assert engine.step() == []
    assert engine.scheduler.waiting.num_new == len(engine.scheduler.waiting) == 0


def test_all_completions_of_a_request_end_together() -> None:
    clock = Clock()
    engine, _ = make_engine(clock=clock)
    params = SamplingParams(temperature=0.5, seed=1, n=3, max_tokens=50, output_kind=OutputKind.FINAL_ONLY)
    engine.add_request(dataclasses.replace(greedy("three", range(40), 50, deadline=101.0), params=params))
    for _ in range(5):
        assert engine.step() == []
    clock.now = 102.0
    (output,) = engine.step()
    check_timeout(output)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]


def test_a_request_that_is_late_when_it_comes_runs_no_step() -> None:
    clock = Clock()
    engine, device = make_engine(clock=clock)
    engine.add_request(greedy("late", range(10), 5, deadline=99.0))
    (output,) = engine.step()
    check_timeout(output)
    assert device.plans == [] and not engine.has_unfinished


def test_an_id_can_be_used_again() -> None:
    clock = Clock()
    engine, _ = make_engine(clock=clock)
    run(engine, [greedy("again", range(10), 5, deadline=101.0)])
    engine.add_request(greedy("again", range(10), 5, deadline=200.0))
    clock.now = 150.0
    assert run(engine, [])["again"].outputs[0].finish_reason == "length"
