"""What would run here, and would it fit: the reports behind `jaxserve doctor` and `jaxserve plan`."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
from rich.console import Console
from rich.table import Table

from jaxserve.errors import ConfigError
from jaxserve.models.base import DecoderConfig
from jaxserve.runtime.memory import (
    GIB,
    CachePlan,
    DeviceUse,
    cache_budget,
    device_memory_bytes,
    host_memory_bytes,
)
from jaxserve.runtime.rows import SampleVariant
from jaxserve.runtime.startup import Shapes, estimate_use, make_shapes, measure_use, plan_pools, require_room
from jaxserve.sharding import make_mesh
from pallas_kernels.layout import page_bytes

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig

_PACKAGES = ("jaxserve", "jax", "jaxlib", "libtpu", "numpy", "flax", "orbax-checkpoint", "tokenizers", "sentencepiece")


@dataclass(frozen=True)
class DeviceKind:
    """A device that can be planned for without being here."""

    platform: str
    name: str  # as JAX calls it
    memory: int  # bytes


DEVICE_KINDS = {
    "h200": DeviceKind("gpu", "NVIDIA H200", 141 * 10**9),
    "h100": DeviceKind("gpu", "NVIDIA H100 80GB HBM3", 80 * 10**9),
    "a100-80g": DeviceKind("gpu", "NVIDIA A100-SXM4-80GB", 80 * 10**9),
    "a100-40g": DeviceKind("gpu", "NVIDIA A100-SXM4-40GB", 40 * 10**9),
    "l4": DeviceKind("gpu", "NVIDIA L4", 24 * 10**9),
    "t4": DeviceKind("gpu", "Tesla T4", 16 * 10**9),
    "v5e": DeviceKind("tpu", "TPU v5 lite", 16 * GIB),
    "v6e": DeviceKind("tpu", "TPU v6 lite", 32 * GIB),
    "v7x": DeviceKind("tpu", "TPU7x", 96 * GIB),  # of each of a chip's two devices
}


def print_report(config: EngineConfig, model: DecoderConfig) -> None:
    """Prints devices, versions, kernels and the programs that the options would compile."""
    console = Console(highlight=False)
    devices = Table(title="Devices")
    for column in ("id", "kind", "platform", "memory"):
        devices.add_column(column)
    for device in jax.devices():
        limit = device_memory_bytes(device)
        memory = f"{host_memory_bytes() / GIB:.1f} GiB of the host" if limit is None else f"{limit / GIB:.1f} GiB"
        devices.add_row(str(device.id), device.device_kind, device.platform, memory)
    console.print(devices)
    versions = {name: _version(name) for name in _PACKAGES}
    console.print("[bold]Versions[/]", ", ".join(f"{name} {found}" for name, found in versions.items() if found))
    shapes = make_shapes(config, model, jax.default_backend(), jax.devices()[0].device_kind)
    console.print(f"[bold]Attention[/] {shapes.impl}: {shapes.impl_reason}")
    console.print("[bold]Forward programs[/]", ", ".join(map(str, shapes.buckets.buckets)))
    console.print(
        "[bold]Sample programs[/]",
        ", ".join(variant.name.lower() for variant in SampleVariant),
        "and scores for",
        ", ".join(map(str, shapes.buckets.row_counts)),
        "rows",
    )
    cache_dir = shapes.config.compile.cache_dir
    console.print(f"[bold]Compile cache[/] {cache_dir or 'none'}")


def print_plan(config: EngineConfig, model: DecoderConfig, device: str | None) -> None:
    """Prints the memory plan, for the devices that are here or, by formula, for a kind that is not.

    Raises:
        ConfigError: the kind is not known.
        CapacityError: the model does not fit; says what would.
    """
    if device is not None and device not in DEVICE_KINDS:
        raise ConfigError(f"not known; known are {', '.join(DEVICE_KINDS)}", field="device", value=device)
    share = config.cache.device_memory_utilization
    if device is not None:
        kind = DEVICE_KINDS[device]
        shapes, limit = make_shapes(config, model, kind.platform, kind.name), kind.memory
        use, source = estimate_use(shapes), "Formulas for a device that is not attached: a few percent may be wrong."
        budget = cache_budget(limit, share, use)
    else:
        mesh = make_mesh(config.parallel.tensor_parallel_size)
        attached = jax.devices()[0]
        shapes = make_shapes(config, model, jax.default_backend(), attached.device_kind)
        here = device_memory_bytes(attached)
        limit = host_memory_bytes() if here is None else here
        require_room(shapes, here)
        use = estimate_use(shapes) if here is None else measure_use(shapes, mesh)
        source = "On CPU, KV takes what a full batch needs, at most a quarter of the memory; programs are estimated."
        source = source if here is None else "The compiled programs' own figures."
        budget = cache_budget(here, share, use)
    console = Console(highlight=False)
    plan = plan_pools(shapes, budget=budget)
    console.print(_make_table(device or jax.devices()[0].device_kind, limit, use, plan, shapes))
    console.print(source)


def _make_table(name: str, limit: int, use: DeviceUse, plan: CachePlan, shapes: Shapes) -> Table:
    table = Table(title=f"Memory of each of {shapes.num_devices} x {name}, {limit / GIB:.1f} GiB")
    table.add_column("for")
    table.add_column("GiB", justify="right")
    table.add_column("what")
    model, spec = shapes.model, plan.spec
    largest = shapes.buckets.largest
    rows = [
        ("parameters", use.params, f"{model.family}, {model.num_layers} layers, {model.dtype}"),
        ("temporaries", use.temporaries, f"of the largest program, {largest}"),
        (
            "programs",
            use.code,
            f"{len(shapes.buckets.buckets)} forward, {len(SampleVariant) * len(shapes.buckets.row_counts)} sample",
        ),
        ("state", use.state, f"rows, and inputs and outputs of two steps of {largest.rows} rows"),
        ("reserve", use.reserve, "modules and command buffers of the first execution"),
    ]
    for pages, group in zip(plan.num_pages, model.kv_groups, strict=True):
        cost = pages * len(group.layers) * page_bytes(spec) // plan.num_devices
        window = "" if group.window is None else f", window {group.window}"
        what = f"{pages:,} pages of {spec.page_size} tokens, {len(group.layers)} layers{window}, {spec.dtype}"
        rows.append(("KV pages", cost, what))
    for label, size, what in rows:
        table.add_row(label, f"{size / GIB:.3f}", what)
    tokens = (plan.num_pages[0] - 1) * spec.page_size
    table.add_section()
    table.add_row(
        "total",
        f"{(use.total + plan.bytes_per_device) / GIB:.3f}",
        f"{tokens:,} tokens of KV, sequences up to {model.max_model_len:,}",
    )
    return table


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
