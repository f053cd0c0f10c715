"""Copies of KV pages between the pools and slots of pinned host memory: two device programs, and the slots.

A slot holds one page of all layers of a KV group. Slots are arrays in JAX's `pinned_host` memory, which is reached by
DMA; arrays of a CPU device would be copied at a tenth of the speed. Everything is started by the engine's thread in the
order of plans: pages that arrived are written into the donated pools, pages to save are read, then comes the forward
pass, and the copies to and from the host run beside it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxserve.core.pages.host_tier import PageCopy
from jaxserve.core.runtime.device_state import KVCache, make_zeros
from jaxserve.core.runtime.step_counts import StepCounts
from jaxserve.core.scheduler.step_plan import StepPlan
from jaxserve.errors import CapacityError

COPY_PAGES = 8  # pages that a copy program reads or writes
_ALLOCATED_AT_ONCE = 64  # slots

Pages = tuple[jax.Array, ...]  # COPY_PAGES arrays [layers of the group, 2K, page_size, H]
Slot = tuple[int, int]  # (group, slot)
GetProgram = Callable[[str, int], Any]  # (kind, KV group) -> the program


def read_pages(cache: KVCache, page_ids: Int[jax.Array, " C"], *, pool: int, offsets: tuple[int, ...]) -> Pages:
    """Returns pages of a KV group whose layers begin at `offsets` in a pool."""
    first = jnp.array(offsets, jnp.int32)
    return tuple(cache[pool][page_ids[index] + first] for index in range(COPY_PAGES))


def write_pages(
    cache: KVCache, page_ids: Int[jax.Array, " C"], pages: Pages, *, pool: int, offsets: tuple[int, ...]
) -> KVCache:
    """Writes pages of a KV group; `cache` is donated. A page may stand there twice with equal content."""
    places = page_ids[:, None] + jnp.array(offsets, jnp.int32)
    written = cache[pool].at[places].set(jnp.stack(pages), mode="promise_in_bounds")
    return (*cache[:pool], written, *cache[pool + 1 :])


@dataclass(frozen=True)
class HostMemory:
    """The host tier's sizes."""

    num_slots: int  # of each group
    pages: tuple[jax.ShapeDtypeStruct, ...]  # by group: one page of all its layers, on the device

    def on_host(self, group: int) -> Any:
        return self.pages[group].sharding.with_memory_kind("pinned_host")


class CopiesInFlight:
    """The copies of one step, which run beside it."""

    def __init__(self, slots: HostSlots, saves: dict[Slot, jax.Array | None], loads: list[_Loading]) -> None:
        self._slots, self._saves, self._loads = slots, saves, loads

    def wait(self) -> dict[str, frozenset[Slot]]:
        """Waits for the copies; returns the slots of those that failed. Loaded pages are written in the next step."""
        failed = {slot for slot, array in self._saves.items() if not _is_ready(array)}
        failed |= {each.slot for each in self._loads if not _is_ready(each.array)}
        arrived = [each for each in self._loads if each.slot not in failed]
        self._slots.finish([slot for slot in self._saves if slot not in failed], arrived, failed)
        return {"failed_copies": frozenset(failed)}


@dataclass(frozen=True, slots=True)
class _Loading:
    page: int
    slot: Slot
    array: jax.Array | None  # None: its copy could not be started


class HostSlots:
    """The slots, and pages on their way. Nothing here waits for the device but `CopiesInFlight.wait` and `allocate`.

    Args:
        copy: `jax.device_put`, or a test's.
    """

    def __init__(
        self, memory: HostMemory, counts: StepCounts, copy: Callable[[Any, Any], Any] = jax.device_put
    ) -> None:
        self.memory, self._counts, self._copy = memory, counts, copy
        self._slots: dict[Slot, jax.Array] = {}
        self._arrived: list[_Loading] = []

    def allocate(self) -> None:
        """Takes the memory of all slots, so that none has to be found later.

        Raises:
            CapacityError: there is less than planned; says how much there was.
        """
        for group, page in enumerate(self.memory.pages):
            blank, sharding = make_zeros(page), self.memory.on_host(group)
            for slots in itertools.batched(range(self.memory.num_slots), _ALLOCATED_AT_ONCE):
                try:
                    arrays = jax.block_until_ready(self._copy([blank] * len(slots), sharding))
                except RuntimeError as error:
                    size = sum(array.nbytes for array in self._slots.values()) / 2**30
                    message = f"{size:.2f} GiB of pinned host memory could be taken and no more; lower it ({error})"
                    raise CapacityError(message, field="kv_offloading_size", value=size) from error
                self._slots |= {(group, slot): array for slot, array in zip(slots, arrays, strict=True)}

    def reset(self) -> None:
        """Forgets pages on their way: their steps are lost. The slots' memory stays."""
        self._arrived.clear()

    def place(self, get_program: GetProgram, cache: KVCache) -> KVCache:
        """Writes the pages that arrived; `cache` is donated."""
        arrived, self._arrived = self._arrived, []
        for group, batch in _split(arrived, lambda each: each.slot[0]):
            padded = _pad(batch)
            page_ids = np.fromiter([each.page for each in padded], np.int32)
            with jax.transfer_guard_host_to_device("allow"):
                cache = get_program("write_pages", group)(cache, page_ids, tuple([each.array for each in padded]))
        return cache

    def start(self, get_program: GetProgram, cache: KVCache, plan: StepPlan) -> CopiesInFlight | None:
        """Starts the copies of a plan; None if it has none. Saves read `cache` as the steps before leave it."""
        if not plan.page_saves and not plan.page_loads:
            return None
        saves: dict[Slot, jax.Array | None] = {}
        for group, batch in _split(plan.page_saves, lambda copy: copy[0]):
            page_ids = np.fromiter([page for _, page, _ in _pad(batch)], np.int32)
            with jax.transfer_guard_host_to_device("allow"):
                pages = get_program("read_pages", group)(cache, page_ids)
            slots = [(group, slot) for _, _, slot in batch]
            for slot in slots:
                self._slots.pop(slot, None)  # freed first: there is no room for both
            saves |= zip(slots, self._copy_all(pages[: len(batch)], self.memory.on_host(group)), strict=True)
        self._slots |= {slot: array for slot, array in saves.items() if array is not None}
        loads = []
        for group, batch in _split(plan.page_loads, lambda copy: copy[0]):
            slots = [(group, slot) for _, _, slot in batch]
            arrays = self._copy_all([self._slots.get(slot) for slot in slots], self.memory.pages[group].sharding)
            loads += [_Loading(copy[1], slot, array) for copy, slot, array in zip(batch, slots, arrays, strict=True)]
        return CopiesInFlight(self, saves, loads)

    def time_copies(
        self, get_program: GetProgram, cache: KVCache, copies: tuple[PageCopy, ...]
    ) -> tuple[KVCache, float, float]:
        """Saves and loads pages, at the start of an engine; returns the cache and the seconds of each direction.

        `cache` is donated.
        """
        times = [time.perf_counter()]
        for plan in (_copy_plan(saves=copies), _copy_plan(loads=copies)):
            flying = self.start(get_program, jax.block_until_ready(cache), plan)
            assert flying is not None
            if flying.wait()["failed_copies"]:
                raise RuntimeError("a copy between the device and pinned host memory failed")
            cache = jax.block_until_ready(self.place(get_program, cache))
            times.append(time.perf_counter())
        return cache, times[1] - times[0], times[2] - times[1]

    def finish(self, saved: Sequence[Slot], arrived: Sequence[_Loading], failed: set[Slot]) -> None:
        """Takes note of copies that ended."""
        self._arrived += arrived
        self._counts.bytes_saved += sum(self._slots[slot].nbytes for slot in saved)
        self._counts.bytes_loaded += sum(each.array.nbytes for each in arrived if each.array is not None)
        for slot in failed:
            self._slots.pop(slot, None)

    def _copy_all(self, arrays: Sequence[jax.Array | None], sharding: Any) -> list[jax.Array | None]:
        """Starts to copy arrays; None in place of those that are missing or fail."""
        try:
            if all(array is not None for array in arrays):
                return self._copy(list(arrays), sharding)  # together: each call costs the host as much as a copy
        except RuntimeError:  # no memory, or an earlier fault of the transfer
            pass
        return [self._try_copy(array, sharding) for array in arrays]

    def _try_copy(self, array: jax.Array | None, sharding: Any) -> jax.Array | None:
        try:
            return None if array is None else self._copy(array, sharding)
        except RuntimeError:
            return None


def _copy_plan(*, saves: tuple[PageCopy, ...] = (), loads: tuple[PageCopy, ...] = ()) -> StepPlan:
    return StepPlan(0, (), (), (), (), (), page_saves=saves, page_loads=loads)


def _is_ready(array: jax.Array | None) -> bool:
    """Waits for a copy; returns whether it succeeded."""
    if array is None:
        return False
    try:
        array.block_until_ready()
    except RuntimeError:
        return False
    return True


def _split[T](copies: Sequence[T], find_group: Callable[[T], int]) -> Iterator[tuple[int, list[T]]]:
    """Yields (group, at most COPY_PAGES of its copies)."""
    for group, found in itertools.groupby(sorted(copies, key=find_group), find_group):
        for batch in itertools.batched(found, COPY_PAGES):
            yield group, list(batch)


def _pad[T](batch: list[T]) -> list[T]:
    """Returns COPY_PAGES copies: the last stands there again."""
    return batch + batch[-1:] * (COPY_PAGES - len(batch))
