"""Decode steps of the whole engine against the device's limit, with random weights.

For each batch size B and context, B requests are prefilled. Once all decode, steps are timed while the engine runs as
it does for users, planning the next step while one runs. The limit of a step is max(W / BW, F / P) + KV / BW: the
weights W are streamed while F operations run on them, then the pages KV are read. Of experts, W counts those that B
tokens go to. BW and P are the rates of a copy and a matmul in the same run. `--dry-run` uses a tiny shape, to test the
script.

`--calibrate FILE` also times prompt steps, fits the rates and costs of `jaxserve simulate` to all steps, and writes
them.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from device_limits import DeviceLimits, measure_limits
from rich.console import Console
from rich.table import Table

from jaxserve import LLM, SamplingParams
from jaxserve.presets import load_preset
from jaxserve.request import Request
from jaxserve.runtime.buckets import Bucket
from jaxserve.simulation.calibration import StepWork, count_weights, fit, idle_bytes, write_calibration
from pallas_kernels.layout import page_bytes

BATCHES = (1, 8, 32, 64, 128, 256)
CONTEXTS = (1024, 4096)
DRY_RUN = {"preset": "llama-30m", "batches": (1, 2), "contexts": (64, 128), "steps": 4}
_MANY = 10**6  # tokens, which go to all experts
_SETTLE = 4  # steps after the last prefill that are not counted


@dataclass(frozen=True)
class Point:
    """One measured combination. Seconds are per step."""

    batch: int
    context: int
    seconds: float
    limit: float

    @property
    def share(self) -> float:
        return self.limit / self.seconds


def streamed_bytes(llm: LLM, num_tokens: int) -> float:
    """Returns the bytes of weights that a step reads: all but an embedding table that is only looked up, and experts
    that none of its tokens goes to."""
    shapes, params = llm.ready.shapes, llm.ready.runner.params
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    total -= 0 if shapes.model.embedding.tied else params["embed"]["weight"].nbytes
    return total - idle_bytes(shapes.model, num_tokens)


def step_limit(llm: LLM, limits: DeviceLimits, batch: int, context: int) -> float:
    """Returns the least seconds of a step on one device, by the module's formula."""
    weights = streamed_bytes(llm, batch)
    model = llm.ready.shapes.model
    matmuls = max(weights / limits.bytes_per_second, 2 * sum(count_weights(model)) * batch / limits.flops_per_second)
    return matmuls + batch * count_key_bytes(llm, context) / limits.bytes_per_second


def make_requests(llm: LLM, batch: int, context: int, steps: int) -> Iterator[Request]:
    """Yields requests with random prompts, so much shorter than the context that the measured steps lie around it."""
    rng = random.Random(batch * 100_003 + context)
    size, length = llm.ready.shapes.model.vocab_size, context - steps // 2
    params = SamplingParams(temperature=0, max_tokens=2 * steps + 2 * _SETTLE + batch, ignore_eos=True)
    for _ in range(batch):
        ids = [rng.randrange(3, size) for _ in range(length)]
        yield llm.ready.requests.make({"prompt_token_ids": ids}, params)


def measure(llm: LLM, limits: DeviceLimits, batch: int, context: int, steps: int) -> Point:
    """Prefills the batch, times `steps` decode steps and aborts the requests."""
    engine = llm.ready.engine
    requests = list(make_requests(llm, batch, context, steps))
    for request in requests:
        engine.add_request(request)
    while len(engine.scheduler.batch.decoding) < batch:
        engine.step()
    for _ in range(_SETTLE):
        engine.step()
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    seconds = (time.perf_counter() - start) / steps
    assert len(engine.scheduler.batch.decoding) == batch, "a row was preempted or ended while the clock ran"
    engine.abort_all()
    engine.drain()
    return Point(batch, context, seconds, step_limit(llm, limits, batch, context))


def describe_decode(llm: LLM, point: Point) -> StepWork:
    """Returns what a measured decode step had to do, padding included."""
    bucket = llm.ready.shapes.buckets.find(point.batch, point.batch)
    return _describe(llm, bucket, point.batch * count_key_bytes(llm, point.context), 0, point.seconds)


def measure_prompts(llm: LLM, steps: int) -> StepWork:
    """Times steps of prompts that fill the largest bucket; each prompt is as long as a step."""
    engine, bucket = llm.ready.engine, llm.ready.shapes.buckets.largest
    length = min(llm.ready.shapes.limits.max_num_batched_tokens, llm.ready.shapes.model.max_model_len - 1)
    rng, size = random.Random(0), llm.ready.shapes.model.vocab_size
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    started = engine.runner.counts.steps.copy()
    for turn in range(2):  # the first may compile
        started, start = engine.runner.counts.steps.copy(), time.perf_counter()
        for _ in range(steps if turn else 1):
            ids = [rng.randrange(3, size) for _ in range(length)]
            engine.add_request(llm.ready.requests.make({"prompt_token_ids": ids}, params))
        while engine.has_unfinished:
            engine.step()
        seconds = time.perf_counter() - start
    done = engine.runner.counts.steps - started
    assert set(done) == {bucket}, f"other steps than {bucket} ran: {done}"
    return _describe(llm, bucket, count_key_bytes(llm, length), length * (length + 1) // 2, seconds / done.total())


def _describe(llm: LLM, bucket: Bucket, key_bytes: float, num_pairs: int, seconds: float) -> StepWork:
    """Returns the work of a step that reads so many bytes of pages and computes so many pairs of query and key."""
    model = llm.ready.shapes.model
    layers, head = count_weights(model)
    pair_operations = sum(
        2 * len(group.layers) * group.heads.num_heads * (spec.head_dim + spec.out_dim)
        for group, spec in zip(model.kv_groups, llm.ready.plan.specs, strict=True)
    )
    operations = 2 * (layers * bucket.tokens + head * bucket.rows) + pair_operations * num_pairs
    return StepWork(streamed_bytes(llm, bucket.tokens), float(operations), key_bytes, bucket.rows, seconds)


def count_key_bytes(llm: LLM, context: int) -> float:
    """Returns the bytes of what a query at the end of `context` tokens sees, in all layers together."""
    groups = zip(llm.ready.shapes.model.kv_groups, llm.ready.plan.specs, strict=True)
    return sum(
        len(group.layers) * min(context, group.window or context) * page_bytes(spec) / spec.page_size
        for group, spec in groups
    )


def can_hold(llm: LLM, batch: int, context: int, steps: int) -> bool:
    """Whether the pools hold the batch to the end of the measurement."""
    tokens = context + 2 * steps + 2 * _SETTLE + batch
    pages = batch * (-(-tokens // llm.ready.plan.page_size) + 1)
    return pages < min(llm.ready.plan.num_pages) and tokens <= llm.ready.shapes.model.max_model_len


def print_points(console: Console, llm: LLM, limits: DeviceLimits, points: list[Point], skipped: list[str]) -> None:
    shapes = llm.ready.shapes
    title = (
        f"{shapes.model.family} {streamed_bytes(llm, _MANY) / 1e9:.2f} GB of weights, {shapes.model.dtype}, "
        f"KV {llm.ready.plan.specs[0].dtype}, "
        f"{shapes.impl} on {limits.device}: {limits.bytes_per_second / 1e12:.2f} TB/s, "
        f"{limits.flops_per_second / 1e12:.1f} TFLOP/s"
    )
    table = Table(title=title)
    for column in ("batch", "context", "ms per step", "limit", "share of the limit", "tokens/s"):
        table.add_column(column, justify="right")
    for point in points:
        table.add_row(
            str(point.batch),
            str(point.context),
            f"{1e3 * point.seconds:.3f}",
            f"{1e3 * point.limit:.3f}",
            f"{point.share:.0%}",
            f"{point.batch / point.seconds:,.0f}",
        )
    console.print(table)
    for text in skipped:
        console.print(f"not measured: {text}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-3.1-8b", help="model preset or checkpoint (default: %(default)s)")
    parser.add_argument("--layers", type=int, help="of the preset, fewer than it has")
    parser.add_argument("--load-format", default="dummy", help="dummy: random weights (default)")
    parser.add_argument("--compile", choices=("all", "used"), default="all", help="programs (default: %(default)s)")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--attention-impl", default="auto")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--steps", type=int, default=64, help="decode steps per point (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="a tiny shape on any device, in a minute")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--calibrate", type=Path, metavar="FILE", help="write the figures that jaxserve simulate takes")
    args = parser.parse_args()
    if args.dry_run:
        for name, value in DRY_RUN.items():
            setattr(args, name, value)
    return args


def build_llm(args: argparse.Namespace) -> LLM:
    """Returns the engine of the options, with fewer layers if they say so."""
    options: dict[str, Any] = {"max_num_batched_tokens": 128} if args.dry_run else {}
    with tempfile.TemporaryDirectory() as folder:
        model = args.preset
        if args.layers is not None:
            hf_config = load_preset(args.preset)
            if hf_config is None:
                raise SystemExit(f"--layers is for presets; there is none called {args.preset!r}")
            Path(folder, "config.json").write_text(json.dumps(hf_config | {"num_hidden_layers": args.layers}))
            model = folder
        return LLM(
            model,
            load_format=args.load_format,
            skip_tokenizer_init=True,
            kv_cache_dtype=args.kv_cache_dtype,
            attention_impl=args.attention_impl,
            max_num_seqs=max(args.batches),
            max_model_len=max(args.contexts) + 4 * args.steps + max(args.batches) + 64,
            enable_prefix_caching=False,
            compile=args.compile,
            **options,
        )


def write_points(path: Path, limits: DeviceLimits, points: list[Point], skipped: list[str]) -> None:
    found = [vars(point) | {"share": point.share} for point in points]
    document = {"jax": jax.__version__, "limits": limits.asdict(), "points": found, "not_measured": skipped}
    path.write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    args, console = parse_args(), Console()
    limits = measure_limits()
    start = time.perf_counter()
    llm = build_llm(args)
    console.print(f"ready after {time.perf_counter() - start:.1f} s, {llm.ready.plan.num_pages[0]:,} pages")
    points, skipped = [], []
    for context in args.contexts:
        for batch in args.batches:
            if not can_hold(llm, batch, context, args.steps):
                skipped.append(f"{batch} rows of {context} tokens do not fit the KV pools")
                continue
            points.append(measure(llm, limits, batch, context, args.steps))
            console.print(f"{batch} rows of {context}: {1e3 * points[-1].seconds:.3f} ms, {points[-1].share:.0%}")
            if args.json:  # after every point: a run that is cut off keeps its points
                write_points(args.json, limits, points, skipped)
    print_points(console, llm, limits, points, skipped)
    if args.json:
        write_points(args.json, limits, points, skipped)
    if args.calibrate:
        works = [*(describe_decode(llm, point) for point in points), measure_prompts(llm, args.steps)]
        found = fit(limits.device, llm.ready.shapes.platform, works)
        write_calibration(
            args.calibrate, found, model=args.preset, jax=jax.__version__, steps=[asdict(work) for work in works]
        )
        console.print(f"{found.describe()} Wrote {args.calibrate}")


if __name__ == "__main__":
    main()
