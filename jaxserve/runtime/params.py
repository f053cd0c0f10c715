"""Parameters as the programs take them, and how new values replace them without a compilation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.layers.stack import StackMode, get_leaf, locate_leaf, set_leaf, write_layer


def to_runtime(params: dict[str, Any], mode: StackMode) -> dict[str, Any]:
    """Turns a canonical tree into the runtime tree, emptying it: stacking holds one leaf twice, not the model."""
    if mode == "unrolled":
        return params
    layers = params["layers"]
    stacked = {name: jnp.stack([layer.pop(name) for layer in layers]) for name in list(layers[0])}
    return {**params, "layers": stacked}


class WeightWriter:
    """Replaces leaves of a runtime tree, one at a time, each as soon as it has arrived on the device.

    A stacked leaf is written in place by a program that is compiled here, so that no update compiles anything.
    """

    def __init__(self, params: Mapping[str, Any], mode: StackMode) -> None:
        self._mode = mode
        self._programs: dict[tuple[tuple[int, ...], str, jax.sharding.Sharding], Any] = {}
        if mode == "stacked":
            for leaf in jax.tree.leaves(params["layers"]):
                self._programs.setdefault(_kind(leaf), _compile_write(leaf))

    def write(self, params: dict[str, Any], canonical: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the tree with the leaves of a canonical tree in place of the old ones, which must not be used again.

        A leaf takes the dtype of the one it replaces. The caller keeps his arrays: whatever he does with them later,
        donating them to a training step included, does not reach the engine.
        """
        for key_path, value in jax.tree_util.tree_leaves_with_path(canonical):
            name = jax.tree_util.keystr(key_path, simple=True, separator=".")
            path, layer = locate_leaf(name, self._mode)
            old = get_leaf(params, path)
            if layer is None:
                new = _place(value, old.dtype, old.sharding)
            else:
                program = self._programs[_kind(old)]
                value_sharding, index_sharding = program.input_shardings[0][1:]
                index = jax.device_put(np.int32(layer), index_sharding)
                new = program(old, _place(value, old.dtype, value_sharding), index)
            params = set_leaf(params, path, new)
        return params


def _place(value: Any, dtype: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Copies a leaf to the device; a cast happens on the host, because on the device it would be a new program."""
    if isinstance(value, jax.Array) and value.dtype == dtype:
        return jax.device_put(value, sharding, may_alias=False)
    return jax.device_put(np.array(jax.device_get(value), dtype=dtype), sharding)


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
