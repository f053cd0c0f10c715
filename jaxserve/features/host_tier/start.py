"""The host KV tier at the start of an engine: how much it may take, and whether loading is faster than computing."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jaxserve.core.models.base import KVGroup
from jaxserve.core.pages.host_tier import PageCopy
from jaxserve.core.runtime.feature import DeviceState
from jaxserve.core.runtime.host_memory import HOST_SHARE, host_memory_bytes
from jaxserve.core.runtime.memory import GIB, CachePlan, format_bytes
from jaxserve.core.runtime.protocol import Runner
from jaxserve.core.runtime.runner import StartedStep
from jaxserve.core.scheduler.step_plan import ChunkWork, NewRow, StepPlan
from jaxserve.errors import CapacityError, ConfigError
from jaxserve.features.host_tier.page_copies import COPY_PAGES, HostMemory, HostSlots
from jaxserve.sampling_params import SamplingParams
from pallas_kernels.layout import page_bytes, pool_shape
from pallas_kernels.spec import KVSpec

_log = logging.getLogger(__name__)
_FIELD = "kv_offloading_size"
_REPEATS = 5


@dataclass(frozen=True)
class TierFigures:
    """Measured on this device, for pages of all layers."""

    bytes_per_token: int
    save_seconds: float  # per token
    load_seconds: float
    prefill_seconds: float

    def __str__(self) -> str:
        save, load = (self.bytes_per_token / seconds / 1e9 for seconds in (self.save_seconds, self.load_seconds))
        return (
            f"saves run at {save:.1f} GB/s and loads at {load:.1f} GB/s: a token is loaded in "
            f"{1e6 * self.load_seconds:.2f} us and computed in {1e6 * self.prefill_seconds:.2f} us"
        )


def count_slots(size: float, specs: Sequence[KVSpec], groups: Sequence[KVGroup]) -> int:
    """Returns how many pages of each group `size` GiB hold; ConfigError: they hold none."""
    slot_bytes = sum(_list_slot_bytes(specs, groups))
    num_slots = int(size * GIB) // slot_bytes
    if num_slots < 1:
        message = f"{size:g} GiB hold no page: {specs[0].page_size} tokens take {format_bytes(slot_bytes)}"
        raise ConfigError(message, field=_FIELD, value=size)
    return num_slots


def _list_slot_bytes(specs: Sequence[KVSpec], groups: Sequence[KVGroup]) -> list[int]:
    """Returns the bytes of a page of all layers of each group."""
    return [group.num_owners * page_bytes(spec) for group, spec in zip(groups, specs, strict=True)]


def plan_host_memory(
    size: float, specs: Sequence[KVSpec], groups: Sequence[KVGroup], sharding: jax.sharding.NamedSharding
) -> HostMemory:
    """Returns the slots that `size` GiB give; `specs` are those of the whole model, `sharding` that of the pools.

    Every group has as many slots: each evicts a page for each page of tokens.

    Raises:
        ConfigError: the size holds no page, or the devices have no pinned host memory.
    """
    if not any(memory.kind == "pinned_host" for memory in sharding.mesh.local_devices[0].addressable_memories()):
        raise ConfigError("the devices have no pinned host memory; leave it out", field=_FIELD, value=size)
    pages = tuple(
        jax.ShapeDtypeStruct(pool_shape(spec, group.num_owners), spec.dtype, sharding=sharding)
        for group, spec in zip(groups, specs, strict=True)
    )
    return HostMemory(count_slots(size, specs, groups), pages)


def copy_bytes(specs: Sequence[KVSpec], groups: Sequence[KVGroup], *, num_devices: int, max_copies: int) -> int:
    """Returns the bytes on each device of pages on their way.

    With two steps in flight: twice the saves of a step, three times its loads, and one program's batch.
    """
    page = max(_list_slot_bytes(specs, groups)) // num_devices
    return (2 * 2 * max_copies + 3 * max_copies + COPY_PAGES) * page


def require_host_room(size: float, others: int) -> None:
    """Raises CapacityError, with the size that fits, if a tier of `size` GiB and `others` bytes exceed the host."""
    limit = host_memory_bytes()
    room = max(0.0, int(limit * HOST_SHARE) - others) / GIB
    if size > room:
        beside = f", where {format_bytes(others)} are for other parts" if others else ""
        fits = f"{room:.2f} GiB would fit" if room >= 0.01 else "nothing would fit"
        message = f"{size:g} GiB are more than this machine or container can give: it has {format_bytes(limit)}{beside}"
        raise CapacityError(f"{message}; {fits}", field=_FIELD, value=size)


def start_tier(
    slots: HostSlots,
    runner: Runner,
    device: DeviceState,
    plan: CachePlan,
    size: float,
    max_model_len: int,
    *,
    must_help: bool,
) -> None:
    """Takes the tier's memory, runs its programs and measures them; the runner's state is reset.

    Args:
        size: GiB of the tier.
        must_help: refuse a tier that loads slower than the model computes.

    Raises:
        CapacityError: the memory is not there.
        ConfigError: loading a token would take longer than computing it, and `must_help` is set.
    """
    start = time.perf_counter()
    slots.allocate()
    figures = measure_tier(slots, runner, device, plan, max_model_len)
    runner.reset()
    runner.counts.clear()
    if must_help:
        refuse_slow_tier(figures, size)
    tokens, seconds = slots.memory.num_slots * plan.page_size, time.perf_counter() - start
    _log.info("host KV tier: room for %d tokens; %s (%.1f s)", tokens, figures, seconds)


def refuse_slow_tier(figures: TierFigures, size: float) -> None:
    """Raises ConfigError, with the figures, if loading a token takes longer than computing it."""
    if figures.load_seconds >= figures.prefill_seconds:
        message = f"cannot help here, because loading is slower than computing: {figures}; leave it out"
        raise ConfigError(message, field=_FIELD, value=size)


def measure_tier(
    slots: HostSlots, runner: Runner, device: DeviceState, plan: CachePlan, max_model_len: int
) -> TierFigures:
    """Measures both directions, and the prefill of one prompt that fills the largest compiled bucket."""
    page_size = plan.page_size
    save = load = 0.0
    for group, num_pages in enumerate(plan.num_pages):
        count = min(COPY_PAGES, num_pages - 1, slots.memory.num_slots)
        copies = tuple((group, 1 + index, index) for index in range(count))
        times = [_time_copies(slots, device, copies) for _ in range(1 + _REPEATS)][1:]  # the first is slower
        save += statistics.median(each[0] for each in times) / count
        load += statistics.median(each[1] for each in times) / count
    bytes_per_token = (
        sum(len(plan.layout.list_offsets(group)) * page_bytes(spec) for group, spec in enumerate(plan.specs))
        // page_size
    )
    prefill = _measure_prefill(runner, device, plan, max_model_len)
    return TierFigures(bytes_per_token, save / page_size, load / page_size, prefill)


def _time_copies(slots: HostSlots, device: DeviceState, copies: tuple[PageCopy, ...]) -> tuple[float, float]:
    """Saves and loads pages while no step runs; returns the seconds of each direction."""
    device.cache, save, load = slots.time_copies(device.programs.get, device.cache, copies)
    return save, load


def _measure_prefill(runner: Runner, device: DeviceState, plan: CachePlan, max_model_len: int) -> float:
    page_size = plan.page_size
    room = min(max_model_len - 1, page_size * (min(plan.num_pages) - 1))
    count = min(max(device.programs.of_kind("forward")).tokens, room)
    updates = [(g, 0, i, i + 1) for g in range(len(plan.num_pages)) for i in range(-(-count // page_size))]
    step = StepPlan(
        step_id=0,
        decode_rows=(),
        decode_tickets=(),
        chunks=(ChunkWork(row=0, ticket=0, start=0, token_ids=(0,) * count, is_last=True),),
        new_rows=(NewRow(0, 0, SamplingParams(temperature=0), seed=0, sequence_index=0, max_num_tokens=max_model_len),),
        page_updates=tuple(updates),
    )
    times = []
    for _ in range(1 + _REPEATS):
        start = time.perf_counter()
        started = runner.start(step)
        assert isinstance(started, StartedStep)
        jax.block_until_ready(started.selected)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) / count
