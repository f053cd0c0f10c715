"""Logical axes and the mesh."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec

from jaxserve.core.sharding import DEFAULT_RULES, KV_POOL_AXES, TENSOR_AXIS, AxisRules, make_mesh
from jaxserve.errors import ConfigError


def test_axes_become_partitions():
    assert DEFAULT_RULES.spec((None, "kv_heads", None)) == PartitionSpec(None, TENSOR_AXIS, None)
    assert DEFAULT_RULES.spec(("layers", "vocab")) == PartitionSpec(None, TENSOR_AXIS)
    assert DEFAULT_RULES.spec(KV_POOL_AXES) == PartitionSpec(None, TENSOR_AXIS, None, None)


def test_two_axes_on_one_mesh_axis_are_rejected():
    with pytest.raises(ValueError, match="same mesh axis"):
        DEFAULT_RULES.spec(("heads", "ffn"))


def test_unknown_axes_are_rejected():
    with pytest.raises(ValueError, match="'lanes'"):
        DEFAULT_RULES.spec(("lanes",))


def test_other_rules_replicate():
    assert AxisRules((("ffn", None),)).spec(("ffn", "ffn")) == PartitionSpec(None, None)


def test_sharding_is_on_the_mesh():
    mesh = make_mesh(1)
    assert mesh.axis_names == (TENSOR_AXIS,) and mesh.devices.shape == (1,)
    sharding = DEFAULT_RULES.sharding(mesh, ("vocab", None))
    assert sharding.mesh == mesh and sharding.spec == PartitionSpec(TENSOR_AXIS, None)


@pytest.mark.parametrize("size", [0, -1, 65])
def test_too_few_devices_are_an_error_of_the_option(size: int):
    with pytest.raises(ConfigError, match="tensor_parallel_size") as caught:
        make_mesh(size, jax.devices()[:1])
    assert caught.value.field == "tensor_parallel_size" and caught.value.value == size
