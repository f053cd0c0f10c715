"""`jaxserve bench serve`: a running server under requests that arrive as users' do."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxserve.engine.progress import show_progress
from jaxserve.errors import ConfigError
from jaxserve.tools.bench.datasets import BenchRequest, DatasetOptions, make_requests
from jaxserve.tools.bench.load.counters import read_counters, subtract
from jaxserve.tools.bench.load.generator import LoadGenerator
from jaxserve.tools.bench.load.metrics import Slo, summarize
from jaxserve.tools.bench.load.schedule import draw_arrivals, scale_arrivals
from jaxserve.tools.bench.load.servers import ServedModel, probe
from jaxserve.tools.bench.load.target import Target
from jaxserve.tools.bench.report import Spread

if TYPE_CHECKING:
    from jaxserve.tokenizers import Tokenizer


@dataclass(frozen=True)
class Point:
    """One load: how requests arrive, and how many may be under way."""

    request_rate: float  # per second on average; infinite: all at once
    rate_scale: float | None = None  # of the dataset's own arrivals, in place of the rate
    max_concurrency: int | None = None

    @property
    def title(self) -> str:
        """The load in words: arrivals, and how many requests may be under way."""
        if self.rate_scale is not None:
            rate = f"trace x {self.rate_scale:g}"
        else:
            rate = "all at once" if math.isinf(self.request_rate) else f"{self.request_rate:g}/s"
        return rate if self.max_concurrency is None else f"{rate}, at most {self.max_concurrency}"


@dataclass(frozen=True)
class ServeOptions:
    """What is measured, of which server. Times are in seconds.

    Attributes:
        target: the server and its endpoint.
        model: the model that is asked for.
        dataset: the requests; every run draws others, so that no run finds the prompts of one before in a cache.
        is_chat: prompts go as the text of a user's message, not as token ids.
        points: loads, one after the other.
        burstiness: shape of the gamma distribution of gaps; 1 is Poisson.
        slo: limits of good requests.
        percentiles: of latencies, 0 to 100.
        extra_body: further keys of each request's body.
        vocab_size: random token ids are below it.
        num_iters: runs of each point.
        num_warmups: requests before the first run, outside the clock.
        num_processes: of the load generator.
        timeout: of one request.
    """

    target: Target
    model: ServedModel
    dataset: DatasetOptions
    is_chat: bool
    points: tuple[Point, ...]
    slo: Slo
    vocab_size: int
    tokenizer: Tokenizer | None = None
    burstiness: float = 1.0
    percentiles: tuple[float, ...] = (50, 90, 99)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    num_iters: int = 1
    num_warmups: int = 1
    num_processes: int = 1
    timeout: float = 600.0


@dataclass(frozen=True)
class PointFigures:
    """The figures of all runs of one point, under vLLM's names."""

    point: Point
    runs: tuple[dict[str, Any], ...]

    def spread(self, name: str) -> Spread | None:
        """Returns a figure over the runs that have it."""
        values = [run[name] for run in self.runs if run.get(name) is not None]
        return Spread.of(values) if values else None

    def total(self, name: str) -> int:
        """Returns the sum of a count over all runs."""
        return sum(run[name] for run in self.runs)

    def asdict(self) -> dict[str, Any]:
        """Returns the form that it has in reports."""
        point, names = self.point, [name for name, value in self.runs[0].items() if isinstance(value, int | float)]
        return {
            "request_rate": "inf" if math.isinf(point.request_rate) else point.request_rate,
            "rate_scale": point.rate_scale,
            "max_concurrency": point.max_concurrency,
            **{name: self.spread(name) for name in names},
            "runs": list(self.runs),
        }


def make_points(
    rates: Sequence[float],
    scales: Sequence[float] | None,
    concurrencies: Sequence[int] | None,
    rows: int | None = None,
) -> tuple[Point, ...]:
    """Returns every load of a sweep; `scales` take the place of `rates` where they are given.

    Where requests come all at once and no concurrency is given, it is `rows`: the others would only be refused.
    """
    limits: Sequence[int | None] = concurrencies or [None]
    if scales is not None:
        return tuple(Point(math.inf, scale, limit) for scale, limit in itertools.product(scales, limits))
    return tuple(
        Point(rate, None, rows if limit is None and math.isinf(rate) else limit)
        for rate, limit in itertools.product(rates, limits)
    )


def make_body(options: ServeOptions, request: BenchRequest) -> dict[str, Any]:
    """Returns the JSON body that asks for one request's answer as a stream, greedily.

    Raises:
        ConfigError: a prompt has no text, and there is no tokenizer to make one of its ids.
    """
    body = {
        "model": options.model.name,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if options.dataset.ignores_eos else {}),
    }
    if options.is_chat:
        messages = [{"role": "user", "content": _make_text(options, request)}]
        body |= {"messages": messages, "max_completion_tokens": request.max_tokens}
    else:
        ids = request.prompt_token_ids
        body |= {"prompt": request.prompt if ids is None else list(ids), "max_tokens": request.max_tokens}
    return body | dict(options.extra_body)


def _make_text(options: ServeOptions, request: BenchRequest) -> str:
    if request.prompt is not None:
        return request.prompt
    if options.tokenizer is None:
        message = "token ids have no text without one; give it, or use --backend openai"
        raise ConfigError(message, field="tokenizer")
    return options.tokenizer.decode(list(request.prompt_token_ids or ()), True)


class ServeBenchmark:
    """The requests, the server and the load generator of one benchmark."""

    def __init__(self, options: ServeOptions, generator: LoadGenerator) -> None:
        self._options, self._generator = options, generator
        self._num_drawn = 0  # sets of requests

    def measure(self) -> list[PointFigures]:
        """Warms up, then runs every point.

        Raises:
            ConfigError: the first request of all fails, or the dataset does not suit.
        """
        options = self._options
        requests = self._draw()
        probe(options.target, self._encode(requests[:1])[0], options.timeout)
        if options.num_warmups:
            warmups = self._encode(requests[: options.num_warmups])
            self._generator.run(options.target, warmups, [0.0] * len(warmups), timeout=options.timeout)
        found, each = [], len(requests)
        total = len(options.points) * options.num_iters * each
        with show_progress("Measuring", unit="requests") as report:
            for point in options.points:
                runs: list[dict[str, Any]] = []
                for _ in range(options.num_iters):
                    done = (len(found) * options.num_iters + len(runs)) * each
                    runs.append(self._run(point, lambda ended, d=done, p=point: report(d + ended, total, p.title)))
                found.append(PointFigures(point, tuple(runs)))
            report(total, total)
        return found

    def _draw(self) -> list[BenchRequest]:
        options = self._options
        dataset = dataclasses.replace(options.dataset, seed=options.dataset.seed + self._num_drawn)
        self._num_drawn += 1
        return make_requests(
            dataset,
            vocab_size=options.vocab_size,
            tokenizer=options.tokenizer,
            max_model_len=options.model.max_model_len,
        )

    def _encode(self, requests: Sequence[BenchRequest]) -> list[bytes]:
        return [self._options.target.encode(make_body(self._options, request)) for request in requests]

    def _run(self, point: Point, progress: Callable[[int], None]) -> dict[str, Any]:
        options, requests = self._options, self._draw()
        if point.rate_scale is not None:
            arrivals = scale_arrivals([request.arrival_time for request in requests], point.rate_scale)
        else:
            seed = options.dataset.seed + self._num_drawn
            arrivals = draw_arrivals(len(requests), point.request_rate, burstiness=options.burstiness, seed=seed)
        bodies, before = self._encode(requests), read_counters(options.target)
        outcome = self._generator.run(
            options.target,
            bodies,
            arrivals,
            max_concurrency=point.max_concurrency,
            timeout=options.timeout,
            progress=progress,
        )
        server = subtract(read_counters(options.target), before)
        lengths = [request.num_prompt_tokens for request in requests]
        figures = summarize(outcome, prompt_lengths=lengths, slo=options.slo, percentiles=options.percentiles)
        return figures | {"cut_requests": sum(request.is_cut for request in requests), "server": server}
