"""Steps that verify drafts: the same answers as token by token, whoever drafts, and all that is counted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from jaxserve.core.pages import PageGroup, PageManager
from jaxserve.core.scheduler import Scheduler, SchedulerLimits, Sequence
from jaxserve.engine.engine import Engine
from jaxserve.request import Request, RequestOutput
from jaxserve.sampling_params import SamplingParams
from tests.engine.late_masks import LateMasks
from tests.fake_device import FakeDevice, continue_alone, make_drafter

VOCAB, WINDOWS, ROWS = 101, [None, 40], 5
PROMPT = tuple(range(40, 55))
ALONE = continue_alone(PROMPT, 200, WINDOWS, VOCAB)


def make_engine(kind: str, *, overlap: bool = True, num_pages: int = 80, **limits: Any) -> tuple[Engine, FakeDevice]:
    """An engine that verifies four drafts in every step, where `limits` say nothing else."""
    groups = [PageGroup(num_pages, window) for window in WINDOWS]
    pages = PageManager(groups, page_size=8, max_chunk=96, enable_prefix_caching=True)
    options: dict[str, Any] = {
        "max_num_seqs": ROWS,
        "max_num_batched_tokens": 96,
        "max_model_len": 200,
        "max_prefix_updates": 60,
        "verify_widths": ((ROWS, 3), (ROWS, 5)),
        "max_drafts": 4,
        "fixed_drafts": ((1, ROWS, 4),),
    }
    options |= limits
    device = FakeDevice(groups, page_size=8, vocab_size=VOCAB)
    device.drafter = make_drafter(kind)
    device.max_drafts, device.drafts_always = 4, not options.get("has_draft_passes", False)
    device.num_lookahead_tokens = options.get("num_lookahead_tokens", 0)
    device.wants_edges = False
    return Engine(Scheduler(SchedulerLimits(**options), pages), device, overlap=overlap), device


def run(engine: Engine, *requests: Request) -> dict[str, RequestOutput]:
    for request in requests:
        engine.add_request(request)
    outputs = {}
    for _ in range(3000):
        if not engine.has_unfinished:
            break
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
        engine.scheduler.pages.check()
    assert not engine.has_unfinished, "no progress"
    assert all(pool.num_referenced == 0 for pool in engine.scheduler.pages.pools)
    return outputs


@pytest.mark.parametrize("masks", [False, True], ids=["", "masks"])
@pytest.mark.parametrize("costs", [False, True], ids=["lookups", "head"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "plain"])
@pytest.mark.parametrize("kind", ["right", "wrong", "random"])
def test_answers_are_those_of_single_tokens(kind: str, overlap: bool, costs: bool, masks: bool) -> None:
    lookahead = 3 if costs else 0
    for num_pages in (20, 80):
        engine, device = make_engine(
            kind, overlap=overlap, num_pages=num_pages, has_draft_passes=costs, num_lookahead_tokens=lookahead
        )
        if masks:
            engine._grammars = LateMasks(1)
        requests = [Request(f"r{i}", PROMPT, SamplingParams(max_tokens=20 + 11 * i, seed=i)) for i in range(9)]
        outputs = run(engine, *requests)
        counts = engine.scheduler.counts
        assert (counts.num_preemptions > 0) == (num_pages == 20)
        for index, request in enumerate(requests):
            assert outputs[request.request_id].outputs[0].token_ids == ALONE[: 20 + 11 * index]
        steps = [plan for plan in device.plans if plan.width > 1]
        assert len(steps) > 15 and not any(plan.chunks for plan in steps)
        assert all(later.width <= plan.num_drafts + 1 for plan, later in itertools.pairwise(device.plans))
        assert sum(counts.num_accepted_by_position) == counts.num_accepted_tokens <= counts.num_draft_tokens
        assert kind != "wrong" or counts.num_accepted_tokens == 0
        assert kind != "right" or masks or counts.num_accepted_tokens >= 0.95 * counts.num_draft_tokens


def test_counters_of_a_row_alone() -> None:
    engine, device = make_engine("right")
    engine.add_request(Request("a", PROMPT, SamplingParams(max_tokens=24)))
    sequences: list[Sequence] = list(engine._streams)
    while engine.has_unfinished:
        engine.step()
    counts = engine.scheduler.counts
    assert [plan.width for plan in device.plans] == [1, 5, 5, 5, 5, 5], "one token of the prompt, then five a step"
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (5, 18, 18)
    assert counts.num_accepted_by_position == [5, 5, 4, 4]
    assert [[sum(counts) for counts in zip(*each.verified, strict=True)] for each in sequences] == [[18, 18]]


def test_rows_that_wait_for_room_do_not_stop_the_others_from_verifying() -> None:
    engine, device = make_engine("right")
    requests = [Request(f"r{i}", PROMPT, SamplingParams(max_tokens=60)) for i in range(2 * ROWS)]
    run(engine, *requests)
    full = [plan for plan in device.plans if len(plan.decode_rows) == ROWS]
    assert {plan.width for plan in full} == {5}


def test_a_step_with_chunks_has_single_tokens_and_the_next_one_verifies_again() -> None:
    engine, device = make_engine("right", has_draft_passes=True)
    engine.add_request(Request("a", PROMPT, SamplingParams(max_tokens=100)))
    for _ in range(4):
        engine.step()
    outputs = run(engine, Request("b", PROMPT, SamplingParams(max_tokens=30)))
    assert outputs["b"].outputs[0].token_ids == ALONE[:30]
    (place,) = (index for index, plan in enumerate(device.plans) if plan.chunks and plan.decode_rows)
    widths = [plan.width for plan in device.plans[place - 1 : place + 2]]
    assert widths == [5, 1, 5] and device.plans[place].num_drafts == 4


def test_few_slots_in_a_step_bound_the_width() -> None:
    engine, device = make_engine("right", max_num_batched_tokens=20)
    run(engine, *(Request(f"r{i}", PROMPT, SamplingParams(max_tokens=40)) for i in range(ROWS)))
    assert {plan.width for plan in device.plans if len(plan.decode_rows) == ROWS} == {3}
    assert max(plan.num_tokens for plan in device.plans) <= 20
