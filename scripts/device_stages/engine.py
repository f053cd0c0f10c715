"""Steps of the whole engine with random weights: decode steps by rows and context, prompts, and what a step is made of.

All points of a stage are measured in one process, because its programs take most of the time to compile.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path

import jax

from device_stages.engines import Load, open_bench, require_fit
from device_stages.items import Context, Item, NotHereError
from device_stages.predictions import predict
from device_stages.results import Line
from device_stages.traces import describe_trace
from jaxserve import SamplingParams
from jaxserve.tools.bench.batch_sizes import hold_batch, measure_point
from jaxserve.tools.bench.setup import Bench

LOADS = {
    "engine": Load(
        32,
        (
            *((1, 512), (32, 4096), (256, 512), (32, 512), (8, 512), (128, 512)),
            *((1, 4096), (8, 4096), (128, 4096)),
        ),
    ),
    "engine_xla": Load(8, ((1, 512), (32, 512), (1, 4096), (32, 4096))),
    "engine_8": Load(8, ((1, 512), (32, 512))),
    "engine_early": Load(8, ((1, 512), (32, 512))),
}
TINY_LOAD = Load(2, ((1, 64), (2, 64)), num_steps=2, budget=64)
OPTIONS = {"engine": {}, "engine_xla": {"attention_impl": "xla"}, "engine_8": {}, "engine_early": {}}
TRACED = 32, 512  # the rows and context whose steps are traced
TRACED_STEPS = 20
PROMPTS, PROMPT_RUNS = 8, 3


class Engine:
    """The engine of a stage, built when an item first needs it: also by the process behind one that died."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.load = TINY_LOAD if context.tiny else LOADS[context.stage]
        self.build_seconds = 0.0

    @cached_property
    def bench(self) -> Bench:
        start = time.perf_counter()
        bench = open_bench(self.context, self.load, **OPTIONS[self.context.stage])
        self.build_seconds = time.perf_counter() - start
        return bench


def list_items(context: Context) -> Iterator[Item]:
    engine = Engine(context)
    yield Item("start", partial(describe_start, engine))
    points = [(f"{rows} x {at}", partial(measure_rows, engine, rows, at)) for rows, at in engine.load.points]
    measured: list[tuple[str, Callable[[], Line]]] = [
        *points[:3],
        (f"prompts of {engine.load.budget}", partial(measure_prompts, engine)),
        ("trace", partial(trace_steps, engine)),
        *points[3:],
    ]
    for name, run in measured:
        yield Item(name, run, predict(context.stage, name))


def describe_start(engine: Engine) -> Line:
    """Returns the choices made at the start, and how long it took."""
    ready = engine.bench.llm.ready
    shapes = ready.shapes
    memory = jax.devices()[0].memory_stats() or {}
    return {
        "ok": not shapes.fell_back,
        "impl": shapes.impl,
        "reason": shapes.impl_reason,
        "build_seconds": round(engine.build_seconds, 1),
        "programs": ready.runner.num_programs,
        "pages": list(ready.plan.num_pages),
        "pool_gb": ready.plan.bytes_per_device / 1e9,
        "peak_gb": memory.get("peak_bytes_in_use", 0) / 1e9,
    }


def measure_rows(engine: Engine, rows: int, at: int) -> Line:
    """Returns the milliseconds of a decode step, and the device's limit for it."""
    bench, sizes = engine.bench, engine.load.sizes
    require_fit(bench, sizes, rows, at)
    with engine.context.clocks.watch() as clocks:
        point = measure_point(bench, sizes, rows, at)
    return {
        "ms": 1e3 * point.seconds.median,
        "ms_of_runs": [1e3 * seconds for seconds in point.seconds.values],
        "limit_ms": 1e3 * point.limit,
        "share": point.limit / point.seconds.median,
        "tokens_per_second": point.tokens_per_second,
        "clocks": clocks,
    }


def measure_prompts(engine: Engine) -> Line:
    """Returns the prompt tokens per second of prompts that each fill a step, and the milliseconds of a step."""
    bench, length = engine.bench, engine.load.budget
    ready, seconds = bench.llm.ready, []
    if length >= ready.shapes.model.max_model_len:
        raise NotHereError(f"prompts of {length} tokens do not fit max_model_len={ready.shapes.model.max_model_len}")
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    with engine.context.clocks.watch() as clocks:
        for run in range(PROMPT_RUNS + 1):  # the first warms up
            for index in range(PROMPTS):
                ids = [3 + (7919 * (token + index) + run) % 1000 for token in range(length)]
                ready.engine.add_request(ready.requests.make({"prompt_token_ids": ids}, params))
            start = time.perf_counter()
            while ready.engine.has_unfinished:
                ready.engine.step()
            seconds.append((time.perf_counter() - start) / PROMPTS)
    best = sorted(seconds[1:])[PROMPT_RUNS // 2]
    limit = bench.costs.operations(length, 1) / bench.limits.flops_per_second
    return {
        "ms": 1e3 * best,
        "ms_of_runs": [1e3 * each for each in seconds[1:]],
        "limit_ms": 1e3 * limit,
        "share": limit / best,
        "tokens_per_second": length / best,
        "clocks": clocks,
    }


def trace_steps(engine: Engine) -> Line:
    """Returns what the device did in a few decode steps: its busy and idle time, and the longest kernels."""
    rows, at = engine.load.points[-1] if engine.context.tiny else TRACED
    bench, steps = engine.bench, engine.load.num_steps if engine.context.tiny else TRACED_STEPS
    require_fit(bench, engine.load.sizes, rows, at)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 0
    step = bench.llm.ready.engine.step
    with hold_batch(bench, engine.load.sizes, rows, at), tempfile.TemporaryDirectory() as folder:
        begun, worked = time.perf_counter(), time.thread_time()
        for _ in range(steps):
            step()
        wall, host = time.perf_counter() - begun, time.thread_time() - worked
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(steps):
                step()
        paths = sorted(Path(folder).rglob("*.xplane.pb"))
        found = describe_trace(jax.profiler.ProfileData.from_file(str(paths[-1])), steps) if paths else {}
    times = {"us_of_step": 1e6 * wall / steps, "host_us_of_step": 1e6 * host / steps}
    if not found:
        return {"ok": None, "error": "the profiler saw no kernels of a device", **times}
    return times | found
