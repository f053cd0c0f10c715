"""The second tier of KV pages, in pinned host memory: the device side of `core/pages/host_tier.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.core.models.decoder import CacheLayout
from jaxserve.core.runtime.buckets import BucketTable
from jaxserve.core.runtime.feature import DeviceState, FeatureHost, StepFeature
from jaxserve.core.runtime.memory import GIB, CachePlan
from jaxserve.core.runtime.program_inputs import ProgramInputs
from jaxserve.core.runtime.programs import Program, ProgramKey
from jaxserve.core.runtime.protocol import Runner
from jaxserve.core.runtime.sizes import Sizes
from jaxserve.core.runtime.step_counts import StepCounts
from jaxserve.core.scheduler.step_plan import StepPlan
from jaxserve.core.sharding import DEFAULT_RULES, KV_POOL_AXES
from jaxserve.features.host_tier.page_copies import (
    COPY_PAGES,
    CopiesInFlight,
    HostMemory,
    HostSlots,
    read_pages,
    write_pages,
)
from jaxserve.features.host_tier.start import (
    copy_bytes,
    count_slots,
    plan_host_memory,
    require_host_room,
    start_tier,
)


@dataclass(frozen=True)
class HostTier(StepFeature):
    """The option `kv_offloading_size`."""

    size: float  # GiB
    num_groups: int  # KV groups
    bound: tuple[HostMemory, CacheLayout] | None = None  # the slots, and where the pages of layers lie

    def page_options(self, sizes: Sizes) -> dict[str, int]:
        """See `StepFeature.page_options`."""
        return {"num_host_slots": self.count_slots(sizes), "max_copies": self.max_copies(sizes)}

    def count_slots(self, sizes: Sizes) -> int:
        """Returns how many pages of each KV group it holds; ConfigError: none."""
        return count_slots(self.size, sizes.specs, sizes.model.kv_groups)

    def max_copies(self, sizes: Sizes) -> int:
        """Returns the pages that a step loads at most: as many as it can compute."""
        budget = sizes.config.scheduler.max_num_batched_tokens
        assert budget is not None
        return max(COPY_PAGES, -(-budget // sizes.page_size))

    def bind(self, sizes: Sizes, plan: CachePlan, mesh: Mesh, first_pool: int) -> HostTier:
        """See `StepFeature.bind`."""
        sharding = DEFAULT_RULES.sharding(mesh, KV_POOL_AXES)
        memory = plan_host_memory(self.size, sizes.specs, sizes.model.kv_groups, sharding)
        return replace(self, bound=(memory, plan.layout))

    def buffer_bytes(self, sizes: Sizes) -> int:
        """Returns the bytes on each device of pages on their way."""
        groups, copies = sizes.model.kv_groups, self.max_copies(sizes)
        return copy_bytes(sizes.specs, groups, num_devices=sizes.num_devices, max_copies=copies)

    def require_room(self, sizes: Sizes, others: int) -> int:
        """See `StepFeature.require_room`; ConfigError: the size holds no page."""
        self.count_slots(sizes)
        require_host_room(self.size, others)
        return int(self.size * GIB)

    def list_programs(self, buckets: BucketTable) -> Iterator[ProgramKey]:
        """See `StepFeature.list_programs`."""
        for group in range(self.num_groups):
            yield "read_pages", group
            yield "write_pages", group

    def make_program(self, kind: str, key: Any, inputs: ProgramInputs, state: Any, params: Any) -> Program | None:
        """See `StepFeature.make_program`."""
        if kind not in ("read_pages", "write_pages"):
            return None
        assert self.bound is not None
        memory, layout = self.bound
        page = memory.pages[key]
        where = {"pool": layout.pools[key], "offsets": layout.list_offsets(key)}
        page_ids = inputs.spec((COPY_PAGES,), jnp.int32)
        if kind == "read_pages":
            return Program(partial(read_pages, **where), (inputs.cache, page_ids), results=(page.sharding,))
        pages = (page,) * COPY_PAGES
        return Program(partial(write_pages, **where), (inputs.cache, page_ids, pages), donated=(0,))

    def open(self, sizes: Sizes, params: Any, counts: StepCounts) -> HostTierCopies:
        """See `StepFeature.open`."""
        assert self.bound is not None
        return HostTierCopies(HostSlots(self.bound[0], counts), self.size, sizes.model.max_model_len)


class HostTierCopies(FeatureHost):
    """The slots of the tier, and the copies around each step."""

    def __init__(self, slots: HostSlots, size: float, max_model_len: int) -> None:
        self.slots, self._size, self._max_model_len = slots, size, max_model_len

    def reset(self, state: Any) -> None:
        """See `FeatureHost.reset`."""
        self.slots.reset()

    def start(self, runner: Runner, device: DeviceState, plan: CachePlan, *, must_help: bool) -> None:
        """See `FeatureHost.start`."""
        start_tier(self.slots, runner, device, plan, self._size, self._max_model_len, must_help=must_help)

    def prepare(self, device: DeviceState, plan: StepPlan) -> CopiesInFlight | None:
        """Writes the pages that arrived, then starts the copies of a plan."""
        device.cache = self.slots.place(device.programs.get, device.cache)
        return self.slots.start(device.programs.get, device.cache, plan)
