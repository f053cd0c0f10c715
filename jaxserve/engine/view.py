"""The server's view of an engine."""

from __future__ import annotations

from jaxserve.engine.build import ReadyEngine
from jaxserve.engine.stats import read_page_map
from jaxserve.request import Rank, Tenant


class EngineView:
    """What a server shows of an engine, and checks before it takes a request. Any thread may use it."""

    def __init__(self, ready: ReadyEngine) -> None:
        self._ready = ready

    def draw_pages(self) -> str:
        """Returns the states of the largest KV pool's pages, one digit per cell; see `PagePool.draw`."""
        return read_page_map(self._ready.engine)

    def describe_cache(self) -> dict[str, object]:
        """Returns the KV cache's page_size, dtype and enable_prefix_caching, and the pages of each tier.

        `num_pages` are those of the largest pool, `num_host_pages` the host tier's of each KV group. `block_size` and
        `num_gpu_blocks` are vLLM's names, which endpoint pickers read: the pages that requests can have, so without
        the null page that `num_pages` counts.
        """
        shapes, num_pages = self._ready.shapes, max(self._ready.plan.num_pages)
        return {
            "page_size": shapes.config.cache.page_size,
            "num_pages": num_pages,
            "block_size": shapes.config.cache.page_size,
            "num_gpu_blocks": num_pages - 1,
            "num_host_pages": max(pool.num_slots for pool in self._ready.engine.scheduler.pages.host.pools),
            "dtype": shapes.specs[0].dtype,
            "enable_prefix_caching": shapes.config.cache.enable_prefix_caching,
        }

    def bound_queue(self, most: int, seconds: float) -> None:
        """Limits the queue. Call it before any request.

        Args:
            most: sequences that may wait, unless an option sets the limit.
            seconds: the longest wait that a request may expect (`QueueAdmission.bound_wait`).
        """
        admission = self._ready.engine.scheduler.queue_admission
        admission.bound_sequences(most)
        admission.bound_wait(seconds)

    def refuse_if_full(self, rank: Rank, tenant: Tenant, *, checks_wait: bool = False) -> None:
        """Raises QueueFullError if the queue has no room for any request of this rank and tenant.

        Args:
            checks_wait: also if such a request would wait too long; its tier must be known.
        """
        admission = self._ready.engine.scheduler.queue_admission
        admission.refuse_if_full(rank, tenant)
        if checks_wait:
            admission.refuse_if_late(rank, tenant)

    def count_idle_rows(self) -> int:
        """Returns how many sequences more would get a row without waiting."""
        scheduler = self._ready.engine.scheduler
        return max(0, scheduler.queue_admission.idle_rows - scheduler.waiting.num_new)

    def seconds_to_admit(self) -> float:
        """Returns the seconds until all that waits now is admitted at the recent pace; see `QueuePace.estimate`."""
        scheduler = self._ready.engine.scheduler
        return scheduler.queue_admission.pace.estimate(scheduler.waiting.num_new)
