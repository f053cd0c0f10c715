"""Counters of an engine, all different, for tests of what shows them."""

from __future__ import annotations

from typing import Any

from jaxserve.core.runtime.step_counts import STEP_TOKEN_BOUNDS
from jaxserve.engine.engine_counts import AttentionStats
from jaxserve.engine.stats import (
    AdapterStats,
    DraftStats,
    EngineStats,
    HostTierStats,
    ImageStats,
    PoolStats,
    StepTokens,
)


def make_stats(**changes: Any) -> EngineStats:
    """Returns the counters after a few steps."""
    values: dict[str, Any] = {
        "num_running": 3,
        "num_waiting": 2,
        "num_queued_tokens": 77,
        "num_waiting_by_tenant": {"": 1, "crawler": 7},
        "num_preemptions": 4,
        "num_tier_misses": 11,
        "prefix_queries": 1000,
        "prefix_hits": 250,
        "snapshot_misses": 192,
        "num_snapshots": 17,
        "host": HostTierStats(
            total=400, cached=100, hits=31, misses=750, evictions=33, failures=5, bytes_saved=35000, bytes_loaded=36000
        ),
        "num_steps": 6,
        "steps": {"8x8": 5, "512x32": 1},
        "useful_tokens": 9016,
        "padded_tokens": 984,
        "step_tokens": StepTokens(STEP_TOKEN_BOUNDS, (4, 0, 1, *[0] * (len(STEP_TOKEN_BOUNDS) - 3), 1), 9016),
        "num_faults": 1,
        "wait_seconds": 8.5,
        "busy_seconds": 1.5,
        "num_compiles": 0,
        "num_programs": 14,
        "attention": AttentionStats("xla", 'portable attention: "gpu" failed', True),
        "drafts": DraftStats(600, 2400, 1301, (550, 400, 250, 101)),
        "images": ImageStats(61, 13, 19, 37, 4736, 8.75),
        "adapters": AdapterStats(2, 1, ("a",), ("b", "c")),
        "pools": (PoolStats(10, 9, 1), PoolStats(100, 25, 30)),
    }
    return EngineStats(**(values | changes))
