"""The report behind `jaxserve plan`: whether a model fits a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.models.tower import TowerConfig
from jaxserve.core.runtime.host_memory import host_memory_bytes
from jaxserve.core.runtime.memory import GIB, CachePlan, DeviceUse, cache_budget, device_memory_bytes, format_bytes
from jaxserve.core.runtime.shapes import Shapes
from jaxserve.core.runtime.startup import estimate_use, measure_use, plan_pools, require_room
from jaxserve.core.runtime.weight_report import describe_weights
from jaxserve.core.sharding import make_mesh
from jaxserve.device_kinds import find_kind
from jaxserve.devices import find_devices
from jaxserve.errors import CapacityError
from jaxserve.features.choose import make_shapes
from jaxserve.features.host_tier.start import count_slots
from jaxserve.features.speculation.drafters import DrafterModel
from pallas_kernels.layout import page_bytes

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig


def describe_capacity(shapes: Shapes, plan: CachePlan) -> str:
    """Returns one line for a start: what the KV cache holds, and how many sequences that is."""
    scheduler, longest = shapes.config.scheduler, shapes.model.max_model_len
    assert scheduler.max_num_seqs is not None and scheduler.max_num_batched_tokens is not None
    tokens = (plan.num_pages[0] - 1) * plan.page_size
    if shapes.model.reads_whole:
        pooler = shapes.model.pooler
        numbers = "numbers a token" if pooler.by_token else "numbers an embedding"
        what = numbers if pooler.classes is None else "classes"
        return (
            f"{shapes.model.embedding_size:,} {what}; each text is computed whole, in one step; "
            f"max_model_len {longest:,}; model in {shapes.model.dtype}; KV cache: {tokens:,} tokens in "
            f"{plan.specs[0].dtype}, {format_bytes(plan.bytes_per_device)}; {scheduler.max_num_seqs} rows"
        )
    whole = plan.count_sequences(shapes.model, scheduler.max_num_batched_tokens)
    users = min(whole, scheduler.max_num_seqs)
    return (
        f"KV cache: {tokens:,} tokens in {plan.specs[0].dtype}; model in {shapes.model.dtype}; "
        f"max_model_len {longest:,}; {scheduler.max_num_seqs} rows: "
        f"{users} {'user' if users == 1 else 'users'} at once with {longest:,} tokens each"
        f"{_describe_snapshots(shapes, plan)}"
    )


def _describe_snapshots(shapes: Shapes, plan: CachePlan) -> str:
    """Returns what a start says of snapshots; nothing where none are wanted."""
    if not shapes.snapshot_grid:
        return ""
    if not plan.num_snapshots:
        return "; no memory is left for snapshots of recurrent states, so no prefix is cached"
    size = format_bytes(plan.num_snapshots * plan.snapshot_bytes)
    return f"; {plan.num_snapshots:,} snapshots of recurrent states, {size}"


def print_plan(
    config: EngineConfig,
    model: DecoderConfig,
    device: str | None,
    drafter: DrafterModel | None = None,
    tower: TowerConfig | None = None,
) -> None:
    """Prints the memory plan for the attached devices or, by formula, for the kind `device` of `DEVICE_KINDS`.

    Args:
        drafter: the one with weights that `speculative_config` names.
        tower: the one that reads images.

    Raises:
        ConfigError: the kind is unknown.
        DeviceError: no kind was named, and JAX finds no device.
        CapacityError: the model does not fit, and the error says what would; raised after its needs were printed.
    """
    if device is not None:
        _plan_for_kind(config, model, device, drafter, tower)
    else:
        _plan_for_attached(config, model, drafter, tower)


def _plan_for_kind(
    config: EngineConfig, model: DecoderConfig, device: str, drafter: DrafterModel | None, tower: TowerConfig | None
) -> None:
    kind = find_kind(device)
    shapes = make_shapes(config, model, kind.platform, kind.name, drafter, tower)
    source = "Formulas for a device that is not attached: a few percent may be wrong."
    _print_table(device, shapes, kind.memory, kind.memory, estimate_use(shapes), source)


def _plan_for_attached(
    config: EngineConfig, model: DecoderConfig, drafter: DrafterModel | None, tower: TowerConfig | None
) -> None:
    mesh, attached = make_mesh(config.parallel.tensor_parallel_size), find_devices()[0]
    shapes = make_shapes(config, model, attached.platform, attached.device_kind, drafter, tower)
    limit = device_memory_bytes(attached)
    memory, use = host_memory_bytes() if limit is None else limit, estimate_use(shapes)
    source = "On CPU, KV takes what a full batch needs, at most a quarter of the memory; programs are estimated."
    try:
        require_room(shapes, limit)
    except CapacityError:
        _print_uses(attached.device_kind, shapes, memory, use, None)
        raise
    if limit is not None:
        use, source = measure_use(shapes, mesh), "The compiled programs' own figures."
    _print_table(attached.device_kind, shapes, memory, limit, use, source)


def _print_table(name: str, shapes: Shapes, memory: int, limit: int | None, use: DeviceUse, source: str) -> None:
    """Prints what each part takes of a device; raises CapacityError after that if the pages do not fit."""
    try:
        budget = cache_budget(limit, shapes.config.cache.device_memory_utilization, use)
        plan = plan_pools(shapes, budget=budget)
    except CapacityError:
        _print_uses(name, shapes, memory, use, None)
        raise
    _print_uses(name, shapes, memory, use, plan)
    Console(highlight=False).print(source)
    size = shapes.config.cache.kv_offloading_size
    if size is not None:
        tokens = count_slots(size, shapes.specs, shapes.model.kv_groups) * shapes.page_size
        Console(highlight=False).print(f"Host KV tier: {size:g} GiB of host memory keep {tokens:,} tokens more.")


def _print_uses(name: str, shapes: Shapes, memory: int, use: DeviceUse, plan: CachePlan | None) -> None:
    table = Table(title=f"Memory of each of {shapes.num_devices} x {name}, {memory / GIB:.1f} GiB")
    for column, justify in (("for", "left"), ("GiB", "right"), ("what", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for label, size, what in (*_list_uses(shapes, use), *([] if plan is None else _list_pages(shapes, plan))):
        table.add_row(label, f"{size / GIB:.3f}", what)
    table.add_section()
    length = f"sequences up to {shapes.model.max_model_len:,}"
    if plan is None:
        table.add_row("total", f"{use.total / GIB:.3f}", f"without the KV pages, which do not fit: {length} tokens")
    else:
        tokens = (plan.num_pages[0] - 1) * plan.page_size
        total = use.total + plan.bytes_per_device
        table.add_row("total", f"{total / GIB:.3f}", f"{tokens:,} tokens of KV, {length}")
    Console(highlight=False).print(table)


def _list_uses(shapes: Shapes, use: DeviceUse) -> list[tuple[str, int, str]]:
    """Returns (part, bytes, details) of everything but the KV pages."""
    model, largest = shapes.model, shapes.buckets.largest
    num_samples = len(shapes.sample_programs) * len(shapes.buckets.row_counts)
    weights = describe_weights(model)
    details = "" if weights is None else f"; weights: {weights}"
    details += "".join(f"; and {feature.note}" for feature in shapes.features if feature.note)
    lines = [line for feature in shapes.features if (line := feature.plan_line(shapes)) is not None]
    params = use.params - sum(size for _, size, _ in lines)
    return [
        ("parameters", params, f"{model.family}, {model.num_layers} layers, {model.dtype}{details}"),
        *lines,
        ("temporaries", use.temporaries, f"of the largest program, {largest}"),
        ("programs", use.code, f"{len(shapes.buckets.buckets)} forward, {num_samples} sample"),
        ("state", use.state, f"rows, and inputs and outputs of two steps of {largest.rows} rows"),
        *([("recurrent states", use.recurrent, _describe_states(use))] if use.recurrent else []),
        *([("pending tokens", use.pending, _describe_pending(shapes))] if use.pending else []),
        *([("copies", use.buffers, "pages on their way from and to the host")] if use.buffers else []),
        ("reserve", use.reserve, "modules and command buffers of the first execution"),
    ]


def _describe_states(use: DeviceUse) -> str:
    """Returns what the recurrent states of an engine are."""
    return f"of {use.rows} rows, {format_bytes(use.recurrent // use.rows)} each"


def _describe_pending(shapes: Shapes) -> str:
    """Returns what recurrent layers keep of a verify step."""
    return f"of a verify step, {shapes.state.max_pending}, for recurrent states"


def _list_pages(shapes: Shapes, plan: CachePlan) -> list[tuple[str, int, str]]:
    """Returns (part, bytes, details) of each KV group's pages."""
    rows = []
    for pages, group, spec in zip(plan.num_pages, shapes.model.kv_groups, plan.specs, strict=True):
        cost = pages * group.num_owners * page_bytes(spec) // plan.num_devices
        window = "" if group.window is None else f", window {group.window}"
        what = f"{pages:,} pages of {spec.page_size} tokens, {group.num_owners} layers{window}, {spec.dtype}"
        rows.append(("KV pages", cost, what))
    if plan.num_snapshots:
        cost, at = plan.num_snapshots * plan.snapshot_bytes, f"at multiples of {shapes.snapshot_grid:,} tokens"
        rows.insert(0, ("snapshots", cost, f"{plan.num_snapshots:,} of recurrent states, {at}"))
    for attached in plan.attached:
        cost = sum(pages * page_bytes(spec) // plan.num_devices for spec, pages in attached.sum_pools(plan.num_pages))
        what = f"of {len(attached.layer_groups)} {attached.user} layers, {attached.specs[0].dtype}"
        rows.append(("KV pages", cost, what))
    return rows
