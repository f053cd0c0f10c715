"""The figures of one run, under the names that vLLM's benchmark writes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.tools.bench.load.records import LoadOutcome, RequestRecord

METRICS = ("ttft", "tpot", "itl", "e2el")
BUSY_CORES = 0.5  # above this a worker may be late, and its figures the client's own
LATE_MS = 10.0  # of the highest percentile
_NUM_ERRORS = 5  # kinds of errors that a report repeats


@dataclass(frozen=True)
class Slo:
    """Limits in ms of what a good request may take, by metric: ttft, tpot, e2el."""

    limits: Mapping[str, float]

    @classmethod
    def parse(cls, words: Sequence[str]) -> Slo:
        """Returns the limits of words like ttft:500; ConfigError if one is malformed."""
        limits: dict[str, float] = {}
        for word in words:
            name, _, text = word.partition(":")
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if name not in ("ttft", "tpot", "e2el") or not value > 0:
                message = f"must be ttft:MS, tpot:MS or e2el:MS, like ttft:500 tpot:50, got {word!r}"
                raise ConfigError(message, field="goodput", value=word)
            limits[name] = value
        return cls(limits)

    def allows(self, record: RequestRecord) -> bool:
        """Whether a complete request kept all limits. One without a TPOT keeps that limit."""
        found = {"ttft": record.ttft, "tpot": record.tpot, "e2el": record.e2el}
        return all((found[name] or 0.0) * 1e3 <= limit for name, limit in self.limits.items())


def summarize(
    outcome: LoadOutcome, *, prompt_lengths: Sequence[int], slo: Slo, percentiles: Sequence[float]
) -> dict[str, Any]:
    """Returns the figures of a run. Latencies are of complete requests, in ms; rates are per second of the run.

    Args:
        outcome: what the load generator brought.
        prompt_lengths: tokens of each prompt, which count where the server does not say.
        slo: limits of good requests; none of them: no goodput.
        percentiles: 0 to 100.
    """
    records, seconds = outcome.records, max(outcome.seconds, 1e-9)
    complete = [record for record in records if record.is_complete]
    lengths = [
        length if record.num_prompt_tokens is None else record.num_prompt_tokens
        for length, record in zip(prompt_lengths, records, strict=True)
        if record.is_complete
    ]
    num_refused = sum(record.is_refused for record in records)
    num_output = sum(record.num_tokens for record in complete)
    figures: dict[str, Any] = {
        "duration": outcome.seconds,
        "completed": len(complete),
        "failed": len(records) - len(complete) - num_refused,
        "refused": num_refused,
        "total_input_tokens": sum(lengths),
        "total_output_tokens": num_output,
        "total_cached_tokens": _sum_known(record.num_cached_tokens for record in complete),
        "request_throughput": len(complete) / seconds,
        "request_goodput": sum(map(slo.allows, complete)) / seconds if slo.limits else None,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (sum(lengths) + num_output) / seconds,
        "max_concurrent_requests": count_most_at_once(records),
        "tokens_counted_by": "usage" if all(r.num_output_tokens is not None for r in complete) else "chunks",
        "finish_reasons": dict(Counter(record.finish_reason or "none" for record in complete)),
        "errors": dict(Counter(r.error for r in records if r.error and not r.is_refused).most_common(_NUM_ERRORS)),
    }
    values = {
        "ttft": [record.ttft for record in complete],
        "tpot": [record.tpot for record in complete if record.tpot is not None],
        "itl": [gap for record in complete for gap in record.itls],
        "e2el": [record.e2el for record in complete],
    }
    for name, times in values.items():
        figures |= _describe(name, times, percentiles)
    return figures | {"client": describe_client(outcome, percentiles)}


def describe_client(outcome: LoadOutcome, percentiles: Sequence[float]) -> dict[str, Any]:
    """Returns what the load generator itself used, and how late it was."""
    import numpy as np

    chunks, lags = outcome.num_chunks, outcome.lags
    per_chunk = outcome.cpu_seconds / chunks if chunks else None
    return {
        "processes": len(outcome.worker_cores),
        "worker_cores": list(outcome.worker_cores),
        "chunks_per_second": chunks / max(outcome.seconds, 1e-9),
        "cores_per_1000_chunks_per_second": None if per_chunk is None else 1e3 * per_chunk,
        "lag_ms": 1e3 * float(np.percentile(lags, max(percentiles))) if lags else 0.0,
        "max_lag_ms": 1e3 * max(lags, default=0.0),
    }


def list_warnings(clients: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns what makes figures of the client's out of the server's, one line each; `clients` are of all runs."""
    most = max((core for each in clients for core in each["worker_cores"]), default=0.0)
    lag_ms = max((each["lag_ms"] for each in clients), default=0.0)
    found = []
    if most > BUSY_CORES:
        text = f"a process of the load generator used {most:.0%} of a core, so times may be its own"
        found.append(f"{text}; add processes with --num-processes")
    if lag_ms > LATE_MS:
        found.append(f"the load generator sent requests {lag_ms:.0f} ms late; the machine is too busy for this load")
    return found


def count_most_at_once(records: Sequence[RequestRecord]) -> int:
    """Returns how many requests were under way at once, at most."""
    steps = [(record.sent, 1) for record in records if record.end]
    steps += [(record.end, -1) for record in records if record.end]
    most = now = 0
    for _, step in sorted(steps):  # an end comes before a start of the same time
        now += step
        most = max(most, now)
    return most


def _describe(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    import numpy as np

    keys = [f"{kind}_{name}_ms" for kind in ("mean", "median", "std", *(f"p{each:g}" for each in percentiles))]
    if not seconds:
        return dict.fromkeys(keys)
    ms = 1e3 * np.asarray(seconds)
    found = [ms.mean(), np.median(ms), ms.std(), *np.percentile(ms, list(percentiles))]
    return dict(zip(keys, map(float, found), strict=True))


def _sum_known(counts: Any) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
