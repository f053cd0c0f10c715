"""Images in plans: whatever the order of requests, a chunk reads the vectors of its own images from the right rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxserve.core.pages import PageGroup, PageManager
from jaxserve.core.scheduler import Scheduler, SchedulerLimits, StepOutputs
from jaxserve.core.scheduler.step_plan import StepPlan
from jaxserve.errors import InvalidRequestError
from jaxserve.media.items import MediaItem, MediaSpan, PromptImages
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler_options import SchedulerOptions

PLACEHOLDER, TEXT = 99, 7
EDGE, LARGEST = 32, 40  # tokens: of a chunk's end, and of the largest image
PATCHES = 4  # of a token
Vector = tuple[bytes, int]  # an image, and which of its vectors


def make_item(mark: int, num_tokens: int) -> MediaItem:
    return MediaItem(bytes([mark, num_tokens]) * 16, b"", (1, PATCHES, num_tokens), num_tokens)


def make_request(
    name: str, parts: Sequence[tuple[int, int]], *, has_ends: bool = False, max_tokens: int = 3
) -> Request:
    """A prompt of parts: (0, n) is a text, (mark, n) an image of n vectors; `has_ends`: not all its tokens have one."""
    ids: list[int] = []
    items, spans, places = [], [], []
    for mark, count in parts:
        if not mark:
            ids += [TEXT] * count
            continue
        item, start = make_item(mark, count), len(ids)
        for index in range(count):
            places.append(len(ids))
            ids += [PLACEHOLDER, TEXT] if has_ends and index % 2 and index + 1 < count else [PLACEHOLDER]
        items.append(item)
        spans.append(MediaSpan(start, len(ids) - start, item.digest, item.grid))
    shifts = np.arange(3 * spans[-1].end, dtype=np.int32).reshape(3, -1) + 1 if spans else None
    images = PromptImages(tuple(items), tuple(spans), np.array(places, np.int32), shifts, -5) if spans else None
    return Request(name, tuple(ids), SamplingParams(max_tokens=max_tokens), images=images)


def make_scheduler(
    *, num_rows: int = 2 * LARGEST, num_pages: int = 60, caches: bool = True, **options: Any
) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=3,
        max_num_batched_tokens=64,
        max_model_len=400,
        max_prefix_updates=60,
        max_image_rows=num_rows,
        max_num_batched_patches=LARGEST * PATCHES,
        max_step_images=2,
        **options,
    )
    pages = PageManager([PageGroup(num_pages)], page_size=8, max_chunk=64, enable_prefix_caching=caches)
    return Scheduler(limits, pages)


class Device:
    """The rows of vectors as plans leave them, and what each chunk reads."""

    def __init__(self) -> None:
        self.rows: dict[int, Vector] = {}
        self.num_written = 0
        self.ends: dict[str, list[int]] = {}  # of chunks, by request

    def run(self, scheduler: Scheduler, plan: StepPlan) -> None:
        assert sum(write.item.num_patches for write in plan.image_writes) <= LARGEST * PATCHES
        for write in plan.image_writes:
            assert len(set(write.rows)) == write.item.num_tokens
            self.rows |= {row: (write.item.digest, index) for index, row in enumerate(write.rows)}
            self.num_written += 1
        for chunk in plan.chunks:
            request = scheduler.batch.by_ticket[chunk.ticket].request
            self.ends.setdefault(request.request_id, []).append(chunk.end)
            wanted = self._list_vectors(request)[chunk.start : chunk.end]
            found: list[Vector | None] = [None] * len(wanted)
            if chunk.images is not None:
                for place, row in zip(chunk.images.places, chunk.images.rows, strict=True):
                    found[place] = self.rows[row]
                self._check_shifts(request, chunk.start, chunk.end, chunk.images.shifts)
            assert found == wanted

    def _list_vectors(self, request: Request) -> list[Vector | None]:
        vectors: list[Vector | None] = [None] * 1000
        images = request.images
        if images is not None:
            own = [(item.digest, index) for item in images.items for index in range(item.num_tokens)]
            for place, vector in zip(images.places.tolist(), own, strict=True):
                vectors[place] = vector
        return vectors

    def _check_shifts(self, request: Request, start: int, end: int, shifts: tuple[int, ...]) -> None:
        assert request.images is not None and request.images.shifts is not None
        padded = np.zeros((3, 1000), np.int32)
        padded[:, : request.images.shifts.shape[1]] = request.images.shifts
        assert shifts == tuple(padded[:, start:end].ravel().tolist())


def serve(scheduler: Scheduler, requests: Sequence[Request], device: Device | None = None) -> Device:
    device = device or Device()
    for request in requests:
        scheduler.add(request)
    for _ in range(600):
        plan = scheduler.plan()
        if plan is None:
            assert not scheduler.has_unfinished
            return device
        device.run(scheduler, plan)
        scheduler.commit(plan, StepOutputs([TEXT] * plan.num_rows))
        scheduler.pages.check()
    raise AssertionError("no end")


PARTS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, LARGEST)), min_size=1, max_size=5)


@given(st.lists(st.tuples(PARTS, st.booleans()), min_size=1, max_size=6), st.integers(LARGEST, 3 * LARGEST))
def test_each_chunk_reads_its_own_images(prompts: list[tuple[list[tuple[int, int]], bool]], num_rows: int) -> None:
    requests = [make_request(f"r{index}", parts, has_ends=ends) for index, (parts, ends) in enumerate(prompts)]
    scheduler = make_scheduler(num_rows=num_rows)
    serve(scheduler, requests)


def test_preempted_prompts_read_their_images_again() -> None:
    """Answers take the pages of the younger prompt; by then another image has taken the rows of its own."""
    parts = [[(0, 8), (mark, 30), (0, 70)] for mark in (1, 2, 3)]
    requests = [make_request(f"r{index}", each, max_tokens=80) for index, each in enumerate(parts)]
    scheduler = make_scheduler(num_rows=LARGEST, num_pages=44, caches=False)
    device = serve(scheduler, requests)
    assert scheduler.counts.num_preemptions and device.num_written > 3


def test_a_hit_may_end_inside_an_image() -> None:
    """The second prompt goes on behind 32 tokens, of which 16 are the image's, whose other vectors it reads."""
    prompts = [[(0, 16), (1, 40), (mark, 8)] for mark in (2, 3)]
    scheduler, device = make_scheduler(), Device()
    for index, parts in enumerate(prompts):
        serve(scheduler, [make_request(f"r{index}", parts)], device)
    assert scheduler.counts.prefix_hits == 32 and device.num_written == 3


@pytest.mark.parametrize(("num_rows", "tokens"), [(0, 4), (20, 30), (200, LARGEST + 1)])
def test_an_image_that_no_step_can_compute_is_refused(num_rows: int, tokens: int) -> None:
    scheduler = make_scheduler(num_rows=num_rows)
    with pytest.raises(InvalidRequestError, match=rf"images\[1\]: has {PATCHES * tokens} patches and {tokens} tokens"):
        scheduler.add(make_request("a", [(1, 0), (2, tokens)]))
    assert not scheduler.has_unfinished


def test_an_image_that_comes_again_is_not_computed_again() -> None:
    scheduler = make_scheduler()
    parts = [(0, 8), (3, 20), (0, 9)]
    device = serve(scheduler, [make_request("a", parts), make_request("b", [(0, 3), *parts])])
    assert device.num_written == 1, "other pages, the same rows"


def test_the_device_has_lost_them() -> None:
    scheduler = make_scheduler()
    first = serve(scheduler, [make_request("a", [(3, 20), (0, 9)])])
    scheduler.requeue_running()
    second = serve(scheduler, [make_request("b", [(3, 20), (0, 9)])])
    assert (first.num_written, second.num_written) == (1, 1)


def test_a_chunk_ends_in_front_of_an_image_that_must_wait() -> None:
    """Two images are more patches than a step may have; the cut is at an edge in front of the second."""
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [(0, 2), (1, LARGEST), (2, 10), (0, 5)]))
    plan = scheduler.plan()
    assert plan is not None and [chunk.end for chunk in plan.chunks] == [EDGE] and len(plan.image_writes) == 1
    after = scheduler.plan()
    assert after is not None and after.chunks[0].is_last
    assert [write.item.num_tokens for write in after.image_writes] == [10]
    assert plan.has_images and after.has_images


def test_times_of_steps_behind_a_tower_say_nothing_of_others() -> None:
    """A limit of a step's time would else make all prompts wait for chunks that are fast without images."""
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [(1, 10), (0, 2)]))
    scheduler.add(make_request("b", [(0, 12)]))
    seen = scheduler.plan()
    assert seen is not None and seen.image_writes
    scheduler.add_time(seen, 2.5)
    assert (scheduler.times.estimate(seen.num_tokens), scheduler.counts.tower_step_seconds) == (0.0, 2.5)
    scheduler.add(make_request("c", [(0, seen.num_tokens)]))
    plain = scheduler.plan()
    assert plain is not None and not plain.image_writes
    scheduler.add_time(plain, 0.5)
    assert (scheduler.times.estimate(plain.num_tokens), scheduler.counts.tower_step_seconds) == (0.5, 2.5)


def test_one_token_in_front_of_an_image_needs_a_program_that_reads_images() -> None:
    """Its position is not that of a text of this row; behind the last image any program will do."""
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [(1, 31), (0, 2)]))
    plan = scheduler.plan()
    assert plan is not None and plan.has_images and plan.new_rows[0].rope_delta == -5
    scheduler.commit(plan, StepOutputs([TEXT]))
    decoded = scheduler.plan()
    assert decoded is not None and decoded.decode_rows and not decoded.has_images


def test_pages_are_shared_by_the_same_image_only() -> None:
    scheduler = make_scheduler()
    cached = []
    for index, mark in enumerate((1, 1, 2)):
        request = make_request(f"r{index}", [(0, 16), (mark, 30), (0, 30)])
        (sequence,) = scheduler.add(request)
        while (plan := scheduler.plan()) is not None:
            scheduler.commit(plan, StepOutputs([TEXT] * plan.num_rows))
        cached.append(sequence.num_cached_tokens)
    assert cached == [0, 64, 0], "the third shares 16 tokens of text, less than the grid of 32"


def test_the_place_of_an_image_is_part_of_its_pages() -> None:
    """The same ids and images, where another token of the run of placeholders begins the second."""
    scheduler = make_scheduler()
    (first,) = scheduler.add(make_request("a", [(1, 20), (1, 24), (0, 20)]))
    (other,) = scheduler.add(make_request("b", [(1, 24), (1, 20), (0, 20)]))
    while (plan := scheduler.plan()) is not None:
        scheduler.commit(plan, StepOutputs([TEXT] * plan.num_rows))
    assert first.token_ids[:64] == other.token_ids[:64] and set(first.pages.keys).isdisjoint(other.pages.keys)


def test_decoding_rows_are_in_each_step_beside_100_images() -> None:
    """So their longest gap is one step, and the patches of one tower program in front of it (`Device.run`)."""
    scheduler, device = make_scheduler(num_pages=140), Device()
    decoding = [Request(name, (TEXT,) * 40, SamplingParams(max_tokens=330)) for name in ("a", "b")]
    for request in decoding:
        scheduler.add(request)
    for step in range(330):
        if step >= 2 and step < 102:
            scheduler.add(make_request(f"r{step}", [(0, 5), (step, LARGEST), (0, 5)], max_tokens=1))
        plan = scheduler.plan()
        assert plan is not None
        assert step < 2 or len(plan.decode_rows) == 2
        device.run(scheduler, plan)
        scheduler.commit(plan, StepOutputs([TEXT] * plan.num_rows))
    assert device.num_written == 100


@given(
    prompts=st.lists(st.tuples(PARTS, st.integers(0, 9)), min_size=1, max_size=6),
    num_pages=st.integers(40, 80),
    sizes=st.sampled_from([(), (16, 32, 64)]),
    threshold=st.sampled_from([0, 32]),
)
@example(prompts=[([(1, LARGEST)], 25)], num_pages=40, sizes=(), threshold=0)  # the last edge in reach is in the image
def test_no_chunk_cuts_an_image_that_must_be_whole(
    prompts: list[tuple[list[tuple[int, int]], int]], num_pages: int, sizes: tuple[int, ...], threshold: int
) -> None:
    """A step has room for the largest one beside all rows, and shares of it have not; every prompt is answered."""
    scheduler = make_scheduler(
        num_pages=num_pages,
        whole_image_tokens=LARGEST,
        token_sizes=sizes,
        options=SchedulerOptions(long_prefill_token_threshold=threshold),
    )
    requests = [
        make_request(str(index), [(0, first), *[each for part in parts for each in (part, (0, 1))]])
        for index, (parts, first) in enumerate(prompts)
    ]
    device = serve(scheduler, requests)
    for request in requests:
        images = request.images
        for span in () if images is None else images.spans:
            assert not any(span.start < end < span.end for end in device.ends[request.request_id])
    assert device.ends.keys() == {request.request_id for request in requests}


def test_a_chunk_ends_in_front_of_an_image_or_behind_it() -> None:
    parts = [(0, 40), (1, 30), (0, 30), (2, 25), (0, 35)]  # images from 40 to 70, and from 100 to 125
    for whole, ends in ((0, [64, 128, 160]), (LARGEST, [40, 96, 160])):
        options = SchedulerOptions(long_prefill_token_threshold=0)
        scheduler = make_scheduler(whole_image_tokens=whole, options=options)
        assert serve(scheduler, [make_request("a", parts, max_tokens=1)]).ends["a"] == ends
