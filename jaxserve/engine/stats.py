"""Statistics of a running engine: counters and pages from any thread, rows on the engine's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.core.runtime.step_counts import STEP_TOKEN_BOUNDS
from jaxserve.core.scheduler.scheduler_counts import SchedulerCounts
from jaxserve.engine.engine import Engine
from jaxserve.engine.engine_counts import AttentionStats
from jaxserve.request import ServiceTier


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The pages of one KV pool; pages neither used nor cached are free."""

    total: int  # without the null page
    used: int  # owned by running sequences
    cached: int  # without an owner, content known


@dataclass(frozen=True, slots=True)
class HostTierStats:
    """KV pages in host memory; all 0 without a host tier."""

    total: int = 0  # pages of all groups
    cached: int = 0  # those with known content
    hits: int = 0  # prompt tokens whose KV was loaded
    misses: int = 0  # prompt tokens looked up and found in neither tier
    evictions: int = 0  # pages whose content was dropped
    failures: int = 0  # copies that failed
    bytes_saved: int = 0
    bytes_loaded: int = 0


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Drafts that were verified; all 0 without `speculative_config`."""

    num_drafts: int = 0  # chains: one for each row with drafts in a step
    num_tokens: int = 0
    num_accepted: int = 0
    accepted_by_position: tuple[int, ...] = ()  # in the chain


@dataclass(frozen=True, slots=True)
class ImageStats:
    """Images of prompts; all 0 if the model is served for text."""

    num_admitted: int = 0  # counted when a request is first admitted
    page_hits: int = 0  # those among them that lay in pages of the prefix cache
    row_hits: int = 0  # others, whose vectors the device had
    num_computed: int = 0  # by the tower
    num_computed_patches: int = 0
    step_seconds: float = 0.0  # of steps in front of which the tower ran, with its own


@dataclass(frozen=True, slots=True)
class StepTokens:
    """A histogram of steps by tokens computed, without padding."""

    bounds: tuple[int, ...]  # inclusive upper bounds
    counts: tuple[int, ...]  # one more than `bounds`, for larger steps
    total: int  # tokens of all steps


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """The slots of adapters, and the names of those that requests have."""

    num_slots: int  # 0: the engine has no adapters
    num_used: int  # slots that hold an adapter
    running: tuple[str, ...]
    waiting: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and the current load."""

    num_running: int  # sequences with a row
    num_waiting: int  # sequences that wait for a row, preempted ones included
    num_queued_tokens: int  # prompt tokens that wait for their first admission
    num_waiting_by_tenant: Mapping[str, int]  # the same by tenant's name
    num_preemptions: int
    num_tier_misses: int  # steps that took longer than `priority_itl_ms` while a row of that tier decoded
    prefix_queries: int  # prompt tokens looked up in the prefix cache
    prefix_hits: int  # prompt tokens found there
    snapshot_misses: int  # prompt tokens whose pages were there, but lay behind the last snapshot of a recurrent state
    num_snapshots: int  # of recurrent states, that are cached
    num_steps: int
    steps: Mapping[str, int]  # by bucket
    useful_tokens: int
    padded_tokens: int  # padding only
    step_tokens: StepTokens
    num_faults: int  # steps that failed on the device
    wait_seconds: float  # the host waited for the device
    busy_seconds: float  # the host worked between such waits
    num_compiles: int  # XLA compilations of this process since the engine was ready
    num_programs: int
    pools: tuple[PoolStats, ...]
    host: HostTierStats
    attention: AttentionStats | None  # None: a test's device without attention
    drafts: DraftStats
    images: ImageStats
    adapters: AdapterStats


@dataclass(frozen=True, slots=True)
class RowStats:
    """One running sequence."""

    row: int
    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int  # planned; the device may still be computing the last
    num_tokens: int  # known to the host
    is_prefilling: bool
    priority: int
    service_tier: ServiceTier
    tenant: str  # its name; empty: none


def read_stats(engine: Engine) -> EngineStats:
    """Returns the engine's counters. Safe from any thread: only numbers and lengths are read."""
    scheduler, runner, counts = engine.scheduler, engine.runner, engine.counts
    steps, device = dict(runner.counts.steps), runner.counts
    by_tokens = tuple(device.num_by_tokens)
    return EngineStats(
        num_running=len(scheduler.batch),
        num_waiting=len(scheduler.waiting),
        num_queued_tokens=scheduler.waiting.num_new_tokens,
        num_waiting_by_tenant={name: load.num_waiting for name, load in list(scheduler.waiting.by_tenant.items())},
        num_preemptions=scheduler.counts.num_preemptions,
        num_tier_misses=scheduler.counts.num_tier_misses,
        prefix_queries=scheduler.counts.prefix_queries,
        prefix_hits=scheduler.counts.prefix_hits,
        snapshot_misses=scheduler.counts.snapshot_misses,
        num_snapshots=scheduler.pages.snapshots.num_cached,
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
        host=_read_host(engine),
        attention=engine.attention,
        drafts=_read_drafts(scheduler.counts),
        images=_read_images(engine),
        adapters=AdapterStats(
            len(scheduler.adapters.held),
            sum(generation > 0 for generation in list(scheduler.adapters.held.values())),
            tuple(sorted(scheduler.batch.list_adapters())),
            tuple(sorted(scheduler.waiting.list_adapters())),
        ),
    )


def _read_drafts(counts: SchedulerCounts) -> DraftStats:
    by_position = tuple(counts.num_accepted_by_position)
    return DraftStats(counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens, by_position)


def _read_images(engine: Engine) -> ImageStats:
    counts, tower = engine.scheduler.counts, engine.runner.counts
    hits = counts.image_page_hits, counts.image_row_hits
    return ImageStats(counts.num_images, *hits, tower.tower_images, tower.tower_patches, counts.tower_step_seconds)


def _read_host(engine: Engine) -> HostTierStats:
    tier, counts, copies = engine.scheduler.pages.host, engine.scheduler.counts, engine.runner.counts
    total = sum(pool.num_slots for pool in tier.pools)
    return HostTierStats(
        total=total,
        cached=sum(pool.num_cached for pool in tier.pools) if tier.is_on else 0,
        hits=counts.host_hits,
        misses=counts.prefix_queries - counts.prefix_hits if total else 0,
        evictions=tier.num_evictions,
        failures=tier.num_failures,
        bytes_saved=copies.bytes_saved,
        bytes_loaded=copies.bytes_loaded,
    )


def read_rows(engine: Engine) -> list[RowStats]:
    """Returns the running sequences, sorted by row. Call it on the engine's thread only."""
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
            sequence.request.service_tier,
            sequence.request.tenant.name,
        )
        for sequences, is_prefilling in ((batch.prefilling, True), (batch.decoding, False))
        for sequence in sequences
    ]
    return sorted(found, key=lambda each: each.row)


def read_page_map(engine: Engine, max_cells: int = 2048) -> str:
    """Returns the states of the largest pool's pages, one digit per cell; see `PagePool.draw`.

    Safe from any thread, though cells may be read at slightly different times.
    """
    pool = max(engine.scheduler.pages.pools, key=lambda pool: pool.num_pages)
    return pool.draw(max_cells)
