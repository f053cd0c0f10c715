"""`ServerMetrics` and the engine's counters as Prometheus metrics: names, help texts, labels.

Metric families are built only on a scrape; prometheus_client writes the text.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jaxserve.engine.metrics import (
    ACCEPTED_BY_POSITION,
    ATTENTION_FALLBACK,
    ENGINE_COUNTERS,
    ENGINE_GAUGES,
    OFFLOAD_BYTES,
    Table,
)
from jaxserve.engine.stats import AdapterStats, EngineStats
from jaxserve.server.metrics.recorder import STATES, ImageCounts, ServerMetrics, Tally

if TYPE_CHECKING:
    from jaxserve.features.lora.store import AdapterStore

_PROCESS = ProcessCollector(registry=None)  # reads /proc, if it exists, at each collection
_OPEN_METRICS = "application/openmetrics-text"


class _Counted(Protocol):
    """A server histogram, or the engine's tokens per step."""

    @property
    def bounds(self) -> Sequence[float]: ...
    @property
    def counts(self) -> Sequence[int]: ...  # one more than `bounds`
    @property
    def total(self) -> float: ...


_SERVER_COUNTERS: Table[ServerMetrics] = (
    ("requests_total", "Requests that the engine accepted.", lambda m: m.num_requests),
    ("prompt_tokens_total", "Prompt tokens of requests that got a first token.", lambda m: m.prompt_tokens),
    ("generation_tokens_total", "Tokens generated.", lambda m: m.generation_tokens),
    ("queue_full_total", "Requests refused because the queue was full.", lambda m: m.events["queue_full"]),
    (
        "client_disconnects_total",
        "Requests aborted because their client left.",
        lambda m: m.events["client_disconnects"],
    ),
    ("slow_readers_total", "Requests aborted because their client did not read.", lambda m: m.events["slow_readers"]),
    (
        "non_finite_logits_total",
        "Requests ended because the model made NaN or infinite logits.",
        lambda m: m.events["non_finite_logits"],
    ),
)
_TALLIES: Table[Tally] = (
    ("tenant_requests_total", "Requests that the engine accepted, by tenant and tier.", lambda t: t.num_requests),
    (
        "tenant_prompt_tokens_total",
        "Prompt tokens of requests that got a first token, by tenant and tier.",
        lambda t: t.prompt_tokens,
    ),
    ("tenant_generation_tokens_total", "Tokens generated, by tenant and tier.", lambda t: t.generation_tokens),
)
_TIER_HISTOGRAMS: Table[ServerMetrics] = (
    (
        "tier_time_to_first_token_seconds",
        "From a request's arrival to its first token, by tier.",
        lambda m: m.tier_first_token_seconds,
    ),
    ("tier_inter_token_latency_seconds", "Between two chunks of a stream, by tier.", lambda m: m.tier_gap_seconds),
)
_HISTOGRAMS: Table[ServerMetrics] = (
    (
        "time_to_first_token_seconds",
        "From a request's arrival, tokenizing included, to its first token.",
        lambda m: m.first_token_seconds,
    ),
    ("inter_token_latency_seconds", "Between two chunks of a stream.", lambda m: m.gap_seconds),
    (
        "time_per_output_token_seconds",
        "Old name of inter_token_latency_seconds, with the same values.",
        lambda m: m.gap_seconds,
    ),
    (
        "request_time_per_output_token_seconds",
        "A request's (end to end - time to first token) / (tokens - 1).",
        lambda m: m.seconds_per_token,
    ),
    ("e2e_request_latency_seconds", "From a request's arrival to its last token.", lambda m: m.request_seconds),
    ("request_queue_time_seconds", "From a request's arrival to its first step.", lambda m: m.queue_seconds),
    ("request_prefill_time_seconds", "From a request's first step to its first token.", lambda m: m.prefill_seconds),
    ("request_decode_time_seconds", "From a request's first token to its last.", lambda m: m.decode_seconds),
    ("request_inference_time_seconds", "From a request's first step to its last token.", lambda m: m.inference_seconds),
    ("request_prompt_tokens", "Prompt tokens of a request.", lambda m: m.request_prompt_tokens),
    ("request_generation_tokens", "Tokens of all completions of a request.", lambda m: m.request_generation_tokens),
    (
        "request_max_num_generation_tokens",
        "Tokens of a request's longest completion.",
        lambda m: m.longest_generation_tokens,
    ),
    ("request_params_n", "Completions that a request asked for.", lambda m: m.asked_completions),
    ("request_params_max_tokens", "The most tokens that a request asked for.", lambda m: m.asked_tokens),
)


def render(metrics: ServerMetrics, accept: str | None, stats: EngineStats | None, state: str) -> tuple[bytes, str]:
    """Returns (body, content type) of all metrics: OpenMetrics if the Accept header names it, else Prometheus text.

    `stats` is None while the engine starts; the engine's metrics are then left out.
    """
    # The library's own choice would parse the client's header and echo parts of it. ALLOWUTF8 escapes nothing; other
    # escapings would replace the colon after the prefix with an underscore.
    page = Page(metrics, stats, state)
    if _OPEN_METRICS in (accept or "").lower():
        return openmetrics.generate_latest(page, escaping=openmetrics.ALLOWUTF8), openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(page, escaping=openmetrics.ALLOWUTF8), CONTENT_TYPE_PLAIN_0_0_4


@dataclass(frozen=True, slots=True)
class Page(Collector):
    """A `prometheus_client` collector of all metrics, for one scrape."""

    metrics: ServerMetrics
    stats: EngineStats | None
    state: str

    def collect(self) -> Iterator[Metric]:
        """Yields the metric families, the engine's first."""
        if self.stats is not None:
            yield from self._collect_engine(self.stats)
        yield from self._collect_server()
        yield from self._collect_http()
        yield from _PROCESS.collect()

    def _collect_engine(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, read in ENGINE_GAUGES:
            yield self._make(GaugeMetricFamily, name, text, [((), read(stats))])
        for name, text, read in ENGINE_COUNTERS:
            yield self._make(CounterMetricFamily, name, text, [((), read(stats))])
        name, text, directions = OFFLOAD_BYTES
        copied = [((direction,), read(stats)) for direction, read in directions.items()]
        yield self._make(CounterMetricFamily, name, text, copied, "direction")
        accepted = [((str(at),), float(count)) for at, count in enumerate(stats.drafts.accepted_by_position)]
        yield self._make(CounterMetricFamily, *ACCEPTED_BY_POSITION, accepted, "position")
        if (attention := stats.attention) is not None:
            sample = ((attention.impl, attention.reason), float(attention.fell_back))
            yield self._make(GaugeMetricFamily, *ATTENTION_FALLBACK, [sample], "impl", "reason")
        waiting: Counter[str] = Counter()
        for name, count in stats.num_waiting_by_tenant.items():
            waiting[self.metrics.label_tenant(name)] += count
        text = "Sequences of a tenant that wait for a row or for pages."
        samples = [((label,), float(count)) for label, count in waiting.items()]
        yield self._make(GaugeMetricFamily, "tenant_num_requests_waiting", text, samples, "tenant")
        steps = [((bucket,), count) for bucket, count in stats.steps.items()]
        yield self._make(CounterMetricFamily, "steps_total", "Steps by compiled bucket.", steps, "bucket")
        text = "Tokens computed in a step, without padding."
        yield self._make_histogram("iteration_tokens_total", text, {(): stats.step_tokens})
        if self.metrics.adapters is not None:
            yield from self._collect_adapters(stats.adapters, self.metrics.adapters)
        if config := self.metrics.cache_config:
            family = InfoMetricFamily(self._name("cache_config"), "The layout of the KV cache.", labels=self._labels())
            family.add_metric(self._values(), {str(key): str(value) for key, value in config.items()})
            yield family

    def _collect_adapters(self, stats: AdapterStats, store: AdapterStore) -> Iterator[Metric]:
        names = ",".join(stats.running), ",".join(stats.waiting)
        labels = "max_lora", "running_lora_adapters", "waiting_lora_adapters"
        text, sample = (
            "The time of this scrape; its labels name the adapters of requests.",
            (str(stats.num_slots), *names),
        )
        yield self._make(GaugeMetricFamily, "lora_requests_info", text, [(sample, time.time())], *labels)
        for name, text, value in (
            ("lora_slots_used", "Slots on the device that hold an adapter.", stats.num_used),
            ("lora_host_copies", "Adapters that are kept on the host.", store.num_live),
        ):
            yield self._make(GaugeMetricFamily, name, text, [((), float(value))])
        for name, text, value in (
            ("lora_loads_total", "Adapters read from their files.", store.counts.loads),
            ("lora_evictions_total", "Adapters dropped from the host for others.", store.counts.evictions),
            ("lora_refusals_total", "Files of adapters that were refused.", store.counts.refusals),
        ):
            yield self._make(CounterMetricFamily, name, text, [((), float(value))])
        tokens = [((name,), float(count)) for name, count in list(self.metrics.adapter_tokens.items())]
        yield self._make(CounterMetricFamily, "lora_generation_tokens_total", "Tokens by adapter.", tokens, "lora_name")

    def _collect_server(self) -> Iterator[Metric]:
        metrics = self.metrics
        for name, text, read in _SERVER_COUNTERS:
            yield self._make(CounterMetricFamily, name, text, [((), read(metrics))])
        finished = [((reason,), count) for reason, count in metrics.finished.items()]
        text = "Requests that ended, by finish reason, abort and error included."
        yield self._make(CounterMetricFamily, "request_success_total", text, finished, "finished_reason")
        for name, text, by_task in (
            ("pooled_texts_total", "Texts that were embedded, classified or scored, by task.", metrics.texts),
            ("pooled_tokens_total", "Tokens of these texts, by task.", metrics.text_tokens),
        ):
            counts = [((task,), float(count)) for task, count in by_task.items()]
            yield self._make(CounterMetricFamily, name, text, counts, "task")
        for name, text, read in _TALLIES:
            counts = [(key, read(tally)) for key, tally in metrics.tallies.items()]
            yield self._make(CounterMetricFamily, name, text, counts, "tenant", "service_tier")
        for name, text, read in _TIER_HISTOGRAMS:
            by_tier = {(tier,): histogram for tier, histogram in read(metrics).items()}
            yield self._make_histogram(name, text, by_tier, "service_tier")
        for name, text, read in _HISTOGRAMS:
            yield self._make_histogram(name, text, {(): read(metrics)})
        if metrics.images is not None:
            yield from self._collect_images(metrics.images)
        samples = [((state,), float(state == self.state)) for state in STATES]
        yield self._make(GaugeMetricFamily, "server_state", "1 for the server's present state.", samples, "state")

    def _collect_images(self, counts: ImageCounts) -> Iterator[Metric]:
        for name, text, value in (
            ("images_total", "Images of requests that were decoded.", counts.num_images),
            ("image_patches_total", "Patches of these images.", counts.num_patches),
        ):
            yield self._make(CounterMetricFamily, name, text, [((), float(value))])
        text = "Bytes of the images of requests that are not finished, as they are resized."
        yield self._make(GaugeMetricFamily, "image_bytes", text, [((), float(counts.read_bytes()))])

    def _collect_http(self) -> Iterator[Metric]:
        text = "HTTP requests answered; status 499: the client left first."
        requests = CounterMetricFamily("http_requests", text, labels=("handler", "method", "status"))
        for key, count in self.metrics.http_requests.items():
            requests.add_metric(key, count)
        yield requests
        text = "From an HTTP request's head to the end of its answer."
        seconds = HistogramMetricFamily("http_request_duration_seconds", text, labels=("handler", "method"))
        for key, histogram in self.metrics.http_seconds.items():
            seconds.add_metric(key, *_accumulate(histogram))
        yield seconds

    def _name(self, name: str) -> str:
        return f"{self.metrics.prefix}:{name}"

    def _labels(self, *more: str) -> tuple[str, ...]:
        return ("model_name", "engine", *more)

    def _values(self, *more: str) -> tuple[str, ...]:
        return (self.metrics.model_name, self.metrics.rank, *more)

    def _make(
        self,
        family: Callable[..., Any],
        name: str,
        text: str,
        samples: Sequence[tuple[tuple[str, ...], float]],
        *labels: str,
    ) -> Metric:
        made = family(self._name(name), text, labels=self._labels(*labels))
        for values, value in samples:
            made.add_metric(self._values(*values), value)
        return made

    def _make_histogram(
        self, name: str, text: str, histograms: Mapping[tuple[str, ...], _Counted], *labels: str
    ) -> Metric:
        made = HistogramMetricFamily(self._name(name), text, labels=self._labels(*labels))
        for values, histogram in histograms.items():
            made.add_metric(self._values(*values), *_accumulate(histogram))
        return made


def _accumulate(histogram: _Counted) -> tuple[list[tuple[str, float]], float]:
    """Returns (upper bound, cumulative count) per bucket, and the sum of the values."""
    pairs, below = [], 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        below += count
        pairs.append((floatToGoString(bound), float(below)))
    return pairs, histogram.total
