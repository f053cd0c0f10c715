"""The host tier at the start: its size, what is refused, and copies of pages on this device."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve import config
from jaxserve.core.layers.memory import PagedKV
from jaxserve.core.models.base import KVGroup
from jaxserve.core.runtime.step_counts import StepCounts
from jaxserve.core.scheduler import StepPlan
from jaxserve.errors import CapacityError, ConfigError
from jaxserve.features.host_tier import start as tier_start
from jaxserve.features.host_tier.page_copies import COPY_PAGES, HostMemory, HostSlots, read_pages, write_pages
from jaxserve.features.host_tier.start import TierFigures, plan_host_memory, refuse_slow_tier, require_host_room
from pallas_kernels.spec import KVSpec

OFFSETS = (0, 20, 40)  # of a group's three layers
LINE = (4, 8, 16)  # [2K, page_size, H]


def make_sharding() -> NamedSharding:
    return NamedSharding(jax.make_mesh((1,), ("model",)), PartitionSpec())


def make_slots(num_slots: int = 6, **changes: Any) -> tuple[HostSlots, dict[tuple[str, int], Any]]:
    page = jax.ShapeDtypeStruct((len(OFFSETS), *LINE), jnp.bfloat16, sharding=make_sharding())
    programs = {
        ("read_pages", 0): jax.jit(lambda cache, ids: read_pages(cache, ids, pool=0, offsets=OFFSETS)),
        ("write_pages", 0): jax.jit(
            lambda cache, ids, pages: write_pages(cache, ids, pages, pool=0, offsets=OFFSETS), donate_argnums=0
        ),
    }
    return HostSlots(HostMemory(num_slots, (page,)), StepCounts(), **changes), programs


def make_cache() -> tuple[jax.Array]:
    values = np.random.default_rng(0).normal(size=(60, *LINE)).astype(np.float32)
    return (jax.device_put(jnp.asarray(values, jnp.bfloat16), make_sharding()),)


def make_plan(**copies: Any) -> StepPlan:
    return StepPlan(0, (), (), (), (), (), **copies)


def test_pages_return_as_they_were_and_no_other_is_touched() -> None:
    slots, programs = make_slots(num_slots=12)
    get = lambda kind, group: programs[kind, group]  # noqa: E731
    cache = make_cache()
    before = np.asarray(cache[0]).copy()
    saves = tuple((0, page, slot) for slot, page in enumerate(range(1, 12)))
    assert len(saves) > COPY_PAGES, "more than a program takes"
    flying = slots.start(get, cache, make_plan(page_saves=saves))
    assert flying is not None and flying.wait() == {"failed_copies": frozenset()}
    assert all(array.sharding.memory_kind == "pinned_host" for array in slots._slots.values())
    loads = tuple((0, page, slot) for slot, page in enumerate(reversed(range(1, 12))))
    flying = slots.start(get, cache, make_plan(page_loads=loads))
    assert flying is not None and flying.wait() == {"failed_copies": frozenset()}
    (after,) = slots.place(get, cache)
    expected = before.copy()
    for first in OFFSETS:
        expected[first + 1 : first + 12] = before[first + 1 : first + 12][::-1]
    np.testing.assert_array_equal(np.asarray(after), expected)
    size = 11 * len(OFFSETS) * int(np.prod(LINE)) * 2
    assert (slots._counts.bytes_saved, slots._counts.bytes_loaded) == (size, size)
    assert slots.start(get, (after,), make_plan()) is None


def test_a_copy_that_cannot_start_fails_alone() -> None:
    def copy(arrays: Any, sharding: Any) -> Any:
        if isinstance(arrays, list):
            raise RuntimeError("one of them")
        if sharding.memory_kind == "pinned_host" and len(tried := tried_pages) == 1:
            tried.append(arrays)
            raise RuntimeError("no memory")
        tried_pages.append(arrays)
        return jax.device_put(arrays, sharding)

    tried_pages: list[Any] = []
    slots, programs = make_slots(copy=copy)
    get = lambda kind, group: programs[kind, group]  # noqa: E731
    flying = slots.start(get, make_cache(), make_plan(page_saves=((0, 1, 0), (0, 2, 1), (0, 3, 2))))
    assert flying is not None and flying.wait() == {"failed_copies": {(0, 1)}}
    flying = slots.start(get, make_cache(), make_plan(page_loads=((0, 4, 0), (0, 5, 1))))
    assert flying is not None and flying.wait() == {"failed_copies": {(0, 1)}}, "its slot is empty"


def test_memory_that_cannot_be_taken_is_told() -> None:
    def copy(arrays: Any, sharding: Any) -> Any:
        raise RuntimeError("out of pinned memory")

    slots, _ = make_slots(copy=copy)
    with pytest.raises(CapacityError, match=r"kv_offloading_size: 0.00 GiB of pinned host memory could be taken"):
        slots.allocate()


def test_every_group_has_as_many_slots() -> None:
    spec = KVSpec(num_kv_heads=2, head_dim=16, page_size=8, dtype="bfloat16")
    wide = KVSpec(num_kv_heads=1, head_dim=32, page_size=8, dtype="float32")
    groups = [KVGroup((0, 2, 3), 16, PagedKV(2, 2, 16)), KVGroup((1,), None, PagedKV(2, 1, 32))]
    page = 2 * 2 * 8 * 16 * 2  # one of the first group's layers; the other group's takes twice that
    memory = plan_host_memory(10.5 * 5 * page / 2**30, [spec, wide], groups, make_sharding())
    assert memory.num_slots == 10
    assert [(shape.shape, shape.dtype) for shape in memory.pages] == [
        ((3, 4, 8, 16), jnp.bfloat16),
        ((1, 2, 8, 32), jnp.float32),
    ]
    assert memory.on_host(0).memory_kind == "pinned_host"


def test_what_fits_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_start, "host_memory_bytes", lambda: 100 * 2**30)
    require_host_room(80, 10 * 2**30)
    with pytest.raises(CapacityError, match=r"kv_offloading_size: 85 GiB are more .* 10.00 GiB are for other parts"):
        require_host_room(85, 10 * 2**30)
    with pytest.raises(CapacityError, match=r"it has 100.00 GiB; 90.00 GiB would fit"):
        require_host_room(91, 0)


def test_a_slow_tier_is_refused_with_the_figures() -> None:
    fast = TierFigures(2**17, save_seconds=4e-6, load_seconds=5e-6, prefill_seconds=30e-6)
    refuse_slow_tier(fast, 4.0)
    slow = TierFigures(2**17, save_seconds=4e-6, load_seconds=50e-6, prefill_seconds=30e-6)
    figures = "loads at 2.6 GB/s: a token is loaded in 50.00 us and computed in 30.00 us; leave it out"
    with pytest.raises(ConfigError, match=f"kv_offloading_size: cannot help here.*{figures}") as caught:
        refuse_slow_tier(slow, 4.0)
    assert caught.value.value == 4.0


def test_xlas_limit_of_pinned_memory_is_raised_unless_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
    monkeypatch.delenv(name, raising=False)
    config.allow_pinned_memory(None)
    assert name not in os.environ
    config.allow_pinned_memory(200.5)
    assert os.environ[name] == "217"
    config.allow_pinned_memory(900)
    assert os.environ[name] == "217", "the user's, for all that is known"
    monkeypatch.delenv(name)
    config.allow_pinned_memory(1)
    assert os.environ[name] == "64"


@pytest.mark.parametrize("size", [0, -1, float("nan"), float("inf")])
def test_sizes_that_are_none_are_refused(size: float) -> None:
    with pytest.raises(ConfigError, match="kv_offloading_size: must be above 0"):
        config.CacheOptions(kv_offloading_size=size)
