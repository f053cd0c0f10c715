"""The order of a mesh's devices, and of a parameter's numbers on each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh

from jaxserve.core import sharding
from jaxserve.core.layers.stack import stack_params, stack_specs
from jaxserve.core.models.base import ParamSpec
from jaxserve.core.runtime.memory import params_bytes
from jaxserve.core.sharding import DEFAULT_RULES, TENSOR_AXIS, WHOLE_STACK, make_mesh
from jaxserve.core.weights import make_dummy_params


@pytest.fixture
def devices() -> list[Any]:
    """Four TPUs of two nodes, which JAX lists in turns."""
    return [SimpleNamespace(platform="tpu", process_index=number % 2, id=number) for number in range(4)]


def test_the_interconnect_decides_and_nodes_stay_together(monkeypatch: pytest.MonkeyPatch, devices: list[Any]) -> None:
    monkeypatch.setattr(sharding.mesh_utils, "create_device_mesh", lambda shape, given: np.array(given[::-1]))
    assert [device.id for device in sharding._order_devices(devices)] == [3, 1, 2, 0]


@pytest.mark.parametrize("error", [ValueError, NotImplementedError, AssertionError])
def test_nodes_stay_together_in_a_slice_without_an_order(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, devices: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Any:
        raise error("a part of a slice")

    monkeypatch.setattr(sharding.mesh_utils, "create_device_mesh", refuse)
    assert [device.id for device in sharding._order_devices(devices)] == [0, 2, 1, 3]
    assert "far apart: a part of a slice" in caplog.text


@pytest.mark.parametrize(("count", "order"), [(6, [0, 2, 4, 1, 3, 5]), (5, [0, 1, 2, 3, 4])], ids=["box", "hole"])
def test_what_jax_makes_of_a_part_of_a_slice(count: int, order: list[int], caplog: pytest.LogCaptureFixture) -> None:
    common = {"platform": "tpu", "device_kind": "TPU v5 lite", "process_index": 0, "core_on_chip": 0}
    devices: list[Any] = [
        SimpleNamespace(id=number, coords=(number % 2, number // 2, 0), **common) for number in range(count)
    ]
    assert [device.id for device in sharding._order_devices(devices)] == order
    assert ("far apart" in caplog.text) == (count == 5)


STACK, WHOLE = ("layers", None, None), (WHOLE_STACK, None, None)


@pytest.mark.parametrize(("columns", "is_ordered"), [(128, True), (2880, True), (96, False), (130, False), (1, False)])
def test_stacks_of_kernels_lie_row_by_row_unless_a_tpu_would_pad_them_much(columns: int, is_ordered: bool) -> None:
    placement = DEFAULT_RULES.placement(make_mesh(1), WHOLE, (4, 64, columns))
    assert isinstance(placement, Format) is is_ordered
    if is_ordered:
        assert placement.layout.major_to_minor == (0, 1, 2)


def test_other_parameters_and_meshes_without_devices_keep_xlas_order() -> None:
    assert not isinstance(DEFAULT_RULES.placement(make_mesh(1), (None, None), (64, 128)), Format)
    assert not isinstance(DEFAULT_RULES.placement(make_mesh(1), STACK, (4, 64, 2880)), Format)
    mesh = AbstractMesh((2,), (TENSOR_AXIS,))
    assert not isinstance(DEFAULT_RULES.placement(mesh, WHOLE, (4, 64, 128)), Format)


def test_only_stacks_that_kernels_read_whole_are_ordered() -> None:
    """Products of XLA's would copy those of rows that a TPU pads: all layers, in every step."""
    layer = {name: {"weight": ParamSpec((8, 2880), "float32", (None, None), "normal")} for name in ("experts", "o")}
    (group,) = stack_specs({"layers": [layer, layer]}, "stacked")["layers"].groups
    placed = {
        name: DEFAULT_RULES.placement(make_mesh(1), leaf["weight"].axes, leaf["weight"].shape)
        for name, leaf in group.items()
    }
    assert isinstance(placed["experts"], Format) and not isinstance(placed["o"], Format)


def test_stacks_are_made_in_the_order_that_programs_expect() -> None:
    placement = DEFAULT_RULES.placement(make_mesh(1), WHOLE, (2, 8, 2880))
    specs = {"stack": ParamSpec((2, 8, 2880), "float32", WHOLE, "normal")}
    made = make_dummy_params(specs, mesh=make_mesh(1), rules=DEFAULT_RULES, seed=0)["stack"]
    alone = [
        {"experts": {"w": jax.device_put(jnp.zeros((8, 2880)), DEFAULT_RULES.sharding(make_mesh(1), (None, None)))}}
        for _ in range(2)
    ]
    joined = stack_params({"layers": alone}, "stacked")["layers"].groups[0]["experts"]["w"]
    for array in (made, joined):
        assert array.format.layout.major_to_minor == placement.layout.major_to_minor
        jax.jit(lambda x: x.sum(), in_shardings=placement)(array)


@pytest.mark.parametrize(("columns", "padded"), [(2880, 2944), (96, 96), (256, 256)])
def test_rows_that_a_tpu_pads_are_counted(columns: int, padded: int) -> None:
    specs = {"w": ParamSpec((8, 2 * columns), "bfloat16", (None, "ffn"), "normal")}
    assert params_bytes(specs, 2, "tpu") == 8 * padded * 2
    assert params_bytes(specs, 2, "gpu") == params_bytes(specs, 2) == 8 * columns * 2
