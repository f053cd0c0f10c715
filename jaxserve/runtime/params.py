"""Parameters as the programs take them, and how new values replace them without a compilation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.layers.stack import get_leaf, list_stacked, set_leaf, write_layer
from jaxserve.weights import place_parameter


class WeightWriter:
    """Replaces leaves of a runtime tree, one at a time, each as soon as it has arrived on the device.

    A stacked leaf is written in place by a program that is compiled here, so that no update compiles anything.
    """

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._programs: dict[tuple[tuple[int, ...], str, jax.sharding.Sharding], Any] = {}
        for leaf in list_stacked(params):
            self._programs.setdefault(_kind(leaf), _compile_write(leaf))

    def write(self, params: dict[str, Any], updates: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the tree with canonical leaves (dotted name -> array) in place of the old ones, now not to be used.

        A leaf takes the dtype of the one it replaces. The caller keeps his arrays: whatever he does with them later,
        donating them to a training step included, does not reach the engine.
        """
        for name, value in updates.items():
            old, index = get_leaf(params, name)
            if index is None:
                new = place_parameter(value, old.dtype, old.sharding, name=name)
            else:
                program = self._programs[_kind(old)]
                value_sharding, index_sharding = program.input_shardings[0][1:]
                place = jax.device_put(np.int32(index), index_sharding)
                new = program(old, place_parameter(value, old.dtype, value_sharding, name=name), place)
            params = set_leaf(params, name, new)
        return params


def _kind(leaf: jax.Array) -> tuple[tuple[int, ...], str, jax.sharding.Sharding]:
    return leaf.shape, str(leaf.dtype), leaf.sharding


def _compile_write(leaf: jax.Array) -> Any:
    sharding = leaf.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = jax.sharding.PartitionSpec(*sharding.spec[1:])
        slice_sharding = jax.sharding.NamedSharding(sharding.mesh, spec)
        replicated = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    else:
        slice_sharding = replicated = sharding
    value = jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=slice_sharding)
    index = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    stacked = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    jitted = jax.jit(write_layer, donate_argnums=0, out_shardings=sharding)
    return jitted.lower(stacked, value, index).compile()
