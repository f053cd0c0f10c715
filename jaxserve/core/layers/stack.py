"""The layout of parameters at run time, which only this module knows.

Canonical trees (files, checkpoints, `update_weights`) hold one dictionary per layer:
`{"embed": ..., "layers": [{"qkv": {"weight": ...}, ...}, ...], ...}`. At run time they are either

- "unrolled": the same tree. For CPUs, where a slice of a stacked array is copied each step, and for GPUs, where it
  makes a kernel of its own of each layer's product.
- "stacked": `layers` is a `LayerStack`, in which layers of equal leaves are stacked. For TPUs: slices at static
  indices are free there, and a dispatch with few leaves takes a few microseconds instead of hundreds.

Either way `tree["layers"][i]` holds the leaves of layer i. The functions take trees of arrays and of parameter specs.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.core.sharding import WHOLE_STACK, order_rows

KEPT_WHOLE = frozenset({"experts"})
"""Leaves of a layer that stay in their stack: kernels read them there, and a TPU would copy a slice for a kernel."""

StackMode = Literal["unrolled", "stacked"]
Tree = Mapping[str, Any]


@flax.struct.dataclass
class InStack:
    """One layer's array, at `index` of a stack [L, ...]."""

    stack: jax.Array
    index: int = flax.struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the layer's array."""
        return self.stack.shape[1:]


def unstack(leaf: jax.Array | InStack) -> jax.Array:
    """Returns one layer's array."""
    return leaf.stack[leaf.index] if isinstance(leaf, InStack) else leaf


@flax.struct.dataclass
class LayerStack:
    """Groups of layers with equal leaves, each stacked [L, ...]; `places` has each layer's group and index there."""

    groups: tuple[Any, ...]
    places: tuple[tuple[int, int], ...] = flax.struct.field(pytree_node=False)

    def __getitem__(self, layer: int) -> dict[str, Any]:
        """Returns the leaves of one layer; those of `KEPT_WHOLE` as `InStack`."""
        group, index = self.places[layer]
        taken = {}
        for name, leaf in self.groups[group].items():
            take = partial(InStack, index=index) if name in KEPT_WHOLE else operator.itemgetter(index)
            taken[name] = jax.tree.map(take, leaf)
        return taken


Layers = Sequence[Tree] | LayerStack
"""The layers of a runtime tree."""


def fold_layers[C](layers: Layers, first: int, end: int, run: Callable[[Tree, C], C], carry: C) -> C:
    """Returns what `run` makes of `carry` in layers `first` to `end` - 1, one after another, each given its leaves.

    Stacked layers, which must then have equal leaves, run in a loop of the program: it holds `run` once.
    """
    if isinstance(layers, LayerStack):
        (group,) = layers.groups

        def run_at(index: jax.Array, carry: C) -> C:
            return run(jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), group), carry)

        return lax.fori_loop(first, end, run_at, carry)
    for leaves in layers[first:end]:
        carry = run(leaves, carry)
    return carry


def stack_params(params: dict[str, Any], mode: StackMode) -> dict[str, Any]:
    """Returns the runtime tree of a canonical tree of arrays.

    Stacking empties the canonical layers on the way, so that only one leaf is in memory twice, never the whole model.
    """
    if mode == "unrolled":
        return params
    places = _place_layers(params["layers"])
    groups = []
    for members in _gather(params["layers"], places):
        names = list(members[0])
        groups.append({name: _stack_leaf([each.pop(name) for each in members], name in KEPT_WHOLE) for name in names})
    return {**params, "layers": LayerStack(tuple(groups), places)}


def stack_specs(specs: Tree, mode: StackMode) -> Tree:
    """Returns the runtime tree of a canonical tree of parameter specs (a layer axis leads `shape`, `axes`)."""
    if mode == "unrolled":
        return dict(specs)

    def stack(count: int, axis: str, spec: Any) -> Any:
        return dataclasses.replace(spec, shape=(count, *spec.shape), axes=(axis, *spec.axes))

    def stack_layer(count: int, leaves: Tree) -> Tree:
        axes = {name: WHOLE_STACK if name in KEPT_WHOLE else "layers" for name in leaves}
        return {name: jax.tree.map(partial(stack, count, axes[name]), leaf) for name, leaf in leaves.items()}

    places = _place_layers(specs["layers"])
    groups = (stack_layer(len(members), members[0]) for members in _gather(specs["layers"], places))
    return {**specs, "layers": LayerStack(tuple(groups), places)}


def get_leaf(params: Tree, name: str) -> tuple[Any, int | None]:
    """Returns the runtime leaf that holds a canonical one ("layers.3.qkv.weight"), and its index in a stack.

    Raises:
        KeyError, IndexError, ValueError: there is no such leaf.
    """
    top, *path = name.split(".")
    if top != "layers":
        return _get(params[top], path), None
    layers, layer = params["layers"], int(path[0])
    if isinstance(layers, LayerStack):
        group, index = layers.places[layer]
        return _get(layers.groups[group], path[1:]), index
    return _get(layers[layer], path[1:]), None


def set_leaf(params: Tree, name: str, value: Any) -> dict[str, Any]:
    """Returns the runtime tree with another value for the leaf of `get_leaf`; copies only the containers around it."""
    top, *path = name.split(".")
    if top != "layers":
        return {**params, top: _set(params[top], path, value)}
    layers, layer = params["layers"], int(path[0])
    if not isinstance(layers, LayerStack):
        return {**params, "layers": _set_at(layers, layer, path[1:], value)}
    groups = _set_at(layers.groups, layers.places[layer][0], path[1:], value)
    return {**params, "layers": LayerStack(tuple(groups), layers.places)}


def list_stacked(params: Tree) -> list[Any]:
    """Returns the runtime leaves that hold several layers."""
    layers = params["layers"]
    return jax.tree.leaves(layers) if isinstance(layers, LayerStack) else []


def write_layer(
    stacked: jax.Array, value: jax.Array, index: jax.Array, piece: jax.Array | int = 0, *, axis: int = 0
) -> jax.Array:
    """Returns `stacked` [L, ...] with layer `index` replaced by `value` [...], or one of its pieces along `axis`.

    All pieces have the size of `value`. `index` and `piece` may be traced: jitted with `stacked` donated, this is one
    program per shape of leaf and value, and runs in place.
    """
    starts = [piece * value.shape[axis] if each == axis else 0 for each in range(value.ndim)]
    return lax.dynamic_update_slice(stacked, value.astype(stacked.dtype)[None], (index, *starts))


def _place_layers(layers: Sequence[Tree]) -> tuple[tuple[int, int], ...]:
    """Returns the group of each layer, by first appearance, and its index there."""
    members: dict[object, int] = {}
    order: dict[object, int] = {}
    places = []
    for layer in layers:
        leaves, structure = jax.tree.flatten(layer)
        kind = structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
        places.append((order.setdefault(kind, len(order)), members.setdefault(kind, 0)))
        members[kind] += 1
    return tuple(places)


def _gather(layers: Sequence[Any], places: Sequence[tuple[int, int]]) -> list[list[Any]]:
    groups: list[list[Any]] = [[] for _ in range(1 + max(group for group, _ in places))]
    for layer, (group, _) in zip(layers, places, strict=True):
        groups[group].append(layer)
    return groups


def _stack_leaf(members: list[Any], is_whole: bool) -> Any:
    """Returns a leaf of several layers as one, in the order of `AxisRules.placement`; a dictionary is emptied.

    `is_whole`: kernels read it in its stack.
    """
    if isinstance(members[0], dict):
        names = list(members[0])
        return {name: _stack_leaf([member.pop(name) for member in members], is_whole) for name in names}
    sharding = members[0].sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))
    placement = order_rows(sharding, (len(members), *members[0].shape)) if is_whole else sharding
    return jax.jit(jnp.stack, out_shardings=placement)(members)


def _get(tree: Any, path: Sequence[str]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _set(tree: Any, path: Sequence[str], value: Any) -> Any:
    return {**tree, path[0]: _set(tree[path[0]], path[1:], value)} if path else value


def _set_at(trees: Sequence[Any], place: int, path: Sequence[str], value: Any) -> list[Any]:
    return [_set(tree, path, value) if index == place else tree for index, tree in enumerate(trees)]
