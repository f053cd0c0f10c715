"""The simulator against a real run: the same requests through the real loop on a null device, and in virtual time.

The null device is `bench_host.py`'s: programs that do nothing, around which everything is real. A first run, with other
requests, gives the seconds of steps to which the formula is fitted. A second run is then predicted. Idle time is
skipped in both. With `--clock cpu` the real run's time is the CPU time of its thread, so that other processes of the
machine do not count; with `--clock wall` it is the time on the wall.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass

from bench_host import CONTEXT, PAGE_SIZE, make_null_runner
from instrument import make_parser, read_run

from jaxserve.core.pages import PageGroup, PageManager
from jaxserve.core.runtime.buckets import Bucket, BucketTable
from jaxserve.core.runtime.rows import SampleVariant
from jaxserve.core.runtime.runner import ModelRunner, StartedStep
from jaxserve.core.scheduler import SchedulerLimits
from jaxserve.core.scheduler.step_plan import StepPlan
from jaxserve.engine.engine import Engine
from jaxserve.request import Request
from jaxserve.tools.simulation.calibration import StepWork, fit
from jaxserve.tools.simulation.device import StepFormula
from jaxserve.tools.simulation.replica import EngineSpec, TimedScheduler, Timeline, make_request, simulate
from jaxserve.tools.simulation.report import Distribution, collect_itls

CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.thread_time, "wall": time.perf_counter}
ROW_STEP = 4  # the host's time grows with the rows that work, so that sizes are narrow


class SkippingClock:
    """A clock whose idle time can be skipped."""

    def __init__(self, source: Callable[[], float]) -> None:
        self._source = source
        self.restart()

    def restart(self) -> None:
        """Sets the time to 0."""
        self._offset = -self._source()

    def __call__(self) -> float:
        return self._source() + self._offset

    def skip_to(self, seconds: float) -> None:
        self._offset += max(0.0, seconds - self())


@dataclass(frozen=True)
class Step:
    """One turn of the loop: the step that it planned, and how long it took."""

    bucket: Bucket
    seconds: float


def make_spec(rows: int, budget: int) -> EngineSpec:
    buckets = BucketTable(range(ROW_STEP, rows + 1, ROW_STEP), range(rows + 32, budget + 1, 64), rows)
    limits = SchedulerLimits(
        max_num_seqs=rows,
        max_num_batched_tokens=buckets.token_counts[-1],
        max_model_len=CONTEXT,
        max_prefix_updates=CONTEXT // PAGE_SIZE,
        row_sizes=buckets.row_counts,
        token_sizes=buckets.token_counts,
        pads_cheaply=True,
    )
    return EngineSpec(limits, (PageGroup(rows * CONTEXT // PAGE_SIZE + 1),), buckets, StepFormula(), PAGE_SIZE)


def make_requests(count: int, rate: float, seed: int) -> list[Request]:
    """Returns requests that arrive at random, `rate` a second."""
    rng, now, requests = random.Random(seed), 0.0, []
    for index in range(count):
        now += rng.expovariate(rate)
        prompt = tuple(rng.randrange(1000) for _ in range(rng.randint(32, 512)))
        requests.append(make_request(f"r{index}", now, prompt, rng.randint(16, 128)))
    return requests


def make_warm_runner(spec: EngineSpec) -> ModelRunner:
    """Returns a null device whose programs have all run once, so that none is compiled while the clock runs."""
    runner = make_null_runner(spec.limits.max_num_seqs, spec.buckets)
    for bucket in spec.buckets.buckets:
        packed = runner._layouts[bucket].new()
        selected, _ = runner._run(bucket, packed)
        StartedStep(runner, bucket, 0, SampleVariant.GREEDY, False, selected, None, None, packed).sample().result()
    return runner


def run_real(
    spec: EngineSpec, runner: ModelRunner, requests: list[Request], source: Callable[[], float]
) -> tuple[list[Timeline], list[Step]]:
    """Runs requests through the real loop; returns their timelines and the seconds of its steps."""
    clock = SkippingClock(source)
    pages = PageManager(
        spec.groups,
        page_size=spec.page_size,
        max_chunk=spec.limits.max_num_batched_tokens,
        enable_prefix_caching=spec.enable_prefix_caching,
    )
    scheduler = TimedScheduler(spec.limits, pages, clock)
    scheduler.timelines = {each.request_id: Timeline.of(each) for each in requests}
    runner.reset()
    engine = Engine(scheduler, runner)
    planned: list[StepPlan] = []
    plan_step = scheduler.plan

    def note_plan() -> StepPlan | None:
        made = plan_step()
        planned.extend([] if made is None else [made])
        return made

    scheduler.plan = note_plan  # type: ignore[method-assign]
    first = make_request("first", 0.0, range(64), 8)
    scheduler.timelines["first"] = Timeline.of(first)
    engine.add_request(first)  # the first steps after a reset take longer
    while engine.has_unfinished:
        engine.step()
    del scheduler.timelines["first"]
    planned.clear()
    clock.restart()
    turns: list[Step] = []
    waiting = requests[::-1]
    while waiting or engine.has_unfinished:
        if not engine.has_unfinished:
            clock.skip_to(waiting[-1].arrival_time)
        start = clock()
        while waiting and waiting[-1].arrival_time <= clock():
            engine.add_request(waiting.pop())
        engine.step()
        if planned:
            plan = planned.pop()
            turns.append(Step(spec.buckets.find(plan.num_tokens, plan.num_rows), clock() - start))
    return list(scheduler.timelines.values()), turns


def fit_formula(steps: list[Step]) -> StepFormula:
    """Fits c0, c1 and the time per token to the mean turn of each bucket, weighted by how many there were."""
    by_bucket: dict[Bucket, list[float]] = defaultdict(list)
    for step in steps:
        by_bucket[step.bucket].append(step.seconds)
    works = [
        StepWork(0.0, float(bucket.tokens), 0.0, bucket.rows, statistics.fmean(seconds))
        for bucket, seconds in by_bucket.items()
        for _ in range(len(seconds) // 5)
    ]
    found = fit("null device", "cpu", works)
    return StepFormula(
        token_seconds=1 / found.flops_per_second, step_seconds=found.step_seconds, row_seconds=found.row_seconds
    )


def compare(real: list[list[Timeline]], simulated: list[Timeline]) -> dict[str, dict[str, list[float]]]:
    """Returns [real, simulated] milliseconds by time and quantile; of several real runs the median."""
    found = {}
    for name, collect in (
        ("TTFT", lambda those: [each.ttft for each in those]),
        ("TPOT", lambda those: [each.tpot for each in those]),
        ("ITL", collect_itls),
    ):
        runs = [Distribution.of(collect(those)) for those in (*real, simulated)]
        found[name] = {}
        for quantile in ("p50", "p90", "p99"):
            *seen, predicted = (getattr(each, quantile) for each in runs)
            found[name][quantile] = [statistics.median(seen), predicted]
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--budget", type=int, default=1024, help="tokens of a step (default: 1024)")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--load", type=float, default=0.7, help="of what the null device can serve (default: 0.7)")
    parser.add_argument("--repeats", type=int, default=3, help="real runs (default: 3)")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    run = read_run(parser, {"rows": 8, "budget": 256, "requests": 60, "repeats": 1})
    args = run.args
    spec, source = make_spec(args.rows, args.budget), CLOCKS[args.clock]
    runner = make_warm_runner(spec)
    gc.disable()  # its pauses are no part of the formula
    run_real(spec, runner, make_requests(50, 1e9, 0), source)  # warms up
    full, _ = run_real(spec, runner, make_requests(200, 1e9, 1), source)
    rate = args.load * len(full) / max(each.token_times[-1] for each in full)
    _, steps = run_real(spec, runner, make_requests(args.requests, rate, 2), source)
    formula = fit_formula(steps)
    requests = make_requests(args.requests, rate, 3)
    real = [run_real(spec, runner, requests, source)[0] for _ in range(args.repeats)]
    simulated = simulate(requests, EngineSpec(spec.limits, spec.groups, spec.buckets, formula, spec.page_size))
    found = compare(real, simulated)
    lines = [
        (f"{name} {quantile}", f"{first:.3f}", f"{second:.3f}", f"{second / first:.3f}")
        for name, quantiles in found.items()
        for quantile, (first, second) in quantiles.items()
    ]
    fitted = (
        f"fitted: c0 {1e6 * formula.step_seconds:.0f} us, c1 {1e6 * formula.row_seconds:.2f} us a row, "
        f"{1e6 * formula.token_seconds:.3f} us a token"
    )
    title = f"{args.requests} requests, {rate:.0f} a second, milliseconds ({args.clock} clock)"
    run.show(title, ("", "real", "simulated", "simulated / real"), lines, [fitted])
    run.save({"formula": asdict(formula), "milliseconds": found})


if __name__ == "__main__":
    main()
