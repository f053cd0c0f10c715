"""An engine as its server sees it."""

from __future__ import annotations

from jaxserve.engine.build import ReadyEngine
from jaxserve.engine.stats import QueuePace, read_page_map


class EngineView:
    """What a server shows of an engine that runs, and asks before it takes a request. Safe from any thread."""

    def __init__(self, ready: ReadyEngine) -> None:
        self._ready = ready
        self._pace = QueuePace()

    def draw_pages(self) -> str:
        """Returns a picture of the largest KV pool, one digit a cell; see `read_page_map`."""
        return read_page_map(self._ready.engine)

    def describe_cache(self) -> dict[str, object]:
        """Returns how the KV cache is laid out: its page size, pages, dtype, and whether prefixes are cached."""
        shapes = self._ready.shapes
        return {
            "page_size": shapes.config.cache.page_size,
            "num_pages": max(self._ready.plan.num_pages),
            "dtype": shapes.spec.dtype,
            "enable_prefix_caching": shapes.config.cache.enable_prefix_caching,
        }

    def bound_queue(self, most: int) -> None:
        """Lets at most so many sequences wait, unless an option said how many. To be called before any request."""
        self._ready.engine.scheduler.door.bound_sequences(most)

    def refuse_if_full(self, priority: int) -> None:
        """Raises QueueFullError when the queue has no room for a request of this priority."""
        self._ready.engine.scheduler.door.refuse_if_full(priority)

    def seconds_to_admit(self) -> float:
        """Returns when all that waits now will have begun, at the present pace. Only one thread may ask."""
        return self._pace.seconds_to_admit(self._ready.engine)
