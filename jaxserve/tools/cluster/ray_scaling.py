"""The number of replicas that Ray Serve keeps: as many as let no prompt wait longer than a target.

Ray pickles this module by value and runs it in its controller, so it imports nothing of jaxserve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MOST_SECONDS = 3600.0  # reported for a queue that does not move at all
_ROW_SHARE = 0.8  # of the rows, in use, above which another replica is kept


class QueueTimePolicy:
    """Chooses the number of replicas by `record_autoscaling_stats` of all of them.

    The work that waits is the sum of the replicas' queue times, in seconds of one replica; divided by the target it is
    the number of replicas that admit all of it in time. Rows in use keep replicas, too: what decodes has no queue.

    Args:
        target_queue_s: the longest that a prompt should wait for its first step.
    """

    def __init__(self, target_queue_s: float) -> None:
        self._target = target_queue_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Returns the number of replicas; Ray applies its bounds and delays."""
        found: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        waiting = sum(found.get("queue_seconds", {}).values())
        rows = sum(found.get("row_share", {}).values())
        wanted = max(1, math.ceil(waiting / self._target), math.ceil(rows / _ROW_SHARE))
        return wanted, {}
