"""Canonical trees, runtime trees and single leaves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.layers.stack import get_leaf, list_stacked, set_leaf, stack_params, stack_specs, write_layer
from jaxserve.core.models.base import ParamSpec

MODES = ["unrolled", "stacked"]
NUM_LAYERS = 5


def copy_containers(tree: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(lambda leaf: leaf, tree)


def unstack(params: dict[str, Any]) -> dict[str, Any]:
    """Returns the canonical tree of a runtime tree of either form."""
    return {**params, "layers": [params["layers"][index] for index in range(NUM_LAYERS)]}


def make_tree() -> dict[str, object]:
    """Layers 1 and 3 have a bias, layer 4 a longer leaf: three groups."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape))

    layers = [{"qkv": {"weight": draw(4, 2)}, "o": draw(4 if index == 4 else 3)} for index in range(NUM_LAYERS)]
    for index in (1, 3):
        layers[index]["qkv"]["bias"] = draw(2)
    return {"embed": {"weight": draw(5, 4)}, "layers": layers, "final_norm": {"weight": jnp.ones(4)}}


def assert_trees_equal(left: object, right: object) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize("mode", MODES)
def test_round_trip(mode: str):
    tree = make_tree()
    runtime = stack_params(copy_containers(tree), mode)
    assert_trees_equal(unstack(runtime), tree)
    for index, layer in enumerate(tree["layers"]):
        assert_trees_equal(runtime["layers"][index], layer)


def test_layers_of_equal_leaves_lie_together():
    runtime = stack_params(make_tree(), "stacked")
    assert runtime["layers"].places == ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0))
    assert [len(leaf) for leaf in list_stacked(runtime)] == [2, 2, 2, 2, 2, 1, 1]
    assert len(jax.tree.leaves(runtime)) == 9
    unrolled = stack_params(make_tree(), "unrolled")
    assert len(jax.tree.leaves(unrolled)) == 14 and not list_stacked(unrolled)


@pytest.mark.parametrize("mode", MODES)
def test_specs_stack_like_their_arrays(mode: str):
    tree = make_tree()
    specs = jax.tree.map(lambda leaf: ParamSpec(leaf.shape, "float32", (None,) * leaf.ndim, "normal"), tree)
    stacked = stack_specs(specs, mode)
    shapes = jax.tree.map(lambda spec: spec.shape, stacked, is_leaf=lambda node: isinstance(node, ParamSpec))
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, stack_params(copy_containers(tree), mode))
    assert all(len(spec.axes) == len(spec.shape) for spec in jax.tree.leaves(stacked))
    if mode == "stacked":
        assert stacked["layers"].groups[0]["qkv"]["weight"].axes == ("layers", None, None)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name", ["embed.weight", "layers.0.o", "layers.2.qkv.weight", "layers.3.qkv.bias", "layers.4.o"]
)
def test_replacing_one_leaf_changes_that_leaf_only(mode: str, name: str):
    tree = make_tree()
    runtime = stack_params(copy_containers(tree), mode)
    value = jnp.full(get_leaf(tree, name)[0].shape, 7.0)
    write = jax.jit(write_layer, donate_argnums=0)
    old, index = get_leaf(runtime, name)
    new = value if index is None else write(jnp.copy(old), value, jnp.int32(index))
    changed = unstack(set_leaf(runtime, name, new))
    assert_trees_equal(changed, set_leaf(tree, name, value))
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
