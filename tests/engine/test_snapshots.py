"""Snapshots of recurrent states over a fake device, which compares each row's state with the tokens of its text."""

from __future__ import annotations

import pytest

from jaxserve.core.pages import PageGroup, PageManager
from jaxserve.core.scheduler import Scheduler, SchedulerLimits, StepPlan
from jaxserve.engine.engine import Engine
from jaxserve.errors import NonFiniteLogitsError
from jaxserve.request import Request
from jaxserve.sampling_params import OutputKind, SamplingParams
from jaxserve.scheduler_options import SchedulerOptions
from tests.engine.helpers import greedy, run
from tests.engine.test_grammars import Grammar
from tests.fake_device import FakeDevice, continue_alone, make_drafter

GRID = 64


def make_engine(
    num_snapshots: int = 40,
    *,
    grid: int = GRID,
    caching: bool = True,
    rows: int = 4,
    budget: int = 256,
    num_pages: int = 800,
    overlap: bool = True,
    drafts: tuple[str, int] = ("", 0),
    **options: object,
) -> tuple[Engine, FakeDevice]:
    groups, page_size = [PageGroup(num_pages)], 16
    pages = PageManager(
        groups,
        page_size=page_size,
        max_chunk=budget,
        enable_prefix_caching=caching,
        num_snapshots=num_snapshots,
        hit_grid=grid,
    )
    limits = SchedulerLimits(
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        max_model_len=6000,
        max_prefix_updates=400,
        loop_rows=rows,
        keeps_states=True,
        chunk_edges=(64, 32),
        snapshot_grid=grid if caching else 0,
        verify_widths=((rows, drafts[1] + 1),) if drafts[1] else (),
        max_drafts=drafts[1],
        fixed_drafts=((1, rows, drafts[1]),) if drafts[1] else None,
        options=SchedulerOptions(**options),  # type: ignore[arg-type]
    )
    device = FakeDevice(groups, page_size=page_size)
    device.keeps_states = True
    if drafts[1]:
        device.drafter, device.max_drafts = make_drafter(drafts[0]), drafts[1]
    return Engine(Scheduler(limits, pages), device, overlap=overlap), device


def make_text(length: int, mark: int) -> list[int]:
    return [(mark * 7919 + place * 31) % 1009 for place in range(length)]


def find_chunks(plans: list[StepPlan]) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.end) for plan in plans for chunk in plan.chunks]


@pytest.mark.parametrize("length", [70, 500, 1000, 5000])
@pytest.mark.parametrize("tail", [1, 63, 64, 65, 200])
def test_the_third_request_with_a_common_beginning_finds_all_of_it(length: int, tail: int) -> None:
    """Wherever it ends, and wherever the others did."""
    engine, _ = make_engine()
    common = make_text(length, 1)
    cached = [
        run(engine, [greedy(f"r{mark}", common + make_text(tail + mark, mark), 5)])[f"r{mark}"].num_cached_tokens
        for mark in (2, 3, 4, 5)
    ]
    whole = length // GRID * GRID
    assert cached[2:] == [whole, whole] and cached[0] == 0 and cached[1] <= whole
    lost = engine.scheduler.counts.snapshot_misses
    assert lost == whole - cached[1], "counted once, for the second"


def test_the_second_meets_the_junction_and_only_its_chunks_end_there() -> None:
    engine, device = make_engine(budget=4096)
    for mark in (2, 3, 4):
        run(engine, [greedy(str(mark), make_text(500, 1) + make_text(90, mark), 2)])
    chunks = [(0, 576), (576, 590)], [(0, 448), (448, 576), (576, 590)], [(448, 576), (576, 590)]
    assert find_chunks(device.plans) == [chunk for each in chunks for chunk in each]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [1, 7, 8])
def test_the_next_turn_of_a_conversation_computes_no_more_than_a_cell_twice(overlap: bool, steps: int) -> None:
    for first, length in ((60, 41), (63, 500), (64, 110), (65, 500), (69, 130)):
        engine, device = make_engine(overlap=overlap, max_decode_steps=steps)
        text = make_text(first, 3)
        for turn in range(4):
            answer = run(engine, [greedy(f"t{turn}", text, length + 9 * turn)])[f"t{turn}"]
            assert len(text) - answer.num_cached_tokens <= (20 if turn else first) + GRID
            text = [*text, *answer.outputs[0].token_ids, *make_text(20, turn)]
        assert len(device.snapshots) <= 40


@pytest.mark.parametrize("opening", [0, 2, 4, 8])
@pytest.mark.parametrize("length", [1, 2, 5, 64])
def test_the_next_turn_goes_on_behind_an_opening_that_its_prompt_lacks(length: int, opening: int) -> None:
    """A template begins each answer, with "<think>" for one, and does not repeat that in the next turn's prompt."""
    think = [1001, 1002, 1003, 1004, 1005, 1006, 1007, 1008][:opening]
    for end in range(190, 260):
        engine, _ = make_engine()
        text = make_text(end - opening, 3)
        run(engine, [greedy("first", [*text, *think], length)])
        following = [*text, *make_text(30, 9), *think]
        found = run(engine, [greedy("second", following, 1)])["second"].num_cached_tokens
        assert len(text) - found <= GRID
        assert found == len(text) // GRID * GRID or end - 1 - found <= GRID + 8


def test_a_prompt_has_two_snapshots_where_the_last_lies_in_the_opening_of_its_answer() -> None:
    """Repeated, it goes on from the last; and both stay while the answer grows."""
    for length, points in ((192, (128,)), (193, (128, 192)), (200, (128, 192)), (201, (192,)), (65, (64,)), (5, ())):
        engine, device = make_engine(num_snapshots=4)
        prompt = make_text(length, 1)
        run(engine, [greedy("a", prompt, 130)])
        ends = [end for _, end in find_chunks(device.plans)]
        assert ends == [*points, length]
        assert {len(text) for text in device.snapshots.values()} >= set(points)
        assert run(engine, [greedy("b", prompt, 2)])["b"].num_cached_tokens == (points or (0,))[-1]


@pytest.mark.parametrize("kind", ["right", "wrong", "random"])
@pytest.mark.parametrize("num_drafts", [1, 4, 70])
@pytest.mark.parametrize("overlap", [False, True])
def test_verify_steps_pass_points_and_leave_snapshots_there(overlap: bool, num_drafts: int, kind: str) -> None:
    """Wherever runs end. Rows are preempted, too. A run that may pass two points leaves one snapshot, or none."""
    engine, device = make_engine(num_pages=90, overlap=overlap, drafts=(kind, num_drafts))
    texts = [make_text(length, length) for length in (61, 63, 64, 70, 127, 130)]
    for turn in range(2):
        done = run(engine, [greedy(str(index), text, 150 + index) for index, text in enumerate(texts)])
        for index, text in enumerate(texts):
            ids = done[str(index)].outputs[0].token_ids
            assert ids == continue_alone(text, 150 + index, [None], 1009)
            text += [*ids, 5]
            found = run(engine, [greedy("again", text, 2)])["again"].num_cached_tokens
            assert turn or num_drafts > GRID // 2 or len(text) - found <= GRID + 1
    assert engine.scheduler.counts.num_preemptions > 0 and engine.scheduler.pages.snapshots.num_pending == 0
    assert any(plan.width > 1 and plan.state_saves for plan in device.plans)
    assert any(plan.state_loads for plan in device.plans)


@pytest.mark.parametrize("length", range(123, 128))
@pytest.mark.parametrize("forced", [2, 10, 150])
def test_forced_text_jumps_over_a_point_that_a_verify_step_did_not_pass(forced: int, length: int) -> None:
    """No state is found there that nobody wrote, while chunks go on behind it."""
    engine, device = make_engine(grid=128, budget=80, drafts=("right", 4))
    engine._grammars._vocab_size, device.wants_edges, text = 1009, False, make_text(length, 1)
    answer = [*continue_alone(text, 1, [None], 1009), *make_text(forced, 9)]
    params = SamplingParams(max_tokens=forced + 40, detokenize=False, output_kind=OutputKind.FINAL_ONLY)
    engine.add_request(Request("a", tuple(text), params, grammar=Grammar(forced={1: answer[1:]})))
    expected, reserved = text + answer + continue_alone(text + answer, 39, [None], 1009), 0
    snapshots = engine.scheduler.pages.snapshots
    while engine.has_unfinished:
        engine.step()
        for sequence in engine.scheduler.batch.by_ticket.values():
            assert sequence.token_ids == expected[: len(sequence.token_ids)]
            for count, key in enumerate(sequence.pages.keys, 1):
                if (slot := snapshots._cached.get(key)) is not None:
                    assert device.snapshots[slot] == expected[: 16 * count]
        reserved += any(save[2] > length + 2 for save in device.plans[-1].state_saves if device.plans[-1].width > 1)
    assert reserved or length > 125
    assert sequence.token_ids == expected
    engine.scheduler.pages.check()


def test_rows_that_are_not_aligned_with_each_other_keep_their_snapshots_and_most_loops() -> None:
    engine, device = make_engine(max_decode_steps=8)
    texts = [make_text(length, length) for length in (61, 70, 75, 85)]
    done = run(engine, [greedy(str(index), text, 400) for index, text in enumerate(texts)])
    assert sum(plan.width == 8 for plan in device.plans) * 8 > 200, "less than half of the answers comes in loops"
    for index, text in enumerate(texts):
        text += [*done[str(index)].outputs[0].token_ids, 5]
        found = run(engine, [greedy("again", text, 2)])["again"].num_cached_tokens
        assert len(text) - found <= GRID + 1


@pytest.mark.parametrize("limit", ["max_num_partial_prefills", "max_long_partial_prefills"])
def test_a_prompt_that_is_cut_for_its_snapshot_is_computed_in_parts(limit: str) -> None:
    """And longer than its first part: both limits count it."""
    engine, device = make_engine(long_prefill_token_threshold=64, **{limit: 1})
    run(engine, [greedy(str(mark), make_text(100, mark), 3) for mark in range(4)])
    assert len(find_chunks(device.plans)) == 8
    assert max(sum(not chunk.is_last for chunk in plan.chunks) for plan in device.plans) == 1


def test_a_preempted_row_goes_on_from_its_last_snapshot() -> None:
    engine, device = make_engine(num_pages=32, rows=2)
    run(engine, [greedy("old", make_text(150, 1), 110), greedy("young", make_text(150, 2), 200)])
    assert engine.scheduler.counts.num_preemptions > 0
    loads = [plan.state_loads for plan in device.plans if plan.state_loads]
    assert len(loads) == engine.scheduler.counts.num_preemptions
    again = [plan.new_rows[0].num_computed_tokens for plan in device.plans if plan.state_loads]
    assert min(again) >= 192, "not from its prompt's"


def test_siblings_start_from_one_snapshot_of_their_prompt() -> None:
    engine, device = make_engine()
    prompt = tuple(make_text(150, 1))
    params = SamplingParams(temperature=0, max_tokens=4, n=3, output_kind=OutputKind.FINAL_ONLY)
    done = run(engine, [Request("a", prompt, params)])
    assert [each.token_ids for each in done["a"].outputs] == [done["a"].outputs[0].token_ids] * 3
    assert sorted(find_chunks(device.plans)) == [(0, 128), (128, 150), (128, 150), (128, 150)]
    assert [slot for plan in device.plans for _, slot in plan.state_loads] == [0, 0]


def test_what_a_thousand_requests_took_is_free() -> None:
    """Some of them are aborted."""
    engine, device = make_engine(num_snapshots=7, num_pages=60)
    snapshots = engine.scheduler.pages.snapshots
    for index in range(1000):
        engine.add_request(greedy(str(index), make_text(1 + index * 37 % 150, index % 5), 1 + index % 70))
    for steps in range(10**6):
        if not engine.has_unfinished:
            break
        engine.step()
        engine.abort_request(str(steps * 7 % 1000))
    assert len(device.snapshots) == 7 and snapshots.num_pending == 0
    engine.scheduler.pages.drop_prefix_index()
    engine.scheduler.pages.check()
    assert snapshots.num_cached == 0 and not engine.scheduler.batch and not engine.scheduler.pages.pools[0].num_cached


def test_states_of_lost_steps_and_of_other_weights_are_forgotten() -> None:
    engine, device = make_engine()
    prompt = make_text(150, 1)
    run(engine, [greedy("a", prompt, 4)])
    assert engine.scheduler.pages.snapshots.num_cached == 1
    device.fail_next = RuntimeError("struck")
    run(engine, [greedy("b", make_text(9, 2), 4)])
    assert engine.scheduler.pages.snapshots.num_cached == 0
    assert run(engine, [greedy("c", prompt, 4)])["c"].num_cached_tokens == 0
    assert run(engine, [greedy("d", prompt, 4)])["d"].num_cached_tokens == 128


def test_a_state_that_is_not_finite_fails_its_request_and_nobody_goes_on_from_it() -> None:
    engine, device = make_engine()
    prompt = make_text(150, 1)
    device.poison_rows = {0}
    assert isinstance(run(engine, [greedy("a", prompt, 4)])["a"].error, NonFiniteLogitsError)
    snapshots = engine.scheduler.pages.snapshots
    assert device.snapshots and snapshots.num_cached == snapshots.num_pending == 0
    device.poison_rows = set()
    assert run(engine, [greedy("b", prompt, 4)])["b"].num_cached_tokens == 0


@pytest.mark.parametrize("salt", ["", "other"])
def test_a_salt_keeps_snapshots_apart(salt: str) -> None:
    engine, _ = make_engine()
    prompt = make_text(150, 1)
    run(engine, [greedy("a", prompt, 4)])
    found = run(engine, [greedy("b", prompt, 4, cache_salt=salt)])["b"].num_cached_tokens
    assert found == (0 if salt else 128)


def test_without_a_prefix_cache_nothing_is_cut_or_copied() -> None:
    engine, device = make_engine(caching=False)
    for name in "ab":
        run(engine, [greedy(name, make_text(150, 1), 100)])
    assert not any(plan.state_loads or plan.state_saves for plan in device.plans)
    assert (0, 150) in find_chunks(device.plans)


def test_a_wider_grid_has_fewer_snapshots() -> None:
    engine, _ = make_engine(grid=192)
    prompt = make_text(500, 1)
    run(engine, [greedy("a", prompt, 4)])
    assert run(engine, [greedy("b", prompt, 4)])["b"].num_cached_tokens == 384
