"""The figures of `jaxserve simulate --calibration`, fitted to steps that `bench sweep` measured."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.errors import ConfigError
from jaxserve.sampling_params import SamplingParams
from jaxserve.tools.bench.batch_sizes import Point
from jaxserve.tools.bench.setup import Bench

if TYPE_CHECKING:
    from jaxserve.core.runtime.buckets import Bucket
    from jaxserve.tools.simulation.calibration import Calibration, StepWork


_LEAST_POINTS = 3


def calibrate(bench: Bench, points: Sequence[Point], path: Path, *, num_steps: int) -> Calibration:
    """Times prompt steps too, fits the rates and costs to all steps, writes the file and returns what it holds.

    Raises:
        ConfigError: there are fewer than three points, or no prompt can be as long as a step.
    """
    from jaxserve.tools.simulation.calibration import fit, write_calibration

    if len(points) < _LEAST_POINTS:
        message = f"fits four figures to prompt steps and at least {_LEAST_POINTS} points, got {len(points)}"
        raise ConfigError(message, field="calibrate", value=str(path))
    limits = bench.llm.ready.shapes.limits
    if limits.max_num_batched_tokens >= limits.max_model_len:
        message = f"needs prompts that fill a step, so above max_num_batched_tokens={limits.max_num_batched_tokens}"
        raise ConfigError(message, field="max_model_len", value=limits.max_model_len)
    works = [*(_describe_decode(bench, point) for point in points), _measure_prompts(bench, num_steps)]
    shapes = bench.llm.ready.shapes
    found = fit(bench.limits.device, shapes.platform, works)
    facts = {"model": shapes.config.model.model, "jax": metadata.version("jax")}
    write_calibration(path, found, **facts, steps=[asdict(work) for work in works])
    return found


def _describe_decode(bench: Bench, point: Point) -> StepWork:
    """Returns what a measured decode step had to do, padding included."""
    bucket = bench.llm.ready.shapes.buckets.find(point.batch, point.batch)
    key_bytes = point.batch * bench.costs.key_bytes(round(point.context))
    return _describe(bench, bucket, key_bytes, 0, point.seconds.median)


def _measure_prompts(bench: Bench, num_steps: int) -> StepWork:
    """Times steps of prompts that fill the largest bucket; each prompt is as long as a step."""
    ready = bench.llm.ready
    engine, bucket = ready.engine, ready.shapes.buckets.largest
    length = ready.shapes.limits.max_num_batched_tokens
    rng, size = random.Random(0), ready.shapes.model.vocab_size
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    started, seconds = engine.runner.counts.steps.copy(), 0.0
    for turn in range(2):  # the first may compile
        started, start = engine.runner.counts.steps.copy(), time.perf_counter()
        for _ in range(num_steps if turn else 1):
            ids = [rng.randrange(3, size) for _ in range(length)]
            engine.add_request(ready.requests.make({"prompt_token_ids": ids}, params))
        while engine.has_unfinished:
            engine.step()
        seconds = time.perf_counter() - start
    done = engine.runner.counts.steps - started
    if set(done) != {bucket}:
        raise RuntimeError(f"other steps than {bucket} ran: {dict(done)}")
    pairs = length * (length + 1) // 2
    return _describe(bench, bucket, bench.costs.key_bytes(length), pairs, seconds / done.total())


def _describe(bench: Bench, bucket: Bucket, key_bytes: float, num_pairs: int, seconds: float) -> StepWork:
    """Returns the work of a step that reads so many bytes of pages and computes so many pairs of query and key."""
    from jaxserve.tools.simulation.calibration import StepWork

    costs = bench.costs
    operations = costs.operations(bucket.tokens, bucket.rows) + costs.pair_operations * num_pairs
    return StepWork(costs.streamed_bytes(bucket.tokens), operations, key_bytes, bucket.rows, seconds)
