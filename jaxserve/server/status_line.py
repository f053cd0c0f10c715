"""The status line: a periodic summary of the engine's work."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxserve.engine.metrics import find_usage
from jaxserve.engine.stats import EngineStats
from jaxserve.server.metrics import ServerMetrics

_log = logging.getLogger("jaxserve.status")
_NOTHING = "-"  # nothing was measured


@dataclass(frozen=True, slots=True)
class _Sample:
    """The counters at one time."""

    time: float
    stats: EngineStats
    prompt_tokens: int
    generation_tokens: int


class StatusLine:
    """Logs the differences between two readings of the counters."""

    def __init__(
        self,
        metrics: ServerMetrics,
        read_stats: Callable[[], EngineStats],
        *,
        max_rows: int,
        interval: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Logs nothing yet.

        Args:
            read_stats: returns the engine's counters.
            max_rows: how many sequences can run at once.
            interval: seconds between lines; 0: there are none.
        """
        self._metrics = metrics
        self._read_stats = read_stats
        self._max_rows = max_rows
        self._interval = interval
        self._clock = clock
        self._before: _Sample | None = None

    async def run(self) -> None:
        """Logs a line after each interval until cancelled."""
        if self._interval <= 0:
            return
        self.tick()
        while True:
            await asyncio.sleep(self._interval)
            if line := self.tick():
                _log.info("%s", line)

    def tick(self) -> str | None:
        """Returns the line for the time since the last call; None when nothing happened."""
        metrics, before = self._metrics, self._before
        after = _Sample(self._clock(), self._read_stats(), metrics.prompt_tokens, metrics.generation_tokens)
        self._before = after
        if before is None or not _is_worth_a_line(before, after):
            return None
        return format_status(
            before.stats,
            after.stats,
            after.time - before.time,
            prompt_tokens=after.prompt_tokens - before.prompt_tokens,
            output_tokens=after.generation_tokens - before.generation_tokens,
            max_rows=self._max_rows,
            latency=metrics.latency_snapshot(),
        )


def _is_worth_a_line(before: _Sample, after: _Sample) -> bool:
    """Whether anything happened, or should have: waiting requests without steps are worth a line."""
    moved = before.stats.num_steps != after.stats.num_steps or before.generation_tokens != after.generation_tokens
    return moved or after.stats.num_running > 0 or after.stats.num_waiting > 0


def format_status(
    before: EngineStats,
    after: EngineStats,
    seconds: float,
    *,
    prompt_tokens: int,
    output_tokens: int,
    max_rows: int,
    latency: Mapping[str, Mapping[str, float | None]],
) -> str:
    """Returns the line for the time between two readings of the engine's counters.

    Args:
        prompt_tokens: prompt tokens of the requests that got their first token in this time.
        output_tokens: tokens generated in this time.
        latency: the result of `ServerMetrics.latency_snapshot`.
    """
    hits = _format_share(after.prefix_hits - before.prefix_hits, after.prefix_queries - before.prefix_queries)
    padded = after.padded_tokens - before.padded_tokens
    padding = _format_share(padded, padded + after.useful_tokens - before.useful_tokens)
    drafts = after.drafts.num_drafts - before.drafts.num_drafts
    accepted = after.drafts.num_accepted - before.drafts.num_accepted
    parts = (
        f"rows {after.num_running}/{max_rows}",
        f"waiting {after.num_waiting}",
        f"KV {find_usage(after):.1%}",
        f"prompt {_format_rate(prompt_tokens, seconds)} tok/s",
        f"output {_format_rate(output_tokens, seconds)} tok/s",
        f"prefix hits {hits}",
        f"padding {padding}",
        *([f"accepted length {1 + accepted / drafts:.2f}"] if drafts else []),
        f"TTFT {_format_milliseconds(latency['ttft_ms']['p50'])}",
        f"ITL {_format_milliseconds(latency['itl_ms']['p50'])}",
    )
    return "  ".join(parts)


def _format_share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole > 0 else _NOTHING


def _format_rate(count: int, seconds: float) -> str:
    return f"{count / seconds:,.0f}" if seconds > 0 else _NOTHING


def _format_milliseconds(value: float | None) -> str:
    if value is None:
        return _NOTHING
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"
