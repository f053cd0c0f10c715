"""Small engines over the fake device."""

from __future__ import annotations

import time
from collections.abc import Callable

from jaxserve.core.pages import PageGroup, PageManager
from jaxserve.core.scheduler import Scheduler, SchedulerLimits
from jaxserve.engine.engine import Engine
from jaxserve.request import Request, RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler_options import SchedulerOptions
from tests.fake_device import FakeDevice


def make_engine(
    *,
    clock: Callable[[], float] = time.monotonic,
    queue: tuple[int | None, int | None] = (None, None),
    **changes: object,
) -> tuple[Engine, FakeDevice]:
    options: dict = {"num_pages": 40, "rows": 4, "budget": 64, "caching": True, "overlap": True, "deterministic": False}
    options |= {"edge": 32, "num_snapshots": None}  # a number: rows have recurrent states, with so many snapshots
    options |= {"image_rows": 0}  # vectors of images that the device holds; it computes them all in one step
    options |= changes
    groups = [PageGroup(options["num_pages"])]
    edge, num_snapshots = options["edge"], options["num_snapshots"]
    pages = PageManager(
        groups,
        page_size=32,
        max_chunk=options["budget"],
        enable_prefix_caching=options["caching"],
        num_snapshots=num_snapshots or 0,
        hit_grid=edge,
    )
    limits = SchedulerLimits(
        max_num_seqs=options["rows"],
        max_num_batched_tokens=options["budget"],
        max_model_len=512,
        max_prefix_updates=16,
        keeps_states=num_snapshots is not None,
        max_image_rows=options["image_rows"],
        max_num_batched_patches=4 * options["image_rows"],
        max_step_images=options["rows"],
        chunk_edges=(edge,),
        snapshot_grid=edge if num_snapshots else 0,
        options=SchedulerOptions(
            max_num_queued_reqs=queue[0], max_num_queued_tokens=queue[1], deterministic=options["deterministic"]
        ),
    )
    device = FakeDevice(groups, page_size=32)
    device.keeps_states = num_snapshots is not None
    return Engine(Scheduler(limits, pages, clock), device, overlap=options["overlap"]), device


def run(engine: Engine, requests: list[Request]) -> dict[str, RequestOutput]:
    for request in requests:
        engine.add_request(request)
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return done


def greedy(request_id: str, prompt: range | list[int], max_tokens: int, **changes: object) -> Request:
    return Request(request_id, tuple(prompt), SamplingParams(temperature=0, max_tokens=max_tokens), **changes)  # type: ignore[arg-type]
