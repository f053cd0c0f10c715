"""The memory plan: every byte is accounted for, groups share fairly, and refusals say what would fit."""

from __future__ import annotations

import dataclasses
import re

import pytest

from jaxserve.config import EngineConfig
from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.runtime.memory import GIB, cache_budget, params_bytes, plan_cache
from jaxserve.core.runtime.startup import estimate_use, plan_pools, require_room
from jaxserve.device_kinds import DEVICE_KINDS
from jaxserve.errors import CapacityError, ConfigError
from jaxserve.families.registry import param_specs, parse_config
from jaxserve.features.choose import make_shapes
from jaxserve.presets import load_preset
from pallas_kernels import KVSpec


def load_model(name: str, max_model_len: int) -> DecoderConfig:
    return parse_config(load_preset(name) or {}).with_max_model_len(max_model_len)


def plan(model: DecoderConfig, budget: int, **changes: int | None) -> object:
    specs = [KVSpec(group.memory.num_kv_heads, group.memory.head_dim, 64, "bfloat16") for group in model.kv_groups]
    options = {"specs": specs, "max_chunk": 2048, "num_devices": 1} | changes
    return plan_cache(model, budget=budget, **options)  # type: ignore[arg-type]


def test_pools_take_the_budget_and_no_more() -> None:
    model = load_model("llama-3.1-8b", 8192)
    made = plan(model, 20 * GIB)
    assert 0.9 * 20 * GIB < made.bytes_per_device <= 20 * GIB
    tokens = (made.num_pages[0] - 1) * 64
    assert made.bytes_per_device == made.num_pages[0] * 64 * 131072  # KV bytes of a token, published for this model
    assert len(str(tokens // 64).rstrip("0")) <= 2, "pages are on the coarse grid"
    assert made.layout.offsets == tuple(layer * made.num_pages[0] for layer in range(32))
    assert plan(model, 20 * GIB, num_devices=4).num_pages[0] > 3.5 * made.num_pages[0]


def test_windowed_groups_get_what_their_windows_need() -> None:
    model = load_model("gemma-2-2b", 8192)
    made = plan(model, 8 * GIB)
    full, windowed = made.num_pages
    assert 0.7 < (windowed / full) / ((4096 + 2048) / 8192) < 1.2
    assert made.bytes_per_device <= 8 * GIB
    assert set(made.layout.groups) == {0, 1}


def test_shortage_says_which_length_fits() -> None:
    model = load_model("llama-3.1-8b", 131072)
    with pytest.raises(CapacityError, match=r"needs 16\.0\d GiB") as caught:
        plan(model, 4 * GIB)
    fitting = int(re.search(r"max_model_len=(\d+)", str(caught.value))[1])  # type: ignore[index]
    assert 32000 <= fitting < 33000
    assert plan(model.with_max_model_len(fitting), 4 * GIB).num_pages[0] * 64 >= fitting
    with pytest.raises(CapacityError):
        plan(model.with_max_model_len(fitting + 64), 4 * GIB)


def test_snapshots_give_way_before_rows_and_never_take_the_pages_of_a_text() -> None:
    config = EngineConfig.from_options(model="qwen3.6-35b-a3b", max_model_len=32768)
    shapes = make_shapes(config, load_model("qwen3.6-35b-a3b", 32768), "gpu", "NVIDIA H200")
    assert (shapes.snapshot_grid, shapes.state.max_state_copies) == (64, 512)
    each = 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    least = plan_pools(shapes, budget=0, num_pages=(32768 // 64 + 1,), num_snapshots=0).bytes_per_device
    counts = []
    for budget in (least, least + 7 * each, 40 * each, 600 * each, 10_000 * each):
        made = plan_pools(shapes, budget=budget)
        assert made.snapshot_bytes == each and made.bytes_per_device <= budget
        assert made.num_pages[0] > 32768 // 64
        counts.append(made.num_snapshots)
    assert counts == [0, 7, 20, 300, 1024]
    off = make_shapes(
        EngineConfig.from_options(model="qwen3.6-35b-a3b", enable_prefix_caching=False), shapes.model, "gpu", "H200"
    )
    assert plan_pools(off, budget=600 * each).num_snapshots == 0 and off.state.max_state_copies == 0


def test_override_fixes_the_pages() -> None:
    assert plan(load_model("llama-3.1-8b", 8192), 0, override=17).num_pages == (17,)
    assert plan(load_model("llama-3.1-8b", 8192), 900 * GIB, max_sequences=3).num_pages == (380 + 1,)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(
    ("platform", "device_kind", "impl"),
    [("gpu", "NVIDIA H200", "gpu"), ("gpu", "NVIDIA A100", "ampere"), ("tpu", "TPU v5e", "tpu")],
)
def test_deterministic_takes_the_kernels_with_fixed_splits(
    platform: str, device_kind: str, impl: str, by_name: bool
) -> None:
    model, options = load_model("llama-3.1-8b", 131072), {"attention_impl": impl} if by_name else {}
    for deterministic in (True, False):
        config = EngineConfig.from_options(model="llama-3.1-8b", deterministic=deterministic, **options)
        shapes = make_shapes(config, model, platform, device_kind)
        assert shapes.impl == impl
        assert {shape.fixed_splits for shape in shapes.attention} == {deterministic}
        if deterministic and platform == "gpu":
            assert [(bucket.tokens, bucket.rows) for bucket in shapes.buckets.buckets] == [(256, 256), (2048, 256)]


def test_a_page_table_too_large_for_a_tpu_is_refused_before_anything_is_traced() -> None:
    model = load_model("llama-3.1-8b", 129 * 128)
    config = EngineConfig.from_options(model="llama-3.1-8b", max_num_seqs=1024)
    with pytest.raises(ConfigError, match=r"max_num_seqs: .*1,024 rows of 129 pages.* 1,016 rows .* 128 pages.*'xla'"):
        make_shapes(config, model, "tpu", "TPU v5e")
    assert make_shapes(config, model, "gpu", "NVIDIA H200").impl == "gpu"
    assert make_shapes(config, load_model("llama-3.1-8b", 128 * 128), "tpu", "TPU v5e").impl == "tpu"


def test_pages_of_a_tpu_fill_its_lanes_also_without_kernels() -> None:
    """By name, and where the kernels failed their self-test. The engine may be planned on another device."""
    model, config = load_model("gpt-oss-20b", 4096), EngineConfig.from_options(model="gpt-oss-20b")
    shapes = make_shapes(config, model, "tpu", "TPU v5 lite")
    by_name = EngineConfig.from_options(model="gpt-oss-20b", attention_impl="xla")
    found = (
        shapes,
        shapes.with_impl("xla", "they failed"),
        make_shapes(by_name, model, "tpu", "TPU v5 lite"),
        make_shapes(by_name, model, "gpu", "NVIDIA H200"),
    )
    assert [each.impl for each in found] == ["tpu", "xla", "xla", "xla"]
    layouts = [{spec.layout for spec in each.specs} for each in found]
    assert layouts == [{"paired"}, {"paired"}, {"paired"}, {"plain"}]


def test_plan_of_a_device_that_is_not_here() -> None:
    model, config = load_model("llama-3.1-8b", 131072), EngineConfig()
    shapes = make_shapes(config, model, "gpu", "NVIDIA H200")
    assert shapes.impl == "gpu" and "H200" in shapes.impl_reason
    use = estimate_use(shapes)
    budget = cache_budget(DEVICE_KINDS["h200"].memory, 0.9, use)
    made = plan_pools(shapes, budget=budget)
    total = use.total + made.bytes_per_device
    assert 0.8 * 141e9 < total <= 0.9 * 141e9
    assert use.params == 2 * 8_030_261_248
    with pytest.raises(CapacityError, match=r"parameters take 14\.96 GiB"):
        cache_budget(DEVICE_KINDS["v5e"].memory, 0.9, use)


def test_what_cannot_fit_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = load_model("llama-3.1-8b", 8192), EngineConfig()
    require_room(make_shapes(config, model, "gpu", "NVIDIA H200"), 16 * GIB)
    with pytest.raises(CapacityError, match=r"^model: 15\.\d+ GiB are needed \(14\.96 GiB for .* are 12\.00 GiB"):
        require_room(make_shapes(config, model, "gpu", "NVIDIA H200"), 12 * GIB)
    monkeypatch.setattr("jaxserve.core.runtime.startup.host_memory_bytes", lambda: 16 * GIB)
    with pytest.raises(CapacityError, match=r"^model: .*, [\d.]+ GiB for kv_cache_memory_bytes\)"):
        require_room(make_shapes(config, model, "cpu", "cpu"), None)
    for name, size in (("kv_cache_memory_bytes", 8 * GIB), ("num_kv_pages_override", 1024)):  # of 8 MiB
        given = EngineConfig.from_options(**{name: size})
        with pytest.raises(CapacityError, match=rf"^model: 23\.\d+ GiB .* [78]\.\d+ GiB for {name}\)"):
            require_room(make_shapes(given, model, "gpu", "NVIDIA H200"), 20 * GIB)
    many = EngineConfig.from_options(max_num_seqs=10**6)
    with pytest.raises(CapacityError, match=r"^max_num_seqs: "):
        require_room(make_shapes(many, load_model("llama-30m", 512), "cpu", "cpu"), None)


def test_sharded_parameters_count_once_over_the_devices() -> None:
    specs = param_specs(load_model("llama-3.1-8b", 8192))
    whole, quarter = params_bytes(specs, 1), params_bytes(specs, 4)
    assert whole / 4 < quarter < whole / 4 * 1.001  # norms are on every device


def test_groups_of_other_heads_have_pools_of_their_own() -> None:
    model = load_model("llama-3.2-1b", 8192)
    wide = dataclasses.replace(model.layers[0].attention, num_kv_heads=4, head_dim=128)  # the same bytes a token
    changed = {1: (wide, 1024), 3: (wide, None), 5: (model.layers[0].attention, 1024)}
    kinds = list(model.layers)
    for index, (attention, window) in changed.items():
        kinds[index] = dataclasses.replace(kinds[index], mixer=attention, window=window)
    made = plan(dataclasses.replace(model, layers=tuple(kinds)), 4 * GIB)
    narrow, broad, windowed_broad, windowed = made.num_pages
    assert made.layout.groups[:6] == (0, 2, 0, 1, 0, 3)
    assert made.layout.pools == (0, 1, 1, 0)
    assert made.layout.offsets[:6] == (0, 0, narrow, windowed_broad, 2 * narrow, 3 * narrow)
    assert [shape[0] for shape in made.pool_shapes] == [13 * narrow + windowed, broad + windowed_broad]
    assert 0.9 * 4 * GIB < made.bytes_per_device <= 4 * GIB
