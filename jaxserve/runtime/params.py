"""Fills the runtime tree of parameters, and replaces them without a compilation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.layers.stack import LayerStack, get_leaf, list_stacked, set_leaf, write_layer
from jaxserve.runtime.protocol import ParamUpdates
from jaxserve.runtime.quantizer import WeightQuantizer
from jaxserve.sharding import AxisRules, send
from jaxserve.weights import make_dummy_params, place_parameter


class WeightWriter:
    """Replaces leaves of a runtime tree, one at a time.

    Stacked leaves are written in place by programs that are compiled here, so that no update compiles anything. What a
    `quantizer` splits is written in its parts.
    """

    def __init__(self, params: Mapping[str, Any], quantizer: WeightQuantizer) -> None:
        self._quantizer = quantizer
        self._programs: dict[tuple[tuple[int, ...], str, jax.sharding.Sharding], Any] = {}
        for leaf in list_stacked(params):
            self._programs.setdefault(_kind(leaf), _compile_write(leaf))

    def write(self, params: dict[str, Any], updates: ParamUpdates) -> dict[str, Any]:
        """Returns the tree with `updates` (canonical dotted name, array); `params` must not be used afterwards.

        A value takes the dtype of the leaf it replaces. Values are copied: the caller may donate its arrays later, to a
        training step for example.
        """
        for name, value in self._list_parts(updates):
            old, index = get_leaf(params, name)
            if index is None:
                new = place_parameter(value, old.dtype, old.sharding, name=name)
            else:
                value_sharding = self._programs[_kind(old)].input_shardings[0][1]
                new = self.write_layer(old, index, place_parameter(value, old.dtype, value_sharding, name=name))
            params = set_leaf(params, name, new)
        return params

    def _list_parts(self, updates: ParamUpdates) -> Iterator[tuple[str, Any]]:
        for name, value in updates.items():
            yield from self._quantizer.split(name, value).items()

    def write_layer(self, stacked: jax.Array, index: int, value: jax.Array) -> jax.Array:
        """Returns a stack [L, ...], which must not be used afterwards, with layer `index` replaced by `value` [...]."""
        program = self._programs[_kind(stacked)]
        return program(stacked, value, send(np.int32(index), program.input_shardings[0][2]))


def fill_params(
    specs: Mapping[str, Any],
    stream: Iterable[tuple[str, jax.Array]],
    quantizer: WeightQuantizer,
    *,
    mesh: Mesh,
    rules: AxisRules,
) -> dict[str, Any]:
    """Returns the runtime tree of `specs` (stack_specs) with the arrays of `stream`: (canonical dotted name, array).

    Stacks are made once and filled in place, so devices hold the model and one parameter of one layer at most. Stacking
    afterwards would hold a leaf of all layers twice, and the experts are most of a model.
    """
    layers = specs["layers"]
    if isinstance(layers, LayerStack):
        empty = jax.tree.map(lambda spec: dataclasses.replace(spec, init="zeros"), layers)
        layers = make_dummy_params(empty, mesh=mesh, rules=rules, seed=0)
    params = {**specs, "layers": layers}
    writer = WeightWriter(params, quantizer)
    for whole, matrix in stream:
        for name, array in quantizer.split(whole, matrix).items():
            old, index = get_leaf(params, name)
            params = set_leaf(params, name, array if index is None else writer.write_layer(old, index, array))
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
    stacked = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.format)
    jitted = jax.jit(write_layer, donate_argnums=0, out_shardings=leaf.format)
    return jitted.lower(stacked, value, index).compile()
