"""Replaces parameters of the runtime tree without a compilation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.layers.stack import get_leaf, list_stacked, set_leaf, write_layer
from jaxserve.runtime.protocol import ParamUpdates
from jaxserve.sharding import send
from jaxserve.weights import place_parameter


class WeightWriter:
    """Replaces leaves of a runtime tree, one at a time.

    Stacked leaves are written in place by programs that are compiled here, so that no update compiles anything.
    """

    def __init__(self, params: Mapping[str, Any]) -> None:
        self._programs: dict[tuple[tuple[int, ...], str, jax.sharding.Sharding], Any] = {}
        for leaf in list_stacked(params):
            self._programs.setdefault(_kind(leaf), _compile_write(leaf))

    def write(self, params: dict[str, Any], updates: ParamUpdates) -> dict[str, Any]:
        """Returns the tree with `updates` (canonical dotted name, array); `params` must not be used afterwards.

        A value takes the dtype of the leaf it replaces. Values are copied: the caller may donate its arrays later, to a
        training step for example.
        """
        for name, value in updates.items():
            old, index = get_leaf(params, name)
            if index is None:
                new = place_parameter(value, old.dtype, old.sharding, name=name)
            else:
                program = self._programs[_kind(old)]
                value_sharding, index_sharding = program.input_shardings[0][1:]
                place = send(np.int32(index), index_sharding)
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
