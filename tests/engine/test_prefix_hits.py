"""Prefix hits on real traffic, against an oracle: a least-recently-used cache of equal size that never makes mistakes.

The traces are Mooncake's (Qin et al. 2024): a prompt is a list of numbered blocks of 512 tokens, which are pages here.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from jaxserve.core.pages import PageGroup, PageManager
from jaxserve.core.runtime.buckets import Bucket
from jaxserve.core.runtime.step_counts import StepCounts
from jaxserve.core.scheduler import Scheduler, SchedulerLimits, StepOutputs, StepPlan
from jaxserve.engine.engine import Engine
from jaxserve.request import Request
from jaxserve.sampling_params import OutputKind, SamplingParams

TRACES = Path(__file__).parents[3] / "shared" / "traces"
BLOCK = 512  # tokens of a trace's block
PAGE = 32  # tokens that stand for a block: keys are chained, so more would say nothing more
DEVICE_PAGES = 1500  # KV of an 8B model on a device of 141 GB, in blocks


class NoDevice:
    """Gives every row token 0 at once, and does nothing about copies."""

    num_programs, num_compiles = 1, 0

    def __init__(self) -> None:
        self.counts = StepCounts()
        self.num_loads = 0

    def start(self, plan: StepPlan) -> NoStep:
        self.counts.count(Bucket(plan.num_tokens, plan.num_rows), plan.num_tokens)
        self.num_loads += len(plan.page_loads)
        return NoStep(plan.num_rows)

    def reset(self) -> None:
        pass


@dataclass
class NoStep:
    num_rows: int

    def sample(self, mask: object = None) -> NoStep:
        del mask
        return self

    def result(self) -> StepOutputs:
        return StepOutputs([0] * self.num_rows)


def read_trace(name: str, count: int) -> Iterator[tuple[list[int], int]]:
    """Yields the full blocks of each prompt, and the tokens in its last page."""
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    with path.open() as lines:
        for _, line in zip(range(count), lines, strict=False):
            request = json.loads(line)
            num_full = request["input_length"] // BLOCK
            yield request["hash_ids"][:num_full], max(1, request["input_length"] % BLOCK * PAGE // BLOCK)


class Oracle:
    """A cache of `size` blocks, the least recently used of which is replaced; hits are prefixes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.hits = 0

    def serve(self, blocks: list[int]) -> None:
        for block in blocks:
            if block not in self._blocks:
                break
            self.hits += 1
        for block in reversed(blocks):  # a tail goes before its head
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._size:
            self._blocks.popitem(last=False)


@pytest.mark.parametrize("name", ["mooncake_conversation.jsonl", "mooncake_synthetic.jsonl"])
@pytest.mark.parametrize("host", [0, 4])
@pytest.mark.parametrize("count", [3000, pytest.param(10**5, marks=pytest.mark.thorough)])
def test_hits_are_nearly_those_of_an_oracle_of_equal_size(name: str, host: int, count: int) -> None:
    pages = PageManager(
        [PageGroup(DEVICE_PAGES + 1)],
        page_size=PAGE,
        max_chunk=16384,
        enable_prefix_caching=True,
        num_host_slots=host * DEVICE_PAGES,
        max_copies=16384 // PAGE,
    )
    limits = SchedulerLimits(
        max_num_seqs=4, max_num_batched_tokens=16384, max_model_len=16384, max_prefix_updates=16384
    )
    device = NoDevice()
    engine = Engine(Scheduler(limits, pages), device)
    oracle = Oracle((1 + host) * DEVICE_PAGES)
    for index, (blocks, rest) in enumerate(read_trace(name, count)):
        tokens = [block for block in blocks for _ in range(PAGE)] + [-1 - index] * rest
        params = SamplingParams(max_tokens=1, output_kind=OutputKind.FINAL_ONLY)
        engine.add_request(Request(str(index), tuple(tokens), params))
        oracle.serve(blocks)
        while len(engine.scheduler.waiting) > 2:
            engine.step()
    while engine.has_unfinished:
        engine.step()
    hits = engine.scheduler.counts.prefix_hits / PAGE
    print(f"{name}, host tier {host}x: {hits:.0f} hits, oracle {oracle.hits}: {hits / oracle.hits:.4f}")
    assert hits >= 0.98 * oracle.hits > 1000
    assert (device.num_loads > 100) == (host > 0)
    pages.check()
