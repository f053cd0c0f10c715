"""The report of a simulation: figures of a run, as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from jaxserve.tools.simulation.fleet import FleetRun
from jaxserve.tools.simulation.replica import Timeline

QUANTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Targets:
    """The SLO of a request: both limits, where set, must hold."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None  # mean over the request's tokens

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None

    def are_met(self, timeline: Timeline) -> bool:
        """Returns whether the request was answered in time; a refused one was not."""
        if timeline.error is not None or timeline.ttft is None:
            return False
        is_early = self.ttft_ms is None or 1e3 * timeline.ttft <= self.ttft_ms
        return is_early and (self.tpot_ms is None or 1e3 * (timeline.tpot or 0.0) <= self.tpot_ms)

    def __str__(self) -> str:
        limits = (("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms))
        return " and ".join(f"{name} <= {limit:g} ms" for name, limit in limits if limit is not None)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Quantiles of a time, in milliseconds; NaN if nothing was measured."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float] | np.ndarray) -> Distribution:
        values = np.fromiter(seconds, float) if not isinstance(seconds, np.ndarray) else seconds
        if not len(values):
            return cls(math.nan, math.nan, math.nan)
        return cls(*(1e3 * float(value) for value in np.percentile(values, QUANTILES)))

    def __str__(self) -> str:
        return " / ".join(map(_show, (self.p50, self.p90, self.p99)))


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run. Rates are per second of virtual time, from the first arrival to the last token."""

    label: str
    num_replicas: int
    num_requests: int
    num_refused: int
    seconds: float
    request_rate: float
    prompt_token_rate: float
    output_token_rate: float
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    slo: str
    slo_share: float | None  # of all requests; None without an SLO
    goodput: float | None  # requests per second that met the SLO
    prefix_hit_rate: float  # of the prompt tokens looked up
    host_hit_rate: float  # those loaded from the host tier
    num_preemptions: int
    padding_share: float  # of the tokens computed
    device_busy_share: float
    num_steps: int
    num_devices: int  # simulated
    num_devices_needed: int | None = None  # for the SLO

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON, where NaN is null."""
        values: dict[str, Any] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, Distribution):
                quantiles = {f"p{q}": getattr(value, f"p{q}") for q in QUANTILES}
                value = {key: None if math.isnan(each) else each for key, each in quantiles.items()}
            values[name] = value
        return values


def summarize(
    run: FleetRun, targets: Targets, *, label: str, devices_per_replica: int, num_devices_needed: int | None = None
) -> Summary:
    """Returns the figures of a run."""
    timelines, end = run.timelines, max(run.end, 1e-9)
    served = [timeline for timeline in timelines if timeline.token_times]
    met = sum(map(targets.are_met, timelines)) if targets else None
    counts = [replica.scheduler.counts for replica in run.replicas]
    steps = [replica.device.counts for replica in run.replicas]
    padded, useful = sum(each.padded_tokens for each in steps), sum(each.useful_tokens for each in steps)
    queries = sum(each.prefix_queries for each in counts)
    return Summary(
        label=label,
        num_replicas=len(run.replicas),
        num_requests=len(timelines),
        num_refused=sum(timeline.error is not None for timeline in timelines),
        seconds=run.end,
        request_rate=len(served) / end,
        prompt_token_rate=sum(timeline.num_prompt_tokens for timeline in served) / end,
        output_token_rate=sum(len(timeline.token_times) for timeline in served) / end,
        ttft_ms=Distribution.of(timeline.ttft for timeline in served if timeline.ttft is not None),
        tpot_ms=Distribution.of(timeline.tpot for timeline in served if timeline.tpot is not None),
        itl_ms=Distribution.of(collect_itls(served)),
        slo=str(targets),
        slo_share=None if met is None else met / max(1, len(timelines)),
        goodput=None if met is None else met / end,
        prefix_hit_rate=sum(each.prefix_hits for each in counts) / queries if queries else 0.0,
        host_hit_rate=sum(each.host_hits for each in counts) / queries if queries else 0.0,
        num_preemptions=sum(each.num_preemptions for each in counts),
        padding_share=(padded - useful) / padded if padded else 0.0,
        device_busy_share=sum(replica.device.busy_seconds for replica in run.replicas) / (end * len(run.replicas)),
        num_steps=sum(each.steps.total() for each in steps),
        num_devices=len(run.replicas) * devices_per_replica,
        num_devices_needed=num_devices_needed,
    )


def collect_itls(timelines: Iterable[Timeline]) -> np.ndarray:
    """Returns the seconds between consecutive tokens of all requests."""
    gaps = [np.diff(np.frombuffer(each.token_times)) for each in timelines if len(each.token_times) > 1]
    return np.concatenate(gaps) if gaps else np.zeros(0)


def make_table(summary: Summary, title: str) -> Table:
    """Returns the figures of one run, one a line."""
    table = Table(title=title, show_header=False)
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in _list_figures(summary):
        table.add_row(name, value)
    return table


def _list_figures(summary: Summary) -> list[tuple[str, str]]:
    refused = f", {summary.num_refused:,} refused" if summary.num_refused else ""
    rows = [
        ("requests", f"{summary.num_requests:,}{refused}"),
        ("time", f"{summary.seconds:,.1f} s"),
        ("requests/s", f"{summary.request_rate:,.2f}"),
        ("prompt tokens/s", f"{summary.prompt_token_rate:,.0f}"),
        ("output tokens/s", f"{summary.output_token_rate:,.0f}"),
        ("TTFT ms, p50 / p90 / p99", str(summary.ttft_ms)),
        ("TPOT ms", str(summary.tpot_ms)),
        ("ITL ms", str(summary.itl_ms)),
    ]
    if summary.slo_share is not None:
        rows.append((f"within {summary.slo}", f"{summary.slo_share:.2%}"))
        rows.append(("goodput, requests/s", f"{summary.goodput:,.2f}"))
    rows += [
        ("prefix cache hits", f"{summary.prefix_hit_rate:.1%}"),
        *([("of these from the host", f"{summary.host_hit_rate:.1%}")] if summary.host_hit_rate else []),
        ("preemptions", f"{summary.num_preemptions:,}"),
        ("padding", f"{summary.padding_share:.1%}"),
        ("device busy", f"{summary.device_busy_share:.1%}"),
        ("steps", f"{summary.num_steps:,}"),
        ("devices simulated", f"{summary.num_devices:,}"),
    ]
    if summary.slo_share is not None:
        needed = summary.num_devices_needed
        rows.append(("devices needed", "no number suffices" if needed is None else f"{needed:,}"))
    return rows


def make_sweep_table(summaries: Sequence[Summary], title: str) -> Table:
    """Returns one row per run of a sweep."""
    has_slo = any(summary.slo_share is not None for summary in summaries)
    option = summaries[0].label.partition("=")[0]
    quantiles = ["TTFT\np50 p99", "TPOT\np50 p99", "ITL\np99"]
    table = Table(title=title, caption=f"one row per {option}; times in milliseconds", box=SIMPLE, padding=(0, 1, 0, 0))
    columns = ["", "tok/s", *quantiles, "hits", "pre-\nempted", "pad", *(["SLO", "devices\nneeded"] if has_slo else [])]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for each in summaries:
        pairs = [f"{_show(times.p50)} {_show(times.p99)}" for times in (each.ttft_ms, each.tpot_ms)]
        cells = [each.label.partition("=")[2], f"{each.output_token_rate:,.0f}", *pairs, _show(each.itl_ms.p99)]
        cells += [f"{each.prefix_hit_rate:.0%}", f"{each.num_preemptions:,}", f"{each.padding_share:.0%}"]
        if each.slo_share is not None:
            cells += [f"{each.slo_share:.1%}", str(each.num_devices_needed or "-")]
        table.add_row(*cells)
    return table


def _show(milliseconds: float) -> str:
    if math.isnan(milliseconds):
        return "-"
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.1f}"
