"""The counters and histograms updated by the server's event loop."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from jaxserve.errors import ConfigError, NonFiniteLogitsError
from jaxserve.request import FinishReason, Request, RequestMetrics, RequestOutput, ServiceTier
from jaxserve.server.metrics.histogram import Histogram, RecentHistogram

if TYPE_CHECKING:
    from jaxserve.features.lora.store import AdapterStore

Event = Literal["queue_full", "client_disconnects", "slow_readers", "non_finite_logits"]
EVENTS: tuple[Event, ...] = get_args(Event)
STATES = ("starting", "warming", "ready", "draining", "failed")

_MAX_HANDLERS = 64  # values of the label `handler`; more than there are routes, bounded in case of a bug
_MAX_TENANTS = 256  # values of the label `tenant`, which a server with many would fill
_MAX_ADAPTERS = 100  # values of the label `lora_name`
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
OTHER = "other"  # stands for all values of a label beyond the most that it may have
# A request counts as the first of these reasons that any of its completions has.
_BROKEN_OFF = (FinishReason.ERROR.value, FinishReason.ABORT.value, FinishReason.TIMEOUT.value)

_GAPS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0065, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05),
    *(0.065, 0.08, 0.1, 0.125, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
_FIRST_TOKEN = (
    *(0.001, 0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.065, 0.08, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5),
    *(0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_DURATIONS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0),
)
_HTTP_DURATIONS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
_TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
_COMPLETIONS = (1, 2, 5, 10, 20, 50, 100)


class Tally:
    """Counters of one tenant's requests in one service tier, and the tier's latencies."""

    __slots__ = ("first_token_seconds", "gap_seconds", "generation_tokens", "num_requests", "prompt_tokens")

    def __init__(self, first_token_seconds: Histogram, gap_seconds: Histogram) -> None:
        self.num_requests = self.prompt_tokens = self.generation_tokens = 0
        self.first_token_seconds, self.gap_seconds = first_token_seconds, gap_seconds  # of all tenants in the tier


@dataclass(slots=True)
class ImageCounts:
    """Counters of a server's images."""

    read_bytes: Callable[[], int]  # those of the images of unfinished requests
    num_images: int = 0
    num_patches: int = 0


class ServerMetrics:
    """The counters and histograms of one server. Only its event loop may call the methods.

    The times of whole requests and their phases cover requests that finished normally (stop, length) only.
    """

    def __init__(
        self,
        model_name: str,
        *,
        prefix: str = "jaxserve",
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts with everything at zero.

        Args:
            prefix: of all metric names except the HTTP and process ones; "vllm" fits dashboards made for vLLM.
            rank: the value of the label `engine`: which of several copies this is.

        Raises:
            ConfigError: the prefix has other characters than letters, digits and _, or begins with a digit.
        """
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", prefix):
            raise ConfigError("must be letters, digits and _", field="metrics_prefix", value=prefix)
        self.model_name = model_name
        self.prefix = prefix
        self.rank = str(rank)
        self.cache_config: Mapping[str, object] = {}  # labels of `cache_config_info`, once the engine is ready
        self.tallies: dict[tuple[str, str], Tally] = {}  # by tenant's label and tier
        self.finished = {reason.value: 0 for reason in FinishReason}
        self.events: dict[str, int] = dict.fromkeys(EVENTS, 0)
        self.adapters: AdapterStore | None = None  # once an engine with adapters is ready
        self.images: ImageCounts | None = None  # of a model that reads images
        self.adapter_tokens: dict[str, int] = {}  # generated, by adapter's name
        self.texts: dict[str, int] = {}  # by task, of requests that generate nothing
        self.text_tokens: dict[str, int] = {}
        self.http_requests: dict[tuple[str, str, str], int] = {}
        self.http_seconds: dict[tuple[str, str], Histogram] = {}
        self._handlers: set[str] = set()
        self._tenants: set[str] = set()
        self.first_token_seconds = RecentHistogram(_FIRST_TOKEN, clock)
        self.gap_seconds = RecentHistogram(_GAPS, clock)
        self.tier_first_token_seconds = {str(tier): Histogram(_FIRST_TOKEN) for tier in ServiceTier}
        self.tier_gap_seconds = {str(tier): Histogram(_GAPS) for tier in ServiceTier}
        self.seconds_per_token = Histogram(_GAPS)
        self.request_seconds = Histogram(_DURATIONS)
        self.queue_seconds = Histogram(_DURATIONS)
        self.prefill_seconds = Histogram(_DURATIONS)
        self.decode_seconds = Histogram(_DURATIONS)
        self.inference_seconds = Histogram(_DURATIONS)
        self.request_prompt_tokens = Histogram(_TOKENS)
        self.request_generation_tokens = Histogram(_TOKENS)
        self.longest_generation_tokens = Histogram(_TOKENS)
        self.asked_completions = Histogram(_COMPLETIONS)
        self.asked_tokens = Histogram(_TOKENS)

    @property
    def num_requests(self) -> int:
        """Requests that the engine accepted."""
        return sum(tally.num_requests for tally in self.tallies.values())

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of requests that got a first token."""
        return sum(tally.prompt_tokens for tally in self.tallies.values())

    @property
    def generation_tokens(self) -> int:
        """Tokens generated."""
        return sum(tally.generation_tokens for tally in self.tallies.values())

    def label_tenant(self, name: str) -> str:
        """Returns a tenant's name as a label; "other" once there are too many."""
        if name not in self._tenants and len(self._tenants) >= _MAX_TENANTS:
            return OTHER
        self._tenants.add(name)
        return name

    def find_tally(self, request: Request) -> Tally:
        """Returns the tally that a request counts in."""
        tier = str(request.service_tier)
        key = self.label_tenant(request.tenant.name), tier
        if key not in self.tallies:
            self.tallies[key] = Tally(self.tier_first_token_seconds[tier], self.tier_gap_seconds[tier])
        return self.tallies[key]

    def start_request(self, tally: Tally, request: Request) -> None:
        """Counts a request accepted by the engine. Exactly one `finish_request` or `end_request` must follow."""
        tally.num_requests += 1
        self.request_prompt_tokens.observe(len(request.prompt_token_ids))

    def observe_first_token(self, tally: Tally, seconds: float, num_prompt_tokens: int, num_tokens: int = 1) -> None:
        """Records a stream's first chunk: seconds since the request's arrival, its prompt tokens and new tokens."""
        self.first_token_seconds.observe(seconds)
        tally.first_token_seconds.observe(seconds)
        tally.prompt_tokens += num_prompt_tokens
        tally.generation_tokens += num_tokens

    def observe_gap(self, tally: Tally, seconds: float, num_tokens: int = 1) -> None:
        """Records a later chunk of a stream: seconds since the chunk before it, and its number of tokens."""
        self.gap_seconds.observe(seconds)
        tally.gap_seconds.observe(seconds)
        tally.generation_tokens += num_tokens

    def finish_request(
        self,
        tally: Tally,
        output: RequestOutput,
        max_tokens: int | None,
        n: int,
        *,
        num_tokens: Sequence[int],
        num_streamed: int = 0,
    ) -> None:
        """Records the last output of a request.

        Args:
            max_tokens: limit per completion; None: none was asked for.
            n: completions asked for.
            num_tokens: tokens of each completion, over all outputs.
            num_streamed: tokens already counted by `observe_first_token` and `observe_gap`. 0: not streamed; the time
                to first token comes from the output.
        """
        times = output.metrics
        if not num_streamed and times is not None and times.first_token_time is not None:
            self.observe_first_token(
                tally, times.first_token_time - times.arrival_time, len(output.prompt_token_ids), num_tokens=0
            )
        tally.generation_tokens += sum(num_tokens) - num_streamed
        reason = find_reason(output)
        self.end_request(reason)
        if isinstance(output.error, NonFiniteLogitsError):
            self.count("non_finite_logits")
        self.asked_completions.observe(n)
        if max_tokens is not None:
            self.asked_tokens.observe(max_tokens)
        self.request_generation_tokens.observe(sum(num_tokens))
        self.longest_generation_tokens.observe(max(num_tokens, default=0))
        if times is not None and reason not in _BROKEN_OFF:
            self._observe_times(times, max(num_tokens, default=0))

    def end_request(self, reason: str) -> None:
        """Counts a request that ended without a last output: "abort" if its client left, "error" if it failed."""
        self.finished[reason] += 1

    def count_adapter(self, name: str, num_tokens: int, *, is_served: bool) -> None:
        """Counts tokens that an adapter generated, under "other" once there are too many, or after it was unloaded."""
        if not is_served or (name not in self.adapter_tokens and len(self.adapter_tokens) >= _MAX_ADAPTERS):
            name = OTHER
        self.adapter_tokens[name] = self.adapter_tokens.get(name, 0) + num_tokens

    def count_texts(self, task: str, texts: int, tokens: int) -> None:
        """Counts texts that were embedded, classified or scored."""
        self.texts[task] = self.texts.get(task, 0) + texts
        self.text_tokens[task] = self.text_tokens.get(task, 0) + tokens

    def observe_http(self, handler: str | None, method: str, status: int, seconds: float) -> None:
        """Records an answered HTTP request; `handler` is its route's path template, None if no route matched."""
        if handler is None or (handler not in self._handlers and len(self._handlers) >= _MAX_HANDLERS):
            handler = OTHER
        else:
            self._handlers.add(handler)
        if method not in _METHODS:
            method = OTHER
        key = (handler, method, str(status) if 100 <= status < 600 else OTHER)
        self.http_requests[key] = self.http_requests.get(key, 0) + 1
        if key[:2] not in self.http_seconds:
            self.http_seconds[key[:2]] = Histogram(_HTTP_DURATIONS)
        self.http_seconds[key[:2]].observe(seconds)

    def count(self, event: Event) -> None:
        """Adds one to the count of `event`."""
        self.events[event] += 1

    def latency_snapshot(self) -> dict[str, dict[str, float | None]]:
        """Returns {"ttft_ms", "itl_ms"}: {"p50", "p99"} of the last 30 to 60 seconds; None without values."""
        named = {"ttft_ms": self.first_token_seconds, "itl_ms": self.gap_seconds}
        return {name: _find_milliseconds(histogram) for name, histogram in named.items()}

    def _observe_times(self, times: RequestMetrics, num_tokens: int) -> None:
        arrival, scheduled = times.arrival_time, times.first_scheduled_time
        first, last = times.first_token_time, times.finished_time
        if last is None:
            return
        self.request_seconds.observe(last - arrival)
        if scheduled is not None:
            self.queue_seconds.observe(scheduled - arrival)
            self.inference_seconds.observe(last - scheduled)
        if first is not None:
            self.decode_seconds.observe(last - first)
            if scheduled is not None:
                self.prefill_seconds.observe(first - scheduled)
            if num_tokens > 1:
                self.seconds_per_token.observe((last - first) / (num_tokens - 1))


def find_reason(output: RequestOutput) -> str:
    """Returns one finish reason for a request: error, abort, timeout, length or stop, the first that applies."""
    reasons = {completion.finish_reason for completion in output.outputs}
    for reason in _BROKEN_OFF:
        if reason in reasons:
            return reason
    if output.error is not None:
        return FinishReason.ERROR.value
    return (FinishReason.LENGTH if FinishReason.LENGTH.value in reasons else FinishReason.STOP).value


def _find_milliseconds(histogram: RecentHistogram) -> dict[str, float | None]:
    p50, p99 = (None if s is None else s * 1000 for s in histogram.find_quantiles(0.5, 0.99))
    return {"p50": p50, "p99": p99}
