"""What can be seen of a running engine: counters and pages from any thread, rows on the engine's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.engine.counts import AttentionStats
from jaxserve.engine.engine import Engine
from jaxserve.runtime.counts import STEP_TOKEN_BOUNDS

_PACE_WINDOW = 10.0  # seconds with work


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The pages of one KV pool; those neither used nor cached are free."""

    total: int  # without the null page
    used: int  # by sequences that run
    cached: int  # by nobody, with known content


@dataclass(frozen=True, slots=True)
class StepTokens:
    """How many steps computed how many tokens, padding left out."""

    bounds: tuple[int, ...]  # upper ones, inclusive; one more count is for what is above the last
    counts: tuple[int, ...]
    total: int  # tokens of all steps


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and how much is at work now."""

    num_running: int  # sequences with a row
    num_waiting: int  # sequences in line for one, preempted ones included
    num_queued_tokens: int  # of prompts that wait for their first admission
    num_preemptions: int
    prefix_queries: int  # prompt tokens looked up in the prefix cache
    prefix_hits: int  # and found
    num_steps: int
    steps: Mapping[str, int]  # by bucket
    useful_tokens: int
    padded_tokens: int  # computed beside the useful ones, for nobody
    step_tokens: StepTokens
    num_faults: int  # steps that failed on the device
    wait_seconds: float  # of the host for the device
    busy_seconds: float  # of the host between such waits, as long as there was work
    num_compiles: int  # XLA compilations of this process since the engine was ready
    num_programs: int
    pools: tuple[PoolStats, ...]
    attention: AttentionStats | None  # None: the device has none, as a test's


@dataclass(frozen=True, slots=True)
class RowStats:
    """One running sequence."""

    row: int
    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int  # planned ones: the device may still be at the last step's
    num_tokens: int  # known to the host
    is_prefilling: bool
    priority: int


class QueuePace:
    """How fast prompts have left the queue lately, by the time in which there was work. One thread asks."""

    def __init__(self) -> None:
        self._older = self._newer = (0.0, 0)  # (seconds with work, prompt tokens admitted), at least a window apart

    def seconds_to_admit(self, engine: Engine) -> float:
        """Returns when all that waits now will have begun, if it goes on so; infinite when nothing moves."""
        counts, scheduler = engine.counts, engine.scheduler
        now = counts.wait_seconds + counts.busy_seconds, scheduler.counts.num_admitted_tokens
        if now[0] - self._newer[0] >= _PACE_WINDOW:
            self._older, self._newer = self._newer, now
        seconds, tokens = now[0] - self._older[0], now[1] - self._older[1]
        if tokens:
            return scheduler.waiting.num_new_tokens * seconds / tokens
        return math.inf if scheduler.waiting.num_new and seconds >= _PACE_WINDOW else 0.0


def read_stats(engine: Engine) -> EngineStats:
    """Returns the engine's counters. Safe from any thread: only numbers and lengths are read."""
    scheduler, runner, counts = engine.scheduler, engine.runner, engine.counts
    steps, device = dict(runner.counts.steps), runner.counts
    by_tokens = tuple(device.num_by_tokens)
    return EngineStats(
        num_running=len(scheduler.batch),
        num_waiting=len(scheduler.waiting),
        num_queued_tokens=scheduler.waiting.num_new_tokens,
        num_preemptions=scheduler.counts.num_preemptions,
        prefix_queries=scheduler.counts.prefix_queries,
        prefix_hits=scheduler.counts.prefix_hits,
        num_steps=sum(steps.values()),
        steps={str(bucket): count for bucket, count in sorted(steps.items())},
        useful_tokens=device.useful_tokens,
        padded_tokens=device.padded_tokens - device.useful_tokens,
        step_tokens=StepTokens(STEP_TOKEN_BOUNDS, by_tokens, device.useful_tokens),
        num_faults=counts.num_faults,
        wait_seconds=counts.wait_seconds,
        busy_seconds=counts.busy_seconds,
        num_compiles=runner.num_compiles,
        num_programs=runner.num_programs,
        pools=tuple(
            PoolStats(pool.num_pages - 1, pool.num_referenced, pool.num_cached) for pool in scheduler.pages.pools
        ),
        attention=engine.attention,
    )


def read_rows(engine: Engine) -> list[RowStats]:
    """Returns the running sequences by row. To be called on the engine's thread."""
    batch = engine.scheduler.batch
    found = [
        RowStats(
            sequence.row,
            sequence.request.request_id,
            sequence.num_prompt_tokens,
            sequence.num_computed_tokens,
            len(sequence.token_ids),
            is_prefilling,
            sequence.request.priority,
        )
        for sequences, is_prefilling in ((batch.prefilling, True), (batch.decoding, False))
        for sequence in sequences
    ]
    return sorted(found, key=lambda each: each.row)


def read_page_map(engine: Engine, max_cells: int = 2048) -> str:
    """Returns a picture of the largest pool, one digit a cell.

    Safe from any thread: each cell is read at once, though a cell may be later than the one before it.

    0: free, 1: cached, 2: one owner, 3: several owners. Of a cell that stands for several pages, the largest digit.
    """
    pool = max(engine.scheduler.pages.pools, key=lambda pool: pool.num_pages)
    return pool.draw(max_cells)
