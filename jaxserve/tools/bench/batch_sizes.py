"""Decode steps of the whole engine by batch size and context, against the device's limit, and what ends the curve.

For each point the batch's prompts are prefilled. Once all rows decode, steps are timed while the engine runs as it does
for users, planning the next step while one runs.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.sampling_params import SamplingParams
from jaxserve.tools.bench.report import Spread
from jaxserve.tools.bench.setup import Bench, count_weight_bytes

BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (128, 512)
STEPS = 32
_SETTLE = 4  # steps after the last prefill that are not counted
_LEAST_BUDGET, _MOST_BUDGET = 512, 2048  # tokens of a step on any platform, where the user names none
_LEAST_GAIN = 0.1  # larger batches that bring less than this in all are no gain


@dataclass(frozen=True)
class SweepSizes:
    """What is measured. A run is `num_steps` steps; each point has `num_iters` of them, one after the other."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    num_steps: int = STEPS
    num_iters: int = 3

    def __post_init__(self) -> None:
        for field, values in (("batch_sizes", self.batches), ("contexts", self.contexts), ("steps", (self.num_steps,))):
            if not values or min(values) < 1:
                raise ConfigError(f"must be at least 1, got {min(values, default=None)}", field=field, value=values)

    @property
    def num_measured(self) -> int:
        """Steps of a point on the clock."""
        return self.num_steps * self.num_iters

    def plan(self, batch: int, context: int, budget: int) -> tuple[int, int]:
        """Returns the prompt's length and the most tokens of an answer for one point.

        Early rows decode while later ones are prefilled, so prompts are shorter than the context by half of what is
        decoded in the mean.
        """
        prefill = batch + math.ceil(batch * context / max(1, budget - batch))
        decoded = prefill + _SETTLE + self.num_measured
        return max(1, context - decoded // 2), decoded + 2 * _SETTLE

    def engine_options(self, given: Mapping[str, Any], *, fills_steps: bool = False) -> dict[str, Any]:
        """Returns the options of an engine that can run all points, where the user gave none.

        Args:
            fills_steps: one prompt can be as long as a step, as `calibrate` wants it.
        """
        rows = max(self.batches)
        options = {} if 2 * rows <= _LEAST_BUDGET else {"max_num_batched_tokens": 2 * rows}
        budget = given.get("max_num_batched_tokens") or max(_LEAST_BUDGET, 2 * rows)
        longest = max(sum(self.plan(batch, at, budget)) for batch in self.batches for at in self.contexts)
        if fills_steps:
            longest = max(longest, given.get("max_num_batched_tokens") or max(_MOST_BUDGET, 2 * rows))
        room = longest + longest // 8  # on CPU the pools follow it, and the number of pages is rounded
        return options | {"max_num_seqs": rows, "max_model_len": room + 1, "enable_prefix_caching": False}


@dataclass(frozen=True)
class Point:
    """One batch size at one context. Seconds are those of a step."""

    batch: int
    context: float  # tokens of a row, in the mean of rows and steps
    wanted_context: int
    num_padded_rows: int
    seconds: Spread
    streaming_seconds: float  # of the limit: reading the weights,
    computing_seconds: float  # or computing with them, whichever takes longer,
    reading_seconds: float  # and reading keys and values
    weight_bytes: int
    kv_bytes: int  # pages that the rows own

    @property
    def limit(self) -> float:
        return max(self.streaming_seconds, self.computing_seconds) + self.reading_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.batch / self.seconds.median

    @property
    def bound(self) -> str:
        """What takes longest in the limit."""
        times = {
            "reading the weights (memory)": self.streaming_seconds,
            "products with the weights (compute)": self.computing_seconds,
            "reading keys and values (memory)": self.reading_seconds,
        }
        return max(times, key=lambda name: times[name])

    def asdict(self) -> dict[str, Any]:
        """Returns the point as reports have it."""
        return {
            "batch_size": self.batch,
            "context": self.wanted_context,
            "mean_context": self.context,
            "padded_rows": self.num_padded_rows,
            "step_seconds": self.seconds,
            "limit_seconds": self.limit,
            "limit_share": Spread.of([self.limit / seconds for seconds in self.seconds.values]),
            "tokens_per_second": Spread.of([self.batch / seconds for seconds in self.seconds.values]),
            "tokens_per_second_per_user": Spread.of([1 / seconds for seconds in self.seconds.values]),
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.kv_bytes,
            "bound": self.bound,
        }


@dataclass(frozen=True)
class End:
    """Why the curve of a context ends where it does."""

    context: int
    batch: int
    reason: str  # "memory", "compute" or "none"
    text: str


def find_misfit(bench: Bench, sizes: SweepSizes, batch: int, context: int) -> str | None:
    """Returns why a point cannot be measured; None if it can."""
    ready = bench.llm.ready
    tokens = sum(sizes.plan(batch, context, ready.shapes.limits.max_num_batched_tokens))
    pages = batch * -(-(tokens + 1) // ready.plan.page_size)
    longest, room = ready.shapes.model.max_model_len, min(ready.plan.num_pages) - 1
    if batch > ready.shapes.limits.max_num_seqs:
        return f"{batch} rows are more than max_num_seqs={ready.shapes.limits.max_num_seqs}"
    if tokens >= longest:
        return f"{tokens} tokens of a row do not fit max_model_len={longest}"
    if pages > room:
        return f"{batch} rows of {context} tokens need {pages:,} pages of KV memory, and there are {room:,}"
    return None


@contextmanager
def hold_batch(bench: Bench, sizes: SweepSizes, batch: int, context: int) -> Iterator[None]:
    """Prefills random prompts and yields once all rows decode and steps have settled; ends the requests afterwards."""
    ready = bench.llm.ready
    engine = ready.engine
    length, longest = sizes.plan(batch, context, ready.shapes.limits.max_num_batched_tokens)
    rng, vocab_size = random.Random(batch * 100_003 + context), ready.shapes.model.vocab_size
    params = SamplingParams(temperature=0, max_tokens=longest, ignore_eos=True, detokenize=False)
    for _ in range(batch):
        ids = [rng.randrange(3, vocab_size) for _ in range(length)]
        engine.add_request(ready.requests.make({"prompt_token_ids": ids}, params))
    try:
        while len(engine.scheduler.batch.decoding) < batch and engine.has_unfinished:
            engine.step()
        for _ in range(_SETTLE):
            engine.step()
        yield
    finally:
        engine.abort_all()
        engine.drain()


def measure_point(bench: Bench, sizes: SweepSizes, batch: int, context: int) -> Point:
    """Prefills the batch, times its decode steps and ends the requests.

    Raises:
        RuntimeError: a row was preempted, or a program compiled, while the clock ran.
    """
    from jaxserve.core.runtime.compile import watch_compiles

    engine, count_compiles, seconds = bench.llm.ready.engine, watch_compiles(), []
    with hold_batch(bench, sizes, batch, context):
        compiled = count_compiles()
        for _ in range(sizes.num_iters):
            start = time.perf_counter()
            for _ in range(sizes.num_steps):
                engine.step()
            seconds.append((time.perf_counter() - start) / sizes.num_steps)
        rows = engine.scheduler.batch.decoding
        if len(rows) != batch or count_compiles() != compiled:
            raise RuntimeError(
                f"{batch} rows of {context} tokens: a row was preempted or a program compiled while the clock ran"
            )
        ended_at = sum(len(row.token_ids) for row in rows) / batch
    return _describe(bench, batch, context, ended_at - sizes.num_measured / 2, Spread.of(seconds))


def _describe(bench: Bench, batch: int, wanted: int, context: float, seconds: Spread) -> Point:
    ready, costs, limits = bench.llm.ready, bench.costs, bench.limits
    devices, pages = costs.num_devices, math.ceil(context / ready.plan.page_size)
    return Point(
        batch=batch,
        context=context,
        wanted_context=wanted,
        num_padded_rows=ready.shapes.buckets.find(batch, batch).rows,
        seconds=seconds,
        streaming_seconds=costs.streamed_bytes(batch) / limits.bytes_per_second / devices,
        computing_seconds=costs.operations(batch, batch) / limits.flops_per_second / devices,
        reading_seconds=batch * costs.key_bytes(round(context)) / limits.bytes_per_second / devices,
        weight_bytes=count_weight_bytes(bench.llm),
        kv_bytes=round(batch * costs.key_bytes(pages * ready.plan.page_size)),
    )


def find_end(points: Sequence[Point], misfits: Mapping[int, str], context: int) -> End:
    """Returns why the curve of one context ends: its first point within 10 % of the most, or the last that fits."""
    points = sorted(points, key=lambda point: point.batch)
    best = max(points, key=lambda point: point.tokens_per_second)
    first = next(point for point in points if point.tokens_per_second >= (1 - _LEAST_GAIN) * best.tokens_per_second)
    last = points[-1]
    if first is not last:
        most = f"the most, {best.tokens_per_second:,.0f} tokens/s"
        if first is not best:
            most = f"{first.tokens_per_second / best.tokens_per_second:.0%} of {most} at {best.batch} rows"
        text = f"{first.batch} rows reach {most}; what takes longest in the limit there is {best.bound}"
        return End(context, first.batch, "memory" if "memory" in best.bound else "compute", text)
    if misfits:
        return End(context, last.batch, "memory", f"memory ends it after {last.batch} rows: {misfits[min(misfits)]}")
    text = f"no end up to {last.batch} rows; what takes longest in the limit there is {last.bound}"
    return End(context, last.batch, "none", text)
