"""Makes a runner from options and parameters: plans memory, compiles the programs and runs them once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.core.layers.mlp import MLPConfig
from jaxserve.core.layers.moe import MoEConfig
from jaxserve.core.pages import PageGroup
from jaxserve.core.runtime.arguments import describe_rows, make_compiler
from jaxserve.core.runtime.buckets import BucketTable
from jaxserve.core.runtime.compile import ProgramCompiler, Progress, compile_late, compile_programs, watch_compiles
from jaxserve.core.runtime.converter import WeightConverter
from jaxserve.core.runtime.host_memory import host_memory_bytes
from jaxserve.core.runtime.inputs import InputLayout
from jaxserve.core.runtime.memory import (
    CachePlan,
    DeviceUse,
    cache_budget,
    device_memory_bytes,
    format_bytes,
    params_bytes,
    plan_cache,
    refuse_shortage,
    sequence_bytes,
)
from jaxserve.core.runtime.nodes import ONE_NODE, Nodes
from jaxserve.core.runtime.params import WeightWriter
from jaxserve.core.runtime.programs import ProgramKey, Programs, StoredPrograms
from jaxserve.core.runtime.runner import ModelRunner
from jaxserve.core.runtime.shapes import Shapes
from jaxserve.core.runtime.step_counts import StepCounts
from jaxserve.core.runtime.step_programs import list_loops, list_programs
from jaxserve.core.sampling import sampler_state_specs
from jaxserve.core.sharding import DEFAULT_RULES
from jaxserve.errors import CapacityError
from jaxserve.families.registry import param_specs

_PROBE_PAGES = 8  # in the pool with which programs are measured before the real one is sized
_CODE_PER_PROGRAM = 8 * 2**20  # bytes, for estimates
_SNAPSHOTS_OF_ROW = 4  # that are wanted: two of the row's own text, as many of texts that may go on
_RESERVE = 512 * 2**20  # bytes an accelerator takes for modules and command buffers at first execution


def plan_pools(
    shapes: Shapes, *, budget: int, num_pages: Sequence[int] | None = None, num_snapshots: int | None = None
) -> CachePlan:
    """Returns the KV pools for `budget` bytes per device, or for the bytes or pages that the options fix.

    Args:
        num_pages: pages of each KV group, whatever the budget and the options.
        num_snapshots: the same of snapshots.

    Raises:
        CapacityError: no sequence of `max_model_len` tokens fits; pages fixed by an option may be fewer, except with
            `deterministic`.
    """
    cache, scheduler = shapes.config.cache, shapes.config.scheduler
    assert scheduler.max_num_batched_tokens is not None
    plan = plan_cache(
        shapes.model,
        specs=shapes.specs,
        max_chunk=scheduler.max_num_batched_tokens,
        num_devices=shapes.num_devices,
        budget=budget if cache.kv_cache_memory_bytes is None else cache.kv_cache_memory_bytes,
        max_sequences=_limit_sequences(shapes),
        override=cache.num_kv_pages_override,
        num_pages=num_pages,
        attached=shapes.attached_pages,
        snapshot_bytes=shapes.state_bytes,
        max_snapshots=_SNAPSHOTS_OF_ROW * shapes.state.padding_row if shapes.snapshot_grid else 0,
        num_snapshots=num_snapshots,
    )
    if scheduler.deterministic:
        plan.require_whole(shapes.model, scheduler.max_num_batched_tokens)
    return plan


def _limit_sequences(shapes: Shapes) -> int | None:
    """Returns how many sequences of `max_model_len` the pools hold at most, None for any number.

    Where texts are computed whole, nothing stays behind a step: the pools hold two steps, as these overlap.
    """
    scheduler, longest = shapes.config.scheduler, shapes.model.max_model_len
    assert scheduler.max_num_seqs is not None and scheduler.max_num_batched_tokens is not None
    if shapes.model.reads_whole:
        slots = scheduler.max_num_batched_tokens + scheduler.max_num_seqs * shapes.page_size
        return -(-2 * slots // longest)
    return scheduler.max_num_seqs if shapes.platform == "cpu" else None


def measure_use(
    shapes: Shapes,
    mesh: Mesh,
    trace: Callable[[], AbstractContextManager[Any]] = nullcontext,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> DeviceUse:
    """Returns bytes per device, by the memory analysis of the largest programs, compiled at once with a small pool.

    Args:
        trace: a context in which kernels see the devices of the mesh, if they are not here.
        options: of the compiler, for such devices.
    """
    scheduler = shapes.config.scheduler
    assert scheduler.max_num_batched_tokens is not None
    probe = plan_cache(
        shapes.model,
        specs=shapes.specs,
        max_chunk=scheduler.max_num_batched_tokens,
        num_devices=shapes.num_devices,
        budget=0,
        override=_PROBE_PAGES,
        attached=shapes.attached_pages,
    )
    threads = shapes.config.compile.compile_threads
    programs = compile_programs(
        make_compiler(shapes, probe, mesh, trace, options).compile, _list_largest(shapes), threads=threads
    )
    forwards = [program.memory_analysis() for program in programs.of_kind("forward").values()]
    kinds = dict.fromkeys(kind for kind, _ in _list_largest(shapes) if kind != "forward")
    others = [program.memory_analysis() for kind in kinds for program in programs.of_kind(kind).values()]
    code = max(use.generated_code_size_in_bytes for use in forwards) * len(shapes.buckets.buckets)
    code += sum(use.generated_code_size_in_bytes for use in others) * len(shapes.buckets.row_counts)
    return _sum_use(shapes, max(use.temp_size_in_bytes for use in (*forwards, *others)), code)


def _list_largest(shapes: Shapes) -> Iterator[ProgramKey]:
    """Yields the programs that take most memory."""
    rows = max(shapes.buckets.row_counts)
    # With fixed splits decoding keeps partial answers of the longest rows, which prompts have not.
    measured = shapes.buckets.buckets if shapes.config.scheduler.deterministic else (shapes.buckets.largest,)
    yield from (("forward", bucket) for bucket in measured)
    yield from (("sample", (rows, 1, variant)) for variant in shapes.sample_programs)
    if shapes.model.pooler.by_token:
        yield "embed", shapes.buckets.largest.tokens
    for feature in shapes.features:
        yield from feature.list_largest(shapes.buckets)


def estimate_use(shapes: Shapes) -> DeviceUse:
    """Returns an estimate of `measure_use` by formula, for devices that are not attached."""
    model, bucket = shapes.model, shapes.buckets.largest
    size = jnp.dtype(model.dtype).itemsize
    width = 2 * model.hidden_size + max(kind.mixer.num_activations + _count_columns(kind.mlp) for kind in model.layers)
    temporaries = 2 * bucket.tokens * width * size + 2 * bucket.rows * model.vocab_size * 4
    num_programs = len(shapes.buckets.buckets) + len(shapes.sample_programs) * len(shapes.buckets.row_counts)
    return _sum_use(shapes, temporaries, num_programs * _CODE_PER_PROGRAM)


def _count_columns(mlp: MLPConfig | MoEConfig | None) -> int:
    """Returns the numbers per token that a feed-forward block holds between its products."""
    if mlp is None:
        return 0
    if isinstance(mlp, MLPConfig):
        return 2 * mlp.intermediate_size
    return mlp.router.top_k * 2 * mlp.expert.intermediate_size + (_count_columns(mlp.shared) if mlp.shared else 0)


def _sum_use(shapes: Shapes, temporaries: int, code: int) -> DeviceUse:
    state = shapes.state
    sampler = sampler_state_specs(1, shapes.model.vocab_size)
    line = _count_bytes(sampler)
    kept = _count_bytes((describe_rows(shapes, None), [each.state_specs(shapes) for each in shapes.features]))
    packed = 4 * InputLayout(shapes.buckets.largest, state).size
    size = jnp.dtype(shapes.model.dtype).itemsize
    lines = max(shapes.buckets.largest.rows, *(rows * width for rows, width in shapes.buckets.verify_sizes), 0)
    if shapes.generates:
        selected = lines * (4 * shapes.model.vocab_size + size * shapes.model.hidden_size)
    elif shapes.model.pooler.by_token:  # the states and the vectors of all tokens
        selected = shapes.buckets.largest.tokens * (size * shapes.model.hidden_size + 4 * shapes.model.embedding_size)
    else:
        selected = 4 * lines * shapes.model.pooler.count_pooled(shapes.model.hidden_size)
    selected += _count_bytes([each.handed_specs(lines) for each in shapes.features])
    params = params_bytes(param_specs(shapes.model), shapes.num_devices, shapes.platform)
    return DeviceUse(
        params=params + sum(each.params_bytes(shapes) for each in shapes.features),
        temporaries=temporaries,
        code=code,
        state=state.rows * line + kept + 2 * (packed + selected),
        buffers=sum(each.buffer_bytes(shapes) for each in shapes.features),
        reserve=_RESERVE,
        recurrent=state.padding_row * shapes.state_bytes,
        pending=shapes.pending_bytes,
        rows=state.padding_row,
        sequence=sequence_bytes(
            shapes.model,
            specs=shapes.specs,
            max_chunk=shapes.limits.max_num_batched_tokens,
            num_devices=shapes.num_devices,
            attached=shapes.attached_pages,
        ),
    )


def _count_bytes(specs: Any) -> int:
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in jax.tree.leaves(specs))


def require_room(shapes: Shapes, limit: int | None) -> None:
    """Refuses what certainly does not fit, before weights are read and programs compiled.

    Args:
        limit: bytes of a device; None on CPU, where all devices and their pools share the host's memory.

    Raises:
        CapacityError: the parts exceed the limit, and says how much each takes; or what a feature keeps elsewhere.
        ConfigError: a feature's size is too small.
    """
    use, count, pools, on_host, cache = estimate_use(shapes), 1, 0, limit is None, shapes.config.cache
    if on_host or cache.fixes_pages:
        pools = plan_pools(shapes, budget=cache_budget(None, 1.0, None) if on_host else 0).bytes_per_device
    if limit is None:
        limit, count = host_memory_bytes(), shapes.num_devices
    of_pools = "kv_cache_memory_bytes" if cache.num_kv_pages_override is None else "num_kv_pages_override"
    parts = {"model": use.params, "max_num_seqs": use.state + use.recurrent + use.pending, of_pools: pools}
    parts = {name: count * size for name, size in parts.items()}
    refuse_shortage(limit, parts, replace(use, recurrent=count * use.recurrent))
    others = sum(parts.values()) if on_host else 0
    for feature in shapes.features:
        others += feature.require_room(shapes, others)


def start_runner(
    shapes: Shapes,
    mesh: Mesh,
    params: Mapping[str, Any],
    progress: Progress | None = None,
    *,
    feature_params: Sequence[Any] = (),
    only_largest: bool = False,
    announce: Callable[[str], None] = lambda text: None,
    num_pages: Sequence[int] | None = None,
    num_snapshots: int | None = None,
    nodes: Nodes = ONE_NODE,
    stored: StoredPrograms | None = None,
) -> tuple[ModelRunner, CachePlan]:
    """Plans memory, compiles and runs the programs; returns the runner and its pools. `params` is the runtime tree.

    With `compile="used"` the runner starts with the forward program of a short prompt; every other one is compiled
    when a step first needs it.

    Args:
        feature_params: the runtime tree of each feature, or None.
        only_largest: leave all programs but those of the largest buckets, which hold any step, to `compile_rest`.
        announce: told of each later compilation that takes noticeable time.
        num_pages: pages of each KV group; no memory is planned then.
        num_snapshots: of recurrent states, likewise.
        nodes: those that run this engine together; the least budget of theirs is planned.
        stored: has the programs, and the pages that they are for; none is compiled then.

    Raises:
        CapacityError: the device cannot hold one sequence of `max_model_len` tokens, or beside it a snapshot where a
            prefix cache is asked for, or a feature has no room.
        ConfigError: a feature cannot help.
    """
    is_replay = num_pages is not None  # which need not be fast
    budget = nodes.take_least("bytes of KV pools", _find_budget(shapes, mesh, stored)) if not is_replay else 0
    if stored is not None:
        num_pages, num_snapshots = stored.num_pages, stored.num_snapshots
    plan = plan_pools(shapes, budget=budget, num_pages=num_pages, num_snapshots=num_snapshots)
    if stored is not None:
        _require_budget(plan, budget)
    if num_pages is None and shapes.must_cache_prefixes and not caches_prefixes(shapes, plan):
        message = (
            f"needs snapshots of recurrent states, {format_bytes(plan.snapshot_bytes)} each, and none fits beside a "
            f"sequence of max_model_len={shapes.model.max_model_len}; lower that or max_num_seqs, or leave it out"
        )
        raise CapacityError(message, field="enable_prefix_caching", value=True)
    compiler = make_compiler(shapes, plan, mesh)
    buckets = shapes.buckets.take_largest() if only_largest and stored is None else shapes.buckets
    is_closed = shapes.config.compile.compile != "used" or stored is not None
    wanted = list_all_programs(shapes, buckets) if is_closed else [("forward", buckets.smallest_mixed)]
    programs = compile_programs(
        compiler.compile if stored is None else stored.load,
        wanted,
        threads=shapes.config.compile.compile_threads,
        progress=progress,
        known=Programs() if is_closed else Programs(compile_late(compiler, announce)),
    )
    runner = _make_runner(shapes, mesh, params, feature_params, compiler, programs, buckets)
    for feature in runner.features:
        feature.start(runner, runner.device, plan, must_help=not is_replay)
    if is_closed:
        runner.warm_up()
    return runner, plan


def _make_runner(
    shapes: Shapes,
    mesh: Mesh,
    params: Mapping[str, Any],
    feature_params: Sequence[Any],
    compiler: ProgramCompiler,
    programs: Programs,
    buckets: BucketTable,
) -> ModelRunner:
    counts, features = StepCounts(), compiler.programs.model.features
    each_params = feature_params or (None,) * len(features)
    pairs = zip(features, each_params, strict=True)
    return ModelRunner(
        programs,
        buckets,
        params=params,
        writer=WeightWriter(WeightConverter(shapes.model, mesh, DEFAULT_RULES), params),
        sampler_specs=compiler.programs.inputs.sampler,
        state_shape=shapes.state,
        variants=shapes.variants,
        count_compiles=watch_compiles(),
        features=[feature.open(shapes, own, counts) for feature, own in pairs],
        counts=counts,
        times_steps=shapes.chooses_widths,
        embeds_tokens=shapes.model.pooler.by_token,
    )


def _find_budget(shapes: Shapes, mesh: Mesh, stored: StoredPrograms | None) -> int:
    """Returns the bytes per device for KV pools, by what the compiled programs take.

    Where the pools' size is given, nothing is measured and it is 0; where their pages are, too, unless snapshots of
    recurrent states take what is left. With stored programs it is what the pools must fit.
    """
    limit, use, cache = device_memory_bytes(mesh.local_devices[0]), None, shapes.config.cache
    is_fixed = cache.kv_cache_memory_bytes is not None or (cache.fixes_pages and not shapes.snapshot_grid)
    if stored is None and is_fixed:
        return 0
    if limit is not None:
        use = measure_use(shapes, mesh) if stored is None else stored.use
    return cache_budget(limit, cache.device_memory_utilization, use)


def compile_rest(
    shapes: Shapes, mesh: Mesh, plan: CachePlan, runner: ModelRunner, progress: Progress | None = None
) -> Iterator[Callable[[], None]]:
    """Compiles what `start_runner` left; returns functions to call between steps, see `ModelRunner.list_additions`."""
    programs = compile_programs(
        make_compiler(shapes, plan, mesh).compile,
        list_all_programs(shapes, shapes.buckets),
        threads=shapes.config.compile.compile_threads,
        progress=progress,
        known=runner.device.programs,
    )
    return runner.list_additions(programs, shapes.buckets)


def list_all_programs(shapes: Shapes, buckets: BucketTable) -> Iterator[ProgramKey]:
    """Yields the (kind, key) of every program that an engine may need with these buckets."""
    forms = {"embeds_tokens": shapes.model.pooler.by_token, "keeps_states": bool(shapes.model.states)}
    yield from list_programs(buckets, shapes.sample_programs, **forms)
    if shapes.config.scheduler.max_decode_steps > 1:
        yield from list_loops(shapes.buckets)
    for feature in shapes.features:
        yield from feature.list_programs(buckets)


def _require_budget(plan: CachePlan, budget: int) -> None:
    """Raises CapacityError if the pages that stored programs are for do not fit here."""
    if plan.bytes_per_device > budget:
        message = (
            f"its programs are for {format_bytes(plan.bytes_per_device)} of KV pages on each device, and "
            f"{format_bytes(budget)} are left here; build it with a smaller device_memory_utilization"
        )
        raise CapacityError(message, field="bundle")


def page_groups(shapes: Shapes, plan: CachePlan) -> tuple[PageGroup, ...]:
    """Returns the pages and window of each KV group, for the host's page manager."""
    groups = shapes.model.kv_groups
    return tuple(PageGroup(pages, group.window) for pages, group in zip(plan.num_pages, groups, strict=True))


def caches_prefixes(shapes: Shapes, plan: CachePlan) -> bool:
    """Returns whether the page manager shares prefixes: where recurrent states need snapshots, there must be some."""
    return bool(shapes.config.cache.enable_prefix_caching) and (not shapes.snapshot_grid or plan.num_snapshots > 0)
