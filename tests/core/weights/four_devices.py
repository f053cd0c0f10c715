"""Tests that need four devices: `test_four_devices.py` runs them in a process whose CPU pretends to be four."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxserve.core.layers.stack import StackMode, stack_params, stack_specs
from jaxserve.core.models.decoder import fit_devices
from jaxserve.core.runtime.converter import WeightConverter
from jaxserve.core.runtime.params import fill_params
from jaxserve.core.sharding import DEFAULT_RULES, make_mesh
from jaxserve.core.weights import (
    load_safetensors,
    make_dummy_params,
    pieces,
    place_parameter,
    read_hf_config,
    restore_params,
    save_params,
    stream_pieces,
)
from jaxserve.core.weights.paths import flatten_specs
from jaxserve.families.registry import ignored_weights, param_specs, parse_config, weight_sources
from tests.core.weights.checkpoints import (
    expected_params,
    flatten_arrays,
    make_sources,
    make_specs,
    make_tensors,
    split_shards,
    write_shards,
)
from tests.golden_cases import GOLDENS

SPECS = make_specs("bfloat16")
FLAT = flatten_specs(SPECS)[0]


def mesh_of(size: int) -> Mesh:
    assert len(jax.devices()) == 4
    return make_mesh(size)


def make_dummy(size: int) -> Any:
    return make_dummy_params(SPECS, mesh=mesh_of(size), rules=DEFAULT_RULES, seed=5)


def assert_placed(params: Any, size: int) -> None:
    """Every leaf has the sharding its axes ask for, and each device holds its own part only."""
    mesh = mesh_of(size)
    for (name, spec), leaf in zip(FLAT.items(), jax.tree.leaves(params), strict=True):
        assert leaf.sharding.is_equivalent_to(DEFAULT_RULES.sharding(mesh, spec.axes), leaf.ndim), name
        split = 1 if spec.axes == (None,) else size
        assert {shard.data.size * split for shard in leaf.addressable_shards} == {leaf.size}
        assert len(leaf.addressable_shards) == size


def assert_equal(first: Any, second: Any) -> None:
    second = flatten_arrays(second)
    for name, value in flatten_arrays(first).items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_load(tmp_path: Path, size: int) -> None:
    tensors = make_tensors(np.float16)
    write_shards(tmp_path, split_shards(tensors))
    params = load_safetensors(tmp_path, SPECS, make_sources(), mesh=mesh_of(size), rules=DEFAULT_RULES)
    assert_placed(params, size)
    for name, value in expected_params(tensors, FLAT["embed"].dtype).items():
        np.testing.assert_array_equal(flatten_arrays(params)[name], value, err_msg=name)


@pytest.mark.parametrize("mode", ["stacked", "unrolled"])
@pytest.mark.parametrize("by_expert", [True, False])
def test_experts_in_pieces(mode: StackMode, by_expert: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device reads one of its own experts at a time, or its slice of one."""
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", 1)
    folder = GOLDENS / "qwen2_moe"
    config = fit_devices(parse_config(read_hf_config(folder)), 4, expert_parallel=by_expert)
    specs, options = param_specs(config), {"mesh": mesh_of(4), "rules": DEFAULT_RULES}
    arguments = folder, specs, weight_sources(config), ignored_weights(config)
    expected = stack_params(load_safetensors(*arguments, **options), mode)
    found = list(stream_pieces(*arguments, **options))
    assert {piece.count for piece in found if ".experts." in piece.name} == {2 if by_expert else 8}
    filled = fill_params(stack_specs(specs, mode), found, WeightConverter(config, **options), **options)
    for leaf, wanted in zip(jax.tree.leaves(filled), jax.tree.leaves(expected), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, wanted.ndim)
        np.testing.assert_array_equal(leaf, wanted)


@pytest.mark.parametrize(("saved", "restored"), [(1, 4), (4, 1), (2, 4), (4, 4)])
def test_orbax_onto_another_mesh(tmp_path: Path, saved: int, restored: int) -> None:
    save_params(tmp_path, make_dummy(saved), {})
    params = restore_params(tmp_path, SPECS, mesh=mesh_of(restored), rules=DEFAULT_RULES)
    assert_placed(params, restored)
    assert_equal(params, make_dummy(saved))


def test_dummy_does_not_depend_on_the_mesh() -> None:
    assert_placed(make_dummy(4), 4)
    assert_equal(make_dummy(4), make_dummy(1))


@pytest.mark.parametrize("axes", [(None, None), ("vocab", None), (None, "vocab")])
def test_place_parameter_reshards(axes: tuple[str | None, ...]) -> None:
    """From any sharding to ours, without a compilation."""
    value = np.arange(16.0 * 8, dtype=np.float32).reshape(16, 8)
    theirs = jax.device_put(value, DEFAULT_RULES.sharding(mesh_of(4), axes))
    small = jax.device_put(value, jax.devices()[3])
    ours = DEFAULT_RULES.sharding(mesh_of(4), ("vocab", None))
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if "compile" in event else None
    )
    for given in (theirs, small, value):
        for dtype in ("float32", "bfloat16"):
            placed = place_parameter(given, dtype, ours, name="w")
            assert placed.sharding.is_equivalent_to(ours, 2) and str(placed.dtype) == dtype
            np.testing.assert_array_equal(np.asarray(placed), value)
            placed.delete()
            np.testing.assert_array_equal(np.asarray(given), value)  # theirs is untouched
    assert compiled == []
