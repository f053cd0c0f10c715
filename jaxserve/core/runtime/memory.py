"""The memory plan: what everything but the KV pools takes, and how many pages fit the rest.

No engine may run out of memory after it is ready. So the plan is made from the compiled programs' own figures before
the pools exist, and the pools are made once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax

from jaxserve.core.layers.memory import LayerMemory, RecurrentState
from jaxserve.core.models.base import DecoderConfig, KVGroup, ParamSpec
from jaxserve.core.models.decoder import CacheLayout
from jaxserve.core.pages.manager import count_window_pages
from jaxserve.core.runtime.host_memory import host_memory_bytes
from jaxserve.core.sharding import DEFAULT_RULES
from jaxserve.errors import CapacityError
from pallas_kernels.layout import pad_row, pads_little, page_bytes, pool_shape
from pallas_kernels.spec import KVSpec

GIB = 2**30
_REMEDIES = {  # by the option whose part is largest
    "model": "take a smaller dtype or model, or on accelerators raise tensor_parallel_size",
    "max_num_seqs": "lower it",
    "kv_cache_memory_bytes": "lower it, max_num_seqs or max_model_len",
    "num_kv_pages_override": "lower it",
}
_CPU_SHARE = 0.25  # share of the memory this process may use


@dataclass(frozen=True)
class DeviceUse:
    """Bytes on each device beside the KV pools."""

    params: int
    temporaries: int  # the largest of any program
    code: int  # all programs
    state: int  # rows, and two steps' inputs and outputs
    buffers: int  # of features, beside their state
    reserve: int  # for modules and command buffers, which appear at first execution
    recurrent: int = 0  # recurrent states of all rows
    pending: int = 0  # the tokens of a verify step, as recurrent layers read them
    rows: int = 0  # that have them; no bytes
    sequence: int = 0  # pages of a sequence of `max_model_len` tokens, the least that pools may hold; not in use yet

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self) if f.name not in ("rows", "sequence"))

    def advise_rows(self, missing: int) -> str:
        """Returns in words what recurrent states take, and with how many rows `missing` bytes would be there."""
        each = self.recurrent // self.rows
        fit = self.rows - -(-missing // each)
        fits = f"max_num_seqs={fit} would fit" if fit > 0 else "no max_num_seqs would fit"
        taken = f"recurrent states of {self.rows} rows take {format_bytes(self.recurrent)}, {format_bytes(each)} each"
        return f"{taken}: {fits}"


@dataclass(frozen=True)
class AttachedPages:
    """The pages of a feature's layers. They have the ids of the model's pages, in pools of their own."""

    specs: tuple[KVSpec, ...]  # per KV group of theirs; K counts the heads of all devices
    layer_groups: tuple[int, ...]  # per layer, its KV group among these
    owners: tuple[int, ...]  # per layer, the one whose pages it reads
    sources: tuple[int, ...]  # per KV group of theirs, the model's whose page table it reads
    user: str  # the feature, for users

    def page_bytes(self, group: int) -> int:
        """Returns the bytes of all layers beside a page of one of the model's KV groups."""
        owned = (each for layer, each in enumerate(self.layer_groups) if self.owners[layer] == layer)
        return sum(page_bytes(self.specs[each]) for each in owned if self.sources[each] == group)

    def lay_out(self, num_pages: Sequence[int]) -> CacheLayout:
        """Returns where the pages of its layers lie, where the model's KV groups have `num_pages`."""
        return _lay_out(self.specs, self._count_pages(num_pages), self.layer_groups, self.owners)

    def sum_pools(self, num_pages: Sequence[int]) -> tuple[tuple[KVSpec, int], ...]:
        """Returns the spec and the pages of each of its pools."""
        return _sum_pools(self.specs, self._count_pages(num_pages), self.lay_out(num_pages))

    def _count_pages(self, num_pages: Sequence[int]) -> list[int]:
        return [num_pages[source] for source in self.sources]


@dataclass(frozen=True)
class CachePlan:
    """The layout of the KV pools. All devices have the same pages, each with its share of the KV heads."""

    specs: tuple[KVSpec, ...]  # per KV group; K counts the whole model's heads
    num_pages: tuple[int, ...]  # per KV group, the null page included
    layout: CacheLayout
    num_devices: int
    attached: tuple[AttachedPages, ...] = ()
    num_snapshots: int = 0  # of recurrent states
    snapshot_bytes: int = 0  # of one, on each device

    @property
    def pools(self) -> tuple[tuple[KVSpec, int], ...]:
        """The spec and the pages of each pool: those of the model's layers, then those of features."""
        of_features = (pool for attached in self.attached for pool in attached.sum_pools(self.num_pages))
        return (*_sum_pools(self.specs, self.num_pages, self.layout), *of_features)

    @property
    def page_size(self) -> int:
        """Tokens of a page, in every group."""
        return self.specs[0].page_size

    @property
    def pool_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Global shapes [pages of all layers, 2K, page_size, H] of the pools."""
        return tuple(pool_shape(spec, pages) for spec, pages in self.pools)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of pages and snapshots."""
        pages = sum(pages * page_bytes(spec) // self.num_devices for spec, pages in self.pools)
        return pages + self.num_snapshots * self.snapshot_bytes

    def count_sequences(self, config: DecoderConfig, max_chunk: int) -> int:
        """Returns how many sequences of `max_model_len` tokens have room at once."""
        return min(
            (pages - 1) // _pages_of_sequence(group, config.max_model_len, self.page_size, max_chunk)
            for pages, group in zip(self.num_pages, config.kv_groups, strict=True)
        )

    def require_whole(self, config: DecoderConfig, max_chunk: int) -> None:
        """Raises CapacityError if a group has fewer pages than a sequence of `config.max_model_len` tokens needs."""
        for group, count in zip(config.kv_groups, self.num_pages, strict=True):
            need = _pages_of_sequence(group, config.max_model_len, self.page_size, max_chunk)
            if count - 1 < need:
                message = (
                    f"a request reserves all pages that it may need, which for max_model_len={config.max_model_len} "
                    f"are {need}, and the pool has {count - 1}; raise num_kv_pages_override or lower max_model_len"
                )
                raise CapacityError(message, field="deterministic", value=True)


def plan_cache(
    config: DecoderConfig,
    *,
    specs: Sequence[KVSpec],
    max_chunk: int,
    num_devices: int,
    budget: int,
    max_sequences: int | None = None,
    override: int | None = None,
    num_pages: Sequence[int] | None = None,
    attached: tuple[AttachedPages, ...] = (),
    snapshot_bytes: int = 0,
    max_snapshots: int = 0,
    num_snapshots: int | None = None,
) -> CachePlan:
    """Divides `budget` bytes per device among the KV groups, so that each holds the same number of full sequences.

    Snapshots of recurrent states come first: as many as are wanted, but for half of the budget at most, and none that
    pages of one sequence would lack.

    Args:
        specs: pages of each group, for the whole model.
        max_sequences: the pools hold no more full sequences.
        override: pages of the group that needs most, whatever the budget; windowed groups hold at least one sequence.
        num_pages: pages of each group, whatever the other arguments.
        attached: the pages of features, of which the pools hold as many.
        snapshot_bytes: of one, on each device.
        max_snapshots: those that are wanted.
        num_snapshots: as many, whatever the budget.

    Raises:
        CapacityError: no sequence of `config.max_model_len` tokens fits; says which length would.
    """
    needs, page_costs = _count_needs(config, specs, max_chunk, num_devices, attached)
    sequence_cost = sum(need * cost for need, cost in zip(needs, page_costs, strict=True))
    counts = None if num_pages is None else list(num_pages)
    if counts is None and override is not None:
        counts = _share_pages(config, needs, override)
    if num_snapshots is None:
        least = [need + 1 for need in needs] if counts is None else counts
        left = budget - sum(count * cost for count, cost in zip(least, page_costs, strict=True))
        num_snapshots = _count_snapshots(min(left, budget // 2), snapshot_bytes, max_snapshots)
    if counts is None:
        budget -= num_snapshots * snapshot_bytes
        sequences = (budget - sum(page_costs)) / sequence_cost  # less one null page per group
        if sequences < 1:
            raise CapacityError(
                _explain_shortage(config, budget, needs, page_costs), field="max_model_len", value=config.max_model_len
            )
        if max_sequences is not None:
            sequences = min(sequences, float(max_sequences))
        counts = [max(need, _round_down(int(need * sequences))) + 1 for need in needs]
    layout = _lay_out(specs, counts, config.layer_groups, config.page_owners)
    layout = _place_states(layout, config.memories) if config.states else layout
    return CachePlan(tuple(specs), tuple(counts), layout, num_devices, attached, num_snapshots, snapshot_bytes)


def _share_pages(config: DecoderConfig, needs: Sequence[int], override: int) -> list[int]:
    """Returns the pages of each KV group where that which needs most has `override`."""
    shares = [max(2, round(override * need / max(needs))) for need in needs]
    groups = zip(config.kv_groups, needs, shares, strict=True)  # a windowed sequence never needs more than `need`
    return [share if group.window is None else max(share, need + 1) for group, need, share in groups]


def _count_snapshots(budget: int, each: int, most: int) -> int:
    """Returns how many snapshots of `each` bytes fit a budget, `most` at most."""
    return min(most, _round_down(max(0, budget) // each)) if most else 0


def sequence_bytes(
    config: DecoderConfig,
    *,
    specs: Sequence[KVSpec],
    max_chunk: int,
    num_devices: int,
    attached: tuple[AttachedPages, ...] = (),
) -> int:
    """Returns the bytes on each device of pools that hold one sequence; arguments as for `plan_cache`."""
    pairs = zip(*_count_needs(config, specs, max_chunk, num_devices, attached), strict=True)
    return sum((need + 1) * cost for need, cost in pairs)  # with a null page per group


def _count_needs(
    config: DecoderConfig,
    specs: Sequence[KVSpec],
    max_chunk: int,
    num_devices: int,
    attached: tuple[AttachedPages, ...],
) -> tuple[list[int], list[int]]:
    """Returns, for each KV group, the pages of one sequence, and the bytes of a page on each device."""
    size, pairs = specs[0].page_size, zip(config.kv_groups, specs, strict=True)
    needs = [_pages_of_sequence(group, config.max_model_len, size, max_chunk) for group in config.kv_groups]
    costs = [group.num_owners * page_bytes(spec) // num_devices for group, spec in pairs]
    for pages in attached:
        costs = [cost + pages.page_bytes(group) // num_devices for group, cost in enumerate(costs)]
    return needs, costs


def _lay_out(
    specs: Sequence[KVSpec], num_pages: Sequence[int], groups: tuple[int | None, ...], owners: tuple[int, ...]
) -> CacheLayout:
    """Returns the layout of layers of these groups, where groups of equal specs share a pool, layer behind layer."""
    index_of = {spec: index for index, spec in enumerate(dict.fromkeys(specs))}
    ends, offsets = dict.fromkeys(specs, 0), []
    for layer, group in enumerate(groups):
        if group is None or owners[layer] != layer:
            offsets.append(0 if group is None else offsets[owners[layer]])
            continue
        offsets.append(ends[specs[group]])
        ends[specs[group]] += num_pages[group]
    return CacheLayout(tuple(offsets), groups, tuple(index_of[spec] for spec in specs))


def _place_states(layout: CacheLayout, memories: Sequence[LayerMemory]) -> CacheLayout:
    """Returns the layout with pools of recurrent states behind those of pages; layers with equal states share one."""
    found, offsets = Counter[LayerMemory](), list(layout.offsets)
    for layer, memory in enumerate(memories):
        if isinstance(memory, RecurrentState):
            offsets[layer] = found[memory]
            found[memory] += 1
    index_of = {memory: layout.num_pools + at for at, memory in enumerate(found)}
    return replace(layout, offsets=tuple(offsets), state_pools=tuple(map(index_of.get, memories)))


def _sum_pools(
    specs: Sequence[KVSpec], num_pages: Sequence[int], layout: CacheLayout
) -> tuple[tuple[KVSpec, int], ...]:
    """Returns the spec and the pages of each pool of `_lay_out`."""
    totals = dict.fromkeys(specs, 0)
    for group, spec in enumerate(specs):
        totals[spec] += num_pages[group] * len(layout.list_offsets(group))
    return tuple(totals.items())


def device_memory_bytes(device: jax.Device) -> int | None:
    """Returns the bytes that an accelerator's allocator may hand out; None on CPU or if it does not tell."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return stats["bytes_limit"] if stats else None


def cache_budget(limit: int | None, share: float, use: DeviceUse | None) -> int:
    """Returns the bytes that KV pools may take on a device with `limit` bytes (None: the CPU).

    Raises:
        CapacityError: `share` of the device leaves nothing for the pools.
        ValueError: an accelerator without its `use`.
    """
    if limit is None:
        return int(host_memory_bytes() * _CPU_SHARE)
    if use is None:
        raise ValueError("use: an accelerator's plan needs the compiled programs' own figures")
    budget = int(limit * share) - use.total
    if use.recurrent and budget < use.sequence:
        message = f"does not fit {share:g} of {limit / GIB:.2f} GiB with the KV pages of one sequence: "
        raise CapacityError(message + use.advise_rows(use.sequence - budget), field="max_num_seqs", value=use.rows)
    if budget <= 0:
        message = (
            f"{share:g} of {limit / GIB:.2f} GiB leaves nothing for KV: parameters take {use.params / GIB:.2f} GiB "
            f"and programs {(use.total - use.params) / GIB:.2f} GiB; raise it, shard over more devices, "
            "or lower max_num_batched_tokens"
        )
        raise CapacityError(message, field="device_memory_utilization", value=share)
    return budget


def refuse_shortage(limit: int, parts: Mapping[str, int], use: DeviceUse | None = None) -> None:
    """Raises CapacityError, with the largest as its field, if `parts` (option -> bytes) exceed `limit` together.

    `use` is that of one device, or of all if they share the limit; it says what recurrent states take.
    """
    total = sum(parts.values())
    if total > limit:
        field = max(parts, key=lambda name: parts[name])
        remedy = _REMEDIES[field]
        if field == "max_num_seqs" and use is not None and use.recurrent:
            remedy = use.advise_rows(total - limit)
        shares = ", ".join(f"{format_bytes(size)} for {name}" for name, size in parts.items() if size)
        message = f"{format_bytes(total)} are needed ({shares}) and there are {format_bytes(limit)}"
        raise CapacityError(f"{message}; {remedy}", field=field, value=parts[field])


def params_bytes(specs: Any, num_devices: int, platform: str = "cpu") -> int:
    """Returns the bytes that a tree of parameter specs takes on each device, at most: a TPU may pad rows."""
    total = 0
    for spec in jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, ParamSpec)):
        axes = DEFAULT_RULES.spec(spec.axes)
        size = spec.num_bytes
        row = spec.shape[-1] // (1 if axes[-1] is None else num_devices)
        if platform == "tpu" and pads_little(row):
            size = size // row * pad_row(row)
        total += size // num_devices if any(axis is not None for axis in axes) else size
    return total


def format_bytes(count: int) -> str:
    """Returns a size for people, in GiB, MiB or KiB."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20)):
        if count >= size / 2:
            return f"{count / size:.2f} {unit}"
    return f"{count / 1024:.1f} KiB"


def _pages_of_sequence(group: KVGroup, num_tokens: int, page_size: int, max_chunk: int) -> int:
    whole = -(-num_tokens // page_size)
    return whole if group.window is None else min(whole, count_window_pages(group.window, max_chunk, page_size))


def _round_down(count: int) -> int:
    """Keeps two significant digits: programs depend on the page count, and the next start should find them cached."""
    scale = 10 ** max(0, len(str(count)) - 2)
    return count // scale * scale


def _explain_shortage(config: DecoderConfig, budget: int, needs: list[int], page_costs: list[int]) -> str:
    cost = sum(need * page_cost for need, page_cost in zip(needs, page_costs, strict=True)) + sum(page_costs)
    page_size = -(-config.max_model_len // max(needs))
    windowed = sum(n * c for n, c, g in zip(needs, page_costs, config.kv_groups, strict=True) if g.window is not None)
    growing = sum(c for c, g in zip(page_costs, config.kv_groups, strict=True) if g.window is None)
    pages = (budget - windowed - sum(page_costs)) // growing if growing else 0
    fits = f"max_model_len={pages * page_size} ({pages} pages) would fit" if pages > 0 else "no length would fit"
    left = format_bytes(max(budget, 0))
    return (
        f"one sequence of {config.max_model_len} tokens needs {format_bytes(cost)} of KV pages, and {left} are left; "
        f"{fits}; or raise kv_cache_memory_bytes, device_memory_utilization or tensor_parallel_size"
    )
