"""The host KV tier: both directions, the first token of a hit against computing it again, and what it costs a loop.

The first part runs a model on this device. Prompts of one length take turns on a pool that holds little more than one
of them, so each finds its pages on the host; new prompts are computed. The second part (`--loop`) is the real engine
loop with its copies over programs that compute nothing, at the pace of an 8B model on one H200 by formula, with prompts
of which none is found: what the tier takes away shows as lost throughput.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from bench_host import PAGE_SIZE, make_null_runner
from instrument import make_parser, read_run

from jaxserve import LLM, SamplingParams
from jaxserve.core.pages import PageGroup, PageManager
from jaxserve.core.runtime.buckets import BucketTable
from jaxserve.core.scheduler import Scheduler, SchedulerLimits, StepPlan
from jaxserve.engine.engine import Engine
from jaxserve.features.host_tier import start as tier_start
from jaxserve.features.host_tier.feature import HostTierCopies
from jaxserve.features.host_tier.page_copies import COPY_PAGES, HostMemory, HostSlots
from jaxserve.features.host_tier.start import measure_tier
from jaxserve.request import Request
from jaxserve.sampling_params import OutputKind

_FLOPS, _BYTES, _RATE, _BANDWIDTH = 16e9, 16e9, 500e12, 3.8e12  # an 8B model in bf16: per token, weights; one H200


class PacedRunner:
    """A runner whose steps take as long as the formula says, one after the other."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._free_at = runner, 0.0
        self.counts, self.num_compiles = runner.counts, 0

    def start(self, plan: StepPlan) -> PacedStep:
        step = self._runner.start(plan)
        seconds = max(plan.num_tokens * _FLOPS / _RATE, _BYTES / _BANDWIDTH)
        self._free_at = max(time.perf_counter(), self._free_at) + seconds
        return PacedStep(step, self._free_at)


class PacedStep:
    def __init__(self, step: Any, ends_at: float) -> None:
        self._step, self._ends_at = step, ends_at

    def sample(self, mask: Any = None) -> PacedStep:
        self._step = self._step.sample(mask)
        return self

    def result(self) -> Any:
        time.sleep(max(0.0, self._ends_at - time.perf_counter()))
        return self._step.result()


def run_loop(num_slots: int, *, rows: int, prompts: int, paced: bool) -> tuple[float, int]:
    """Serves prompts that share nothing; returns (seconds, pages saved)."""
    budget = 2048
    runner = make_null_runner(rows, BucketTable([rows], [rows + budget], rows))
    sharding = jax.sharding.NamedSharding(jax.make_mesh((1,), ("model",)), jax.sharding.PartitionSpec())
    memory = HostMemory(num_slots, (jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.bfloat16, sharding=sharding),))
    runner.features = (HostTierCopies(HostSlots(memory, runner.counts), 0, 4096),)
    pages = tuple(jnp.zeros((1, 1, 1, 1), jnp.bfloat16, device=sharding) for _ in range(COPY_PAGES))
    runner.device.programs.add("read_pages", 0, lambda cache, page_ids: pages)
    manager = PageManager(
        [PageGroup(rows * 40)],
        page_size=PAGE_SIZE,
        max_chunk=budget,
        enable_prefix_caching=True,
        num_host_slots=num_slots,
        max_copies=budget // PAGE_SIZE,
    )
    limits = SchedulerLimits(
        max_num_seqs=rows, max_num_batched_tokens=rows + budget, max_model_len=4096, max_prefix_updates=64
    )
    engine = Engine(Scheduler(limits, manager), PacedRunner(runner) if paced else runner)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
    rng = random.Random(1)

    def serve(count: int) -> float:
        for index in range(count):
            prompt = tuple(rng.choices(range(10**6), k=1024))
            engine.add_request(Request(f"{count} {index}", prompt, params))
        start = time.perf_counter()
        while engine.has_unfinished:
            engine.step()
        return time.perf_counter() - start

    serve(4 * rows)  # fills the pool with known content
    before = manager.host.pools[0].num_evictions
    seconds = serve(prompts)
    saved = manager.host.pools[0].num_cached + manager.host.pools[0].num_evictions - before
    return seconds, saved


def measure_model(model: str, length: int, repeats: int, **options: Any) -> dict[str, float]:
    """Returns rates in bytes per second, seconds and bytes for a model on this device; "first" is a first token."""
    tier_start.refuse_slow_tier = lambda *_: None  # a tier that cannot help is measured, too
    llm = LLM(model, max_num_seqs=4, max_model_len=length + 64, **options)
    ready, rng = llm.ready, random.Random(0)
    (tier,) = (each for each in ready.runner.features if isinstance(each, HostTierCopies))
    figures = measure_tier(tier.slots, ready.runner, ready.runner.device, ready.plan, ready.shapes.model.max_model_len)
    llm.ready.engine.reset()
    params = SamplingParams(temperature=0, max_tokens=1)

    def first_token(prompt: list[int]) -> tuple[float, int]:
        start = time.perf_counter()
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return time.perf_counter() - start, output.num_cached_tokens or 0

    def draw() -> list[int]:
        return [rng.randrange(10, ready.shapes.model.vocab_size // 2) for _ in range(length)]

    turns = [draw() for _ in range(4)]
    for prompt in [*turns, *turns]:
        first_token(prompt)
    computed = [first_token(draw())[0] for _ in range(repeats)]
    for prompt in turns:
        first_token(prompt)
    loaded = [first_token(turns[index % 4]) for index in range(repeats)]
    assert all(cached >= length - 2 * ready.plan.page_size for _, cached in loaded), "the pool held a whole turn"
    miss, hit = statistics.median(computed), statistics.median(seconds for seconds, _ in loaded)
    return {
        "save_bytes_per_second": figures.bytes_per_token / figures.save_seconds,
        "load_bytes_per_second": figures.bytes_per_token / figures.load_seconds,
        "bytes_per_token": figures.bytes_per_token,
        "load_seconds_per_token": figures.load_seconds,
        "compute_seconds_per_token": figures.prefill_seconds,
        "first_seconds_computed": miss,
        "first_seconds_loaded": hit,
    }


def list_model_lines(found: dict[str, float], length: int) -> list[tuple[str, str]]:
    """Returns (what, figure) for people."""
    miss, hit = found["first_seconds_computed"], found["first_seconds_loaded"]
    return [
        ("device to host", f"{found['save_bytes_per_second'] / 1e9:.2f} GB/s"),
        ("host to device", f"{found['load_bytes_per_second'] / 1e9:.2f} GB/s"),
        ("a token's KV", f"{found['bytes_per_token'] / 1024:.1f} KiB"),
        ("loading a token", f"{1e6 * found['load_seconds_per_token']:.2f} us"),
        ("computing a token", f"{1e6 * found['compute_seconds_per_token']:.2f} us"),
        (f"first token after {length} tokens, computed", f"{1e3 * miss:.1f} ms"),
        ("the same, loaded from the host", f"{1e3 * hit:.1f} ms ({hit / miss:.3f} of it)"),
    ]


def measure_loop(prompts: int, repeats: int) -> dict[str, float]:
    """Returns throughput with the tier over that without, and seconds of the host for a saved page."""
    found: dict[str, float] = {}
    for name, paced in (("paced_throughput_ratio", True), ("unpaced_throughput_ratio", False)):
        runs = [[run_loop(slots, rows=32, prompts=prompts, paced=paced) for slots in (0, 4096)] for _ in range(repeats)]
        plain, tier = (min(run[index][0] for run in runs) for index in (0, 1))
        found[name] = plain / tier
        found["seconds_per_saved_page"] = (tier - plain) / runs[0][1][1]
    return found


def list_loop_lines(found: dict[str, float]) -> list[tuple[str, str]]:
    """Returns (what, figure) for people."""
    ratio = "throughput with the tier / without"
    return [
        (f"at the pace of an 8B model: {ratio}", f"{found['paced_throughput_ratio']:.3f}"),
        (f"with a device that takes no time: {ratio}", f"{found['unpaced_throughput_ratio']:.3f}"),
        ("host time of a saved page", f"{1e6 * found['seconds_per_saved_page']:.0f} us"),
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo", help="as for jaxserve serve (default: demo)")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--prompt", type=int, default=1900, help="tokens of a prompt (default: 1900)")
    parser.add_argument("--size", type=float, default=0.5, help="GiB of the tier (default: 0.5)")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--loop", action="store_true", help="measure the loop instead, without a model")
    parser.add_argument("--prompts", type=int, default=96, help="with --loop: how many (default: 96)")
    run = read_run(parser, {"prompt": 200, "size": 0.02, "repeats": 1, "prompts": 4})
    args = run.args
    if args.loop:
        found = measure_loop(args.prompts, args.repeats)
        lines = list_loop_lines(found)
    else:
        page_size = 32 if jax.devices()[0].platform == "cpu" else 64
        options = {"load_format": args.load_format, "kv_offloading_size": args.size}
        pages = 2 * -(-(args.prompt + 64) // page_size)
        found = measure_model(args.model, args.prompt, args.repeats, num_kv_pages_override=pages, **options)
        lines = list_model_lines(found, args.prompt)
    run.show("Host KV tier", ("what", "figure"), lines)
    run.save(found)


if __name__ == "__main__":
    main()
