"""Prometheus' view of `ServerMetrics` and of the engine's counters: names, help texts, labels.

The plain numbers become metric families only while somebody reads them; the library writes the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from jaxserve.engine.stats import EngineStats, PoolStats
    from jaxserve.server.metrics.recorder import ServerMetrics

_OPEN_METRICS = "application/openmetrics-text"


class _Counted(Protocol):
    """What counts values by bounds: our histograms, and the engine's of tokens per step."""

    @property
    def bounds(self) -> Sequence[float]: ...
    @property
    def counts(self) -> Sequence[int]: ...  # one more than bounds
    @property
    def total(self) -> float: ...


# Tables of (name without prefix, help, value). Names of counters are written with their `_total`.
type _Table[Source] = tuple[tuple[str, str, Callable[[Source], Any]], ...]


def find_usage(stats: EngineStats) -> float:
    """Returns which share (0 to 1) of the largest KV pool's pages running requests hold."""
    pool: PoolStats | None = max(stats.pools, key=lambda pool: pool.total, default=None)
    return pool.used / pool.total if pool is not None and pool.total else 0.0


_ENGINE_GAUGES: _Table[EngineStats] = (
    ("num_requests_running", "Sequences that hold a row of the batch.", lambda s: s.num_running),
    ("num_requests_waiting", "Sequences that wait for a row or for pages.", lambda s: s.num_waiting),
    ("num_queued_tokens", "Prompt tokens of the sequences that wait.", lambda s: s.num_queued_tokens),
    ("kv_cache_usage_perc", "Share (0 to 1) of the largest KV pool's pages that running requests hold.", find_usage),
    ("gpu_cache_usage_perc", "Old name of kv_cache_usage_perc, with the same value.", find_usage),
    ("programs", "Compiled programs that steps can use.", lambda s: s.num_programs),
)
_ENGINE_COUNTERS: _Table[EngineStats] = (
    (
        "num_preemptions_total",
        "Sequences that gave up their pages and are computed again.",
        lambda s: s.num_preemptions,
    ),
    ("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_queries),
    ("prefix_cache_hits_total", "Prompt tokens whose KV came from the prefix cache.", lambda s: s.prefix_hits),
    ("useful_tokens_total", "Tokens that steps computed for requests.", lambda s: s.useful_tokens),
    ("padded_tokens_total", "Tokens of padding that steps computed beside them.", lambda s: s.padded_tokens),
    (
        "compiles_total",
        "Programs compiled after the server was ready; anything but 0 is a fault.",
        lambda s: s.num_compiles,
    ),
    (
        "step_faults_total",
        "Steps that failed on the device; their requests ended with an error.",
        lambda s: s.num_faults,
    ),
    ("device_wait_seconds_total", "Seconds that the host waited for the device.", lambda s: s.wait_seconds),
    (
        "host_busy_seconds_total",
        "Seconds that the host worked on steps, most while the device runs.",
        lambda s: s.busy_seconds,
    ),
)
_SERVER_COUNTERS: _Table[ServerMetrics] = (
    ("requests_total", "Requests that the engine took.", lambda m: m.num_requests),
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
_HISTOGRAMS: _Table[ServerMetrics] = (
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
        "Of a request: (end to end - time to first token) / (tokens - 1).",
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
    ("request_params_max_tokens", "Tokens that a request asked for at most.", lambda m: m.asked_tokens),
)


def render(metrics: ServerMetrics, accept: str | None, stats: EngineStats | None, state: str) -> tuple[bytes, str]:
    """Returns all families as text, and its content type."""
    # The library's own choice would parse what a client made up and echo parts of it. All names here are plain, so
    # nothing is escaped; with other escapings the library makes an underscore of the colon behind the prefix.
    page = Page(metrics, stats, state)
    if _OPEN_METRICS in (accept or "").lower():
        return openmetrics.generate_latest(page, escaping=openmetrics.ALLOWUTF8), openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(page, escaping=openmetrics.ALLOWUTF8), CONTENT_TYPE_PLAIN_0_0_4


@dataclass(frozen=True, slots=True)
class Page(Collector):
    """One reading: a collector for `prometheus_client`."""

    metrics: ServerMetrics
    stats: EngineStats | None
    state: str

    def collect(self) -> Iterator[Metric]:
        """Yields the families, the engine's first."""
        if self.stats is not None:
            yield from self._collect_engine(self.stats)
        yield from self._collect_server()
        yield from self._collect_http()

    def _collect_engine(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, read in _ENGINE_GAUGES:
            yield self._make(GaugeMetricFamily, name, text, [((), read(stats))])
        for name, text, read in _ENGINE_COUNTERS:
            yield self._make(CounterMetricFamily, name, text, [((), read(stats))])
        steps = [((bucket,), count) for bucket, count in stats.steps.items()]
        yield self._make(CounterMetricFamily, "steps_total", "Steps by compiled bucket.", steps, "bucket")
        yield self._make_histogram(
            "iteration_tokens_total", "Tokens computed in a step, without padding.", stats.step_tokens
        )
        if config := self.metrics.cache_config:
            family = InfoMetricFamily(
                self._name("cache_config"), "How the KV cache is laid out.", labels=self._labels()
            )
            family.add_metric(self._values(), {str(key): str(value) for key, value in config.items()})
            yield family

    def _collect_server(self) -> Iterator[Metric]:
        metrics = self.metrics
        for name, text, read in _SERVER_COUNTERS:
            yield self._make(CounterMetricFamily, name, text, [((), read(metrics))])
        finished = [((reason,), count) for reason, count in metrics.finished.items()]
        text = "Requests that ended, by what ended them (abort and error too)."
        yield self._make(CounterMetricFamily, "request_success_total", text, finished, "finished_reason")
        for name, text, read in _HISTOGRAMS:
            yield self._make_histogram(name, text, read(metrics))
        states = dict.fromkeys((*metrics.states, self.state), 0) | {self.state: 1}
        samples = [((state,), value) for state, value in states.items()]
        yield self._make(GaugeMetricFamily, "server_state", "1 for the state that the server is in.", samples, "state")

    def _collect_http(self) -> Iterator[Metric]:
        text = "HTTP requests answered; status 499: the client left before."
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
        return (self.metrics.model_name, "0", *more)

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

    def _make_histogram(self, name: str, text: str, histogram: _Counted) -> Metric:
        made = HistogramMetricFamily(self._name(name), text, labels=self._labels())
        made.add_metric(self._values(), *_accumulate(histogram))
        return made


def _accumulate(histogram: _Counted) -> tuple[list[tuple[str, float]], float]:
    """Returns (bound, how many values up to it) pairs, and the sum."""
    pairs, below = [], 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        below += count
        pairs.append((floatToGoString(bound), float(below)))
    return pairs, histogram.total
