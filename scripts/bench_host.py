"""Host time per step: the real engine loop on a device that does nothing.

The device's two programs are jitted no-ops on the argument tree of the 8B preset: stacked, as on accelerators, with
every dimension shrunk to one, because only the number of leaves costs the host. Everything around them is what serves
users: scheduler, pages, packing, transfer, dispatch, commit, detokenizing, outputs, and the garbage collector as a
server sets it.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from instrument import make_parser, read_run

from jaxserve.core.layers.stack import stack_specs
from jaxserve.core.models.base import ParamSpec
from jaxserve.core.pages import PageGroup, PageManager
from jaxserve.core.runtime.buckets import BucketTable
from jaxserve.core.runtime.converter import WeightConverter
from jaxserve.core.runtime.device_state import make_zeros, row_state_specs
from jaxserve.core.runtime.inputs import StateShape
from jaxserve.core.runtime.params import WeightWriter
from jaxserve.core.runtime.programs import Programs
from jaxserve.core.runtime.rows import SampleVariant, list_variants
from jaxserve.core.runtime.runner import ModelRunner
from jaxserve.core.runtime.step_arrays import HiddenStates, RowLines, SampledTokens, SelectedLines
from jaxserve.core.runtime.tee import TeeRunner
from jaxserve.core.sampling import sampler_state_specs
from jaxserve.core.scheduler import Scheduler, SchedulerLimits
from jaxserve.core.scheduler.sequence import NOT_KEPT
from jaxserve.core.sharding import DEFAULT_RULES, make_mesh
from jaxserve.engine.engine import Engine
from jaxserve.engine.thread import tune_garbage_collector
from jaxserve.families.registry import param_specs, parse_config
from jaxserve.features.recording.recording import Recording, RecordingFile
from jaxserve.presets import load_preset
from jaxserve.request import Request, ServiceTier, Tenant
from jaxserve.sampling_params import OutputKind, SamplingParams
from jaxserve.scheduler_options import SchedulerOptions

PRESET = "llama-3.1-8b"
PAGE_SIZE = 64
CONTEXT = 4096
PROMPT = 64
PARTS = ("plan", "inputs", "dispatch", "commit", "tell", "detokenize")
ALL_POLICIES = SchedulerOptions(
    scheduling_policy="fair",
    priority_itl_ms=1000.0,
    priority_scheduling_preemption_threshold=10,
    max_num_partial_prefills=4,
    max_long_partial_prefills=2,
)
# Returns a runner around the given one, and the (owner, method) by which that runner tells somebody of its calls.
Tee = Callable[[ModelRunner], tuple[TeeRunner, list[tuple[Any, str]]]]
TENANTS = [Tenant(f"tenant {number}", weight=1.0 + number) for number in range(8)]


class Stopwatch:
    """Adds up the time of wrapped functions, without that of the wrapped functions they call."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._stack: list[float] = []

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._stack.append(0.0)
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                taken = time.thread_time() - start
                self.seconds[part] += taken - self._stack.pop()
                if self._stack:
                    self._stack[-1] += taken

        return timed


def make_null_runner(max_rows: int, buckets: BucketTable) -> ModelRunner:
    """Returns the real runner over programs that hand their donated state back untouched."""
    config = parse_config(load_preset(PRESET) or {})
    device = jax.devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    is_spec = lambda leaf: isinstance(leaf, ParamSpec)  # noqa: E731
    specs = stack_specs(param_specs(config), "stacked")
    params = jax.tree.map(lambda s: jnp.zeros((1,) * len(s.shape), s.dtype, device=sharding), specs, is_leaf=is_spec)
    pages_per_row = CONTEXT // PAGE_SIZE
    state = StateShape(1, max_rows + 1, pages_per_row, 2 * max_rows + pages_per_row)
    cache = (jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.bfloat16, sharding=sharding),)

    def null_forward(params: Any, cache: Any, rows: Any, packed: Any, more: Any, *, num_rows: int) -> Any:
        del params, packed, more
        blank = jnp.zeros((num_rows, 1), jnp.int32)
        selected = SelectedLines(jnp.zeros((1, 1)), RowLines(jnp.zeros((num_rows, 3), jnp.int32)))
        return cache, rows, selected, HiddenStates(blank, None)

    def null_sample(
        rows: Any, kept: Any, sampler: None, read: Any, selected: SelectedLines, mask: None, *, width: int
    ) -> Any:
        """Accepts all drafts of every other row and none of the rest; drafts the same again."""
        ids = jnp.arange(len(selected.lines), dtype=jnp.int32) % 97 + 32
        runs = jnp.tile(ids[:, None], width)
        is_kept = (jnp.arange(width) == 0) | (jnp.arange(len(ids)) % 2 == 0)[:, None]
        drafts = runs[:, 1:] if width > 1 else None
        return rows, kept, sampler, SampledTokens(jnp.where(is_kept, runs, NOT_KEPT), drafts)

    def null_look_up(rows: Any, lookup: Any, lines: Any, ids: Any) -> Any:
        """Drafts what each row has just sampled."""
        del lookup, lines
        return rows, jnp.tile(ids, max(width for _, width in buckets.verify_sizes) - 1)

    state_specs = cache, row_state_specs(state, sharding), sampler_state_specs(1, 1, sharding), ()
    programs = Programs()
    programs.add("zeros", None, functools.partial(make_zeros, state_specs))
    for bucket in buckets.buckets:
        step = functools.partial(null_forward, num_rows=bucket.rows)
        programs.add("forward", bucket, jax.jit(step, donate_argnums=(1, 2), keep_unused=True))
        sample = functools.partial(null_sample, width=bucket.width)
        key = bucket.rows, bucket.width, SampleVariant.GREEDY
        programs.add("sample", key, jax.jit(sample, donate_argnums=(0, 1, 2)))
        programs.add("look_up", bucket.rows, jax.jit(null_look_up, donate_argnums=0))
    runner = ModelRunner(
        programs,
        buckets,
        params=params,
        writer=WeightWriter(WeightConverter(config, make_mesh(1), DEFAULT_RULES), params),
        sampler_specs=state_specs[2],
        state_shape=state,
        variants=list_variants(deterministic=False),
    )
    return runner


class _Characters:
    """A tokenizer whose stream is a table look-up, to time what the engine adds to detokenizing."""

    eos_token_ids = ()

    def new_stream(self, *_: Any) -> _Characters:
        return self

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


def measure(
    rows: int,
    steps: int,
    tokenizer: Any,
    options: SchedulerOptions | None = None,
    tee: Tee | None = None,
    width: int = 1,
) -> dict[str, float]:
    """Returns microseconds of CPU per step, by part, with `rows` rows decoding and every output streamed.

    With `options`, the requests are those of eight tenants and two tiers, and as many wait as run. With `tee`, somebody
    is told of every step. With `width` above 1, steps verify `width` - 1 drafts a row, and half of the rows accept all
    of them.
    """
    buckets = BucketTable([rows], [rows + 4096], rows, [(rows, width)] if width > 1 else [])
    runner = make_null_runner(rows, buckets)
    total_pages = rows * CONTEXT // PAGE_SIZE + 1
    pages = PageManager(
        [PageGroup(total_pages)], page_size=PAGE_SIZE, max_chunk=rows + 4096, enable_prefix_caching=True
    )
    limits = SchedulerLimits(
        max_num_seqs=rows,
        max_num_batched_tokens=rows + 4096,
        max_model_len=CONTEXT,
        max_prefix_updates=CONTEXT // PAGE_SIZE,
        row_sizes=buckets.row_counts,
        token_sizes=buckets.token_counts,
        pads_cheaply=True,
        options=SchedulerOptions() if options is None else options,
        verify_widths=buckets.verify_sizes,
        max_drafts=width - 1,
        fixed_drafts=((1, rows, width - 1),) if width > 1 else None,
    )
    scheduler = Scheduler(limits, pages)
    outer, tellers = (runner, []) if tee is None else tee(runner)
    engine = Engine(scheduler, outer, tokenizer=tokenizer)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, output_kind=OutputKind.DELTA)
    for index in range(rows if options is None else 2 * rows):
        request = Request(f"r{index}", tuple(range(index, index + PROMPT + index % PAGE_SIZE)), params)
        if options is not None:
            tier = ServiceTier.PRIORITY if index < rows // 2 else ServiceTier.DEFAULT
            request = dataclasses.replace(request, tenant=TENANTS[index % len(TENANTS)], service_tier=tier)
        engine.add_request(request)
    while len(scheduler.batch.decoding) < rows:
        engine.step()
    watch = Stopwatch()
    scheduler.plan = watch.wrap("plan", scheduler.plan)  # type: ignore[method-assign]
    scheduler.commit = watch.wrap("commit", scheduler.commit)  # type: ignore[method-assign]
    runner._run = watch.wrap("dispatch", runner._run)  # type: ignore[method-assign]
    runner.sample = watch.wrap("dispatch", runner.sample)  # type: ignore[method-assign]
    runner.start = watch.wrap("inputs", runner.start)  # type: ignore[method-assign]
    for owner, method in tellers:
        setattr(owner, method, watch.wrap("tell", getattr(owner, method)))
    if outer is not runner:
        outer.start = watch.wrap("tell", outer.start)  # type: ignore[method-assign]
    engine._show = watch.wrap("detokenize", engine._show)  # type: ignore[method-assign]
    samples: list[dict[str, float]] = []
    for _ in range(steps):
        watch.seconds = dict.fromkeys(PARTS, 0.0)
        engine.step()
        samples.append(watch.seconds)
    return {part: 1e6 * statistics.median(sample[part] for sample in samples) for part in PARTS}


def record_in(path: Path) -> Tee:
    """Returns a `Tee` that records every step in a new file."""

    def tee(runner: ModelRunner) -> tuple[TeeRunner, list[tuple[Any, str]]]:
        file = RecordingFile(path, {})
        return TeeRunner(runner, Recording(file, lambda: "")), [(file, "write")]

    return tee


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 256, 512, 1024])
    parser.add_argument("--steps", type=int, default=200, help="steps measured per size (default: 200)")
    parser.add_argument(
        "--policies", action="store_true", help="all policies on: eight tenants, two tiers, and as many waiting rows"
    )
    parser.add_argument("--width", type=int, default=1, help="tokens that each row computes in a step (default: 1)")
    parser.add_argument("--record", action="store_true", help="record every step, in a temporary file")
    parser.add_argument("--tokenizer", metavar="DIR", help="detokenize with this one (default: a table look-up)")
    run = read_run(parser, {"rows": [1, 16], "steps": 20})
    args = run.args
    tokenizer: Any = _Characters()
    if args.tokenizer:
        from jaxserve.tokenizers import load_tokenizer

        tokenizer = load_tokenizer(args.tokenizer)
    tune_garbage_collector()
    fixed, each = (60, 0.5) if args.width == 1 else (100, 1.3)
    shown = [part for part in PARTS if part != "tell" or args.record]
    figures, lines = [], []
    for rows in args.rows:
        with tempfile.TemporaryDirectory() as folder:
            tee = record_in(Path(folder) / "steps.jsonl") if args.record else None
            parts = measure(rows, args.steps, tokenizer, ALL_POLICIES if args.policies else None, tee, args.width)
        loop, aim = sum(parts.values()) - parts["detokenize"], fixed + each * rows
        figures.append(
            {"rows": rows, "total_us": sum(parts.values()), "loop_us": loop, "aim_us": aim}
            | {f"{part}_us": value for part, value in parts.items()}
        )
        cells = (f"{parts[part]:.0f}" for part in shown)
        lines.append((str(rows), *cells, f"{loop:.0f}", f"{aim:.0f}", f"{loop / aim:.2f}"))
    whole = " + ".join(part for part in shown if part != "detokenize")
    note = f"loop = {whole}; aim = {fixed} us + {each} us x rows; detokenize: aim 0.7 us x rows"
    title = f"Host time per step, microseconds (median of {args.steps} steps; argument tree: {PRESET})"
    run.show(title, ("rows", *shown, "loop", "aim", "loop / aim"), lines, [note], left=())
    run.save({"points": figures})


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
