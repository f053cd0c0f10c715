"""Canonical trees, runtime trees and single leaves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.stack import (
    get_leaf,
    layer_params,
    locate_leaf,
    set_leaf,
    stack_params,
    stack_specs,
    write_layer,
)
from jaxserve.models.base import ParamSpec

MODES = ["unrolled", "stacked"]


def copy_containers(tree: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(lambda leaf: leaf, tree)


def unstack(params: dict[str, Any]) -> dict[str, Any]:
    """The canonical tree of a runtime tree of either form."""
    layers = params["layers"]
    num_layers = len(layers) if isinstance(layers, list) else len(jax.tree.leaves(layers)[0])
    return {**params, "layers": [layer_params(params, index) for index in range(num_layers)]}


def make_tree() -> dict[str, object]:
    rng = np.random.default_rng(0)
    layers = [{"qkv": jnp.asarray(rng.normal(size=(4, 2))), "o": jnp.asarray(rng.normal(size=3))} for _ in range(3)]
    return {"embed": jnp.asarray(rng.normal(size=(5, 4))), "layers": layers, "final_norm": jnp.ones(4)}


def assert_trees_equal(left: object, right: object) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize("mode", MODES)
def test_round_trip(mode: str):
    tree = make_tree()
    runtime = stack_params(copy_containers(tree), mode)
    assert_trees_equal(unstack(runtime), tree)
    for index, layer in enumerate(tree["layers"]):
        assert_trees_equal(layer_params(runtime, index), layer)


def test_stacking_leaves_few_leaves():
    assert len(jax.tree.leaves(stack_params(make_tree(), "stacked"))) == 4
    assert len(jax.tree.leaves(stack_params(make_tree(), "unrolled"))) == 8


@pytest.mark.parametrize("mode", MODES)
def test_specs_stack_like_their_arrays(mode: str):
    tree = make_tree()
    specs = jax.tree.map(lambda leaf: ParamSpec(leaf.shape, "float32", (None,) * leaf.ndim, "normal"), tree)
    stacked = stack_specs(specs, mode)
    shapes = jax.tree.map(lambda spec: spec.shape, stacked, is_leaf=lambda node: isinstance(node, ParamSpec))
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, stack_params(copy_containers(tree), mode))
    assert all(len(spec.axes) == len(spec.shape) for spec in jax.tree.leaves(stacked))
    if mode == "stacked":
        assert stacked["layers"]["qkv"].axes == ("layers", None, None)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["embed", "layers.0.o", "layers.2.qkv"])
def test_replacing_one_leaf_changes_that_leaf_only(mode: str, name: str):
    tree = make_tree()
    runtime = stack_params(copy_containers(tree), mode)
    path, index = locate_leaf(name, mode)
    canonical_path, _ = locate_leaf(name, "unrolled")
    value = jnp.full(get_leaf(tree, canonical_path).shape, 7.0)
    write = jax.jit(write_layer, donate_argnums=0)
    old = get_leaf(runtime, path)
    new = value if index is None else write(jnp.copy(old), value, jnp.int32(index))
    changed = unstack(set_leaf(runtime, path, new))
    assert_trees_equal(changed, set_leaf(tree, canonical_path, value))
    assert_trees_equal(unstack(runtime), tree)


def test_writing_a_layer_is_one_program_for_all_layers():
    traces = []

    def traced(stacked: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
        traces.append(index)
        return write_layer(stacked, value, index)

    write = jax.jit(traced, donate_argnums=0)
    stacked = jnp.zeros((4, 2, 3))
    for index in range(4):
        stacked = write(stacked, jnp.full((2, 3), float(index)), jnp.int32(index))
    np.testing.assert_array_equal(stacked[:, 0, 0], [0, 1, 2, 3])
    assert len(traces) == 1
