"""Packing: what the host writes is what the program reads, and padding touches nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.runtime.buckets import Bucket
from jaxserve.core.runtime.inputs import KEEP, ON_DEVICE, InputLayout, StateShape, StepPacker
from jaxserve.core.runtime.rows import SAMPLING_FIELDS, RowMirror, SampleVariant
from jaxserve.core.scheduler import ChunkWork, NewRow, StepPlan
from jaxserve.core.scheduler.step_plan import ChunkImages, RowHistory
from jaxserve.request import FIRST_IMAGE_ROW
from jaxserve.sampling_params import SamplingParams

STATE = StateShape(groups=2, rows=9, pages_per_row=5, max_page_updates=20)


def make_plan(decodes: list[int], chunks: list[tuple[int, int, bool]], new_rows: set[int]) -> StepPlan:
    """`chunks`: (row, number of tokens, samples)."""
    work = tuple(ChunkWork(row, 100 + row, 32, tuple(range(row, row + n)), samples) for row, n, samples in chunks)
    params = SamplingParams(temperature=0.5, top_k=-1, top_p=0.25, min_p=0.125)
    sets = tuple(NewRow(row, 32, params, 2**40 + row, 0, 99) for row, _, _ in chunks if row in new_rows)
    updates = tuple((g, row, 1, 7 + row) for row, _, _ in chunks for g in range(2))
    return StepPlan(3, tuple(decodes), tuple(decodes), work, sets, updates)


@given(st.integers(0, 4), st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=4), st.booleans())
def test_round_trip(num_decodes: int, sizes: list[tuple[int, bool]], are_new: bool) -> None:
    if not num_decodes and not sizes:
        return
    decodes = list(range(num_decodes))
    chunks = [(4 + i, n, samples) for i, (n, samples) in enumerate(sizes)]
    plan = make_plan(decodes, chunks, {row for row, _, _ in chunks} if are_new else set())
    layout = InputLayout(Bucket(32, 8), STATE)
    step = StepPacker(RowMirror(STATE.rows)).pack(plan, layout)
    views = layout.views(step.inputs)
    num_rows = plan.num_rows
    assert step.variant is (SampleVariant.RANDOM if plan.new_rows else SampleVariant.GREEDY)
    assert step.inputs.dtype == np.int32 and step.inputs.size == layout.size
    assert views.row_ids.tolist() == [*decodes, *(row for row, _, _ in chunks), *[8] * (8 - num_rows)]
    lengths = [1] * num_decodes + [n for _, n, _ in chunks]
    assert np.diff(views.query_start_loc).tolist() == lengths + [0] * (8 - num_rows)
    assert views.is_sampled.tolist()[:num_rows] == [1] * num_decodes + [int(samples) for _, _, samples in chunks]
    assert not views.is_sampled[num_rows:].any()
    tokens = [ON_DEVICE] * num_decodes + [t for chunk in plan.chunks for t in chunk.token_ids]
    assert views.token_ids.tolist()[: len(tokens)] == tokens
    starts = [KEEP] * num_decodes + [32] * len(chunks)
    assert views.starts.tolist() == starts + [KEEP] * (8 - num_rows)
    assert views.distribution.tolist() == [num_decodes, num_rows, num_rows]
    table = np.zeros((2, 9, 5), int).reshape(-1)
    table[views.page_entries] = views.page_ids
    table = table.reshape(2, 9, 5)
    for row, _, _ in chunks:
        assert (table[:, row, 1] == 7 + row).all()
    assert table.sum() == sum(2 * (7 + row) for row, _, _ in chunks)
    check_sampling(views.sampling[num_decodes:num_rows], plan)


def test_single_tokens_from_the_host_are_decode_rows_in_their_bucket() -> None:
    """Kernels attend rows before the first end of the distribution one by one, and in a decode bucket no others."""
    layout = InputLayout(Bucket(4, 4), STATE)
    step = StepPacker(RowMirror(STATE.rows)).pack(make_plan([0], [(4, 1, True), (5, 1, False)], set()), layout)
    assert layout.views(step.inputs).distribution.tolist() == [3, 3, 3]


def test_images_are_ids_below_zero_and_shifts_of_positions() -> None:
    """Behind a decoding row and a chunk of text; no other token is moved."""
    state = dataclasses.replace(STATE, has_image_positions=True)
    layout = InputLayout(Bucket(32, 8), state)
    plan = make_plan([0], [(4, 2, True), (5, 3, False)], set())
    images = ChunkImages(places=(0, 2), rows=(7, 0), shifts=(1, 2, 3, 4, 5, 6, 7, 8, 9))
    chunks = plan.chunks[0], dataclasses.replace(plan.chunks[1], images=images)
    views = layout.views(
        StepPacker(RowMirror(state.rows)).pack(dataclasses.replace(plan, chunks=chunks), layout).inputs
    )
    assert views.token_ids[:7].tolist() == [ON_DEVICE, 4, 5, FIRST_IMAGE_ROW - 7, 6, FIRST_IMAGE_ROW, 0]
    shifts = views.rotary_shifts.reshape(3, 32)
    assert shifts[:, 3:6].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert np.count_nonzero(shifts) == 9
    assert not InputLayout(Bucket(8, 8), state).views(InputLayout(Bucket(8, 8), state).new()).rotary_shifts.size


def test_copies_of_states_are_slots_in_their_order() -> None:
    """A step without any keeps the array of the step before; slots of snapshots lie behind those of rows."""
    state = dataclasses.replace(STATE, max_state_copies=6)
    layout, packer = InputLayout(Bucket(8, 8), state), StepPacker(RowMirror(state.rows))
    plan = make_plan([0, 1, 2], [], set())
    plain = packer.pack(plan, layout)
    copied = packer.pack(dataclasses.replace(plan, state_loads=((1, 0), (2, 3)), state_saves=((0, 3, 64),)), layout)
    views = layout.views(copied.inputs)
    pairs = list(zip(views.copy_sources.tolist(), views.copy_targets.tolist(), strict=True))
    assert pairs[:3] == [(8, 1), (11, 2), (0, 11)] and views.copy_ends.tolist() == [2, 3]
    assert packer.pack(plan, layout).inputs is plain.inputs
    assert layout.views(plain.inputs).copy_ends.tolist() == [0, 0]
    assert InputLayout(Bucket(8, 8), STATE).views(np.zeros(layout.size)).copy_ends.size == 0


def check_sampling(sampling: np.ndarray, plan: StepPlan) -> None:
    for columns, new_row in zip(sampling, plan.new_rows, strict=False):
        values = dict(zip(SAMPLING_FIELDS, columns, strict=True))
        seed = int(np.uint32(values["seed_low"])) + (int(np.uint32(values["seed_high"])) << 32)
        assert seed == new_row.seed
        floats = {name: values[name].view(np.float32) for name in ("temperature", "top_p", "min_p")}
        assert floats == {"temperature": 0.5, "top_p": 0.25, "min_p": 0.125}
        assert values["top_k"] == 0


LAYOUTS = [InputLayout(Bucket(4, 4), STATE), InputLayout(Bucket(8, 8), STATE), InputLayout(Bucket(32, 8), STATE)]
WISHES = [SamplingParams(temperature=0), SamplingParams(top_p=0.5), SamplingParams(temperature=0, logprobs=1)]


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Steps of few rows, so that many decode what the one before did; a row may begin anew in any of them."""
    decodes = draw(st.sampled_from([(0,), (0, 1), (1, 0), (0, 1, 2)]))
    chunks = (ChunkWork(3, 7, 32, (5, 6), True),) if draw(st.integers(0, 3)) == 0 else ()
    starting = draw(st.lists(st.sampled_from([*decodes, 3]), max_size=1))
    sets = tuple(NewRow(row, 0, draw(st.sampled_from(WISHES)), draw(st.integers(0, 9)), 0, 99) for row in starting)
    updates = tuple((0, row, 2, draw(st.integers(1, 9))) for row in draw(st.sampled_from([(), decodes])))
    return StepPlan(0, decodes, decodes, chunks, sets, updates)


@given(st.lists(st.tuples(plans(), st.integers(0, 1)), max_size=12))
def test_what_is_kept_for_the_next_step_is_what_it_would_pack(steps: list[tuple[StepPlan, int]]) -> None:
    packer, mirror, sent = StepPacker(RowMirror(STATE.rows)), RowMirror(STATE.rows), []
    for plan, size in steps:
        layout = LAYOUTS[2 if plan.chunks else size]
        step, fresh = packer.pack(plan, layout), StepPacker(mirror).pack(plan, layout)
        assert np.array_equal(step.inputs, fresh.inputs)
        assert (step.variant, step.wants_logprobs) == (fresh.variant, fresh.wants_logprobs)
        sent.append((step.inputs, step.inputs.copy()))
    assert all(np.array_equal(inputs, copy) for inputs, copy in sent), "an array was written after it was sent"


def test_steps_of_the_same_rows_send_the_same_array() -> None:
    packer, plan = StepPacker(RowMirror(STATE.rows)), make_plan([0, 1], [], set())
    first = packer.pack(plan, LAYOUTS[1]).inputs
    assert packer.pack(plan, LAYOUTS[1]).inputs is first and not first.flags.writeable
    paged = dataclasses.replace(plan, page_updates=((0, 1, 2, 3),))
    assert not np.shares_memory(packer.pack(paged, LAYOUTS[1]).inputs, first)
    assert packer.pack(plan, LAYOUTS[1]).inputs is first


def test_a_step_needs_what_any_of_its_rows_needs() -> None:
    mirror, history = RowMirror(8), RowHistory((1, 2), 2, (), ())
    params = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(temperature=0, logprobs=1)]
    rows = [NewRow(row, 0, wish, 0, 0, 99) for row, wish in enumerate(params)]
    mirror.apply([*rows, NewRow(3, 0, params[0], 0, 0, 99, history)])
    greedy, drawn, full = SampleVariant.GREEDY, SampleVariant.RANDOM, SampleVariant.FULL
    needs = {(0,): (greedy, False), (0, 1): (drawn, False), (2, 0): (greedy, True), (1, 2): (drawn, True)}
    needs |= {(3,): (full, False), (0, 1, 3): (full, False), (0, 1, 2, 3): (full, True)}
    assert {ids: mirror.find_needs(np.array(ids)) for ids in needs} == needs
    mirror.apply([NewRow(3, 0, params[0], 0, 0, 99)])  # a row's next life needs nothing of the last one's
    assert mirror.find_needs(np.array([0, 3])) == (greedy, False)
