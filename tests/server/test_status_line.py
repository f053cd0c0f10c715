"""The line every few seconds, from two readings of counters."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from jaxserve.engine.stats import DraftStats
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.metrics import ServerMetrics
from jaxserve.server.status_line import StatusLine, format_status
from tests.server.engine_stats import make_stats

if TYPE_CHECKING:
    from jaxserve.engine.stats import EngineStats

LATENCY = {"ttft_ms": {"p50": 153.4, "p99": 900.0}, "itl_ms": {"p50": 12.34, "p99": 20.0}}
NO_LATENCY = {"ttft_ms": {"p50": None, "p99": None}, "itl_ms": {"p50": None, "p99": None}}


def test_line_of_a_busy_engine() -> None:
    before = make_stats()
    after = replace(before, num_running=12, num_waiting=3, prefix_queries=2000, prefix_hits=1000, useful_tokens=19016)
    after = replace(after, padded_tokens=before.padded_tokens + 2500)
    line = format_status(before, after, 10.0, prompt_tokens=12345, output_tokens=4567, max_rows=32, latency=LATENCY)
    assert line == (
        "rows 12/32  waiting 3  KV 25.0%  prompt 1,234 tok/s  output 457 tok/s  prefix hits 75%  padding 20%  "
        "TTFT 153 ms  ITL 12.3 ms"
    )


def test_line_of_an_engine_that_drafts() -> None:
    before = make_stats()
    after = replace(before, drafts=DraftStats(before.drafts.num_drafts + 40, 9999, before.drafts.num_accepted + 90))
    line = format_status(before, after, 10.0, prompt_tokens=0, output_tokens=0, max_rows=32, latency=LATENCY)
    assert "  padding -  accepted length 3.25  TTFT 153 ms" in line


def test_line_without_anything_to_measure() -> None:
    stats = make_stats()
    line = format_status(stats, stats, 0.0, prompt_tokens=0, output_tokens=0, max_rows=32, latency=NO_LATENCY)
    assert line.endswith("prompt - tok/s  output - tok/s  prefix hits -  padding -  TTFT -  ITL -")


class Engine:
    """What the counters are read from."""

    def __init__(self) -> None:
        self.stats: EngineStats = make_stats(num_running=0, num_waiting=0)

    def __call__(self) -> EngineStats:
        return self.stats


def test_only_when_something_happened() -> None:
    engine, metrics, now = Engine(), ServerMetrics("demo"), iter(range(0, 1000, 10))
    line = StatusLine(metrics, engine, max_rows=8, clock=lambda: float(next(now)))
    idle = engine.stats
    assert line.tick() is None, "there is nothing to compare with yet"
    assert line.tick() is None, "nothing happened"
    tally = metrics.find_tally(Request("r", (1,), SamplingParams()))
    metrics.observe_first_token(tally, 0.2, 50)
    metrics.observe_gap(tally, 0.02, 99)
    engine.stats = replace(idle, num_steps=idle.num_steps + 9)
    first = line.tick()
    assert first is not None and "rows 0/8  waiting 0" in first
    assert "prompt 5 tok/s  output 10 tok/s" in first
    assert line.tick() is None, "nothing happened since"
    engine.stats = replace(engine.stats, num_waiting=4)
    second = line.tick()
    assert second is not None and "waiting 4" in second, "requests that wait for nothing are worth seeing"
    assert "prompt 0 tok/s" in second


def test_it_is_logged_until_it_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.stats = make_stats()
    line = StatusLine(ServerMetrics("demo"), engine, max_rows=8, interval=0.001)

    async def watch() -> None:
        task = asyncio.ensure_future(line.run())
        while not caplog.records:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with caplog.at_level(logging.INFO, "jaxserve.status"):
        asyncio.run(watch())
    assert "rows 3/8" in caplog.records[0].getMessage()


def test_interval_0_is_silence() -> None:
    asyncio.run(StatusLine(ServerMetrics("demo"), Engine(), max_rows=8, interval=0).run())
